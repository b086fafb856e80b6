"""Canaries of a torch run: examples whose clipped vectors are known, and lie apart.

Candidates are some of the user's examples, and made-up ones. Each one's vector is found by one-by-one autograd and
clipped by the reference's formulas in float64: nothing of it comes from the way in which the run finds and clips
gradients. Canaries are chosen so that a part of each vector as long as possible is orthogonal to all the others: one
that adds more than planned then leaves the guesses of others alone.

Where users are the unit of privacy, a canary is a user whose examples are all the same one: clipped one by one instead
of in sum, they would add up to several clip norms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr

from dpcore.errors import ArgumentError
from dpcore.spec.backends import load_backend
from dpcore.stages.clipping.blocks import as_blocks
from dpcore.stages.clipping.together import norms_of
from dpcore.stages.queries import Plain
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.doctor.finding import NotTried
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.randomness import TRIAL
from dpcore.torch.run import PrivateRun

Floats = NDArray[np.float64]

MOST = 12
"""Canaries: more would have less of their vectors to themselves."""
_CANDIDATES = 24  # of the user's examples, and as many made up
_NUMBERS = 3e7  # that candidates' vectors may have together
_SHORTEST = 0.25  # of the longest one: the part of a canary's vector that is its own
_OF_A_USER = 3  # examples, where a user may have so many


class Canaries:
    """Canaries of a run, `each` with so many examples, all alike.

    `rows` is the batch of one example of each, and `vectors` what each canary adds to a step's sum, (m, d).
    """

    def __init__(self, subject: Subject, run: PrivateRun) -> None:
        dimension = run._engine.mechanism.layout.dimension
        each = int(min(_CANDIDATES, _NUMBERS // (2 * dimension)))
        if each < 1:
            raise NotTried(
                f"{dimension:,} trained numbers are too many for canaries of known vectors.",
                "audit the run with a smaller model of the same kind",
            )
        self.each = min(getattr(run.plan.sampler, "max_examples_per_user", 1), _OF_A_USER)
        candidates = _candidates(subject, each)
        found = clipped_vectors(run, candidates, self.each)
        products = found @ found.T
        chosen = apart(products, MOST)
        if not len(chosen):
            raise NotTried("no example has a gradient to be told by.", "check the loss and the labels")
        now = run.steps_taken, run._engine.mechanism.clip_norm
        deviation = run.plan.noise_standard_deviation(*now)
        products = products[np.ix_(chosen, chosen)] / deviation**2
        chosen = chosen[: telling(products, run.plan.sensitivity_at(*now).contribution / deviation)]
        index = torch.from_numpy(chosen).to(subject.device)
        self.rows: Tree = batches.tree_map(lambda t: t[index], candidates)
        self.count = len(chosen)
        self.vectors: Floats = found[chosen]

    def renew(self, run: PrivateRun) -> None:
        """Find the vectors of the run's next step anew, where they are other ones than those of the first."""
        if type(run.plan.method.query) is not Plain or run.plan.adaptive_clip is not None:
            self.vectors = clipped_vectors(run, self.rows, self.each)

    def batch(self, coins: NDArray[np.bool_], views: int) -> Tree:
        """Return the batch of those that are in."""
        index = torch.from_numpy(np.flatnonzero(coins).repeat(views * self.each))
        return batches.tree_map(lambda t: t[index.to(t.device)], self.rows)


def scale_of(run: PrivateRun) -> Floats | float:
    """Return what the query multiplies gradients by in the run's next step, (d,), or 1: a function of releases."""
    mechanism = run._engine.mechanism
    scales = mechanism.vectors.scales
    if scales is None or not run.plan.scaled(mechanism.step):
        return 1.0
    return np.concatenate([mechanism.backend.to_numpy(scale).astype(np.float64).reshape(-1) for scale in scales])


