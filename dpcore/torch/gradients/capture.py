"""A model and its loss as one graph, from parameters, buffers and a batch to the gradient of the summed losses.

The model's Python code runs once, on tensors that have shapes and no values or memory. Nothing of the data reaches it,
now or later: a step runs the graph. So no state that Python keeps, no branch on a value and no file can carry one
example's values to another one.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import _lru_cache_wrapper, cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import disable_autocast_cache, make_fx
from torch.fx.node import map_arg
from torch.fx.traceback import preserve_node_meta
from torch.nn.modules import transformer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from dpcore.errors import ArgumentError, DpcoreError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.axis import has_rule
from dpcore.torch.gradients.errors import NotCaptured
from dpcore.torch.gradients.losses import ExampleLoss, example_losses, losses_inside
from dpcore.torch.gradients.replaced import REPLACED
from dpcore.torch.model.functional import Leaves, first_line, places, refuse_changed, refuse_foreign, slots, within
from dpcore.torch.model.joint import split

COUNTS = (61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131)
"""Numbers of examples to capture at: the first that divides no size of parameters, buffers and one example.

The code also runs at twice the next number, so that one number is odd and one is even.
"""

RANDOM = torch.Tag.nondeterministic_seeded
_DEVICE = torch.ops.prim.device.default


@dataclass(eq=False)
class Captured:
    """A model's graph.

    It takes trained parameters, then the model's other tensors, then the batch's tensors; it returns the gradients,
    some of which may be None. The digest is equal for graphs that compute the same.
    """

    graph: Graph
    constants: nn.Module  # has the tensors that the graph reads as attributes
    count: int  # of examples, when it was captured
    held: tuple[str, ...]  # the model's own tensors that the graph reads, trained parameters excluded
    parameters: int  # how many placeholders are trained parameters
    batch: int  # and the batch's
    digest: str

    @property
    def places(self) -> list[Node]:
        """The placeholders."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def forms(self) -> Hashable:
        """How the placeholders lie in memory, and where; the digest has their shapes and dtypes."""
        values = [place.meta["val"] for place in self.places]
        return tuple((v.stride() if v.layout is torch.strided else v.layout, v.device) for v in values)

    @property
    def has_tensors(self) -> bool:
        """Whether the graph reads tensors of the code's own, as one in a closure; they belong to one model."""
        return any(node.op == "get_attr" for node in self.graph.nodes)

    @property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(RANDOM in getattr(node.target, "tags", ()) for node in self.graph.nodes)


