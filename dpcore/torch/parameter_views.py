"""The parameters as the mechanism works on them: contiguous arrays of the backend, float32 or float64.

A parameter that already is one crosses without a copy. One of 16 bits, or in another memory format than row-major, has
a contiguous copy here (16 bits in float32), and what the mechanism made of the copy is cast and written back last.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError, BackendError
from dpcore.spec.backends import chosen_backend, load_backend
from dpcore.spec.ops import Backend
from dpcore.torch.model.functional import local


def backend_for(model: torch.nn.Module) -> Backend[Any]:
    """Return the backend that was set; if none was, the one for where the model is."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return load_backend(chosen_backend() or ("triton" if on_gpu else "torch"))


def with_graphs(backend: Backend[Any]) -> Backend[Any]:
    """Return the backend for one run that repeats its launches as CUDA graphs; refuse one that launches nothing."""
    if backend.name != "triton":
        raise BackendError(
            f"cuda_graphs=True under backend {backend.name!r}: must be False, since only backend 'triton' has launches "
            "to repeat"
        )
    chosen: Any = backend
    repeating: Backend[Any] = chosen.with_graphs()
    return repeating


def check_place(backend: Backend[Any], model: torch.nn.Module) -> torch.device:
    """Return the one device of the model's parameters; refuse a model that is not where the backend computes.

    Nothing is ever copied to another device silently.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if not tensors:
        raise ArgumentError("model without parameters: there is nothing to train")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ArgumentError(f"model on devices {sorted(map(str, devices))}: move it to one device")
    (device,) = devices
    if (backend.arrays == "numpy" or backend.name == "torch") and device.type != "cpu":
        raise BackendError(
            f"model on device {str(device)!r} under backend {backend.name!r}, which computes on the CPU: call "
            'dpcore.set_backend("triton") before make_private, or move the model to the CPU'
        )
    if backend.name == "triton" and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendError(
            f"model on device {str(device)!r} under backend 'triton': move the model to a CUDA device, call "
            'dpcore.set_backend("torch"), or set TRITON_INTERPRET=1 before Python starts (slow, for tests)'
        )
    if backend.name == "triton" and any(p.dtype == torch.float64 for p in model.parameters() if p.requires_grad):
        raise BackendError(
            "model with float64 parameters under backend 'triton', which computes in float32: call model.float() and "
            'give the data in float32, or call dpcore.set_backend("torch") with the model on the CPU'
        )
    return device


class Working:
    """Working arrays of a model's trained parameters, which have these names."""

    def __init__(self, backend: Backend[Any], names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._numpy = backend.arrays == "numpy"
        self._kinds = [(p.shape, p.dtype, p.device) for p in self.parameters]
        widened = {_widened(p.dtype) for p in self.parameters}
        if len(widened) > 1:
            raise ArgumentTypeError(
                f"parameters of dtypes {sorted(str(p) for p in {p.dtype for p in self.parameters})}: float64 cannot be "
                "mixed with others, since one clip norm spans them all; convert the model to one"
            )
        (self.dtype,) = widened
        self.copies: dict[str, torch.Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take up what the user did to the parameters since the last step (loaded weights, say).

        Refuses another shape, dtype or device: the run's layout is fixed when it is built.
        """
        kept: dict[str, torch.Tensor] = {}
        for name, parameter, kind in zip(self.names, self.parameters, self._kinds, strict=True):
            if (parameter.shape, parameter.dtype, parameter.device) != kind:
                raise ArgumentError(
                    f"parameter {name!r} changed from {_words(kind)} to "
                    f"{_words((parameter.shape, parameter.dtype, parameter.device))}: call make_private again"
                )
            value = local(parameter)
            if value.dtype == self.dtype and value.is_contiguous():
                self.copies.pop(name, None)
            elif name in self.copies:
                kept[name] = value
            else:
                self.copies[name] = self._copy(value)
        # A copy holds digits that the cast drops: it is replaced only where the parameter no longer fits it. All are
        # compared before the host waits, once.
        fits = [(self.copies[name].to(value.dtype) == value).all() for name, value in kept.items()]
        for (name, value), fit in zip(kept.items(), torch.stack(fits).tolist() if fits else (), strict=True):
            if not fit:
                self.copies[name] = self._copy(value)

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype, memory_format=torch.contiguous_format, copy=True)

    def tensors(self) -> list[torch.Tensor]:
        """Return the working tensors: the parameters' own memory, or the copies."""
        return [self.copies.get(name, local(p)) for name, p in zip(self.names, self.parameters, strict=True)]

    def arrays(self) -> list[Any]:
        """Return the working tensors as the backend's arrays, sharing memory."""
        return [self.to_array(tensor) for tensor in self.tensors()]

    def store(self) -> None:
        """Write the copies back, cast last, and tell autograd that all parameters changed."""
        named = dict(zip(self.names, self.parameters, strict=True))
        with torch.no_grad():
            if self.copies:
                torch._foreach_copy_([named[name] for name in self.copies], list(self.copies.values()))
            for name, parameter in named.items():
                if name not in self.copies:
                    # The backend wrote to its memory unseen; a graph that saved the old value must not be used again.
                    torch.autograd.graph.increment_version(parameter)

    def to_array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as the backend's array, sharing memory."""
        return tensor.numpy() if self._numpy else tensor

    def to_tensor(self, array: Any) -> torch.Tensor:
        """Return the backend's array as a tensor, sharing memory."""
        return torch.from_numpy(array) if self._numpy else array


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


def _words(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
