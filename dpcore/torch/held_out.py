"""Metrics on held-out data, and early stopping by them, for a training loop of one's own.

The metrics are functions of releases, of the held-out data and of the plan. The held-out data have no guarantee:
whoever sees the metrics learns about them, so they must be public, or need no protection.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from dpcore.errors import ArgumentError, ArgumentTypeError, OverlapError
from dpcore.spec import validate
from dpcore.torch.data import batches
from dpcore.torch.data.data import Data
from dpcore.torch.data.overlap import overlapping
from dpcore.torch.model.functional import in_mode
from dpcore.torch.model.joint import split
from dpcore.torch.randomness import TRIAL
from dpcore.torch.run import PrivateRun


class HeldOut:
    """Evaluates a run's model on data that it is not trained on, and says when to stop.

    Parameters
    ----------
    private : PrivateRun
        With a `target_delta`.
    data : Dataset, DataLoader, or tuple or mapping of tensors or arrays
        Not trained on. Common examples are refused, through subsets, concatenations, lists and rows of the same memory;
        copies are not recognized, nor common examples of other kinds of data sets.
    metrics : mapping of str to callable
        Each ``metric(output, *targets)`` is the mean over a batch; it is weighted by the batch's number of examples.
    larger_is_better : bool
        Whether the first metric is to grow, by which early stopping and `best_state` go.
    patience : int, optional
        Evaluations without a better value after which `stop` is True. None never stops.
    batch_size : int
        Batch size of the evaluation.

    Attributes
    ----------
    history : list of dict
        For each evaluation the metrics, "epsilon", "epsilon_planned", "learning_rate" and "step", to be logged
        anywhere; in the first process.
    stop : bool
        Whether training shall end: the same in all processes.
    best_state : dict or None
        The model's state at the best value so far, with the method's output in it.

    Notes
    -----
    "epsilon" is that of the steps so far, and holds if their number was fixed beforehand. If results decide when to
    stop, or which state to keep, "epsilon_planned", of all planned steps, holds whatever they decide: the run to the
    end would have released more. Once `stop` is True, "epsilon" and the statement of the run are those of the plan.
    """

    def __init__(
        self,
        private: PrivateRun,
        data: Any,
        metrics: Mapping[str, Callable[..., Any]],
        *,
        larger_is_better: bool = True,
        patience: int | None = None,
        batch_size: int = 256,
    ) -> None:
        if not metrics:
            raise ArgumentError("metrics={}: must name at least one function of the model's output and the targets")
        self._private, self._metrics = private, {name: validate.function(**{name: f}) for name, f in metrics.items()}
        if reserved := {"epsilon", "epsilon_planned", "learning_rate", "step"}.intersection(metrics):
            raise ArgumentError(f"metrics[{min(reserved)!r}]: the name is reserved for a value that is always logged")
        self._sign = 1.0 if larger_is_better else -1.0
        self._patience = None if patience is None else validate.integer(minimum=1, patience=patience)
        self._size = validate.integer(minimum=1, batch_size=batch_size)
        if private.loader.in_first_process:
            private.epsilon(planned=True)  # refused here without a delta, and not after an epoch
        if overlapping(private.loader.data.dataset, data.dataset if isinstance(data, DataLoader) else data):
            raise OverlapError(
                "data: must not be trained on, in whole or in part, since metrics of training data are private; hold "
                "examples out before make_private"
            )
        device = next(private.model.parameters()).device
        self._device, self._data = device, data if isinstance(data, DataLoader) else Data(data, device)
        self._best, self._waited = -math.inf, 0
        self.history: list[dict[str, float]] = []
        self.stop = False
        self.best_state: dict[str, Any] | None = None

    def evaluate(self) -> dict[str, float]:
        """Evaluate the method's output and return the metrics; then `stop` says whether to stop.

        All processes must call it. Their metrics may differ in the last digits, so the first process's value decides.
        """
        private = self._private
        with private.averaged():
            metrics = means(private.model, self._batches(), self._metrics)
        value = self._sign * private.engine.mechanism.peers.same(next(iter(metrics.values())))
        if value > self._best:  # never true of NaN
            self._best, self._waited, self.best_state = value, 0, private.output_state_dict()
        else:
            self._waited += 1
        self.stop = private.any_process(self._patience is not None and self._waited >= self._patience)
        private.stopped_by_results |= self.stop
        if private.loader.in_first_process:
            spent = {"epsilon": private.epsilon(), "epsilon_planned": private.epsilon(planned=True)}
            rate = float(private.optimizer.param_groups[0]["lr"])
            self.history.append({**metrics, **spent, "learning_rate": rate, "step": private.steps_taken})
        return metrics

    def _batches(self) -> Iterator[Any]:
        if isinstance(self._data, DataLoader):
            for batch in self._data:
                yield batches.tree_map(lambda tensor: tensor.to(self._device), batch)
            return
        for first in range(0, self._data.length, self._size):
            yield self._data.batch(np.arange(first, min(first + self._size, self._data.length)), TRIAL)


def means(
    model: nn.Module, data: Iterable[batches.Tree], metrics: Mapping[str, Callable[..., Any]]
) -> dict[str, float]:
    """Return the mean of each metric over all examples of some batches, in evaluation mode."""
    totals, examples = dict.fromkeys(metrics, 0.0), 0
    with in_mode(model, False), torch.no_grad():
        for batch in data:
            inputs, targets = split(model, batch)
            output, count = batches.call(model, inputs), batches.size(batch)
            for name, metric in metrics.items():
                totals[name] += count * _number(name, metric(output, *targets))
            examples += count
    if not examples:
        raise ArgumentError("data with 0 examples: must have at least one to evaluate on")
    return {name: total / examples for name, total in totals.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        form = (
            f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}"
        )
        raise ArgumentTypeError(f"metrics[{name!r}]: returned a value {form}; must be one number, a mean") from None
