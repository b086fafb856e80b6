"""Proved graphs as they run: they give the operands of the examples' gradients, for any number of examples."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from dpcore.errors import ArgumentError
from dpcore.stages.clipping.blocks import Block, Rows, joined
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients import cache
from dpcore.torch.gradients.axis import SUM, Axis, follow, is_size, name_of, shape_of, squeezed
from dpcore.torch.gradients.capture import Captured, Made, capture, uncollected
from dpcore.torch.gradients.errors import Mixes, NotCaptured, NotProved
from dpcore.torch.gradients.head import without_logits
from dpcore.torch.gradients.losses import Calls, ExampleLoss
from dpcore.torch.gradients.sources import RESHAPED, Finder, Source, as_captured, formed, lies_anyhow
from dpcore.torch.memory import Footprint
from dpcore.torch.model import precision
from dpcore.torch.model.functional import Values, local, slots
from dpcore.torch.model.state_probe import Snapshot
from dpcore.torch.randomness import TRIAL, seeded

_MASKED = {
    "convolution_backward", "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
    "_fused_rms_norm_backward",
}  # fmt: skip
"""Operations that give a parameter's gradient in addition to that of their input, unless it is turned off."""


_SQUEEZED = torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim
_RUN: dict[Any, Any] = {**RESHAPED, **dict.fromkeys(_SQUEEZED, torch.ops.aten.squeeze.dims)}

Gathers = Callable[[Graph, list[Node]], None]
Prefers = Callable[..., bool] | None


