"""Bugs for the audit to find, each a wrapper around what is sound. Nothing in the library can be switched to them.

``python -m tests.end_to_end.planted_bugs docs/results/audit.json`` writes what docs/audit.md shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from dpcore import methods
from dpcore import plan as plan_module
from dpcore.audit import audit
from dpcore.clipping import Clip, Grouping, Sensitivity
from dpcore.mechanism import Mechanism
from dpcore.sampling import FixedOrderSampler, PoissonSampler
from dpcore.spec.stream import Stream


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


def half_noise(backend: Any, *a: Any, **k: Any) -> Any:
    return 0.5 * backend.normal(*a, **k)


def capped_noise(backend: Any, *a: Any, **k: Any) -> Any:
    return np.clip(backend.normal(*a, **k), -1.5, 1.5)


def same_row(backend: Any, key: Any, row: int, *a: Any, **k: Any) -> Any:
    return backend.normal(key, 0, *a, **k)


def same_for_every_tensor(backend: Any, key: Any, row: int, stream: int, first: int, size: int, **k: Any) -> Any:
    return backend.normal(key, row, stream, 0, size, **k)


def sometimes_none(backend: Any, key: Any, row: int, *a: Any, **k: Any) -> Any:
    return (row % 10 != 9) * backend.normal(key, row, *a, **k)


def silent_second_moment(backend: Any, key: Any, row: int, stream: int, *a: Any, **k: Any) -> Any:
    return (stream != Stream.SECOND_MOMENT) * backend.normal(key, row, stream, *a, **k)


def no_clip(backend: Any, norms: Sequence[Any], *_: Any) -> Any:
    return [np.ones_like(norm) for norm in norms]


def clip_twice_as_long(backend: Any, norms: Any, rule: str, bounds: Sequence[float], *a: Any) -> Any:
    return backend.clip_factors(norms, rule, [2 * bound for bound in bounds], *a)


def noise_over_batch_size(size: float) -> Callable[..., Any]:
    return lambda backend, *a, **k: backend.normal(*a, **k) / size


def groups_each_of_the_whole_norm(backend: Any, norms: Any, rule: str, bounds: Sequence[float], *a: Any) -> Any:
    return backend.clip_factors(norms, rule, [bound * len(bounds) ** 0.5 for bound in bounds], *a)


def each_point_clipped(mechanism: Mechanism, parameters: Any, gradient: Any, public: Any = None, observe: Any = None):
    """Adds the clipped gradients of the points instead of clipping their combination."""
    indices = mechanism.draw()
    for point in mechanism.points():
        blocks = gradient(mechanism.at(parameters, point), indices, point)
        mechanism.add([mechanism.backend.from_numpy(point.weight * block) for block in blocks])
    mechanism.release(parameters, public=public, observe=observe)


def overlapping_microbatches(
    mechanism: Mechanism, parameters: Any, gradient: Any, public: Any = None, observe: Any = None
):
    """Cuts a batch in two pieces that overlap."""
    indices = mechanism.draw()
    half = len(indices) // 2
    for piece in (indices[: half + 20], indices[half - 20 :]):
        (point,) = mechanism.points()
        mechanism.add([mechanism.backend.from_numpy(b) for b in gradient(parameters, piece, point)])
    mechanism.release(parameters, public=public, observe=observe)


@dataclass(frozen=True)
class Lying:
    """Claims the event of a Poisson sampler but draws batches of its own."""

    claimed: PoissonSampler
    draw: Callable[[PoissonSampler, bytes, int], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.claimed, name)

    def indices(self, key: bytes, step: int) -> Any:
        return self.draw(self.claimed, key, step)


def everybody(claimed: PoissonSampler, key: bytes, step: int) -> Any:
    return np.arange(claimed.dataset_size)


def three_times(claimed: PoissonSampler, key: bytes, step: int) -> Any:
    return PoissonSampler(dataset_size=claimed.dataset_size, sample_rate=3 * claimed.sample_rate).indices(key, step)


def shuffled(claimed: PoissonSampler, key: bytes, step: int) -> Any:
    order = FixedOrderSampler(dataset_size=claimed.dataset_size, batch_size=int(claimed.batch_size))
    return order.indices(key, step)


ORDER = FixedOrderSampler(dataset_size=200, batch_size=50)
POISSON = PoissonSampler(dataset_size=300, batch_size=30)


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
    return mock.patch.object(plan_module, "sensitivity", return_value=1.0)


def root_of_groups_forgotten() -> AbstractContextManager[Any]:
    def forgotten(self: Clip, grouping: Grouping) -> Sensitivity:
        return Sensitivity(max(grouping.bounds))

    return mock.patch.object(Clip, "sensitivity", forgotten)


BUGS = {
    "noise halved": Bug(sgd(noise_multiplier=4.0), planted=on(normal=half_noise)),
    "clip dropped": Bug(sgd(noise_multiplier=4.0), planted=on(clip_factors=no_clip)),
    "clipped to twice the norm": Bug(sgd(noise_multiplier=4.0), planted=on(clip_factors=clip_twice_as_long)),
    "same noise in every step": Bug(sgd(noise_multiplier=4.0), planted=on(normal=same_row)),
    "same noise in every tensor": Bug(
        sgd(noise_multiplier=4.0), planted=on(normal=same_for_every_tensor), bound_exceeds=False
    ),
    "no noise in every tenth step": Bug(sgd(noise_multiplier=4.0), steps=20, planted=on(normal=sometimes_none)),
    "noise divided by the batch size twice": Bug(
        sgd(noise_multiplier=4.0), planted=on(normal=noise_over_batch_size(50))
    ),
    "tails of the noise cut off": Bug(sgd(noise_multiplier=4.0), planted=on(normal=capped_noise), bound_exceeds=False),
    "groups each clipped to the whole norm": Bug(
        sgd(noise_multiplier=4.0, clipping_groups="per_tensor"),
        planted=on(clip_factors=groups_each_of_the_whole_norm),
    ),
    "sensitivity of one group for all": Bug(
        sgd(noise_multiplier=4.0, clipping_groups="per_tensor"), patched=root_of_groups_forgotten
    ),
    "several participations counted as one": Bug(
        methods.memf(lr=0.1, noise_multiplier=4.0), steps=24, patched=one_participation
    ),
    "DiSK's points clipped one by one": Bug(
        methods.disk(lr=0.1, noise_multiplier=4.0, kappa=0.3, gamma=0.5), planted={"step": each_point_clipped}
    ),
    "examples in two micro-batches": Bug(sgd(noise_multiplier=4.0), planted={"step": overlapping_microbatches}),
    "second moment without noise": Bug(
        methods.dp_adam(lr=0.1, noise_multiplier=4.0, variant="independent_moments"),
        planted=on(normal=silent_second_moment),
    ),
    "every example in every step": Bug(sgd(noise_multiplier=2.0), POISSON, sampling=Lying(POISSON, everybody)),
    "three times the sampling rate": Bug(
        sgd(noise_multiplier=0.7), POISSON, sampling=Lying(POISSON, three_times), bound_exceeds=False
    ),
    "a fixed order claimed as Poisson": Bug(
        sgd(noise_multiplier=2.0), POISSON, sampling=Lying(POISSON, shuffled), steps=10, bound_exceeds=False
    ),
}


KEY = bytes(range(32))


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
                "canaries": found.power > found.claimed_power,
                "checks": [name for name, p in found.p_values.items() if p <= 0.005 / len(found.p_values)],
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
        by = [*(["canaries"] if row["canaries"] else []), *row["checks"]] or ["an example twice in a step"]
        numbers = [row[k] for k in ("claimed", "lower_bound", "twin_claimed", "twin_lower_bound")]
        first, second, third, fourth = (f"{number:.2f}" for number in numbers)
        lines.append(f"| {row['bug']} | {first} | {second} | {', '.join(by)} | {third} | {fourth} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = measured()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(table(found) + "\n")
