"""What a device adds to the operations: streams, a second device, sizes beyond 2^31, and the same bits again."""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from one_layer import linear_norms, linear_sum
from strategies import assert_agree, floats

import dpcore_numpy as reference
from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.grid import step_of
from dpcore.spec.ops import FilterCoefficients, NoiseRow, RingCoefficients, Slot, UpdateSettings
from dpcore.stages.clipping.blocks import Embedding
from tests.unit.stages.test_clip import norm_of_few

pytest.importorskip("triton")

import torch

from dpcore_triton.launch import upload

Tensors = dict[str, torch.Tensor]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KEY = bytes(range(32))
NOISE, SQUARE = NoiseRow(KEY, 3, 0, 0.7), NoiseRow(KEY, 3, 2, 0.5)
UNIT = step_of(NOISE.scale, NOISE.bits)
FILTER = FilterCoefficients((0.5, 0.25), (-0.25,))
SIZE = 1_000_001  # enough programs to run side by side: a race would show
GIB = 2**30


def inputs(size: int = SIZE, examples: int = 20) -> dict[str, np.ndarray]:
    """Arrays for every operation of a step of training."""
    rng = np.random.default_rng(11)
    vectors = {name: floats(rng, size) for name in ("parameter", "state", "m")}
    rings = {name: rng.standard_normal(size) for name in ("ring 0", "ring 1")}
    return {
        **vectors, **rings, "total": np.zeros(size),
        "v": np.abs(floats(rng, size)), "rows": floats(rng, examples, size),
        "a": floats(rng, examples, 18, 33), "e": floats(rng, examples, 18, 34), "matrix": np.zeros(33 * 34),
        "tokens": rng.integers(-1, 9, (examples, 18)), "embedding": np.zeros(9 * 34),
    }  # fmt: skip


def compute(given: Tensors) -> Tensors:
    """Clip, add up and step; clip and add up gradients of a linear map and of an embedding."""
    backend: Any = load_backend("triton")
    size = given["parameter"].numel()
    norms = {"rows": backend.row_norms([given["rows"]])}
    norms["matrix"] = linear_norms(backend, [given["a"]], [given["e"]], [1.0])
    norms["gram"] = linear_norms(backend, [given["a"]], [given["e"]], [1.0], gram=True)
    norms["embedding"] = backend.embedding_norms([given["tokens"]], [given["e"]], [1.0], 9)
    clip = ("standard", [1.0], [size], [rounding_of_rows(size)], UNIT)
    factors = {name: backend.clip_factors([each], *clip)[0] for name, each in norms.items()}
    backend.weighted_sum([given["rows"]], [factors["rows"]], [given["total"]])
    linear_sum(backend, [given["a"]], [given["e"]], [1.0], factors["matrix"], given["matrix"])
    backend.embedding_sum([given["tokens"]], [given["e"]], [1.0], factors["embedding"], given["embedding"])
    slot = Slot(
        given["parameter"], given["total"], 5, filter_state=(given["state"],), moments=(given["m"], given["v"]),
        noise_state=(given["ring 0"], given["ring 1"]),
    )  # fmt: skip
    settings = [UpdateSettings(0.1, 0.01, 0.9, 0.99, 1e-3)]
    ring = RingCoefficients((0.5, 0.25), 1)
    options = {"correlation": ring, "square": "separate", "square_noise": SQUARE}
    backend.step([slot], NOISE, 20.0, (FILTER,), "adam", settings, 2, unit=UNIT, **options)
    return given | {f"norms of {name}": each for name, each in norms.items()}


def on(device: torch.device | str | None, given: dict[str, np.ndarray]) -> Tensors:
    """Copies of arrays there, or where the backend puts them."""
    sent = {name: load_backend("triton").from_numpy(values) for name, values in given.items()}
    return sent if device is None else {name: tensor.to(device) for name, tensor in sent.items()}


