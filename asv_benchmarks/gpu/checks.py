"""The chunk of checks: the same bits twice, compute-sanitizer, and the agreement suite on the device."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dpcore.spec.backends import load_backend

from . import tensor_cores
from .record import ROOT
from .runner import Part, Setting
from .small_steps import RAN
from .steps import CASES, UNIT, WATCHED, Case, Steps, same_bits

SANITIZER_S = 120.0
SMALL_TEST = "tests/agreement/test_ops_step.py"
# Where the image keeps the tool but leaves it off the path.
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/compute-sanitizer")


def bits_of_steps(setting: Setting) -> dict[str, Any]:
    """Take each form of the step three times from one state: twice on this stream, once on another."""
    sizes = (1, 700) if setting.small else (1, 513, 1_000_003)
    names = ("momentum, philox", "sgd, banded 8") if setting.small else WATCHED
    found = {name: _bits(CASES[name], sizes, setting) for name in names}
    if different := [name for name, same in found.items() if not same]:
        raise AssertionError(f"not the same bits twice: {different}")
    where = "no second stream in the interpreter" if setting.small else "a second stream"
    return {"same": found, "steps": 2, "also_on": where}


def _bits(case: Case, sizes: tuple[int, ...], setting: Setting) -> bool:
    first = Steps(case, sizes, setting.device)
    second, third = first.copy(), first.copy()
    for steps in (first, second):
        steps.step()
        steps.step()
    if setting.small:
        return same_bits(first, second)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        third.step()
        third.step()
    torch.cuda.synchronize()
    return same_bits(first, second) and same_bits(first, third)


def bits_of_sums(setting: Setting) -> dict[str, Any]:
    """Norms and sums have one order of addition: the same bits, whichever program ends first."""
    ops = load_backend("triton")
    rows = torch.randn((3, 2000) if setting.small else (64, 1_000_003), device=setting.device)
    weights = torch.rand(len(rows), dtype=torch.float64, device=setting.device) / UNIT
    norms, sums = [], []
    for _ in range(3):
        total = torch.zeros(rows.shape[1], dtype=torch.float64, device=setting.device)
        ops.weighted_sum([rows], [weights], [total])
        norms.append(ops.row_norms([rows]))
        sums.append(total)
    if not all(torch.equal(one, many[0]) for many in (norms, sums) for one in many[1:]):
        raise AssertionError("norms or sums differ from run to run")
    return {"runs": 3}


def _small_steps(setting: Setting) -> list[str]:
    return [sys.executable, "-m", "asv_benchmarks.gpu.small_steps", *(["--small"] if setting.small else [])]


def every_kernel(setting: Setting) -> dict[str, Any]:
    """Run the sanitizer's program without it: this compiles the kernels, so that the sanitizer's time is its own."""
    status, text = _run(_small_steps(setting), dict(os.environ), setting.out / "small_steps.log", SANITIZER_S)
    if status != 0 or RAN not in text:
        raise AssertionError(f"ended with {status}: {text[-1000:]}")
    return {"status_of_command": status}


def sanitized(setting: Setting, tool: str) -> dict[str, Any]:
    """Run a few steps of every kernel under a tool of compute-sanitizer; say so if there is none."""
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if setting.small or program is None:
        return {"tool": "not run in the interpreter" if setting.small else "compute-sanitizer is not there"}
    # torch and Triton make requests that CUDA may refuse; those refusals are no errors of a kernel.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [program, "--tool", tool, *options, "--error-exitcode", "99", *_small_steps(setting)]
    # The caching allocator would hand out parts of one large block, in which nothing is out of bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    limit = min(SANITIZER_S, setting.left - 5)
    status, text = _run(command, environment, setting.out / f"{tool}.log", limit)
    said = [line for line in text.splitlines() if re.search(r"SUMMARY|=+ (Error|Invalid|Race|Warning)", line)][:20]
    if status is None:
        raise AssertionError(f"not through in {limit:.0f} s; see {tool}.log: {said}")
    if status != 0 or RAN not in text:
        raise AssertionError(f"ended with {status}, see {tool}.log: {said or text[-1000:]}")
    return {"tool": program, "command_of_tool": " ".join(command), "status_of_command": status, "said": said}


def agreement(setting: Setting) -> dict[str, Any]:
    """Run the tests marked gpu with the device, for as long as the chunk lasts."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--hypothesis-profile=dev"]
    environment = dict(os.environ)
    if setting.small:
        command += [SMALL_TEST, "-k", "recurrences and triton"]
    else:
        environment["DPCORE_TEST_GPU"] = "1"
        command += ["-m", "gpu", "tests"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(min(8, os.cpu_count() or 1))]  # compiling takes most of it
    limit = setting.left - 10
    status, text = _run(command, environment, setting.out / "pytest.log", limit)
    outcomes = _outcomes(text)
    found = {
        "command_of_tests": " ".join(command),
        "status_of_command": status,
        "outcomes": outcomes,
        "failed_tests": sorted(set(re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", text, re.MULTILINE)))[:100],
        "last_line": text.strip().splitlines()[-1] if text.strip() else "",
    }
    if status is None:
        return {**found, "remark": f"ended after {limit:.0f} s: the outcomes are of the tests that were through"}
    if status != 0 or not outcomes.get("PASSED"):
        raise AssertionError(
            f"pytest ended with {status}: {found['last_line']}; {found['failed_tests']}; see pytest.log"
        )
    return found


def _outcomes(text: str) -> dict[str, int]:
    """Count outcomes in what pytest -v says as it goes: a run that was ended has no summary."""
    plain = r"^tests/.*? (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b"
    distributed = r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b"
    return dict(Counter(a or b for a, b in re.findall(f"{plain}|{distributed}", text, re.MULTILINE)))


def _run(command: list[str], environment: dict[str, str], log: Path, limit: float) -> tuple[int | None, str]:
    """Run a program for at most `limit` seconds. Return its exit status, None at the limit, and its output."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    return status, log.read_text(errors="replace")


def parts(setting: Setting) -> list[Part]:
    """Return the parts; the suite last, for it takes what time there is."""
    return [
        Part("tensor cores round as norms assume", tensor_cores.rounding, 120),
        Part("the same bits twice: steps", bits_of_steps, 120),
        Part("the same bits twice: norms and sums", bits_of_sums, 60),
        Part("every kernel", every_kernel, SANITIZER_S + 10),
        Part("memcheck", partial(sanitized, tool="memcheck"), SANITIZER_S + 10),
        Part("racecheck", partial(sanitized, tool="racecheck"), SANITIZER_S + 10),
        Part("agreement suite", agreement, 480),
    ]
