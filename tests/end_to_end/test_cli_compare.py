"""`dpcore compare`: what it leaves, that it goes on where it stopped, and what it says about tuning."""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer")
from dpcore import accounting
from dpcore.cli import main
from dpcore.cli.compare import compare as demo
from dpcore.cli.compare import runs as compare_runs
from dpcore.cli.compare.runs import FINAL, SEARCH, pays_for
from dpcore.cli.train.run_folder import checkpoint_of
from dpcore.cli.train.settings import Settings
from dpcore.errors import BudgetError
from dpcore.ledger import Ledger
from dpcore.statement import Statement
from dpcore.torch import PrivateRun
from tests.depth import nightly
from tests.end_to_end.command_line import say

FILES = {
    *("config.json", "results.json", "table.txt", "statement.txt", "statement.json", "comparison.png"),
    "runs",
}
RUN_FILES = {
    *("README.md", "config.json", "metrics.jsonl", "statement.json", "statement.txt"),
    "model.safetensors",
}
SHORT = ("--epochs", "1", "--batch-size", "256")


def compare(out: Path, *arguments: str) -> int:
    return main(["compare", "--out", str(out), *SHORT, *arguments])


def results(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "results.json").read_text()))


def statement(out: Path, run: dict[str, Any]) -> Statement:
    return Statement.from_json((out / run["folder"] / "statement.json").read_text())


def accuracy(out: Path, run: dict[str, Any]) -> float:
    last = (out / run["folder"] / "metrics.jsonl").read_text().splitlines()[-1]
    return float(json.loads(last)["test_accuracy"])


def test_it_leaves_what_it_says_and_goes_on_for_free(tmp_path, capsys):
    out = tmp_path / "comparison"
    command = ("--methods", "dp_sgd,DiSK", "--epsilon", "1,8", "--lr", "0.1", "--seeds", "2")
    assert compare(out, *command) == 0
    printed = capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == FILES
    left = results(out)
    assert len(left["runs"]) == 2 * 2 * 2
    assert {(run["status"], run["role"]) for run in left["runs"]} == {("complete", FINAL)}
    for row in left["summary"]["rows"]:
        own = [r for r in left["runs"] if (r["contestant"], r["epsilon"]) == (row["contestant"], row["target_epsilon"])]
        final = [accuracy(out, r) for r in own]
        assert row["test_accuracy"] == final
        assert row["mean"] == pytest.approx(np.mean(final))
        # Two values: the interval's half width is t(1) times half of their distance.
        assert row["half_width_95"] == pytest.approx(12.7062047 * abs(final[0] - final[1]) / 2)
        assert 0.99 * row["target_epsilon"] < row["epsilon"] <= row["target_epsilon"]
    assert [row["gradients_per_example_and_step"] for row in left["summary"]["rows"]] == pytest.approx([1, 11 / 6] * 2)
    # Each run is a folder as `dpcore train` leaves it, which every command reads.
    for run in left["runs"]:
        assert {path.name for path in (out / run["folder"]).iterdir()} == RUN_FILES
    settings = json.loads((out / left["runs"][0]["folder"] / "config.json").read_text())["settings"]
    assert settings.pop("ledger") is None
    again = Settings(**{name: value for name, value in settings.items() if value is not None})
    assert again.to_dict() == settings
    assert (settings["lr"], settings["seed"], settings["batch_size"]) == (0.1, 0, 256)
    for reader in ("verify", "statement"):
        assert main([reader, str(out / left["runs"][0]["folder"])]) == 0
        assert main([reader, str(out / "statement.json")]) == 0
    assert main(["statement", str(out)]) == 0
    capsys.readouterr()
    said = " ".join(say(capsys, ["verify", str(out)]).out.split())
    assert "comparison.png, config.json, results.json, statement.txt, table.txt, runs/00" in said
    # Nothing of a duration in what may be published, and it is said that tuning is not counted.
    assert "seconds" not in (out / "results.json").read_text() + (out / "table.txt").read_text()
    for text in (printed, (out / "table.txt").read_text(), (out / "statement.txt").read_text()):
        assert "Tuning is NOT accounted for" in text
    stated = json.loads((out / "statement.json").read_text())
    assert stated["tuning"]["accounted_for"] is False
    assert [statement(out, {"folder": folder}).steps_taken for folder in stated["run_folders"].values()] == [6] * 4
    assert (out / "comparison.png").stat().st_size > 10_000

    # The same command again makes no run; another one is refused, and leaves the folder as it was.
    assert compare(out, *command, "--json") == 0
    told = capsys.readouterr()
    assert "8 of 8 runs were made before and are kept" in told.err
    assert json.loads(told.out)["rows"] == left["summary"]["rows"]
    assert results(out) == left
    assert compare(out, *command, "--delta", "1e-6") == 2
    assert "has a comparison with other settings (delta: 1e-05 there, 1e-06 here)" in capsys.readouterr().err
    assert main(["train", "--epsilon", "3", "--out", str(out), "--overwrite"]) == 2
    assert results(out) == left


