"""From a proved graph to blocks: each example's part of a gradient, found where the examples were added up.

In the graph of a plain step a parameter's gradient ends in an operation that adds the examples up: ``e^T a`` for a weight,
``sum(e)`` for a bias. The operation itself is not run. Its operands make a block of the clip stage
(`dpcore.stages.clipping.blocks`), from which norms and the clipped sum are taken.

The graph may change such a sum before it is the gradient (a transposition, the way back through a normalized weight).
The same is done to each example's part: to its operands if that is possible, otherwise to the part itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dpcore.stages.clipping.blocks import Block, Embedding, Linear, Rows
from dpcore.torch.gradients.axis import SUM, Axis, Op, counted_in, holds_sum, name_of, order_of, shape_of
from dpcore.torch.gradients.convolution import weight_block
from dpcore.torch.gradients.errors import NotProved

Tensor = torch.Tensor

# From this number of rows of an example on, its matrix is formed if it is at most _ROWS times as large as the rows of
# both sides. One product forms it; norms and sums by pairs take one product each.
_MANY, _ROWS = 24, 1.75

_VIEWS = torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default
RESHAPED: dict[Any, Any] = dict.fromkeys(_VIEWS, torch.ops.aten.reshape.default)
"""Operations in the place of views: a kernel may lay a tensor out in memory otherwise than in the capture."""


class Source(NamedTuple):
    """One part of a parameter's gradient: its values, and the function that makes a block of them."""

    values: tuple[Node, ...]
    block: Callable[[Sequence[Tensor], int], Block]
    operation: str


