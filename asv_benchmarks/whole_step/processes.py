"""Fresh processes without the price of their imports: a server loads every library once and forks for each task.

A fork that nothing was computed in before is as fresh as a new process: it has no threads and no freed memory. The
allocator's settings are the server's, since glibc reads them at its start.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import warnings
from typing import Any

KEEP_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**26),
}
# torch.optim imports dynamo when it makes its first optimizer.
LIBRARIES = ("torch", "torch._dynamo", "dpcore.torch", "opacus", "opacus.validators", "fastDP")
RESULT = "result: "


class Server:
    """Runs tasks, each in its own process, with a number of threads, under the allocator "keep" or "default"."""

    def __init__(self, threads: int, allocator: str) -> None:
        number = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        kept = KEEP_PAGES if allocator == "keep" else {}
        rest = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        code = f"import sys; sys.path[:] = {sys.path!r}; from whole_step.processes import serve; serve()"
        command = [sys.executable, "-c", code]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=rest | number | kept, stdin=pipe, stdout=pipe, text=True)

    def ask(self, call: str, **task: Any) -> dict[str, Any]:
        """Return the result of a function of `whole_step`, named as "module.function", in a fresh process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": call, **task}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return dict(json.loads(line.removeprefix(RESULT)))
        raise SystemExit("the server of the benchmark ended; what it printed stands above")

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve() -> None:
    """Be a server: read tasks from standard input, one a line, and print a line for each result."""
    warnings.simplefilter("ignore")
    for name in LIBRARIES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    importlib.import_module("whole_step.workers")
    gc.collect()
    gc.freeze()  # else every collection in a child would touch, and so copy, all of it
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _work(json.loads(line))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            reason = f"the process ended with wait status {status}"
            print(RESULT + json.dumps({"refused": reason}), flush=True)
    os._exit(0)  # frozen objects would be reported as leaks


def _work(task: dict[str, Any]) -> None:
    try:
        module, _, function = task.pop("call").partition(".")
        found = getattr(importlib.import_module(f"whole_step.{module}"), function)(**task)
        print(RESULT + json.dumps(found), flush=True)
    except BaseException:  # noqa: BLE001 (the child must not return into the server's loop)
        traceback.print_exc()
        os._exit(1)
