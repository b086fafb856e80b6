"""An export holds the statement and provably none of the secret part."""

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpcore.errors import ArgumentTypeError, DataError
from dpcore.statement import Statement
from dpcore.statement.card import model_card
from dpcore.statement.verify import holds, verify
from dpcore.torch import export
from dpcore.torch.export import WRITTEN
from tests.unit.torch_runs import DATA, METHODS, finish, model, start

MARK = bytes.fromhex("c0ffee0123456789abcdef5566778899" * 2)


def run(name: str = "dp_sgd", stop: int = 4, **options: Any) -> Any:
    options = {"key": None, "exact_key": False, "sampling": "fixed_order" if "memf" in name else "poisson", **options}
    return start(model(), METHODS[name](8), stop=stop, **options)


def exported(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_files_and_what_they_say(tmp_path: Path) -> None:
    private = run()
    statement = export(private, tmp_path / "out", title="Digits | small", trained={"data": "made up", "classes": 2})
    files = exported(tmp_path / "out")
    assert sorted(files) == sorted(WRITTEN)
    assert Statement.from_json(files["statement.json"].decode()) == statement
    assert statement.steps_taken == 4
    assert holds(verify(files["statement.json"].decode()))
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: dpcore\n")
    assert "# Digits | small" in card
    for part in ("verify statement.json", "| data | made up |", "| parameters | 66 |", statement.summary(100)):
        assert part in card
    for name in ("model.safetensors", "statement.json", "statement.txt"):
        assert hashlib.sha256(files[name]).hexdigest() in card
    assert all(caveat[:40] in " ".join(card.split()) for caveat in statement.caveats)
    safetensors = pytest.importorskip("safetensors.torch")
    loaded = safetensors.load(files["model.safetensors"])
    for name, value in private.model.state_dict().items():
        assert torch.equal(loaded[name], value)


@pytest.mark.parametrize("method", ["dp_sgd", "memf tree"])
def test_no_byte_of_the_secret_part(method: str, tmp_path: Path) -> None:
    private = run(method, key=MARK, exact_key=True)
    state = private.optimizer.state_dict()["dpcore"]["secret"]
    mechanism = private._engine.mechanism
    keys = mechanism.keys
    assert keys.noise == MARK
    secrets = {"noise key": keys.noise, "sampling key": keys.sampling}
    for name, tensor in state["arrays"].items():
        secrets[name] = tensor.numpy().tobytes()[:8]
    export(private, tmp_path / "out")
    blob = b"\0".join(exported(tmp_path / "out").values())
    for name, secret in secrets.items():
        for form in (secret, secret[::-1], secret.hex().encode(), secret.hex().upper().encode()):
            assert form not in blob, name
        assert base64.b64encode(secret)[:10] not in blob, name
    sampler = mechanism.plan.sampler
    for step in range(4):
        drawn = sampler.indices(keys.sampling, step)
        if drawn.size > 2:
            for form in (drawn.astype("<i8"), drawn.astype("<i4"), drawn.astype("<i2")):
                assert form.tobytes() not in blob
            assert ", ".join(map(str, drawn)).encode() not in blob
            assert ",".join(map(str, drawn)).encode() not in blob


def test_runs_that_differ_in_secrets_alone_export_the_same_bytes(tmp_path: Path) -> None:
    one, other = run(), run()
    keys = [private._engine.mechanism.keys for private in (one, other)]
    assert keys[0].noise != keys[1].noise
    with torch.no_grad():
        for mine, theirs in zip(other.model.parameters(), one.model.parameters(), strict=True):
            mine.copy_(theirs)
    for name, private in (("one", one), ("other", other)):
        export(private, tmp_path / name)
    # Keys, drawn indices and realized sizes differ; what is released, and the settings, do not.
    assert exported(tmp_path / "one") == exported(tmp_path / "other")


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    private = run(stop=1)
    (tmp_path / "notes.md").write_text("mine")
    export(private, tmp_path)
    with pytest.raises(DataError, match=r"already has model\.safetensors; name another .* or give overwrite=True"):
        export(private, tmp_path)
    before = exported(tmp_path)["statement.json"]
    finish(private, stop=2)
    export(private, tmp_path, overwrite=True, delta=1e-4, note="Later.")
    after = json.loads(exported(tmp_path)["statement.json"])
    assert json.loads(before)["steps_taken"] + 1 == after["steps_taken"] == 2
    assert (after["delta"], after["note"]) == (1e-4, "Later.")
    assert (tmp_path / "notes.md").read_text() == "mine"
    with pytest.raises(DataError, match="is a file; name a folder"):
        export(private, tmp_path / "notes.md")


def test_a_card_takes_text_and_numbers_only() -> None:
    statement = run(stop=0).statement()
    with pytest.raises(ArgumentTypeError, match=r"trained\['key'\]=bytes: must be text or a number"):
        model_card(statement, trained={"key": MARK})
    card = model_card(statement, title="two\nlines", trained={"a|b": "c\nd", "share": 0.5})
    assert "# two lines" in card
    assert "| a\\|b | c d |" in card


def test_a_model_without_a_guarantee_says_so_first() -> None:
    statement = run(stop=1).statement()
    card = model_card(replace(statement, epsilon={"none": float("inf")}, epsilon_interval={}, attacker={}))
    assert "NOT PRIVATE: epsilon is infinite" in card.split("## What was trained")[0]


def test_half_precision_weights_are_written_as_they_are(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    net = model().bfloat16()
    net.register_buffer("count", torch.tensor(3))
    export(start(net, data=(DATA[0].bfloat16(), DATA[1])), tmp_path)
    loaded = safetensors.load((tmp_path / "model.safetensors").read_bytes())
    assert loaded.keys() == net.state_dict().keys()
    assert all(torch.equal(loaded[name], value) for name, value in net.state_dict().items())
    assert loaded["0.weight"].dtype == torch.bfloat16