def test_a_file_names_contestants(tmp_path, capsys):
    out, file = tmp_path / "comparison", tmp_path / "compare.toml"
    file.write_text(
        "epsilon = 2\nseeds = 1\nlr = [0.2, 0.4]\n"
        '[contestants.plain]\nmethod = "dp-sgd"\n'
        '[contestants."fixed order"]\nmethod = "memf"\nlr = 0.3\n'
    )
    assert compare(out, "--config", str(file)) == 0
    printed = capsys.readouterr()
    left = results(out)
    assert [run["contestant"] for run in left["runs"]] == ["plain"] * 3 + ["fixed order"]
    *search, final, _ = left["runs"]
    assert [(run["role"], run["lr"], run["seed"]) for run in search] == [(SEARCH, 0.2, 1000), (SEARCH, 0.4, 1000)]
    assert final["lr"] == max(search, key=lambda run: accuracy(out, run))["lr"]
    assert "all runs together (4, of them 2 in search of settings)" in printed.out
    assert "Neighbors differ" in printed.out
    # config.json repeats the comparison, also that of an earlier version; its contestants and --methods exclude each
    # other.
    config = json.loads((out / "config.json").read_text())
    config["settings"] |= {"search_epochs": None, "account_for_tuning": False}
    (out / "config.json").write_text(json.dumps(config))
    assert compare(out, "--config", str(out / "config.json"), "--json") == 0
    assert "4 of 4 runs were made before" in capsys.readouterr().err
    assert compare(out, "--config", str(file), "--methods", "disk") == 2
    assert "must not be given with the contestants" in capsys.readouterr().err


