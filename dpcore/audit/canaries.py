"""Canaries: examples whose vectors are known, put through the real step, each in or out by a secret coin.

Canary i owns coordinate i of every tensor. Its vector is far longer than the clip norm and points, inside each clipping
group, along that coordinate of the group's tensors; after the clip it is the longest vector that the method lets
through, C_eff. The vectors of any two canaries are orthogonal, in every tensor. Behind the canaries stand coordinates
that nobody touches, which show the noise alone, and one that all other examples share.

What is recorded is what an adversary of the method sees: every released average, and the separately released second
moment where there is one. It is put in units in which the *planned* mechanism has independent standard normal noise:
the average times B, over the planned standard deviation, then times the matrix C of correlated noise. The vectors of
the adversary's choice do not depend on earlier releases, so that under the planned mechanism coordinates are
independent of each other.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.audit.exposure import direction, most_exposed, secret_batches
from dpcore.audit.records import Records
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import UserSampler
from dpcore.sampling.users import unit_sums
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import SECOND_MOMENT, Backend
from dpcore.spec.stream import Stream
from dpcore.stages.queries import Point

Floats = NDArray[np.float64]
Gradient = Callable[[Sequence[Any], NDArray[np.int64], Point], list[NDArray[Any]]]
Step = Callable[..., None]
MakeMechanism = Callable[..., Mechanism]

# How much longer than the clip norm a canary's vector is.
LENGTH = 1000.0

# How much shorter than a canary's vector that of every other bystander is where the clip is adaptive, so that some bits
# say that a norm is small.
_SHORT = 1e-9

TWICE = "An example was used more than once in one step."
OTHERS = "The batches are not those of the plan's sampler."
OUTSIDE = "An example took part in a step in which the plan does not allow it."
TOO_MANY = "A batch is larger than the plan's sampler allows."
MORE = "The parameters are no function of the releases: something else of the data moves them."
UNSEEN = "Steps that nobody observes move the parameters elsewhere than steps that are recorded."


def private_step(
    mechanism: Mechanism, parameters: list[Any], gradient: Gradient, public: Any = None, observe: Any = None
) -> None:
    """Take one step the way `dpcore.minimize` does; an audit of another training loop brings its own.

    Parameters
    ----------
    mechanism : Mechanism
    parameters : list of arrays
        Of the mechanism's backend; moved.
    gradient : callable
        ``gradient(parameters, indices, point)`` returns the examples' gradients at a point, (B, d_l) NumPy arrays, one
        for each tensor.
    public, observe
        For `Mechanism.release`.
    """
    indices = mechanism.draw()
    rows: list[Any] = []
    for point in mechanism.points():
        blocks = gradient(mechanism.at(parameters, point), indices, point)
        weighted = [block.dtype.type(point.weight) * block for block in blocks]
        rows = weighted if not rows else [row + block for row, block in zip(rows, weighted, strict=True)]
    sampler = mechanism.plan.sampler
    if isinstance(sampler, UserSampler):
        units = sampler.units(mechanism.keys.sampling, mechanism.step)
        rows = [unit_sums(row, units) for row in rows]
    mechanism.add([mechanism.backend.from_numpy(row) for row in rows])
    mechanism.release(parameters, public=public, observe=observe)


class CanaryRun:
    """One run of a plan over canaries and other examples.

    Where users are the unit of privacy, canaries and bystanders are users, and each of a user's examples has the whole
    vector of its user: clipped one by one instead of in sum they would add up to several clip norms.

    Parameters
    ----------
    plan : Plan
    keys : RunKeys
    coins : (m,) array of bool
        Which canaries are in.
    replaced : bool
        Whether a canary that is out has the opposite vector (replace-one) instead of zero (zero-out, add-remove).
    untouched : int
        D, coordinates of each tensor that nobody touches.
    backend : Backend
    dtype : str
    make_mechanism : callable
        As `Mechanism` is called.
    step : callable
        As `private_step`.
    """

    def __init__(
        self,
        plan: Plan,
        keys: RunKeys,
        coins: NDArray[np.bool_],
        *,
        replaced: bool,
        untouched: int,
        backend: Backend[Any],
        dtype: str,
        make_mechanism: MakeMechanism,
        step: Step,
    ) -> None:
        self.plan, self.coins, self.take, self.dtype = plan, coins, step, np.dtype(dtype)
        sampler: Any = plan.sampler
        self.planned = [sampler.indices(keys.sampling, t) for t in range(plan.steps)]
        self.users: NDArray[np.int64] | None = sampler.user_of_example if isinstance(sampler, UserSampler) else None
        self.examples = sampler.dataset_size if self.users is None else self.users.size
        self.used: list[list[NDArray[np.int64]]] = [[] for _ in self.planned]
        self.matrix = np.eye(plan.steps)
        if plan.method.noise.strategy is not None:
            self.matrix = plan.method.noise.strategy.matrix(plan.steps)
        units = [np.unique(self._units(batch)) for batch in self.planned]
        self.members = most_exposed(plan, units, self.matrix, coins.size)
        self.signs = np.array(
            [1.0 if self._correlated else float(1 - 2 * (t.bit_count() % 2)) for t in range(plan.steps)]
        )
        # What an example's vector is: +1 or -1 times a canary's, or 0; the coordinate it stands on.
        out = -1.0 if replaced else 0.0
        self.amount = np.ones(plan.sampler.dataset_size)
        if plan.adaptive_clip is not None:
            self.amount[::2] = _SHORT
        self.amount[self.members] = np.where(coins, 1.0, out)
        self.place = np.full(plan.sampler.dataset_size, coins.size + untouched)
        self.place[self.members] = np.arange(coins.size)
        self.size = coins.size + untouched + 1
        self.parameters = [backend.from_numpy(np.zeros(shape, self.dtype)) for shape in self._shapes()]
        layout = Layout.of([*zip(plan.tensors, self._shapes(), strict=True)])
        self.mechanism = make_mechanism(plan, layout, self.parameters, backend=backend, keys=keys)

    def _units(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The unit of privacy of each example."""
        return indices if self.users is None else self.users[indices]

    @property
    def _correlated(self) -> bool:
        return self.plan.method.noise.strategy is not None

    def _shapes(self) -> list[tuple[int, ...]]:
        galore = self.plan.method.galore
        if galore is None:
            return [(self.size,)] * len(self.plan.tensors)
        columns = galore.rank + 1
        return [(columns, -(-self.size // columns))] * len(self.plan.tensors)

    def gradient(self, _: Sequence[Any], indices: NDArray[np.int64], point: Point) -> list[NDArray[Any]]:
        """Return the examples' vectors, so that a combination of points adds up instead of canceling."""
        mechanism, step = self.mechanism, self.mechanism.step
        if point == mechanism.points()[0]:
            self.used[step].append(np.asarray(indices))
        clip = self.plan.clip_at(step, mechanism.clip_norm)
        # Automatic clipping leaves a vector the shorter, the nearer its norm is to 0.01.
        bound = max(clip.max_grad_norm, 1.0) if clip.rule == "automatic" else clip.max_grad_norm
        length = LENGTH * bound * self.signs[step]
        length = -length if point.weight < 0 else length
        units, blocks = self._units(np.asarray(indices)), []
        for i, share in enumerate(self._direction(step)):
            block = np.zeros((len(indices), self.parameters[i].reshape(-1).shape[0]), self.dtype)
            values = length * share * self.amount[units]
            if mechanism.vectors.scales is not None and self.plan.scaled(step):
                # The scale is a function of earlier releases: the scaled vector is the one that is wanted.
                values = values / mechanism.backend.to_numpy(mechanism.vectors.scales[i])[self.place[units]]
            block[np.arange(len(indices)), self.place[units]] = values
            blocks.append(block)
        return blocks

    def _direction(self, step: int) -> Floats:
        """A canary's clipped vector over C_eff: its coordinate in each tensor."""
        return direction(self.plan.grouping_at(step), self.plan.clip_at(step).rule)

    def records(self) -> Records:
        """Take all steps and return what was released, in units of the planned noise."""
        plan, backend, m = self.plan, self.mechanism.backend, self.coins.size
        square = bool(plan.square_noise_standard_deviation())
        channels = 2 if square else 1
        canaries = np.zeros((channels, plan.steps, m))
        amounts, shared = np.zeros((channels, plan.steps)), np.zeros(plan.steps)
        shape = (channels, plan.steps, len(plan.tensors), self.parameters[0].reshape(-1).shape[0])
        released = np.zeros(shape)
        public = self._public()
        for t in range(plan.steps):
            scales, norm = self._scales(t), self.mechanism.clip_norm
            before = self._moments() if square else []
            seen: list[Floats] = []

            def observe(averages: Sequence[Any], _: Any, seen: list[Floats] = seen) -> None:
                seen.extend(backend.to_numpy(g).astype(np.float64).reshape(-1) for g in averages)

            self.take(self.mechanism, self.parameters, self.gradient, public=public, observe=observe)
            contribution = plan.sensitivity_at(t, norm).contribution
            along = self._direction(t)
            sums = np.stack([plan.batch_size * g * s for g, s in zip(seen, scales, strict=True)])
            measured = [(sums, along, plan.noise_standard_deviation(t, norm), self.signs[t] * contribution)]
            if square:
                moved = (contribution * along / plan.batch_size) ** 2
                size = float(np.linalg.norm(moved))
                measured.append((self._squares(before), moved / size, plan.square_noise_standard_deviation(t), size))
            for channel, (values, weights, deviation, amount) in enumerate(measured):
                canaries[channel, t] = weights @ values[:, :m] / deviation
                released[channel, t] = values / deviation
                if channel == 0:
                    shared[t] = weights @ values[:, self.size - 1] / deviation
                amounts[channel, t] = amount / deviation
        # C makes the planned noise white again, and what a canary adds with it.
        self.white = np.stack([np.tensordot(self.matrix, channel, 1) for channel in released])
        participation, counts, sizes, early, others, clean, surprises = self._batches()
        turns = self._turns()
        silent = np.concatenate([self.amount[self.members] == 0, np.ones(self.size - 1 - m, bool)])
        return Records(
            canaries=np.concatenate([self.matrix @ channel for channel in canaries]),
            nulls=np.concatenate(list(self.white[..., m : self.size - 1])),
            signal=np.concatenate([self.matrix * amount for amount in amounts]),
            participation=participation,
            possible=self._possible(turns),
            counts=counts,
            tosses=sum((turns[t % len(turns)].astype(np.int64) for t in range(plan.steps)), np.zeros_like(counts)),
            sizes=sizes,
            populations=np.array([turns[t % len(turns)].sum() for t in range(plan.steps)]),
            early=early,
            batches=(self._digest(),),
            silent=self.white[..., : self.size - 1][..., silent].reshape(-1),
            sums=(self.matrix @ (shared - amounts[0] * others))[:, None],
            bits=self._bits(clean),
            surprises=surprises,
            coins=self.coins,
        )

    def _public(self) -> list[Any] | None:
        if self.plan.method.update.second_moment != "public":
            return None
        backend = self.mechanism.backend
        return [backend.from_numpy(np.ones(p.reshape(-1).shape[0], self.dtype)) for p in self.parameters]

    def ends_as(self, unseen: CanaryRun) -> bool:
        """Whether a run of the same keys and coins, taken now with nobody observing, ends at the same parameters.

        What is observed runs as separate operations; in training one fused operation takes the step, and what it adds
        is not seen in `records`.
        """
        for _ in range(self.plan.steps):
            unseen.take(unseen.mechanism, unseen.parameters, unseen.gradient, public=unseen._public(), observe=None)
        return self._same(unseen)

    def follows_from_releases(self, empty: CanaryRun) -> bool:
        """Whether a run with no data, whose noise is this run's releases, ends at the same parameters.

        Its steps release the very same vectors, so what is a function of the releases is the same. A filter, a second
        moment or a loop that has the clean sum from elsewhere is not.
        """
        mechanism, backend = empty.mechanism, empty.mechanism.backend
        norms, plan = self.mechanism.clip_norms, self.plan

        def normals(row: int, stream: int) -> list[Any]:
            if stream == Stream.CLIP_BOUND:
                assert norms is not None
                bits = _noisy_bits(plan, norms[row], norms[row + 1]) / plan.bit_noise_standard_deviation
                return [np.array([bits])]
            white = self.white[int(stream == Stream.SECOND_MOMENT), row]
            return [backend.from_numpy(vector.astype(self.dtype)) for vector in white]

        release = mechanism.release

        def released(*arguments: Any, **named: Any) -> None:
            release(*arguments, **{**named, "normals": normals})

        mechanism.release = released  # type: ignore[method-assign]
        empty.amount[:] = 0
        for _ in range(plan.steps):
            empty.take(mechanism, empty.parameters, empty.gradient, public=empty._public(), observe=None)
        return self._same(empty)

    def _same(self, other: CanaryRun) -> bool:
        tolerance = 1e-6 if self.dtype == np.float64 else 1e-2
        return all(
            np.allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(a[np.isfinite(a)]).max(initial=0), equal_nan=True)
            for a, b in zip(self._values(), other._values(), strict=True)
        )

    def _values(self) -> list[Floats]:
        return [np.asarray(self.mechanism.backend.to_numpy(p), np.float64) for p in self.parameters]

    def _turns(self) -> list[NDArray[np.bool_]]:
        """Who may be in the steps t, t + g, ...: where g groups of a public partition take turns, group t; else all."""
        sampler: Any = self.plan.sampler
        sampler = sampler.sampler if self.users is not None else sampler
        groups, n = getattr(sampler, "groups", 1), sampler.dataset_size
        if groups == 1:
            return [np.ones(n, bool)]
        return [np.isin(np.arange(n), sampler.group(number)) for number in range(groups)]

    def _possible(self, turns: Sequence[NDArray[np.bool_]]) -> NDArray[np.bool_]:
        return np.stack([turns[t % len(turns)][self.members] for t in range(self.plan.steps)])

    def _batches(self) -> tuple[Any, Any, Any, Any, Any, Any, tuple[str, ...]]:
        """Who took part: by canary, by example, by step, of the first half, of all but canaries; bits; surprises.

        Examples here are users, where these are the unit of privacy.
        """
        plan, surprises, turns = self.plan, set[str](), self._turns()
        participation = np.zeros((plan.steps, self.coins.size), np.int64)
        counts, sizes = np.zeros(plan.sampler.dataset_size, np.int64), np.zeros(plan.steps, np.int64)
        early, others, clean = np.zeros_like(sizes), np.zeros_like(sizes), np.zeros(plan.steps)
        bystander, most = (self.place == self.size - 1) & (self.amount == 1), plan.sampler.max_batch_size
        bits = np.where(self.amount == 0, 0, np.where(abs(self.amount) > _SHORT, -0.5, 0.5))
        for t, pieces in enumerate(self.used):
            examples = np.concatenate([np.empty(0, np.int64), *pieces])
            if np.bincount(examples, minlength=self.examples).max(initial=0) > 1:
                surprises.add(TWICE)
            if not secret_batches(plan) and not np.array_equal(np.unique(examples), np.sort(self.planned[t])):
                surprises.add(OTHERS)
            if self.users is not None:
                examples = np.unique(self.users[examples])
            used = np.bincount(examples, minlength=counts.size)
            possible = turns[t % len(turns)]
            participation[t], sizes[t], clean[t] = used[self.members], examples.size, bits @ used
            others[t] = used[bystander].sum()
            early[t] = used[np.flatnonzero(possible)[: possible.sum() // 2]].sum()
            counts += used
            if used[~possible].any():
                surprises.add(OUTSIDE)
            if most is not None and examples.size > most:
                surprises.add(TOO_MANY)
        return participation, counts, sizes, early, others, clean, tuple(sorted(surprises))

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for pieces in self.used:
            batch = np.sort(np.concatenate([np.empty(0, np.int64), *pieces]))
            digest.update(np.array([batch.size, *batch], dtype="<i8").tobytes())
        return digest.hexdigest()

    def _bits(self, clean: Floats) -> Floats:
        """The released sums of bits less the clean ones, in units of the planned noise, (T, 1); see `Records`."""
        norms, plan = self.mechanism.clip_norms, self.plan
        if norms is None:
            return np.zeros((0, 1))
        limits = plan.clip_limits
        noisy = [
            math.nan if after in limits else _noisy_bits(plan, before, after)
            for before, after in itertools.pairwise(norms)
        ]
        return ((np.array(noisy) - clean) / plan.bit_noise_standard_deviation)[:, None]

    def _scales(self, step: int) -> list[Any]:
        scales = self.mechanism.vectors.scales
        if scales is None or not self.plan.scaled(step):
            return [1.0] * len(self.parameters)
        return [self.mechanism.backend.to_numpy(scale).astype(np.float64).copy() for scale in scales]

    def _moments(self) -> list[Floats]:
        place = SECOND_MOMENT[self.plan.method.update.rule]
        moments = self.mechanism.vectors.moments
        return [self.mechanism.backend.to_numpy(m[place]).astype(np.float64).copy() for m in moments]

    def _squares(self, before: list[Floats]) -> Floats:
        """What entered the second moment at the last step: the separately released square, read off the moment."""
        update = self.plan.method.update
        if update.rule == "adagrad":
            return np.stack([after - b for after, b in zip(self._moments(), before, strict=True)])
        beta = update.settings().beta2
        return np.stack([(after - beta * b) / (1 - beta) for after, b in zip(self._moments(), before, strict=True)])


def _noisy_bits(plan: Plan, before: float, after: float) -> float:
    """Return the sum of bits and noise between one clip norm and the next: `AdaptiveClip.next_norm` read backwards."""
    adaptive = plan.adaptive_clip
    assert adaptive is not None
    share = adaptive.target_quantile - math.log(after / before) / adaptive.learning_rate
    return (share - 0.5) * plan.batch_size
