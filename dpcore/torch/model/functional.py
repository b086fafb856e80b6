"""A call of a model with other values in the places of its parameters and buffers, and nothing left behind."""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from dpcore.errors import ArgumentError

T = TypeVar("T")

FAILURES = (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""Errors that models and losses raise if something does not fit."""


def slots(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every place of a parameter or buffer once, by a name that leads to it.

    A module that is registered under two names has its places named once: ``functional_call`` exchanges values name by
    name, and would exchange one place twice. A tied parameter has several places.
    """
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def places(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return the places of the model that hold a parameter of these names, with its index in `names`."""
    named = dict(model.named_parameters())
    trained = {id(named[name]): number for number, name in enumerate(names)}
    return {name: trained[id(tensor)] for name, tensor in slots(model) if id(tensor) in trained}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, detached and sharing memory."""
    detached: Any = tensor.detach()
    part: torch.Tensor = detached.to_local() if hasattr(detached, "to_local") else detached
    return part


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return a copy of a model's state dict with whole tensors. If it is sharded, all processes must call it."""
    state = copy.deepcopy(model.state_dict())
    for name, value in state.items():
        if hasattr(value, "full_tensor"):
            state[name] = value.full_tensor()
    return state


State = dict[str, torch.Tensor]
"""Values for the places of a model's parameters and buffers in a call, by name."""


class Values:
    """The trained parameters of a model, by `names`.

    For ordinary models, which get other values at the call; `dpcore.torch.shards` has a subclass for fully_shard.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model, self.names = model, tuple(names)

    def parameters(self) -> list[torch.Tensor]:
        """Return the model's own parameters, detached and sharing memory, in the order of `names`."""
        named = dict(self.model.named_parameters())
        return [named[name].detach() for name in self.names]

    def captured(self) -> AbstractContextManager[None]:
        """Make the model ready to be captured, as a graph of whole parameters."""
        return nullcontext()

    def gathered(self, captured: Any) -> Any:
        """Return the function that inserts the gathering of a sharded model's parameters into its graph, or None."""

    def settle(self) -> None:
        """Put the model into the state in which its parameters are the run's."""


def within(model: nn.Module, state: dict[str, torch.Tensor], function: Callable[[], T]) -> T:
    """Call a function with `state` in the places of the model's parameters and buffers, where it must stay."""
    whole = _Around(model)
    given = {f"model.{name}": value for name, value in state.items()}
    kept = dict(given)
    result: T = functional_call(whole, given, (function,), tie_weights=False)
    refuse_changed(model, (name for name in state if given[f"model.{name}"] is not kept[f"model.{name}"]))
    return result


class _Around(nn.Module):
    """Calls a function; its state is that of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@contextmanager
def untouched(model: nn.Module, point: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Refuse a model whose parameters or buffers, or the values of `point` in their places, change meanwhile.

    Their bits are compared, so that it makes no difference how somebody writes to them. They are put back, also after
    an error: what was written may tell of a private example.
    """
    held = [*point, *model.named_parameters(), *model.named_buffers()]
    kept = {_place(tensor): (name, tensor, local(tensor).clone()) for name, tensor in reversed(held)}
    changed = []
    try:
        yield
    finally:
        for name, tensor, was in kept.values():
            now = local(tensor)
            if now.shape != was.shape or not torch.equal(_bits(now), _bits(was)):
                changed.append(name)
                own = now if now.layout is torch.strided else tensor  # a copy to a detached sparse one stays there
                with torch.no_grad():
                    (own if own.shape == was.shape else own.resize_(was.shape)).copy_(was)
    refuse_changed(model, changed)


def _place(tensor: torch.Tensor) -> Hashable:
    """Return what tensors of the same memory have in common."""
    own = local(tensor)
    return (own.data_ptr(), own.shape, own.stride()) if own.layout is torch.strided else id(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes: NaN is equal to itself there, and 0 is not -0."""
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    return dense.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def refuse_changed(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse a model that changes parameters or buffers of these names."""
    for name in names:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        fault = f"changes its {'parameter' if key in module._parameters else 'buffer'} {key!r} in forward"
        remedy = "keep statistics of private examples out of the model, or put the module in eval() and freeze it"
        raise ArgumentError(refusal(owner, module, fault, remedy))


class Leaves(TorchFunctionMode):
    """Notes the tensors that the code itself lets require gradients, as for gradient checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _MADE_LEAF:
            self.leaves.append(args[0])
        return result


_MADE_LEAF = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


def refuse_foreign(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Refuse a loss whose graph ends at a tensor that is none of `leaves`."""
    known, seen = {id(leaf) for leaf in leaves}, set()
    pending: list[Any] = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise ArgumentError(
                f"the loss depends on a tensor of shape {tuple(variable.shape)} that requires gradients and is not "
                "registered as a parameter of the model, so that it would not be trained: hold modules in "
                "torch.nn.ModuleList or ModuleDict (those of a JointLoss in trained or held) and tensors as "
                "torch.nn.Parameter, or call requires_grad_(False)"
            )
        pending += [following for following, _ in node.next_functions]


@contextmanager
def in_mode(model: nn.Module, training: bool, but: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Put every module but some into a mode for the length of the block, and each back into its own."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes.keys() - set(but):
            module.training = training  # not train(): a model may override it to keep parts frozen
        yield
    finally:
        for module, own in modes.items():
            module.training = own


def refusal(name: str, module: nn.Module, fault: str, remedy: str) -> str:
    """Return the one sentence of a refusal: the module's qualified name, its class, the fault and the remedy."""
    where = f"module {name!r}" if name else "the model itself"
    return f"{where} ({type(module).__name__}) {fault}: {remedy}"


def first_line(cause: BaseException) -> str:
    """Return the first line of an exception's text, for a sentence of our own."""
    text = str(cause).strip()
    return text.splitlines()[0][:200] if text else type(cause).__name__
