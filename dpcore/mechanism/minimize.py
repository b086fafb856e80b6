"""Private minimization on arrays: the methods without any machine-learning framework."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting import Event
from dpcore.errors import ArgumentError, ArgumentTypeError, BudgetError, TrainingWarning
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.mechanism.loop import Loop
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches, Sampler
from dpcore.spec.backends import load_backend
from dpcore.spec.check import check_dtype
from dpcore.spec.keys import Provenance, RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.stream import Stream
from dpcore.spec.validate import function, integer
from dpcore.stages.method import Method
from dpcore.stages.queries import Point
from dpcore.statement.build import CALLER_NOISE, state
from dpcore.statement.statement import Statement

if TYPE_CHECKING:
    from dpcore.ledger import Ledger


@dataclass(frozen=True)
class MinimizeResult:
    """The result of `minimize`.

    Attributes
    ----------
    x : (d,) array
        The method's answer: the last parameters; their average, if it keeps one; y for the accelerated method.
    path : (T + 1, d) array or None
        All parameters from x0 on, if recorded.
    gradients, filtered, negative_share : (T, d), (T, d) and (T,) arrays or None
        The released averages g_t, the filter's outputs, and the share of coordinates whose debiased second moment is
        negative (NaN without one), if recorded.
    clip_norms : (T + 1,) array or None
        The clip norm of every step and the one after the last, if it is adapted; they are released.
    event : Event
        The event of the run; `NonPrivate` if the caller supplied the noise.
    plan, backend : Plan, str
        The plan that ran, and its backend.
    provenance : Provenance
        The origin of its keys; the keys themselves are not kept.
    steps_taken, stopped : int, str
        Steps released: all of the plan's, unless a ledger's budget ended before; and why fewer, or empty.
    ledger : dict
        The run and the ledger that paid; empty without one.
    """

    x: NDArray[Any]
    path: NDArray[Any] | None
    event: Event
    plan: Plan
    backend: str
    provenance: Provenance
    steps_taken: int
    stopped: str = ""
    ledger: dict[str, Any] = field(default_factory=dict)
    gradients: NDArray[Any] | None = None
    filtered: NDArray[Any] | None = None
    negative_share: NDArray[np.float64] | None = None
    clip_norms: NDArray[np.float64] | None = None

    def statement(self, delta: float) -> Statement:
        """Return the privacy statement at `delta`."""
        return state(
            self.plan,
            delta,
            steps_taken=self.steps_taken,
            note=self.stopped,
            ledger=self.ledger,
            keys=self.provenance,
            backend=self.backend,
            layout=Layout.of([("x", self.x.shape)]),
            caller_noise=self.event == CALLER_NOISE,
        )


def minimize(
    per_example_gradient: Gradient,
    x0: NDArray[Any],
    batches: Sampler | Sequence[Sequence[int] | NDArray[np.int64]],
    method: Method,
    *,
    steps: int | None = None,
    noise: NDArray[Any] | None = None,
    key: bytes | None = None,
    exact_key: bool = False,
    record: bool = False,
    record_gradients: bool = False,
    public_gradient: Callable[[NDArray[Any]], NDArray[Any]] | None = None,
    ledger: Ledger | None = None,
    run_name: str | None = None,
) -> MinimizeResult:
    """Minimize a sum of per-example losses privately.

    Parameters
    ----------
    per_example_gradient : callable
        ``per_example_gradient(x, indices)`` with x of shape (d,) and B >= 1 indices returns the B gradients, (B, d),
        of x's dtype.
    x0 : (d,) array of float32 or float64
        The initial point.
    batches : Sampler or sequence of index arrays
        A sampler from `dpcore.sampling`, or the batches themselves: these are then public and fixed, and accounted
        without amplification, with the participation they really show.
    method : Method
        With a noise multiplier.
    steps : int, optional
        Number of steps; required with a sampler, the number of batches otherwise.
    noise : (T, d) or (T, 2, d) array, optional
        Standard normals to use instead of the secret stream's, for tests and study: rows of Z, the seed noise, and
        next to them those of a separately released second moment. With an adaptive clip (T, d + 1): the last column
        is that of the bits. Then nothing is private, and the event is `NonPrivate`.
    key, exact_key
        See `dpcore.spec.keys.RunKeys.new`.
    record, record_gradients : bool
        Keep all parameters on the way; keep the released averages, the filter's outputs and the share of negative
        second moments. All are released, so this costs no privacy.
    public_gradient : callable, optional
        ``public_gradient(x)`` returns a (d,) gradient of public data, for a method whose second moment is made of it.
    ledger, run_name : dpcore.ledger.Ledger, str, optional
        Every step is reserved there, under that name, before its batch is drawn. If the budget ends, so does the run:
        the result is that of the steps until then, and `stopped` gives the reason.

    Returns
    -------
    MinimizeResult

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For shapes, dtypes or numbers that do not fit.
    PrivacyError
        If no accountant covers the sampler; if the ledger's budget does not allow one step.

    Warns
    -----
    TrainingWarning
        If the result is not finite.
    """
    function(per_example_gradient=per_example_gradient)
    backend = load_backend()
    x = start_of(x0)
    check_dtype(backend, x.dtype.name, "x0")
    plan = planned(batches, method, steps)
    check_public(method, public_gradient)
    normals = normals_of(noise, plan, x, ledger is not None)
    keys, device_x, layout = RunKeys.new(key, exact_key=exact_key), backend.from_numpy(x), Layout.of([("x", x.shape)])
    mechanism = Mechanism(plan, layout, [device_x], backend=backend, keys=keys)
    account = None
    if ledger is not None:
        account = mechanism.account = LedgerAccount(ledger, mechanism, name=run_name or f"minimize, {method.name}")
    loop = Loop(mechanism)
    loop.recorder = Recorder(layout, x.size, x.dtype.name) if record_gradients else None
    path = [x.copy()]

    def gradient(values: Sequence[Any], indices: NDArray[np.int64], _: Point) -> list[NDArray[Any]]:
        return [checked_gradient(per_example_gradient, backend.to_numpy(values[0]), indices)]

    def public() -> list[Any]:
        assert public_gradient is not None
        return [backend.from_numpy(checked_public(public_gradient, backend.to_numpy(device_x)))]

    def drawn(row: int, stream: int) -> list[Any]:
        assert normals is not None
        chosen = normals[row, int(stream == Stream.SECOND_MOMENT)]
        if stream == Stream.CLIP_BOUND:
            return [chosen[x.size :]]
        return [backend.from_numpy(chosen[: x.size].astype(x.dtype))]

    def kept() -> None:
        if record:
            path.append(backend.to_numpy(device_x))

    given = {"public": None if public_gradient is None else public, "normals": None if normals is None else drawn}
    try:
        stopped = _descend(lambda: loop.step([device_x], gradient, **given), mechanism, kept)  # type: ignore[arg-type]
    finally:  # even if the caller's function fails: rows that no step took are given back
        if account is not None:
            account.close()
    recorded = {} if loop.recorder is None else loop.recorder.arrays()
    if recorded:
        recorded["gradients"] = recorded.pop("released")
    return MinimizeResult(
        x=_outcome(mechanism, device_x),
        path=np.stack(path) if record else None,
        event=plan.event_after(mechanism.step) if noise is None else CALLER_NOISE,
        plan=plan,
        backend=backend.name,
        provenance=keys.provenance,
        steps_taken=mechanism.step,
        stopped=stopped,
        ledger={} if account is None else {**(account.saved or {}), **account.ledger.stated_place},
        clip_norms=None if mechanism.clip_norms is None else np.array(mechanism.clip_norms),
        **recorded,
    )


def _outcome(mechanism: Mechanism, x: Any) -> NDArray[Any]:
    output: NDArray[Any] = mechanism.backend.to_numpy(mechanism.output([x])[0]).copy()
    if not np.isfinite(output).all():  # a function of releases: the warning reveals nothing about the data
        warnings.warn("minimize diverged: x is not finite; lower the learning rate", TrainingWarning, stacklevel=3)
    return output


def _descend(step: Callable[[], None], mechanism: Mechanism, kept: Callable[[], None]) -> str:
    """Take all steps; return why fewer were taken, if the budget ended before."""
    while mechanism.step < mechanism.plan.steps:
        try:
            step()
        except BudgetError as end:
            if mechanism.step == 0:
                raise
            return str(end)
        kept()
    return ""


Gradient = Callable[[NDArray[Any], NDArray[np.int64]], NDArray[Any]]


def planned(batches: Sampler | Sequence[Sequence[int] | NDArray[np.int64]], method: Method, steps: int | None) -> Plan:
    """Return the plan of a call."""
    if isinstance(batches, (str, bytes)):
        raise ArgumentTypeError(
            f"batches={batches!r}: must be a sampler from dpcore.sampling, such as PoissonSampler(dataset_size=..., "
            "batch_size=...), or a list of index arrays"
        )
    sampler: Sampler = (
        batches if hasattr(batches, "event") else FixedBatches(batches, batch_size=method.batch_size)  # type: ignore[assignment]
    )
    if steps is None:
        if not isinstance(sampler, FixedBatches):
            raise ArgumentError("steps=None: must be given with a sampler")
        steps = len(sampler.batches)
    plan = Plan(method, sampler, integer(1, steps=steps))
    groups = getattr(method.clip, "groups", "flat")
    if groups in ("per_layer", "per_tensor"):
        raise ArgumentError(
            f"clipping_groups={groups!r}: must be 'flat', since x is one vector without layers; make_private and "
            "dpcore.mechanism.mechanism.Mechanism take several tensors"
        )
    return plan


def start_of(x0: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of the initial point."""
    x = np.array(x0)
    if x.dtype not in (np.float32, np.float64):
        raise ArgumentTypeError(f"x0.dtype={x.dtype}: must be float32 or float64")
    if x.ndim != 1:
        raise ArgumentError(f"x0.shape={x.shape}: must be (d,)")
    if not np.isfinite(x).all():
        raise ArgumentError("x0: must be finite in every coordinate")
    return x


