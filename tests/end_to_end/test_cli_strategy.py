"""`dpcore strategy`: optimal strategies with their certificates, files of them in train, and nonsense."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpcore import strategies
from dpcore.cli import main
from dpcore.stages.strategies.search.optimize import KINDS
from tests.end_to_end.command_line import ask, say


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPCORE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_scripts_read(kind: str):
    told = ask("strategy", "optimize", "--kind", kind, "--steps", 64, "--epochs", 2, "--no-cache")
    assert told["lower_bound"] <= told["error"]
    assert told["above"] == pytest.approx(told["error"] / told["lower_bound"] - 1)
    assert told["seconds"] > 0
    patterns = [np.arange(first, 64, 32) for first in range(32)]
    again = strategies.optimal(kind, 64, epochs=2)
    workload = strategies.workloads.ones(64)
    assert strategies.rmse(again.strategy, workload, 64, patterns) == pytest.approx(told["error"], rel=1e-6)


def test_words_for_a_person(capsys: Any, tmp_path: Path):
    out = say(capsys, ["strategy", "optimize", "--steps", "32", "--out", str(tmp_path / "c.npz")]).out
    assert "root mean squared error of prefix sums over 32 steps at mu = 1: 1.89" in out
    assert "at most 0.00% above the best" in out
    assert strategies.load(tmp_path / "c.npz").steps == 32
    shown = say(capsys, ["strategy", "show", str(tmp_path / "c.npz")]).out
    assert "dense, 32 steps" in shown
    assert "streams with rows drawn again, no vectors; 16.5 rows of noise and 264 bytes a step" in shown
    assert "above the best" in shown
    table = say(capsys, ["strategy", "compare", "--steps", "64"]).out
    names = [line.split()[0] for line in table.splitlines()[2:]]
    assert names[0] == "dense"
    assert names[-1] == "identity"
    assert "a ring of 31 vectors; 1 row of noise and 256 bytes a step" in table
    told = json.loads(say(capsys, ["strategy", "compare", "--steps", "32", "--kinds", "blt", "--json"]).out)
    assert told["errors"]["blt"]["state_vectors"] == 4
    streaming = {"how": "recurrence", "vectors": 4, "rows_drawn": 1.0, "bytes_moved": 64.0}
    assert told["errors"]["blt"]["streaming"] == streaming
    told = json.loads(say(capsys, ["strategy", "show", str(tmp_path / "c.npz"), "--json"]).out)
    assert told["streaming"]["how"] == "redrawn"


def test_a_run_with_a_strategy_of_a_file(capsys: Any, tmp_path: Path):
    matrix = tmp_path / "matrix.txt"
    np.savetxt(matrix, np.tril(np.ones((40, 40))))
    say(capsys, ["strategy", "optimize", "--steps", "34", "--kind", "blt", "--out", str(tmp_path / "blt.npz")])
    for file, kind in ((tmp_path / "blt.npz", "blt"), (matrix, "dense")):
        folder = tmp_path / kind
        arguments = ["train", "--method", "memf", "--strategy", str(file), "--epochs", "1", "--epsilon", "8"]
        say(capsys, [*arguments, "--out", str(folder)])
        statement = json.loads((folder / "statement.json").read_text())
        assert statement["noise"]["strategy"]["kind"] == kind
        say(capsys, ["verify", str(folder)])


NOISY = "--dataset-size 10 --batch-size 5 --epochs 1 --noise-multiplier 1 --delta 1e-5"


@pytest.mark.parametrize(("line", "words"), [
    ("strategy optimize --steps 0", "--steps 0: must be at least 1"),
    ("strategy optimize --steps 9 --kind denser", "did you mean dense"),
    ("strategy optimize --steps 9 --epochs 10", "epochs=10: must be at most 9"),
    ("strategy optimize --steps 9 --kind banded-toeplitz --bands 10", "bands=10: must be at most 9"),
    ("strategy optimize --steps 9 --out strategy.pt", "must be a file that ends in .npz"),
    ("strategy optimize --steps 10000", "must be at most 4096"),
    ("strategy show nothing.npz", "cannot be read"),
    ("strategy recommend --steps 10 --epochs 11", "epochs=11"),
    ("strategy recommend --steps 10 --out x.npy", "must be a file that ends in .npz"),
    (f"epsilon --strategy nowhere.npz --sampling fixed-order {NOISY}", "cannot be read"),
    ("epsilon --strategy tree --sampling fixed-order --epochs 1 --noise-multiplier 1 --delta 1e-5", "--dataset-size"),
    (f"epsilon --strategy tree {NOISY}", "fixed-order"),
    ("train --method memf --epsilon 3 --strategy x.npz", "strategy x.npz: cannot be read (No such file or directory)"),
])  # fmt: skip
def test_nonsense(line: str, words: str, capsys: Any):
    assert words in " ".join(say(capsys, line.split(), 2).err.split())


def test_what_no_bound_is_known_for_is_shown_without_one(tmp_path: Path, capsys: Any):
    file, line = str(tmp_path / "chosen.npz"), "--workload momentum --steps 600 --epochs 2"
    say(capsys, f"strategy optimize --kind blt {line} --out {file}".split())
    assert "its distance from the best is not known" in say(capsys, f"strategy show {file} {line}".split()).out
    assert ask("strategy", "show", file, *line.split())["above"] is None
    shown = say(capsys, f"strategy compare --kinds blt {line}".split()).out
    assert shown.count("not known") == 4


def test_recommend_names_what_fits_and_train_and_epsilon_take_its_file(tmp_path: Path, capsys: Any):
    file = str(tmp_path / "chosen.npz")
    given = ["strategy", "recommend", "--steps", "60", "--epochs", "6", "--workload", "momentum"]
    assert main([*given, "--out", file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = strategies.candidates(strategies.workloads.momentum(60, 0.9), epochs=6)
    assert told["recommended"] == found[0].kind
    assert [one["error"] for one in told["candidates"]] == pytest.approx([one.error for one in found])
    assert strategies.load(file) == found[0].strategy
    assert main(given) == 0
    said = capsys.readouterr().out
    assert f"take {found[0].kind}" in said
    assert "independent noise has" in said

    plan = ["--sampling", "fixed-order", "--dataset-size", "100", "--batch-size", "10", "--epochs", "6"]
    noisy = ["epsilon", *plan, "--noise-multiplier", "4", "--delta", "1e-5"]
    assert main([*noisy, "--strategy", file, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    patterns = [np.arange(first, 60, 10) for first in range(10)]
    moved = strategies.sensitivity(found[0].strategy, patterns, 60)
    from dpcore import accounting

    event = accounting.MatrixGaussian(4.0, moved, 60, "C")
    assert told["epsilon"] == pytest.approx(accounting.epsilon(event, 1e-5, "gaussian"), rel=1e-9)
    assert main(["calibrate", *plan, "--strategy", file, "--epsilon", "3", "--delta", "1e-5", "--json"]) == 0
    calibrated = json.loads(capsys.readouterr().out)["noise_multiplier"]
    assert accounting.epsilon(accounting.MatrixGaussian(calibrated, moved, 60, "C"), 1e-5) == pytest.approx(3, rel=1e-3)
    assert main([*noisy, "--strategy", "tree"]) == 0
    assert "noise correlated by tree" in capsys.readouterr().out
