"""Many linear layers at once: each layer's bits are those that it has alone, and the launches do not grow with them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import assert_agree, floats

pytest.importorskip("triton")

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.backends import load_backend
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import Block, Linear, Rows
from dpcore.stages.clipping.clip import Grouping
from dpcore.stages.clipping.clipped_sum import add_clipped, add_sums
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BACKENDS = ("numpy", "torch", "triton")
# By tiles, by inner products, of one position, with a scale; of several parts, tiles and blocks; of nothing.
FORMS: dict[str, tuple[list[int], int, int, dict[str, bool]]] = {
    "tiles": ([18], 33, 34, {}), "several parts": ([3, 9], 3, 5, {}), "few": ([2, 1], 16, 4, {}),
    "inner products": ([17, 3], 5, 33, {"gram": True}), "one": ([1], 33, 2, {}), "another one": ([1], 4, 40, {}),
    "scale": ([2], 34, 5, {"scaled": True}), "one with a scale": ([1], 3, 3, {"scaled": True}),
    "scale and inner products": ([17], 4, 3, {"scaled": True, "gram": True}), "exact": ([2, 2], 3, 4, {"exact": True}),
    "no time": ([0], 3, 2, {}), "no width": ([2], 0, 3, {}),
}  # fmt: skip


class Given(NamedTuple):
    """A layer, and what goes with it."""

    layer: LinearPairs[Any]
    weights: Any
    out: Any
    scale: Any


def layer_of(backend: Any, rng: np.random.Generator, form: str, examples: int = 3) -> Given:
    """A layer of a form, its weights with a 0 among them."""
    times, p, q, options = FORMS[form]
    chosen = {name: value for name, value in options.items() if name != "scaled"}
    points = [1000.0, -999.0] if "exact" in options else rng.choice([1.0, 2.0**-70, -3.0], len(times)).tolist()

    def array(*shape: int) -> Any:
        return backend.from_numpy(rng.standard_normal(shape).astype(np.float32))

    sides = [[array(examples, time, n) for time in times] for n in (p, q)]
    weights = rng.standard_normal(examples) * 2.0**20
    weights[rng.integers(examples)] = 0
    out, scale = rng.standard_normal(q * p), array(q * p) if "scaled" in options else None
    return Given(LinearPairs(*sides, points, **chosen), backend.from_numpy(weights), backend.from_numpy(out), scale)


def found(backend: Any, given_: list[Given]) -> list[tuple[bytes, bytes]]:
    """Norms and sums of some layers at once."""
    layers, weights, out, scales = ([getattr(own, name) for own in given_] for name in Given._fields)
    before = [backend.to_numpy(total) for total in out]
    out = [backend.from_numpy(total) for total in before]
    norms = backend.linear_norms(layers, scales)
    assert len(norms) == len(layers)
    backend.linear_sums(layers, weights, out, scales)
    return [tuple(backend.to_numpy(x).tobytes() for x in both) for both in zip(norms, out, strict=True)]


def assert_as_alone(backend: Any, given_: list[Given], *orders: tuple[Sequence[int], int]) -> None:
    """Hold each layer's bits, in an order and in two calls cut there, to those that it has alone."""
    alone = [found(backend, [own])[0] for own in given_]
    for order, cut in orders:
        for some in (order[:cut], order[cut:]):
            for i, together in zip(some, found(backend, [given_[i] for i in some]) if some else (), strict=True):
                assert together == alone[i], (i, given_[i])


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_of_all_forms_have_the_bits_that_they_have_alone(name: str) -> None:
    backend, rng = load_backend(name), np.random.default_rng(4)
    given_ = [layer_of(backend, rng, form) for form in FORMS]
    order = range(len(FORMS))
    assert_as_alone(backend, given_, (order, len(FORMS)), (order[::-1], 5))


def launches_of(forms: list[str], groups: int) -> list[str]:
    """The kernels, and operations of torch, of a micro-batch of linear layers of these forms and a tensor of rows."""
    from dpcore_triton.recording import recording

    backend, rng = load_backend("triton"), np.random.default_rng(len(forms))
    given_ = [layer_of(backend, rng, form) for form in forms]
    blocks: list[Block] = [Rows(backend.from_numpy(floats(rng, 3, 7)))]
    for own in given_:
        inputs, gradients, points, gram, _ = own.layer
        blocks.append(Linear(tuple(inputs), tuple(gradients), tuple(points), gram))
    totals = [backend.from_numpy(np.zeros(7)), *(own.out for own in given_)]
    names = tuple(map(str, range(groups)))
    members = tuple(tuple(range(group, len(blocks), groups)) for group in range(groups))
    grouping = Grouping(names, members, (1.0,) * groups)
    sizes = [sum(int(totals[i].shape[0]) for i in own) for own in members]
    with recording() as record:
        scales = [None, *(own.scale for own in given_)]
        add_clipped(backend, blocks, "standard", grouping, sizes, 2.0**-36, totals, scales, add_sums)
    functions = [getattr(call.function, "fn", call.function) for call in record.calls]
    return [f"{function.__module__}.{function.__name__}".removeprefix("dpcore_triton.") for function in functions]


