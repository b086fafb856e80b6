"""A proved graph as it runs: operands of the examples' gradients, for any number of examples, and what memory it takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from dpcore.stages.clipping.blocks import Block, Rows, joined
from dpcore.torch.gradients.axis import SUM, Axis, follow, is_size, name_of, shape_of
from dpcore.torch.gradients.capture import Captured
from dpcore.torch.gradients.errors import Mixes
from dpcore.torch.gradients.sources import Finder, Source

_MASKED = {
    "convolution_backward", "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
    "_fused_rms_norm_backward",
}  # fmt: skip
"""Operations that give a parameter's gradient beside that of their input, unless told not to."""


class Program:
    """Blocks of the examples' gradients, of a graph that was proved to keep the examples apart.

    Parameters
    ----------
    captured : Captured
        Of which nothing is changed.

    Raises
    ------
    NotProved
        If there is no proof.
    """

    def __init__(self, captured: Captured) -> None:
        graph, self.count, self.digest = captured.module.graph, captured.count, captured.digest
        places = captured.places
        first = len(places) - captured.batch
        marks, ends = follow(graph, dict.fromkeys(places[first:], Axis(0)), self.count)
        parameters = places[: captured.parameters]
        self.shapes = [shape_of(place) for place in parameters]
        (output,) = (node for node in graph.nodes if node.op == "output")
        gradients = list(output.args[0])
        for gradient in gradients:
            if gradient is not None and isinstance(marks[gradient], Axis):
                raise Mixes("a gradient holds the examples one by one")
        finder = Finder(marks, ends, self.count)
        self.sources: list[list[Source]] = [
            finder.sources(gradient, shape) for gradient, shape in zip(gradients, self.shapes, strict=True)
        ]
        operands = list(dict.fromkeys(value for each in self.sources for source in each for value in source.values))
        self._number = {node: place for place, node in enumerate(operands)}
        self.draws = captured.draws
        self.held_names = captured.held
        self.operations = sum(node.op == "call_function" for node in graph.nodes)
        # A tensor that lies in a closure belongs to one model.
        self.shareable = not any(node.op == "get_attr" for node in graph.nodes)
        self._module = self._rewritten(captured, operands, marks)
        self.run: Callable[..., Sequence[torch.Tensor]] = self._module.forward
        self.memory = Memory(self._module.graph, self.count)

    def __call__(
        self, point: Sequence[torch.Tensor], held: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> list[Block]:
        """Return one block for each parameter.

        Parameters
        ----------
        point : sequence of torch.Tensor
            Values of the trained parameters.
        held : sequence of torch.Tensor
            What the model holds else, as in `Captured.held`.
        batch : sequence of torch.Tensor
            The batch's tensors, of at least one example.
        """
        return self.blocks(self.operands(point, held, batch), len(batch[0]))

    def operands(self, point: Any, held: Any, batch: Any) -> Sequence[torch.Tensor]:
        """Return what blocks are made of: the graph is run."""
        with torch.no_grad():
            return self.run(len(batch[0]), *point, *held, *batch)

    def blocks(self, operands: Sequence[torch.Tensor], examples: int) -> list[Block]:
        """Return the blocks that the graph's results make."""
        found: list[Block] = []
        with torch.no_grad():
            for shape, sources in zip(self.shapes, self.sources, strict=True):
                made = [s.block([operands[self._number[v]] for v in s.values], examples) for s in sources]
                found.append(joined(made) if made else Rows(torch.zeros(1).expand(examples, math.prod(shape))))
        return found

    def bytes(self, examples: int) -> int:
        """Return the most bytes that the operands, and then the blocks made of them, take for this many examples.

        What the clip takes beside them is counted as two copies in float64 of the largest block: its norms and its sum
        take some examples or columns at a time, and less.
        """
        # Whether rows or pairs are taken does not depend on the number of examples.
        few, more = (self._block_bytes(count) for count in (1, 2))
        return max(self.memory(examples), few + (examples - 1) * (more - few))

    def _block_bytes(self, examples: int) -> int:
        def sized(size: Any) -> int:
            return examples * int(size) // self.count if size and size % self.count == 0 else int(size)

        with FakeTensorMode():
            operands = [
                torch.empty(
                    [sized(n) for n in v.meta["val"].shape], dtype=v.meta["val"].dtype, device=v.meta["val"].device
                )
                for v in self._number
            ]
            blocks = self.blocks(operands, examples)
        seen: dict[int, int] = {}
        largest = 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        for operand in operands:
            note(operand)
        for block in blocks:
            before = sum(seen.values())
            block.map(note)
            largest = max(largest, sum(seen.values()) - before, block.examples * 8)
        return sum(seen.values()) + 2 * largest

    def _rewritten(self, captured: Captured, operands: list[Node], marks: dict[Node, Any]) -> GraphModule:
        """Return the graph that gives the operands, for the number of examples that is its first argument.

        A size that counts examples is k times their number, for the k that it had when the graph was captured.
        """
        needed, pending = set[Node](), list(operands)
        while pending:
            node = pending.pop()
            if node not in needed:
                needed.add(node)
                pending += node.all_input_nodes
        graph, copies = Graph(), dict[Node, Node]()
        examples = graph.placeholder("examples")
        sizes: dict[int, Node] = {1: examples}

        def sized(value: int) -> Node:
            times = value // self.count
            if times not in sizes:
                sizes[times] = graph.call_function(operator.mul, (examples, times))
            return sizes[times]

        def copied(tree: Any) -> Any:
            if isinstance(tree, Node):
                return copies[tree]
            if isinstance(tree, (tuple, list)):
                return type(tree)(copied(each) for each in tree)
            if type(tree) is int and 0 < tree < 2**40 and tree % self.count == 0:
                return sized(tree)
            return tree

        for node in captured.module.graph.nodes:
            if node.op == "placeholder":
                copies[node] = graph.placeholder(node.name)
            elif node in needed and node.op == "get_attr":
                copies[node] = graph.get_attr(node.target)
            elif node in needed and node.op == "call_function":
                args, kwargs = node.args, node.kwargs
                if hasattr(node.target, "_schema"):
                    args, kwargs = _named(node, copied)
                    args = _without_sums(node, args, marks[node])
                else:
                    args = map_arg(args, copied)
                target = torch.ops.aten.squeeze.dims if name_of(node.target) == "squeeze" else node.target
                copies[node] = graph.call_function(target, args, kwargs)
                if "empty" in name_of(node.target):  # what lay in that memory may be of other examples
                    copies[node] = graph.call_function(torch.ops.aten.zero.default, (copies[node],))
            else:
                continue
            copies[node].meta = dict(node.meta)
        graph.output([copies[node] for node in operands])
        return GraphModule(captured.module, graph)


def _named(node: Node, copied: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operation's arguments, with sizes for another number of examples; numbers that are no sizes stay."""
    name, schema = name_of(node.target), node.target._schema  # type: ignore[union-attr]

    def own(argument: str, tree: Any) -> Any:
        if is_size(name, argument):
            return copied(tree)
        return map_arg(tree, copied)

    if name == "squeeze":  # of one example the examples' dimension has size 1, and stays
        shape = shape_of(node.args[0])
        dims = [d % len(shape) for d in _dims(node, len(shape))]
        return (copied(node.args[0]), [d for d in dims if shape[d] == 1]), {}
    args = tuple(own(argument.name, value) for argument, value in zip(schema.arguments, node.args, strict=False))
    return args, {argument: own(argument, value) for argument, value in node.kwargs.items()}


def _dims(node: Node, rank: int) -> Sequence[int]:
    dims: Any = node.args[1] if len(node.args) > 1 else list(range(rank))
    return dims if isinstance(dims, (tuple, list)) else [dims]


def _without_sums(node: Node, args: tuple[Any, ...], marks: Any) -> tuple[Any, ...]:
    """Let an operation leave out the gradients of parameters, whose operands are taken in their place."""
    if name_of(node.target) not in _MASKED or not isinstance(marks, list) or SUM not in marks:
        return args
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("output_mask")
    mask = [asked and mark is not SUM for asked, mark in zip(args[place], marks, strict=True)]
    return (*args[:place], mask, *args[place + 1 :])


class Memory:
    """The bytes that a graph's values take at one time, by when each is made and last used.

    What a kernel uses inside is not counted.
    """

    def __init__(self, graph: Graph, count: int) -> None:
        self._count = count
        base: dict[Node, Node] = {}
        last: dict[Node, int] = {}
        made: list[tuple[int, Node]] = []
        for step, node in enumerate(graph.nodes):
            if node.op == "call_function" and isinstance(node.meta.get("val"), (torch.Tensor, tuple, list)):
                base[node] = _base(node, base)
                if base[node] is node:
                    made.append((step, node))
            for taken in node.all_input_nodes:
                last[base.get(taken, taken)] = step
        steps = [0] * (len(graph.nodes) + 2)
        fixed, each = list(steps), list(steps)
        for step, node in made:
            constant, growing = self._bytes(node)
            end = last.get(node, step) + 1
            fixed[step] += constant
            fixed[end] -= constant
            each[step] += growing
            each[end] -= growing
        totals = zip(accumulate(fixed), accumulate(each), strict=True)
        self._totals = sorted(set(totals))

    def __call__(self, examples: int) -> int:
        """Return the most bytes at one time, for this number of examples."""
        return max(constant + examples * growing for constant, growing in self._totals)

    def _bytes(self, node: Node) -> tuple[int, int]:
        constant = growing = 0
        for tensor in tree_leaves(node.meta["val"]):
            if isinstance(tensor, torch.Tensor):
                size = tensor.numel() * tensor.element_size()
                if any(n and n % self._count == 0 for n in tensor.shape):
                    growing += size // self._count
                else:
                    constant += size
        return constant, growing


def _base(node: Node, base: dict[Node, Node]) -> Node:
    """Return the operation whose memory a node's value lies in."""
    if not hasattr(node.target, "_schema"):  # an item of several results
        return base.get(node.args[0], node)  # type: ignore[arg-type]
    returned = node.target._schema.returns
    is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
    first = node.args[0] if node.args else None
    return base.get(first, first) if is_view and isinstance(first, Node) else node
