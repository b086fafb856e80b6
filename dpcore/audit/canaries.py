"""Canaries: examples whose vectors are known, put through the real step, each in or out by a secret coin.

Canary i owns coordinate i of every tensor. Its vector is far longer than the clip norm and points, inside each clipping
group, along that coordinate of the group's tensors; after the clip it is the longest vector that the method lets
through, C_eff. The vectors of any two canaries are orthogonal, in every tensor. Behind the canaries stand coordinates
that nobody touches, which show the noise alone, and one that all other examples share.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
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
from dpcore.spec.ops import SECOND_MOMENT
from dpcore.stages.clipping import Grouping
from dpcore.stages.queries import Point

Floats = NDArray[np.float64]
Step = Callable[..., None]
MakeMechanism = Callable[..., Mechanism]

# How much longer than the clip norm a canary's vector is.
LENGTH = 1000.0

# With an adaptive clip, every other bystander's vector is shorter than a canary's by this factor, so that some bits
# report a small norm.
SHORT = 1e-9


class CanaryRun:
    """One run of a plan over canaries and other examples.

    If users are the unit of privacy, canaries and bystanders are users, and each of a user's examples has the whole
    vector of its user: clipped one by one instead of in sum they would add up to several clip norms.

    The `coins` say which canaries are in; one that is out has the opposite vector under replace-one, and zero otherwise
    (zero-out, add-remove). Of each tensor nobody touches `untouched` coordinates. `make_mechanism` is called
    as `Mechanism`, `step` as `dpcore.mechanism.loop.private_step`.

    An example's vector is `amount` (+1, 0 or -1, SHORT for some) times a canary's, on coordinate `place`, both (n,);
    `used` has the indices whose gradients each step requested, and `white` (R / T, T, L, d) the released values of all
    coordinates in `records`, by tensor, in units of the planned noise.
    """

    white: Floats

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
        # Automatic clipping makes a vector shorter, the nearer its norm is to 0.01.
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
        """Return the query's factors on gradients at step `step`, by tensor."""
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
    """Whether the claim relies on batches that the adversary does not know."""
    parts = phases(plan.event)
    return parts is None or bool(parts.steps)


def most_exposed(plan: Plan, planned: Sequence[NDArray[np.int64]], matrix: Floats, count: int) -> NDArray[np.int64]:
    """Return the canaries: if batches are public, the examples whose participation moves C S the most."""
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


# The releases of runs with canaries, and their records, in units of the planned noise.
#
# The records have every released average, and the separately released second moment if there is one. In these units,
# the *planned* mechanism has independent standard normal noise: the average times B, over the planned standard
# deviation, then times the matrix C of correlated noise. The vectors of the adversary's choice do not depend on earlier
# releases, so that under the planned mechanism coordinates are independent of each other.


@dataclass(frozen=True)
class Records:
    """The records of one run or several; R rows: one for each step, two with a separately released second moment."""

    canaries: Floats  # (R, m): the releases along each canary's direction, in units of the planned noise
    nulls: Floats  # (R, L, D): those on coordinates that nobody touched, in the same units, by tensor
    signal: Floats  # (R, T): the planned addend of a canary that takes part in step t to its column of `canaries`
    participation: NDArray[np.int64]  # (T, m): how often each canary was used; secret in a real run
    possible: NDArray[np.bool_]  # (T, m): the public steps at which it might have been used
    counts: NDArray[np.int64]  # (n,): how often each example (or user) was used in all steps
    tosses: NDArray[np.int64]  # (n,): how often it might have been
    sizes: NDArray[np.int64]  # (T,): of batches
    populations: NDArray[np.int64]  # (T,): how many might have been in each batch
    early: NDArray[np.int64]  # (T,): how many of each batch are of the first half of those
    batches: tuple[str, ...]  # of each run, a digest of its batches
    # (N,): released values, in units of the planned noise, wherever nothing is added: untouched coordinates and, unless
    # examples are replaced, those of canaries that are out.
    silent: Floats
    sums: Floats  # (T, r): of r runs, the releases along the direction of all other examples less their clean sum
    # (T, r): the released sums of an adaptive clip's bits less the clean ones, in units of the planned noise; not
    # finite if the clip norm met its limits, no rows if it is not adapted.
    bits: Floats
    surprises: tuple[str, ...]  # observations that no run of the plan can show
    coins: NDArray[np.bool_]  # (m,): whether the canary was in


def joined(records: Sequence[Records]) -> Records:
    """Return the records of several runs of one plan as one."""
    axes = {"canaries": 1, "nulls": 2, "participation": 1, "possible": 1, "sums": 1, "bits": 1}
    joint = {
        field.name: np.concatenate([getattr(r, field.name) for r in records], axis=axes.get(field.name, 0))
        for field in fields(Records)
        if field.name not in ("signal", "batches", "surprises")
    }
    return Records(
        **joint,
        signal=records[0].signal,
        batches=tuple(digest for r in records for digest in r.batches),
        surprises=tuple(dict.fromkeys(surprise for r in records for surprise in r.surprises)),
    )