def capture(
    model: nn.Module,
    names: Sequence[str],
    loss: ExampleLoss,
    example: Tree,
    made: Made | None = None,
    forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    above: int = 0,
) -> tuple[Captured, Callable[[], None]]:
    """Return the graph of a model in its present modes, for batches in the form of `example`, and a check of it.

    The check runs the code again at another number of examples, and raises NotCaptured if the code uses that number
    otherwise than as a size. It keeps `example`, and is not to be kept.

    `names` are the trained parameters, and `loss` is that of one example. Only shapes, dtypes and devices of `example`
    are read. `made` records the tensors that the code gets and makes, and `forward` gives the context of the forward
    pass and the loss. The numbers of examples are larger than `above`. Raises NotCaptured if a graph cannot express
    what the code does.
    """
    named = dict(model.named_parameters())
    trained = places(model, names)
    kept = [(name, tensor) for name, tensor in slots(model) if name not in trained]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    leaves = list(batches.leaves(example))
    count, another = _counts([*named.values(), *(t for _, t in kept)], leaves, above)
    values = [_faked(fake, named[name]) for name in names]
    others = [_faked(fake, tensor) for _, tensor in kept]
    held = [name for name, _ in kept]
    tracer = _Tracer(model, made or Made())

    def given(count: int) -> list[torch.Tensor]:
        with fake:
            batch = [torch.empty((count, *t.shape[1:]), dtype=t.dtype, device=t.device) for t in leaves]
        tracer.made.note(batch)
        return [*values, *others, *batch]

    def joint(numbers: _Numbers, *flat: torch.Tensor) -> list[torch.Tensor | None]:
        points, own = list(flat[: len(values)]), iter(flat[len(values) + len(others) :])
        batch = batches.tree_map(lambda _: next(own), example)
        with torch.enable_grad():
            points = [point.detach().requires_grad_() for point in points]
            state = {name: points[place] for name, place in trained.items()}
            state |= zip(held, (t.detach() for t in flat[len(values) : len(values) + len(others)]), strict=True)
            tracer.made.note(list(state.values()))
            inputs, targets = split(model, batch)

            def both() -> None:
                with numbers:
                    with forward():
                        replaced.loss = False
                        output = batches.call(model, inputs)
                        replaced.loss = True
                        losses = example_losses(loss, output, targets, numbers.count)
                    if losses.requires_grad:
                        refuse_foreign(losses, [*points, *replaced.leaves])
                        torch.autograd.backward(losses, torch.ones_like(losses))

            replaced = _Replaced(numbers.count)
            with replaced:
                within(model, state, both)
        return [point.grad for point in points]

    numbers, flat = _Numbers(count, tracer), given(count)

    def captured(mode: _Tracer | AbstractContextManager[None], run: Callable[[], Any]) -> Any:
        import torch._dynamo  # noqa: F401 - torch would do so by itself, in the middle of these contexts

        try:
            with fake, as_written(), _in_place_of_torchs(), disable_autocast_cache(), _unlogged(), mode:
                return run()
        except (DpcoreError, NotCaptured):
            raise
        except Exception as cause:
            raise _not_captured(cause, tracer.last) from cause

    def check_numbers() -> None:
        captured(nullcontext(), lambda: joint(_Numbers(another, tracer, numbers), *given(another)))

    with fake:
        tracer.begin(flat)
    tracer.end(captured(tracer, lambda: joint(numbers, *flat)))
    root, graph = captured(nullcontext(), lambda: _functional(tracer.root, tracer.graph, flat, fake))
    _same_masks(root, graph, tracer.random)
    if any(node.kwargs.get("generator") is not None for node in graph.nodes):
        raise NotCaptured("random numbers are drawn from a generator of the model's own")
    _clean(graph)
    _refuse_written(graph, model, [*names, *held])
    digest = _digest(root, graph, flat, count)
    return Captured(graph, root, count, tuple(held), len(values), len(leaves), digest), check_numbers


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep torch from logging a traceback of sizes that do not fit each other: the error that is raised says it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _counts(held: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], above: int) -> tuple[int, int]:
    sizes = {size for tensor in held for size in tensor.shape} | {size for t in leaves for size in t.shape[1:]}
    primes = (count for count in (*COUNTS, 8191, 8209) if count > above)
    fitting = [count for count in primes if not any(size and size % count == 0 for size in sizes)]
    return fitting[0], 2 * fitting[1]


class _Numbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the numbers that the code passes to operations, and refuses those that follow the number of examples.

    The code runs a second time with another number of examples B. Each number must be the same in both runs, or k B in
    both with the same k, which the proof takes for a size. Anything else, such as sqrt(B), is refused.
    """

    def __init__(self, count: int, tracer: _Tracer, earlier: _Numbers | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.tracer, self.earlier = count, tracer, earlier
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _DEVICE and isinstance(args[0], FakeTensor):  # torch reads it all the time
            return args[0].fake_device
        kwargs = kwargs or {}
        found: list[Any] = []
        for given in (*args, *kwargs.values()):
            found += map(_number, given) if isinstance(given, (list, tuple)) else [_number(given)]
        self.calls.append((function, found))
        # torch's own calls from here on are no code of the user's, and need no check.
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
        self.tracer.made.note(result, "" if self.earlier else self.tracer.last)
        if self.earlier is not None and not self._agrees(len(self.calls) - 1):
            where = self.tracer.where()
            raise NotCaptured(f"{function} uses the number of examples{f' ({where})' if where else ''}")
        return result

    def _agrees(self, place: int) -> bool:
        assert self.earlier is not None
        if place >= len(self.earlier.calls):
            return False
        function, found = self.calls[place]
        former, before = self.earlier.calls[place]
        if function is not former or len(found) != len(before):
            return False
        return all(one == two or self._counts(one, two) for one, two in zip(before, found, strict=True))

    def _counts(self, before: Any, found: Any) -> bool:
        assert self.earlier is not None
        if not type(before) is type(found) is int:
            return False
        (times, rest), (own, own_rest) = divmod(before, self.earlier.count), divmod(found, self.count)
        return times == own and rest == own_rest == 0


def _number(leaf: Any) -> Any:
    """Return a key of a number, or of a tensor that has values; None for anything else."""
    if isinstance(leaf, torch.Tensor):
        if isinstance(leaf, FakeTensor) or type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
            return None
        with _disable_current_modes():
            return value_digest(leaf)
    return repr(leaf) if type(leaf) is float else leaf if type(leaf) is int else None


def value_digest(tensor: torch.Tensor) -> str:
    """Return a key of a tensor's values."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(batches.content(tensor)).hexdigest()}"