def assert_same_bits(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        ours, theirs = tensor.cpu().numpy(), expected[name].cpu().numpy()
        assert np.isfinite(ours).all(), name
        assert ours.tobytes() == theirs.tobytes(), name


def test_ten_million_entries_never_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/unit/stages/test_clip.py` has the reference."""
    backend: Any = load_backend("triton")
    if INTERPRETED:
        # The interpreter pays for each program and for masked rows: one long row in few programs.
        for name, kind in (("dpcore_triton.row_norms", "SQUARED"), ("dpcore_triton.clip", "SUMMED")):
            monkeypatch.setattr(sys.modules[name], f"{kind}_ROWS", 1)
            monkeypatch.setattr(sys.modules[name], f"{kind}_COLUMNS", 1 << 17)
    row = np.full((1, 10_000_000), 0.1, np.float32)
    row[0, ::7] = 1e-3
    rows = backend.from_numpy(row)
    norms = backend.row_norms([rows])
    assert norm_of_few(row) * (1 - 1e-9) <= float(backend.to_numpy(norms)[0]) <= norm_of_few(row) * (1 + 2.0**-19)
    size, unit = row.shape[1], 2.0**-36
    weights = backend.clip_factors([norms], "standard", [1.0], [size], [rounding_of_rows(size)], unit)
    total = backend.from_numpy(np.zeros(size))
    backend.weighted_sum([rows], weights, [total], None, [1 / unit])
    assert 1 - 1e-5 < unit * norm_of_few(backend.to_numpy(total)) <= 1


# ---------------------------------------------------------------------------------------------- with a device only


@pytest.mark.cuda
def test_the_same_bits_twice() -> None:
    """The interpreter runs programs one after the other."""
    given = inputs()
    first = compute(on(None, given))
    assert not np.array_equal(first["parameter"].cpu().numpy(), given["parameter"])
    assert_same_bits(compute(on(None, given)), first)


@pytest.mark.cuda
def test_kernels_run_on_the_current_stream_after_what_is_there() -> None:
    """The inputs come late on that stream: a kernel on another one would read what was there before."""
    given = inputs()
    expected = compute(on(None, given))  # which compiles everything, so that nothing waits for that below
    whole = on(None, given)
    late = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        for name, tensor in whole.items():
            late[name].copy_(tensor)
        assert not stream.query(), "the inputs were there before the kernels: sleep longer"
        got = compute(late)
        stream.synchronize()
    assert_same_bits(got, expected)


@pytest.mark.cuda
def test_kernels_run_where_their_tensors_are() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    given = inputs()
    assert torch.cuda.current_device() == 0
    got = compute(on("cuda:1", given))
    assert torch.cuda.current_device() == 0
    assert {tensor.device for tensor in got.values()} == {torch.device("cuda:1")}
    torch.cuda.synchronize("cuda:1")
    assert_same_bits(got, compute(on("cuda:0", given)))


@pytest.mark.cuda
def test_rows_of_a_table_have_the_same_bits_twice() -> None:
    """Frequent tokens meet in one row, which is measured and then added: it must be the same both times."""
    rng = np.random.default_rng(12)
    indices = torch.from_numpy(rng.integers(0, 4, (3, 1024))).cuda()
    gradients = torch.from_numpy(rng.standard_normal((3, 1024, 256)).astype(np.float32)).cuda()
    first, *others = (Embedding((indices,), (gradients,), (1.0,), 4).rows() for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.cuda
def test_numbers_that_are_uploaded_are_read_before_their_memory_is_used_again() -> None:
    """The host is ahead of the device; a step's numbers have the scale of its noise."""
    values = np.arange(4096, dtype=np.float64)
    torch.cuda._sleep(10**9)
    uploaded = upload(values, torch.device("cuda"))
    values[:] = -1.0
    assert torch.equal(uploaded.cpu(), torch.arange(4096, dtype=torch.float64))


LARGE = 2**31 + 5000


def needs(gib: float) -> None:
    """Skip where the device has less memory free."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib * GIB:
        pytest.skip(f"needs {gib} GiB of free memory on the device; there are {free / GIB:.1f}")


def assert_parts_agree(got: torch.Tensor, expected: Callable[[int, int], tuple[np.ndarray, np.ndarray]]) -> None:
    """Hold the ends of a large array, and both sides of 2^31, to `expected(start, size)`: values, and their terms."""
    for start in (0, 2**30 - 100, 2**31 - 4096, LARGE - 5000):
        size = min(5000, LARGE - start)
        assert_agree("step", got[start : start + size].cpu().numpy(), *expected(start, size))


@pytest.mark.cuda
def test_a_step_of_more_than_2_to_the_31_elements() -> None:
    needs(27)
    parameter = torch.ones(LARGE, device="cuda")
    total = torch.full((LARGE,), 3.0 * 2.0**36, dtype=torch.float64, device="cuda")
    first = 4096 * 7 + 1003
    slot = Slot(parameter, total, first)
    load_backend("triton").step([slot], NOISE, 4.0, (), "sgd", [UpdateSettings(0.5)], 1, unit=UNIT)

    def expected(start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        part = Slot(np.ones(size, np.float32), np.full(size, 3.0 * 2.0**36), first + start)
        noise = np.abs(reference.normal(KEY, NOISE.row, NOISE.stream, first + start, size))
        reference.step([part], NOISE, 4.0, (), "sgd", [UpdateSettings(0.5)], 1, unit=UNIT)
        return part.parameter, 1 + 0.5 * NOISE.scale * (3 + noise) / 4

    assert_parts_agree(parameter, expected)
    assert (total == 3 * 2.0**36).all()


@pytest.mark.cuda
def test_the_plain_operations_on_more_than_2_to_the_31_elements() -> None:
    needs(27)
    backend: Any = load_backend("triton")
    z = backend.normal(KEY, 1, 0, 5, LARGE)
    for start in (0, 2**31 - 4096, LARGE - 5000):
        size = min(5000, LARGE - start)
        assert_agree("normal", z[start : start + size].cpu().numpy(), reference.normal(KEY, 1, 0, 5 + start, size))
    x = z.float()
    del z
    y = backend.recurrence(x, [torch.zeros_like(x)], FilterCoefficients((0.5, 0.25), ()))
    assert torch.equal(y[2**31 - 5000 :], 0.5 * x[2**31 - 5000 :])
    del y
    backend.update("sgd", x, x.clone(), [], UpdateSettings(0.5), 1)
    ends = reference.normal(KEY, 1, 0, 5 + LARGE - 5000, 5000)
    np.testing.assert_allclose(x[-5000:].cpu().numpy(), 0.5 * ends, rtol=1e-5)


@pytest.mark.cuda
def test_a_row_of_more_than_2_to_the_31_elements_is_clipped() -> None:
    needs(27)
    backend: Any = load_backend("triton")
    row = torch.full((1, LARGE), 2.0**-10, device="cuda")
    row[0, -1] = 100.0
    norms = backend.row_norms([row])
    exact = ((LARGE - 1) * 2.0**-20 + 100.0**2) ** 0.5
    assert float(norms[0]) == pytest.approx(exact, rel=(LARGE + 8) * 2.0**-53)
    unit = 2.0**-36
    (weights,) = backend.clip_factors([norms], "standard", [1.0], [LARGE], [rounding_of_rows(LARGE)], unit)
    total = torch.zeros(LARGE, dtype=torch.float64, device="cuda")
    backend.weighted_sum([row], [weights], [total])
    weight = float(weights[0])
    assert 0.999 / exact < weight * unit <= 1 / exact
    ends = total[[0, 2**31 - 1, 2**31, LARGE - 2, LARGE - 1]].tolist()
    assert ends == [*[round(weight * 2.0**-10)] * 4, round(weight * 100.0)]
