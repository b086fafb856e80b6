"""What launches keep for the next call belongs to the very same arrays: other ones on the same memory get their own."""

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch

import dpcore_numpy
import dpcore_triton
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore_triton.described import pattern, places
from tests.refused import refused

ROWS = 6


def views(memory: torch.Tensor) -> list[list[torch.Tensor]]:
    """Pairs of blocks (6, 4) and (6, 2) on one piece of memory."""
    flat = memory[: ROWS * 8].view(ROWS, 8)
    turned = memory[: ROWS * 4].view(4, ROWS).T
    return [
        [flat[:, :4], flat[:, 4:6]], [flat[:, 2:6], flat[:, :2]], [flat[:, ::2], flat[:, 1::4]],
        [turned, turned[:, :2]], [memory[:24].view(ROWS, 4), memory[24:36].view(ROWS, 2)],
        [memory[:24].view(ROWS, 4), memory[:12].view(ROWS, 2)], [flat[:, :4], flat[:, :2]],
    ]  # fmt: skip


def norms_and_sums(backend: Any, out: Any, blocks: Any, weights: Any, scale: Any, groups: Any) -> list[np.ndarray]:
    norms = [backend.row_norms(blocks, scale)] if groups is None else backend.group_norms(blocks, groups, scale)
    backend.clear(out)
    backend.weighted_sum(blocks, weights, out, scale)
    return [backend.to_numpy(array) for array in (*norms, *out)]


def on_host(values: Any) -> Any:
    """The same lists with NumPy's arrays in place of tensors."""
    if isinstance(values, (list, tuple)):
        return [on_host(value) for value in values]
    return values.cpu().numpy().copy() if isinstance(values, torch.Tensor) else values


def test_other_blocks_weights_scales_and_groups_on_the_same_memory() -> None:
    draw = np.random.default_rng(3)
    memory = dpcore_triton.from_numpy(draw.normal(size=64).astype(np.float32))
    out = [dpcore_triton.from_numpy(np.zeros(size)) for size in (4, 2)]
    one, other = (dpcore_triton.from_numpy(draw.uniform(size=2 * ROWS) * 2.0**20) for _ in range(2))
    factors = [dpcore_triton.from_numpy(draw.uniform(size=8).astype(np.float32)) for _ in range(2)]
    weights = [[one[:ROWS]] * 2, [one[:ROWS], other[:ROWS]], [one[::2]] * 2, [other[:ROWS], one[:ROWS]]]
    first, second = factors
    scales = [None, [None] * 2, [first[:4], None], [None, first[:2]], [first[:4], second[:2]], [first[::2], None]]
    cases = list(product(views(memory), weights, scales, [None, [0, 0], [0, 1], [1, 0]]))
    chosen = draw.choice(len(cases), 40, replace=False)
    expected = [norms_and_sums(dpcore_numpy, on_host(out), *on_host(cases[index])) for index in chosen]
    for _ in range(2):  # the second time with what the first has kept
        for index, wanted in zip(chosen, expected, strict=True):
            for got, right in zip(norms_and_sums(dpcore_triton, out, *cases[index]), wanted, strict=True):
                np.testing.assert_allclose(got, right, rtol=2.0**-16, atol=1e-12)


def test_what_was_taken_once_is_no_excuse_for_other_arguments() -> None:
    blocks = [dpcore_triton.from_numpy(np.ones((ROWS, size), np.float32)) for size in (4, 2)]
    weights = dpcore_triton.from_numpy(np.ones(ROWS))
    out = [dpcore_triton.from_numpy(np.zeros(size)) for size in (4, 2)]
    for _ in range(2):
        dpcore_triton.row_norms(blocks)
        for scale in (None, [None, None]):
            dpcore_triton.group_norms(blocks, [0, 1], scale)
            dpcore_triton.weighted_sum(blocks, [weights] * 2, out, scale)
        for groups in ([0, True], [0, 1.0], [0], [0, 2], [0, -1], ["a", "b"]):
            refused((ArgumentError, ArgumentTypeError), "must", dpcore_triton.group_norms, blocks, groups)
        refused(ArgumentError, r"len\(scale\)=1", dpcore_triton.group_norms, blocks, [0, 1], [None])
        refused(ArgumentError, r"len\(scale\)=3", dpcore_triton.weighted_sum, blocks, [weights] * 2, out, [None] * 3)
        refused(ArgumentError, r"len\(weights\)=3", dpcore_triton.weighted_sum, blocks, [weights] * 3, out)
        refused(ArgumentError, r"len\(out\)=1", dpcore_triton.weighted_sum, blocks, [weights] * 2, out[:1])
        refused(ArgumentError, "out", dpcore_triton.weighted_sum, blocks[::-1], [weights] * 2, out)
        refused(ArgumentTypeError, "rows", dpcore_triton.row_norms, [blocks[0], blocks[1].cpu().numpy()])
        refused(ArgumentError, "shares memory", dpcore_triton.weighted_sum, blocks, [weights] * 2, [out[0], out[0][:2]])
        refused(ArgumentError, r"rows=\[\]", dpcore_triton.row_norms, [])


def test_a_description_tells_all_that_a_launch_depends_on() -> None:
    memory = dpcore_triton.from_numpy(np.zeros((6, 6), np.float32))
    tensors = [memory, memory[:5], memory[1:], memory.T, memory.view(36), memory.view(4, 9), memory[:, :3], memory[::2],
               memory.view(torch.int32), memory[::2, :3], memory[:3]]  # fmt: skip
    assert len({places([tensor]) for tensor in tensors}) == len(tensors)
    assert places([memory, tensors[1]]) != places([tensors[1], memory]) != places([memory])
    assert places([memory, memory.T]) != places([memory, memory])
    if torch.cuda.is_available():
        assert places([memory[:0]]) != places([memory[:0].cpu()])
    assert places([memory, memory.cpu().numpy()]) is None
    patterns = [
        pattern(vectors) for vectors in (None, [], [None], [None] * 2, [memory], [memory, None], [None, memory])
    ]
    assert len(set(patterns)) == len(patterns)