def _faked(fake: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    if hasattr(tensor, "full_tensor"):  # the graph of a sharded model takes whole tensors
        with fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)  # type: ignore[return-value]
    return fake.from_tensor(tensor.detach(), static_shapes=True)


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off meanwhile: it would run often while a graph grows, and find no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def as_written() -> AbstractContextManager[None]:
    """Let compiled modules run as they were written."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class _Replaced(Leaves):
    """Puts operations that the proof can follow in the place of some functions of torch."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.loss = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = None if self.loss else losses_inside(function, args, kwargs, self.count)
        if found is not None:
            return found
        if function in REPLACED:
            with self:
                return REPLACED[function](*args, **kwargs)
        return super().__torch_function__(function, types, args, kwargs)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes every operation into a graph, with the module and the user's line that it comes from.

    It also records the state of the generator before each draw. A gradient checkpoint runs a part of the model again
    from the generator's earlier state. Its draws then have the states of the first ones, and are the same masks
    (`_same_masks`).
    """

    def __init__(self, model: nn.Module, made: Made) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {module: name for name, module in model.named_modules()}
        self.made = made
        self.graph, self.root = Graph(), nn.Module()
        self._nodes: Any = WeakIdKeyDictionary()  # of the tensors without values
        self._constants: dict[int, tuple[torch.Tensor, Node]] = {}
        self._decompositions = _decompositions()
        self.random: list[str] = []
        self.last = ""
        self._states = {_state_name()}  # the first one, and those that draws led to

    def begin(self, flat: Sequence[torch.Tensor]) -> None:
        """Let the graph take these tensors."""
        for place, tensor in enumerate(flat):
            self._follow(tensor, self.graph.placeholder(f"flat_{place}"))

    def end(self, results: Sequence[torch.Tensor | None]) -> None:
        """Let the graph return these tensors."""
        self.graph.output(self._written(list(results)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not FakeTensor for kind in types):
            return NotImplemented  # such a class splits its own operations into others
        if function in _SIZES:
            return function(*args, **kwargs)
        if not has_rule(function):
            with self:
                made_of = self._decompositions.get(function, function.decompose)
                result = made_of(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if function is torch.ops.aten.lift_fresh.default:  # the copy of a constant may be written to
            function = torch.ops.aten.lift_fresh_copy.default
        self.last = self.where()
        if RANDOM in function.tags:
            self.random.append(_advance(self._states))
        given = self._written(args), self._written(kwargs)
        result = function(*args, **kwargs)
        if function._schema.is_mutable or isinstance(result, (torch.Tensor, tuple, list)):
            node = self.graph.call_function(function, *given)
            node.meta["stack_trace"] = self.last
            self._follow(result, node)
        return result

    def where(self) -> str:
        """Return the place in the code that runs."""
        return _where(self._names)

    def _written(self, tree: Any) -> Any:
        """Return arguments as the graph has them."""
        if isinstance(tree, torch.Tensor):
            node = self._nodes.get(tree)
            return self._constant(tree) if node is None else node
        if isinstance(tree, dict):
            return {name: self._written(value) for name, value in tree.items()}
        return type(tree)(map(self._written, tree)) if type(tree) in (list, tuple) else tree

    def _constant(self, tensor: torch.Tensor) -> Node:
        if isinstance(tensor, FakeTensor):
            raise NotCaptured("the code meets a tensor of an earlier call")
        if id(tensor) not in self._constants:
            name = f"_tensor_constant{len(self._constants)}"
            with _disable_current_modes():
                self.root.register_buffer(name, tensor.detach(), persistent=False)
            self._constants[id(tensor)] = tensor, self.graph.get_attr(name)
        return self._constants[id(tensor)][1]

    def _follow(self, result: Any, node: Node) -> Any:
        """Record which node gives a result; return the result's form, which does not change later."""
        form: Any = result
        if isinstance(result, torch.Tensor):
            self._nodes[result] = node
            form = _form(result)
        elif isinstance(result, (tuple, list)):
            form = type(result)(
                self._follow(each, self.graph.call_function(operator.getitem, (node, place)))
                for place, each in enumerate(result)
            )
        node.meta["val"] = form
        return form


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return what `detach` does; a tensor without values takes a tenth of the time."""
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
        return tensor.detach()
    with torch._C._DisableTorchDispatch():
        meta = torch.ops.aten.detach.default(tensor)
    return FakeTensor(tensor.fake_mode, meta, tensor.fake_device)


_SIZES = {
    _DEVICE, torch.ops.aten.size.default, torch.ops.aten.stride.default, torch.ops.aten.storage_offset.default,
}  # fmt: skip


def _state() -> torch.Tensor:
    with _disable_current_modes():
        return torch.default_generator.get_state()


def _set_state(state: torch.Tensor) -> None:
    with _disable_current_modes():
        torch.default_generator.set_state(state)


def _state_name() -> str:
    with _disable_current_modes():
        return hashlib.sha256(_state().numpy().tobytes()).hexdigest()


def _advance(states: set[str]) -> str:
    """Return the name of torch's present state, and put another one in its place that follows from it."""
    name = _state_name()
    if name not in states:
        raise NotCaptured("the code seeds torch's generator")
    with _disable_current_modes():
        torch.default_generator.manual_seed(int(name[:16], 16))
    states.add(_state_name())
    return name


