"""Private minimization on arrays: the methods without any machine-learning framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting import Event
from dpcore.errors import ArgumentError, ArgumentTypeError, BudgetError
from dpcore.mechanism.account import LedgerAccount
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches, Sampler, UserSampler, is_sampler
from dpcore.sampling.users import unit_sums
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import Provenance, RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.stream import Stream
from dpcore.spec.validate import function, integer
from dpcore.stages.method import Method
from dpcore.statement.build import CALLER_NOISE, state
from dpcore.statement.statement import Statement

if TYPE_CHECKING:
    from dpcore.ledger import Ledger

PRIVATE_DIAGNOSTICS = (
    "Private diagnostics were taken (norms of clipped sums). They are as secret as the data: publishing them voids the "
    "guarantee."
)

Gradient = Callable[[NDArray[Any], NDArray[np.int64]], NDArray[Any]]


@dataclass(frozen=True)
class MinimizeResult:
    """What `minimize` found.

    Attributes
    ----------
    x : (d,) array
        The method's answer: the last parameters; their average, where it keeps one; y of the accelerated method.
    path : (T + 1, d) array or None
        All parameters from x0 on, where recorded.
    gradients, filtered : (T, d) arrays or None
        The released averages g_t and what the filter made of them, where recorded.
    negative_share : (T,) array or None
        Share of coordinates whose debiased second moment is negative, where recorded; NaN without a second moment.
    clip_norms : (T + 1,) array or None
        The clip norm of every step and the one after the last, where it is adapted; they are released.
    private_diagnostics : dict of str to array, or None
        **Not released**, see `minimize`.
    event : Event
        What was released; `NonPrivate` where the caller supplied the noise.
    plan : Plan
        What was run.
    backend : str
        What it was run on.
    provenance : Provenance
        Where its keys came from; the keys themselves are forgotten.
    steps_taken : int
        Steps released: all of the plan's, unless a ledger's budget ended before.
    stopped : str
        Why fewer steps were taken; empty otherwise.
    ledger : dict
        Which run of which ledger paid; empty without one.
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
    private_diagnostics: dict[str, NDArray[np.float64]] | None = field(default=None, repr=False)

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
            caveats=() if self.private_diagnostics is None else (PRIVATE_DIAGNOSTICS,),
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
    private_diagnostics: bool = False,
    ledger: Ledger | None = None,
    run_name: str | None = None,
) -> MinimizeResult:
    """Minimize a sum of per-example losses privately.

    Parameters
    ----------
    per_example_gradient : callable
        ``per_example_gradient(x, indices)`` with x of shape (d,) and B indices returns the B gradients, (B, d), of
        x's dtype. B may be 0.
    x0 : (d,) array of float32 or float64
        Where to start.
    batches : Sampler or sequence of index arrays
        A sampler from `dpcore.sampling`, or the batches themselves: these are then public and fixed, and accounted
        without amplification, with the participation they really show.
    method : Method
        With a noise multiplier.
    steps : int, optional
        Number of steps; required with a sampler, the number of batches otherwise.
    noise : (T, d) or (T, 2, d) array, optional
        Standard normals to use instead of the secret stream's, for tests and study: rows of Z, the seed noise, and
        beside them those of a separately released second moment. With an adaptive clip (T, d + 1), where the last
        column is that of the bits. Then nothing is private, and the event says so.
    key : bytes, optional
        32 bytes; see `dpcore.spec.keys.RunKeys.new`, also for `exact_key`.
    record : bool
        Keep all parameters on the way (they are released, so this costs no privacy).
    record_gradients : bool
        Keep the released averages, the filter's outputs and the share of negative second moments (likewise free).
    public_gradient : callable, optional
        ``public_gradient(x)`` returns a (d,) gradient of public data, for a method whose second moment is made of it.
    private_diagnostics : bool
        Keep ``clipped_mean_norm``, (T,), the norm of each step's clipped average over C. It is **private**: the
        statement says that publishing it voids the guarantee.
    ledger : dpcore.ledger.Ledger, optional
        Every step is reserved there before its batch is drawn. Where the budget ends, so does the run: the result is
        that of the steps until then, and `stopped` says so.
    run_name : str, optional
        What the ledger calls the run.

    Returns
    -------
    MinimizeResult

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For shapes, dtypes or numbers that do not fit.
    PrivacyError
        If no accountant covers the sampler; if the ledger's budget does not allow one step.
    """
    function(per_example_gradient=per_example_gradient)
    if public_gradient is not None:
        function(public_gradient=public_gradient)
    backend = load_backend()
    x = _start(x0)
    if isinstance(batches, (str, bytes)):
        raise ArgumentTypeError(
            f"batches={batches!r}: must be a sampler from dpcore.sampling, such as PoissonSampler(dataset_size=..., "
            "batch_size=...), or a list of index arrays"
        )
    listed = not is_sampler(batches)
    sampler: Sampler = FixedBatches(batches, batch_size=method.batch_size) if listed else batches  # type: ignore[assignment,arg-type]
    if steps is None:
        if not listed:
            raise ArgumentError("steps=None: must be given with a sampler")
        steps = sampler.steps_per_epoch
    plan = Plan(method, sampler, integer(1, steps=steps))
    needs_public = method.update.second_moment == "public"
    if needs_public != (public_gradient is not None):
        raise ArgumentError(
            f"public_gradient={public_gradient!r}: must be given for second_moment='public', and for no other"
        )
    if noise is not None and ledger is not None:
        raise ArgumentError(
            "noise with a ledger: noise of the caller's hides nothing, and the ledger counts a private run; leave out "
            "one of them"
        )
    normals = _normals(noise, plan, x)
    keys = RunKeys.new(key, exact_key=exact_key)
    device_x = backend.from_numpy(x)
    mechanism = Mechanism(plan, Layout.of([("x", x.shape)]), [device_x], backend=backend, keys=keys)
    account = None
    if ledger is not None:
        name = run_name or f"minimize, {method.name}"
        account = LedgerAccount(ledger, mechanism, name=name)
        mechanism.account = account
    path = [x.copy()] if record else None
    gradients: list[NDArray[Any]] = []
    filtered: list[NDArray[Any]] = []
    negative: list[float] = []
    clipped: list[float] = []

    def observe(released: Sequence[Any], outputs: Sequence[Any]) -> None:
        gradients.append(backend.to_numpy(released[0]).copy())
        filtered.append(backend.to_numpy(outputs[0]).copy())

    def drawn(row: int, stream: int) -> list[Any]:
        assert normals is not None
        chosen = normals[row, int(stream == Stream.SECOND_MOMENT)]
        if stream == Stream.CLIP_BOUND:
            return [chosen[x.size :]]
        return [backend.from_numpy(chosen[: x.size].astype(x.dtype))]

    stopped = ""
    try:
        for _ in range(plan.steps):
            try:
                indices = mechanism.draw()
            except BudgetError as end:
                if mechanism.step == 0:
                    raise
                stopped = str(end)
                break
            rows: NDArray[Any] | None = None
            for point in mechanism.points():
                (at,) = mechanism.at([device_x], point)
                gradient = _gradient(per_example_gradient, backend.to_numpy(at), indices)
                # A sum of two points is formed before it is clipped: its sensitivity is then one clip norm.
                with np.errstate(all="ignore"):  # a warning of an overflow would tell of one example
                    weighted = gradient if point.weight == 1 else x.dtype.type(point.weight) * gradient
                    rows = weighted if rows is None else rows + weighted
            assert rows is not None
            if isinstance(sampler, UserSampler):  # the sum over a user's examples is what is clipped
                rows = unit_sums(rows, sampler.units(mechanism.keys.sampling, mechanism.step))
            mechanism.add([backend.from_numpy(rows)])
            if private_diagnostics:
                clipped.append(mechanism.clipped_mean_norm())
            public = None
            if public_gradient is not None:
                public = [backend.from_numpy(_public(public_gradient, backend.to_numpy(device_x)))]
            mechanism.release(
                [device_x],
                normals=None if normals is None else drawn,
                public=public,
                observe=observe if record_gradients else None,
            )
            if record_gradients:
                negative.append(mechanism.negative_share())
            if path is not None:
                path.append(backend.to_numpy(device_x))
    finally:  # also where the caller's function fails: what no step took is given back
        if account is not None:
            account.close()
    return MinimizeResult(
        x=backend.to_numpy(mechanism.output([device_x])[0]).copy(),
        path=None if path is None else np.stack(path),
        event=plan.event_after(mechanism.step) if noise is None else CALLER_NOISE,
        plan=plan,
        backend=backend.name,
        provenance=keys.provenance,
        steps_taken=mechanism.step,
        stopped=stopped,
        ledger={} if account is None else {**(account.saved or {}), **account.ledger.stated_place},
        gradients=np.stack(gradients) if record_gradients else None,
        filtered=np.stack(filtered) if record_gradients else None,
        negative_share=np.array(negative) if record_gradients else None,
        clip_norms=None if mechanism.clip_norms is None else np.array(mechanism.clip_norms),
        private_diagnostics={"clipped_mean_norm": np.array(clipped)} if private_diagnostics else None,
    )