class Finder:
    """Finds the sources of gradients in a graph with these `marks`, captured at `count` examples."""

    def __init__(self, marks: dict[Node, Any], ends: Sequence[Node], count: int) -> None:
        self.marks, self.ends, self.count = marks, set(ends), count

    def sources(self, gradient: Node | None) -> list[Source]:
        """Return the sources of a parameter's gradient; none if it is 0."""
        if gradient is None or is_zero(gradient):
            return []
        if self.marks[gradient] is None:
            raise NotProved("a gradient depends on no example and is not 0")
        found: list[Source] = []
        for end, chain in self._parts(gradient):
            source = self._linear(end, chain) or self._plain(end, chain)
            if source is None:
                return [self._carried(gradient)]
            found.append(source)
        return found

    def _parts(self, gradient: Node) -> list[tuple[Node, list[Node | _Piece]]]:
        """Return the ends whose sum a gradient is, each with the operations that follow it, in order."""
        found: list[tuple[Node, list[Node | _Piece]]] = []
        pending: list[tuple[Node, list[Node | _Piece]]] = [(gradient, [])]
        while pending:
            node, chain = pending.pop()
            taken = [i for i in node.all_input_nodes if self.marks[i] is SUM]
            name = name_of(node.target)
            alike = all(shape_of(each) == shape_of(node) for each in taken)
            pieces: Any = node.args[0] if name == "cat" else []
            given = [place for place, each in enumerate(pieces) if not is_zero(each)]
            if self._end(node) is not None:
                found.append((node, chain))
            elif name == "add" and len(taken) == 2 and alike and node.kwargs.get("alpha", 1) == 1:
                pending += [(each, chain) for each in reversed(taken)]
            elif pieces and sorted(map(pieces.index, taken)) == given:
                dim: Any = node.args[1] if len(node.args) > 1 else 0
                starts = [0, *accumulate(shape_of(each)[dim] for each in pieces)]
                pending += [(pieces[k], [_Piece(node, dim, starts[k]), *chain]) for k in reversed(given)]
            elif len(taken) == len(node.all_input_nodes) == 1:
                pending.append((taken[0], [node, *chain]))
            else:
                return [(node, [])]  # no end: carried back as a whole
        return found

    def _end(self, node: Node) -> tuple[Node, int] | None:
        """Return the operation whose result a node is, and which of its results."""
        if node in self.ends:
            return node, 0
        if getattr(node.target, "__name__", "") == "getitem" and node.args[0] in self.ends:
            return node.args[0], node.args[1]  # type: ignore[return-value]
        return None

    def _plain(self, end: Node, chain: Sequence[Node | _Piece]) -> Source | None:
        """Return the source of an end that is the gradient itself, in the same order in memory."""
        if self._end(end) is None or any(
            isinstance(node, _Piece) or name_of(node.target) not in SAME_ORDER for node in chain
        ):
            return None
        return self._made(end)

    def _made(self, end: Node) -> Source:
        """Return the source of an end, whatever follows."""
        found = self._end(end)
        assert found is not None
        node, which = found
        op = Op(node, self.marks, self.count)
        maker = MAKERS.get(op.name)
        source = maker(op, which) if maker is not None else None
        return source or _general(op, which)

    def _linear(self, end: Node, chain: Sequence[Node | _Piece]) -> Source | None:
        """Return the source of a matrix product, if its factors can take the operations that follow.

        `sides` says for each dimension of the present value whether it is the product's rows (0), its columns (1), or
        has size 1 (None).
        """
        found = self._end(end)
        if found is None or name_of(found[0].target) not in ("mm", "bmm"):
            return None
        left, right = found[0].args[:2]
        mark, now = self.marks[left], list(shape_of(found[0]))  # type: ignore[index]
        if len(now) == 3 and now[0] != 1:
            return None
        sides = [None if size == 1 else place for place, size in zip((None, 0, 1)[-len(now) :], now, strict=True)]
        pads: list[tuple[int, int]] = [(0, 0), (0, 0)]  # of the rows and of the columns
        viewed = False
        for step in chain:
            node = step.node if isinstance(step, _Piece) else step
            name, after = name_of(node.target), list(shape_of(node))
            if name in SAME_ORDER:
                viewed = viewed or [n for n in after if n != 1] != [n for n in now if n != 1]
                if not viewed:
                    places = iter([side for side in sides if side is not None])
                    sides = [None if n == 1 else next(places) for n in after]
            elif viewed:
                return None
            elif name in ("t", "transpose", "permute"):
                sides = [sides[d] for d in order_of(node)]
            elif isinstance(step, _Piece) or name == "slice_backward":
                place = step if isinstance(step, _Piece) else _sliced(node)
                side = sides[place.dim] if place is not None else None
                if place is None or side is None:
                    return None
                pads[side] = (
                    pads[side][0] + place.start,
                    pads[side][1] + after[place.dim] - place.start - now[place.dim],
                )
            else:
                return None
            now = after
        turned = [side for side in sides if side is not None] == [1, 0]
        outer, inner = mark.outer, mark.inner

        def block(values: Sequence[Tensor], examples: int) -> Block:
            first, second = (value.squeeze(0) if value.dim() == 3 else value for value in values)
            first = stacked(first, Axis(1, outer, inner), examples)
            second = stacked(second, Axis(0, outer, inner), examples)
            first, second = (F.pad(t, pad) if any(pad) else t for t, pad in ((first, pads[0]), (second, pads[1])))
            return product(second, first) if turned else product(first, second)

        return Source((left, right), block, "linear")  # type: ignore[arg-type]

    def _carried(self, gradient: Node) -> Source:
        """Return the source of a gradient with several ends, or with other operations between an end and it.

        Those operations run on each example's parts, by vmap.
        """
        reached, pending = set[Node](), [gradient]
        while pending:
            node = pending.pop()
            if node not in reached:
                reached.add(node)
                inputs = [] if self._end(node) else node.all_input_nodes
                pending += [each for each in inputs if holds_sum(self.marks[each])]
        known = [node for node in gradient.graph.nodes if node in reached]
        ends, inner = ([node for node in known if (self._end(node) is None) == within] for within in (False, True))
        constants = list(dict.fromkeys(i for node in inner for i in node.all_input_nodes if self.marks[i] is None))
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in (*ends, *constants)}

        def laid(node: Node) -> Node:
            return as_captured(copies[node], node)

        for node in inner:
            copies[node] = graph.node_copy(node, copies.__getitem__ if lies_anyhow(node.target) else laid)
            copies[node].target = RESHAPED.get(node.target, node.target)
        graph.output(copies[gradient])
        carry = GraphModule(torch.nn.Module(), graph)
        made = [self._made(end) for end in ends]
        shapes = [shape_of(end) for end in ends]
        dtypes = [end.meta["val"].dtype for end in ends]
        splits = [len(source.values) for source in made]

        def block(values: Sequence[Tensor], examples: int) -> Block:
            given, parts = iter(values), []
            for source, split, size, dtype in zip(made, splits, shapes, dtypes, strict=True):
                rows = source.block([next(given) for _ in range(split)], examples).rows()
                parts.append(rows.reshape(examples, *size).to(dtype))
            dims = (*[0] * len(parts), *[None] * len(constants))
            carried = _each(carry, dims, (*parts, *given), "same")
            return Rows(carried.reshape(examples, -1))

        values = tuple(value for source in made for value in source.values) + tuple(constants)
        return Source(values, block, "+".join(dict.fromkeys(source.operation for source in made)))


