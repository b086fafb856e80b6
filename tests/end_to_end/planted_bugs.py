"""Bugs for the audit to find, each a wrapper around what is sound. Nothing in the library can be switched to them.

``python -m tests.end_to_end.planted_bugs docs/results/audit.json`` writes what docs/audit.md shows.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpcore import methods
from dpcore.audit import audit, auditing, canaries
from dpcore.mechanism.composed_step import Composition
from dpcore.mechanism.mechanism import Mechanism
from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedOrderSampler,
    PoissonSampler,
    TruncatedPoissonSampler,
    UserSampler,
    base,
    draw,
)
from dpcore.spec.stream import Stream
from dpcore.stages.clipping import AdaptiveClip, Clip, Grouping, Sensitivity
from dpcore.stages.clipping import adaptive as running_module


class Wrapped:
    """A backend with some operations replaced."""

    def __init__(self, backend: Any, **replaced: Callable[..., Any]) -> None:
        self._backend, self._replaced = backend, replaced

    def __getattr__(self, name: str) -> Any:
        if name in self._replaced:
            return lambda *a, **k: self._replaced[name](self._backend, *a, **k)
        return getattr(self._backend, name)


def on(**replaced: Callable[..., Any]) -> dict[str, Any]:
    """Audit a mechanism whose backend has these operations replaced."""

    def make(plan: Any, layout: Any, parameters: Any, *, backend: Any, keys: Any) -> Mechanism:
        return Mechanism(plan, layout, parameters, backend=Wrapped(backend, **replaced), keys=keys)

    return {"make_mechanism": make}


def each_point_clipped(mechanism: Mechanism, parameters: Any, gradient: Any, **rest: Any) -> None:
    """Adds the clipped gradients of the points instead of clipping their combination."""
    indices = mechanism.draw()
    for point in mechanism.points():
        blocks = gradient(mechanism.at(parameters, point), indices, point)
        mechanism.add([mechanism.backend.from_numpy(point.weight * block) for block in blocks])
    mechanism.release(parameters, **rest)


def stepping(pieces: Callable[[Any], Sequence[Any]], scaled: bool = False) -> Callable[..., None]:
    """A step that adds the vectors of these pieces of a batch, and averages over the drawn size if `scaled`."""

    def step(mechanism: Mechanism, parameters: Any, gradient: Any, **rest: Any) -> None:
        indices = mechanism.draw()
        (point,) = mechanism.points()
        for piece in pieces(indices):
            mechanism.add([mechanism.backend.from_numpy(b) for b in gradient(parameters, piece, point)])
        for total in mechanism.vectors.totals if scaled else ():
            total *= mechanism.plan.batch_size / max(len(indices), 1)
        mechanism.release(parameters, **rest)

    return step


overlapping_microbatches = stepping(lambda batch: (batch[: len(batch) // 2 + 20], batch[len(batch) // 2 - 20 :]))
divided_by_the_drawn_size = stepping(lambda batch: (batch,), scaled=True)  # with the noise of the expected size
each_example_of_a_user_clipped = stepping(lambda batch: (batch,))  # nobody sums a user's vectors


@dataclass(frozen=True)
class Lying:
    """Claims the event of a sampler but draws batches of its own."""

    claimed: Any
    draw: Callable[[Any, bytes, int], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.claimed, name)

    def indices(self, key: bytes, step: int) -> Any:
        return self.draw(self.claimed, key, step)


def at_rate(claimed: Any, factor: float = 1.0) -> PoissonSampler:
    return PoissonSampler(dataset_size=claimed.dataset_size, sample_rate=factor * claimed.sample_rate)


def a_partition_for_every_round(claimed: CyclicPoissonSampler, key: bytes, step: int) -> Any:
    """Draws the groups by the run's key, anew in each round: an example's turns are no longer `groups` steps apart."""
    groups, size = claimed.groups, claimed.dataset_size
    first, last = (i * size // groups for i in (step % groups, step % groups + 1))
    members = np.sort(draw.permutation(key, size, step // groups)[first:last])
    return members[draw.coins(draw.row_words(key, step), claimed._threshold, 0, members.size)]


ORDER = FixedOrderSampler(dataset_size=200, batch_size=50)
POISSON = PoissonSampler(dataset_size=300, batch_size=30)
TRUNCATED = TruncatedPoissonSampler(dataset_size=300, batch_size=30, max_batch_size=30)
CYCLIC = CyclicPoissonSampler(dataset_size=300, batch_size=30, groups=3)
THIRTY = FixedOrderSampler(dataset_size=300, batch_size=30)
USERS = UserSampler(ORDER, [example % 200 for example in range(600)], 3)


@dataclass(frozen=True)
class Bug:
    """A bug and its honest twin.

    `method`, `sampler` and `steps` are the twin's; `planted` are further keywords of `audit`, `sampling` another
    sampler, `patched` a context, with which the bug is there.
    """

    method: Any
    sampler: Any = ORDER
    steps: int = 8
    planted: dict[str, Any] = field(default_factory=dict)
    sampling: Any = None
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    bound_exceeds: bool = True
    """Whether the lower bound must exceed the claim, or a direct check alone says it."""


def sgd(**k: Any) -> Any:
    return methods.dp_sgd(lr=0.1, **k)


def one_participation() -> AbstractContextManager[Any]:
    return mock.patch.object(base, "sensitivity", return_value=1.0)


def root_of_groups_forgotten() -> AbstractContextManager[Any]:
    def forgotten(self: Clip, grouping: Grouping) -> Sensitivity:
        return Sensitivity(max(grouping.bounds))

    return mock.patch.object(Clip, "sensitivity", forgotten)


def bits_without_noise() -> AbstractContextManager[Any]:
    following = running_module.RunningNorm.following
    return mock.patch.object(
        running_module.RunningNorm, "following", lambda self, _, *grid: following(self, 0.0, *grid)
    )


def bits_of_zero_vectors() -> AbstractContextManager[Any]:
    """Counts an example that contributes nothing as one of a small norm."""
    return mock.patch.object(running_module, "twice_the_bits", lambda norms, norm: (2 * (norms <= norm) - 1).sum())


def unnoised_filter() -> AbstractContextManager[Any]:
    """Lets the filter average the clean sums."""
    filtered, step, units = Composition._filtered, Composition.step, list[float]()

    def noting(self: Composition, slots: Any, noise: Any, unit: float, *rest: Any) -> Any:
        units.append(unit)
        return step(self, slots, noise, unit, *rest)

    def clean(self: Composition, g: Any, slot: Any, row: int) -> Any:
        return filtered(self, slot.total * (units[-1] / self.batch_size), slot, row)

    return both_paths(mock.patch.multiple(Composition, _filtered=clean, step=noting))


def unnoised_second_moment() -> AbstractContextManager[Any]:
    """Squares the clean average where the released one was meant."""

    def clean(self: Composition, i: int, slot: Any, g: Any, factor: float, *_: Any) -> Any:
        return (slot.total * factor) ** 2

    return both_paths(mock.patch.object(Composition, "_square", clean))


def both_paths(patched: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Plants a bug of the plain operations in the fused one, too: all steps take the plain ones."""
    plain = mock.patch.object(Mechanism, "_take", all_plain(Mechanism._take))
    both = ExitStack()
    both.enter_context(patched)
    both.enter_context(plain)
    return both


