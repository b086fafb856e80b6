"""The state of torch and of the processor: what it may change, and what it may not."""

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import linear_norms, linear_sum

import dpcore_numpy
import dpcore_torch
from dpcore.errors import ArgumentTypeError, BackendError
from dpcore.spec.contributions import rounding_of_linear
from dpcore.spec.ops import NoiseRow, Slot, UpdateSettings
from dpcore_torch.arithmetic import bounded
from tests.refused import refused


@pytest.fixture
def flushing():
    """This thread reads denormals as zero, after torch's workers began."""
    torch.zeros(1 << 20).double()
    assert torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


# float32 numbers that only some threads may read, times large ones.
SMALL, LARGE = np.float32(1e-39), np.float32(1e38)


@pytest.mark.parametrize("shape", [(512, 1, 1000, 300), (40, 24, 1000, 50), (64, 4, 100, 100)])
def test_denormals_count_in_norms_as_in_sums(shape: tuple[int, int, int, int], flushing: None):
    examples, time, p, q = shape
    a = torch.from_numpy(np.full((examples, time, p), SMALL))
    e = torch.from_numpy(np.full((examples, time, q), LARGE))
    norms, out = linear_norms(dpcore_torch, [a], [e], [1.0]), torch.zeros(p * q, dtype=torch.float64)
    (weights,) = dpcore_torch.clip_factors([norms], "standard", [1.0], [p * q], [rounding_of_linear(q, p)], 2.0**-36)
    linear_sum(dpcore_torch, [a], [e], [1.0], weights, out)
    assert float(norms.min()) > 1
    assert float(out.norm()) <= examples * 2.0**36
    rows = torch.from_numpy(np.full((64, 100_000), SMALL))
    assert float(dpcore_torch.row_norms([rows]).min()) >= 1e-39 * 300
    assert float(torch.from_numpy(np.array([SMALL])) * 1) == 0, "the caller's state is as it was"


def test_the_reference_refuses_a_thread_that_flushes(flushing: None):
    one = np.full((1, 1, 2), SMALL)
    with pytest.raises(BackendError, match="denormal"):
        dpcore_numpy.row_norms([one[0]])
    refused(BackendError, "denormal", linear_norms, dpcore_numpy, [one], [one], [1.0])
    index = np.zeros((1, 1), np.int64)
    refused(BackendError, "denormal", dpcore_numpy.embedding_norms, [index], [one], [1.0], 3)
    with pytest.raises(BackendError, match="denormal"):
        dpcore_numpy.tied_norms([index], [one], [1.0], [one], [np.full((1, 1, 3), SMALL)], [1.0], 3)


def test_workers_that_flush_are_refused():
    program = """
import torch, dpcore_torch
torch.set_num_threads(2)
torch.set_flush_denormal(True)
torch.zeros(1 << 20).double()
dpcore_torch.row_norms([torch.ones(2, 3)])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "BackendError: threads of torch read denormal numbers as zero" in found.stderr


def test_one_thread_does_not_end_the_arithmetic_of_another():
    inside, left, seen = threading.Event(), threading.Event(), []

    def first() -> None:
        with bounded():
            inside.set()
            left.wait(60)

    other = threading.Thread(target=first)
    enabled = torch._C._get_mkldnn_enabled()
    other.start()
    inside.wait(60)
    with bounded():
        left.set()
        other.join(60)
        seen.append(torch._C._get_mkldnn_enabled())
    assert seen == [False]
    assert torch._C._get_mkldnn_enabled() == enabled


def everything() -> list[Any]:
    """Results of the operations that make tensors."""
    rng = np.random.default_rng(4)
    a, e, rows = (torch.from_numpy(rng.normal(size=s).astype(np.float32)) for s in [(3, 30, 4), (3, 30, 5), (3, 3000)])
    out, total, zero = (torch.from_numpy(np.zeros(n)) for n in (20, 3000, 20))
    weights, key = torch.from_numpy(np.ones(3)), bytes(32)
    found = [linear_norms(dpcore_torch, [a], [e], [1.0]), dpcore_torch.row_norms([rows])]
    linear_sum(dpcore_torch, [a], [e], [1.0], weights, out)
    dpcore_torch.weighted_sum([rows], [weights], [total])
    found += [out, total, dpcore_torch.normal(key, 0, 0, 3, 5000), dpcore_torch.zeros_like(rows, "float64")]
    for dtype in (np.float32, np.float64):
        parameter = torch.from_numpy(np.ones(20, dtype))
        moments = tuple(torch.from_numpy(np.ones(20, dtype)) for _ in range(2))
        slot = Slot(parameter=parameter, total=zero, first=0, moments=moments)
        noise = NoiseRow(key, 0, 0, 1.0, "chacha20")
        dpcore_torch.step([slot], noise, 4.0, [], "adam", [UpdateSettings(learning_rate=0.1)], 1, unit=2.0**-36)
        found.append(parameter)
    return [each.numpy() for each in found]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype):
    expected, before = everything(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = everything()
    finally:
        torch.set_default_dtype(before)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def test_the_default_device_changes_nothing():
    expected = everything()
    with torch.device("meta"):
        found = everything()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_other_dtypes_are_named():
    one, ones = torch.zeros(2, 1, 3, dtype=torch.int16), torch.ones(2, dtype=torch.bfloat16)
    refused(ArgumentTypeError, "int16", linear_norms, dpcore_torch, [one], [one], [1.0])
    refused(ArgumentTypeError, "bfloat16", dpcore_torch.clip_factors, [ones], "standard", [1.0], [3], [0.0], 1.0)


def test_autocast_around_a_step_rounds_no_product() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        with bounded():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
