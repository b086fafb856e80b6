"""The doctor on planted faults and on honest models, with nothing left behind."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from dpcore.torch.doctor import doctor
from tests.unit.torch.doctor_models import FAULTS, HONEST


def test_there_are_twenty_of_each():
    assert len(FAULTS) >= 20
    assert len(HONEST) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name):
    check, build = FAULTS[name]
    found = doctor(**build(), audit=False)
    assert not found.ok
    named = [finding for finding in found.faults if finding.name == check]
    assert named, str(found)
    assert all(finding.remedy for finding in found.faults)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_model_passes(name):
    if name == "lora":
        pytest.importorskip("peft", exc_type=ImportError)
    found = doctor(**HONEST[name](), audit=False)
    assert found.ok, str(found)