def test_what_chooses_does_not_measure_and_the_choice_has_a_price(tmp_path, capsys):
    out, file = tmp_path / "comparison", tmp_path / "compare.toml"
    file.write_text(
        'epsilon = 2\nseeds = 2\nequal = "gradients"\nbaseline = "plain"\n'
        '[contestants.plain]\nmethod = "dp-sgd"\nlr = 0.3\n'
        '[contestants.filtered]\nmethod = "disk"\nkappa = [0.3, 0.7]\nlr = 0.3\n'
    )
    assert compare(out, "--config", str(file), "--epochs", "2") == 0
    printed, left = capsys.readouterr().out, results(out)
    assert "equal gradients" in printed
    assert "less plain" in printed
    # Of the 359 test images 180 choose and 179 measure, those of the baseline too, which chose nothing.
    for run in left["runs"]:
        right = accuracy(out, run) * (180 if run["role"] == SEARCH else 179)
        assert right == pytest.approx(round(right), abs=1e-9)
    plain, filtered = left["summary"]["rows"]
    assert (plain["epochs"], filtered["epochs"]) == (2, 1)
    search = {run["setting"]: accuracy(out, run) for run in left["runs"] if run["role"] == SEARCH}
    assert filtered["settings"] == {"kappa": 0.3 if search[0] >= search[1] else 0.7}
    chosen = [run for run in left["runs"] if run["role"] == FINAL and run["contestant"] == "filtered"]
    assert {json.loads((out / run["folder"] / "config.json").read_text())["settings"]["kappa"] for run in chosen} == {
        filtered["settings"]["kappa"]
    }
    gaps = np.subtract(filtered["test_accuracy"], plain["test_accuracy"])
    assert filtered["less_baseline"]["center"] == pytest.approx(np.mean(gaps))
    # Two runs of twelve steps and four of six, at the noise of each.
    events = [
        accounting.PoissonSampledGaussian(256 / 1438, row["noise_multiplier"], 6 * row["epochs"])
        for row in (plain, plain, *[filtered] * 4)
    ]
    price = left["summary"]["tuning"]["composed_epsilon"]
    assert price == pytest.approx(accounting.epsilon(accounting.Composed(tuple(events)), 1e-5), rel=1e-6)
    assert price > 2 * plain["epsilon"]

    # Another baseline makes no run. A search of an earlier version, on the images that measure, is not taken up; final
    # runs are.
    assert compare(out, "--config", str(file), "--epochs", "2", "--baseline", "filtered") == 0
    assert len(results(out)["runs"]) == 6
    (out / "results.json").write_text(json.dumps({**left, "format": 2}))
    assert compare(out, "--config", str(file), "--epochs", "2") == 2
    assert "an earlier version chose its settings on the images that measure them" in capsys.readouterr().err
    assert compare(tmp_path / "old", "--methods", "dp_sgd", "--epsilon", "2", "--seeds", "1") == 0
    old = results(tmp_path / "old")
    for run in old["runs"]:
        del run["setting"]
    (tmp_path / "old" / "results.json").write_text(json.dumps({**old, "format": 2}))
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    del config["settings"]["equal"], config["settings"]["baseline"]
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert compare(tmp_path / "old", "--methods", "dp_sgd", "--epsilon", "2", "--seeds", "1") == 0
    assert "1 of 1 run were made before" in capsys.readouterr().err


def test_a_plan_that_is_chosen_has_no_price_without_a_ledger(tmp_path):
    """Its cost depends on earlier results, which composition does not cover."""
    (tmp_path / "compare.toml").write_text(
        'epsilon = 2\nseeds = 1\n[contestants.plain]\nmethod = "dp-sgd"\nepochs = [1, 2]\n'
    )
    out = tmp_path / "comparison"
    assert main(["compare", "--out", str(out), "--config", str(tmp_path / "compare.toml"), "--batch-size", "256"]) == 0
    tuned = results(out)["summary"]["tuning"]
    assert tuned["composed_epsilon"] is None
    assert "cost not known, since settings were chosen that change a plan's cost" in " ".join(tuned["words"].split())


def test_a_signal_leaves_a_true_folder_and_the_same_command_goes_on(tmp_path, capsys, monkeypatch):
    out, taken, step = tmp_path / "comparison", [], PrivateRun.step
    command = ("--methods", "dp_sgd", "--epsilon", "3", "--lr", "0.5", "--seeds", "2")

    def stopping(run: PrivateRun, batch: object) -> None:
        step(run, batch)
        taken.append(1)
        if len(taken) == 9:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PrivateRun, "step", stopping)
    assert compare(out, *command) == 130
    told = capsys.readouterr().out
    assert "Stopped by Ctrl-C: 1 of 2 runs is complete" in told
    assert "in 3 of 6 steps" in told
    assert "in 3 of 6 steps" in (out / "statement.txt").read_text()
    assert [run["status"] for run in results(out)["runs"]] == ["complete", "stopped"]
    kept = checkpoint_of(out / results(out)["runs"][1]["folder"])
    stopped = statement(out, results(out)["runs"][1])
    assert compare(out, *command) == 0
    assert "1 run will go on where a signal stopped it" in capsys.readouterr().err
    runs = results(out)["runs"]
    assert [(run["seed"], run["status"]) for run in runs] == [(0, "complete"), (1, "complete")]
    assert len(taken) == 12, "no step was taken twice"
    first, second = (statement(out, run) for run in runs)
    assert (second.steps_taken, second.steps_abandoned) == (6, 0)
    assert second.best_epsilon == first.best_epsilon > stopped.best_epsilon
    assert results(out)["summary"]["tuning"]["runs"] == 2
    assert not kept.exists()
    assert compare(out, *command, "--overwrite") == 0
    assert len(results(out)["runs"]) == 2