def lies_anyhow(operation: Any) -> bool:
    """Whether an operation's kernels follow the strides of their arguments, as views and operations entry by entry do.

    Others may read memory in the order of the indices, whatever the strides say: `native_group_norm_backward` does on a
    CPU. Other examples' numbers may lie there. torch's backward pass calls .contiguous() before such kernels where
    strides differ. The graph has only the calls that were needed at capture, on fake tensors. At run time a kernel or
    the user's batch may give other strides. So the inputs of every other operation are brought to the strides of the
    capture (`as_captured`).
    """
    if not hasattr(operation, "_schema"):
        return True
    aliases = (each.alias_info is not None for each in operation._schema.returns)
    return torch.Tag.pointwise in operation.tags or any(aliases)


def as_captured(copy: Node, node: Node) -> Node:
    """Return a value with the layout in memory that it had when the graph was captured, if that had no gaps."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return copy
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], d))
    if not value.permute(order).is_contiguous():
        return copy
    permute, contiguous = torch.ops.aten.permute.default, torch.ops.aten.contiguous.default
    back = [order.index(d) for d in range(value.dim())]
    steps: list[tuple[Any, ...]] = [(contiguous,)]
    if order != sorted(order):
        steps = [(permute, order), (contiguous,), (permute, back)]
    for target, *given in steps:
        copy = copy.graph.call_function(target, (copy, *given))
        copy.meta = dict(node.meta)
    return copy


class _Piece(NamedTuple):
    """A value that is a part of an operation's result: from `start` on along `dim`."""

    node: Node
    dim: int
    start: int


def _sliced(node: Node) -> _Piece | None:
    """Return where the gradient of a slice lies; None if it has gaps."""
    arguments: Any = node.args
    _, size, dim, start, _, step = arguments
    start = max(start + size[dim], 0) if start < 0 else start
    return _Piece(node, dim % len(size), start) if step == 1 else None


SAME_ORDER = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "_to_copy", "clone", "detach", "alias"}


def stacked(tensor: Tensor, mark: Axis, examples: int) -> Tensor:
    """Return a tensor's rows as (B, T, ...): the examples first, then each one's T entries along their dimension."""
    moved = tensor.movedim(mark.dim, 0)
    if mark.outer == 1:
        return moved.unflatten(0, (examples, mark.inner))  # type: ignore[no-untyped-call, no-any-return]
    apart = moved.unflatten(0, (mark.outer, examples, mark.inner)).movedim(1, 0)  # type: ignore[no-untyped-call]
    return apart.flatten(1, 2)  # type: ignore[no-any-return]


def product(rows: Tensor, columns: Tensor) -> Block:
    """Return the block of a matrix whose gradient is ``sum_t rows_t columns_t^T``; (B, T, q) and (B, T, p)."""
    times, q, p = rows.shape[1], rows.shape[2], columns.shape[2]
    if min(q, p) == 1:
        return Rows((rows.mT @ columns).flatten(1))
    return Linear((columns,), (rows,), (1.0,), gram=times * (p + q) < p * q)


def is_formed(times: int, q: int, p: int) -> bool:
    """Whether a matrix is small beside its rows, and there are many."""
    return times >= _MANY and q * p <= _ROWS * times * (q + p)