def all_plain(take: Any) -> Any:
    def taken(self: Mechanism, slots: Any, row: int, unit: float, numbers: Any, normals: Any, observe: Any) -> None:
        take(self, slots, row, unit, numbers, normals, observe or (lambda *_: None))

    return taken


def a_sum_that_stays() -> AbstractContextManager[Any]:
    """Keeps a step's sum for the next one."""
    return mock.patch.object(Mechanism, "_discard", return_value=None)


FOUR, TWO = sgd(noise_multiplier=4.0), sgd(noise_multiplier=2.0)
LAYERS = sgd(noise_multiplier=4.0, clipping_groups="per_tensor")
ADAPTIVE = sgd(noise_multiplier=4.0, adaptive_clip=AdaptiveClip(bit_noise_std=8.0))
MOMENTS = methods.dp_adam(lr=0.1, noise_multiplier=4.0, variant="independent_moments")
DISK = methods.disk(lr=0.1, noise_multiplier=4.0, kappa=0.3, gamma=0.5)
MEMF = methods.memf(lr=0.1, noise_multiplier=4.0)
DOPPLER = methods.doppler(lr=0.1, noise_multiplier=4.0)
ADAM = methods.dp_adam(lr=0.1, noise_multiplier=4.0, variant="post_processing")


def lying(claimed: Any, draw: Callable[..., Any], method: Any = TWO, **more: Any) -> Bug:
    return Bug(method, claimed, sampling=Lying(claimed, draw), **more)