def test_a_run_goes_on_only_from_its_last_release(tmp_path, capsys, monkeypatch):
    out, step = tmp_path / "comparison", PrivateRun.step
    command = ("--methods", "dp_sgd", "--epsilon", "3", "--seeds", "1")

    def ending_after(steps: int, how: Callable[[], None]) -> int:
        def ends(run: PrivateRun, batch: object) -> None:
            step(run, batch)
            if run.steps_taken == steps:
                how()

        with monkeypatch.context() as patched:
            patched.setattr(PrivateRun, "step", ends)
            return compare(out, *command)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def die() -> None:
        raise MemoryError

    assert ending_after(2, interrupt) == 130
    kept = checkpoint_of(out / results(out)["runs"][0]["folder"])
    early = kept.read_bytes()
    assert ending_after(4, interrupt) == 130
    late = kept.read_bytes()
    kept.write_bytes(early)
    capsys.readouterr()
    assert compare(out, *command) == 2
    assert "is of step 2, and the statement of its run is not; delete it" in capsys.readouterr().err
    kept.write_bytes(late)
    assert ending_after(5, die) == 2
    assert not kept.exists()
    assert not (out / results(out)["runs"][0]["folder"] / "README.md").exists(), "a card of what is no more"
    kept.write_bytes(late)  # as a disk may have it that lost its power
    assert compare(out, *command) == 0
    runs = results(out)["runs"]
    assert [run["status"] for run in runs] == ["stopped", "complete"]
    assert [statement(out, run).steps_taken for run in runs] == [6, 6]


def test_a_run_that_never_ended_counts_what_its_folder_states(tmp_path, capsys, monkeypatch):
    out, step, taken = tmp_path / "comparison", PrivateRun.step, []
    command = ("--methods", "dp_sgd", "--epsilon", "3", "--seeds", "1")

    def dies(run: PrivateRun, batch: object) -> None:
        if len(taken) == 2:
            raise MemoryError
        step(run, batch)
        taken.append(1)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateRun, "step", dies)
        assert compare(out, *command) == 2
    assert [run["status"] for run in results(out)["runs"]] == ["under way"]
    # It says so before the steps are taken: all of the epoch, of which two were.
    assert statement(out, results(out)["runs"][0]).steps_taken == 6
    assert compare(out, *command) == 0
    runs = results(out)["runs"]
    assert [run["status"] for run in runs] == ["stopped", "complete"]
    assert results(out)["summary"]["tuning"]["runs"] == 2
    # A folder that is gone cannot be counted, and is not left out.
    shutil.rmtree(out / runs[0]["folder"])
    capsys.readouterr()
    assert compare(out, *command) == 2
    assert "is gone, so its cost is unknown" in capsys.readouterr().err


