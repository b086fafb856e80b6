"""gradients.npz: written whole, read back the same, and refused in one sentence where it is damaged."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dpcore.cli.gradients import load_gradients, save_gradients
from dpcore.errors import ArgumentError, DataError
from tests.refused import refused


def content(**changes: object) -> dict[str, object]:
    g = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    whole = {"released": g, "filtered": g / 2, "negative_share": np.array([np.nan, 0, 0.25, 0.5, 1, 0], np.float32),
        "dimension": 10, "noise_std": 0.1}  # fmt: skip
    return {**whole, **changes}


def save(path: Path, **changes: object) -> Path:
    return save_gradients(path, **content(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("white", [True, False])
def test_what_is_saved_is_loaded(tmp_path, white: bool):
    assert save(tmp_path, white_noise=white) == tmp_path / "gradients.npz"
    assert [path.name for path in tmp_path.iterdir()] == ["gradients.npz"]
    for place in (tmp_path, tmp_path / "gradients.npz"):
        back = load_gradients(place)
        for key, value in content(white_noise=white).items():
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
    refused(ArgumentError, said, save, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_types_that_do_not_fit(tmp_path):
    refused(ArgumentError, "must be real numbers", save, tmp_path, released=np.array([["a"]]))
    refused(TypeError, "white_noise=1", save, tmp_path, white_noise=1)


def test_other_files_are_refused(tmp_path):
    refused(DataError, "no such file; `dpcore train --record-gradients N", load_gradients, tmp_path)
    file = tmp_path / "gradients.npz"
    file.write_bytes(b"not a zip")
    refused(DataError, r"is not a \.npz archive", load_gradients, tmp_path)
    np.savez(file, released=np.ones((2, 2)))
    refused(DataError, "lacks filtered, negative_share, dimension, noise_std", load_gradients, tmp_path)
    np.savez(file, **content(white_noise=True, released=np.array([[1, "a"]], dtype=object)))  # type: ignore[arg-type]
    refused(DataError, "released holds Python objects", load_gradients, tmp_path)
    np.savez(file, **content(white_noise=True, dimension=2))  # type: ignore[arg-type]
    refused(DataError, "dimension=2: must be at least the 4 coordinates", load_gradients, tmp_path)
    np.savez(file, **content(white_noise=True, noise_std=np.ones(2)))  # type: ignore[arg-type]
    refused(DataError, "size 1", load_gradients, tmp_path)


def test_an_array_that_claims_to_be_huge_is_refused(tmp_path):
    save(tmp_path)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 1 << 20)})
    file = tmp_path / "huge.npz"
    with zipfile.ZipFile(tmp_path / "gradients.npz") as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, header.getvalue() if name == "released.npy" else old.read(name))
    refused(DataError, "damaged", load_gradients, file)
