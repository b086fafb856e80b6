"""What shapes the sums of a torch run: data, model, loss, libraries, device and the way gradients are computed."""

from __future__ import annotations

import hashlib
import hmac
import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

import dpcore
from dpcore import fingerprint
from dpcore.plan import Plan, versions
from dpcore.report.canonical import digest
from dpcore.torch.data import Data
from dpcore.torch.engine import Engine

_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "DPCORE_NUM_THREADS", "TRITON_INTERPRET")


def data_fingerprint(data: Data, salt: bytes, data_id: str | None = None) -> str:
    """Return an HMAC of the data, or of the caller's name for them; empty for a dataset that nobody named.

    Keyed by the ledger's salt: the bare digest of private data would let anybody test a guess of them.
    """
    if data_id is not None:
        return hmac.new(salt, f"named {data.length} {data_id}".encode(), "sha256").hexdigest()
    if data.tensors is None:
        return ""
    total = hmac.new(salt, b"tensors", "sha256")
    for tensor in data.tensors:
        _feed(total.update, tensor)
    return total.hexdigest()


def parameters_digest(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers by name, trained or not."""
    total = hashlib.sha256()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        total.update(name.encode())
        _feed(total.update, tensor)
    return total.hexdigest()


def _feed(update: Callable[[bytes], None], tensor: torch.Tensor) -> None:
    update(f"\0{tuple(tensor.shape)} {tensor.dtype}\0".encode())
    whole = tensor.detach().contiguous().cpu().reshape(-1)
    update(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")


def run_digest(plan: Plan, engine: Engine, loss: Any, data: str, microbatch_size: int) -> str:
    """Return the digest of all that shapes the sums of a run besides its state and its learning rates.

    Learning rates and the other numbers of parameter groups are logged by the ledger step by step.
    """
    mechanism, model = engine.mechanism, engine.gradient.model
    packages = (dpcore, sys.modules[mechanism.backend.__name__])  # type: ignore[attr-defined]
    return digest(
        {
            "data": data,
            "method": plan.method.describe(),
            "noise_multiplier": plan.noise_multiplier,
            "sampler": plan.sampler.describe(),
            "steps": plan.steps,
            "layout": mechanism.layout.digest(),
            "rng": mechanism.rng,
            "backend": mechanism.backend.name,
            "model": _model_digest(model),
            "loss": _code_of(loss),
            "microbatch_size": microbatch_size,
            "vectorize": engine.gradient.vectorize,
            "code": fingerprint.code_digest(*map(fingerprint.package_folder, packages)),
            "versions": {**versions(), "torch": torch.__version__},
            "device": _device(next(model.parameters()).device),
            **_arithmetic(),
            **fingerprint.machine(),
        }
    )


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _arithmetic() -> dict[str, Any]:
    """Switches of torch that change how sums round."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32],
        "environment": {name: os.environ.get(name, "") for name in _ENVIRONMENT},
    }


def _model_digest(model: nn.Module) -> str:
    # repr has the settings of torch's own layers; layers of the caller's are known by their code.
    kinds = {type(module) for module in model.modules() if not type(module).__module__.startswith("torch.")}
    codes = sorted(f"{kind.__module__}.{kind.__qualname__} {_methods(kind)}" for kind in kinds)
    return digest({"repr": repr(model), "codes": codes, "training": [m.training for m in model.modules()]})


def _methods(kind: type) -> str:
    found = [
        f"{name} {_code_of(value)}"
        for base in kind.__mro__
        if not base.__module__.startswith(("torch.", "builtins"))
        for name, value in sorted(vars(base).items())
        if hasattr(value, "__code__")
    ]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _code_of(function: Any) -> str:
    """Return a digest of what a function does, as far as its own code says."""
    if isinstance(function, nn.Module):
        return _model_digest(function)
    code = getattr(function, "__code__", None)
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    parts = [] if code is None else list(_code_parts(code))
    defaults = repr(getattr(function, "__defaults__", None))
    return hashlib.sha256("\n".join([name, defaults, *parts]).encode()).hexdigest()


def _code_parts(code: CodeType) -> Iterable[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            # The order of a set of strings changes from process to process.
            yield repr(sorted(map(repr, constant))) if isinstance(constant, frozenset) else repr(constant)
