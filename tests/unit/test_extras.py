"""Without an extra, what needs it is refused by one sentence that names it, and what does not need it works."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dpcore.spec.extras import EXTRAS, needs
from tests.fresh import ROOT, python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Runs in its own process. A refused package is one that is not installed.
WITHOUT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Refuse())
from dpcore.cli import main
sys.exit(main(sys.argv[1:]))
"""
NO_EXTRAS = {*EXTRAS, "cryptography", "sklearn"}


def test_the_table_names_extras_of_the_distribution_that_bring_the_package():
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package) for line in PROJECT["optional-dependencies"][extra]), package


def test_sentences():
    sentence = "a picture needs matplotlib; install it with: pip install 'dpcore[plots]'"
    assert needs("a picture", "matplotlib") == sentence
    assert needs("the command line", "rich") == "the command line needs rich; install it with: pip install rich"


@pytest.mark.parametrize(
    "words",
    [
        "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 100 --delta 1e-6",
        "calibrate --dataset-size 6000 --batch-size 256 --epochs 2 --epsilon 3 --delta 1e-5",
        "ledger create a.ledger --budget-epsilon 3 --budget-delta 1e-5",
        "strategy optimize --kind banded-toeplitz --steps 64 --bands 4 --no-cache --out best.npz",
    ],
)
def test_accounting_needs_no_extra(words: str, tmp_path: Path):
    done = python("-c", WITHOUT.format(refused=NO_EXTRAS), *words.split(), folder=tmp_path, COLUMNS="100")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("train --data digits --model mlp --method disk --epsilon 1 --delta 1e-5 --epochs 1", "torch"),
        ("compare --methods dp_sgd,disk --epsilon 1 --delta 1e-5 --epochs 1 --out compared", "torch"),
        ("demo --out demo", "torch"),
        ("curve steps --sample-rate 0.01 --noise-multiplier 1.1 --steps 100 --delta 1e-6 --out a.png", "matplotlib"),
    ],
)
def test_what_is_missing_is_named_with_its_extra(words: str, package: str, tmp_path: Path):
    done = python("-c", WITHOUT.format(refused=NO_EXTRAS), *words.split(), folder=tmp_path, COLUMNS="100")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith(needs("", package))
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"