def formed(block: Block, prefers_pairs: Callable[[Any], bool] | None = None) -> Block:
    """Return small matrices of many rows as rows, unless the layer is one that `prefers_pairs`."""
    if not isinstance(block, Linear) or len(block.inputs) > 1:
        return block
    (columns,), (rows,) = block.inputs, block.gradients
    if not is_formed(rows.shape[1], *block.shape) or (prefers_pairs is not None and prefers_pairs(block.layer)):
        return block
    return Rows((rows.mT @ columns).flatten(1))


def _of_product(op: Op, _: int) -> Source:
    mark: Any = op.mark("self")

    def block(values: Sequence[Tensor], examples: int) -> Block:
        return product(stacked(values[0], mark, examples), stacked(values[1], mark._replace(dim=0), examples))

    return Source((op["self"], op["mat2"]), block, "linear")


def _of_sum(op: Op, _: int) -> Source:
    mark: Any = op.mark("self")
    rank = op.rank("self")
    dims = [d % rank for d in op.arguments.get("dim") or range(rank)]
    # After `stacked` the examples are dimension 0, and each example's entries are dimension 1.
    others = [d for d in range(rank) if d != mark.dim]
    gone = (1, *(2 + others.index(d) for d in dims if d != mark.dim))

    def block(values: Sequence[Tensor], examples: int) -> Block:
        rows = stacked(values[0], mark, examples)
        # At one position a bias's vector is the gradient itself.
        each = rows[:, 0] if gone == (1,) and rows.shape[1] == 1 else rows.sum(gone)
        return Rows(each.reshape(examples, -1))

    return Source((op["self"],), block, "sum")


def _of_convolution(op: Op, which: int) -> Source:
    mark: Any = op.mark("input")
    shape = tuple(op["weight"].meta["val"].shape)
    form = tuple(op[name] for name in ("stride", "padding", "dilation", "output_padding", "transposed", "groups"))

    def block(values: Sequence[Tensor], examples: int) -> Block:
        gradient = values[0]
        if which == 2:
            return Rows(stacked(gradient, mark, examples).flatten(3).sum((1, 3)))
        # Each example's rows side by side, if they lay apart.
        x, gradient = (stacked(value, mark, examples).flatten(0, 1) for value in (values[1], gradient))
        return weight_block(shape, x.to(gradient.dtype), gradient, examples, *form)

    return Source((op["grad_output"], op["input"])[: 3 - which], block, "convolution")


def _of_layer_norm(op: Op, which: int) -> Source:
    mark: Any = op.mark("input")
    wide = len(op["normalized_shape"])
    centered = "mean" in op.arguments
    statistics = ("mean", "rstd") if centered else ("rstd",)

    def block(values: Sequence[Tensor], examples: int) -> Block:
        gradient = values[0]
        if which == 1:
            x = values[1] - values[2] if centered else values[1]
            gradient = gradient * (x * values[-1]).to(gradient.dtype)
        each = stacked(gradient, mark, examples)
        return Rows(each.sum(tuple(range(1, each.dim() - wide))).flatten(1))

    names = ("grad_out", "input", *statistics) if which == 1 else ("grad_out",)
    return Source(tuple(op[name] for name in names), block, "layer_norm" if centered else "rms_norm")


def _of_group_norm(op: Op, which: int) -> Source:
    mark: Any = op.mark("input")
    groups = op["group"]

    def block(values: Sequence[Tensor], examples: int) -> Block:
        gradient = values[0]
        if which == 1:
            x = values[1].reshape(len(gradient), groups, -1)
            normalized = (x - values[2].unsqueeze(2)) * values[3].unsqueeze(2)
            gradient = gradient * normalized.reshape(gradient.shape).to(gradient.dtype)
        return Rows(
            stacked(gradient.flatten(2) if gradient.dim() > 2 else gradient.unsqueeze(2), mark, examples).sum((1, 3))
        )

    names = ("grad_out", "input", "mean", "rstd") if which == 1 else ("grad_out",)
    return Source(tuple(op[name] for name in names), block, "group_norm")


