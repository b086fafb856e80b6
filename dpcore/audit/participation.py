"""The examples of each step of a run with canaries, and checks of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.audit.canaries import SHORT, CanaryRun
from dpcore.audit.exposure import secret_batches

TWICE = "An example was used more than once in one step."
OTHERS = "The batches are not those of the plan's sampler."
OUTSIDE = "An example took part in a step in which the plan does not allow it."
TOO_MANY = "A batch is larger than the plan's sampler allows."


def counted(run: CanaryRun) -> tuple[dict[str, Any], NDArray[np.int64], NDArray[np.float64]]:
    """Count who took part in a run that has taken all its steps: users, where these are the unit of privacy.

    Returns fields of `Records`, the number of bystanders in each batch, (T,), and an adaptive clip's clean sums, (T,).
    """
    plan, turns, surprises = run.plan, _turns(run), set[str]()
    participation, counts = np.zeros((plan.steps, run.coins.size), np.int64), np.zeros(run.amount.size, np.int64)
    sizes, early, others = (np.zeros(plan.steps, np.int64) for _ in range(3))
    tosses, populations, bits = np.zeros_like(counts), np.zeros_like(sizes), np.zeros(plan.steps)
    bystander, most = (run.place == run.size - 1) & (run.amount == 1), plan.sampler.max_batch_size
    bit = np.where(run.amount == 0, 0, np.where(abs(run.amount) > SHORT, -0.5, 0.5))
    digest = hashlib.sha256()
    for t, pieces in enumerate(run.used):
        examples = np.sort(np.concatenate([np.empty(0, np.int64), *pieces]))
        digest.update(np.array([examples.size, *examples], dtype="<i8").tobytes())
        if (np.diff(examples) == 0).any():
            surprises.add(TWICE)
        if not secret_batches(plan) and not np.array_equal(np.unique(examples), np.sort(run.planned[t])):
            surprises.add(OTHERS)
        units = plan.sampler.unit_of(examples)
        if plan.sampler.unit_of_privacy != "example":
            units = np.unique(units)
        used, possible = np.bincount(units, minlength=counts.size), turns[t % len(turns)]
        participation[t], sizes[t], populations[t] = used[run.members], units.size, possible.sum()
        others[t], bits[t] = used[bystander].sum(), bit @ used
        early[t] = used[np.flatnonzero(possible)[: populations[t] // 2]].sum()
        counts += used
        tosses += possible
        if used[~possible].any():
            surprises.add(OUTSIDE)
        if most is not None and units.size > most:
            surprises.add(TOO_MANY)
    possible_for = np.stack([turns[t % len(turns)][run.members] for t in range(plan.steps)])
    fields = {
        "participation": participation,
        "possible": possible_for,
        "counts": counts,
        "tosses": tosses,
        "sizes": sizes,
        "populations": populations,
        "early": early,
        "batches": (digest.hexdigest(),),
        "surprises": tuple(sorted(surprises)),
    }
    return fields, others, bits


def _turns(run: CanaryRun) -> list[NDArray[np.bool_]]:
    """Who may be in the steps t, t + g, ...: where g groups of a public partition take turns, group t; else all."""
    sampler: Any = run.plan.sampler
    sampler = getattr(sampler, "sampler", sampler)  # that of the users, where they are drawn
    groups, n = getattr(sampler, "groups", 1), sampler.dataset_size
    if groups == 1:
        return [np.ones(n, bool)]
    return [np.isin(np.arange(n), sampler.group(number)) for number in range(groups)]