def test_a_run_that_never_began_spent_nothing(tmp_path, capsys, monkeypatch):
    out = tmp_path / "comparison"

    def dies(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(compare_runs, "train_once", dies)
        assert compare(out, "--methods", "dp_sgd", "--epsilon", "3", "--seeds", "1") == 2
    assert compare(out, "--methods", "dp_sgd", "--epsilon", "3", "--seeds", "1") == 0
    left = results(out)
    assert [run["status"] for run in left["runs"]] == ["ended before its first step", "complete"]
    assert left["summary"]["tuning"]["runs"] == 1


def test_whether_the_budget_pays_is_what_the_ledger_grants(tmp_path):
    run = accounting.PoissonSampledGaussian(0.05, 2.0, 100)
    one = accounting.epsilon(run, 1e-5)
    for epsilon, paid in ((1.001 * one, True), (0.999 * one, False)):
        assert pays_for(Ledger.create(tmp_path / str(epsilon), budget=(epsilon, 1e-5)), [run]) is paid
    ledger, count = Ledger.create(tmp_path / "people.ledger", budget=(3.0, 1e-5)), 0
    ledger.charge(run, name="before")
    while pays_for(ledger, [run] * (count + 1)):
        count += 1
    assert count > 1
    for _ in range(count):
        assert pays_for(ledger, [run])
        ledger.charge(run, name="one")
    assert not pays_for(ledger, [run])
    with pytest.raises(BudgetError):
        ledger.charge(run, name="one too many")
    assert pays_for(ledger, [])
    assert pays_for(None, [run])


def test_a_sweep_beyond_the_budget_is_told_before_its_first_run(tmp_path, capsys):
    file, out = tmp_path / "people.ledger", tmp_path / "comparison"
    Ledger.create(file, budget=(2.0, 1e-5))
    command = ("--methods", "dp_sgd,disk", "--epsilon", "1", "--seeds", "3", "--ledger", str(file))
    assert compare(out, *command) == 3
    printed = capsys.readouterr()
    told = printed.err.splitlines()
    runs = results(out)["runs"]
    complete = len(runs)
    assert {run["status"] for run in runs} == {"complete"}
    assert 0 < complete < 6
    # Nothing was spent on a run that could not come to its end.
    assert [run.releases for run in Ledger.open(file).runs()] == [6] * complete
    (at,) = (at for at, line in enumerate(told) if "remark" in line)
    assert told[at] == (
        "remark: the ledger's budget may not pay for all of the 6 runs to come; the comparison stops before the first "
        "unpaid run, and keeps those before it"
    )
    assert "held-out accuracy" in told[at + 1]
    assert f"{min(complete, 3)} of 3 " in printed.out or complete == 3
    said = f"Stopped by the ledger's budget: {complete} of 6 runs"
    left = (out / "statement.txt").read_text()
    assert said in printed.out
    assert said in left
    assert "does not pay for the whole of the next run" in left
    assert "same command continues" not in left
    assert len(results(out)["summary"]["rows"]) == (1 if complete <= 3 else 2)
    assert main(["verify", str(out)]) == 0
    # What is complete is kept, and counted no more.
    capsys.readouterr()
    assert compare(out, *command) == 3
    assert f"may not pay for all of the {6 - complete} runs to come" in capsys.readouterr().err
    assert len(results(out)["runs"]) == complete
    Ledger.create(tmp_path / "other.ledger", budget=(9.0, 1e-5))
    one = ("--methods", "dp_sgd", "--epsilon", "1", "--seeds", "1", "--ledger", str(tmp_path / "other.ledger"))
    assert compare(tmp_path / "other", *one) == 0
    printed = capsys.readouterr()
    assert "remark" not in printed.err
    # What the ledger counts is not said to be uncounted.
    assert (
        "Tuning is accounted for by the ledger, not here: it paid for every run (1, of them 0 in search" in printed.out
    )
    assert "NOT accounted for" not in printed.out + (tmp_path / "other" / "statement.txt").read_text()


def test_a_comparison_repeated_from_config_json_is_paid_for_by_the_same_ledger(tmp_path, capsys):
    file, out = tmp_path / "people.ledger", tmp_path / "comparison"
    Ledger.create(file)
    one = ("--methods", "dp_sgd", "--epsilon", "1", "--seeds", "1")
    assert compare(out, *one, "--ledger", str(file)) == 0
    assert main(["compare", "--config", str(out / "config.json"), "--out", str(tmp_path / "again")]) == 0
    (run,) = results(tmp_path / "again")["runs"]
    config = str(tmp_path / "again" / run["folder"] / "config.json")
    assert main(["train", "--config", config, "--out", str(tmp_path / "run")]) == 0
    assert [run.releases for run in Ledger.open(file).runs()] == [6, 6, 6]
    # Nor does the comparison itself go on without it.
    capsys.readouterr()
    assert compare(out, *one) == 2
    assert f"are paid for by the ledger {file}; add --ledger" in capsys.readouterr().err


def test_a_ledger_that_cannot_take_the_runs_is_refused_before_any(tmp_path, capsys):
    Ledger.create(tmp_path / "gdp", composition="gdp")
    Ledger.create(tmp_path / "rdp").charge(accounting.Gaussian(9.0), name="a count")
    for name, sampling, words in (
        ("absent", "poisson", "does not exist; dpcore ledger create makes one"),
        ("gdp", "poisson", "does not cover secretly sampled batches"),
        ("rdp", "fixed-size", "replace-one does not add up with any other; give such runs a ledger of their own"),
    ):
        out = tmp_path / f"with {name}"
        command = ("--methods", "dp_sgd", "--epsilon", "1", "--sampling", sampling, "--ledger", str(tmp_path / name))
        assert compare(out, *command) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
        assert not out.exists()


def test_runs_side_by_side_give_the_same_folder(tmp_path, capsys, monkeypatch):
    out, begun = tmp_path / "comparison", []

    # Forks, which need not import torch, in place of what the nightly test below starts.
    start, forking = ForkProcess.start, get_context("fork")
    monkeypatch.setattr(compare_runs.multiprocessing, "get_context", lambda _: forking)
    monkeypatch.setattr(ForkProcess, "start", lambda self: begun.append(start(self)))
    assert compare(out, "--methods", "dp_sgd", "--epsilon", "3", "--lr", "0.5", "--seeds", "3", "--jobs", "2") == 0
    runs = results(out)["runs"]
    assert sorted((run["seed"], run["status"]) for run in runs) == [(seed, "complete") for seed in range(3)]
    assert "3 of 3 runs" in capsys.readouterr().err
    assert len(begun) == 2  # and not one for each run
    # Each run has weights of its own: nothing but the data is kept from one to the next.
    models = {(out / run["folder"] / "model.safetensors").read_bytes()[-200:] for run in runs}
    assert len(models) == 3


@nightly
@pytest.mark.slow
def test_runs_side_by_side_end_after_their_step(tmp_path, capsys, monkeypatch):
    out, submitted = tmp_path / "comparison", []
    submit = ProcessPoolExecutor.submit

    def stopping(self: Any, *given: Any) -> Any:
        submitted.append(submit(self, *given))
        if len(submitted) == 2:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return submitted[-1]

    monkeypatch.setattr(ProcessPoolExecutor, "submit", stopping)
    command = ("--methods", "dp_sgd", "--epsilon", "3", "--seeds", "3", "--jobs", "2", "--epochs", "4")
    assert compare(out, *command) == 130
    assert len(submitted) == 2
    assert "Stopped by Ctrl-C: 0 of 3 runs are complete" in capsys.readouterr().out
    left = [run["status"] for run in results(out)["runs"]]
    assert len(left) == 2
    assert set(left) <= {"stopped", "ended before its first step"}


# `dpcore demo`: a comparison with fixed settings.


def test_it_ends_with_a_table_a_picture_and_the_guarantee(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "COMMON", {**demo.COMMON, "model": "logistic", "epochs": 1, "batch_size": 256})
    out = tmp_path / "demo"
    printed = say(capsys, ["demo", "--out", str(out), "--seeds", "2"]).out
    for part in ("DP-SGD", "DOPPLER", "DiSK", "±", "comparison.png", "Tuning is NOT accounted for"):
        assert part in printed
    runs = json.loads((out / "results.json").read_text())["runs"]
    assert [run["contestant"] for run in runs] == ["DP-SGD"] * 2 + ["DOPPLER"] * 2 + ["DiSK"] * 2
    statements = [Statement.from_json((out / run["folder"] / "statement.json").read_text()) for run in runs]
    # The same guarantee, sampler and noise for all: only the methods differ.
    for name in ("epsilon", "sampler", "noise", "delta", "steps_taken", "adjacency"):
        assert len({json.dumps(getattr(item, name), sort_keys=True) for item in statements}) == 1
    assert 0.999 < statements[0].best_epsilon <= 1
    assert (out / "comparison.png").stat().st_size > 10_000
    # The same command keeps what is made. Without matplotlib there is still a table.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    told = say(capsys, ["demo", "--out", str(out), "--seeds", "2"])
    assert "6 of 6 runs were made before" in told.err
    assert "pip install 'dpcore[plots]'" in told.err
    assert "±" in told.out
    assert "Picture:" not in told.out