def _start(x0: NDArray[Any]) -> NDArray[Any]:
    x = np.array(x0)
    if x.dtype not in (np.float32, np.float64):
        raise ArgumentTypeError(f"x0.dtype={x.dtype}: must be float32 or float64")
    if x.ndim != 1:
        raise ArgumentError(f"x0.shape={x.shape}: must be (d,)")
    if not np.isfinite(x).all():
        raise ArgumentError("x0: must be finite in every coordinate")
    return x


def _normals(noise: NDArray[Any] | None, plan: Plan, x: NDArray[Any]) -> NDArray[Any] | None:
    """Return the caller's normals as (T, 1 or 2, d), with one more column for an adaptive clip."""
    if noise is None:
        return None
    normals = np.asarray(noise)
    separate = plan.method.update.second_moment in ("independent", "joint")
    columns = x.size + int(plan.adaptive_clip is not None)
    shape = (plan.steps, 2, x.size) if separate else (plan.steps, columns)
    if normals.shape != shape:
        raise ArgumentError(
            f"noise.shape={normals.shape}: must be {shape}, one row of normals for each step's releases"
        )
    return normals.reshape(plan.steps, -1, columns)


def _public(public_gradient: Callable[[NDArray[Any]], NDArray[Any]], x: NDArray[Any]) -> NDArray[Any]:
    gradient = np.asarray(public_gradient(x))
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        raise ArgumentError(
            f"public_gradient: returned {gradient.shape} of {gradient.dtype}, must be {x.shape} of {x.dtype} as x"
        )
    if not np.isfinite(gradient).all():  # of public data and released parameters: refusing tells nothing
        raise ArgumentError("public_gradient: returned a value that is not finite; must be finite in every coordinate")
    return gradient


def _gradient(per_example_gradient: Gradient, x: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
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
