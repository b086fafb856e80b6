"""Runs fixed before the first release: their plans by PLD, everything else by the filter."""

import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dpcore.accounting import Adjacency, Composed, Event, Gaussian, MatrixGaussian, NonPrivate, PoissonSampledGaussian
from dpcore.accounting import epsilon as epsilon_of
from dpcore.accounting.branches import Rows, count
from dpcore.errors import ArgumentError, BudgetError, DataError, PrivacyError
from dpcore.ledger import Ledger, LedgerRun
from dpcore.ledger.privacy_filter import DEFAULT_ORDER, PrivacyFilter, add, best_order, order_for
from dpcore.ledger.state import within
from tests.refused import refused
from tests.unit.ledger_tools import begin, full, new, poisson, released, resealed

BUDGET = (1.0, 1e-5)
STEPS = 40


def little(steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    """All its steps as PLD counts them are more than a filter of any order allows."""
    return PoissonSampledGaussian(0.02, 1.1, steps + count(abandoned))


def third(steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    return Gaussian(8.0 * 3**0.5 * 40**0.5, steps + count(abandoned))


def alone(folder: Path) -> tuple[Ledger, LedgerRun]:
    """A ledger whose budget is kept whole by one run."""
    ledger = new(folder, budget=(epsilon_of(little(STEPS), 1e-5), 1e-5))
    run = begin(ledger, little, steps=STEPS)
    released(run, 20)
    assert ledger.total().alone
    return ledger, run


def test_a_plan_that_fits_by_pld_runs_to_its_end_and_nothing_follows(tmp_path: Path) -> None:
    ledger, run = alone(tmp_path)
    released(run, STEPS, 20)
    run.close(STEPS)
    total = ledger.total()
    assert total.spent > total.limit
    assert (total.plan, total.budget, total.filter) == (ledger.budget[0],) * 3
    assert total.notes == ()
    assert ledger.verify().valid
    assert ledger.remaining().left == 0
    with pytest.raises(BudgetError, match="it is kept whole by the runs that were fixed before the first release"):
        begin(ledger, third, steps=STEPS)
    with pytest.raises(BudgetError, match=r"their plans cost epsilon=\S+ by the tightest accountant"):
        ledger.charge(Gaussian(1e4), name="next to nothing")


def test_the_rest_of_a_plan_that_ends_early_is_not_given_to_others(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(epsilon_of(poisson(1000), 1e-5), 1e-5))
    run = begin(ledger, poisson, steps=1000)
    run.reserve(0)
    run.close(1)
    assert ledger.total().alone
    assert ledger.total().spent < ledger.total().limit
    left = ledger.remaining()
    assert (left.left, left.fits(Gaussian(1e4))) == (0.0, False)
    with pytest.raises(BudgetError, match="kept whole"):
        ledger.charge(Gaussian(1e4), name="next to nothing")
    released(run, 20, 1)  # its own run may go on


def test_a_smaller_first_run_leaves_room_and_the_second_stops_in_time(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    released(first := begin(ledger, third, steps=STEPS), 4)
    held, total = ledger.remaining(), ledger.total()
    assert held.spent == ledger.filter.charge(third(STEPS))  # the whole plan, as long as the run is open
    assert (total.alone, total.kept) == (False, pytest.approx(held.spent - total.spent))
    second, most = begin(ledger, full, steps=1000), held.steps(full, 1000)
    assert 0 < most < 1000
    released(second, most)
    with pytest.raises(BudgetError, match=r"it was not reserved$"):  # chosen later: its plan explains nothing
        second.reserve(most)
    released(first, STEPS, 4)  # what was kept for it
    second.close(most)
    total = ledger.total()
    assert total.spent <= total.limit
    assert total.budget == pytest.approx(BUDGET[0])
    assert ledger.verify().valid


def test_what_a_closed_run_gives_back_is_the_filters(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    released(first := begin(ledger, third, steps=STEPS), 4)
    kept = ledger.remaining().spent
    first.close(4)
    assert ledger.remaining().spent == ledger.total().spent == ledger.filter.charge(third(4)) < kept
    ledger.charge(full(ledger.remaining().steps(full, 1000)), name="all of the rest")
    with pytest.raises(BudgetError):
        released(first, STEPS, 4)
    assert ledger.total().spent <= ledger.total().limit


def test_three_runs_declared_in_one_go(tmp_path: Path) -> None:
    plans = Composed((third(STEPS),) * 3)
    ledger = new(tmp_path, budget=(epsilon_of(plans, 1e-5) * 1.0001, 1e-5))
    runs = [begin(ledger, third, steps=STEPS) for _ in range(3)]
    assert not ledger.remaining().fits(Gaussian(20.0))
    fourth = begin(ledger, third, steps=STEPS)  # fits alone, and not together with the others
    for row in range(STEPS):
        for run in runs:
            run.reserve(row)
    total = ledger.total()
    assert (total.fixed_runs, total.alone) == (tuple(run.run_id for run in runs), True)
    assert total.plan == epsilon_of(plans, 1e-5, "gaussian")
    refused(BudgetError, "kept whole by the runs that were fixed", fourth.reserve, 0)
    assert ledger.verify().valid


def test_a_run_begun_after_the_first_release_is_not_fixed(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    (first := begin(ledger, third, steps=STEPS)).reserve(0)
    begin(ledger, third, steps=STEPS).reserve(0)
    assert ledger.total().fixed_runs == (first.run_id,)


def test_a_run_that_gives_all_rows_back_fixes_nothing(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(epsilon_of(little(STEPS), 1e-5), 1e-5))
    failed, other = begin(ledger, little, steps=STEPS), Ledger.open(ledger.path)
    failed.reserve(0)
    assert other.total().alone
    with pytest.raises(BudgetError, match="kept whole"):  # a row is reserved
        begin(other, third, steps=STEPS)
    failed.close(0)
    run = begin(other, third, steps=STEPS)  # which chooses another order
    released(run, 1)
    total = ledger.total()
    assert (total.fixed_runs, total.alone) == ((run.run_id,), False)
    assert 0 < total.kept < total.limit - total.spent
    run.close(1)
    assert ledger.total().fixed_runs == (run.run_id,)  # a row has left
    assert ledger.verify().valid


def test_what_is_kept_free_is_charged_at_the_last_order(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(3.0, 1e-5))
    run = begin(ledger, little, steps=STEPS)
    run.reserve(0)
    before, total = ledger.order, ledger.total()
    run.close(0)
    begin(ledger, third, steps=STEPS)
    run.reserve(0)
    assert ledger.order != before
    assert ledger.total() == Ledger.open(ledger.path).total() != total
    assert ledger.verify().valid


def test_what_was_fixed_stays_as_long_as_another_run_has_a_row(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    runs = [begin(ledger, third, steps=STEPS) for _ in range(2)]
    for run in runs:
        run.reserve(0)
    runs[0].close(0)
    late = begin(ledger, third, steps=STEPS)
    assert ledger.total().fixed_runs == tuple(run.run_id for run in runs)
    runs[1].close(0)
    released(runs[1], 1)
    assert set(ledger.total().fixed_runs) == {runs[1].run_id, late.run_id}  # no plan followed from a result


def test_a_run_that_was_given_up_before_its_first_row_keeps_nothing(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    child = os.fork()
    if not child:
        begin(Ledger.open(ledger.path), third, steps=STEPS, key_digest="")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    begin(ledger, third, steps=STEPS).close(0)
    run = begin(ledger, third, steps=STEPS)
    released(run, 1)
    assert ledger.total().fixed_runs == (run.run_id,)


def test_rows_after_a_fork_are_in_the_plan_as_long_as_all_of_them_are(tmp_path: Path) -> None:
    """Where every step draws anew, and for Gaussian mechanisms: what a crash cost is missing at the end."""
    ledger, run = alone(tmp_path)
    released(run, 20)
    lost = run.mark - 5
    branch, _ = ledger.resume(run.run_id, run.branch_id, 5, event_after=little)
    released(branch, STEPS - lost, 5)
    with pytest.raises(BudgetError, match=r"its rows up to there, and those of branches that it left, are more than"):
        branch.reserve(STEPS - lost)
    assert branch.releases == STEPS
    assert ledger.verify().valid
    assert ledger.total().notes == ()


def test_nothing_behind_the_planned_steps_is_in_the_plan(tmp_path: Path) -> None:
    ledger, run = alone(tmp_path)
    run.close(20)
    branch, _ = ledger.resume(run.run_id, run.branch_id, 20, event_after=little, steps=STEPS + 1)
    released(branch, STEPS, 20)
    refused(BudgetError, f"after step {STEPS} they are not in the plan", branch.reserve, STEPS)


def test_what_is_within_a_plan() -> None:
    sampled, whole = PoissonSampledGaussian(0.01, 1.0, 100), Gaussian(2.0, 5, Adjacency.ZERO_OUT)
    matrix = MatrixGaussian(2.0, 3.0, 10, "c", Adjacency.ZERO_OUT)
    for planned, event, inside in (
        (sampled, PoissonSampledGaussian(0.01, 1.0, 100), True),
        (sampled, PoissonSampledGaussian(0.01, 1.0, 101), False),
        (sampled, PoissonSampledGaussian(0.01, 0.9, 1), False),
        (sampled, PoissonSampledGaussian(0.02, 1.0, 1), False),
        (sampled, Gaussian(100.0), False),
        (whole, Composed((Gaussian(2.0, 3, Adjacency.ZERO_OUT), Gaussian(2.0, 2, Adjacency.ZERO_OUT))), True),
        (whole, Composed((Gaussian(2.0, 3, Adjacency.ZERO_OUT), Gaussian(2.0, 3, Adjacency.ZERO_OUT))), False),
        (whole, Gaussian(2.0, 1, Adjacency.REPLACE_ONE), False),
        (matrix, Composed((replace(matrix, sensitivity=2.0), replace(matrix, sensitivity=2.0))), True),
        (matrix, Composed((replace(matrix, sensitivity=3.0), replace(matrix, sensitivity=0.1))), False),
        (Composed((sampled, whole)), Composed((sampled, whole)), False),
    ):
        assert within(planned, event) == inside, (planned, event)


def test_forks_are_paid_where_the_filter_holds_the_plans(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    released(run := begin(ledger, third, steps=STEPS), 20)
    forked, _ = ledger.resume(run.run_id, run.branch_id, 5, event_after=third)
    released(forked, STEPS, 5)
    assert ledger.total().spent <= ledger.total().limit
    assert forked.releases > STEPS


def test_a_plan_over_the_budget_is_held_to_the_filter_and_both_numbers_are_named(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=BUDGET)
    run = begin(ledger, full, steps=1000)
    with pytest.raises(BudgetError, match=r"the whole plan costs epsilon=7\.\d+ of a budget of 1, so that it was"):
        released(run, 1000)
    assert run.releases > 0
    assert ledger.total().fixed_runs == ()
    assert ledger.total().spent <= ledger.total().limit
    with pytest.raises(BudgetError, match="the whole plan costs epsilon=inf"):
        Ledger.create(tmp_path / "b", budget=BUDGET).charge(NonPrivate("x"), name="a leak")


def test_two_ledger_objects_agree_on_who_was_first(tmp_path: Path) -> None:
    ledger = new(tmp_path, budget=(epsilon_of(little(STEPS), 1e-5), 1e-5))
    one, two = begin(ledger, little, steps=STEPS), begin(other := Ledger.open(ledger.path), little, steps=STEPS)
    two.reserve(0)
    assert ledger.total().fixed_runs == other.total().fixed_runs == (two.run_id,)
    refused(BudgetError, "kept whole", one.reserve, 0)


def test_the_first_plan_chooses_the_order(tmp_path: Path) -> None:
    event = PoissonSampledGaussian(0.001, 0.7, 30_000)
    ledger = new(tmp_path, budget=(3.0, 1e-5))
    assert ledger.order is None
    ledger.charge(event, name="x")
    assert ledger.order == ledger.filter.order == Ledger.open(ledger.path).order
    shares = {
        order: (chosen := PrivacyFilter("rdp", order)).charge(event) / chosen.limit(3.0, 1e-5)
        for order in (5.0, 6.0, 7.5, ledger.order)
    }
    assert shares[ledger.order] <= 1.01 * min(shares.values())
    assert ledger.total().spent <= ledger.total().limit
    given = Ledger.create(tmp_path / "b", order=6.5, budget=(3.0, 1e-5))
    given.charge(event, name="x")
    assert given.order == 6.5
    free = Ledger.create(tmp_path / "c")
    free.charge(event, name="x")
    assert free.order == order_for(event, None)
    assert free.total(1e-5).odometer <= 1.05 * min(
        PrivacyFilter("rdp", order).odometer(PrivacyFilter("rdp", order).charge(event), 1e-5)
        for order in (3.0, 5.0, 7.5, 12.0)
    )


def test_forged_entries_are_noticed(tmp_path: Path) -> None:
    ledger, _ = alone(tmp_path)
    exported = ledger.export()

    def forged(name: str, **change: object) -> Ledger:
        entries = json.loads(json.dumps(exported["entries"]))
        kind = "reserve" if name == "row" else "fix"
        next(item for item in entries if item["kind"] == kind).update(change)
        return resealed({**exported, "entries": entries}, tmp_path / name)

    fix = next(item for item in exported["entries"] if item["kind"] == "fix")
    for name, change, words in (
        ("a", {"charge": fix["charge"] / 2}, "states the charge"),
        ("row", {"charge": fix["charge"] / 9}, "states the charge"),
        ("b", {"event": little(1).to_dict()}, "not that of their plans"),
        ("c", {"runs": []}, "exceeded"),
        ("d", {"limit": fix["limit"] * 2}, "the limit"),
    ):
        assert any(words in text for text in forged(name, **change).verify().problems)
    refused(DataError, "fixes runs that were not begun", forged, "e", runs=["nobody"])
    unfix = {"kind": "unfix", "time": fix["time"], "entry": len(exported["entries"])}
    entries = {**exported, "entries": [*exported["entries"], unfix]}
    refused(
        DataError, "takes back what was fixed beforehand after rows were released", resealed, entries, tmp_path / "f"
    )


# The filter's arithmetic: against SciPy's optimizers, the definitions, and dp-accounting.


BUDGETS = [(0.1, 1e-6), (1.0, 1e-5), (3.0, 1e-5), (8.0, 1e-7), (30.0, 1e-5), (200.0, 1e-9)]


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_order_lets_a_gaussian_spend_most(epsilon: float, delta: float) -> None:
    def spent(log_above: float) -> float:
        """-mu^2/2 of the Gaussian whose divergence at this order converts to the budget, from the formula's paper."""
        order = 1.0 + math.exp(log_above)
        most = epsilon + (math.log(delta) - (order - 1) * math.log(1 - 1 / order) + math.log(order)) / (order - 1)
        return -most / order

    best = scipy.optimize.minimize_scalar(spent, bounds=(-6, 10), method="bounded", options={"xatol": 1e-9})
    order = best_order(epsilon, delta)
    assert 0.95 <= spent(math.log(order - 1)) / best.fun < 0.99
    assert order < 1 + math.exp(best.x)
    # What it leaves of the exact Gaussian: conversion at one order loses a little.
    exact = PrivacyFilter("gdp").limit(epsilon, delta) / 2
    assert 0.7 * exact < -best.fun < exact


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
@pytest.mark.parametrize("kind", ["rdp", "gdp"])
def test_the_limit_converts_to_the_budget(kind: str, epsilon: float, delta: float) -> None:
    chosen = PrivacyFilter.of(kind, None, (epsilon, delta))
    limit = chosen.limit(epsilon, delta)
    assert epsilon * (1 - 1e-9) < chosen.epsilon(limit, delta) <= epsilon
    assert chosen.epsilon(limit * 1.0001, delta) > epsilon
    assert chosen.epsilon(0.0, delta) == 0.0


def test_gdp_is_the_definition() -> None:
    chosen = PrivacyFilter("gdp")
    mu, epsilon = math.sqrt(chosen.limit(2.0, 1e-5)), 2.0
    phi = scipy.stats.norm.cdf
    assert phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu) == pytest.approx(1e-5, rel=1e-8)
    event = Composed((Gaussian(4.0, 3), Gaussian(2.0)))
    assert chosen.charge(event) == pytest.approx(3 / 16 + 1 / 4)
    assert chosen.charge(PoissonSampledGaussian(1.0, 5.0, 10)) == pytest.approx(10 / 25)
    assert chosen.charge(NonPrivate("x")) == math.inf
    with pytest.raises(PrivacyError, match="does not cover secretly sampled batches"):
        chosen.charge(PoissonSampledGaussian(0.5, 5.0, 10))


@pytest.mark.parametrize("order", [2.0, 7.5, 8.0, 32.0])
def test_charges_are_dp_accountings(order: float) -> None:
    dp_accounting = pytest.importorskip("dp_accounting")
    chosen = PrivacyFilter("rdp", order)
    for rate, sigma, steps in ((0.01, 1.0, 1000), (0.1, 2.0, 37), (0.004, 0.7, 5000)):
        oracle = dp_accounting.rdp.RdpAccountant([order])
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        oracle.compose(dp_accounting.SelfComposedDpEvent(event, steps))
        charge = chosen.charge(PoissonSampledGaussian(rate, sigma, steps))
        # At fractional orders dp-accounting's series is an upper bound; whole orders agree.
        assert charge <= oracle._rdp[0] * (1 + 1e-9)
        if order.is_integer():
            assert charge == pytest.approx(oracle._rdp[0], rel=1e-9)
            assert chosen.epsilon(charge, 1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=1e-9)


def test_runs_add_up() -> None:
    chosen = PrivacyFilter()
    events = [PoissonSampledGaussian(0.01, 1.0, 10), Gaussian(3.0, 2), PoissonSampledGaussian(0.02, 2.0, 5)]
    assert add(map(chosen.charge, events)) == pytest.approx(chosen.charge(Composed(tuple(events))), rel=1e-12)
    assert (add([]), add([1.0, math.inf]), add([0.1] * 10)) == (0.0, math.inf, 1.0)


@given(st.floats(1e-9, 1e4), st.sampled_from([1e-9, 1e-5, 1e-2]), st.sampled_from(["rdp", "gdp"]))
def test_the_odometer_costs_more_than_a_limit_at_the_sum(total: float, delta: float, kind: str) -> None:
    chosen = PrivacyFilter(kind)
    assert chosen.odometer(total, delta) >= chosen.epsilon(total, delta)
    # And no more than twice the sum at a share of delta.
    share = 1 / (3 * (2 + 2 * abs(math.log2(total))) ** 2)
    assert chosen.odometer(total, delta) <= chosen.epsilon(2 * total, delta * share) + 1e-12
    assert chosen.odometer(total * 1.5, delta) >= chosen.odometer(total, delta) or total < 1


def test_the_odometers_shares_add_up_to_one_at_most() -> None:
    asked: list[tuple[float, float]] = []

    class Asked(PrivacyFilter):
        def epsilon(self, total: float, delta: float) -> float:
            asked.append((total, delta))
            return 0.0

    chosen = Asked()
    for j in range(-400, 401):
        chosen.odometer(2.0 ** (j / 2) * (1 - 1e-12), 1.0)
    limits, shares = np.array(asked).T
    assert limits == pytest.approx(2.0 ** (np.arange(-400, 401) / 2))
    assert 0.99 < shares.sum() <= 1
    assert chosen.odometer(math.inf, 1e-5) == math.inf


def test_an_odometer_holds_where_the_plain_sum_does_not() -> None:
    """Somebody stops when the loss looks large: the plain sum's epsilon is then false more often than delta."""
    rng = np.random.default_rng(5)
    chosen, delta, runs, steps, mu = PrivacyFilter("gdp"), 0.01, 20_000, 64, 0.5
    # The privacy loss of each step under the first data set, N(mu^2/2, mu^2), and the sum of charges so far.
    losses = np.cumsum(rng.normal(mu**2 / 2, mu, (runs, steps)), axis=1)
    sums = mu**2 * np.arange(1, steps + 1)
    stated = np.array([chosen.odometer(total, delta) for total in sums])
    plain = np.array([chosen.epsilon(total, delta) for total in sums])

    def failure(epsilons: np.ndarray, late: bool) -> float:
        """P(S) - exp(epsilon) Q(S), for S: the loss passed the epsilon that the ledger stated just then."""
        gaps = losses - epsilons
        passed = gaps.argmax(axis=1) if late else (gaps > 0.5).argmax(axis=1)
        gap = gaps[np.arange(runs), passed]
        return float(np.maximum(0.0, -np.expm1(-gap)).mean())

    for late in (False, True):
        assert failure(plain, late) > 1.3 * delta
        assert failure(stated, late) < delta


def test_refusals() -> None:
    """And the default: for sampled steps with little noise, the order that is best for a Gaussian is behind a cliff."""
    refused(ArgumentError, "is too small for a ledger at delta=1e-09", best_order, 1e-6, 1e-9)
    assert PrivacyFilter("gdp").limit(1e-6, 1e-9) > 0
    with pytest.raises(ArgumentError, match=r"order=1\.2: leaves nothing"):
        PrivacyFilter("rdp", 1.2).limit(1.0, 1e-5)
    assert abs(best_order(3.0, 1e-5) - DEFAULT_ORDER) < 1
    chosen = PrivacyFilter.of("rdp", None, (3.0, 1e-5))
    for plan in ((0.001, 0.7, 20_000), (0.01, 1.0, 2000), (0.02, 1.0, 400)):
        assert chosen.charge(PoissonSampledGaussian(*plan)) <= chosen.limit(3.0, 1e-5)