def drawing(change: Callable[..., Any], method: Any = FOUR, **more: Any) -> Bug:
    """Other normals: ``change(backend, key, row, stream, first, size, **k)``."""
    return Bug(method, planted=on(normal=change), **more)


def factored(change: Callable[[Sequence[float]], Sequence[float]], method: Any = FOUR) -> Bug:
    """Clip factors of other bounds."""
    factors = lambda b, norms, rule, bounds, *a: b.clip_factors(norms, rule, change(bounds), *a)  # noqa: E731
    return Bug(method, planted=on(clip_factors=factors))


BUGS = {
    "noise halved": drawing(lambda b, *a, **k: 0.5 * b.normal(*a, **k)),
    "clip dropped": Bug(
        FOUR, planted=on(clip_factors=lambda _, norms, *a: [np.full_like(norm, 1 / a[-1]) for norm in norms])
    ),
    "clipped to twice the norm": factored(lambda bounds: [2 * c for c in bounds]),
    "same noise in every step": drawing(lambda b, key, row, *a, **k: b.normal(key, 0, *a, **k)),
    "no noise in every tenth step": drawing(lambda b, *a, **k: (a[1] % 10 != 9) * b.normal(*a, **k), steps=20),
    "noise divided by the batch size twice": drawing(lambda b, *a, **k: b.normal(*a, **k) / 50),
    "groups each clipped to the whole norm": factored(lambda bounds: [c * len(bounds) ** 0.5 for c in bounds], LAYERS),
    "sensitivity of one group for all": Bug(LAYERS, patched=root_of_groups_forgotten),
    "several participations counted as one": Bug(MEMF, steps=24, patched=one_participation),
    "DiSK's points clipped one by one": Bug(DISK, planted={"step": each_point_clipped}),
    "examples in two micro-batches": Bug(FOUR, planted={"step": overlapping_microbatches}),
    "second moment without noise": drawing(
        lambda b, *a, **k: (a[2] != Stream.SECOND_MOMENT) * b.normal(*a, **k), MOMENTS
    ),
    "every example in every step": lying(POISSON, lambda claimed, key, step: np.arange(claimed.dataset_size)),
    "each example of a user clipped": Bug(FOUR, USERS, planted={"step": each_example_of_a_user_clipped}),
}
# Those that a direct check alone need find.
CHECKED = {
    "same noise in every tensor": drawing(
        lambda b, key, row, stream, _, *a, **k: b.normal(key, row, stream, 0, *a, **k)
    ),
    "tails of the noise cut off": drawing(lambda b, *a, **k: np.clip(b.normal(*a, **k), -1.5, 1.5)),
    "three times the sampling rate": lying(POISSON, lambda s, *a: at_rate(s, 3).indices(*a), sgd(noise_multiplier=0.7)),
    "a fixed order claimed as Poisson": lying(POISSON, lambda _, *a: THIRTY.indices(*a), steps=10),
    "bits of the adaptive clip without noise": Bug(ADAPTIVE, patched=bits_without_noise),
    "bits of examples without a vector": Bug(ADAPTIVE, patched=bits_of_zero_vectors),
    "cyclic groups drawn anew": lying(CYCLIC, a_partition_for_every_round, steps=9),
    "truncated batches cut at their end": lying(TRUNCATED, lambda s, *a: at_rate(s).indices(*a)[: s.max_batch_size]),
    "truncated batches never cut": lying(TRUNCATED, lambda s, *a: at_rate(s).indices(*a)),
    "batches that the key does not decide": lying(POISSON, lambda s, _, step: s.indices(bytes(32), step)),
    "divided by the drawn batch's size": Bug(TWO, POISSON, planted={"step": divided_by_the_drawn_size}),
    "the filter of clean sums": Bug(DOPPLER, patched=unnoised_filter),
    "the second moment of clean sums": Bug(ADAM, patched=unnoised_second_moment),
    "second moment with the gradient's noise": drawing(
        lambda b, key, row, _, *a, **k: b.normal(key, row, Stream.GRADIENT, *a, **k), MOMENTS
    ),
    "half of a tensor's noise again in the next": drawing(
        lambda b, key, row, stream, first, size, **k: b.normal(key, row, stream, size // 2 if first else 0, size, **k)
    ),
    "one noise for all runs": drawing(lambda b, key, *a, **k: b.normal(bytes(32), *a, **k)),
    # Half of the standard deviation each, not half of the variance.
    "two shards of half the noise": drawing(
        lambda b, key, *a, **k: (b.normal(key, *a, **k) + b.normal(bytes(32), *a, **k)) / 2
    ),
    "a step's sum stays for the next": Bug(FOUR, patched=a_sum_that_stays),
}
BUGS |= {name: replace(bug, bound_exceeds=False) for name, bug in CHECKED.items()}


KEY = bytes(range(32))

# What no run of the plan can show. Not that the fused operation and the plain ones differ: most bugs of single
# operations are planted in the plain ones alone.
SURPRISES = {
    canaries.TWICE: "an example twice in a step",
    canaries.OTHERS: "other batches",
    canaries.OUTSIDE: "an example out of its turn",
    canaries.TOO_MANY: "a batch too large",
    auditing.MORE: "parameters",
}


def audited(bug: Bug, *, planted: bool, key: bytes = KEY, **settings: Any) -> Any:
    """Audit the bug, or its honest twin, at the default settings."""
    sampler = bug.sampling if planted and bug.sampling is not None else bug.sampler
    with bug.patched() if planted else nullcontext():
        more = bug.planted if planted else {}
        return audit(bug.method, sampler, bug.steps, delta=1e-5, key=key, **more, **settings)


def measured() -> list[dict[str, Any]]:
    """The rows of the page's table."""
    rows = []
    for name, bug in BUGS.items():
        found, twin = audited(bug, planted=True), audited(bug, planted=False)
        rows.append(
            {
                "bug": name,
                "claimed": round(found.claimed_epsilon, 2),
                "lower_bound": round(found.lower_bound, 2),
                "lower_bound_any": round(found.lower_bound_any, 2),
                "canaries": found.ratio >= 1,
                "checks": [name for name, p in found.p_values.items() if p <= 0.005 / len(found.p_values)],
                "surprises": [word for sentence, word in SURPRISES.items() if sentence in found.findings],
                "flagged": found.flagged,
                "twin_claimed": round(twin.claimed_epsilon, 2),
                "twin_lower_bound": round(twin.lower_bound, 2),
                "twin_flagged": twin.flagged,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as the page shows them."""
    lines = ["| planted bug | claim | lower bound | found by | honest twin: claim | lower bound |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        by = [*(["canaries"] if row["canaries"] else []), *row["checks"], *row["surprises"]]
        numbers = [row[k] for k in ("claimed", "lower_bound", "twin_claimed", "twin_lower_bound")]
        first, second, third, fourth = (f"{number:.2f}" for number in numbers)
        lines.append(f"| {row['bug']} | {first} | {second} | {', '.join(by)} | {third} | {fourth} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = measured()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found) + "\n")
