"""Forks of the test's process with what torchrun tells its processes: they need not import torch again, for seconds."""

import contextlib
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.multiprocessing


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def leave() -> NoReturn:
    """End a process of the tests that has done its work."""
    # Not through the interpreter's end: a thread of gloo's that still holds a tensor aborts the process there, after
    # all was done (pytorch pull request 179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def as_torchrun_does(world: int, task: Callable[[int, Path], None], folder: Path) -> None:
    """Call ``task(rank, folder)`` in processes of their own; raises what one of them raises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others do not survive a fork
    try:
        torch.multiprocessing.start_processes(_told, (world, free_port(), task, folder), world, start_method="fork")
    finally:
        torch.set_num_threads(threads)


def _told(rank: int, world: int, port: int, task: Callable[[int, Path], None], folder: Path) -> None:
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in told.items()}, MASTER_ADDR="127.0.0.1")
    warnings.resetwarnings()  # no errors, as in an interpreter of its own
    task(rank, folder)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    leave()


def run_script(rank: int, folder: Path) -> None:
    """Run the folder's train.py there; what it prints goes to a file with the rank's name."""
    with contextlib.chdir(folder), Path(str(rank)).open("w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path("train.py", run_name="__main__")