@contextmanager
def _in_place_of_torchs() -> Iterator[None]:
    """Let gradient checkpoints read and set the generator's own state, which a tensor without memory cannot store.

    Also let torch's transformers take a mask as it is: they read its values only to compute less if it is causal.
    """
    ours: list[tuple[Any, str, Any]] = [
        (torch, "get_rng_state", _state),
        (torch, "set_rng_state", _set_state),
        (transformer, "_detect_is_causal_mask", lambda mask, is_causal=None, size=None: is_causal is True),  # noqa: ARG005
    ]
    kept = [getattr(owner, name) for owner, name, _ in ours]
    try:
        for owner, name, own in ours:
            setattr(owner, name, own)
        yield
    finally:
        for (owner, name, _), torchs in zip(ours, kept, strict=True):
            setattr(owner, name, torchs)


_OURS = (torch.__path__[0], __file__.rpartition("gradients")[0], contextlib.__file__)


@cache
def _is_users(file: str) -> bool:
    return not file.startswith((*_OURS, "<"))


def _where(names: dict[nn.Module, str]) -> str:
    """Return the innermost module, and line that is neither torch's nor dpcore's: "module 'lstm' (LSTM), net.py, line 9"."""
    frame: Any = sys._getframe(2)
    module = ""
    while frame is not None:
        code = frame.f_code
        if not module and code.co_name == "forward":
            owner = frame.f_locals.get(next(iter(code.co_varnames), ""))
            name = names.get(owner, "") if isinstance(owner, nn.Module) else ""
            module = f"module {name!r} ({type(owner).__name__}), " if name else ""
        if _is_users(code.co_filename):
            return f"{module}{code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return module.removesuffix(", ")


def _functional(root: nn.Module, graph: Graph, inputs: Sequence[Any], fake: FakeTensorMode) -> tuple[nn.Module, Graph]:
    """Return the graph without operations in place; their writes to inputs remain, at the end.

    Copies of constants may be written to, so constants are inputs while the graph is made.
    """
    constants = {name: _faked(fake, value) for name, value in root.named_buffers()}
    for node in graph.nodes:
        if node.op == "get_attr":  # a rule must see a constant's shape: it may have fewer rows than there are examples
            node.meta["val"] = constants[node.target]
        if node.target in _DROPPING and list(node.args[0].users) == [node] and node.args[0].target in _FRESH:
            node.target = _DROPPING[node.target]
            node.args = node.args if len(node.args) > 1 else (*node.args, 0.5)  # bernoulli_'s default
    if not any(_writes(node) for node in graph.nodes):
        return root, graph
    module = GraphModule(root, graph)

    def run(*flat: Any) -> Any:
        return _Given(module, dict(zip(constants, flat[len(inputs) :], strict=True))).run(*flat[: len(inputs)])

    with preserve_node_meta():
        made = make_fx(functionalize(run, remove="mutations"))(*inputs, *constants.values())
    places = [node for node in made.graph.nodes if node.op == "placeholder"][len(inputs) :]
    for node, (name, value) in zip(places, root.named_buffers(), strict=True):
        made.register_buffer(name, value, persistent=False)
        with made.graph.inserting_after(node):
            constant = made.graph.get_attr(name)
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)
        made.graph.erase_node(node)
    return made, made.graph


