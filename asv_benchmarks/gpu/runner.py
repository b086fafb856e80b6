"""Run a chunk's parts one after the other, so that no part takes the others with it.

The parts run in a process of their own, the worker. A part that raises is recorded and the next one follows. One that
ends the process, hangs, or leaves CUDA unusable costs the worker, and the supervisor starts another for the rest.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .record import NOT_A_TIMING, ROOT, load, machine, save

LEAST_S = 10.0  # no part is started with less time left
RESTART = 75  # a worker's exit status: CUDA is unusable in this process, continue in another
MOST_RESTARTS = 12


@dataclass(frozen=True)
class Setting:
    """The arguments of every part: a folder for its files, whether it is small, and when the chunk ends (Unix time)."""

    out: Path
    small: bool
    deadline: float

    @property
    def device(self) -> str:
        """Where tensors go."""
        return "cpu" if self.small else "cuda"

    @property
    def left(self) -> float:
        """Seconds until the chunk ends."""
        return self.deadline - time.time()


@dataclass(frozen=True)
class Part:
    """One part: its name, what it does, and the seconds after which it is given up."""

    name: str
    run: Callable[[Setting], dict[str, Any]]
    seconds: float = 90.0


def supervise(chunk: str, out: Path, *, small: bool, limit: float) -> None:
    """Run a chunk to its end or to its limit; its JSON then says of every part what became of it."""
    begin = time.time()
    (out / f"{chunk}.log").unlink(missing_ok=True)
    save(out, chunk, {
        "chunk": chunk, "command": " ".join([Path(sys.executable).name, *sys.argv]), "small": small,
        "timed": not small, **({"note": NOT_A_TIMING} if small else {}),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)), "deadline": begin + limit,
        "limit_s": limit, "machine": {}, "parts": {},
    })  # fmt: skip
    print(f"=== {chunk}: at most {limit:.0f} s", flush=True)
    reason = "the chunk's time was up"
    for _ in range(MOST_RESTARTS):
        status, complaint = _worker(chunk, out, small, begin + limit)
        record = load(out, chunk)
        running = [name for name, part in record["parts"].items() if part["status"] == "running"]
        for name in running:
            ended = f"the process ended with status {status} in this part (at its limit, or by itself): {complaint}"
            record["parts"][name] = {"status": "failed", "error": ended}
        save(out, chunk, record)
        if status == 0 or time.time() > begin + limit - LEAST_S:
            break
        if status != RESTART and not running:
            reason = f"the worker ended with status {status} outside of any part: {complaint}"
            record["error"] = reason
            break
    else:
        reason = f"{MOST_RESTARTS} workers ended early"
    for part in record["parts"].values():
        if part["status"] == "waiting":
            part.update(status="left out", reason=reason)
    record["seconds"] = time.time() - begin
    save(out, chunk, record)


def _worker(chunk: str, out: Path, small: bool, deadline: float) -> tuple[int, str]:
    """Run a worker until it ends or the time is up. Return its exit status and the end of its standard error."""
    environment = dict(os.environ)
    # triton.jit reads this variable when it decorates: it must be set before the worker's first import.
    environment.pop("TRITON_INTERPRET", None)
    if small:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    roots = [str(ROOT), str(ROOT / "backends"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, roots))
    command = [sys.executable, "-m", "asv_benchmarks.gpu", "--worker", "--chunk", chunk, "--out", str(out)]
    with (out / f"{chunk}.log").open("a+") as log:
        begin = log.tell()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log, start_new_session=True)
        try:
            status = process.wait(max(deadline - time.time(), 0) + 5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)  # in a session of its own, it did not hear of it
            raise
        log.seek(begin)
        return status, log.read()[-2000:]


def work(chunk: str, out: Path) -> int:
    """Be the worker: run the parts that nobody has run yet."""
    record = load(out, chunk)
    setting = Setting(out, record["small"], record["deadline"])
    parts = importlib.import_module(f"asv_benchmarks.gpu.{chunk}").parts(setting)
    if not setting.small:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device; --small runs Triton's interpreter")
    record["machine"] = record["machine"] or machine(setting.small)
    for part in parts:
        record["parts"].setdefault(part.name, {"status": "waiting"})
    save(out, chunk, record)
    for part in parts:
        if record["parts"][part.name]["status"] == "waiting" and setting.left > LEAST_S:
            record["parts"][part.name] = {"status": "running"}
            save(out, chunk, record)
            record["parts"][part.name] = found = _run(part, setting)
            save(out, chunk, record)
            print(f"{part.name}: {found['status']}, {found['seconds']:.1f} s {found.get('error', '')}", flush=True)
            if found["status"] == "failed" and not _usable(setting):
                return RESTART
    return 0


def _run(part: Part, setting: Setting) -> dict[str, Any]:
    """Run one part; whatever it raises is its result."""
    begin = time.perf_counter()
    # Ends the process even if the part hangs inside a call that no exception reaches.
    faulthandler.dump_traceback_later(min(part.seconds, max(setting.left, 1.0)), exit=True)
    try:
        found = {"status": "done", **part.run(setting)}
    except Exception as problem:  # noqa: BLE001 (a part that fails is a result, and the others follow)
        traceback.print_exc()
        found = {"status": "failed", "error": f"{type(problem).__name__}: {problem}"[:2000]}
    finally:
        faulthandler.cancel_dump_traceback_later()
    found["seconds"] = round(time.perf_counter() - begin, 2)
    _free(setting)
    return found


def _free(setting: Setting) -> None:
    gc.collect()
    if not setting.small and _usable(setting):
        import torch

        torch.cuda.empty_cache()


def _usable(setting: Setting) -> bool:
    """Whether CUDA still answers: after a bad access every further call of the process fails."""
    if setting.small:
        return True
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(8, device="cuda").sum().item() == 8)
    except RuntimeError:
        return False
