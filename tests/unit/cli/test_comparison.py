"""Which runs a comparison makes, what its contestants are, and what its paragraph claims."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.cli.compare.compare import from_methods, from_tables
from dpcore.cli.compare.report import Row, verdict
from dpcore.cli.compare.runs import FINAL, SEARCH, Comparison, Contestant, Record, Run
from dpcore.cli.intervals import difference_interval, mean_interval
from dpcore.errors import ArgumentError
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
    assert asked.chosen("disk", 1.0, accuracy) == 1.0
    assert asked.chosen("dp_sgd", 1.0, accuracy) is None
    finals = [run for run in asked.due(accuracy) if run.role == FINAL]
    assert finals == [Run("disk", 1.0, FINAL, 1.0, 0), Run("disk", 1.0, FINAL, 1.0, 1)]


def test_equal_rates_go_to_the_smallest_and_one_rate_is_not_searched():
    asked = comparison(search_seeds=1)
    accuracy = dict.fromkeys(asked.due({}), 0.5)
    assert asked.chosen("disk", 8.0, accuracy) == 0.5
    assert {run.role for run in comparison(lr=(0.3,)).due({})} == {FINAL}
    assert comparison(lr=()).grid("dp_sgd") == (0.5,)


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
