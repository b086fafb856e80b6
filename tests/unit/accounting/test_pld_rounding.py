"""The rounding errors that the bounds allow for, against higher precision: each measured one with room to spare."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.fft import irfft, next_fast_len, rfft

pytest.importorskip("mpmath")
import mpmath

from dpcore import accounting
from dpcore.accounting.events import PoissonSampledGaussian
from dpcore.accounting.gaussian import log_delta, rounding
from dpcore.accounting.phases import PoissonStep, demand_phases, phases
from dpcore.accounting.pld import compose, intervals, loss
from dpcore.accounting.pld.compose import Moments, transform_error
from dpcore.accounting.pld.intervals import problem
from dpcore.accounting.pld.loss import center
from tests.refused import refused

UNIT = 2.0**-53


@contextmanager
def anew(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: object) -> Iterator[None]:
    """Replace a part of the computation, and remember nothing from before or of what was found so."""
    monkeypatch.setattr(module, name, value)
    intervals._epsilon.cache_clear()
    try:
        yield
    finally:
        intervals._epsilon.cache_clear()


def shapes(n: int) -> list[np.ndarray]:
    rng, k = np.random.default_rng(n), np.arange(n)
    return [
        rng.standard_normal(n), rng.random(n) ** 40, np.exp(-0.5 * ((k - n / 2) / (n / 30 + 1)) ** 2),
        np.exp(-k / (5 + n / 1000)), (k == n // 3).astype(np.float64),
    ]  # fmt: skip


LENGTHS = [8, 9, 25, 27, 100, 243, 1000, 1024, 3125, 6561, 15_625, 19_683, 50_625, 131_072, 262_144]


@pytest.mark.parametrize("n", LENGTHS)
def test_transforms_stay_well_below_their_bound(n: int) -> None:
    """The bound is of the worst case. What is met is a tenth of it from a thousand points on, a fifth below."""
    bound = transform_error(n) / (10 if n >= 1000 else 5)
    twice = np.full(n // 2 + 1, 2.0)  # a real transform holds each frequency but the outer ones for two
    twice[0], twice[-1] = 1.0, 1.0 if n % 2 == 0 else 2.0
    for x in shapes(n):
        found, exact = rfft(x), rfft(x.astype(np.longdouble))
        error, size = ((twice * np.abs(one) ** 2).sum() for one in (found - exact, exact))
        assert math.sqrt(error / size) <= bound
        assert np.abs(found - exact).max() <= bound * np.abs(x).sum()
        back = irfft(found, n=n) - irfft(found.astype(np.clongdouble), n=n)
        assert np.linalg.norm(back.astype(np.float64)) <= bound * np.linalg.norm(x)


@pytest.mark.parametrize("n", [96, 1000, 4096, 59_049, 1_048_576])
def test_roots_of_unity_are_as_near_as_the_bound_of_transforms_supposes(n: int) -> None:
    """sin and cos of the C library, which `math` calls, at the angles that the tables of a transform hold."""
    shift = next(k for k in range(1, 40) if 4**k >= (n + 2) // 2)
    step = 0.25 * math.pi / n
    with mpmath.workdps(40):
        for k in sorted({*range(1, 1 << shift, max(1, (1 << shift) // 60)), *range(1, n // 8, max(1, n // 500))}):
            angle = 8 * k * step
            if angle > math.pi / 4:
                continue
            exact = mpmath.expjpi(mpmath.mpf(2 * k) / n)
            assert abs(mpmath.mpc(math.cos(angle), math.sin(angle)) - exact) <= (math.pi / 2 + math.sqrt(2.0)) * UNIT


def test_a_length_with_another_factor_has_no_bound() -> None:
    refused(ValueError, "count=14", transform_error, 14)


@pytest.mark.parametrize(("rate", "sigma"), [(0.01, 1.0), (1e-4, 0.4), (0.5, 0.3), (0.3, 5.0), (1e-6, 1.0), (0.9, 0.1)])
@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize("log_size", [-20.0, -600.0])
def test_the_curve_of_a_step_is_off_by_less_than_eta(rate: float, sigma: float, direction: str, log_size: float):
    """|H(l) - exact| against the P-mass above l, at losses all over the range that is looked at."""
    task = problem(phases(PoissonSampledGaussian(rate, sigma, 1000)), log_size)  # type: ignore[arg-type]
    (family,) = task.families
    bottom, top = family.reach(direction, task.low, task.high)
    middle = float(center(family, direction, 1e-9)[0, 0])
    away = 10.0 ** np.linspace(-4.0, 0.0, 12)
    losses = np.concatenate([middle + away * (float(end[0, 0]) - middle) for end in (top, bottom)])
    with mpmath.workdps(60):
        q, s = mpmath.mpf(rate), mpmath.mpf(sigma)
        for at in losses.tolist():
            p_mass, q_mass = (float(one[0, 0]) for one in family.masses(direction, np.array([[at, np.inf]])))
            if p_mass < 1e-290 or q_mass < 1e-290:
                continue  # `discretize` does without
            lift = mpmath.exp(mpmath.mpf(at))
            inside = ((lift if direction == "remove" else 1 / lift) - 1) / q + 1
            z = mpmath.mpf("0.5") + s**2 * mpmath.log(inside) if inside > 0 else -mpmath.inf
            sign = 1 if direction == "remove" else -1
            plain, moved = (mpmath.ncdf(sign * (center - z) / s) for center in (0, 1))
            mixed = (1 - q) * plain + q * moved
            exact_p, exact_q = (mixed, plain) if direction == "remove" else (plain, mixed)
            error = abs(mpmath.mpf(p_mass) - lift * mpmath.mpf(q_mass) - (exact_p - lift * exact_q))
            # Next to the largest loss of "add" the outcome is ill-conditioned: then P is that above a loss u below.
            assert error <= task.eta / 12 * max(exact_p, mpmath.mpf(p_mass)), (at, float(error / exact_p / task.eta))


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.01, 1.0, 10**6), (1e-4, 0.4, 10**5), (0.5, 0.3, 1000)])
def test_log_moments_are_off_by_less_than_the_window_allows(rate: float, sigma: float, steps: int) -> None:
    task = problem(demand_phases(PoissonSampledGaussian(rate, sigma, steps)), math.log(1e-6))
    (part,) = task.rough("remove").parts
    for theta in (0.0, 0.3, 2.0, 15.0):
        value = Moments([part]).log_moment(theta)
        p, losses = part.p.astype(np.longdouble), part.offsets + part.points.astype(np.longdouble) * part.h
        top = (theta * losses).max()
        exact = steps * (top + np.log((p * np.exp(theta * losses - top)).sum()))
        bound = (64.0 + 8.0 * theta * float(np.abs(losses).max())) * UNIT * steps  # of `compose`
        assert abs(value - float(exact)) <= bound / 3


@pytest.mark.parametrize(("rate", "sigma", "steps", "theta"), [(1e-5, 0.6, 10**5, 7.4), (1.2e-5, 0.83, 20_000, 31.5)])
def test_a_convolution_is_off_by_less_than_its_bound(rate: float, sigma: float, steps: int, theta: float) -> None:
    """Many rare events, whose bound is that of frequencies: far below the plain one, and far above the error."""
    task = problem(demand_phases(PoissonSampledGaussian(rate, sigma, steps)), math.log(1e-8))
    ((family, offsets, grid),) = task.grids("remove", 1e-4, 48)
    moments = Moments([loss.upper(family, "remove", 1e-4, offsets, grid)])
    (((tilted,), _),) = moments.tilted(theta)
    count, middle = 65_536, int(grid[np.argmax(tilted)])
    summed, bound, _ = compose._convolve(moments, theta, count)
    folded = np.zeros(count, dtype=np.longdouble)
    np.add.at(folded, (grid - middle) % count, tilted.astype(np.longdouble))
    exact = irfft(compose.power(rfft(folded), steps), n=count)
    error = float(np.linalg.norm((summed - exact).astype(np.float64)))
    folded[0] = 0.0
    assert error <= bound / 10
    plain = transform_error(count) * float(np.linalg.norm(folded.astype(np.float64))) + 2.0 * UNIT
    assert bound < 0.25 * steps * plain


@pytest.mark.parametrize("mu", [1e-20, 1e-9, 1e-3, 0.0141, 0.0142, 0.05, 0.7, 2.1, 3.0, 12.0, 40.0])
def test_the_exact_gaussian_delta_is_off_by_less_than_its_slack(mu: float) -> None:
    with mpmath.workdps(60):
        m = mpmath.mpf(mu)
        for share in (0.0, 0.1, 0.5, 1.0, 2.0, 4.0):
            epsilon = share * (mu * mu / 2 + 3.0 * mu)
            e = mpmath.mpf(epsilon)
            exact = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
            if exact < mpmath.mpf(10) ** -300:
                continue
            error = abs(mpmath.expm1(mpmath.mpf(log_delta(mu, epsilon)) - mpmath.log(exact)))
            assert error <= rounding(mu) / 8, (epsilon, float(error))


def test_single_masses_of_families_are_those_of_their_members() -> None:
    steps = [(PoissonStep(((1.0, 0.01 * (k + 1), 0.5 + 0.1 * k),)), k + 1) for k in range(5)]
    (family,) = loss.families(steps)
    grid = loss.points(-30.0, 60.0, 8)
    offsets = center(family, "remove", 0.05)
    together = loss.upper(family, "remove", 0.05, offsets, grid)
    for k in range(5):
        alone = family.of(np.array([k]), family.counts[k : k + 1])
        one = loss.upper(alone, "remove", 0.05, offsets[k : k + 1], grid)
        assert np.allclose(one.p[0], together.p[k], rtol=1e-13, atol=0.0)


@pytest.mark.parametrize("outside", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.01, 1.0, 1000), (0.2, 3.0, 50), (0.001, 0.6, 2000)])
def test_a_window_that_is_far_too_small_loosens_the_bounds_and_never_breaks_them(
    q: float, sigma: float, steps: int, outside: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good part of the mass then lies outside of the window, and wraps into it: what the slack is for."""
    event = accounting.PoissonSampledGaussian(q, sigma, steps)
    deltas = (1e-9, 1e-5, 1e-2)
    known = [accounting.epsilon_interval(event, delta) for delta in deltas]
    with anew(monkeypatch, compose, "_OUTSIDE", outside):
        cut = [accounting.epsilon_interval(event, delta) for delta in deltas]
    for exact, found in zip(known, cut, strict=True):
        assert found.lower <= exact.upper
        assert found.upper >= exact.lower
    assert any(found.gap > 3 * exact.gap for exact, found in zip(known, cut, strict=True)), "the window was cut"


