"""`dpcore epsilon` and `dpcore calibrate` against dp-accounting, and against each other."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("typer")
pytest.importorskip("dp_accounting")
import dp_accounting

from dpcore.cli import main
from dpcore.sampling import FixedOrderSampler, PoissonSampler

ORDERS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)


def ask(*arguments: object) -> dict[str, object]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*map(str, arguments), "--json"]) == 0
    return dict(json.loads(out.getvalue()))


@given(
    rate=st.floats(1e-4, 1),
    multiplier=st.floats(0.5, 20),
    steps=st.integers(1, 5000),
    delta=st.floats(1e-10, 1e-2),
)
@settings(max_examples=15, deadline=None)
def test_epsilon_agrees_with_dp_accounting_at_its_orders(
    rate: float, multiplier: float, steps: int, delta: float
) -> None:
    told = ask(
        *("epsilon", "--sample-rate", rate, "--noise-multiplier", multiplier, "--steps", steps, "--delta", delta),
        *("--accountant", "rdp", "--orders", ",".join(map(str, ORDERS))),
    )
    accountant = dp_accounting.rdp.RdpAccountant(ORDERS)
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    accountant.compose(dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps))
    assert told["epsilon"] == pytest.approx(accountant.get_epsilon(delta), rel=1e-6)


def test_the_command_of_the_readme() -> None:
    line = "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6 --accountant rdp"
    told = ask(*line.split())
    accountant = dp_accounting.rdp.RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.1))
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, 1000))
    assert told["epsilon"] <= accountant.get_epsilon(1e-6) * (1 + 1e-9)
    assert told["epsilon"] == pytest.approx(accountant.get_epsilon(1e-6), rel=0.01)
    assert told["adjacency"] == "add-remove"


@pytest.mark.parametrize(
    "plan",
    [
        "--sample-rate 0.01 --steps 1000",
        "--dataset-size 60,000 --batch-size 256 --epochs 10",
        "--dataset-size 1438 --batch-size 64 --epochs 5 --sampling fixed-order",
        "--epochs 5 --sampling fixed-order",
    ],
)
def test_what_calibrate_says_epsilon_confirms(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = ask("calibrate", *plan.split(), "--epsilon", 3, "--delta", 1e-5)
    assert 2.999 < told["epsilon"] <= 3
    back = ask("epsilon", *plan.split(), "--noise-multiplier", repr(told["noise_multiplier"]), "--delta", 1e-5)
    assert back["epsilon"] == told["epsilon"]
    # The rounded multiplier that a person reads and types in again keeps the target too.
    assert main(["calibrate", *plan.split(), "--epsilon", "3", "--delta", "1e-5"]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    typed = first.removeprefix("noise multiplier = ")
    assert ask("epsilon", *plan.split(), "--noise-multiplier", typed, "--delta", 1e-5)["epsilon"] <= 3
    assert second == "gives epsilon = 3 at delta = 1e-5"


def test_sizes_and_epochs_mean_what_they_mean_to_the_samplers() -> None:
    line = "--dataset-size 1438 --batch-size 64 --epochs 3 --noise-multiplier 1 --delta 1e-5"
    told = ask("epsilon", *line.split())
    sampler = PoissonSampler(dataset_size=1438, batch_size=64)
    assert told["event"] == sampler.event(1.0, 3 * sampler.steps_per_epoch).to_dict()
    line = "--sampling fixed-order --dataset-size 10 --batch-size 4 --steps 7 --noise-multiplier 1 --delta 1e-5"
    order = FixedOrderSampler(dataset_size=10, batch_size=4)
    assert ask("epsilon", *line.split())["event"]["count"] == order.participations(7) == 3


def test_infinite_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    line = "epsilon --sample-rate 1/100 --steps 10 --noise-multiplier 0 --delta 1e-5"
    assert ask(*line.split())["epsilon"] == "inf"
    assert main(line.split()) == 0
    assert "there is no guarantee at all" in capsys.readouterr().out


def test_text_rounds_epsilon_up(capsys: pytest.CaptureFixture[str]) -> None:
    line = "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 1000 --delta 1e-6"
    exact = float(str(ask(*line.split())["epsilon"]))
    assert main(line.split()) == 0
    stated = float(capsys.readouterr().out.split()[2])
    assert exact <= stated <= math.nextafter(exact, 9) + 0.001