class Program:
    """Makes blocks of the examples' gradients by a proved graph; raises NotProved if there is no proof.

    The captured graph is not changed. `gathers` takes the graph that runs and its placeholders, and inserts the
    operations that gather a sharded model's parameters.
    """

    def __init__(
        self, captured: Captured, gathers: Gathers | None = None, lean: bool = False, prefers_pairs: Prefers = None
    ) -> None:
        graph, self.count, self.digest = captured.graph, captured.count, captured.digest
        places = captured.places
        first = len(places) - captured.batch
        marks, ends = follow(graph, dict.fromkeys(places[first:], Axis(0)), self.count)
        found = without_logits(graph, marks, self.count) if lean and gathers is None else None
        if found is not None:
            captured = replace(captured, graph=found)
            graph, places = found, captured.places
            marks, ends = follow(graph, dict.fromkeys(places[first:], Axis(0)), self.count)
        parameters = places[: captured.parameters]
        self.shapes = [shape_of(place) for place in parameters]
        (output,) = (node for node in graph.nodes if node.op == "output")
        gradients = list(output.args[0])
        for gradient in gradients:
            if gradient is not None and isinstance(marks[gradient], Axis):
                raise Mixes("a gradient holds the examples one by one")
        finder = Finder(marks, ends, self.count)
        self.sources: list[list[Source]] = list(map(finder.sources, gradients))
        operands = list(dict.fromkeys(value for each in self.sources for source in each for value in source.values))
        self._number = {node: place for place, node in enumerate(operands)}
        self._last = {v: last for last, each in enumerate(self.sources) for source in each for v in source.values}
        self.draws = captured.draws
        self.classes: int | None = None  # of the model's output, under a loss over classes
        self.held_names = captured.held
        self.operations = sum(node.op == "call_function" for node in graph.nodes)
        self._device = places[0].meta["val"].device
        self._prefers_pairs = prefers_pairs and partial(prefers_pairs, device=self._device)
        self._module = self._rewritten(captured, operands, marks)
        given = [node for node in self._module.graph.nodes if node.op == "placeholder"][1:]
        self.read = [bool(node.users) for node in given[captured.parameters : first]]  # of what the model holds
        constants = [node.target for node in self._module.graph.nodes if node.op == "get_attr"]
        self.constants = [operator.attrgetter(name)(self._module) for name in constants]
        if gathers is not None:
            gathers(self._module.graph, given)
            self._module.recompile()
        self.run: Callable[..., Sequence[torch.Tensor]] = self._module.forward

    def __call__(
        self, point: Sequence[torch.Tensor], held: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> list[Block]:
        """Return one block for each parameter; the arguments are `Inputs`."""
        examples = len(batch[0])
        if examples == 0:
            return [Rows(torch.zeros(0, math.prod(shape), device=self._device)) for shape in self.shapes]
        kind = self._device.type  # the casts of autocast are operations of the graph
        with torch.no_grad(), torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            return self.blocks(list(self.run(examples, *point, *held, *batch)), examples)

    def compile(self) -> None:
        """Let torch.compile make kernels of the graph, one set for all numbers of examples above 1.

        A seed gives the same masks as without torch.compile.
        """
        self.run = torch.compile(self._module, dynamic=True, options={"fallback_random": True})

    @cached_property
    def obstacle(self) -> str | None:
        """Return why a CUDA graph cannot repeat this program (a tensor elsewhere, or of a special class), or None."""
        for node in self._module.graph.nodes:
            for value in tree_leaves(node.meta.get("val")) if node.users else ():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.device != self._device:
                    return f"a tensor is on {value.device}, not on {self._device}"
                if type(value) is not FakeTensor or value.layout is not torch.strided:
                    return "a tensor is sparse, or of a class of its own"
        return None

    @cached_property
    def footprint(self) -> Footprint:
        """The memory of a call and of the sum over its blocks."""
        return Footprint.of(self._module.graph, self.count, self.blocks)

    @cached_property
    def rows(self) -> int:
        """The most rows of an example in any product."""
        called = (node for node in self._module.graph.nodes if node.op == "call_function")
        products = (node for node in called if name_of(node.target) in ("mm", "addmm"))
        return max((shape_of(node)[0] // self.count for node in products), default=1)

    def blocks(self, operands: list[Any], examples: int) -> list[Block]:
        """Return the blocks that the graph's results make; each result is taken out of the list after its last use.

        So its memory is free for the rows and patches of further layers, unless a block is made of it.
        """
        found: list[Block] = []
        for parameter, (shape, sources) in enumerate(zip(self.shapes, self.sources, strict=True)):
            made = [s.block([operands[self._number[v]] for v in s.values], examples) for s in sources]
            made = [
                formed(each, self._prefers_pairs) if s.operation == "linear" else each
                for s, each in zip(sources, made, strict=True)
            ]
            found.append(
                joined(made) if made else Rows(torch.zeros(1, device=self._device).expand(examples, math.prod(shape)))
            )
            for value in {value for source in sources for value in source.values}:
                if self._last[value] == parameter:
                    operands[self._number[value]] = None
        return found

    def _rewritten(self, captured: Captured, operands: list[Node], marks: dict[Node, Any]) -> GraphModule:
        """Return the graph that gives the operands, for the number of examples that is its first argument.

        A size that counts examples is k times their number, with the k of the capture.
        """
        needed, pending = set[Node](), list(operands)
        fixed = set(captured.places[: len(captured.places) - captured.batch])  # lie as when the graph was captured
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

        def laid(tree: Any) -> Any:
            return as_captured(copies[tree], tree) if isinstance(tree, Node) and tree not in fixed else copied(tree)

        for node in captured.graph.nodes:
            if node.op == "placeholder":
                copies[node] = graph.placeholder(node.name)
            elif node in needed and node.op == "get_attr":
                copies[node] = graph.get_attr(node.target)
            elif node in needed and node.op == "call_function":
                args, kwargs = node.args, node.kwargs
                if hasattr(node.target, "_schema"):
                    args, kwargs = _named(node, copied if lies_anyhow(node.target) else laid)
                    args = _without_sums(node, args, marks[node])
                else:
                    args = map_arg(args, copied)
                target = _RUN.get(node.target, node.target)
                copies[node] = graph.call_function(target, args, kwargs)
                if "empty" in name_of(node.target):  # that memory may have had other examples' numbers
                    copies[node] = graph.call_function(torch.ops.aten.zero.default, (copies[node],))
            else:
                continue
            copies[node].meta = dict(node.meta)
        graph.output([as_captured(copies[node], node) for node in operands])
        return GraphModule(captured.constants, graph)


def _named(node: Node, copied: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return an operation's arguments, with sizes for another number of examples; other numbers stay."""
    name, schema = name_of(node.target), node.target._schema  # type: ignore[union-attr]

    def own(argument: str, tree: Any) -> Any:
        return copied(tree) if is_size(name, argument) else map_arg(tree, copied)

    if name == "squeeze":  # a single example's dimension has size 1, and stays
        return (copied(node.args[0]), squeezed(node)), {}
    args = tuple(own(argument.name, value) for argument, value in zip(schema.arguments, node.args, strict=False))
    return args, {argument: own(argument, value) for argument, value in node.kwargs.items()}


def _without_sums(node: Node, args: tuple[Any, ...], marks: Any) -> tuple[Any, ...]:
    """Let an operation leave out the gradients of parameters, which their operands replace."""
    if name_of(node.target) not in _MASKED or not isinstance(marks, list) or SUM not in marks:
        return args
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("output_mask")
    mask = [asked and mark is not SUM for asked, mark in zip(args[place], marks, strict=True)]
    return (*args[:place], mask, *args[place + 1 :])


Inputs = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Values of the trained parameters, the model's other tensors, and the batch's tensors."""

_FORMS = 8
"""Graphs of this many forms of batch and modes are kept at one time."""


class ProvedGradient:
    """The graphs of a model's loss, by the forms of batches and the modes of the model.

    `loss` is the user's own, and `loss_of` that of one example's output and its targets. `values` put the trained
    parameters in place, and `held` snapshots the state of model and loss. `prove`, and `current` for a batch of another
    form, raise NotProved if there is no proof, with the operation and the line.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        loss_of: ExampleLoss,
        values: Values,
        held: Callable[[], Snapshot],
    ) -> None:
        self.model, self.loss, self.values = model, loss, values
        self._loss_of, self._snapshot = loss_of, held
        self.programs: dict[Hashable, Program] = {}
        self._graphs: dict[Hashable, tuple[Captured, int | None]] = {}
        self._device = next(model.parameters()).device
        self._calls = 0
        self.lean = False  # whether heads are taken without their logits
        self.prefers_pairs: Prefers = None  # see `dpcore.spec.pair_ops.PairOperations.prefers_pairs`
        self.compiled = False  # whether torch.compile makes kernels of the graphs
        self.precision: torch.dtype | None = None  # see `dpcore.torch.model.precision`
        self.changes_state = False  # whether the code changed anything lasting during the capture

    @property
    def draws(self) -> bool:
        """Whether a graph draws random numbers."""
        return any(program.draws for program in self.programs.values())

    def prove(self, example: Tree) -> Program:
        """Return the graph of the model in its present modes, for batches in the form of `example`."""
        batch = example.batch if isinstance(example, batches.Public) else example
        return self._program(self._form(batch), batch)

    def current(self, point: Sequence[torch.Tensor], batch: Tree, real: bool) -> tuple[Program, Inputs]:
        """Return the graph for a batch, and its inputs; `real`: the batch is of the data, not made up."""
        form = self._form(batch)
        self._calls += real
        if real and form in self.programs and _is_checked(self._calls):
            self._check_current(form, batch)
        program = self._program(form, batch)
        return program, (point, self._held(program), list(batches.leaves(batch)))

    def digest(self) -> str:
        """Return a digest of the model's graphs and their constants; another model or loss has another one."""
        return " ".join(program.digest for program in self.programs.values())

    def _form(self, batch: Tree) -> Hashable:
        """Return all that a graph depends on, values excluded: the batch's form, and the modules' Python state."""
        return cache.structure(batch), cache.python_state([self.model, self.loss])

    def _program(self, form: Hashable, batch: Tree) -> Program:
        if form not in self.programs:
            known = form in self._graphs
            self.programs[form] = self._made(*self._graphs[form]) if known else self._proved(form, batch)
        return self.programs[form]

    @uncollected()
    def _proved(self, form: Hashable, batch: Tree) -> Program:
        before, made = self._snapshot(), Made()
        found, check_numbers, classes = self._captured(batch, before, made)
        try:
            program = self._made(found, classes)
        except NotProved:  # a size or number of the model's own may be a multiple of the number of examples
            found, check_numbers, classes = self._captured(batch, before, made, found.count)
            program = self._made(found, classes)
        with self._undone(before, made), seeded(self._device, TRIAL), self.values.captured(), self._apart():
            check_numbers()
        if len(self._graphs) >= _FORMS:
            oldest = next(iter(self._graphs))
            del self._graphs[oldest]
            self.programs.pop(oldest, None)
        self._graphs[form] = found, classes
        return program

    def _made(self, found: Captured, classes: int | None) -> Program:
        gathers = self.values.gathered(found)

        def program() -> Program:
            made = Program(found, gathers, self.lean, self.prefers_pairs)
            made.classes = classes
            if self.compiled:
                made.compile()
            return made

        if gathers is not None or found.has_tensors:
            return program()
        key = found.digest, found.forms, found.held, classes, self.compiled, self.lean, self.prefers_pairs
        return cache.get(key, program)

    def _captured(
        self, batch: Tree, before: Snapshot, made: Made, above: int = 0
    ) -> tuple[Captured, Callable[[], None], int | None]:
        """Return the graph and a check of it, and the classes of the model's output under a loss over classes."""
        with self._undone(before, made):
            with seeded(self._device, TRIAL) as drew, self.values.captured(), Calls() as calls, self._apart():
                forward = partial(precision.forward, self.precision, self._device)
                names, loss_of = self.values.names, self._loss_of
                found, check_numbers = capture(self.model, names, loss_of, batch, made, forward, above)
                if not all(isinstance(generator, torch.Generator) for generator in drew()):  # noqa: TID251
                    raise NotCaptured(
                        "model or loss draws random numbers by NumPy or Python, one for a whole micro-batch"
                    )
            self.changes_state = self.changes_state or _changed(before, self._snapshot)
        return found, check_numbers, calls.classes

    @contextmanager
    def _undone(self, before: Snapshot, made: Made) -> Iterator[None]:
        """Take back what the user's code changes, and refuse tensors that it keeps."""
        try:
            yield
        finally:
            before.restore()
            made.empty_caches()
        made.refuse_left(self.model)

    def _apart(self) -> AbstractContextManager[None]:
        return precision.apart(self.precision, self._device)

    def forget(self) -> None:
        """Make the programs of the captured graphs again, since an option has another value."""
        self.programs = {}

    def _check_current(self, form: Hashable, batch: Tree) -> None:
        """Capture the model again, and refuse it if it now computes something else.

        It would be no leak, since the proved graph runs. But it would be another model than the user's.
        """
        program = self.programs[form]
        found, _, _ = self._captured(batch, self._snapshot(), Made(), program.count - 1)
        if found.digest != program.digest:
            raise ArgumentError(
                f"model={type(self.model).__name__}: computes something else than when it was last looked at, by a value "
                "that its Python code reads; keep such a value as an attribute of a module, where every step sees it"
            )

    def _held(self, program: Program) -> list[torch.Tensor]:
        """Return the present values of the model's tensors that the graph reads, trained parameters excluded."""
        present = dict(slots(self.model)) if program.held_names else {}
        return [local(present[name]) for name in program.held_names]


def _is_checked(call: int) -> bool:
    """Whether it is call 16, 64, 256 and so on: a capture takes as long as some steps do."""
    return call >= 16 and call & (call - 1) == 0 and call.bit_length() % 2 == 1


def _changed(before: Snapshot, snapshot: Callable[[], Snapshot]) -> bool:
    """Whether something lasting changed; tensors without values cannot be compared, and count as changed."""
    try:
        return before.changed(snapshot()) is not None
    except Exception:  # noqa: BLE001 - such tensors raise of many kinds
        return True
