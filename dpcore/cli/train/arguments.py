"""What the settings of a training run stand for: a fresh model, and the other arguments of `make_private`."""

from __future__ import annotations

import os
from typing import Any

import torch

from dpcore.cli.datasets import Dataset
from dpcore.cli.train.settings import Settings
from dpcore.errors import BackendError
from dpcore.torch.model import models


def arguments_of(settings: Settings, dataset: Dataset) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model of some settings, fresh, and the other arguments of its `make_private`."""
    # The seed decides the initial weights and nothing else: noise and sampling have a key of their own.
    torch.manual_seed(settings.seed)
    model = models.build(settings.model, dataset.shape, dataset.classes).to(_device(settings.backend))
    return model, {
        "data": (torch.tensor(dataset.train_inputs), torch.tensor(dataset.train_targets)),
        "method": settings.build_method(len(dataset)),
        "target_epsilon": settings.epsilon,
        "target_delta": settings.delta,
        "epochs": settings.epochs,
        "loss": torch.nn.functional.cross_entropy,
        "sampling": str(settings.sampling),
        "max_batch_size": settings.max_batch_size,
        "groups": settings.groups,
    }


def _device(backend: str) -> torch.device:
    if backend != "triton":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise BackendError(
        "backend='triton': needs a CUDA device, and there is none; use --backend numpy, or set TRITON_INTERPRET=1 to "
        "try Triton's interpreter (slow)"
    )
