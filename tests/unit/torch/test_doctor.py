"""The doctor on planted faults and on honest models, with nothing left behind."""

import json
import random
import re

import numpy as np
import pytest
import torch

from dpcore.errors import DpcoreError
from dpcore.ledger import Ledger
from dpcore.torch.doctor import doctor
from dpcore.torch.doctor.finding import of_error
from dpcore.torch.model.state_probe import Snapshot
from tests.unit.torch.doctor_models import FAULTS, HONEST, TOLD


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_named(name):
    check, build = FAULTS[name]
    found = doctor(**build(), audit=False)
    assert not found.ok
    named = [f for f in found.faults if f.name == check]
    if check in TOLD:
        named += [f for f in found.faults if f.name == "make_private" and re.search(TOLD[check], f.sentence)]
    assert named, str(found)
    assert all(finding.remedy for finding in found.faults), str(found)


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_model_passes(name):
    found = doctor(**HONEST[name](), audit=False)
    assert found.ok, str(found)
    done = {finding.name for finding in found if finding.status in ("ok", "remark")}
    assert {"layers", "plan", "gradients", "unused parameters", "loss", "clip norm"} <= done


def state_of(objects):
    """Everything that the doctor might change, in a form that compares."""
    model, data = objects["model"], objects["data"]
    return {
        "model": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "gradients": [p.grad for p in model.parameters()],
        "requires": [p.requires_grad for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "data": {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in getattr(data, "__dict__", {}).items()},
        "tensors": [tensor.clone() for tensor in data] if isinstance(data, tuple) else None,
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002
        "python": random.getstate(),
    }


@pytest.mark.parametrize(
    "build",
    [
        HONEST["dropout"],
        HONEST["mixed_dtypes"],
        HONEST["frozen_batch_norm"],
        HONEST["augmented_data"],
        FAULTS["counter_in_the_model"][1],
        FAULTS["running_mean_in_a_buffer"][1],
        FAULTS["data_that_go_on"][1],
        FAULTS["batch_norm"][1],
    ],
)
def test_everything_is_left_as_it_was(build):
    objects = build()
    before = state_of(objects)
    values = [(p, p.data_ptr()) for p in objects["model"].parameters()]
    doctor(**objects, seconds=4, audit=build in (HONEST["dropout"], HONEST["mixed_dtypes"]))
    after = state_of(objects)
    assert Snapshot(before).changed(Snapshot(after)) is None
    assert all(
        p is q and p.data_ptr() == place for (p, place), q in zip(values, objects["model"].parameters(), strict=True)
    )


def test_the_comparison_above_sees_a_change():
    objects = HONEST["dropout"]()
    before = state_of(objects)
    with torch.no_grad():
        objects["model"][0].weight[0, 0] += 1e-6
    assert Snapshot(before).changed(Snapshot(state_of(objects))) is not None


def test_no_ledger_is_opened_and_nothing_is_spent(tmp_path):
    ledger = Ledger.create(tmp_path / "own.ledger", budget=(1.0, 1e-5))
    found = doctor(**HONEST["logistic"](), audit=False, ledger=ledger, data_id="mine", run_name="mine", key=bytes(32))
    assert found.ok
    assert Ledger.open(tmp_path / "own.ledger").runs() == ()


def test_a_method_may_be_left_out():
    objects = HONEST["logistic"]()
    found = doctor(objects["model"], objects["data"], audit=False)
    assert found.ok
    assert any("no method was given" in finding.sentence for finding in found)
    columns = HONEST["mapping_of_inputs"]()
    found = doctor(columns["model"], columns["data"], audit=False)
    assert re.search("steps of about 24 of 24 examples", found.named("plan")[0].sentence), str(found)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([])

    (refusal,) = [f for f in doctor(objects["model"], Stream(), audit=False).faults if f.name == "data"]
    assert "map-style" in refusal.remedy


def test_views_of_an_example_are_not_examples():
    found = doctor(**HONEST["augmented_data"](), audit=False)
    assert found.named("clip norm")[0].sentence.startswith("gradients of 24 examples")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"model": 3}, "model='int'"),
        ({"method": "disk"}, "method='disk'"),
        ({"seconds": 0}, "seconds=0"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"epoch": 3}, "epoch: is no keyword"),
    ],
)
def test_bad_input_is_one_sentence(more, told):
    with pytest.raises(DpcoreError, match=re.escape(told)):
        doctor(**{**HONEST["logistic"](), **more})


def test_findings_print_the_faults_first_and_as_json():
    found = doctor(**FAULTS["rows_of_nan"][1](), audit=False)
    text = str(found)
    assert text.startswith("fault      finite values*: data[0]: some values are not finite")
    assert text.endswith("keep them as secret as the data.")
    assert repr(found) == text
    assert not found.ok
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert written["counts"]["fault"] == 2  # the values, and the gradients that they make
    assert {"status", "name", "sentence", "remedy", "private", "details"} == set(written["findings"][0])


@pytest.mark.parametrize(
    ("text", "sentence", "remedy"),
    [
        ("x=3: must be at least 4", "x=3.", "must be at least 4"),
        ("module 'a' (B) mixes: use C; see D", "module 'a' (B) mixes.", "use C; see D"),
        ("it fails (Error: index 3): check labels", "it fails (Error: index 3).", "check labels"),
        ("a: b; c", "a.", "b; c"),
        ("nothing to split", "nothing to split.", ""),
    ],
)
def test_a_refusal_is_split_into_what_is_and_what_to_do(text, sentence, remedy):
    finding = of_error(ValueError(text))
    assert (finding.sentence, finding.remedy) == (sentence, remedy)