def _of_embedding(op: Op, _: int) -> Source:
    mark: Any = op.mark("indices")
    size, padding = op["num_weights"], op["padding_idx"]

    def block(values: Sequence[Tensor], examples: int) -> Block:
        gradients, indices = (stacked(value, mark, examples) for value in values)
        kept = indices.masked_fill(indices == padding, -1) if padding >= 0 else indices
        return _table(kept, gradients, size)

    return Source((op["grad_output"], op["indices"]), block, "embedding")


def _of_index(op: Op, _: int) -> Source | None:
    indices, size = op["indices"], op.out[0]
    mark = op.of(indices[0]) if len(indices) == 1 else None
    if not isinstance(mark, Axis) or op.mark("values") != mark or not is_zero(op["self"]):
        return None
    if op.rank("values") != len(shape_of(indices[0])) + len(op.out) - 1:
        return None

    def block(values: Sequence[Tensor], examples: int) -> Block:
        gradients, rows = (stacked(value, mark, examples) for value in values)
        gradients = gradients.reshape(*rows.shape, -1)
        return _table(torch.where(rows < 0, rows + size, rows), gradients, size)

    return Source((op["values"], indices[0]), block, "index")


_MOVES = {*SAME_ORDER, "expand", "t", "transpose", "permute", "select_backward", "slice_backward"}


def is_zero(node: Node) -> bool:
    """Whether a value is 0 everywhere by construction."""
    while node.op == "call_function" and name_of(node.target) in _MOVES:
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function":
        return False
    name = name_of(node.target)
    return name in ("zeros", "new_zeros", "zeros_like") or (
        name in ("full", "full_like") and node.args[1] in (0, False)
    )


def _table(indices: Tensor, gradients: Tensor, size: int) -> Block:
    examples, width = len(indices), gradients.shape[-1]
    return Embedding((indices.long().reshape(examples, -1),), (gradients.reshape(examples, -1, width),), (1.0,), size)


def _general(op: Op, which: int) -> Source:
    """Return the source of any end: the operation itself on each example's rows, by vmap."""
    nodes = op.node.all_input_nodes
    marks = [op.of(node) for node in nodes]
    node = op.node
    if counted_in(op, op.arguments):
        raise NotProved(f"{op.name} adds up the examples and takes their number as a size")

    def block(values: Sequence[Tensor], examples: int) -> Block:
        given = [
            stacked(value, mark, examples).movedim(1, mark.dim + 1).contiguous() if isinstance(mark, Axis) else value
            for value, mark in zip(values, marks, strict=True)
        ]

        def one(*own: Tensor) -> Tensor:
            known = dict(zip(nodes, own, strict=True))
            result = node.target(*map_arg(node.args, known.get), **map_arg(node.kwargs, known.get))  # type: ignore[operator]
            return result[which] if isinstance(result, (tuple, list)) else result  # type: ignore[no-any-return]

        rows = _each(one, tuple(0 if mark is not None else None for mark in marks), given, "error")
        return Rows(rows.reshape(examples, -1))

    return Source(tuple(nodes), block, op.name)


def _each(function: Callable[..., Tensor], dims: Sequence[int | None], values: Sequence[Tensor], draws: str) -> Tensor:
    """Return the function's values of each example's tensors, by vmap, without what torch writes to standard error.

    It writes a line at every call of an operation that vmap runs row by row. A line for each micro-batch would tell how
    many examples were drawn.
    """
    remarks = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    remarks(False)
    try:
        found: Tensor = vmap(function, in_dims=tuple(dims), randomness=draws)(*values)
    finally:
        remarks(True)
    return found


MAKERS: dict[str, Callable[[Op, int], Source | None]] = {
    "mm": _of_product,
    "sum": _of_sum,
    "convolution_backward": _of_convolution,
    "native_layer_norm_backward": _of_layer_norm,
    "_fused_rms_norm_backward": _of_layer_norm,
    "native_group_norm_backward": _of_group_norm,
    "embedding_dense_backward": _of_embedding,
    "index_put": _of_index,
}
"""The function that makes the source of an operation's result; `_general` for operations that are not listed."""
