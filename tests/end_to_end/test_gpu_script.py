"""`make gpu` in small form: every part that the interpreter can run, and what becomes of parts that fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")


from asv_benchmarks.benchmarks import ops_on_device
from asv_benchmarks.gpu import merge, runner, steps, training
from asv_benchmarks.gpu.record import CHUNKS, ROOT, load, save
from tests.depth import chosen

# A process runs either the interpreter or the device.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
# What a chunk's record is before its first part.
WAITING: dict[str, Any] = {"small": True, "deadline": 1e12, "machine": {}, "parts": {}}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asv_benchmarks.gpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def in_this_process(folder: Path) -> int:
    """Do what the script does, with one of the small models only."""
    small = {"mlp": training.cases(small=True)["mlp"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "cases", lambda _: small)
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
    assert kernels["host: Backend.step"]["launches"] == 1
    assert kernels["host: clip, sum, step"]["launches"] == 5
    assert result["chunks"]["checks"]["parts"]["agreement suite"]["outcomes"] == {"PASSED": 1}
    assert "nothing here is a timing" in told
    assert not (ROOT / "asv_benchmarks" / "recorded" / "gpu_small.json").exists()


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """A limit that ends before the first part begins."""
    found = script("--small", "--out", str(tmp_path), "--chunk", "kernels", "--limit", "9")
    result = json.loads((tmp_path / "gpu_small.json").read_text())
    assert "kernels: copy 1 GB" in result["left_out"], found.stdout + found.stderr
    assert set(result["chunks"]["kernels"]["parts"]) == {name.partition(": ")[2] for name in result["left_out"]}
    assert result["chunks_not_run"] == ["checks", "training"]


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


def test_a_worker_that_cannot_start_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(runner, "_worker", lambda *arguments: calls.append(arguments) or (1, "no torch"))
    runner.supervise("kernels", tmp_path, small=True, limit=100)
    assert len(calls) == 1
    assert "no torch" in load(tmp_path, "kernels")["error"]
    assert merge.main(tmp_path, None) == 1


def test_a_part_that_hangs_ends_its_process(tmp_path: Path) -> None:
    program = """
import time
from pathlib import Path
from asv_benchmarks.gpu import runner
setting = runner.Setting(Path(), True, time.time() + 100)
runner._run(runner.Part("endless", lambda setting: time.sleep(60), 0.2), setting)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