@pytest.mark.parametrize("groups", [1, 3])
def test_the_launches_of_a_micro_batch_do_not_grow_with_the_layers(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpcore_triton import launch

    monkeypatch.setattr(launch.Launch, "start", lambda _: None)  # they are counted only
    of_rows = ["clip._factors_kernel", "clip._words_kernel", "row_norms._norms_kernel", "row_norms._squares_kernel",
               "joined._joined_kernel"]  # fmt: skip
    few_, many = ["tiles", "inner products", "one", "scale"], [*FORMS] * 5
    expected = sorted([
        *of_rows, "gram._lengths_kernel", "linear._scaled_lengths_kernel", "gram._gram_kernel", "linear._tiles_kernel",
        "pairs._bounds_kernel", "linear._sum_kernel", "linear._sum_kernel",
    ])  # fmt: skip
    assert sorted(launches_of(few_, groups)) == sorted(launches_of(many, groups)) == expected
    for forms in (["tiles"] * 3, ["tiles"] * 75):
        own = ["gram._lengths_kernel", "linear._tiles_kernel", "pairs._bounds_kernel", "linear._sum_kernel"]
        assert sorted(launches_of(forms, groups)) == sorted([*of_rows, *own])


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_that_do_not_fit_are_refused_before_anything_is_added(name: str) -> None:
    backend, rng = load_backend(name), np.random.default_rng(3)
    first, second, more = (layer_of(backend, rng, "tiles", examples) for examples in (3, 3, 2))
    before = backend.to_numpy(first.out)

    def both(other: Given, **changed: Any) -> None:
        layers, weights, out, scales = ([getattr(first, field), getattr(other, field)] for field in Given._fields)
        arguments = {"layers": layers, "weights": weights, "out": out, "scales": scales, **changed}
        backend.linear_sums(**arguments)

    refused(ArgumentError, r"layers=\[\]", backend.linear_norms, [])
    refused(ArgumentError, r"layers\[1\].inputs\[0\].shape=\(2, 18, 33\): must be of 3 examples", both, more)
    words = r"layers\[1\].gradients\[0\].shape=\(3, 18, 34\): must be \(3, 0, 34\)"
    short = second.layer._replace(inputs=[second.layer.inputs[0][:, :0]])
    refused(ArgumentError, words, both, second._replace(layer=short))
    refused(ArgumentError, r"scales\[1\].shape", both, second._replace(scale=first.out[1:]))
    refused(ArgumentError, r"weights\[1\].shape", both, second._replace(weights=more.weights))
    refused(ArgumentError, r"out\[1\] shares memory with out\[0\]", both, second._replace(out=first.out))
    refused(
        ArgumentTypeError,
        r"out\[1\].dtype=float32",
        both,
        second._replace(out=second.out.astype(np.float32) if name == "numpy" else second.out.float()),
    )
    for field in ("weights", "out", "scales"):
        refused(ArgumentError, rf"len\({field}\)=1: must be 2, one for each layer", both, second, **{field: [None]})
    np.testing.assert_array_equal(backend.to_numpy(first.out), before)
    both(second)


norms = st.one_of(
    st.sampled_from([0.0, 5e-324, 1.7e308, np.inf, np.nan]), st.floats(-600, 600).map(lambda e: 2.0 ** (e * 1.6))
)


@pytest.mark.parametrize("name", ["torch", "triton"])
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 3), st.data())
def test_joined_norms_are_those_of_the_reference(
    name: str, counts: list[int], examples: int, data: st.DataObject
) -> None:
    backend, reference = load_backend(name), load_backend("numpy")
    groups = [
        [np.array(data.draw(st.lists(norms, min_size=examples, max_size=examples))) for _ in range(count)]
        for count in counts
    ]
    got = backend.joined_norms([[backend.from_numpy(norm) for norm in group] for group in groups])
    assert len(got) == len(groups)
    for ours, theirs in zip(got, reference.joined_norms(groups), strict=True):
        assert_agree("joined_norms", backend.to_numpy(ours), theirs)


@pytest.mark.parametrize("name", BACKENDS)
def test_norms_that_do_not_fit_are_not_joined(name: str) -> None:
    backend = load_backend(name)
    two, three = (backend.from_numpy(np.ones(count)) for count in (2, 3))
    for given_ in ([], [[two], []]):
        refused(ArgumentError, "must be at least one", backend.joined_norms, given_)
    refused(ArgumentError, r"norms\[1\].shape=\(3,\): must be \(2,\)", backend.joined_norms, [[two, three]])
    refused(ArgumentTypeError, "float64", backend.joined_norms, [[backend.from_numpy(np.ones(2, np.float32))]])