def clipped_vectors(run: PrivateRun, batch: Tree, each: int = 1) -> Floats:
    """Return what each row of a batch, `each` times, adds to the sum of the run's next step, (B, d), by autograd.

    Row by row: the combination of gradients at the query's points, scaled where the query scales, times `each` (the sum
    over a user's examples), clipped by the method's rule in float64.
    """
    engine = run._engine
    mechanism, gradient = engine.mechanism, engine.gradient
    total: Any = 0.0
    for point in mechanism.points():
        values = engine._point(mechanism.at(engine.working.arrays(), point))
        one_by_one = gradient.explicit["one-by-one"].one_by_one
        rows = gradient.guarded(lambda: list(one_by_one(values, batch)), TRIAL, synthetic=False)  # noqa: B023
        found = np.stack([np.concatenate([g.reshape(-1).double().cpu().numpy() for g in row]) for row in rows])
        total = total + float(point.weight) * found
    total = total * scale_of(run) * each
    reference = load_backend("numpy")
    now = mechanism.step, mechanism.clip_norm
    clip, grouping = run.plan.clip_at(*now), run.plan.grouping_at(*now)
    sizes = [entry.size for entry in mechanism.layout.entries]
    ends = np.cumsum(sizes)
    columns = [np.ascontiguousarray(total[:, end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    norms = norms_of(reference, as_blocks(columns, sizes), grouping.members, [None] * len(columns))
    of_groups = [sum(sizes[i] for i in members) for members in grouping.members]
    factors = reference.clip_factors(norms, clip.rule, grouping.bounds, of_groups, [0.0] * len(norms), 1.0)
    for members, factor in zip(grouping.members, factors, strict=True):
        for i in members:
            columns[i] *= np.asarray(factor)[:, None]
    return np.concatenate(columns, axis=1)


def apart(products: Floats, most: int) -> NDArray[np.int64]:
    """Return indices of vectors that lie apart, the longest first, by inner products (P, P): pivoted Cholesky.

    In each round the vector with the longest part orthogonal to those chosen before is taken, as long as that part is
    at least `_SHORTEST` of the first one's.
    """
    left, first = products.copy(), 0.0
    chosen: list[int] = []
    while len(chosen) < min(most, len(products)):
        sizes = np.diag(left)
        best = int(np.argmax(np.where(np.isfinite(sizes), sizes, 0.0)))
        size = float(sizes[best])
        first = first or size
        if not size > _SHORTEST**2 * first:
            break
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / size
    return np.array(chosen, dtype=np.int64)


def telling(products: Floats, mu: float) -> int:
    """Return how many of some vectors, from the first on, tell half of the noise from a claim of `mu` the soonest.

    `products` are the inner products in units of the noise. Beside m - 1 others, canary i has a part of length
    ``own_i = (K^{-1})_ii^{-1/2}`` to itself; with half the noise it is guessed right with probability Phi(own_i), where
    the claim allows Phi(mu / 2). The mean of these m exceeds the claim by d, with a variance of at most q (1 - q) / m,
    and a bet on it grows as d^2 / (d^2 + variance). This chooses canaries; no guarantee rests on it.
    """
    best, most = 1, -1.0
    for m in range(1, len(products) + 1):
        right = float(ndtr(1 / np.sqrt(np.diag(np.linalg.inv(products[:m, :m])))).mean())
        more = max(right - float(ndtr(mu / 2)), 0.0)
        growth = more**2 / (more**2 + right * (1 - right) / m + 1e-300)
        best, most = (m, growth) if growth > most else (best, most)
    return best


def _candidates(subject: Subject, each: int) -> Tree:
    source = subject.source
    own = batches.tree_map(lambda t: t[:: source.views], source.batch(source.spread(each), TRIAL))
    made = batches.named(subject.made(each))
    return batches.named_map(lambda name, t: torch.cat([t, made[name].to(t.dtype)]), own)


def check_alike(run: PrivateRun, one: Tree) -> None:
    """Refuse to go on where model or loss draw random numbers: no adversary knows the vectors then."""
    gradient = run._engine.gradient
    one_by_one = gradient.explicit["one-by-one"].one_by_one
    before, gradient.draws = gradient.draws, False
    try:
        gradient.guarded(lambda: list(one_by_one(gradient.parameters(), one)), TRIAL, synthetic=True)
        if gradient.draws:
            raise NotTried(
                "model or loss draw random numbers in eval mode, too, so that no canary's vector is known.",
                "examine it without them",
            )
    except ArgumentError as cause:
        raise NotTried(f"the model fails in eval mode: {cause}") from cause
    finally:
        gradient.draws = before
