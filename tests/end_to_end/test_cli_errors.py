"""Nonsense gives one sentence and a status; what must fail is refused before torch and before anything is made."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fresh import python

pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.cli import main
from dpcore.cli.train.run_folder import RunFolder
from tests.end_to_end.command_line import say

PLAN = "--sample-rate 0.01 --steps 100"
CASES = {
    "train --epsilon 3 --method dp_adam --variant joint_moments": "dpcore: sampler=FixedOrderSampler: joint moments",
    "trian": "Did you mean 'train'?",
    "train": "give --epsilon",
    "train --epsilon 3 --noise-multiplier 1": "must not be given with --epsilon",
    "train --epsilon 3 --epocs 3": "--epochs",
    "train --epsilon x": "'x' is not a number; write one like",
    "train --epsilon 3 --data npz --data-dir torn.npz": "torn.npz: is not a .npz archive, or it is truncated",
    "train --epsilon 3 --delta 0": "delta=0.0: must lie strictly between 0 and 1",
    "train --epsilon 1e-9 --delta 1e-300": "target_epsilon=1e-09",
    "train --epsilon 3 --batch-size 2000": "batch_size=2000: must be at most dataset_size=1438",
    f"epsilon {PLAN} --noise-multiplier 1": "missing option '--delta'",
    f"epsilon {PLAN} --noise-multiplier 1 --delta 1": "delta=1.0",
    f"epsilon {PLAN} --noise-multiplier 1 --delta 1e-5 --epochs 3": "give one of --steps and --epochs, not both",
    f"epsilon {PLAN} --noise-multiplier 1 --delta 1e-5 --batch-size 3": "not both",
    "epsilon --sample-rate 2 --steps 3 --noise-multiplier 1 --delta 1e-5": "sample_rate=2.0",
    "epsilon --steps 3 --noise-multiplier 1 --delta 1e-5": "give --sample-rate, or --dataset-size with --batch-size",
    "epsilon --sampling fixed-order --steps 3 --noise-multiplier 1 --delta 1e-5": "dataset_size: give --dataset-size",
    f"calibrate {PLAN} --epsilon 0 --delta 1e-5": "target_epsilon=0.0: must be greater than 0",
    f"calibrate {PLAN} --epsilon 1e-9 --delta 1e-300": "no more private value is tried",
    f"calibrate {PLAN} --epsilon 3": "exactly one of noise-multiplier, steps, batch-size, delta must",
    "calibrate --epsilon 3 --delta 1e-5": "For the noise multiplier, give --steps or --epochs; --sample-rate, or",
    f"calibrate {PLAN} --epsilon 3 --delta 1e-400": "'1e-400' is too small to differ from 0",
    f"calibrate {PLAN} --delta 1e-5": "epsilon: give the target",
    f"calibrate {PLAN} --epsilon 3 --delta 1e-5 --ledger nix.ledger": "nix.ledger",
    f"epsilon {PLAN} --noise-multiplier 1 --delta 1e-5 --groups 3": "--groups is only for --sampling cyclic-poisson",
    f"epsilon {PLAN} --noise-multiplier 1 --delta 1e-5 --sampling full-batch": "is not for --sampling full-batch",
    f"delta {PLAN} --noise-multiplier 1 --epsilon 1 --sampling cyclic-poisson --groups 4": "not for --sampling cyclic",
    "epsilon --steps 3 --noise-multiplier 1 --delta 1e-5 --sampling fixed-size": "give --dataset-size and --batch-size",
    f"delta {PLAN} --noise-multiplier 1 --epsilon -3": "epsilon=-3.0: must be 0 or greater",
    "compare --methods dp_sgd": "give at least one, such as --epsilon 1,8",
    "compare --epsilon 1": "name at least one method",
    "compare --epsilon 1 --methods disk --batch-size 100000": "contestant 'disk': batch_size=100000",
}
# fmt: off
CASES |= {
    "train --epsilon 3 --modell mlp": "no such option: --modell; did you mean --model? (see dpcore train --help)",
    "train --epsilon 3 --xyzzy 3": "no such option: --xyzzy; see dpcore train --help",
    "comapre": "no such command 'comapre'. Did you mean 'compare'? (see dpcore --help)",
    "train --epsilon 3 --config text": "config='text': is not valid TOML",
    "compare --epsilon 1 --methods disk --lr 1,,2": "'1,,2' lacks a number at one of its commas",
    "compare --epsilon 1 --methods disk,,pmlf": "'disk,,pmlf' lacks a name at one of its commas",
    "calibrate --noise-multiplier 0.1 --sample-rate 0.5 --epsilon 0.1 --delta 1e-5": "epsilon=0.1: not even one step",
    "train --noise-multiplier 1e-9 --max-grad-norm 1e-40": "noise_multiplier=1e-09: the noise then has the standard",
    "train --noise-multiplier 1e-50": "noise_multiplier=1e-50: must be 0, which is not private, or from 1e-9 to 1e9",
    "train --noise-multiplier 1e-300": "noise_multiplier=1e-300: must be 0, which is not private, or from 1e-9 to 1e9",
    f"epsilon {PLAN} --noise-multiplier 1e-300 --delta 1e-5": "must be 0, which is not private, or from 1e-9 to 1e9",
    f"delta {PLAN} --noise-multiplier 1e300 --epsilon 3": "must be 0, which is not private, or from 1e-9 to 1e9",
    f"epsilon {PLAN} --noise-multiplier 1 --delta 1e-5 --bands 3": "bands=3: is only for --strategy banded-inverse",
    "epsilon --steps 5 --noise-multiplier 1 --delta 1e-5 --sampling full-batch --batch-size 5": "batch_size=5: must be",
    f"curve {PLAN} --noise-multiplier 1 --delta 1e-5": "delta=1e-05: is only for the curve over steps; leave it out",
    "compare --methods dp_sgd --epsilon 1 --jobs abc": "'abc' is not a whole number; write one like 60000 or 6e4",
    "train --epsilon 1 --strategy own.npz --bands 3": "bands=3: must be left out, since own.npz has its strategy's",
    "predict --methods doppler:lr=3": "'lr' is unknown; known: filter",
    "strategy optimize --steps 4 --decay 0.5": "--decay 0.5: is not for --workload prefix; leave it out",
    "strategy optimize --steps 4 --out missing/own.npz": "there is no folder missing",
    "curve": "give --noise-multiplier", "curve nix --steps 3": "unknown",
    "curve --sample-rate 0.1 --steps 3 --noise-multiplier 0": "epsilon is infinite",
    "curve steps --sample-rate 0.1 --steps 3 --noise-multiplier 1": "give --delta",
    "curve steps --sample-rate 0.1 --steps 0 --noise-multiplier 1 --delta 1e-5": "steps: must be at least 1",
}
LEDGER = [
    ("show absent", "does not exist; dpcore ledger create makes one"), ("verify absent", "does not exist"),
    ("export absent", "does not exist"), ("export text", "is no ledger of dpcore"), ("show .", "is a folder"),
    ("show text", "is no ledger of dpcore: not even a database"),
    ("create text", "exists already, and a ledger is never overwritten"),
    ("create nowhere/people.ledger", "there is no folder"),
    ("create new --budget-epsilon 3", "give both, or neither"),
    ("create new --budget-epsilon 0 --budget-delta 1e-5", "budget_epsilon=0.0: must be greater than 0"),
    ("create new --budget-epsilon 3 --budget-delta 2", "budget_delta=2.0"),
    ("create new --budget-epsilon x --budget-delta 2", "'x' is not a number"),
    ("shwo text", "Did you mean 'show'?"),
    ("show", "missing argument 'FILE'"),
]
INSPECT = [
    ("filter momentun", "did you mean momentum?"), ("filter b=", "has no number"),
    ("filter b=x", "'x' is not a number"), ("filter a=0.5", "write it as b=0.1 a=-0.9"),
    ("filter c=0.5", "write it as b=0.1 a=-0.9"), ("filter =", "write it as b=0.1 a=-0.9"),
    ("filter b=inf", "is not finite"), ("filter kappa=2", "kappa=2.0: must be greater than 0 and at most 1"),
    ("filter --out a.png", "--out cannot be used here"),
    ("filter momentum --out a.txt", "'a.txt' must be a file that ends in .png, .pdf, .svg"),
    ("filter momentum --out absent/a.png", "there is no folder absent"),
    ("gradients absent", "folder='absent': no such folder"),
    ("gradients .", "gradients.npz: no such file; `dpcore train --record-gradients N"),
    ("gradients torn", "is not a .npz archive, or it is truncated"), ("gradients", "missing argument"),
    ("fliter", "Did you mean 'filter'?"),
]
# fmt: on
CASES |= {f"ledger {line}": said for line, said in LEDGER} | {f"inspect {line}": said for line, said in INSPECT}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch) -> None:
    (tmp_path / "torn").mkdir()
    for torn in ("torn.npz", "torn/gradients.npz"):
        (tmp_path / torn).write_bytes(b"PK\x03\x04 torn")
    (tmp_path / "text").write_text("three\n" * 999)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("line", CASES)
def test_one_sentence_and_a_status(line: str, capsys, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    printed = say(capsys, line.split(), 2)
    assert printed.out == ""
    *before_it, sentence = printed.err.splitlines()
    assert sentence.startswith("dpcore: ")
    assert CASES[line] in sentence
    assert all(said.startswith("Training ") for said in before_it)
    assert sorted(tmp_path.rglob("*")) == before


def test_debug_shows_the_traceback_and_json_the_sentence(capsys):
    printed = say(capsys, ["train", "--epsilon", "3", "--lr", "0", "--debug", "--json"], 2)
    assert "Traceback (most recent call last)" in printed.err
    assert json.loads(printed.out) == {"error": "lr=0.0: must be greater than 0", "status": 2}


def test_a_defect_is_one_sentence_too(capsys, monkeypatch):
    from dpcore.cli.accounting import answer

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("first line\nsecond line")

    monkeypatch.setattr(answer, "EventOptions", broken)
    assert say(capsys, ["calibrate", "--epsilon", "3", "--delta", "1e-5", *PLAN.split()], 1).err == (
        "dpcore: unexpected ZeroDivisionError: first line (--debug shows where; please report it)\n"
    )


COMMANDS = ["", "train", "epsilon", "calibrate", "demo", "delta", "curve", "statement", "verify"]
COMMANDS += ["inspect", "inspect filter", "inspect gradients"]
COMMANDS += ["ledger", "ledger create", "ledger show", "ledger verify", "ledger export"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys):
    assert main([*command.split(), "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Example: dpcore {command}".strip() in printed
    assert main([*command.split(), "-h"]) == 0


def test_version(capsys):
    from dpcore import __version__

    assert say(capsys, ["--version"]).out == f"dpcore {__version__}\n"
    assert "Usage: dpcore" in say(capsys, []).out


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m dpcore train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    assert done.stderr == b""
    assert done.returncode in (0, 1, 141)


# What is known to fail is refused before torch is imported and before anything is created.


# Runs each command in one new interpreter, in which torch cannot be imported: what asks for it is not refused early.
PROBE = """
import json, sys
from importlib.machinery import PathFinder

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", *MISSING}:
            raise ModuleNotFoundError(f"{name} was asked for", name=name)