def records(run: CanaryRun) -> Records:
    """Take all steps of a run; return its records, for an adversary and for whoever knows its secrets."""
    plan, backend, m = run.plan, run.mechanism.backend, run.coins.size
    square = bool(plan.square_noise_standard_deviation())
    channels = 2 if square else 1
    canaries, amounts = np.zeros((channels, plan.steps, m)), np.zeros((channels, plan.steps))
    shared, released = np.zeros(plan.steps), np.zeros((channels, plan.steps, len(plan.tensors), run.width))
    for t in range(plan.steps):
        scales, norm, along = run.scales(t), run.mechanism.clip_norm, run.direction(t)
        before = _moments(run) if square else []
        seen: list[Floats] = []

        def observe(averages: Sequence[Any], _: Any, seen: list[Floats] = seen) -> None:
            seen.extend(backend.to_numpy(g).astype(np.float64).reshape(-1) for g in averages)

        run.step(observe)
        contribution = plan.sensitivity_at(t, norm).contribution
        sums = np.stack([plan.batch_size * g * s for g, s in zip(seen, scales, strict=True)])
        measured = [(sums, along, plan.noise_standard_deviation(t, norm), run.signs[t] * contribution)]
        if square:
            moved = (contribution * along / plan.batch_size) ** 2
            size = float(np.linalg.norm(moved))
            measured.append((_squares(run, before), moved / size, plan.square_noise_standard_deviation(t), size))
        for channel, (values, weights, deviation, amount) in enumerate(measured):
            canaries[channel, t] = weights @ values[:, :m] / deviation
            released[channel, t] = values / deviation
            amounts[channel, t] = amount / deviation
        shared[t] = along @ sums[:, run.size - 1] / plan.noise_standard_deviation(t, norm)
    # C makes the planned noise white again, and transforms a canary's addend with it.
    run.white = np.stack([np.tensordot(run.matrix, channel, 1) for channel in released])
    took, others, bits = counted(run)
    nobody = run.white[..., : run.size - 1]
    silent = np.concatenate([run.amount[run.members] == 0, np.ones(run.size - 1 - m, bool)])
    return Records(
        canaries=np.concatenate([run.matrix @ channel for channel in canaries]),
        nulls=np.concatenate(list(nobody[..., m:])),
        signal=np.concatenate([run.matrix * amount for amount in amounts]),
        silent=nobody[..., silent].reshape(-1),
        sums=(run.matrix @ (shared - amounts[0] * others))[:, None],
        bits=_bits(run, bits),
        coins=run.coins,
        **took,
    )


def noisy_bits(plan: Plan, before: float, after: float) -> float:
    """Return the sum of bits and noise between one clip norm and the next: `AdaptiveClip.next_norm` read backwards."""
    adaptive = plan.adaptive_clip
    assert adaptive is not None
    share = adaptive.target_quantile - math.log(after / before) / adaptive.learning_rate
    return (share - 0.5) * plan.batch_size


def _bits(run: CanaryRun, clean: Floats) -> Floats:
    """The released sums of bits less the clean ones, in units of the planned noise, (T, 1); see `Records`."""
    norms, plan = run.mechanism.clip_norms, run.plan
    if norms is None:
        return np.zeros((0, 1))
    noisy = [
        math.nan if after in plan.clip_limits else noisy_bits(plan, before, after)
        for before, after in itertools.pairwise(norms)
    ]
    return ((np.array(noisy) - clean) / plan.bit_noise_standard_deviation)[:, None]


def _moments(run: CanaryRun) -> list[Floats]:
    place = SECOND_MOMENT[run.plan.method.update.rule]
    return [run.mechanism.backend.to_numpy(m[place]).astype(np.float64) for m in run.mechanism.vectors.moments]


def _squares(run: CanaryRun, before: list[Floats]) -> Floats:
    """Return the separately released square that entered the second moment at the last step, read off the moment."""
    update = run.plan.method.update
    keep = 1.0 if update.rule == "adagrad" else update.settings().beta2
    share = 1.0 if update.rule == "adagrad" else 1 - keep
    return np.stack([(after - keep * b) / share for after, b in zip(_moments(run), before, strict=True)])


TWICE = "An example was used more than once in one step."
OTHERS = "The batches are not those of the plan's sampler."
OUTSIDE = "An example took part in a step in which the plan does not allow it."
TOO_MANY = "A batch is larger than the plan's sampler allows."


def counted(run: CanaryRun) -> tuple[dict[str, Any], NDArray[np.int64], NDArray[np.float64]]:
    """Count participations in a run that has taken all its steps: of users, if these are the unit of privacy.

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
    """Return who may be in the steps t, t + g, ...: group t if g groups of a public partition take turns, else all."""
    sampler: Any = run.plan.sampler
    sampler = getattr(sampler, "sampler", sampler)  # that of the users, if they are drawn
    groups, n = getattr(sampler, "groups", 1), sampler.dataset_size
    if groups == 1:
        return [np.ones(n, bool)]
    return [np.isin(np.arange(n), sampler.group(number)) for number in range(groups)]
