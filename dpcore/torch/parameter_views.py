"""The parameters as the mechanism works on them: contiguous arrays of the backend, float32 or float64.

A parameter that already is such an array needs no copy. A parameter of 16 bits, or not in row-major format, has a
contiguous copy here (16 bits in float32). At the end of a step, the updated copy is cast and written back.

The work on copies in each step is a handful of operations for all tensors. The host waits for none of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError, BackendError
from dpcore.spec.backends import chosen_backend, load_backend
from dpcore.spec.ops import Backend
from dpcore.torch.model.functional import local

# Elements of 16-bit parameters that are compared with their copies at once. The temporaries, 9 bytes for each, fit into
# a GPU's cache.
TOGETHER = 1 << 22


def backend_for(model: torch.nn.Module) -> Backend[Any]:
    """Return the backend that was set; if none was, the one for the model's device."""
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return load_backend(chosen_backend() or ("triton" if on_gpu else "torch"))


def with_graphs(backend: Backend[Any], cuda_graphs: bool | str) -> Backend[Any]:
    """Return a run's backend that repeats its launches as CUDA graphs; refuse a backend without launches."""
    if cuda_graphs not in (False, True, "model"):
        raise ArgumentError(f"cuda_graphs={cuda_graphs!r}: must be False, True, or 'model'")
    if not cuda_graphs:
        return backend
    if backend.name != "triton":
        raise BackendError(
            f"cuda_graphs={cuda_graphs!r} under backend {backend.name!r}: must be False, since only backend 'triton' "
            "has launches to repeat"
        )
    chosen: Any = backend
    repeating: Backend[Any] = chosen.with_graphs()
    return repeating


def with_compiled(backend: Backend[Any], wanted: bool) -> Backend[Any]:
    """Return a run's backend, with operations that torch.compile makes kernels of if that is wanted and it has some."""
    chosen: Any = backend
    return chosen.with_compiled() if wanted and backend.name == "torch" else backend


def check_place(backend: Backend[Any], model: torch.nn.Module) -> torch.device:
    """Return the one device of the model's parameters; refuse a model that is not on the backend's device.

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
    """Working arrays of a model's trained parameters and their names."""

    def __init__(self, backend: Backend[Any], names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._numpy = backend.arrays == "numpy"
        self._kinds = [(p.shape, p.dtype, p.device) for p in self.parameters]
        widened = {torch.float32 if p.dtype.itemsize == 2 else p.dtype for p in self.parameters}
        if len(widened) > 1:
            raise ArgumentTypeError(
                f"parameters of dtypes {sorted(str(p) for p in {p.dtype for p in self.parameters})}: float64 cannot be "
                "mixed with others, since one clip norm spans them all; convert the model to one"
            )
        (self.dtype,) = widened
        self.copies: dict[str, torch.Tensor] = {}
        named = zip(self.names, self.parameters, strict=True)
        self._wide = _side_by_side({name: local(p) for name, p in named if p.dtype != self.dtype})
        for wide in self._wide:
            self.copies |= wide.tensors
        self.refresh()

    def refresh(self) -> None:
        """Take over the user's changes to the parameters since the last step (loaded weights, say).

        Refuses another shape, dtype or device: the run's layout is fixed when it is built.
        """
        values, others = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, parameter, kind in zip(self.names, self.parameters, self._kinds, strict=True):
            if (parameter.shape, parameter.dtype, parameter.device) != kind:
                raise ArgumentError(
                    f"parameter {name!r} changed from {_words(kind)} to "
                    f"{_words((parameter.shape, parameter.dtype, parameter.device))}: call make_private again"
                )
            value = local(parameter)
            if value.dtype != self.dtype:
                values[name] = value
            elif value.is_contiguous():
                self.copies.pop(name, None)
            else:
                others[name] = value
                if name not in self.copies:
                    self.copies[name] = torch.empty_like(value, memory_format=torch.contiguous_format)
        if others:
            torch._foreach_copy_([self.copies[name] for name in others], list(others.values()))
        for wide in self._wide:
            wide.take_up(values)

    def tensors(self) -> list[torch.Tensor]:
        """Return the working tensors: the parameters' own memory, or the copies."""
        return [self.copies.get(name, local(p)) for name, p in zip(self.names, self.parameters, strict=True)]

    def arrays(self) -> list[Any]:
        """Return the working tensors as the backend's arrays, sharing memory."""
        return [self.to_array(tensor) for tensor in self.tensors()]

    def store(self) -> None:
        """Cast the copies and write them back. Mark all parameters as changed for autograd."""
        named = dict(zip(self.names, self.parameters, strict=True))
        with torch.no_grad():
            if self.copies:
                torch._foreach_copy_([named[name] for name in self.copies], list(self.copies.values()))
            for name, parameter in named.items():
                if name not in self.copies:
                    # Autograd did not see the backend's write; a graph that saved the old value must not be used again.
                    torch.autograd.graph.increment_version(parameter)

    def kept(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which the backend gets what was computed for examples in `dtype`.

        16 bits stay, which the backend widens a piece at a time; NumPy has no bfloat16.
        """
        halves = (torch.float16,) if self._numpy else (torch.float16, torch.bfloat16)
        stays = not dtype.is_floating_point or (dtype in halves and self.dtype == torch.float32)
        return dtype if stays else self.dtype

    def to_array(self, tensor: torch.Tensor) -> Any:
        """Return a tensor as the backend's array, sharing memory."""
        return tensor.numpy() if self._numpy else tensor

    def to_tensor(self, array: Any) -> torch.Tensor:
        """Return the backend's array as a tensor, sharing memory."""
        return torch.from_numpy(array) if self._numpy else array


class _Wide:
    """Float32 copies of 16-bit tensors of one dtype, side by side: one operation works on all of them."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        sizes = [value.numel() for value in values.values()]
        # NaN equals no value: the first comparison takes over every element.
        device = next(iter(values.values())).device
        self._memory = torch.full((sum(sizes),), float("nan"), dtype=torch.float32, device=device)
        parts = zip(values.items(), torch.split(self._memory, sizes), strict=True)
        self.tensors = {name: part.view(value.shape) for (name, value), part in parts}

    def take_up(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take over the tensors' elements that are not the casts of the copies.

        A copy has digits that the cast drops. They stay in each element that nobody changed, even if its neighbors
        changed: a mask or a clamp of a few elements after each step must not round all the others.
        """
        flat = [values[name].reshape(-1) for name in self.tensors]
        now = torch.cat(flat) if len(flat) > 1 else flat[0]
        for own, new in zip(torch.split(self._memory, TOGETHER), torch.split(now, TOGETHER), strict=True):
            torch.where(own.to(new.dtype) == new, own, new, out=own)


def _side_by_side(values: Mapping[str, torch.Tensor]) -> list[_Wide]:
    """Group tensors of one kind; a group has at most `TOGETHER` elements, or is one larger tensor."""
    groups, room = dict[Any, list[dict[str, torch.Tensor]]](), dict[Any, int]()
    for name, value in values.items():
        kind = value.dtype, value.device
        room[kind] = room.get(kind, -1) - value.numel()
        if room[kind] < 0:
            groups.setdefault(kind, []).append({})
            room[kind] = TOGETHER - value.numel()
        groups[kind][-1][name] = value
    return [_Wide(group) for several in groups.values() for group in several]


def _words(kind: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    shape, dtype, device = kind
    return f"{tuple(shape)} {str(dtype).removeprefix('torch.')} on {device}"
