"""Canaries: examples whose vectors are known, put through the real step, each in or out by a secret coin.

Canary i owns coordinate i of every tensor. Its vector is far longer than the clip norm and points, inside each clipping
group, along that coordinate of the group's tensors; after the clip it is the longest vector that the method lets
through, C_eff. The vectors of any two canaries are orthogonal, in every tensor. Behind the canaries stand coordinates
that nobody touches, which show the noise alone, and one that all other examples share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting import Adjacency
from dpcore.accounting.phases import phases
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.stages.clipping import Grouping
from dpcore.stages.queries import Point

Floats = NDArray[np.float64]
Step = Callable[..., None]
MakeMechanism = Callable[..., Mechanism]

# How much longer than the clip norm a canary's vector is.
LENGTH = 1000.0

# How much shorter than a canary's vector that of every other bystander is where the clip is adaptive, so that some bits
# say that a norm is small.
SHORT = 1e-9


class CanaryRun:
    """One run of a plan over canaries and other examples.

    Where users are the unit of privacy, canaries and bystanders are users, and each of a user's examples has the whole
    vector of its user: clipped one by one instead of in sum they would add up to several clip norms.

    The `coins` say which canaries are in; one that is out has the opposite vector under replace-one, and zero otherwise
    (zero-out, add-remove). Of each tensor nobody touches `untouched` coordinates. `make_mechanism` is called
    as `Mechanism`, `step` as `dpcore.mechanism.loop.private_step`.

    An example's vector is `amount` (+1, 0 or -1, SHORT for some) times a canary's, on coordinate `place`, both (n,);
    `used` has the indices that each step asked gradients of.
    """

    def __init__(
        self,
        plan: Plan,
        keys: RunKeys,
        coins: NDArray[np.bool_],
        *,
        untouched: int,
        dtype: str,
        make_mechanism: MakeMechanism,
        step: Step,
    ) -> None:
        self.plan, self.coins, self.dtype, self._step = plan, coins, np.dtype(dtype), step
        sampler = plan.sampler
        self.planned = [sampler.indices(keys.sampling, t) for t in range(plan.steps)]
        self.used: list[list[NDArray[np.int64]]] = [[] for _ in self.planned]
        strategy = plan.method.noise.strategy
        self.matrix = np.eye(plan.steps) if strategy is None else strategy.matrix(plan.steps)
        units = [np.unique(sampler.unit_of(batch)) for batch in self.planned]
        self.members = most_exposed(plan, units, self.matrix, coins.size)
        self.signs = np.array(
            [float(1 - 2 * (t.bit_count() % 2)) if strategy is None else 1.0 for t in range(plan.steps)]
        )
        self.amount = np.ones(plan.sampler.dataset_size)
        if plan.adaptive_clip is not None:
            self.amount[::2] = SHORT
        replaced = plan.event.adjacency is Adjacency.REPLACE_ONE
        self.amount[self.members] = np.where(coins, 1.0, -1.0 if replaced else 0.0)
        self.place = np.full(plan.sampler.dataset_size, coins.size + untouched)
        self.place[self.members] = np.arange(coins.size)
        self.size, backend = coins.size + untouched + 1, load_backend()
        self.parameters = [backend.from_numpy(np.zeros(shape, self.dtype)) for shape in self._shapes()]
        layout = Layout.of([*zip(plan.tensors, self._shapes(), strict=True)])
        self.mechanism = make_mechanism(plan, layout, self.parameters, backend=backend, keys=keys)

    def _shapes(self) -> list[tuple[int, ...]]:
        galore = self.plan.method.galore
        if galore is None:
            return [(self.size,)] * len(self.plan.tensors)
        columns = galore.rank + 1
        return [(columns, -(-self.size // columns))] * len(self.plan.tensors)

    @property
    def width(self) -> int:
        """Coordinates of each tensor; a matrix for GaLore may have some more than `size`."""
        return int(self.parameters[0].reshape(-1).shape[0])

    def gradient(self, _: Sequence[Any], indices: NDArray[np.int64], point: Point) -> list[NDArray[Any]]:
        """Return the examples' vectors, so that a combination of points adds up instead of canceling."""
        mechanism, step = self.mechanism, self.mechanism.step
        if point == mechanism.points()[0]:
            self.used[step].append(np.asarray(indices))
        clip = self.plan.clip_at(step, mechanism.clip_norm)
        # Automatic clipping leaves a vector the shorter, the nearer its norm is to 0.01.
        bound = max(clip.max_grad_norm, 1.0) if clip.rule in ("automatic", "psac") else clip.max_grad_norm
        length = LENGTH * bound * self.signs[step]
        length = -length if point.weight < 0 else length
        units, blocks = self.plan.sampler.unit_of(np.asarray(indices)), []
        for share, scale in zip(self.direction(step), self.scales(step), strict=True):
            block = np.zeros((len(indices), self.width), self.dtype)
            # The scale is a function of earlier releases: the scaled vector is the one that is wanted.
            values = length * share * self.amount[units] / scale[self.place[units]]
            block[np.arange(len(indices)), self.place[units]] = values
            blocks.append(block)
        return blocks

    def direction(self, step: int) -> Floats:
        """A canary's clipped vector over C_eff: its coordinate in each tensor."""
        return direction(self.plan.grouping_at(step), self.plan.clip_at(step).rule)

    def scales(self, step: int) -> list[Floats]:
        """What the query multiplies gradients by at step `step`, by tensor."""
        scales = self.mechanism.vectors.scales
        if scales is None or not self.plan.scaled(step):
            return [np.ones(self.width)] * len(self.parameters)
        return [self.mechanism.backend.to_numpy(scale).astype(np.float64) for scale in scales]

    def step(self, observe: Callable[[Sequence[Any], Sequence[Any]], None] | None = None) -> None:
        """Take the next step."""
        public: list[Any] | None = None
        if self.plan.method.update.second_moment == "public":
            ones = np.ones(self.width, self.dtype)
            public = [self.mechanism.backend.from_numpy(ones) for _ in self.parameters]
        self._step(self.mechanism, self.parameters, self.gradient, public=public, observe=observe)

    def values(self) -> list[Floats]:
        """The present parameters."""
        return [np.asarray(self.mechanism.backend.to_numpy(p), np.float64) for p in self.parameters]


def secret_batches(plan: Plan) -> bool:
    """Whether the claim rests on batches that the adversary does not know."""
    found = phases(plan.event)
    return found is None or bool(found.steps)


def most_exposed(plan: Plan, planned: Sequence[NDArray[np.int64]], matrix: Floats, count: int) -> NDArray[np.int64]:
    """Return the canaries: where batches are public, the examples whose participation moves C S the most."""
    if secret_batches(plan):
        return np.arange(count)
    uses = np.bincount(np.concatenate(planned), minlength=plan.sampler.dataset_size)
    candidates = np.sort(np.argsort(-uses, kind="stable")[: max(count, 4096)])
    moved = matrix @ np.stack([np.isin(candidates, batch) for batch in planned])
    chosen = np.argsort(-np.linalg.norm(moved, axis=0).round(9), kind="stable")[:count]
    return np.sort(candidates[chosen])


def direction(grouping: Grouping, rule: str) -> Floats:
    """Return the unit vector, over tensors, of the longest clipped vector with equal entries in a group's tensors."""
    shares = np.zeros(sum(len(members) for members in grouping.members))
    for members, bound in zip(grouping.members, grouping.bounds, strict=True):
        shares[list(members)] = (1.0 if rule == "normalized" else bound) / np.sqrt(len(members))
    return np.asarray(shares / np.linalg.norm(shares))