MISSING = set()
sys.meta_path.insert(0, Refuse())
from dpcore.cli import main
print(json.dumps([main(words.split()) for words in json.loads(sys.argv[1])]))
"""

REFUSED = {
    "train --epsilon 3 --out file": "out='file': is a file",
    "train --epsilon 3 --out file/deeper": "out='file/deeper': cannot be made (",
    "train --epsilon 3 --out /proc/x": "out='/proc/x': cannot be made (nothing can be made in /proc: ",
    "train --epsilon 3 --out full": "out='full': is not empty and has no dpcore run",
    "train --epsilon 3 --out run": "out='run': already has a run",
    "train --epsilon 3 --ledger absent": "does not exist; dpcore ledger create makes one",
    "train --epsilon 3 --ledger file": "ledger",
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
    "train --resume absent": "resume='absent': has no run",
    "train --resume run": "has no checkpoint",
    "compare --methods disk --epsilon 3 --out run": "out='run': is not empty and has no dpcore compare",
    "compare --methods disk --epsilon 3 --out file": "out='file': is a file",
    "compare --methods disk --epsilon 3 --ledger absent": "does not exist",
    "compare --methods pmlf --epsilon 3 --window 1e9": "contestant 'pmlf': window=1,000,000,000",
    "compare --methods disk --epsilon 3 --data nan --data-dir .": "not finite",
    "demo --out full": "out='full': is not empty",
}


def arrays(path: Path, test: int = 3, **changed: np.ndarray) -> None:
    parts = {"x_train": np.ones((5, 2)), "y_train": np.arange(5) % 2, "x_test": np.ones((test, 2))}
    np.savez(path, **{**parts, "y_test": np.arange(test) % 2, "classes": np.array(2), **changed})


@pytest.fixture
def _full_folder(tmp_path, monkeypatch) -> None:
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


@pytest.mark.usefixtures("_full_folder")
def test_it_is_refused_without_torch_and_nothing_is_made(tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = python("-c", PROBE, json.dumps(list(REFUSED)), folder=tmp_path)
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
