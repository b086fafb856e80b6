"""Histories of Opacus's accountants: what they are read as, against what Opacus says of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpcore import accounting
from dpcore.accounting import Composed, PoissonSampledGaussian, from_opacus
from dpcore.accounting.renyi import epsilon_from_rdp, event_rdp
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from tests.refused import refused

GOLDEN = Path(__file__).parents[2] / "golden"
OPACUS = json.loads((GOLDEN / "opacus.json").read_text())
NAMES = ("prv", "rdp", "gdp")
# Opacus's own orders, of its class RDPAccountant.
ORDERS = np.array([1 + x / 10 for x in range(1, 100)] + list(range(12, 64)))


def test_the_numbers_stand_in_their_places():
    assert from_opacus(OPACUS["prv"]) == PoissonSampledGaussian(sample_rate=0.05, noise_multiplier=1.1, steps=60)
    assert from_opacus(OPACUS["gdp"]) == PoissonSampledGaussian(sample_rate=0.125, noise_multiplier=0.8, steps=16)
    event = from_opacus(OPACUS["rdp"])
    phases = [PoissonSampledGaussian(0.1, noise, 10) for noise, _, _ in OPACUS["rdp"]["history"]]
    assert [noise for noise, _, _ in OPACUS["rdp"]["history"]] == pytest.approx([1.3, 1.17, 1.053, 0.9477])
    assert event == Composed(tuple(phases))
    assert from_opacus({"privacy_accountant_state_dict": OPACUS["rdp"], "module_state_dict": {}}) == event


def test_a_checkpoint_says_what_the_accountant_held():
    pytest.importorskip("torch")
    from dpcore.torch import read_opacus_checkpoint

    for name in NAMES:
        state = read_opacus_checkpoint(GOLDEN / f"opacus-{name}.pt")
        assert state["mechanism"] == name
        assert from_opacus(state) == from_opacus(OPACUS[name])


@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_beside_what_opacus_reports(delta: float):
    said = {name: OPACUS[name]["epsilons"][str(delta)] for name in NAMES}
    events = {name: from_opacus(OPACUS[name]) for name in NAMES}
    # Its prv accountant returns an upper end, which lies within twice its eps_error, 0.01, above the true value.
    low, high = accounting.epsilon_interval(events["prv"], delta)
    assert low <= said["prv"] <= high + 0.02
    rdp = epsilon_from_rdp(ORDERS, event_rdp(events["rdp"], ORDERS), delta)
    assert rdp == pytest.approx(said["rdp"], rel=1e-6)
    assert accounting.epsilon_interval(events["rdp"], delta)[1] < said["rdp"]
    # Its gdp accountant reports less than the run costs.
    assert said["gdp"] < accounting.epsilon_interval(events["gdp"], delta)[0]


def history(*entries: Any) -> dict[str, Any]:
    return {"history": list(entries), "mechanism": "rdp"}


def test_what_is_refused():
    refused(ArgumentError, r"history=\[\]: Opacus recorded no step", from_opacus, history())
    refused(ArgumentError, r"history\[1\]: sample_rate=1.5: ", from_opacus, history((1.0, 0.1, 3), (1.0, 1.5, 3)))
    refused(ArgumentError, r"history\[0\]: noise_multiplier=nan: ", from_opacus, history((float("nan"), 0.1, 3)))
    refused(ArgumentError, r"history\[0\]: steps=0: ", from_opacus, history((1.0, 0.1, 0)))
    refused(ArgumentTypeError, r"history\[0\]: steps=2.5: ", from_opacus, history((1.0, 0.1, 2.5)))
    refused(ArgumentTypeError, r"history\[0\]=\(1.0, 0.1\): must be \(noise", from_opacus, history((1.0, 0.1)))
    refused(ArgumentTypeError, "history='abc'", from_opacus, {"history": "abc"})
    refused(ArgumentTypeError, r"this one has \['model'\]", from_opacus, {"model": 1})
    refused(ArgumentTypeError, r"this one is \[1\]", from_opacus, [1])


class Runs:
    """An object whose unpickling does something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path("executed"), "x")


def test_a_file_that_holds_objects_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch = pytest.importorskip("torch")
    from dpcore.torch import read_opacus_checkpoint

    monkeypatch.chdir(tmp_path)
    torch.save({**history((1.0, 0.1, 3)), "more": Runs()}, "objects.pt")
    refused(DataError, "objects.pt: .* never unpickled", read_opacus_checkpoint, "objects.pt")
    assert not Path("executed").exists()
    torch.save({"model": torch.zeros(1)}, "other.pt")
    refused(DataError, r"other.pt: must be .* has \['model'\]", read_opacus_checkpoint, "other.pt")
    Path("half.pt").write_bytes(Path("other.pt").read_bytes()[:300])
    refused(DataError, "half.pt: cannot be read", read_opacus_checkpoint, "half.pt")
    refused(DataError, "none.pt: No such file", read_opacus_checkpoint, "none.pt")
    torch.save(history((1.0, 0.1, 3)), "old.pt", _use_new_zipfile_serialization=False)
    assert from_opacus(read_opacus_checkpoint("old.pt")) == PoissonSampledGaussian(0.1, 1.0, 3)
