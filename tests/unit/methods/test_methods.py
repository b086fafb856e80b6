"""Methods: NumPy numbers are the numbers that they hold, and every method cites a paper that can be found."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpcore
from dpcore import methods
from dpcore.methods import METHODS, PAPERS
from dpcore.sampling import FixedOrderSampler
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "methods"


def test_every_method_has_a_paper_that_can_be_found():
    assert list(PAPERS) == list(METHODS)
    for papers in PAPERS.values():
        for paper in papers:
            assert bool(paper.arxiv) != bool(paper.doi)
            assert re.fullmatch(r"\d{4}\.\d{5}|", paper.arxiv)
            assert re.fullmatch(r"10\.\d{4,}/\S+|", paper.doi)
            assert not paper.arxiv or paper.arxiv.startswith(str(paper.year)[2:])
            assert paper.authors
            assert paper.url in paper.text()


@pytest.mark.parametrize("method", METHODS)
def test_its_page_and_the_table_of_methods_cite_it(method: str):
    page = (DOCS / f"{method}.md").read_text()
    (row,) = (line for line in (DOCS / "index.md").read_text().splitlines() if f"]({method}.md) |" in line)
    for paper in PAPERS[method]:
        assert f"\n*Paper.* {paper.markdown()}.\n" in page
        assert f"]({paper.url})" in row


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("typer")
    from dpcore.cli import main

    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(METHODS)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert all(paper.text() in text for papers in PAPERS.values() for paper in papers)
    assert main(["methods", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [paper["arxiv"] for paper in told["memf"]["papers"]] == [paper.arxiv for paper in PAPERS["memf"]]
    assert told["disk"]["summary"].startswith("DiSK: ")


# Numbers of NumPy are taken for the numbers that they hold, by every stage.


NUMBERS = {"lr": 0.1, "max_grad_norm": 0.7, "noise_multiplier": 1.5, "radius": 3.0}
SCALARS = [
    (methods.dp_sgd, {"momentum": 0.5, "base": "momentum", "weight_decay": 0.1}),
    (methods.disk, {"kappa": 0.7, "gamma": 0.5}),
    (methods.doppler, {"b": [0.25, 0.25], "a": [-0.5], "base": "adam", "betas": (0.0, 0.9), "eps": 1e-3}),
    (methods.pmlf, {"window": 2, "beta": 0.3}),
    (methods.srg_memf, {"decay": 0.25}),
    (methods.srg_memf, {"decay": [0.0, 0.25, 0.5, 0.5]}),
    (methods.dp_adam, {"variant": "scale_then_privatize", "scale_eps": 0.1, "max_scaled_norm": 2.0}),
    (methods.dp_sgd, {"schedule": (WarmupCosine, (1, 0.1)), "averaging": (ExponentialAverage, (0.9,))}),
    (methods.dp_sgd, {"adaptive_clip": (AdaptiveClip, (0.4, 0.3, 4.0))}),
]


@pytest.mark.parametrize("kind", [np.float64, np.array])
@pytest.mark.parametrize(("make", "own"), SCALARS)
def test_numpy_scalars_are_the_numbers_that_they_hold(make: Any, own: dict[str, Any], kind: Callable[..., Any]) -> None:
    """In float32 runs too, where an array of float64 does not fit."""

    def convert(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            if value and callable(value[0]):
                return value[0](*map(convert, value[1]))
            return np.array(value) if kind is not np.float64 else [np.float64(entry) for entry in value]
        return kind(value) if isinstance(value, float) else np.int64(value) if type(value) is int else value

    def plain(value: Any) -> Any:
        return value[0](*value[1]) if isinstance(value, tuple) and callable(value[0]) else value

    def run(method: Any, batch_size: Any) -> Any:
        sampler = FixedOrderSampler(dataset_size=8, batch_size=2)
        return dpcore.minimize(
            lambda x, i: np.outer(np.float32(1) + i, x).astype(np.float32), np.ones(3, np.float32), sampler,
            make(**method, batch_size=batch_size), steps=4, key=bytes(32), exact_key=True, record=True,
        )  # fmt: skip

    settings = NUMBERS | own
    expected = run({name: plain(value) for name, value in settings.items()}, 2.0)
    got = run({name: convert(value) for name, value in settings.items()}, kind(2.0))
    assert got.path.dtype == np.float32
    assert got.path.tobytes() == expected.path.tobytes()
    assert json.dumps(got.plan.method.describe()) == json.dumps(expected.plan.method.describe())
