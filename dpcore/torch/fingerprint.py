"""What shapes the sums of a torch run: data, model, loss, libraries, device and the way gradients are computed."""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dpcore
from dpcore import fingerprint
from dpcore.plan.plan import Plan
from dpcore.spec.canonical import digest
from dpcore.statement.build import versions
from dpcore.torch.data.data import Data
from dpcore.torch.describe import digest_of
from dpcore.torch.engine import Engine

_ENVIRONMENT = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "DPCORE_NUM_THREADS", "TRITON_INTERPRET",
    "MKL_CBWR", "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "NPY_DISABLE_CPU_FEATURES",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip


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


def run_digest(
    plan: Plan, engine: Engine, loss: Any, data: str, microbatch_size: int, joins: Any = None, salt: bytes = b""
) -> str:
    """Return digests, by name, of all that shapes the sums of a run besides its state and its learning rates.

    By parts, so that a ledger can say which of them changed; each an HMAC by the ledger's salt, since the weights of a
    loss, say, may come from the data, and a bare digest of them alone would let anybody test a guess.

    Learning rates and the other numbers of parameter groups are logged by the ledger step by step. Empty where the
    model, the loss, what joins examples (`joins`) or a sampler of the caller's hold something of which cannot be told
    what it computes, and on a GPU whose sums may be added up in another order each time.
    """
    mechanism, model = engine.mechanism, engine.gradient.model
    # The model's parameters are compared with the checkpoint's; those of the loss are known from here only.
    network, objective = digest_of(model, states=False), digest_of(loss)
    others = digest_of(joins, None if type(plan.sampler).__module__.startswith("dpcore.") else plan.sampler)
    device = next(model.parameters()).device
    # Warnings alone, or mode 1, leave sums that are added up in another order each time.
    if device.type != "cpu" and torch.get_deterministic_debug_mode() < 2:
        return ""
    if not network or not objective or not others:
        return ""
    packages = (dpcore, sys.modules[mechanism.backend.__name__])  # type: ignore[attr-defined]
    parts: dict[str, Any] = {
        "data": data,
        "model": network,
        "loss": objective,
        "collate_fn-or-sampler": others,
        "settings": {
            "method": plan.method.describe(),
            "noise_multiplier": plan.noise_multiplier,
            "sampler": plan.sampler.describe(),
            "steps": plan.steps,
            "layout": mechanism.layout.digest(),
            "rng": mechanism.rng,
            "backend": mechanism.backend.name,
            "microbatch_size": microbatch_size,
            "vectorize": engine.gradient.vectorize,
        },
        "libraries": {
            "code": fingerprint.code_digest(*map(fingerprint.package_folder, packages)),
            "versions": {**versions(), "torch": torch.__version__},
            "built": [torch.__config__.show(), torch.backends.cpu.get_cpu_capability(), *platform.libc_ver()],
        },
        "machine": {"device": _device(device), **fingerprint.machine()},
        "switches-of-torch": arithmetic(),
    }
    return " ".join(f"{name}:{_keyed(salt, digest(part))}" for name, part in parts.items())


def _keyed(salt: bytes, text: str) -> str:
    return hmac.new(salt, f"part {text}".encode(), "sha256").hexdigest()[:32]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def arithmetic() -> dict[str, Any]:
    """Switches of torch that change how sums round."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "dtype": str(torch.get_default_dtype()),
        "autocast": [
            str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else "" for kind in ("cpu", "cuda")
        ],
        "mkldnn": torch.backends.mkldnn.enabled,
        "denormals": bool((torch.tensor([2.0**-130]) * 1.0).any()),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32],
        "environment": {name: os.environ.get(name, "") for name in _ENVIRONMENT},
    }