_DROPPING = {
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.div_.Scalar: torch.ops.aten.div.Scalar,
    torch.ops.aten.copy_.default: torch.ops.aten.copy.default,
}
"""Operations in place that dropout, and autograd where a gradient lies otherwise than its parameter, do on their own
memory, and those that give a new tensor."""
_FRESH = {
    torch.ops.aten.empty_like.default, torch.ops.aten.bernoulli.p, torch.ops.aten.new_empty_strided.default,
}  # fmt: skip


class _Given(Interpreter):
    """Runs a graph with other values instead of its constants."""

    def __init__(self, module: GraphModule, constants: dict[str, Any]) -> None:
        super().__init__(module)
        self.constants = constants

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """See `torch.fx.Interpreter`."""
        return self.constants[target] if target in self.constants else super().get_attr(target, args, kwargs)


def _writes(node: Node) -> bool:
    return node.op == "call_function" and hasattr(node.target, "_schema") and node.target._schema.is_mutable


def _same_masks(root: nn.Module, graph: Graph, random: Sequence[str]) -> None:
    """Merge draws that were made from the same state."""
    draws = [n for n in graph.nodes if RANDOM in getattr(n.target, "tags", ())]
    if len(draws) != len(random):
        raise NotCaptured("random numbers are drawn in a way that a graph does not show")
    states = dict(zip(draws, random, strict=True))
    values = _values(root, graph, states)
    first: dict[tuple[str, Any], Node] = {}
    for node, state in states.items():
        known = first.setdefault((state, node.target), node)
        if known is not node:
            if values[known] != values[node]:
                raise NotCaptured("a gradient checkpoint draws other random numbers when it runs again")
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _values(root: nn.Module, graph: Graph, states: dict[Node, str]) -> dict[Node, int]:
    """Return a number for each value of a graph, equal for equal operations on equal values."""
    numbers: dict[Node, int] = {}
    known: dict[Any, int] = {}
    for node in graph.nodes:
        if node.target in _SAME:
            numbers[node] = numbers[node.args[0]]
            continue
        key: Any = node
        if node.op == "call_function":
            given = map_arg((node.args, node.kwargs), lambda n: f"value {numbers[n]}")
            key = node.target, states.get(node), repr(given)
        elif node.op == "get_attr":
            key = str(getattr(root, node.target))
        numbers[node] = known.setdefault(key, len(known))
    return numbers


_SAME = {torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default}


def _clean(graph: Graph) -> None:
    """Remove operations that return their argument, and errors that one example's values would raise for all."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._linalg_check_errors.default:
            graph.erase_node(node)
            continue
        same = node.args[0] if node.target in _SAME else node.args[1] if _copies(node) else None
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _copies(node: Node) -> bool:
    """Whether a node copies a whole tensor into another one of the same kind, and returns that one."""
    if node.target is not torch.ops.aten.copy.default:
        return False
    kinds = [(value.meta["val"].shape, value.meta["val"].dtype) for value in node.args[:2]]  # type: ignore[union-attr]
    return kinds[0] == kinds[1]


def _refuse_written(graph: Graph, model: nn.Module, names: Sequence[str]) -> None:
    """Refuse writes to the model's own tensors; drop those to its copy of the batch."""
    held = [node for node in graph.nodes if node.op == "placeholder"]
    number = {node: place for place, node in enumerate(held)}
    for node in list(graph.nodes):
        if not _writes(node):
            continue
        target = node.args[0]
        if number.get(target, -1) >= len(names) and not node.users:
            graph.erase_node(node)
        elif target in number:
            refuse_changed(model, [names[number[target]]])
        else:
            raise NotCaptured(f"{node.target} writes to a tensor that is kept between calls")


def _not_captured(cause: Exception, where: str) -> NotCaptured:
    first, name = first_line(cause), type(cause).__name__
    if "DataDependent" in name or "DynamicOutputShape" in name or "data-dependent" in first.lower():
        first = "a value decides what the code does, or a shape (.item(), bool(), a mask as an index)"
    return NotCaptured(f"{first}{f' ({where})' if where else ''}")


