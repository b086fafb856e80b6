"""States that lie in a folder, each process's part in a file of its own: here of one process, and damage."""

import json
import os
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import DataError
from dpcore.mechanism.parts import Joined, Part
from dpcore.torch import checkpoint
from tests.unit.torch_runs import METHODS, finish, load, model, saved, start

FIXED = {"memf banded", "adam independent banded", "accelerated_srgd"}
KINDS = [
    "adaptive clip", "galore adam", "disk kalman", "uniform average", *sorted(FIXED),
]  # fmt: skip


def begin(name: str, key: int = 1) -> Any:
    return start(model(), METHODS[name](8), sampling="fixed_order" if name in FIXED else "truncated_poisson",
        key=bytes([key]) * 32)  # fmt: skip


def vectors(run: Any) -> dict[str, torch.Tensor]:
    state = run.optimizer.state_dict()["dpcore"]
    return {**state["public"]["arrays"], **state["secret"]["arrays"]}


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_holds_what_a_state_holds(name: str, tmp_path: Path):
    run = begin(name)
    finish(run, stop=3)
    run.optimizer.save_sharded(tmp_path)
    one, other = load(begin(name, 2), saved(run), fork=True), begin(name, 3)
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_sharded(tmp_path)
    assert other.steps_taken == 3
    found, expected = vectors(other), vectors(one)
    assert found.keys() == expected.keys()
    for key, vector in expected.items():
        torch.testing.assert_close(found[key], vector, rtol=0, atol=0)
    finish(other, stop=4)


def test_the_folder_is_its_owners_and_keeps_one_state(tmp_path: Path):
    folder = tmp_path / "state"
    run = begin("adam")
    for stop in (2, 4):
        finish(run, stop=stop)
        run.optimizer.save_sharded(folder)
    assert len(list(folder.iterdir())) == 2
    for path in (folder, *folder.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    again = begin("adam", 2)
    again.optimizer.load_sharded(folder)
    assert again.steps_taken == 4


def test_a_save_that_fails_leaves_the_earlier_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = begin("adam")
    finish(run, stop=2)
    run.optimizer.save_sharded(tmp_path)
    finish(run, stop=4)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    for call in ("fsync", "fdopen"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint.os, call, full)
            with pytest.raises(DataError, match="cannot be written"):
                run.optimizer.save_sharded(tmp_path)
    again = begin("adam", 2)
    again.optimizer.load_sharded(tmp_path)
    assert again.steps_taken == 2


def test_two_runs_in_one_folder_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = begin("adam"), begin("adam", 2)
    finish(second, stop=1)
    real = checkpoint._publish

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(checkpoint, "_publish", real)
        second.optimizer.save_sharded(tmp_path)
        real(*arguments)

    monkeypatch.setattr(checkpoint, "_publish", late)
    first.optimizer.save_sharded(tmp_path)
    again = begin("adam", 3)
    again.optimizer.load_sharded(tmp_path)
    assert again.steps_taken == 0
    assert len(list(tmp_path.iterdir())) == 2


def damaged(folder: Path) -> list[Any]:
    index = folder / "index.json"
    (part,) = folder.glob("*.pt")
    found = json.loads(index.read_text())

    def flip() -> None:
        with zipfile.ZipFile(part) as archive:
            held = next(archive.read(name) for name in archive.namelist() if name.endswith("data/0"))
        content = bytearray(part.read_bytes())
        content[content.index(held)] ^= 1
        part.write_bytes(content)

    def other_save() -> None:
        content = torch.load(part, weights_only=True)
        torch.save(content | {"save": "0" * 16}, part)

    def hole() -> None:
        content = torch.load(part, weights_only=True)
        content["vectors"]["public"][0][2] = 1
        torch.save(content, part)

    return [
        index.unlink,
        part.unlink,
        flip,
        other_save,
        hole,
        lambda: part.write_bytes(part.read_bytes()[:-100]),
        lambda: index.write_text("{}"),
        lambda: index.write_text(json.dumps(found | {"files": -1})),
        lambda: index.write_text(json.dumps(found | {"files": 2})),
        lambda: index.write_text(json.dumps(found | {"save": "../secrets-of-all"})),
        lambda: os.chmod(part, 0o000) if os.getuid() else part.unlink(),
    ]


def test_damage_is_named_and_changes_nothing(tmp_path: Path):
    run = begin("adam")
    finish(run, stop=2)
    before = vectors(run)
    for kind in range(11):
        run.optimizer.save_sharded(folder := tmp_path / str(kind))
        damaged(folder)[kind]()
        with pytest.raises(DataError, match="checkpoint"):
            run.optimizer.load_sharded(folder)
        assert run.steps_taken == 2
        for name, vector in vectors(run).items():
            torch.testing.assert_close(vector, before[name], rtol=0, atol=0)


def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "state").write_text("")
    run = begin("adam")
    with pytest.raises(DataError, match="cannot be made"):
        run.optimizer.save_sharded(tmp_path / "state")
    with pytest.raises(DataError, match="a folder that save_sharded wrote"):
        run.optimizer.load_sharded(tmp_path / "state")


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(sum), st.data())
def test_parts_are_read_where_they_are_asked_for(lengths: list[int], data: st.DataObject):
    ends = np.cumsum(lengths).tolist()
    whole = np.arange(ends[-1], dtype=np.float32)
    parts = [
        Part(whole[end - length : end] if length else None, end - length, len(whole), "float32")
        for end, length in zip(ends, lengths, strict=True)
    ]
    joined = Joined(data.draw(st.permutations(parts)))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    np.testing.assert_array_equal(joined[start:stop], whole[start:stop])
    np.testing.assert_array_equal(np.asarray(joined), whole)
    here = np.zeros(stop - start, np.float32)
    Part(here, start, len(whole), "float32").take(joined, np.asarray)
    np.testing.assert_array_equal(here, whole[start:stop])
