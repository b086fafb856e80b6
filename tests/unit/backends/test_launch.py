"""Where the Triton backend runs, and what it says where it cannot."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

from dpcore.errors import ArgumentError
from dpcore.spec.backends import load_backend

ROOT = Path(__file__).resolve().parents[3]


def message_of(code: str, **environment: str) -> str:
    """Run `code` in a fresh process with both source roots on the path and no TRITON_INTERPRET of its own."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "DPCORE_BACKEND")
    }
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_backend_is_a_backend() -> None:
    from dpcore.spec.ops import Backend

    backend = load_backend("triton")
    assert backend.name == "triton"
    assert backend.arrays == "torch"
    for member in (name for name in vars(Backend) if not name.startswith("_")):
        assert hasattr(backend, member), member


REFUSALS = """
import sys
import dpcore

for missing in ("torch", "triton", "nothing"):
    sys.modules[missing] = None
    try:
        dpcore.set_backend("triton")
    except dpcore.errors.BackendError as problem:
        print(problem)
    del sys.modules[missing]
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_is_missing_is_named_with_its_remedy() -> None:
    *without, last = (line for line in message_of(REFUSALS).splitlines() if "backend='triton': " in line)
    for missing, line in zip(("torch", "triton"), without, strict=True):
        assert f"backend='triton': importing dpcore_triton failed (import of {missing} halted" in line
        assert "pip install 'dpcore[triton]'" in line
    assert "backend='triton': torch finds no CUDA device" in last
    assert "TRITON_INTERPRET=1" in last
    assert "set_backend('numpy')" in last


def test_the_interpreter_must_be_asked_for_before_triton_is_imported() -> None:
    said = message_of(
        "import triton, os; os.environ['TRITON_INTERPRET'] = '1'; import dpcore; dpcore.set_backend('triton')"
    )
    assert "TRITON_INTERPRET=1 was set after triton had been imported" in said


def test_arrays_cross_with_their_values() -> None:
    backend = load_backend("triton")
    for values in (
        np.arange(6, dtype=np.float64).reshape(2, 3).T,
        np.float32([np.nan, -0.0, np.inf]),
        np.arange(3, dtype=np.uint32),
        np.zeros((0, 4), dtype=np.float32),
        np.array(1.5, dtype=np.float32),
    ):
        values.flags.writeable = False
        sent = backend.from_numpy(values)
        assert sent.is_contiguous()
        back = backend.to_numpy(sent)
        np.testing.assert_array_equal(back, values)
        assert back.dtype == values.dtype
        sent.zero_()
        np.testing.assert_array_equal(back, values)
    zeros = backend.zeros_like(backend.from_numpy(np.ones((2, 3), dtype=np.float32)).T, "float64")
    assert zeros.dtype == torch.float64
    assert zeros.is_contiguous()
    assert zeros.shape == (3, 2)


def test_arrays_out_of_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpcore_triton import launch

    backend: Any = load_backend("triton")
    elsewhere = torch.zeros(3, device="meta" if launch.INTERPRETED else "cpu")
    with pytest.raises(ArgumentError, match=rf"rows\[1\].device={elsewhere.device}: must be on"):
        launch.common_device(rows=[backend.from_numpy(np.zeros(3)), elsewhere])
    # Keys of what is kept ask for the stream before anything is checked, and there is none elsewhere.
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ArgumentError, match=r"rows\[0\].device="):
        backend.group_norms([torch.zeros(2, 3, device="meta")], [0])


def test_tables_are_kept_and_hold_what_they_were_given() -> None:
    from dpcore_triton.launch import default_device, table

    rows, programs = [(4096, 10), (8192, 5000), (16384, 0)], [1, 2, 0]
    first = table(rows, programs, default_device())
    assert table(rows, programs, default_device())[0] is first[0]
    assert first[0].tolist() == [[0, 4096, 10], [1, 8192, 5000], [3, 16384, 0]]
    assert first[1].tolist() == [0, 1, 1]
    assert first[2] == 3
    assert table([(4096, 11), *rows[1:]], programs, default_device())[0].tolist()[0] == [0, 4096, 11]


def test_a_second_step_on_the_same_tensors_sends_its_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpcore.spec.ops import FilterCoefficients, NoiseRow, Slot, UpdateSettings

    backend, step = load_backend("triton"), sys.modules["dpcore_triton.step"]
    ones = np.ones(20, dtype=np.float32)
    x, filtered, v, scale = (backend.from_numpy(ones) for _ in range(4))
    total, n = (backend.from_numpy(np.ones(20)) for _ in range(2))
    slots = [Slot(x, total, 0, filter_state=(filtered,), moments=(v,), noise_state=(n,), scale=scale)]
    first_order = FilterCoefficients((1.0, 0.5), ())
    arguments = (2.0, (first_order,), "adagrad", [UpdateSettings(0.1)])
    options = {"unit": 2.0**-36, "correlation": first_order, "square": "separate"}
    noises = [(NoiseRow(bytes(32), row, 0, 1.0), NoiseRow(bytes(32), row, 1, 1.0)) for row in range(2)]
    backend.step(slots, noises[0][0], *arguments, 1, square_noise=noises[0][1], **options)

    def refuse(*args: object) -> None:
        raise AssertionError(f"called with {args}")

    sent: list[np.ndarray] = []
    upload = step.upload
    monkeypatch.setattr("dpcore_triton.launch.upload", refuse)
    monkeypatch.setattr(step, "common_device", refuse)
    monkeypatch.setattr(step, "upload", lambda values, device: sent.append(values) or upload(values, device))
    backend.step(slots, noises[1][0], *arguments, 2, square_noise=noises[1][1], **options)
    ((numbers,),) = [sent]
    assert numbers.nbytes < 200
    assert numbers[:2].tolist() == [1, 1]


def test_no_helper_of_kernels_returns_none() -> None:
    """Triton 3.6 compiles no such helper; 3.9 and both interpreters do, so that nothing else here would notice."""
    folder = Path(__file__).resolve().parents[3] / "backends" / "dpcore_triton"
    helpers = [
        function
        for path in folder.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and "jit" in [getattr(d, "id", "") for d in function.decorator_list]
    ]
    assert len(helpers) > 30
    for helper in helpers:
        for node in ast.walk(helper):
            nothing = isinstance(node, ast.Return) and (node.value is None or getattr(node.value, "value", 0) is None)
            assert not nothing, helper.name
