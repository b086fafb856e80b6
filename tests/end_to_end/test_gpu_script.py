"""`make gpu` in small form: every part that the interpreter can run, and what becomes of parts that fail."""

import json
import os
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fresh import python
from tests.refused import refused

pytest.importorskip("triton")
from asv_benchmarks.benchmarks import ops_on_device
from asv_benchmarks.gpu import checks, kernels, merge, models, runner, steps, table, training
from asv_benchmarks.gpu.record import CHUNKS, ROOT, load, save
from tests.depth import chosen

# A process runs either the interpreter or the device.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# What a chunk's record is before its first part.
SETTING = runner.Setting(Path(), True, 1e12)
WAITING: dict[str, Any] = {"small": True, "deadline": 1e12, "machine": {}, "parts": {}}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "asv_benchmarks.gpu", *arguments)


def in_this_process(folder: Path) -> int:
    """Do what the script does, with one of the small models only, and of parts that are alike only one."""
    small = {"mlp": training.cases(small=True)["mlp"]}
    # Some seconds each.
    alike = "plain, compiled", "non-private compiled", "CUDA graphs", "adamw", "philox", "banded 8", "filter of order"
    alike += "scale", "every kernel", "the same bits twice: steps", "agreement suite", "host: ", "torch adam"
    alike += "linear_sums", "normal"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "cases", lambda _: small)
        for module in (checks, kernels, training, models):
            parts = [part for part in module.parts(SETTING) if not any(words in part.name for words in alike)]
            patch.setattr(module, "parts", lambda _, parts=parts: parts)
        for chunk in CHUNKS:
            save(folder, chunk, {**WAITING, "chunk": chunk, "timed": False})
            runner.work(chunk, folder)
        return merge.main(folder, None)


