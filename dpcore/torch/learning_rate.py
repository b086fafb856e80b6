"""A search for the learning rate on public data, where it costs no privacy."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.stages.method import Method
from dpcore.torch.data.data import Data
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.held_out import means
from dpcore.torch.make_private import make_private

_RATES = tuple(10.0 ** (power / 2) for power in range(-8, 3))  # 1e-4 to 10, two a decade


@dataclass(frozen=True)
class LearningRates:
    """Learning rates, and the mean loss on the public data after the same number of steps with each.

    Attributes
    ----------
    rates, losses : tuple of float
        In order; a loss that is not finite is infinity.
    before : float
        The loss of the model as it was given.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    before: float

    @property
    def best(self) -> float:
        """The rate with the smallest loss. ArgumentError where no rate lowered it: then none is recommended."""
        loss, rate = min(zip(self.losses, self.rates, strict=True))
        if not loss < self.before:
            told = f"none lowered the loss of {self.before:.4g}; try others or more steps"
            raise ArgumentError(f"rates={self.rates}: {told}")
        return rate


def find_learning_rate(
    model: nn.Module,
    public: Any,
    method: Method,
    *,
    steps: int,
    rates: Sequence[float] = _RATES,
    loss: Loss = F.cross_entropy,
    sampling: str = "poisson",
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> LearningRates:
    """Train copies of the model on **public** data, one for each learning rate, and return their losses.

    Clip and noise are the method's, so that the rate is one for noisy steps: give it the noise multiplier and the batch
    size that the private run will have. The private data are not touched, so the search costs no privacy; `public` has
    no guarantee.

    Parameters
    ----------
    model : torch.nn.Module
        Stays as it is.
    public : Dataset, or tuple or mapping of tensors or arrays
        Public data in the form of the private ones, more examples than a batch has.
    method : Method
        With a noise multiplier.
    steps : int
        Taken with each rate.
    rates : sequence of float
        By default 1e-4 to 10, two a decade.
    loss : callable
        As for `make_private`; the mean over a batch is what is compared.
    sampling : str
        As for `make_private`: what the method's noise goes with.
    collate_fn : callable, optional
        As for `make_private`.

    Returns
    -------
    LearningRates

    Raises
    ------
    ArgumentError
        If the method has no noise multiplier, or the data cannot be used.
    """
    if method.noise.noise_multiplier is None:
        raise ArgumentError(
            "method: must have a noise_multiplier, that of the private run, as private.plan.noise_multiplier has it: "
            "the best rate depends on the noise"
        )
    if not len(rates):
        raise ArgumentError("rates=(): must hold at least one learning rate")
    tried = tuple(validate.positive(rates=rate) for rate in rates)
    before = _loss(model, public, loss, collate_fn)
    losses = []
    for rate in tried:
        trained = copy.deepcopy(model)
        groups = [{"params": [p for p in trained.parameters() if p.requires_grad], "lr": rate}]
        run = make_private(
            trained, public, method, steps=steps, loss=loss, sampling=sampling, collate_fn=collate_fn, params=groups
        )
        while run.steps_taken < steps:
            for batch in run.loader:
                run.step(batch)
        with run.averaged():
            losses.append(_loss(trained, public, loss, collate_fn))
    return LearningRates(tried, tuple(losses), before)


def _loss(model: nn.Module, public: Any, loss: Loss, collate_fn: Callable[[list[Any]], Any] | None) -> float:
    data = Data(public, next(model.parameters()).device, collate_fn)
    mean = means(model, data.in_order(256), {"loss": loss})["loss"]
    return mean if math.isfinite(mean) else math.inf
