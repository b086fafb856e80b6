"""Weights to begin from, out of a local file: safetensors, or a state dict of torch, which is read without its code."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpcore.errors import DataError

FILES = ("model.safetensors", "pytorch_model.bin")
"""What the file is called in a folder, as Hugging Face's and `dpcore train`'s are."""
_WRAPPED = ("model", "state_dict")


def load_weights(model: nn.Module, place: str | os.PathLike[str]) -> tuple[str, ...]:
    """Put the weights of a file, or of the file in a folder, into a model of `models.build`.

    Returns the names of parameters that stay at their start: those of the last layer, if the file has none, or one for
    other classes. All others must be there with their shapes, and no others. The file's names may lack the ``1.`` that
    the model has in front, as timm's of ViT-small do.

    Raises
    ------
    DataError
        If the file is missing, damaged or another model's; the sentence has the first names that do not fit.
    """
    path = Path(place)
    if path.is_dir():
        found = [path / name for name in FILES if (path / name).is_file()]
        if not found:
            raise DataError(f"weights={str(path)!r}: has none of {', '.join(FILES)}; name the file itself")
        path = found[0]
    given, own = _read(path), dict(model.state_dict())
    if not given.keys() & own.keys():
        given = {f"1.{name}": value for name, value in given.items()}
    last = [name for name in list(own)[-2:] if name not in given or _of_other_classes(given[name], own[name])]
    taken = {name: value for name, value in given.items() if name not in last}
    wrong = [f"lacks {name}" for name in own if name not in given and name not in last]
    wrong += [f"has {name}, which the model has not" for name in taken if name not in own]
    wrong += [
        f"has {name} of shape {tuple(value.shape)} for {tuple(own[name].shape)}"
        for name, value in taken.items()
        if name in own and value.shape != own[name].shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise DataError(f"weights={str(path)!r}: does not fit the model: it {', '.join(wrong[:3])}{more}")
    model.load_state_dict(taken, strict=False)
    return tuple(last)


def _of_other_classes(given: torch.Tensor, own: torch.Tensor) -> bool:
    return given.dim() == own.dim() and given.shape[:1] != own.shape[:1] and given.shape[1:] == own.shape[1:]


def _read(path: Path) -> Mapping[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as cause:
        raise DataError(f"weights={str(path)!r}: no such file") from cause
    except Exception as cause:  # torch and safetensors have many kinds
        raise DataError(
            f"weights={str(path)!r}: is damaged, or has more than tensors; save model.state_dict(), or safetensors"
        ) from cause
    for name in _WRAPPED:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise DataError(f"weights={str(path)!r}: is no state dict; save model.state_dict(), or safetensors")
    return content
