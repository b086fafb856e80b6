"""Checks that every backend makes of its operations on pairs."""

from collections.abc import Sequence
from typing import Any

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.check import check_count, check_float, check_outputs, dtype_name, read_as
from dpcore.spec.memory import check_in_place, check_place
from dpcore.spec.pair_ops import LinearPairs
from dpcore.spec.validate import number, positive


def check_layers(layers: Sequence[LinearPairs[Any]], scales: Sequence[Any] | None) -> None:
    """Refuse layers that `check_linear` does, that are not of one B, and scales that are not (q p,)."""
    if not layers:
        raise ArgumentError("layers=[]: must have at least one layer")
    for index, layer in enumerate(layers):
        check_linear(layer.inputs, layer.gradients, layer.point_weights, f"layers[{index}].")
        shape, examples = tuple(layer.inputs[0].shape), layers[0].inputs[0].shape[0]
        if shape[0] != examples:
            raise ArgumentError(
                f"layers[{index}].inputs[0].shape={shape}: must be of {examples} examples, as layers[0]"
            )
    if scales is not None:
        check_count("scales", scales, len(layers), "one for each layer")
        for index, (layer, scale) in enumerate(zip(layers, scales, strict=True)):
            if scale is not None:
                check_float(f"scales[{index}]", scale, None, (coordinates_of(layer),))


def check_linear(
    inputs: Sequence[Any], gradients: Sequence[Any], point_weights: Sequence[float], where: str = ""
) -> None:
    """Refuse parts that are not (B, T_j, p) and (B, T_j, q) of one dtype; `where` is put before names."""
    _parts(f"{where}inputs", inputs, point_weights)
    check_count(f"{where}gradients", gradients, len(inputs), "one for each part")
    _parts(f"{where}gradients", gradients, point_weights)
    for index, (rows, others) in enumerate(zip(inputs, gradients, strict=True)):
        shape = (*rows.shape[:2], others.shape[2])
        check_float(f"{where}gradients[{index}]", others, read_as(inputs[0]), shape, halves=True)


def coordinates_of(layer: LinearPairs[Any]) -> int:
    """Return q p."""
    return int(layer.gradients[0].shape[2]) * int(layer.inputs[0].shape[2])


def check_embedding(
    indices: Sequence[Any], gradients: Sequence[Any], point_weights: Sequence[float], size: int, scale: Any = None
) -> None:
    """Refuse parts that are not (B, T_j) of int64 and (B, T_j, q), and rows beyond the table."""
    _parts("gradients", gradients, point_weights)
    check_count("indices", indices, len(gradients), "one for each part")
    for index, (rows, others) in enumerate(zip(indices, gradients, strict=True)):
        name = f"indices[{index}]"
        if not hasattr(rows, "dtype") or dtype_name(rows) != "int64":
            raise ArgumentTypeError(f"{name}: must be an int64 array of the active backend")
        if tuple(rows.shape) != tuple(others.shape[:2]):
            raise ArgumentError(f"{name}.shape={tuple(rows.shape)}: must be {tuple(others.shape[:2])}")
        # A GPU would have to be waited for: there the kernels leave such rows out.
        if 0 not in tuple(rows.shape) and not getattr(rows, "is_cuda", False) and int(rows.max()) >= size:
            raise ArgumentError(f"{name}: must be below size={size}, the number of rows of the table")
    if scale is not None:
        check_float("scale", scale, None, (size * gradients[0].shape[2],))


def check_tied(token_gradients: Sequence[Any], inputs: Sequence[Any], gradients: Sequence[Any], size: int) -> None:
    """Refuse two uses, each checked by itself, that are not of one matrix and one batch."""
    for index, part in enumerate(inputs):
        shape = (token_gradients[0].shape[0], part.shape[1], token_gradients[0].shape[2])
        check_float(f"inputs[{index}]", part, read_as(token_gradients[0]), shape, halves=True)
        check_float(f"gradients[{index}]", gradients[index], None, (*shape[:2], size), halves=True)


def check_tied_rows(token_gradients: Sequence[Any], rows: Any, size: int) -> None:
    """Refuse rows that are not those of a matrix (size, p) and of the table's batch."""
    shape = token_gradients[0].shape[0], size * token_gradients[0].shape[2]
    check_float("rows", rows, read_as(token_gradients[0]), shape, halves=True)


def check_sums(
    layers: Sequence[LinearPairs[Any]], weights: Sequence[Any], out: Sequence[Any], longest: Sequence[float] | None
) -> None:
    """Refuse weights that are not (B,), outputs that are not contiguous (q p,) of float64, and bounds of 0 or less."""
    sizes = [coordinates_of(layer) for layer in layers]
    check_outputs(int(layers[0].inputs[0].shape[0]), sizes, weights, out, "one for each layer")
    if longest is not None:
        check_count("longest", longest, len(layers), "one for each layer")
        for bound in longest:
            positive(longest=bound)


def check_sum(examples: int, coordinates: int, weights: Any, out: Any) -> None:
    """Refuse weights that are not (B,) and an output that is not a contiguous (d,) of float64."""
    check_float("weights", weights, "float64", (examples,))
    check_float("out", out, "float64", (coordinates,))
    check_in_place("out", out)
    check_place([("out", out)], [("weights", weights)])


def _parts(name: str, parts: Sequence[Any], weights: Sequence[float]) -> None:
    """Refuse parts that are not J >= 1 arrays (B, T_j, n) of one dtype, B and n, or weights that are not J numbers."""
    if not parts:
        raise ArgumentError(f"{name}=[]: must have at least one part")
    check_count("point_weights", weights, len(parts), "one for each part")
    for index, part in enumerate(parts):
        check_float(f"{name}[{index}]", part, read_as(parts[0]) if index else None, halves=True)
        if len(part.shape) != 3:
            raise ArgumentError(f"{name}[{index}].shape={tuple(part.shape)}: must have three axes, example, time, unit")
        check_float(f"{name}[{index}]", part, None, (parts[0].shape[0], part.shape[1], parts[0].shape[2]), halves=True)
        number(point_weight=weights[index])
