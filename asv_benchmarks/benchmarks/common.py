"""Backends as a benchmark parameter: loading, skipping, inputs, and waiting for a device."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

BACKENDS = ("numpy", "torch", "triton")
KEY = bytes(range(32))
# `make bench-check` shows that every benchmark runs; what it measures is thrown away.
CHECK = os.environ.get("DPCORE_BENCH_CHECK") == "1"
if CHECK and importlib.util.find_spec("torch") is not None:
    import dpcore.torch  # noqa: F401 (once, in the process that asv forks for each of them)


def gpu() -> bool:
    """Whether Triton's kernels would run on a device here (its interpreter is never timed)."""
    if os.environ.get("TRITON_INTERPRET") == "1" or importlib.util.find_spec("triton") is None:
        return False
    if not Path("/dev/nvidiactl").exists():
        return False  # spares every skipped benchmark the import of torch
    import torch

    return torch.cuda.is_available()


def require(backend: str) -> None:
    """Skip the benchmark if `backend` cannot be timed."""
    if backend == "triton" and not gpu():
        raise NotImplementedError("the triton backend is timed on a CUDA device only")


def load(backend: str) -> Any:
    """Return the backend, or skip the benchmark."""
    require(backend)
    from dpcore.spec.backends import load_backend

    return load_backend(backend)


def require_torch() -> Any:
    """Return torch, or skip the benchmark."""
    if importlib.util.find_spec("torch") is None:
        raise NotImplementedError("torch is not installed")
    import torch

    return torch


def synchronize(backend: str) -> None:
    """Wait until the device has finished, so that the clock sees the work and not its launch."""
    if backend == "triton":
        import torch

        torch.cuda.synchronize()


def values(shape: int | tuple[int, ...], seed: int = 0) -> Any:
    """Inputs of an operation: float32, the same in every run."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
