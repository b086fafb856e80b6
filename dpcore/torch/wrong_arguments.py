"""The right sentence for arguments that `make_private` does not take, as those of other libraries."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.stages.method import Method
from dpcore.torch.data import batches
from dpcore.torch.data.data import arrays

P = ParamSpec("P")
R = TypeVar("R")

_METHOD = "it belongs to the method, as in dpcore.methods.dp_sgd({}=...)"
_LOADER = "give the loader's dataset as data=, and its batch size to the method"
_ELSEWHERE = {
    "module": "give model=",
    "net": "give model=",
    "optimizer": "the method has one, as in dpcore.methods.dp_sgd(lr=0.1, base='adam')",
    "data_loader": _LOADER,
    "dataloader": _LOADER,
    "loader": _LOADER,
    "dataset": "give data=",
    "criterion": "give loss=",
    "loss_fn": "give loss=",
    "delta": "give target_delta=",
    "epsilon": "give target_epsilon=",
    "noise_generator": "give key=, or leave it out",
    "poisson_sampling": "give sampling='poisson', the default, or 'fixed-order'",
    "grad_sample_mode": "give gradients=, or leave it out",
    "prefetch": "give num_workers=",
    "max_physical_batch_size": "give max_memory= or microbatch_size=, or leave it out",
    **{
        name: _METHOD.format(name)
        for name in ("noise_multiplier", "max_grad_norm", "clipping", "batch_size", "lr", "strategy", "schedule")
    },
}


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that an unknown keyword raises one sentence; missing arguments are left to Python's error."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [keyword for keyword in kwargs if keyword not in parameters]
        if unknown:
            refused = ", no ".join(f"{keyword}= ({_hint(keyword, list(parameters))})" for keyword in unknown)
            raise ArgumentTypeError(f"{function.__name__}() takes no {refused}")
        try:
            return function(*args, **kwargs)
        except ArgumentError as refusal:
            given = inspect.signature(function).bind(*args, **kwargs).arguments
            other = _other_type(**given) if "dtype" in str(refusal) else None
            if other is None:
                raise
            raise ArgumentTypeError(other) from refusal

    return call


def _other_type(model: Any, data: Any, **_: Any) -> str | None:
    """Return a sentence if inputs are float64, as those of scikit-learn, but the model is not; else None."""
    tree = arrays(data)
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float64)
    if tree is None or wanted == torch.float64:
        return None
    kind = str(wanted).removeprefix("torch.")
    for name, tensor in batches.named(batches.normalize(tree)[0]).items():
        if tensor.dtype == torch.float64:
            how = f".to({wanted})" if wanted == torch.bfloat16 else f".astype({kind!r}), or of a tensor .to({wanted})"
            return f"data: {name.replace('batch', 'inputs', 1)} of float64 for a model of {kind}: say {how}"
    return None


def _hint(keyword: str, known: list[str]) -> str:
    near = get_close_matches(keyword, known, n=1)
    return _ELSEWHERE.get(keyword) or (f"did you mean {near[0]}=" if near else "leave it out")


def check_method(method: Any) -> None:
    """Refuse an object that is no method, such as torch's optimizer."""
    if isinstance(method, Method):
        return
    must = "must be a dpcore.Method, as dpcore.methods.disk(lr=0.1) returns"
    kind = method if isinstance(method, type) else type(method)
    if issubclass(kind, torch.optim.Optimizer):
        name = kind.__name__.lower()
        remedy = f"the method has the optimizer, by name: dpcore.methods.dp_sgd(lr=0.1, base={name!r})"
        raise ArgumentTypeError(f"method={kind.__name__}: {must}; {remedy}")
    if inspect.isfunction(method):
        raise ArgumentTypeError(f"method={method.__name__}: {must}; call it, {method.__name__}(lr=0.1)")
    given = repr(method) if isinstance(method, str) else kind.__name__
    raise ArgumentTypeError(f"method={given}: {must}")
