"""A linear layer into the cross-entropy of its outputs, without the outputs: the head of a language model.

The gradient by the logits ``z = W a + b`` of one position is ``e = g 1_y + h - (g + V h) softmax(z)``, with the numbers g
and h that the loss gives its label y and all V classes alike (0 without label smoothing). So it follows from the
position's input a, from g and h, and from the log-normalizer of its logits. The logits are made `CHUNK` classes at a
time: once for the log-normalizer and for ``W^T softmax(z)``, from which the gradient by a follows; again for the norms,
and again for the clipped sum. No memory grows with positions times V.

`without_logits` finds these operations in a captured graph and replaces them by those of this file; the proof then
follows the new graph. If the logits are used for anything else, the graph stays as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from dpcore.spec.check import read_as
from dpcore.spec.contributions import FEW_ROWS, rounding_of_linear
from dpcore.stages.clipping.blocks import CHUNK, Block, Chunked, Rows, products
from dpcore.torch.gradients.axis import Axis, Op, name_of, order_of, shape_of
from dpcore.torch.gradients.sources import MAKERS, SAME_ORDER, Source, is_formed, is_zero, product, stacked

Tensor = torch.Tensor
aten = torch.ops.aten

_library = torch.library.Library("dpcore", "FRAGMENT")  # type: ignore[no-untyped-call]
_ROWS = "Tensor inputs, Tensor weight, Tensor? bias, Tensor normalizers, Tensor labels, Tensor own, Tensor? others"
for _schema in (
    "head(Tensor inputs, Tensor weight, Tensor? bias) -> (Tensor, Tensor)",
    "head_inputs(Tensor means, Tensor weight, Tensor labels, Tensor own, Tensor? others) -> Tensor",
    f"head_weight({_ROWS}) -> Tensor",
    f"head_bias({_ROWS}) -> Tensor",
):
    _library.define(_schema)  # type: ignore[no-untyped-call]


def _logits(inputs: Tensor, weight: Tensor, bias: Tensor | None, first: int, last: int) -> Tensor:
    """Return some columns of the logits (N, last - first), in float32 at least, in memory of their own."""
    z = inputs @ weight[first:last].mT
    z = z.float() if z.element_size() < 4 else z
    return z if bias is None else z.add_(bias[first:last])


def _head(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the log-normalizers (N,) of the rows' logits, and ``softmax(logits) W`` (N, p), in one pass over W."""
    means = total = largest = torch.empty(0)
    for first in range(0, len(weight), CHUNK):
        last = min(first + CHUNK, len(weight))
        z = _logits(inputs, weight, bias, first, last)
        top = z.amax(1).clamp_(min=torch.finfo(z.dtype).min)  # a difference of two infinities would be NaN
        top = torch.maximum(top, largest) if first else top
        z.sub_(top[:, None]).exp_()
        some, mean = z.sum(1), (z.to(weight.dtype) @ weight[first:last]).to(z.dtype)
        if first:
            shrunk = (largest - top).exp_()
            some, mean = some.addcmul_(total, shrunk), mean.addcmul_(means, shrunk[:, None])
        means, total, largest = mean, some, top
    return largest + total.log(), means / total[:, None]


def _head_inputs(means: Tensor, weight: Tensor, labels: Tensor, own: Tensor, others: Tensor | None) -> Tensor:
    """Return the gradient by the inputs, (N, p): ``g W_y + h sum_v W_v - (g + V h) W^T softmax``."""
    found = own[:, None] * (torch.embedding(weight, labels) - means)
    if others is not None:
        found += others[:, None] * (weight.sum(0, dtype=means.dtype) - len(weight) * means)
    return found.to(weight.dtype)


def _sum(of_bias: bool, inputs: Tensor, weight: Tensor, bias: Tensor | None, *rows: Tensor | None) -> Tensor:
    """Return the gradient by the weight or the bias, all rows as one example's. In a graph its source replaces it."""
    names = ("inputs", "normalizers", "labels", "own", "others")
    one: dict[str, Any] = {n: None if x is None else x[None] for n, x in zip(names, (inputs, *rows), strict=True)}
    part = Softmax(**one, weight=weight, bias=bias, of_bias=of_bias, rows=len(inputs))
    found: Tensor = part.chunk(0, len(weight)).rows()
    return found.view(len(weight) if of_bias else weight.shape)


