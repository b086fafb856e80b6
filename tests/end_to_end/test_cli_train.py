"""`dpcore train` as a user runs it: the folder it leaves, what it says, and what it never says."""

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpcore import accounting
from dpcore.cli.datasets import load
from dpcore.cli.gradients import load_gradients
from dpcore.ledger import Ledger
from dpcore.spec.keys import RunKeys
from dpcore.statement import Statement
from tests.end_to_end.command_line import ask, say

FILES = {"README.md", "config.json", "metrics.jsonl", "statement.json", "statement.txt",
    "model.safetensors"}  # fmt: skip


def weights(folder: Path) -> dict[str, np.ndarray]:
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(content[8 + size :][slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in header.items()
    }


def test_a_run_leaves_what_it_says(tmp_path):
    out = tmp_path / "run"
    told = ask("train", "--method", "disk", "--epsilon", "3", "--epochs", "2", "--lr", "0.1", "--out", str(out))
    assert {path.name for path in out.iterdir()} == FILES
    statement = Statement.from_json((out / "statement.json").read_text())
    assert told["status"] == "complete"
    assert told["statement"] == statement.to_dict()
    assert (out / "statement.txt").read_text() == statement.text()
    assert statement.steps_taken == statement.steps_planned == 46
    assert statement.method["name"] == "disk"

    # The epsilon is that of the event, and the event is that of the settings in config.json.
    event = accounting.Event.from_dict(statement.event)
    assert isinstance(event, accounting.PoissonSampledGaussian)
    assert event.steps == 46
    assert event.sample_rate == pytest.approx(64 / 1438, rel=1e-6)
    assert 2.99 < accounting.epsilon(event, 1e-5) == statement.epsilon["pld"] <= 3
    config = json.loads((out / "config.json").read_text())["settings"]
    assert (config["method"], config["batch_size"], config["lr"], config["seed"]) == ("disk", 64, 0.1, 0)

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 23), (2, 46)]
    assert lines[0]["epsilon"] < lines[1]["epsilon"] == statement.epsilon["pld"]

    # The weights in the folder have the accuracy that the folder states.
    digits, model = load(), weights(out)
    logits = digits.test_inputs.reshape(-1, 64) @ model["1.weight"].T + model["1.bias"]
    assert np.mean(logits.argmax(1) == digits.test_targets) == lines[1]["test_accuracy"] == told["test_accuracy"]


