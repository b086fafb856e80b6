"""`dpcore epsilon`, `delta`, `calibrate` and `curve` against dp-accounting and each other; runs of Opacus."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("dp_accounting")
import dp_accounting

from dpcore import accounting
from dpcore.accounting import Event, PoissonSampledGaussian
from dpcore.cli import main
from dpcore.errors import BudgetError
from dpcore.ledger import Ledger
from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
)
from tests.end_to_end.command_line import ask, say


def test_epsilon_is_that_of_dp_accounting():
    line = "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6 --accountant rdp"
    told = ask(*line.split())
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.1))
    accountant = dp_accounting.rdp.RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(event, 1000))
    assert told["epsilon"] == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-6)
    assert told["adjacency"] == "add-remove"


SETTINGS = {
    "poisson": "--dataset-size 1000 --batch-size 10 --steps 100",
    "truncated-poisson": "--dataset-size 1000 --batch-size 10 --steps 100",
    "fixed-size": "--dataset-size 1000 --batch-size 10 --steps 100",
    "fixed-order": "--dataset-size 1000 --batch-size 10 --steps 150",
    "shuffled": "--dataset-size 1000 --batch-size 10 --steps 150",
    "cyclic-poisson": "--dataset-size 1000 --batch-size 10 --steps 100 --groups 4",
    "full-batch": "--steps 20",
}
SAMPLERS = {"truncated-poisson": TruncatedPoissonSampler(dataset_size=1000, batch_size=10),
    "fixed-size": FixedSizeSampler(dataset_size=1000, batch_size=10), "shuffled": ShuffledSampler(dataset_size=1000,
    batch_size=10), "cyclic-poisson": CyclicPoissonSampler(dataset_size=1000, batch_size=10, groups=4)}  # fmt: skip


@pytest.mark.parametrize("sampling", SETTINGS)
def test_every_sampling_and_every_accountant(sampling: str):
    line = [*SETTINGS[sampling].split(), "--sampling", sampling, "--noise-multiplier", 2, "--delta", 1e-5]
    told: Any = ask("epsilon", *line)
    event = Event.from_dict(told["event"])
    if sampling in SAMPLERS:
        assert event == SAMPLERS[sampling].event(2.0, 150 if sampling == "shuffled" else 100)
    assert set(told["accountants"]) >= set(accounting.accountants_for(event))
    assert told["epsilon"] == min(told["accountants"].values()) == told["accountants"][told["accountant"]]
    if "interval" in told:
        assert told["interval"][0] <= told["interval"][1] == told["epsilon"]
    assert told["adjacency"] == str(event.adjacency)
    # The way back: this epsilon has at most the delta that it was asked for.
    back: Any = ask("delta", *line[:-2], "--epsilon", repr(told["epsilon"]))
    assert back["delta"] <= 1.003e-5
    assert back["event"] == told["event"]


def test_a_certified_interval_is_shown(capsys):
    line = "epsilon --sample-rate 0.01 --steps 10 --noise-multiplier 1 --delta 1e-5"
    assert "certified: the smallest epsilon is in [" in say(capsys, line.split()).out


@pytest.mark.parametrize(("unknown", "line"), [
    ("noise_multiplier", "--dataset-size 60000 --batch-size 600 --steps 500 --epsilon 3 --delta 1e-5"),
    ("noise_multiplier", "--dataset-size 60000 --batch-size 256 --epochs 10 --epsilon 3 --delta 1e-5"),
    ("noise_multiplier", "--dataset-size 1438 --batch-size 64 --epochs 5 --sampling shuffled --epsilon 3 --delta 1e-5"),
    ("steps", "--dataset-size 60000 --batch-size 600 --noise-multiplier 1 --epsilon 3 --delta 1e-5"),
    ("batch_size", "--dataset-size 60000 --noise-multiplier 1 --steps 500 --epsilon 3 --delta 1e-5"),
    ("delta", "--dataset-size 60000 --batch-size 600 --noise-multiplier 1 --steps 500 --epsilon 3"),
    ("steps", "--sampling full-batch --noise-multiplier 9 --epsilon 3 --delta 1e-5"),
    ("batch_size", "--dataset-size 600 --sampling fixed-size --noise-multiplier 2 --steps 50 --epsilon 3 --delta 1e-5"),
    ("batch_size", ("--dataset-size 900 --sampling cyclic-poisson --groups 5 --noise-multiplier 2 --steps 20 "
     "--epsilon 3 --delta 1e-5")),
])  # fmt: skip
def test_any_one_unknown(unknown: str, line: str, capsys):
    told: Any = ask("calibrate", *line.split())
    assert told["unknown"] == unknown.replace("_", "-")
    plan = line.split("--epsilon", maxsplit=1)[0].split()
    options = [] if unknown == "delta" else ["--delta", 1e-5]
    complete = ["epsilon", *plan, *options, f"--{told['unknown']}", repr(told[unknown])]
    # A delta is certified for epsilon = 3; asked the other way round, epsilon has a certified gap of its own.
    most = 3 * (1 + (1e-3 if unknown == "delta" else 1e-9))
    assert ask(*complete)["epsilon"] <= most
    if unknown in ("steps", "batch_size"):
        complete[-1] = told[unknown] + 1
        assert ask(*complete)["epsilon"] > 3 * (1 - 2e-3)
    # What a person reads and types in again keeps the target.
    first, second = say(capsys, ["calibrate", *line.split()]).out.splitlines()[:2]
    if unknown == "noise_multiplier":
        assert 2.99 < float(second.removeprefix("gives epsilon = ").split()[0]) <= 3
        assert second.endswith(" at delta = 1e-5")
    name, _, value = first.partition(" = ")
    assert name == unknown.replace("_", " ")
    complete[-1] = value
    assert ask(*complete)["epsilon"] <= most


def test_not_even_one_step(capsys):
    line = "calibrate --epsilon 3 --delta 1e-5 --noise-multiplier 0.1 --sample-rate .1"
    printed = say(capsys, line.split(), 2)
    assert "epsilon=3: not even one step meets it at delta=1e-5; more noise" in printed.err
    assert printed.out == ""


def test_what_a_ledger_leaves(tmp_path):
    ledger = Ledger.create(tmp_path / "data.ledger", budget=(3.0, 1e-5))
    plan = ["--sample-rate", "0.01", "--steps", "500"]
    alone: Any = ask("calibrate", *plan, "--epsilon", 3, "--delta", 1e-5)
    same: Any = ask("calibrate", *plan, "--ledger", tmp_path / "data.ledger")
    assert same["noise_multiplier"] == pytest.approx(alone["noise_multiplier"], rel=2e-3)
    spent = PoissonSampler(dataset_size=1000, batch_size=10).event(1.5, 300)
    ledger.charge(spent, name="earlier")
    left: Any = ask("calibrate", *plan, "--ledger", tmp_path / "data.ledger")
    assert left["noise_multiplier"] > alone["noise_multiplier"]
    event = Event.from_dict(left["event"])
    assert accounting.epsilon(accounting.Composed((spent, event)), 1e-5) <= 3
    assert left["ledger"] == ledger.ledger_id


@pytest.mark.parametrize("unknown", ["noise_multiplier", "steps"])
def test_the_ledger_pays_for_what_is_said_and_for_no_more(unknown: str, tmp_path, capsys):
    ledger = Ledger.create(tmp_path / "data.ledger", budget=(3.0, 1e-5))
    given = "--steps 500" if unknown == "noise_multiplier" else "--noise-multiplier 1.5"
    line = f"calibrate --dataset-size 1000 --batch-size 10 {given} --ledger {tmp_path / 'data.ledger'}".split()
    # As the first run of all it is fixed beforehand, and granted whole.
    first: Any = ask(*line)[unknown]
    sampler = PoissonSampler(dataset_size=1000, batch_size=10)
    ledger.charge(sampler.event(1.5, 300), name="earlier")
    granted: Any = ask(*line)[unknown]
    said = say(capsys, line).out.splitlines()
    assert said[-1] == "the rest of the budget of the ledger data.ledger pays for the whole plan"
    if unknown == "steps":
        assert 0 < granted < first
        less, most = sampler.event(1.5, granted), sampler.event(1.5, granted + 1)
    else:
        assert granted > first
        typed = float(said[0].split("noise multiplier = ")[1])
        assert granted <= typed < granted * (1 + 1e-5)
        less, most = sampler.event(typed, 500), sampler.event(granted * (1 - 1e-6), 500)
    with pytest.raises(BudgetError):
        ledger.charge(most, name="too much")
    ledger.charge(less, name="what was said")


def test_a_ledger_that_leaves_nothing_or_has_no_end_is_one_sentence(tmp_path, capsys):
    plan = ["--sample-rate", "0.01", "--noise-multiplier", "1.5", "--epsilon", "3", "--delta", "1e-5"]
    whole = accounting.PoissonSampledGaussian(0.01, 1.5, ask("calibrate", *plan)["steps"])  # type: ignore[arg-type]
    Ledger.create(tmp_path / "spent", budget=(3.0, 1e-5)).charge(whole, name="all")
    Ledger.create(tmp_path / "open")
    for line, words in (
        ("--noise-multiplier 1.5 --ledger spent", "not even one step meets it"),
        ("--steps 9 --ledger spent", "too little for any noise multiplier"),
        ("--steps 9 --ledger open", "so its rest has no limit"),
        ("--steps 9 --noise-multiplier 1 --ledger spent", "none is"),
        ("--steps 9 --epsilon 3 --ledger spent", "has the target, its budget; leave out --epsilon and --delta"),
    ):
        sized = line.replace("--ledger ", f"--ledger {tmp_path}/")
        assert main(["calibrate", "--sample-rate", "0.01", *sized.split()]) == 2
        assert words in capsys.readouterr().err
    line = f"calibrate --dataset-size 900 --steps 9 --noise-multiplier 1 --ledger {tmp_path / 'spent'}"
    assert main(line.split()) == 2
    assert "answers for the noise multiplier or the steps, not for the batch-size" in capsys.readouterr().err


def test_a_large_delta_is_remarked_where_n_is_not_known(capsys):
    line = "epsilon --sample-rate 0.01 --noise-multiplier 1 --steps 10 --delta"
    assert main([*line.split(), "0.1"]) == 0
    assert (
        "delta=0.1: ought to be well below 1/n, and is below it for fewer than 10 examples only"
        in capsys.readouterr().err
    )
    assert say(capsys, [*line.split(), "1e-3"]).err == ""
    # A delta that was found is told with the digits of the answer.
    line = "delta --dataset-size 100 --batch-size 50 --noise-multiplier 0.5 --steps 5 --epsilon 1"
    printed = say(capsys, line.split())
    shown = printed.out.splitlines()[0].removeprefix("delta = ").partition(" ")[0]
    assert f"delta={shown}: is at least 1/n for n = 100" in printed.err
    assert "delta=0.9999: is at least 1/n" in say(capsys, line.replace("0.5 --steps 5 ", "0.3 --steps 50 ").split()).err


def test_sizes_and_epochs_mean_what_they_mean_to_the_samplers():
    line = "--dataset-size 1438 --batch-size 64 --epochs 3 --noise-multiplier 1 --delta 1e-5"
    told = ask("epsilon", *line.split())
    sampler = PoissonSampler(dataset_size=1438, batch_size=64)
    assert told["event"] == sampler.event(1.0, 3 * sampler.steps_per_epoch).to_dict()
    line = "--sampling fixed-order --dataset-size 10 --batch-size 4 --steps 7 --noise-multiplier 1 --delta 1e-5"
    order = FixedOrderSampler(dataset_size=10, batch_size=4)
    assert ask("epsilon", *line.split())["event"]["count"] == order.participations(7) == 3


def test_infinite_is_said_in_words(capsys):
    line = "epsilon --sample-rate 1/100 --steps 10 --noise-multiplier 0 --delta 1e-5"
    assert ask(*line.split())["epsilon"] == "inf"
    assert "there is no guarantee at all" in say(capsys, line.split()).out


def test_text_rounds_epsilon_up(capsys):
    line = "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6"
    exact = float(str(ask(*line.split())["epsilon"]))
    assert main(line.split()) == 0
    stated = float(capsys.readouterr().out.split()[2])
    assert exact <= stated <= math.nextafter(exact, 9) + 0.001


def test_a_delta_too_small_for_a_number_is_not_called_zero(capsys):
    line = ["delta", "--sample-rate", "0.01", "--noise-multiplier", "1.1", "--epsilon", "200", "--steps"]
    assert say(capsys, [*line, "1000"]).out.startswith("delta = below 1e-300 at epsilon = 200")
    assert say(capsys, [*line, "0"]).out.startswith("delta = 0 at epsilon = 200")


# `dpcore curve`: certified points, pictures, and what it refuses.


PLAN = ["--sample-rate", "0.05", "--noise-multiplier", "1.1", "--steps", "30"]
EVENT = PoissonSampledGaussian(0.05, 1.1, 30)


def test_delta_over_epsilon(capsys):
    told = ask("curve", *PLAN)
    x, low, high = np.array(told["points"]).T
    assert Event.from_dict(told["event"]) == EVENT
    assert (x[0], told["x"], told["y"]) == (0, "epsilon", "delta")
    assert (low <= high).all()
    assert (np.diff(high) < 0).all()
    assert high[-1] <= 1.02e-10
    for k in (0, len(x) // 2):
        exact = accounting.delta_interval(EVENT, x[k])
        assert low[k] <= exact.upper
        assert high[k] >= exact.lower


def test_epsilon_over_steps(capsys):
    told = ask("curve", "steps", *PLAN, "--delta", 1e-5)
    x, low, high = np.array(told["points"]).T
    assert (x[0], x[-1], told["delta"]) == (1, 30, 1e-5)
    assert (low <= high).all()
    assert (np.diff(x) > 0).all()
    assert (high[1:] >= low[:-1]).all()
    assert high[-1] == accounting.epsilon(EVENT, 1e-5, "pld")
    assert told["x"] == "steps"


def test_what_an_attacker_can_do(capsys):
    told = ask("curve", "trade-off", *PLAN)
    x, low, high = np.array(told["points"]).T
    assert (x[-1], low[-1], high[-1]) == (1, 1, 1)
    assert (x <= low).all()
    assert (low <= high).all()
    # Any epsilon and its delta bound every test.
    for epsilon in (0.2, 0.5, 1.0):
        most = np.exp(epsilon) * x + accounting.delta(EVENT, epsilon)
        assert (low <= most).all()
    exact = accounting.delta_interval(EVENT, 0.0)
    assert exact.lower <= told["advantage"] <= 1.01 * exact.upper
    assert (high - x).max() <= told["advantage"] * 1.01
    assert "advantage: the two rates differ by at most" in say(capsys, ["curve", "trade-off", *PLAN]).out


# `dpcore epsilon --opacus` and `dpcore delta --opacus`: what a run of Opacus cost.


GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def said(capsys: Any, *words: object, status: int = 0) -> str:
    printed = say(capsys, [*map(str, words)], status)
    return printed.err if status else printed.out


def test_a_checkpoint_and_its_history_in_json_say_the_same(capsys: Any, tmp_path: Path):
    pytest.importorskip("torch")
    history = tmp_path / "history.json"
    history.write_text(json.dumps(json.loads((GOLDEN / "opacus.json").read_text())["prv"]))
    told: Any = [ask("epsilon", "--opacus", file, "--delta", 1e-5) for file in (GOLDEN / "opacus-prv.pt", history)]
    assert told[0] == told[1]
    assert told[0]["interval"][0] <= told[0]["epsilon"] == pytest.approx(2.3375, abs=1e-3)
    assert Event.from_dict(told[0]["event"]) == accounting.PoissonSampledGaussian(0.05, 1.1, 60)
    assert "poisson_sampling=False" in told[0]["holds_if"][0]
    # The same plan by its options costs the same.
    plan = "epsilon --sample-rate 0.05 --noise-multiplier 1.1 --steps 60 --delta 1e-5"
    assert ask(*plan.split())["epsilon"] == told[0]["epsilon"]
    assert ask("delta", "--opacus", history, "--epsilon", told[0]["epsilon"])["delta"] <= 1.003e-5


def test_what_a_person_reads(capsys: Any, tmp_path: Path):
    history = tmp_path / "gdp.json"
    history.write_text(json.dumps(json.loads((GOLDEN / "opacus.json").read_text())["gdp"]))
    text = said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5)
    assert "epsilon = 6.24" in text
    assert "certified: " in text
    assert "gdp accountant approximates" in text
    assert "It holds if:\n  - Batches were drawn by Poisson sampling" in text
    assert max(map(len, text.partition("It holds if:")[2].splitlines())) <= 80
    history.write_text(json.dumps({"history": [[1.0, 0.1, 3], [2.0, 0.1, 4]], "mechanism": "rdp"}))
    text = said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5)
    assert "7 steps in 2 phases" in text
    assert "approximates" not in text


def test_what_is_refused(capsys: Any, tmp_path: Path):
    history = tmp_path / "history.json"
    for text, words in {
        '{"history": []}': "history.json: history=[]: Opacus recorded no step",
        '{"history": [[1, 2, 3]]}': "history.json: history[0]: sample_rate=2: ",
        '{"history": [[1, 0.1, 1e400]]}': "history.json: is not JSON",
        '{"noise": 1}': "history.json: must be an Opacus accountant's state_dict()",
        "[1]": "history.json: must be an Opacus",
        "": "history.json: cannot be read",
        "{": "history.json: is not JSON",
    }.items():
        history.write_text(text)
        assert words in said(capsys, "epsilon", "--opacus", history, "--delta", 1e-5, status=2)
    for plan in ("--steps 3", "--sample-rate 0.1", "--sampling fixed-size", "--noise-multiplier 1"):
        line = "epsilon", "--opacus", history, "--delta", 1e-5, *plan.split()
        assert f"leave out {plan.split()[0]}" in said(capsys, *line, status=2)
    assert "No such file" in said(capsys, "delta", "--opacus", tmp_path / "no", "--epsilon", 1, status=2)