def test_what_lies_above_the_window_is_added_to_an_upper_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut half a standard deviation above the mean: what lies above is wrapped far below, where it does not count."""
    whole = compose._window

    def cut(moments: Moments, theta: float, log_total: float, mean: float, variance: float, h: float) -> Any:
        _, low, _ = whole(moments, theta, log_total, mean, variance, h)
        high = max(2, round(0.5 * math.sqrt(variance) / h))
        return high, high - next_fast_len(high - low, real=True), 1.0

    events = [accounting.PoissonSampledGaussian(q, s, t) for q, s, t in ((0.01, 1.0, 1000), (0.2, 3.0, 50))]
    known = [accounting.epsilon_interval(event, 1e-5) for event in events]
    with anew(monkeypatch, compose, "_window", cut):
        found = [accounting.epsilon_interval(event, 1e-5) for event in events]
    for exact, loose in zip(known, found, strict=True):
        assert loose.upper >= exact.lower
        assert loose.lower <= exact.upper


def rare(phases: int, steps: int) -> Moments:
    """Return what `phases` distinct steps, each so many times, are on a grid."""
    parts = [accounting.PoissonSampledGaussian(0.01 + 1e-4 * k, 1.0, steps) for k in range(phases)]
    task = problem(demand_phases(accounting.Composed(tuple(parts))), math.log(1e-8))
    grids = task.grids("remove", 1e-3, 48)
    return Moments([loss.upper(family, "remove", 1e-3, offsets, grid) for family, offsets, grid in grids])


@pytest.mark.parametrize(("steps", "least_shared"), [((3, 40), 3), ((4000, 50_000), 4000), ((1, 1), 1)])
def test_the_bound_of_a_convolution_leaves_out_no_term(steps: tuple[int, int], least_shared: int) -> None:
    """Its formula again, from the text: what is met is far too small to miss a term."""
    count, theta = 50_000, 2.0
    parts = [rare(1, times).parts[0] for times in steps]
    moments = Moments(parts)
    summed, bound, _ = compose._convolve(moments, theta, count)
    growth, spread, each, product = transform_error(count), 0.0, 0.0, 1.0
    for ((tilted,), _), part, times in zip(moments.tilted(theta), parts, steps, strict=True):
        folded = np.zeros(count)
        np.add.at(folded, (part.points - int(part.points[np.argmax(tilted)])) % count, tilted)
        product = product * np.abs(np.fft.rfft(folded)) ** times  # each frequency but the outer ones stands for two
        folded[0] = 0.0
        assert folded.sum() > 0.06
        spread += times * (growth * np.linalg.norm(folded) + 2 * UNIT)
        each += times * (growth * folded.sum() + 2 * UNIT)
    rare_bound = each * (8 / 7 * np.linalg.norm(product) * math.sqrt(2 / count) + 0.9 ** (least_shared - 1))
    ways = (growth + 4 * sum(steps) * UNIT) * np.linalg.norm(summed)
    assert bound == pytest.approx(1.04 * (min(spread, rare_bound) + ways), rel=1e-6, abs=0.0)


def test_an_error_of_a_convolution_in_the_worst_direction_breaks_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as it is said to be, and where it moves delta at the point of interest most."""
    event = accounting.PoissonSampledGaussian(0.01, 1.0, 1000)
    known = accounting.epsilon_interval(event, 1e-5, 1e-5)
    convolve, norm = compose._convolve, compose._weight_norm
    signs = [0.0]

    def spoiled(moments: Moments, theta: float, count: int) -> Any:
        summed, bound, start = convolve(moments, theta, count)
        h, (_, mean, _) = moments.parts[0].h, moments(theta)
        shifts = sum(float(part.counts @ part.offsets[:, 0]) for part in moments.parts)
        x = np.arange(1, count // 2) * h
        weights = np.exp(-theta * x) * -np.expm1(-x)
        at = (round((mean - shifts) / h) - start + np.arange(1, count // 2)) % count
        size = 0.02 * float(np.linalg.norm(summed))
        summed = summed.copy()
        summed[at] += signs[-1] * size * weights / np.linalg.norm(weights)
        return summed, bound + size, start

    for sign in (-1.0, 1.0):
        signs.append(sign)
        with anew(monkeypatch, compose, "_convolve", spoiled):
            found = accounting.epsilon_interval(event, 1e-5)
        assert found.lower <= known.upper
        assert found.upper >= known.lower
        assert found.gap > 2 * known.gap
    x = 1e-3 * np.arange(1, 1001)
    assert norm(2.0, 1e-3, 1000) >= np.linalg.norm(np.exp(-2.0 * x) * -np.expm1(-x))


def test_masses_as_wrong_as_eta_allows_break_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """P too small by e^-eta, and with it all losses by eta, in an upper bound; too large in a lower one."""
    event = accounting.PoissonSampledGaussian(0.01, 1.0, 100)
    known = accounting.epsilon_interval(event, 1e-5, 1e-5)
    eta = 2e-4

    def wrong(on_grid: Any, sign: float) -> Any:
        def moved(*given: Any) -> loss.Masses:
            masses = on_grid(*given)
            return replace(masses, p=masses.p * math.exp(sign * eta), offsets=masses.offsets + sign * eta)

        return moved

    monkeypatch.setattr(type(problem(demand_phases(event), -10.0)), "eta", property(lambda task: eta))
    upper, lower = loss.upper, loss.lower
    for sign in (-1.0, 1.0):
        monkeypatch.setattr(loss, "upper", wrong(upper, sign))
        with anew(monkeypatch, loss, "lower", wrong(lower, sign)):
            found = accounting.epsilon_interval(event, 1e-5)
        if sign < 0:
            assert found.upper >= known.lower
        else:
            assert found.lower <= known.upper


def test_what_float64_loses_in_a_composition_is_added() -> None:
    """The scale of a curve, and where its losses lie, against K(theta) and the formula in `compose`."""
    moments, theta, eta = rare(3, 100), 2.0, 1e-9
    value, mean, _ = moments(theta)
    steps, largest = 300, max(float(np.abs(part.losses).max()) for part in moments.parts)
    for upper, sign in ((True, 1.0), (False, -1.0)):
        found = compose.compose(moments, theta, upper=upper, eta=eta)
        shift = steps * (eta + 4 * largest * UNIT)
        spare = (4 * found.size + 8 * theta * abs(mean) + (64 + 8 * theta * largest) * steps) * UNIT
        assert sign * (found.log_scale - (value - theta * mean)) == pytest.approx(shift + spare, abs=0.02 * spare)
        infinite = sum(float(part.counts @ part.infinite) for part in moments.parts)
        assert found.infinite >= infinite * upper
        assert found.chernoff >= value + compose._log_peak(theta) + spare + (1 + theta) * shift * (1 - 1e-9)
