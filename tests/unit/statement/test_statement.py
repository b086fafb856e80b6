"""The statement: nothing lost on the way to JSON and back, nothing under-stated in words."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.spec.canonical import read_json, read_json_file
from dpcore.statement import Statement
from dpcore.statement.assumptions import NO_LEDGER, SECRET_BATCHES
from dpcore.statement.text import format_delta, format_epsilon, format_lower, format_number
from tests.refused import refused


def make(**changes: Any) -> Statement:
    settings: dict[str, Any] = {
        "adjacency": "add-remove",
        "sampler": {"kind": "poisson", "dataset_size": 60000, "batch_size": 256, "sample_rate": 256 / 60000},
        "clip": {"rule": "automatic", "groups": {"flat": 1.0}, "max_grad_norm": 1.0, "sensitivity": 1.0},
        "noise": {"mechanism": "Gaussian", "noise_multiplier": 1.1, "standard_deviation_on_the_sum": 1.1},
        "method": {"name": "disk", "lr": 0.1, "kappa": 0.7, "a": [-0.3], "nesterov": False, "weight_decay": None},
        "steps_planned": 2340, "steps_taken": 1170, "delta": 1e-5,
        "epsilon": {"rdp": 2.98761, "pld": 2.7}, "epsilon_planned": {"rdp": 4.2},
        "event": {"kind": "PoissonSampledGaussian", "parts": [{"sample_rate": 0.004, "steps": 1170}]},
        "randomness": {"generator": "ChaCha20", "key": "from the operating system"},
        "caveats": ["The search for settings is not accounted.", "The size of the data set is public."],
        "software": {"dpcore": "0.1.0"}, "note": "Stopped by Ctrl-C.",
    }  # fmt: skip
    return Statement(**(settings | changes))


def test_json_and_back() -> None:
    statement = make(epsilon={"rdp": math.inf, "pld": np.float64(2.5)}, delta=np.float32(0.5))
    content = json.loads(statement.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["epsilon"] == {"rdp": "inf", "pld": 2.5}
    assert Statement.from_dict(content) == statement
    assert Statement.from_json(statement.to_json()).to_json() == statement.to_json()


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(content=st.dictionaries(st.text(), plain_values, max_size=4), width=st.integers(60, 120))
def test_any_plain_content_survives_and_prints(content: dict[str, Any], width: int) -> None:
    statement = make(sampler=content, event=content)
    assert Statement.from_json(statement.to_json()) == statement
    assert "epsilon = 2.7 and delta = 1e-5" in " ".join(statement.text(width).split())
    assert "epsilon = 2.7, delta = 1e-5" in " ".join(statement.summary(width).split())


@pytest.mark.parametrize("name", ["adjacency", "sampler", "clip", "noise", "method", "steps_planned", "delta"])
def test_the_hash_covers_every_setting(name: str) -> None:
    other = {"adjacency": "zero-out", "steps_planned": 2341, "delta": 1e-6}.get(name, {"changed": 1})
    assert make(**{name: other}).settings_hash != make().settings_hash
    content = make().to_dict() | {name: other}
    refused(DataError, "changed after it was written", Statement.from_dict, content)


def test_the_hash_is_of_the_plan_not_of_the_run() -> None:
    assert make(steps_taken=5, epsilon={"rdp": 0.1}, note="", software={}).settings_hash == make().settings_hash
    reordered = dict(reversed(make().method.items()))
    assert make(method=reordered).settings_hash == make().settings_hash


def test_the_text_fits_the_terminal_and_says_what_matters() -> None:
    text = make().text()
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for part in (
        "epsilon = 2.7 and delta = 1e-5, for add-remove adjacency", "differ in one example added or removed",
        "rdp 2.988", "after 1,170 of 2,340 steps", "noise multiplier 1.1", "sensitivity 1", "dataset size 60000",
        "kappa 0.7", "nesterov no", "key from the operating system", "- The search for settings is not accounted.",
        "Stopped by Ctrl-C.", make().settings_hash,
    ):  # fmt: skip
        assert part in flat, part
    assert "differ in one user added or removed" in " ".join(make(unit="user").text().split())


def test_the_summary_has_ten_lines_and_one_epsilon() -> None:
    attack = {"advantage": 0.16811, "true_positive_rate": {"0.001": 0.006361}}
    statement = make(note="", attacker=attack, epsilon_interval={"lower": 2.69876, "upper": 2.70001})
    summary = statement.summary()
    assert len(summary.splitlines()) == 10
    assert max(map(len, summary.splitlines())) <= 80
    for part in ("one example added or removed, of 60,000", "epsilon = 2.7, delta = 1e-5", "1,170 of 2,340 steps",
                 "noise multiplier 1.1", "moves the sum by at most 1", "not covered  2 more"):  # fmt: skip
        assert part in summary, part
    for other in ("2.988", "2.69", "2.701", "16.9", "0.637"):
        assert other not in summary
    assert statement.summary(full=True) == statement.text()
    assert statement.summary(60, full=True) == statement.text(60)


def test_a_summary_never_leaves_a_warning_out() -> None:
    assert "NOT PRIVATE" in make(epsilon={"rdp": math.inf}).summary()
    assert "differentially private" not in make(epsilon={"rdp": math.inf}).summary()
    assert "WARNING      delta is not below 1/n" in make(delta=1 / 60000).summary()
    assert "Stopped by Ctrl-C." in make().summary()
    assert "3 that were abandoned" in " ".join(make(steps_abandoned=3).summary().split())
    assert "\x1b" not in make(note="\x1b[2J").summary()
    assert "choosing by results, step times, 1 more" in make(caveats=(NO_LEDGER, SECRET_BATCHES, "Mine.")).summary()


def test_an_infinite_epsilon_is_said_in_words() -> None:
    statement = make(epsilon={"rdp": math.inf}, epsilon_planned={})
    assert not statement.private
    text = statement.text()
    assert text.splitlines()[3].startswith("NOT PRIVATE. Epsilon is infinite")
    assert "differentially private" not in text
    assert "rdp      infinite (this accountant gives no guarantee)" in text
    assert make(epsilon={"rdp": math.inf, "pld": 2.0}).private


@given(st.floats(0, 1e300))
def test_text_never_states_less_than_was_spent(value: float) -> None:
    stated = float(format_epsilon(value))
    assert value <= stated <= value * 1.001 + 5e-324


def test_numbers_read_as_typed() -> None:
    for value, text in ((2.7, "2.7"), (3.0, "3"), (0.0, "0"), (2.98761, "2.988"), (100, "100"), (1e-7, "1e-7")):
        assert format_epsilon(value) == text
    for value, text in ((1e-5, "1e-5"), (60000, "60000"), (0.1, "0.1"), (2.5e20, "2.5e20"), (1.0, "1")):
        assert format_number(value) == text
    assert [format_lower(value) for value in (1.23456, 0.0, math.inf, 2.7)] == ["1.234", "0", "infinite", "2.7"]


@pytest.mark.parametrize(("changes", "message"), [
    ({"steps_taken": 2341}, "steps_taken=2341: must lie between 0"), ({"steps_taken": -1}, "steps_taken=-1"),
    ({"delta": 1.0}, "delta=1.0"), ({"delta": math.nan}, "delta=nan"), ({"epsilon": {}}, "at least one accountant"),
    ({"epsilon": {"rdp": -0.1}}, "epsilon.rdp=-0.1"), ({"epsilon": {"rdp": math.nan}}, "epsilon.rdp=nan"),
    ({"epsilon": {"rdp": "low"}}, "epsilon.rdp='low'"), ({"clip": {"sensitivity": math.nan}}, "clip.sensitivity=nan"),
])  # fmt: skip
def test_impossible_statements_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make(**changes)
    assert message in str(caught.value)


def test_objects_do_not_slip_in() -> None:
    refused(ArgumentTypeError, r"randomness\.key=.*not bytes", make, randomness={"key": b"secret"})
    refused(ArgumentTypeError, "keys must be strings", make, event={1: 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().delta = 0.1  # type: ignore[misc]


@pytest.mark.parametrize(("changes", "message"), [
    ({"format": 1}, "has format 1"), ({"format": 99}, "a newer dpcore wrote it"), ({"extra": 1}, "unknown fields"),
    ({"note": "other"}, "does not match its hash"), ({"epsilon": {"rdp": 0.1}}, "does not match its hash"),
    ({"delta_is_below_1/n": False}, "its claim on delta and 1/n is wrong"), ({"delta": "small"}, "delta=.* must be"),
    ({"caveats": "none"}, "caveats=.* must be"), ({"steps_taken": True}, "steps_taken=.* must be"),
    ({"sampler": []}, "sampler=.* must be"), ({"note": None}, "note=.* must be"), ({"delta": None}, "delta=.* must be"),
])  # fmt: skip
def test_damaged_statements_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"statement: .*{message}"):
        Statement.from_dict(make().to_dict() | changes)


def test_what_is_no_statement_is_refused() -> None:
    with pytest.raises(DataError, match=r"statement: lacks \['noise'\]"):
        Statement.from_dict({key: value for key, value in make().to_dict().items() if key != "noise"})
    for text in ("", "[]", "nonsense"):
        with pytest.raises(DataError):
            Statement.from_json(text)


@given(st.floats(0, 1e300))
def test_text_never_states_a_lower_end_above_it(value: float) -> None:
    stated = float(format_lower(value))
    assert value * 0.999 - 5e-324 <= stated <= value


def test_the_text_says_what_an_attacker_can_do_and_what_is_certified() -> None:
    attack = {"advantage": 0.16811, "true_positive_rate": {"0.001": 0.006361, "0.01": 0.0375}}
    ends = {"lower": 2.69876, "upper": 2.70001}
    text = " ".join(make(attacker=attack, epsilon_interval=ends, steps_abandoned=3).text().split())
    assert "at most 0.637 % at a false alarm rate of 0.1 % or 3.75 % at a false alarm rate of 1 %" in text
    assert "differ by at most 16.9 %" in text
    assert "certified the smallest lies in [2.698, 2.701]" in text
    assert "after 1,170 of 2,340 steps, and 3 that were abandoned" in text
    assert "What it means" not in make(attacker=attack, epsilon={"rdp": math.inf}).text()


@pytest.mark.parametrize(("epsilon", "warned"), [(8.2, False), (8.7, True), (17.86, True), (800.0, True)])
def test_a_law_distance_that_is_not_small_at_that_epsilon_is_a_warning(epsilon: float, warned: bool) -> None:
    distance = 1.78e-10
    statement = make(epsilon={"pld": epsilon}, noise={"grid": {"law_distance": distance}})
    holds = min(1.0, 1e-5 + (1 + math.exp(min(epsilon, 600))) * distance)
    assert statement.delta_on_floats == pytest.approx(holds, rel=1e-12)
    for text in (statement.summary(), statement.text()):
        assert ("WARNING" in text) == (format_delta(holds) in text) == warned
    assert "WARNING" not in make(epsilon={"pld": epsilon}).text()
    for damaged in ({"grid": 3}, {"grid": {"law_distance": "x"}}, {"grid": {}}):
        assert make(noise=damaged).delta_on_floats == 1e-5


def test_a_delta_of_one_over_n_is_a_warning() -> None:
    small, large = make(delta=1 / 60001), make(delta=1 / 60000)
    assert (small.delta_is_small, large.delta_is_small) == (True, False)
    assert "WARNING" not in small.text()
    assert "is not below 1/n = 1/60000" in " ".join(large.text().split())
    unknown = make(sampler={"kind": "mine"}, delta=0.5)
    assert unknown.delta_is_small is None
    assert "WARNING" not in unknown.text()


def test_json_is_read_strictly_and_a_byte_order_mark_is_skipped(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "some.json"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}')
    assert read_json_file(path) == read_json("\ufeff" + '{"a": 1}') == {"a": 1}
    for text in ('{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}', "[" * 100_000, b"\xff\xfe\x00"):
        with pytest.raises(ValueError):
            read_json(text)
    monkeypatch.setattr("dpcore.spec.canonical.MOST_BYTES", 8)
    refused(ValueError, "larger than 8 bytes", read_json_file, path)
