"""`dpcore curve`: certified points, pictures, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")
from dpcore import accounting, methods
from dpcore.accounting import Event, PoissonSampledGaussian
from dpcore.cli import main
from dpcore.plan.plan import Plan
from dpcore.sampling import PoissonSampler
from dpcore.spec.keys import Provenance
from dpcore.statement.build import state
from tests.end_to_end.command_line import say

PLAN = ["--sample-rate", "0.05", "--noise-multiplier", "1.1", "--steps", "30"]
EVENT = PoissonSampledGaussian(0.05, 1.1, 30)


def curve(capsys, *arguments: object) -> dict[str, Any]:
    assert main(["curve", *map(str, arguments), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_delta_over_epsilon(capsys):
    told = curve(capsys, *PLAN)
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
    told = curve(capsys, "steps", *PLAN, "--delta", 1e-5)
    x, low, high = np.array(told["points"]).T
    assert (x[0], x[-1], told["delta"]) == (1, 30, 1e-5)
    assert (low <= high).all()
    assert (np.diff(x) > 0).all()
    assert (high[1:] >= low[:-1]).all()
    assert high[-1] == accounting.epsilon(EVENT, 1e-5, "pld")
    assert told["x"] == "steps"


def test_what_an_attacker_can_do(capsys):
    told = curve(capsys, "trade-off", *PLAN)
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


@pytest.mark.parametrize("kind", ["delta", "trade-off", "steps"])
def test_pictures(kind: str, tmp_path, capsys):
    picture = tmp_path / "curve.png"
    printed = say(capsys, ["curve", kind, *PLAN, "--delta", "1e-5", "--out", str(picture)]).out
    assert printed.endswith(f"written: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curve.png"]


def test_the_curve_of_a_stored_statement(tmp_path, capsys):
    plan = Plan(methods.dp_sgd(lr=1, noise_multiplier=1.1), PoissonSampler(dataset_size=1000, batch_size=50), 30)
    statement = state(plan, 1e-5, steps_taken=15, keys=Provenance(), backend="numpy")
    path = tmp_path / "statement.json"
    path.write_text(statement.to_json())
    told = curve(capsys, "steps", "--statement", path)
    assert (told["delta"], told["points"][-1][0]) == (1e-5, 30)
    assert told["points"][-1][2] == pytest.approx(statement.epsilon_planned["pld"])
    assert Event.from_dict(told["event"]) == plan.event_after(15)
    assert main(["curve", "--statement", str(path), "--steps", "3"]) == 2
    assert "steps: must not be given with --statement" in capsys.readouterr().err