def test_nothing_secret_is_in_the_folder_or_on_the_screen(tmp_path, capsys, monkeypatch):
    made: list[RunKeys] = []
    new = RunKeys.new

    def watched(*arguments: Any, **options: Any) -> RunKeys:
        made.append(new(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(RunKeys, "new", watched)
    printed = say(capsys, ["train", "--epsilon", "3", "--epochs", "1", "--out", str(tmp_path / "run")])
    (keys,) = made
    contents = [path.read_bytes() for path in (tmp_path / "run").iterdir()] + [
        printed.out.encode(),
        printed.err.encode(),
    ]
    assert len(contents) == len(FILES) + 2
    for secret in (keys.noise, keys.sampling):
        for spelling in (secret, secret.hex().encode(), base64.b64encode(secret), repr(secret).encode()):
            assert not any(spelling in content for content in contents)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert set(json.loads(lines[0])) == {
        *("epoch", "step", "epsilon", "delta", "test_accuracy", "test_loss", "learning_rate")
    }


def test_the_seed_fixes_the_initial_weights_and_never_the_noise(tmp_path, capsys):
    runs = []
    # Steps of 1e-30 are too small to move a float32: what is left is the initialization.
    for rate, seed in (("0.1", "5"), ("0.1", "5"), ("1e-30", "5"), ("1e-30", "5"), ("1e-30", "6")):
        out = tmp_path / str(len(runs))
        words = ("--model", "mlp", "--noise-multiplier", "1", "--epochs", "1", "--batch-size", "256", "--out", str(out))
        ask("train", *words, "--lr", rate, "--seed", seed)
        runs.append(weights(out))
    assert not np.array_equal(runs[0]["1.weight"], runs[1]["1.weight"])
    np.testing.assert_array_equal(runs[2]["3.weight"], runs[3]["3.weight"])
    assert not np.array_equal(runs[3]["3.weight"], runs[4]["3.weight"])


def test_a_run_without_noise_says_that_it_is_not_private(tmp_path, capsys):
    out = tmp_path / "run"
    printed = say(capsys, ["train", "--noise-multiplier", "0", "--epochs", "1", "--out", str(out)])
    assert "epsilon is infinite: this run is NOT private" in printed.out
    assert "NOT PRIVATE" in (out / "statement.txt").read_text()
    told = json.loads((out / "statement.json").read_text())["epsilon"]
    assert told == dict.fromkeys(("pld", "rdp", "gaussian"), "inf")
    assert math.isinf(float(json.loads((out / "metrics.jsonl").read_text())["epsilon"]))


@pytest.mark.gpu
def test_the_triton_backend_trains_under_the_same_guarantee(tmp_path, capsys):
    pytest.importorskip("triton")
    images = np.random.default_rng(0).random((40, 8), dtype=np.float32)
    labels = (images[:, 0] > 0.5).astype(np.int64)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images[:9], y_test=labels[:9])
    plan = ("--data", "own", "--data-dir", str(tmp_path), "--batch-size", "40", "--epsilon", "3", "--delta", "1e-3")
    told = ask("train", "--backend", "triton", *plan, "--epochs", 1, "--out", tmp_path / "run")
    assert told["statement"]["software"]["backend"] == told["settings"]["backend"] == "triton"
    assert 2.99 < told["statement"]["epsilon"]["pld"] <= 3


def test_a_run_is_repeated_from_its_own_config(tmp_path, capsys):
    toml = tmp_path / "run.toml"
    toml.write_text(
        'method = "DOPPLER"\nfilter = "f6"\nepochs = 1\nepsilon = 2\nbatch-size = 32\nclipping-groups = "per-layer"\n'
    )
    first = ask("train", "--config", str(toml), "--lr", "1/4", "--out", str(tmp_path / "one"))
    again = ask("train", "--config", str(tmp_path / "one" / "config.json"), "--out", str(tmp_path / "two"))
    assert first["settings"] == again["settings"]
    assert first["settings"]["lr"] == 0.25
    assert first["statement"]["settings_hash"] == again["statement"]["settings_hash"]


def test_a_repetition_from_config_json_is_paid_for_by_the_same_ledger(tmp_path, capsys):
    file, config = tmp_path / "people.ledger", str(tmp_path / "one" / "config.json")
    Ledger.create(file)
    words = ("--model", "logistic", "--epochs", "1", "--epsilon", "1")
    ask("train", *words, "--ledger", str(file), "--out", str(tmp_path / "one"))
    again = ask("train", "--config", config, "--out", str(tmp_path / "two"))
    assert [run.releases for run in Ledger.open(file).runs()] == [23, 23]
    assert again["statement"]["ledger"]["ledger"] == Ledger.open(file).ledger_id
    Ledger.create(tmp_path / "other.ledger")
    ask("train", "--config", config, "--ledger", str(tmp_path / "other.ledger"), "--out", str(tmp_path / "three"))
    assert len(Ledger.open(file).runs()) == 2
    file.rename(tmp_path / "moved")
    printed = say(capsys, ["train", "--config", config, "--out", str(tmp_path / "four")], 2)
    assert "does not exist" in printed.err
    assert not (tmp_path / "four").exists()


def test_own_arrays_and_the_cnn(tmp_path, capsys):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (30, 6, 7), dtype=np.uint8)
    np.savez(
        tmp_path / "own.npz", x_train=images, y_train=np.arange(30) % 3, x_test=images[:9], y_test=np.arange(9) % 3
    )
    told = ask(
        "train",
        *("--data", "own", "--data-dir", str(tmp_path), "--model", "cnn-5", "--method", "disk", "--batch-size", "6"),
        *("--noise-multiplier", "1", "--epochs", "1", "--out", str(tmp_path / "run")),
    )
    assert told["statement"]["sampler"]["dataset_size"] == 30
    assert set(told["settings"]["data_dir"]) & {"/"}


@pytest.mark.parametrize("arguments", [("--ema", "0.9"), ("--method", "accelerated_srgd")])
def test_what_is_evaluated_and_kept_is_the_methods_output(arguments: tuple[str, ...], tmp_path, capsys):
    """The average over time, or y of the accelerated method: not the parameters that training ended at."""
    out = tmp_path / "run"
    told = ask("train", *arguments, "--epsilon", "8", "--epochs", "1", "--out", str(out))
    digits, model = load(), weights(out)
    logits = digits.test_inputs.reshape(-1, 64) @ model["1.weight"].T + model["1.bias"]
    assert np.mean(logits.argmax(1) == digits.test_targets) == told["test_accuracy"]


def test_a_run_in_bf16_says_so_and_saves_float32(tmp_path):
    out, words = tmp_path / "run", ("--epsilon", "3", "--epochs", "1", "--model", "mlp")
    told = ask("train", *words, "--precision", "bf16", "--out", str(out))
    assert json.loads((out / "config.json").read_text())["settings"]["precision"] == "bf16"
    assert any("passes in bfloat16 (autocast)" in line for line in told["statement"]["caveats"])
    assert {array.dtype for array in weights(out).values()} == {np.dtype("float32")}
    repeated = ask("train", "--config", str(out / "config.json"), "--out", str(tmp_path / "again"))
    assert repeated["settings"]["precision"] == "bf16"


def test_gradients_are_recorded(tmp_path, capsys):
    out = tmp_path / "run"
    ask("train", "--epsilon", "3", "--epochs", "1", "--record-gradients", "5", "--out", str(out))
    record = load_gradients(out)
    assert record.released.shape == record.filtered.shape == (23, 5)
    assert record.dimension == 650
    ask("train", "--epsilon", "3", "--epochs", "1", "--out", str(out), "--overwrite")
    assert {path.name for path in out.iterdir()} == FILES
