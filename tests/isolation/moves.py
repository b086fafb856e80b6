"""How far one example moves the sum of clipped gradients, before any noise, in a run of `make_private`."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpcore.errors import ArgumentError, DpcoreError
from dpcore.methods import dp_sgd
from dpcore.torch import PrivateRun, make_private
from dpcore.torch.data import batches
from dpcore.torch.doctor.audit_run import add_up
from tests.isolation.models import BATCH, Case, Tree

CLIP = 1e-3
"""So small that nearly every gradient is clipped: each example then adds a vector of this length."""

REFUSED, CRASHED = "refuse", "crash"


@dataclass(frozen=True)
class Outcome:
    """What became of a case: the way it was taken, or why it was not; how far the sum moved, in clip norms.

    `stray` is how far the sum of the others is, at most, from the sum of all less what the example adds alone, and
    `last` is that of the last example, after which no other one moves up. It is 0 where the examples are apart, and
    `stray` is as long as no kernel rounds by an example's place.
    """

    way: str
    sentence: str = ""
    removal: float = 0.0
    replacement: float = 0.0
    stray: float = 0.0
    last: float = 0.0

    @property
    def accepted(self) -> bool:
        return self.way not in (REFUSED, CRASHED)

    def exceeds(self, tolerance: float = 1e-3) -> bool:
        """Whether more is moved than is claimed."""
        # "not <=" so that a sum which is not finite counts as too far
        return not (self.removal <= 1 + tolerance and self.replacement <= 2 + tolerance)


def private_run(case: Case, seed: int) -> tuple[PrivateRun, Tree]:
    """Return a run of a case and its BATCH + 1 examples; the run takes a batch as one micro-batch."""
    torch.manual_seed(seed)
    model, inputs, targets, loss = case.build()
    own = targets if isinstance(targets, tuple) else () if targets is None else (targets,)
    data = inputs if not own and isinstance(inputs, dict) else (inputs, *own)
    method = dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=6, max_grad_norm=CLIP)
    chosen = {} if loss is None else {"loss": loss}
    run = make_private(model, data, method, steps=2, key=bytes(range(32)), exact_key=True, **chosen)
    run.engine.plan_microbatches(16)  # whole registers, at whose end no kernel rounds otherwise
    return run, data


def outcome(case: Case, seed: int, places: Iterable[int] = range(BATCH)) -> Outcome:
    """Remove and replace the examples at these places of the case's batch, one at a time; of a drawing model all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slow ways and unscaled inputs, and torch's own
        try:
            run, data = private_run(case, seed)
            if seed:
                # Past the calls at which the model is captured once more, which the first seed has seen.
                run._engine.gradient.proved._calls = 65
            return moved(run, data, places)
        except DpcoreError as refusal:
            return Outcome(REFUSED, str(refusal))
        except Exception as crash:  # noqa: BLE001 - whatever is raised is what is looked for
            return Outcome(CRASHED, f"{type(crash).__name__}: {crash}")


def moved(run: PrivateRun, data: Tree, places: Iterable[int]) -> Outcome:
    """Return how far the examples at these places of the data, whose last one is the spare, move the sum.

    The draws of a model go on from example to example, so that a removal would give all later ones other draws. The
    argument of `dpcore.torch.randomness` compares sums in which each example keeps its own: so a drawing model's example
    is not taken away but made NaN where inputs have such numbers, which adds 0 and leaves the others' draws as they are.
    A replacement leaves them in any case.
    """
    draws = run._engine.gradient.draws
    poisoned = _poisoned(run, data) if draws else []
    batch = batches.tree_map(lambda t: t[:BATCH], data)
    base, removal, replacement, stray, last = _sum(run, batch), 0.0, 0.0, 0.0, 0.0
    for place in range(BATCH) if draws else places:  # of a drawing model `stray` is not known, which sees the most
        others = [i for i in range(BATCH) if i != place]
        replacement = _larger(replacement, _sum(run, _replaced(data, place)) - base)
        if draws:
            if poisoned:
                removal = _larger(removal, _sum(run, poisoned[place]) - base)
            continue
        own = base - _sum(run, batches.tree_map(lambda t: t[others], data))  # noqa: B023
        removal = _larger(removal, own)
        last = _larger(0.0, own - _sum(run, batches.tree_map(lambda t: t[place : place + 1], data)))  # noqa: B023
        stray = float(np.maximum(stray, last))
    return Outcome(run._engine.gradient.way, "", removal, replacement, stray, last)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return one outcome for several seeds: of the largest moves, and of the first crash or else refusal."""
    found = list(outcomes)
    first = min(found, key=lambda each: (each.way != CRASHED, each.way != REFUSED))
    sizes = (np.max([getattr(each, name) for each in found]) for name in ("removal", "replacement", "stray", "last"))
    return Outcome(first.way, first.sentence, *map(float, sizes))


def _sum(run: PrivateRun, batch: Tree) -> Any:
    views, mechanism = run.engine.views, run.engine.mechanism
    add_up(run, batches.tree_map(lambda t: t.repeat_interleave(views, 0), batch))
    found = mechanism.summed()
    mechanism.discard()
    return found / CLIP


def _larger(known: float, vector: Any) -> float:
    return float(np.maximum(known, np.linalg.norm(vector)))  # of NaN the result is NaN


def _poisoned(run: PrivateRun, data: Tree) -> list[Tree]:
    """Return the batch with NaN for each of its examples in turn; none where that is no way to take one out.

    It is none without floating inputs, or where an operation refuses NaN, as a draw of bernoulli(p) does.
    """
    if not any(t.is_floating_point() for t in batches.leaves(batches.normalize(data)[0])):
        return []
    found = [_replaced(data, place, float("nan")) for place in range(BATCH)]
    try:
        _sum(run, found[0])
    except ArgumentError:
        return []
    return found


def _replaced(data: Tree, place: int, value: float | None = None) -> Tree:
    """Return the batch with the spare example at this place, or with a number in all its floating inputs."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor[:BATCH].clone()
        if value is None:
            result[place] = tensor[-1]
        elif tensor.is_floating_point():
            result[place] = value
        return result

    return batches.tree_map(changed, data)