@pytest.mark.slow
def test_every_chunk_runs_in_small_form(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if chosen(DEVICE == "cpu", False):
        status, told = in_this_process(tmp_path), "".join(capfd.readouterr())
    else:
        found = script("--small", "--out", str(tmp_path), "--chunk", "all")
        status, told = found.returncode, found.stdout + found.stderr
    assert status == 0, told
    result = json.loads((tmp_path / "gpu_small.json").read_text())
    assert result["small"] is True
    assert result["timed"] is False
    assert (result["failed"], result["left_out"], result["chunks_not_run"]) == ({}, {}, [])
    for chunk in CHUNKS:
        parts = result["chunks"][chunk]["parts"]
        assert parts
        assert {part["status"] for part in parts.values()} == {"done"}
        # No number of the interpreter may pass for a measurement.
        assert not any({"ms", "host_ms", "bytes_per_s", "share_of_copy_rate"} & part.keys() for part in parts.values())
        assert all(name in told.replace(" | ", ": ") for name in parts if not name.startswith("host"))
    kernels = result["chunks"]["kernels"]["parts"]
    assert kernels["step: sgd, chacha20"]["bytes"] == 16 * kernels["step: sgd, chacha20"]["coordinates"]
    if not chosen(DEVICE == "cpu", False):
        assert kernels["host: Backend.step"]["launches"] == 1
        assert kernels["host: clip, sum, step"]["launches"] == 5
        assert result["chunks"]["checks"]["parts"]["agreement suite"]["outcomes"] == {"PASSED": 1}
    assert "nothing here is a timing" in told
    assert not (ROOT / "asv_benchmarks" / "recorded" / "gpu_small.json").exists()


def test_models_are_compared_with_the_compiled_plain_step_and_the_prediction() -> None:
    name, slow = "BERT-base, T=128, B=32", {"status": "done", "peak_bytes": 3, "ms": [3.0, 3.2]}
    parts = {
        f"{name}: non-private compiled": {"status": "done", "peak_bytes": 2, "ms": [1.0, 1.0]},
        f"{name}: dpcore compiled": slow,
        f"{name}: FastDP": {"status": "done", "refused": "not installed"},
    }
    ratios = merge.ratios_of_models({"models": {"parts": parts}})
    assert ratios == {name: {"dpcore compiled": 3.1, "dpcore compiled, peak memory": 1.5}}
    text = table._models({"machine": {"gpu": "NVIDIA H200"}, "ratios_of_models": ratios}, parts)
    predicted = json.loads(table.RECORDED.read_text())[f"step of {name}, H200"]["private / plain"]
    assert f"| {name} | dpcore compiled | 3.000 / 3.200 | 3.10 | 1.50 | {predicted} |" in text
    assert f"| {name} | FastDP | not installed | - | - | - |" in text


def test_what_asv_times_on_a_device_exists_and_is_selected() -> None:
    selected = re.search(r'--bench "([^"]+)"', (ROOT / ".github" / "workflows" / "gpu.yml").read_text())
    assert selected is not None
    assert re.search(selected[1], "ops_on_device.DeviceStep.track_step")
    assert set(ops_on_device.FORMS) <= set(steps.CASES)
    assert set(steps.WATCHED) <= set(steps.CASES)
    with pytest.raises(NotImplementedError, match="CUDA device only") if DEVICE == "cpu" else nullcontext():
        ops_on_device.DeviceStep().setup(ops_on_device.FORMS[0])


def fails(setting: runner.Setting) -> dict[str, Any]:
    raise ValueError("why")


def test_a_part_that_fails_is_recorded_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [runner.Part("first", fails), runner.Part("second", lambda setting: {"found": 1})]
    monkeypatch.setattr("asv_benchmarks.gpu.checks.parts", lambda setting: parts)
    save(tmp_path, "checks", {**WAITING, "chunk": "checks"})
    assert runner.work("checks", tmp_path) == 0
    found = load(tmp_path, "checks")["parts"]
    assert found["first"]["error"] == "ValueError: why"
    assert (found["second"]["status"], found["second"]["found"]) == ("done", 1)
    assert merge.main(tmp_path, None) == 1
    assert json.loads((tmp_path / "gpu_small.json").read_text())["failed"] == {"checks: first": "ValueError: why"}


def test_a_part_that_ends_its_process_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash, then CUDA that answers no more, then the rest; a fourth part does not fit."""
    names, given = ("first", "second", "third", "fourth"), []

    def worker(chunk: str, out: Path, small: bool, deadline: float) -> tuple[int, str]:
        record = load(out, chunk)
        given.append(
            [name for name in names if record["parts"].get(name, {"status": "waiting"})["status"] == "waiting"]
        )
        for name in names:
            record["parts"].setdefault(name, {"status": "waiting"})
        turn = len(given)
        states = [("first", "running"), ("second", "failed"), ("third", "done")]
        record["parts"][states[turn - 1][0]] = {"status": states[turn - 1][1]}
        save(out, chunk, record)
        return [(-11, "a crash"), (runner.RESTART, ""), (0, "")][turn - 1]

    monkeypatch.setattr(runner, "_worker", worker)
    runner.supervise("kernels", tmp_path, small=True, limit=100)
    parts = load(tmp_path, "kernels")["parts"]
    assert given == [list(names), list(names[1:]), list(names[2:])]
    assert [parts[name]["status"] for name in names] == ["failed", "failed", "done", "left out"]
    assert "status -11" in parts["first"]["error"]
    assert "a crash" in parts["first"]["error"]


def test_a_part_that_hangs_ends_its_process(tmp_path: Path) -> None:
    program = """
import time
from pathlib import Path
from asv_benchmarks.gpu import runner
setting = runner.Setting(Path(), True, time.time() + 100)
runner._run(runner.Part("endless", lambda setting: time.sleep(60), 0.2), setting)
"""
    done = python("-c", program, seconds=50)
    assert done.returncode == 1
    assert "Timeout" in done.stderr


# What `make gpu` states of a measurement: bytes, shares, medians; and its checks, which have to notice.


BYTES = {  # docs/kernels.md: a table of its own
    "sgd, chacha20": 16, "momentum, philox": 24, "adam, no noise": 32, "adamw, chacha20": 32, "sgd, banded 8": 16 + 64,
    "adam, banded 32": 32 + 256, "adam, filter of order 2": 48, "sgd, noise by a recurrence of order 1": 32,
    "sgd, filter of order 1, displacement (as DiSK)": 28, "adam, scale": 36,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_are_those_of_the_page(name: str) -> None:
    taken = steps.Steps(steps.CASES[name], [100, 23], DEVICE)
    assert taken.bytes_moved() == BYTES[name] * 123


def with_step(change: Any) -> steps.Steps:
    """Steps whose backend takes the step and then does something more to its slots."""
    taken = steps.Steps(steps.CASES["momentum, chacha20"], [300, 9000], DEVICE)
    honest = taken.ops

    def step(slots: Any, *arguments: Any, **options: Any) -> None:
        honest.step(slots, *arguments, **options)
        change(slots)

    taken.ops = SimpleNamespace(step=step)
    return taken


def test_the_check_accepts_an_honest_step() -> None:
    assert with_step(lambda slots: None).check()["windows"] == 5


def spoil_window(slots: Any) -> None:
    slots[1].moments[0][8900:] *= 1.01


def spoil_outside(slots: Any) -> None:
    slots[1].moments[0][8000] = float("nan")


@pytest.mark.parametrize(
    ("change", "told"), [(spoil_window, "differs from the reference"), (spoil_outside, "not finite|by nan")]
)
def test_the_check_notices_what_is_wrong(change: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        with_step(change).check()


def test_the_check_notices_what_was_not_written() -> None:
    taken = steps.Steps(steps.CASES["sgd, no noise"], [30_000], DEVICE)
    honest, kept = taken.ops, taken.slots[0].parameter.clone()

    def step(slots: Any, *arguments: Any, **options: Any) -> None:
        honest.step(slots, *arguments, **options)
        slots[0].parameter[6016:6272] = kept[6016:6272]  # between the windows

    taken.ops = SimpleNamespace(step=step)
    refused(AssertionError, r"2 of 234 blocks", taken.check)
