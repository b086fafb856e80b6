"""NumPy archives: what is written is read; what is damaged is refused, or comes back true."""

from __future__ import annotations

import contextlib
import functools
import io
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpcore.cli import datasets
from dpcore.cli.datasets import KEYS
from dpcore.cli.gradients import load_gradients, save_gradients
from dpcore.errors import ArgumentError, DataError
from tests.refused import refused

read_npz = functools.partial(datasets.read_arrays, keys=KEYS, optional=("classes",))
FILES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {"x_train": generator.integers(0, 256, (6, 4, 4), dtype=np.uint8), "y_train": np.arange(6) % 3,
        "x_test": generator.integers(0, 256, (3, 4, 4), dtype=np.uint8), "y_test": np.arange(3)}  # fmt: skip


def packed(save: Any = np.savez_compressed, **changes: Any) -> bytes:
    file = io.BytesIO()
    save(file, **{key: value for key, value in (arrays() | changes).items() if value is not None})
    return file.getvalue()


def same(read: dict[str, np.ndarray]) -> bool:
    return all(read[key].dtype == v.dtype and np.array_equal(read[key], v) for key, v in arrays().items())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_read_back(tmp_path, save: Any):
    path = tmp_path / "data.npz"
    path.write_bytes(packed(save, classes=np.int64(7)))
    read = read_npz(path)
    assert set(read) == {*KEYS, "classes"}
    assert same(read)


@given(compressed=st.booleans(), data=st.data())
@settings(FILES, max_examples=300)
def test_a_cut_archive_is_refused_and_a_damaged_one_too_or_true(tmp_path, compressed: bool, data: st.DataObject):
    content = bytearray(packed(np.savez_compressed if compressed else np.savez))
    path = tmp_path / "data.npz"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(DataError, "data", read_npz, path)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert same(read_npz(path))


def test_a_shape_that_hides_a_part_of_the_data_is_refused(tmp_path):
    # numpy.load returns the first four rows without a word: the checksum is right, the header is not.
    member = io.BytesIO()
    np.save(member, arrays()["x_train"])
    shortened = member.getvalue().replace(b"(6, 4, 4)", b"(4, 4, 4)")
    source, path = io.BytesIO(packed()), tmp_path / "data.npz"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, shortened if name == "x_train.npy" else old.read(name))
    assert len(np.load(path)["x_train"]) == 4
    refused(DataError, "x_train has more data than its header states", read_npz, path)


def test_a_pickle_is_never_loaded(tmp_path):
    ran = []

    class Trap:
        def __reduce__(self) -> Any:
            return ran.append, (1,)

    path = tmp_path / "data.npz"
    path.write_bytes(packed(x_test=np.array([Trap()], dtype=object)))
    refused(DataError, "x_test holds Python objects", read_npz, path)
    assert not ran


