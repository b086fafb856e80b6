"""Which runs a comparison makes, what its contestants are, and what its paragraph claims."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.cli.compare import report, runs
from dpcore.cli.compare.compare import from_methods, from_tables
from dpcore.cli.compare.report import Row, verdict
from dpcore.cli.compare.runs import FINAL, SEARCH, Comparison, Contestant, Record, Run
from dpcore.cli.intervals import difference_interval, mean_interval
from dpcore.errors import ArgumentError, DataError
from tests.refused import refused


def comparison(lr: tuple[float, ...] = (1.0, 0.5), **settings: Any) -> Comparison:
    return Comparison(
        **{
            "contestants": from_methods(("dp_sgd", "disk"), lr),
            "epsilon": (1.0, 8.0),
            "common": {"epochs": 2},
            **settings,
        }
    )


def test_finals_wait_for_their_own_search_only():
    asked = comparison(seeds=2, search_seeds=2)
    assert asked.total == 2 * 2 * (4 + 2) == 24
    due = asked.due({})
    assert len(due) == 16
    assert {run.role for run in due} == {SEARCH}
    # The best mean over the search seeds, not the best single run.
    accuracy = {Run("disk", 1.0, SEARCH, lr, seed): 0.5 for lr in (0.5, 1.0) for seed in (1000, 1001)}
    accuracy[Run("disk", 1.0, SEARCH, 0.5, 1000)] = 0.9
    accuracy[Run("disk", 1.0, SEARCH, 1.0, 1000)] = accuracy[Run("disk", 1.0, SEARCH, 1.0, 1001)] = 0.8
    assert asked.chosen("disk", 1.0, accuracy) == (0, 1.0)
    assert asked.chosen("dp_sgd", 1.0, accuracy) is None
    finals = [run for run in asked.due(accuracy) if run.role == FINAL]
    assert finals == [Run("disk", 1.0, FINAL, 1.0, 0), Run("disk", 1.0, FINAL, 1.0, 1)]


def test_equal_rates_go_to_the_smallest_and_one_rate_is_not_searched():
    asked = comparison(search_seeds=1)
    accuracy = dict.fromkeys(asked.due({}), 0.5)
    assert asked.chosen("disk", 8.0, accuracy) == (0, 0.5)
    assert {run.role for run in comparison(lr=(0.3,)).due({})} == {FINAL}
    assert comparison(lr=()).grid("dp_sgd") == (0.5,)


def test_a_grid_of_own_settings_is_searched_with_the_rates():
    tables = {"x": {"method": "disk", "kappa": [0.3, 0.7], "gamma": [0.5, 1], "lr": [1, 2]}, "y": {"method": "dp_sgd"}}
    asked = Comparison(from_tables(tables, (1.0,)), (1.0,), {"epochs": 4}, seeds=1)
    search = asked.search("x", 1.0)
    assert len(search) == 8
    assert asked.total == 8 + 1 + 1
    assert [run.role for run in asked.due({}) if run.contestant == "y"] == [FINAL]
    tried = [asked.settings_for(run) for run in search]
    assert {(one.kappa, one.gamma, one.lr) for one in tried} == {
        (kappa, gamma, lr) for kappa in (0.3, 0.7) for gamma in (0.5, 1.0) for lr in (1.0, 2.0)
    }
    best = next(run for run in search if asked.settings_for(run).kappa == 0.7 and run.lr == 2.0)
    accuracy = dict.fromkeys(search, 0.5) | {best: 0.6}
    (final,) = [run for run in asked.due(accuracy) if run.contestant == "x"]
    assert asked.settings_for(final) == replace(asked.settings_for(best), seed=0)


def test_equal_gradients_leave_a_method_with_two_half_of_the_epochs():
    tables = {
        **{name: {"method": name} for name in ("dp_sgd", "disk", "pmlf", "dp_adam", "inner_outer")},
        "disk, one": {"method": "disk", "kappa": 1.0}, "window 4": {"method": "pmlf", "window": 4},
    }  # fmt: skip
    asked = Comparison(from_tables(tables, (1.0,)), (1.0,), {"epochs": 9, "batch_size": 100}, equal="gradients")
    epochs = {run.contestant: asked.settings_for(run).epochs for run in asked.examples}
    assert epochs == {"dp_sgd": 9, "disk": 4, "pmlf": 4, "dp_adam": 9, "inner_outer": 4, "disk, one": 9, "window 4": 2}
    for run in asked.examples:
        plan = asked.settings_for(run).plan(1000)
        taken = sum(len(plan.method.query.points(step)) for step in range(plan.steps))
        assert 0.7 * 90 <= taken <= 90
    one = comparison(common={"epochs": 1}, equal="gradients")
    refused(ArgumentError, "epochs=1: must be at least 2 with equal='gradients'", one.settings_for, one.examples[1])


def test_search_runs_never_share_a_seed_with_final_ones():
    asked = comparison(seeds=3)
    search, final = asked.search("disk", 1.0)[0], asked.final("disk", 1.0, 1.0)
    assert search.seed not in {run.seed for run in final}
    assert asked.settings_for(final[1]).seed == 1


def test_tables_are_read_as_the_options_are():
    tables = {"a": {"method": "DiSK", "kappa": "1/2", "lr": [1, "0.02"], "batch-size": "1e3"}, "b": {"method": "memf"}}
    first, second = from_tables(tables, (0.5,))
    assert first == Contestant("a", {"method": "disk", "kappa": 0.5, "batch_size": 1000}, (1.0, 0.02))
    assert second == Contestant("b", {"method": "memf"}, (0.5,))
    asked = Comparison((first, second), (3.0,), {"epochs": 3})
    assert asked.settings_for(asked.final("a", 3.0, 1.0)[0]).epochs == 3


def test_a_flag_of_a_table_is_true_or_false():
    """Not a text: "False" would be true."""
    table = {"method": "doppler", "base": "adam", "bias-corrected": False}
    assert from_tables({"a": table}, ())[0].settings["bias_corrected"] is False
    with pytest.raises(ArgumentError, match="bias_corrected: 'no' must be true or false"):
        from_tables({"a": {**table, "bias-corrected": "no"}}, ())


@pytest.mark.parametrize(("table", "words"), [
    ({"kappa": 0.5}, "names no method"),
    ({"method": "disk", "kapa": 0.5}, "unknown key 'kapa'; did you mean 'kappa'"),
    ({"method": "disk", "epsilon": 3}, "'epsilon' is the same for all; set it outside of the table"),
    ({"method": "disk", "kappa": "much"}, "kappa: 'much' is not a number"),
    ({"method": ["disk", "pmlf"]}, "'method' must be one value; give each a table of its own"),
    ({"method": "disk", "kappa": [0.5, "much"]}, "kappa: 'much' is not a number"),
    ({"method": "disc"}, "did you mean disk"), (3, "must be a table"),
    ({"method": "dp_sgd", "kappa": 0.5}, "contestant 'x': kappa=0.5: is only for the method disk"),
])  # fmt: skip
def test_wrong_tables_are_one_sentence(table: Any, words: str):
    refused(ArgumentError, words, lambda: Comparison(from_tables({"x": table, "y": {"method": "dp_sgd"}}, ()), (1.0,)))


@pytest.mark.parametrize(("settings", "words"), [
    ({"contestants": ()}, "at least one method"),
    ({"contestants": (Contestant("a", {"method": "disk"}), Contestant("a", {"method": "disk"}))}, "same name"),
    ({"epsilon": ()}, "give at least one"), ({"epsilon": (1.0, 1.0)}, "a value twice"),
    ({"lr": (1.0, 1.0)}, "a value twice"), ({"lr": (0.0, 1.0)}, "must be greater than 0"),
    ({"equal": "steps"}, "must be one of 'epochs', 'gradients'"),
    ({"baseline": "adam"}, "must be a contestant: dp_sgd, disk"),
    ({"contestants": (Contestant("a", {"method": "disk", "epochs": 3}),), "equal": "gradients"}, "set it for all"),
    ({"contestants": (Contestant("a", {"method": "disk"}, grids={"kappa": (0.5, 0.5)}),)}, "a value twice"),
    ({"seeds": 0}, "between 1 and"), ({"search_seeds": 0}, "at least 1"),
])  # fmt: skip
def test_nothing_to_compare_is_one_sentence(settings: dict[str, Any], words: str):
    refused(ArgumentError, words, comparison, **settings)


def row(name: str, accuracy: list[float]) -> Row:
    records = tuple(Record(Run(name, 1.0, FINAL, 0.5, seed), Path()) for seed in range(len(accuracy)))
    for record, value in zip(records, accuracy, strict=True):
        record.evaluations = [{"test_accuracy": value}]
    return Row(name, name, 1.0, 0.5, (0.5,), 1.0, records)


@pytest.mark.parametrize(("base", "other", "words"), [
    ([0.90, 0.91, 0.89], [0.80, 0.82, 0.81], "dp_sgd is above disk by 9.00 ± 2.27 points"),
    ([0.80, 0.90, 0.70], [0.81, 0.91, 0.71], "At epsilon = 1: no difference exceeds its interval."),
    ([0.80], [0.90], "disk came out 10.00 points above dp_sgd, but one seed cannot distinguish luck from merit"),
])  # fmt: skip
def test_the_verdict_claims_what_the_runs_show(base: list[float], other: list[float], words: str):
    assert words in verdict([row("dp_sgd", base), row("disk", other)])


def test_differences_to_a_baseline_are_paired_by_seed():
    """Against scipy: what all runs of a seed share cancels."""
    base, other = row("dp_sgd", [0.80, 0.90, 0.70]), row("disk", [0.815, 0.91, 0.71])
    expected = stats.ttest_rel(other.accuracy, base.accuracy).confidence_interval(0.95)
    found = other.less(base)
    assert (found.center - found.half_width, found.center + found.half_width) == pytest.approx(tuple(expected))
    assert "disk is above dp_sgd by 1.17 ± 0.72 points" in verdict([base, other], "dp_sgd")
    assert row("pmlf", [0.5]).less(base).center == pytest.approx(-0.3)


def test_the_verdict_counts_what_luck_alone_would_show():
    rows = [row(name, [0.5, 0.6]) for name in ("a", "b", "c")]
    assert "about 0.15 of the 3 differences would still exceed theirs by luck" in verdict(rows)
    assert "is the only one" in verdict(rows[:1])


# Student's and Welch's intervals against scipy, and by how often they hold the truth.


FIRST, SECOND = [0.91, 0.88, 0.93, 0.90], [0.80, 0.89, 0.84]


def test_the_mean_is_scipys():
    found = mean_interval(FIRST)
    low, high = stats.t.interval(0.95, 3, loc=np.mean(FIRST), scale=stats.sem(FIRST))
    ends = found.center - found.half_width, found.center + found.half_width
    assert ends == pytest.approx((low, high), rel=1e-12)


def test_the_difference_is_scipys():
    found = difference_interval(FIRST, SECOND)
    expected = stats.ttest_ind(FIRST, SECOND, equal_var=False).confidence_interval(0.95)
    ends = found.center - found.half_width, found.center + found.half_width
    assert ends == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.excludes_zero is (ends[0] > 0)


def test_one_value_has_no_interval_and_none_is_refused():
    assert math.isnan(mean_interval([0.5]).half_width)
    one = difference_interval([0.5], [0.1, 0.2])
    assert one.center == pytest.approx(0.35)
    assert not one.excludes_zero
    assert difference_interval([0.5, 0.5], [0.5, 0.5]).half_width == 0
    assert not difference_interval([0.5, 0.5], [0.5, 0.5]).excludes_zero
    refused(ArgumentError, "at least one value", mean_interval, [])


def test_a_comparison_that_two_ledgers_paid_for_is_counted_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "composed", lambda log, plans: (None, "not known"))

    def accounted(*ledgers: str) -> Any:
        stated = [SimpleNamespace(ledger={"ledger": name} if name else {}) for name in ledgers]
        records = [SimpleNamespace(statement=each, run=SimpleNamespace(role=FINAL)) for each in stated]
        return report.tuning(SimpleNamespace(records=records), None)["accounted_for"]  # type: ignore[arg-type]

    assert accounted("a", "a")
    assert not accounted("a", "b")
    assert not accounted("a", "")
    assert not accounted()


def test_a_complete_run_whose_metrics_are_gone_is_one_sentence(tmp_path, monkeypatch):
    stated = SimpleNamespace(steps_taken=6, steps_planned=6, note="")
    monkeypatch.setattr(runs, "read_run", lambda _: (stated, []))
    with pytest.raises(DataError, match=r"metrics\.jsonl is empty, though the run is complete"):
        Record(Run("disk", 1.0, FINAL, 0.5, 0), tmp_path).read()