def normals_of(noise: NDArray[Any] | None, plan: Plan, x: NDArray[Any], ledger: bool) -> NDArray[Any] | None:
    """Return the caller's normals as (T, 1 or 2, d), with one more column for an adaptive clip."""
    if noise is None:
        return None
    if ledger:
        raise ArgumentError(
            "noise with a ledger: the caller's noise hides nothing, but the ledger counts a private run; leave out "
            "one of them"
        )
    normals = np.asarray(noise)
    separate = plan.method.update.second_moment in ("independent", "joint")
    columns = x.size + int(plan.adaptive_clip is not None)
    shape = (plan.steps, 2, x.size) if separate else (plan.steps, columns)
    if normals.shape != shape:
        raise ArgumentError(
            f"noise.shape={normals.shape}: must be {shape}, one row of normals for each step's releases"
        )
    if normals.dtype.kind not in "iuf":
        raise ArgumentTypeError(f"noise: must be numbers, not {normals.dtype}")
    return normals.reshape(plan.steps, -1, columns)


def check_public(method: Method, public_gradient: Any) -> None:
    """Refuse a gradient of public data that is no function, is not wanted, or is missing."""
    if public_gradient is not None:
        function(public_gradient=public_gradient)
    if (method.update.second_moment == "public") != (public_gradient is not None):
        raise ArgumentError(
            f"public_gradient={public_gradient!r}: must be given for second_moment='public', and for no other"
        )


def checked_public(public_gradient: Callable[[NDArray[Any]], NDArray[Any]], x: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of public data at x."""
    gradient = np.asarray(public_gradient(x))
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        raise ArgumentError(
            f"public_gradient: returned {gradient.shape} of {gradient.dtype}, must be {x.shape} of {x.dtype} as x"
        )
    if not np.isfinite(gradient).all():  # of public data and released parameters: refusing reveals nothing
        raise ArgumentError("public_gradient: returned a value that is not finite; must be finite in every coordinate")
    return gradient


def checked_gradient(per_example_gradient: Gradient, x: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the examples' gradients at x, (B, d)."""
    gradient = np.asarray(per_example_gradient(x, indices))
    if gradient.shape != (len(indices), x.size):
        # Without the shapes: under Poisson sampling the number of indices is secret.
        raise ArgumentError(
            f"per_example_gradient: must return one row of {x.size} numbers for each index, an array of shape "
            f"(len(indices), {x.size})"
        )
    if gradient.dtype != x.dtype:
        raise ArgumentTypeError(f"per_example_gradient: returned dtype {gradient.dtype}, must be {x.dtype} as x0")
    return gradient