def test_messages_name_what_is_missing(tmp_path):
    path = tmp_path / "data.npz"
    refused(DataError, "no such file", read_npz, path)
    refused(DataError, "cannot be read", read_npz, tmp_path)
    path.write_bytes(packed(y_test=None, x_train=None))
    refused(DataError, r"lacks x_train, y_test; it holds x_test, y_train, and must hold", read_npz, path)
    path.write_text("nonsense")
    refused(DataError, "is not a", read_npz, path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    path.write_bytes(packed(x_train=np.zeros(10_000_000, np.uint8)))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(datasets, "MOST_BYTES", 1_000_000)
    tracemalloc.start()
    refused(DataError, r"bomb\.npz: unpacks to 10,000,\d+ bytes; must be at most 1,000,000", read_npz, path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    # A directory that states less than there is: no more than it states is unpacked, and the checksum tells.
    content = bytearray(path.read_bytes())
    start = content.rindex(b"PK\x01\x02", 0, content.rindex(b"x_train.npy"))
    content[start + 24 : start + 28] = (1000).to_bytes(4, "little")
    path.write_bytes(content)
    tracemalloc.reset_peak()
    refused(DataError, "truncated or corrupt", read_npz, path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    # What is not compressed is as large on the disk, and is taken.
    path.write_bytes(packed(np.savez, x_train=np.zeros(2_000_000, np.uint8)))
    assert read_npz(path)["x_train"].size == 2_000_000


# gradients.npz: written whole, read back the same, and refused in one sentence where it is damaged.


def record(**changes: object) -> dict[str, object]:
    g = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    whole = {"released": g, "filtered": g / 2, "negative_share": np.array([np.nan, 0, 0.25, 0.5, 1, 0], np.float32),
        "dimension": 10, "noise_std": 0.1}  # fmt: skip
    return {**whole, **changes}


def save_record(path: Path, **changes: object) -> Path:
    return save_gradients(path, **record(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("white", [True, False])
def test_what_is_saved_is_loaded(tmp_path, white: bool):
    assert save_record(tmp_path, white_noise=white) == tmp_path / "gradients.npz"
    assert [path.name for path in tmp_path.iterdir()] == ["gradients.npz"]
    for place in (tmp_path, tmp_path / "gradients.npz"):
        back = load_gradients(place)
        for key, value in record(white_noise=white).items():
            np.testing.assert_array_equal(getattr(back, key), value)
        assert back.released.dtype == back.filtered.dtype == back.negative_share.dtype == np.float32


@pytest.mark.parametrize(("changes", "said"), [
    ({"released": np.ones(6)}, r"released: has shape \(6,\)"),
    ({"released": np.ones((0, 4))}, "at least one of each"),
    ({"released": np.full((6, 4), np.nan)}, "released: holds values that are not finite"),
    ({"filtered": np.full((6, 4), 1e39)}, "filtered: holds values that are not finite"),
    ({"filtered": np.ones((6, 3))}, r"filtered: has shape \(6, 3\); must be \(6, 4\)"),
    ({"negative_share": np.ones(5)}, r"negative_share: has shape \(5,\)"),
    ({"negative_share": np.full(6, 1.5)}, r"must lie in \[0, 1\]"),
    ({"negative_share": np.full(6, -0.5)}, r"must lie in \[0, 1\]"),
    ({"dimension": 3}, "dimension=3: must be at least the 4 coordinates recorded"),
    ({"dimension": 0}, "dimension=0"), ({"noise_std": -1.0}, "noise_std=-1"),
    ({"noise_std": float("nan")}, "noise_std=nan"),
])  # fmt: skip
def test_what_does_not_fit_is_not_written(tmp_path, changes: dict[str, object], said: str):
    refused(ArgumentError, said, save_record, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_types_that_do_not_fit(tmp_path):
    refused(ArgumentError, "must be real numbers", save_record, tmp_path, released=np.array([["a"]]))
    refused(TypeError, "white_noise=1", save_record, tmp_path, white_noise=1)


def test_other_files_are_refused(tmp_path):
    refused(DataError, "no such file; `dpcore train --record-gradients N", load_gradients, tmp_path)
    file = tmp_path / "gradients.npz"
    file.write_bytes(b"not a zip")
    refused(DataError, r"is not a \.npz archive", load_gradients, tmp_path)
    np.savez(file, released=np.ones((2, 2)))
    refused(DataError, "lacks filtered, negative_share, dimension, noise_std", load_gradients, tmp_path)
    np.savez(file, **record(white_noise=True, released=np.array([[1, "a"]], dtype=object)))  # type: ignore[arg-type]
    refused(DataError, "released holds Python objects", load_gradients, tmp_path)
    np.savez(file, **record(white_noise=True, dimension=2))  # type: ignore[arg-type]
    refused(DataError, "dimension=2: must be at least the 4 coordinates", load_gradients, tmp_path)
    np.savez(file, **record(white_noise=True, noise_std=np.ones(2)))  # type: ignore[arg-type]
    refused(DataError, "size 1", load_gradients, tmp_path)