def _digest(root: nn.Module, graph: Graph, inputs: Sequence[torch.Tensor], count: int) -> str:
    """Return a digest, equal for graphs that compute the same.

    Values that follow from constants alone count as constants: a table that the code keeps is computed in one capture,
    and is a constant in the next one.
    """
    constants: dict[Node, torch.Tensor] = {}
    numbers: dict[Node, str] = {}
    lines = [str([(tuple(t.shape), str(t.dtype)) for t in inputs])]

    def own(node: Node) -> str:
        if node not in numbers:
            numbers[node] = value_digest(constants[node])
        return numbers[node]

    with torch.no_grad():
        for node in graph.nodes:
            value = _constant(root, node, constants, count)
            if value is not None:
                constants[node] = value
                continue
            lines.append(f"{node.target} {map_arg((node.args, node.kwargs), own)}")
            numbers[node] = f"%{len(lines)}"
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _constant(root: nn.Module, node: Node, constants: dict[Node, torch.Tensor], count: int) -> torch.Tensor | None:
    """Return the value of a node that depends on no input of the graph; None for other nodes, and for large values."""
    if node.op == "get_attr":
        held = getattr(root, str(node.target))
        return held if isinstance(held, torch.Tensor) and held.layout is torch.strided else None
    kind = node.meta.get("val")
    if node.op != "call_function" or not isinstance(kind, torch.Tensor) or kind.numel() > _LARGE:
        return None
    fixed = all(i in constants for i in node.all_input_nodes) and not any(
        size % count == 0 for size in kind.shape if size
    )
    tags = getattr(node.target, "tags", (RANDOM,))
    if not fixed or RANDOM in tags or "empty" in str(node.target):
        return None
    try:
        value: torch.Tensor = node.target(*map_arg(node.args, constants.get), **map_arg(node.kwargs, constants.get))  # type: ignore[operator]
    except Exception:  # noqa: BLE001 - what cannot be computed counts by its operation
        return None
    return value


_LARGE = 1 << 22
"""Entries of a constant that is computed for a digest, at most."""


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return how operations without a rule are made of others."""
    overloads = {op: f for op, f in decomposition_table.items() if isinstance(op, torch._ops.OpOverload)}
    return {op: f for op, f in overloads.items() if not has_rule(op)}


_DEEP = 6
"""A cached result may be a tensor, or lead to one through at most this number of objects and containers."""

_ENDS = (FunctionType, MethodType, ModuleType, type, nn.Module)
"""Kinds of objects that lead to nearly everything, and are no results."""


class Made:
    """The tensors that were made while a model was captured, and where in the code."""

    def __init__(self) -> None:
        self._notes: list[tuple[weakref.ref[torch.Tensor], str]] = []

    def note(self, result: Any, where: str = "") -> None:
        """Record the tensors of an operation's result, without keeping them alive."""
        for leaf in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(leaf, torch.Tensor):
                self._notes.append((weakref.ref(leaf), where))

    def empty_caches(self) -> None:
        """Empty the caches of functools that have such tensors; other caches stay as they are."""
        alive = {id(tensor) for ref, _ in self._notes if (tensor := ref()) is not None}
        if alive:
            for cache in [each for each in gc.get_objects() if type(each) is _lru_cache_wrapper]:
                if _holds(cache, alive):
                    cache.cache_clear()

    def refuse_left(self, model: nn.Module) -> None:
        """Refuse a model whose code has stored such a tensor permanently."""
        if not self._left():
            return
        gc.collect()  # cycles keep unreachable ones alive
        for where in self._left():
            raise ArgumentError(
                f"model={type(model).__name__}: its code keeps a tensor of one call for later ones where it cannot be "
                f"taken out again{f' ({where})' if where else ''}: keep it in a buffer, or under functools.lru_cache; "
                "of code that is not yours, call the model once before make_private, in a new process, so that what it "
                "keeps is there already"
            )

    def _left(self) -> list[str]:
        return [where for ref, where in self._notes if ref() is not None]


def _holds(cache: Any, tensors: set[int]) -> bool:
    level = [cache]
    for _ in range(_DEEP):
        level = [each for each in gc.get_referents(*level) if not issubclass(type(each), _ENDS)]
        if not tensors.isdisjoint(map(id, level)):
            return True
    return False