_library.impl("head", _head, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("head_inputs", _head_inputs, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("head_weight", partial(_sum, False), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("head_bias", partial(_sum, True), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dpcore::head")  # type: ignore[untyped-decorator]
def _(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    kind = torch.promote_types(inputs.dtype, torch.float32)
    return inputs.new_empty(inputs.shape[0], dtype=kind), inputs.new_empty(inputs.shape, dtype=kind)


@torch.library.register_fake("dpcore::head_inputs")  # type: ignore[untyped-decorator]
def _(means: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return means.new_empty(means.shape, dtype=weight.dtype)


@torch.library.register_fake("dpcore::head_weight")  # type: ignore[untyped-decorator]
def _(inputs: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(weight.shape)


@torch.library.register_fake("dpcore::head_bias")  # type: ignore[untyped-decorator]
def _(inputs: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty(weight.shape[:1])


# ------------------------------------------------------------------------------------------------- norms and the sum

_TOGETHER = 256
"""Rows of a product of examples with fewer than `FEW_ROWS` each, whatever the number of examples."""


@dataclass(frozen=True)
class Softmax:
    """A head's part of its weight's gradient, or of its bias's: gradients by the logits, made some classes at a time.

    Attributes
    ----------
    inputs : (B, T, p) array
    normalizers, own : (B, T) arrays
        Log-normalizers; and g.
    labels : (B, T) array of int64
    others : (B, T) array or None
        h.
    weight : (V, p) tensor
    bias : (V,) tensor or None
    of_bias : bool
        Whether the gradient is the bias's.
    rows : int
        T of one example; a unit may have several examples.
    point_weight : float
    """

    inputs: Any
    normalizers: Any
    labels: Any
    own: Any
    others: Any
    weight: Tensor
    bias: Tensor | None
    of_bias: bool
    rows: int
    point_weight: float = 1.0

    @property
    def examples(self) -> int:
        """B."""
        return int(self.inputs.shape[0])

    @property
    def dtype(self) -> str:
        """See `dpcore.stages.clipping.blocks.Block.dtype`."""
        return read_as(self.inputs)

    @property
    def rounding(self) -> float:
        """See `dpcore.stages.clipping.blocks.Block.rounding`."""
        classes, width = self.weight.shape
        return rounding_of_linear(classes, 1 if self.of_bias else width, int(self.inputs.shape[1]))

    def chunk(self, first: int, last: int) -> Block:
        """Return the block of some classes' rows."""
        inputs = torch.as_tensor(self.inputs)
        kind = inputs.device.type
        with torch.no_grad(), nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False):
            gradients = self._gradients(inputs.to(self.weight.dtype), first, last).to(inputs.dtype)
            factors = inputs.new_ones(*inputs.shape[:2], 1) if self.of_bias else inputs
            times, q, p = inputs.shape[1], last - first, factors.shape[2]
            # The graph's products are of a fixed number of examples; here are as many as there are.
            alone = min(q, p) == 1 or is_formed(times, q, p)
            block = Rows(products(gradients, factors).flatten(1)) if alone else product(gradients, factors)
            block = block.weighted(self.point_weight)
        return block.map(Tensor.numpy) if isinstance(self.inputs, np.ndarray) else block

    def _gradients(self, inputs: Tensor, first: int, last: int) -> Tensor:
        """Return e for some classes, (B, T, last - first).

        For another number of rows a library may choose another kernel, which rounds otherwise. So each example with
        many rows is a product of its own, examples with few are products of `_TOGETHER` rows, and all start at a cache
        line.
        """
        normalizers, labels, own = (torch.as_tensor(x).flatten() for x in (self.normalizers, self.labels, self.own))
        others = None if self.others is None else torch.as_tensor(self.others).flatten()
        total = own if others is None else own + len(self.weight) * others
        count, times, width = inputs.shape
        inputs, found = inputs.reshape(-1, width), normalizers.new_empty(count * times, last - first)
        apart = self.rows if self.rows >= FEW_ROWS else _TOGETHER
        for start in range(0, count * times, apart):
            some = slice(start, start + apart)
            given = inputs[some].clone()
            if (used := len(given)) < apart:
                given = F.pad(given, (0, 0, 0, apart - used))
            z = _logits(given, self.weight.detach(), self.bias, first, last)[:used]
            torch.mul(z.sub_(normalizers[some, None]).exp_(), -total[some, None], out=found[some])
        if others is not None:
            found += others[:, None]
        inside = (labels >= first) & (labels < last)
        places, added = torch.where(inside, labels - first, 0), torch.where(inside, own, 0)
        found.scatter_add_(1, places[:, None], added[:, None].to(found.dtype))
        return found.view(count, times, last - first)

    def weighted(self, weight: float) -> Softmax:
        """See `dpcore.stages.clipping.blocks.Block.weighted`."""
        return replace(self, point_weight=weight * self.point_weight)

    def units(self, size: int) -> Softmax:
        """See `dpcore.stages.clipping.blocks.Block.units`."""
        return self.map(lambda array: array.reshape(len(array) // size, size * array.shape[1], *array.shape[2:]))

    def map(self, function: Callable[[Any], Any]) -> Softmax:
        """See `dpcore.stages.clipping.blocks.Part.map`."""
        arrays = {name: getattr(self, name) for name in ("inputs", "normalizers", "labels", "own", "others")}
        return replace(self, **{name: function(array) for name, array in arrays.items() if array is not None})


def source_of(op: Op, _: int) -> Source:
    """Return the source of `head_weight` or `head_bias`."""
    mark: Any = op.mark("inputs")
    names = [name for name, value in op.arguments.items() if value is not None]

    def block(values: Sequence[Tensor], examples: int) -> Block:
        given: dict[str, Any] = dict(zip(names, values, strict=True))
        shared: dict[str, Any] = {name: given.pop(name, None) for name in ("weight", "bias")}
        rows: dict[str, Any] = {name: stacked(value, mark, examples) for name, value in given.items()}
        part = Softmax(
            **{"others": None} | rows, **shared, of_bias=op.name.endswith("bias"), rows=mark.outer * mark.inner
        )
        return Chunked((part,), (len(part.weight), 1 if part.of_bias else part.weight.shape[1]))

    return Source(tuple(op[name] for name in names), block, "head")


MAKERS |= dict.fromkeys(("dpcore::head_weight", "dpcore::head_bias"), source_of)


# ------------------------------------------------------------------------------------------- the operations of a graph


class _Loss(NamedTuple):
    """The loss's gradient for each row: numbers `own` at `labels`, and `others` at all classes."""

    labels: Node
    own: Node
    others: Node | None


class _Head(NamedTuple):
    """A head that was found: its inputs, and the operations that take the gradient by its logits."""

    inputs: Node
    weight: Node
    bias: Node | None
    loss: _Loss
    by_inputs: list[Node]
    by_weight: list[Node]
    by_bias: list[Node]


def without_logits(graph: Graph, marks: dict[Node, Any], count: int) -> Graph | None:
    """Return the graph with the heads' operations of this file, or None if no head is found in it.

    `marks` are those of `dpcore.torch.gradients.axis.follow`, of a graph that was captured at `count` examples.
    """
    found, copies = Graph(), dict[Node, Node]()
    found.output(found.graph_copy(graph, copies))
    own = {copies[node]: mark for node, mark in marks.items() if node in copies}
    for node in found.nodes:
        if _is(node, "ones_like") and shape_of(node) == (count,):
            # The losses' own values are not used: the gradient of their sum begins with ones.
            value = node.meta["val"]
            node.target, node.args = aten.ones.default, ([count],)
            node.kwargs = {"dtype": value.dtype, "device": value.device}
    found.eliminate_dead_code()
    heads = 0
    for node in list(found.nodes):
        if _is(node, "_log_softmax_backward_data"):
            head = _found(node, own)
            if head is not None:
                _replace(node, head)
                heads += 1
    found.eliminate_dead_code()
    return found if heads else None


def _found(node: Node, marks: dict[Node, Any]) -> _Head | None:
    """Return the head whose gradient by its logits is `node`."""
    given, softmax, dim = node.args[:3]
    if not _is(softmax, "_log_softmax") or set(softmax.users) != {node}:  # type: ignore[arg-type, union-attr]
        return None
    back: list[Node] = [softmax]  # type: ignore[list-item]
    while not _is(back[-1], "mm", "addmm"):
        if back[-1] is not softmax and not _moves(back[-1]):
            return None
        back.append(back[-1].args[0])  # type: ignore[arg-type]
        if len(back[-1].users) != 1:
            return None
    layer = back.pop()
    bias, inputs, across = (None, *layer.args) if name_of(layer.target) == "mm" else layer.args[:3]
    weight, turned = _turned(across)  # type: ignore[arg-type]
    classes, mark = shape_of(layer)[1], marks.get(inputs)  # type: ignore[arg-type]
    shared = marks.get(weight) is None and (bias is None or marks.get(bias) is None)  # type: ignore[arg-type]
    if not turned or not isinstance(mark, Axis) or mark.dim or not shared or layer.kwargs:
        return None
    # A cast to a third dtype would round the logits.
    kinds = [each.meta["val"].dtype for each in (layer, softmax, *back)]  # type: ignore[union-attr]
    if (bias is not None and shape_of(bias) != (classes,)) or not {*kinds} <= {*kinds[:2]}:
        return None
    place: int | None = 1
    for each in reversed(back[1:]):
        place = _moved(each, place, classes)
    if place is None or place != dim % len(shape_of(node)) or place != softmax.args[1] % len(shape_of(node)):  # type: ignore[union-attr, operator]
        return None
    loss = _loss(given, place, classes)  # type: ignore[arg-type]
    head = None if loss is None else _Head(inputs, weight, bias, loss, [], [], [])  # type: ignore[arg-type]
    return head if head is not None and all(_takes(head, *each) for each in _ends(node, place, classes)) else None


def _is(node: Node, *names: str) -> bool:
    """Whether a value is made by an operation of one of these names."""
    return node.op == "call_function" and name_of(node.target) in names


def _moves(node: Node) -> bool:
    """Whether an operation changes nothing of a value but its entries' places and dtype."""
    return _is(node, *SAME_ORDER, *_TURNS)


_TURNS = ("t", "transpose", "permute")


def _moved(node: Node, dim: int | None, classes: int) -> int | None:
    """Return where the classes lie after such an operation; None if the other dimensions change their order.

    All others, in order, count the rows of the head.
    """
    before, after = shape_of(node.args[0]), shape_of(node)
    if dim is None:
        return None
    if name_of(node.target) in SAME_ORDER:
        start = math.prod(before[:dim])
        return next((d for d, n in enumerate(after) if n == classes and math.prod(after[:d]) == start), None)
    order = order_of(node)
    rest = [d for d in order if d != dim and before[d] != 1]
    return order.index(dim) if rest == sorted(rest) else None


def _turned(node: Node) -> tuple[Node, bool]:
    """Return the matrix that a value is, and whether it is transposed."""
    turned = False
    while _is(node, *_TURNS) and len(shape_of(node)) == 2:
        turned ^= order_of(node) == [1, 0]
        node = node.args[0]  # type: ignore[assignment]
    return node, turned


def _loss(node: Node, dim: int, classes: int) -> _Loss | None:
    """Return the parts of a gradient by log-probabilities: numbers at labels, and one for all classes."""
    given = cast("tuple[Any, ...]", node.args)
    if _is(node, "scatter_add") and given[1] % len(shape_of(node)) == dim and is_zero(given[0]):
        labels, own = given[2:4]
        one = tuple(1 if d == dim else n for d, n in enumerate(shape_of(node)))
        return _Loss(labels, own, None) if shape_of(labels) == shape_of(own) == one else None
    if _is(node, "add") and len(node.all_input_nodes) == 2 and not node.kwargs:
        for one, other in (given, given[::-1]):
            loss, others = _loss(one, dim, classes), _uniform(other, dim)
            if loss is not None and loss.others is None and others is not None and shape_of(one) == shape_of(other):
                return loss._replace(others=others)
    if _moves(node):
        for before in range(len(shape_of(given[0]))):
            if shape_of(given[0])[before] == classes and _moved(node, before, classes) == dim:
                return _loss(given[0], before, classes)
    return None


def _uniform(node: Node, dim: int) -> Node | None:
    """Return the number that is the same for all classes."""
    if not _is(node, "expand"):
        return None
    before, after = shape_of(node.args[0]), shape_of(node)
    one = tuple(1 if d == dim else n for d, n in enumerate(after))
    return node.args[0] if before == one else None  # type: ignore[return-value]


def _ends(node: Node, dim: int, classes: int) -> Iterator[tuple[Node, Node, int | None]]:
    """Yield the operations that take a gradient by logits, the value taken, and where the classes lie in it."""
    for user in node.users:
        place = _moved(user, dim, classes) if _moves(user) else None
        if place is None:
            yield user, node, dim
        else:
            yield from _ends(user, place, classes)


def _takes(head: _Head, user: Node, gradient: Node, dim: int | None) -> bool:
    """Record an operation that makes a gradient from that by the logits; return whether it is one."""
    given, flat = user.args, len(shape_of(gradient)) == 2
    if _is(user, "sum") and flat and dim == 1 and given[1:2] == ([0],) and head.bias is not None:
        head.by_bias.append(user)
        return True
    if not _is(user, "mm") or not flat:
        return False
    if given[0] is gradient and dim == 1 and _turned(given[1]) == (head.weight, False):  # type: ignore[arg-type]
        head.by_inputs.append(user)
        return True
    turned = given[1] is gradient and dim == 1
    factor: Any = given[0] if turned else given[1]
    if (not turned and (given[0] is not gradient or dim != 0)) or _turned(factor) != (head.inputs, turned):
        return False
    last = _last_turned(user, turned)
    head.by_weight.extend([] if last is None else [last])
    return last is not None


def _last_turned(node: Node, turned: bool) -> Node | None:
    """Follow a matrix's transpositions; return the last value that is transposed (is not, without `turned`), if any."""
    last, now = None, node
    while _turned(now)[0] is node:
        last = now if _turned(now)[1] == turned else last
        if len(now.users) != 1:
            break
        now = next(iter(now.users))
    return last


def _replace(node: Node, head: _Head) -> None:
    """Replace a head's operations by those of this file."""
    graph, ours = node.graph, torch.ops.dpcore

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = dict(node.meta)
        made.meta["val"] = target(*map_arg(args, lambda each: each.meta["val"]), **kwargs)
        return made

    def row_by_row(value: Node | None) -> Node | None:
        if value is None:
            return None
        return call(aten.view.default, call(aten.clone.default, value, memory_format=torch.contiguous_format), [rows])

    rows = shape_of(head.inputs)[0]
    with graph.inserting_before(node):
        both = call(ours.head.default, head.inputs, head.weight, head.bias)
        both.meta["scratch"] = 4 * rows * (min(CHUNK, shape_of(head.weight)[0]) + 2 * shape_of(head.inputs)[1])
        normalizers, means = (call(operator.getitem, both, place) for place in (0, 1))
        labels, own, others = map(row_by_row, head.loss)
        given = head.inputs, head.weight, head.bias, normalizers, labels, own, others
        for user in head.by_inputs:
            user.replace_all_uses_with(call(ours.head_inputs.default, means, head.weight, labels, own, others))
        for user in head.by_weight:
            user.replace_all_uses_with(call(ours.head_weight.default, *given))
        for user in head.by_bias:
            made = call(ours.head_bias.default, *given)
            user.replace_all_uses_with(call(aten.unsqueeze.default, made, 0) if len(shape_of(user)) == 2 else made)
