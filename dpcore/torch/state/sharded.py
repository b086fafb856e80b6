"""A state in a folder, each process's part in a file of its own.

The file ``<save>-<rank>.pt`` holds a process's parts of vectors, the first one all else; the index names the save that
counts. It is replaced last, so that a crash leaves the earlier save or the new one. No file is a pickle of anything but
tensors and plain values (`torch.load` with ``weights_only``), which `torch.distributed.checkpoint` does not promise.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from dpcore.errors import DataError
from dpcore.mechanism.parts import Joined, Part
from dpcore.mechanism.peers import Peers, by_the_first
from dpcore.torch.state.checkpoint import save_bytes, save_state

T = TypeVar("T")

FORMAT = 1
INDEX = "index.json"
_PARTS = ("public", "secret")


def write(folder: Path, state: Mapping[str, Any], peers: Peers) -> None:
    """Write a state whose vectors are `Part`; all processes must ask."""
    save: str = peers.same(os.urandom(8).hex())
    by_the_first(peers, lambda: _make(folder), sent=False)
    vectors: dict[str, list[list[Any]]] = {part: [] for part in _PARTS}
    rest = {**state, "dpcore": {**state["dpcore"]}}
    for part, kept in vectors.items():
        arrays = state["dpcore"][part]["arrays"]
        held = {name: array for name, array in arrays.items() if isinstance(array, Part)}
        kept += [[n, array.here, array.start, array.size, array.dtype] for n, array in held.items()]
        others = {name: array for name, array in arrays.items() if name not in held}
        rest["dpcore"][part] = {**state["dpcore"][part], "arrays": others}
    content = {"save": save, "vectors": vectors, "state": rest if peers.rank == 0 else None}
    _together(peers, lambda: save_state(folder / f"{save}-{peers.rank}.pt", content))
    by_the_first(peers, lambda: _publish(folder, save, peers.world_size), sent=False)


def read(folder: Path, peers: Peers) -> dict[str, Any]:
    """Return a state whose vectors are `Joined`: read where they are asked for. All processes must ask."""
    index = by_the_first(peers, lambda: _index(folder))
    assert index is not None
    return _together(peers, lambda: _read(folder, index["save"], index["files"], peers))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        raise DataError(f"checkpoint {folder}: cannot be made ({cause.strerror})") from cause


def _publish(folder: Path, save: str, files: int) -> None:
    """Let the index name this save, and remove the files of the one that it named: no other run's."""
    try:
        earlier = _index(folder)["save"]
    except DataError:
        earlier = None
    if not all((folder / f"{save}-{rank}.pt").exists() for rank in range(files)):
        raise DataError(
            f"checkpoint {folder}: not all processes see it, or another run writes there; give each its own"
        )
    index = {"format": FORMAT, "save": save, "files": files}
    save_bytes(folder / INDEX, json.dumps(index).encode())
    for path in folder.glob(f"{earlier}-*.pt") if earlier is not None else ():
        path.unlink(missing_ok=True)


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_bytes()[:1000])
        fits = index["format"] == FORMAT and isinstance(index["files"], int) and 0 < index["files"] <= 1 << 20
        fits = fits and re.fullmatch("[0-9a-f]{16}", index["save"]) is not None
    except OSError as cause:
        raise DataError(
            f"checkpoint {folder}: holds no {INDEX}; must be a folder that save_sharded wrote ({cause.strerror})"
        ) from cause
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise DataError(f"checkpoint {path}: is damaged, or of another version; take an undamaged copy")
    return dict(index)


def _read(folder: Path, save: str, files: int, peers: Peers) -> dict[str, Any]:
    held = [_file(folder / f"{save}-{rank}.pt", rank % peers.world_size == peers.rank) for rank in range(files)]
    damaged = DataError(f"checkpoint {folder}: its files do not fit each other; take an undamaged copy")
    try:
        state = held[0]["state"]
        if any(content["save"] != save for content in held):
            raise damaged
        for part in _PARTS:
            of: dict[str, list[Part]] = {}
            for content in held:
                for name, here, start, size, dtype in content["vectors"][part]:
                    of.setdefault(name, []).append(Part(here, start, size, dtype))
            state["dpcore"][part]["arrays"] |= {name: Joined(parts) for name, parts in of.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise damaged from cause
    return dict(state)


def _file(path: Path, whole: bool) -> Any:
    """Map a file into memory, and check all its bytes if `whole`: each file is looked at by one process."""
    try:
        with zipfile.ZipFile(path) as archive:
            fits = not whole or archive.testzip() is None
        if fits:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as cause:
        raise DataError(
            f"checkpoint {path}: cannot be read ({cause.strerror}); all processes must see the folder"
        ) from cause
    except Exception as cause:  # torch has many kinds
        raise DataError(f"checkpoint {path}: is damaged; take an undamaged copy") from cause
    raise DataError(f"checkpoint {path}: is damaged; take an undamaged copy")


def _together(peers: Peers, work: Callable[[], T]) -> T:
    """Do what all must do; where one fails, all raise."""
    failure: BaseException | None = None
    result: Any = None
    try:
        result = work()
    except BaseException as cause:  # noqa: BLE001 - an interruption, too: the others wait
        failure = cause
    failed = peers.added([float(failure is not None)])[0]
    if failure is not None:
        raise failure
    if failed:
        raise DataError(f"checkpoint: {failed:.0f} of {peers.world_size} processes could not read or write their part")
    found: T = result
    return found
