"""What is known to fail is refused before torch is imported and before anything is created."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.accounting import Gaussian
from dpcore.cli import main
from dpcore.cli.train.run_folder import RunFolder
from dpcore.cli.train.train import check_beside
from dpcore.ledger import Ledger

# Runs each command in one new interpreter, in which torch cannot be imported: what asks for it is not refused early.
PROBE = """
import json, sys
from importlib.machinery import PathFinder

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", *MISSING}:
            raise ModuleNotFoundError(f"{name} was asked for", name=name)

MISSING = set()
find = __import__("importlib.util").util.find_spec
__import__("importlib.util").util.find_spec = lambda name, *more: None if name == "tensorboard" else find(name, *more)
sys.meta_path.insert(0, Refuse())
import dpcore.cli.train.train as quick
quick.find_spec = __import__("importlib.util").util.find_spec
from dpcore.cli import main
print(json.dumps([main(words.split()) for words in json.loads(sys.argv[1])]))
"""

REFUSED = {
    "train --epsilon 3 --out file": "out='file': is a file",
    "train --epsilon 3 --out file/deeper": "out='file/deeper': cannot be made (",
    "train --epsilon 3 --out /proc/x": "out='/proc/x': cannot be made (nothing can be made in /proc: ",
    "train --epsilon 3 --out full": "out='full': is not empty and holds no dpcore run",
    "train --epsilon 3 --out run": "out='run': already holds a run",
    "train --epsilon 3 --ledger absent": "does not exist; dpcore ledger create makes one",
    "train --epsilon 3 --ledger file": "ledger",
    "train --epsilon 3 --tensorboard": "tensorboard=True needs tensorboard",
    "train --epsilon 3 --data npz --data-dir nix": "data_dir='nix': no such folder",
    "train --epsilon 3 --data nan --data-dir .": "nan: the train set has values that are not finite",
    "train --epsilon 3 --data held --data-dir .": "held: the test set has values that are not finite",
    "train --epsilon 3 --data empty --data-dir .": "empty: the test set is empty",
    "train --epsilon 3 --batch-size 2000": "batch_size=2000: must be at most dataset_size=1438",
    "train --epsilon 3 --method pmlf --window 1e9": "window=1,000,000,000: must be at most 230, the steps of the run",
    "train --epsilon 3 --max-grad-norm 1e-300": "max_grad_norm=1e-300: must lie between 1e-100 and 1e100",
    "train --epsilon 3 --max-grad-norm 1e300": "max_grad_norm=1e+300: must lie between",
    "train --epsilon 3 --seed 1e30": "'1e30' is too large; write a whole number of at most 9,223,372,036,854,775,807",
    "train --epsilon 3 --sampling cyclic-poisson --groups 1e9": "groups=1000000000: must be at most",
    "train --epsilon 3 --schedule cosine --warmup-steps 1e9": "warmup_steps=1000000000: must be less than the 230",
    "train --resume absent": "resume='absent': holds no run",
    "train --resume run": "has no checkpoint",
    "compare --methods disk --epsilon 3 --out run": "out='run': is not empty and holds no dpcore compare",
    "compare --methods disk --epsilon 3 --out file": "out='file': is a file",
    "compare --methods disk --epsilon 3 --ledger absent": "does not exist",
    "compare --methods disk --epsilon 3 --tensorboard": "needs tensorboard",
    "compare --methods pmlf --epsilon 3 --window 1e9": "contestant 'pmlf': window=1,000,000,000",
    "compare --methods disk --epsilon 3 --data nan --data-dir .": "not finite",
    "demo --out full": "out='full': is not empty",
}


def arrays(path: Path, test: int = 3, **changed: np.ndarray) -> None:
    parts = {"x_train": np.ones((5, 2)), "y_train": np.arange(5) % 2, "x_test": np.ones((test, 2))}
    np.savez(path, **{**parts, "y_test": np.arange(test) % 2, "classes": np.array(2), **changed})


@pytest.fixture
def _folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("three\n" * 999)
    Path("full").mkdir()
    Path("full/mine").write_text("mine")
    RunFolder(Path("run")).write_config({"epsilon": 3.0}, None, {})
    spoiled = np.ones((5, 2))
    spoiled[4, 1] = np.nan
    arrays(Path("nan.npz"), x_train=spoiled)
    arrays(Path("held.npz"), x_test=spoiled[2:])
    arrays(Path("empty.npz"), test=0)


@pytest.mark.usefixtures("_folder")
def test_it_is_refused_without_torch_and_nothing_is_made(tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(list(REFUSED))], env={"PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    said = done.stderr.splitlines()
    assert len(said) == len(REFUSED), done.stderr
    for (line, words), sentence in zip(REFUSED.items(), said, strict=True):
        assert words in sentence, line
    assert json.loads(done.stdout.splitlines()[-1]) == [2] * len(REFUSED)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_row_that_is_not_finite_is_named(tmp_path, capsys):
    for value in (np.nan, np.inf, -np.inf, 1e300):
        spoiled = np.ones((5, 2))
        spoiled[3:, 0] = value
        arrays(tmp_path / "own.npz", x_train=spoiled)
        assert main(["train", "--epsilon", "3", "--data", "own", "--data-dir", str(tmp_path)]) == 2
        assert "are not finite (NaN, or too large for float32), the first in row 3; leave" in capsys.readouterr().err


def test_train_says_what_it_begins_before_torch_is_imported(tmp_path):
    """By what happens without torch, not by seconds: on a loaded machine torch alone takes ten of them."""
    code = (
        "import sys; sys.modules['torch'] = None; from dpcore.cli import main;"
        f"main(['train', '--epsilon', '3', '--out', {str(tmp_path / 'run')!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path), "PATH": ""}, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    first, second = done.stderr.splitlines()
    assert first == (
        "Training logistic on digits by dp_sgd: 1,438 examples, 230 steps, noise for epsilon = 3 at delta = 1e-5"
    )
    assert "torch" in second
    assert not (tmp_path / "run").exists()


def test_a_plan_of_the_checks_is_that_of_the_run(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    from dpcore.cli.datasets import load
    from dpcore.cli.train.settings import Settings

    assert main(["train", "--epsilon", "3", "--epochs", "1", "--out", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = Settings(epsilon=3.0, epochs=1).resolved(len(load())).plan(len(load()))
    assert plan.steps == told["statement"]["steps_planned"] == 23
    assert (told["epsilon"], told["delta"]) == (told["statement"]["epsilon"]["pld"], 1e-5)


def test_a_ledger_that_is_opened_early_is_not_written_to(tmp_path):
    from dpcore.cli.train.settings import Settings

    ledger = Ledger.create(tmp_path / "people.ledger", budget=(3, 1e-5))
    ledger.charge(Gaussian(9.0), name="a count")
    before = ledger.path.read_bytes()
    check_beside(Settings(epsilon=3.0), ledger.path)
    assert ledger.path.read_bytes() == before
