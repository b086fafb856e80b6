"""A few steps of every kernel on small arrays across the edges of blocks: what compute-sanitizer watches.

compute-sanitizer --tool memcheck python -m asv_benchmarks.gpu.small_steps
"""

from __future__ import annotations

import sys

import torch

from dpcore.spec.backends import load_backend
from dpcore.spec.ops import FilterCoefficients, RingCoefficients, UpdateSettings
from dpcore.spec.pair_ops import LinearPairs

from .steps import CASES, KEY, UNIT, WATCHED, Steps

RAN = "all kernels ran"


def steps(device: str, names: list[str], sizes: tuple[int, ...]) -> None:
    """Take two steps of each form."""
    for name in names:
        taken = Steps(CASES[name], sizes, device)
        taken.step()
        taken.step()


def plain(device: str) -> None:
    """Run the operations on single tensors, and the clip stage."""
    ops = load_backend("triton")
    for size in (1, 513, 2049):
        x, state = torch.randn(size, device=device), [torch.randn(size, device=device) for _ in range(2)]
        ops.words(KEY, 0, 0, 5, size)
        ops.normal(KEY, 0, 0, 5, size)
        ops.recurrence(x, state, FilterCoefficients(b=(0.5, 0.25, 0.25), a=(-0.2, 0.1)))
        wide = [torch.randn(size, device=device, dtype=torch.float64) for _ in range(3)]
        ops.correlate(wide[0], wide[1:], RingCoefficients((0.5, 0.25), 1))
        ops.correlate(wide[0], wide[1:], FilterCoefficients((1.0, 0.5, 0.25), (-0.2,)))
        ops.update("adam", x, torch.randn_like(x), [torch.rand_like(x), torch.rand_like(x)], UpdateSettings(0.1), 1)
        rows = [torch.randn(5, size, device=device), torch.randn(5, 7, device=device)]
        norms = ops.row_norms(rows)
        weights = ops.clip_factors([norms], "standard", [1.0], [size + 7], [0.0], UNIT)[0]
        totals = [torch.zeros(width, dtype=torch.float64, device=device) for width in (size, 7)]
        ops.weighted_sum(rows, [weights, weights], totals)


def pairs(device: str) -> None:
    """Run the operations on gradients as pairs: linear maps, embeddings, and a matrix that is both."""
    ops, examples, p, q = load_backend("triton"), 3, 17, 33
    weights = torch.rand(examples, dtype=torch.float64, device=device) / UNIT
    for length in (1, 18):
        inputs = [torch.randn(examples, length, p, device=device)]
        gradients = [torch.randn(examples, length, q, device=device)]
        tokens = [torch.randint(q, (examples, length), device=device)]
        rows = [torch.randn(examples, length, p, device=device)]
        scale, out = torch.rand(q * p, device=device) + 0.5, torch.zeros(q * p, dtype=torch.float64, device=device)
        layers = [LinearPairs(inputs, gradients, [1.0], gram) for gram in (False, True)]
        for chosen in (None, scale):
            ops.linear_norms(layers, [None, chosen])
            ops.linear_sums(layers, [weights, weights], [out, torch.zeros_like(out)], [None, chosen])
            ops.embedding_norms(tokens, rows, [1.0], q, scale=chosen)
            ops.embedding_sum(tokens, rows, [1.0], weights, out, scale=chosen)
        ops.tied_norms(tokens, rows, [1.0], inputs, gradients, [1.0], q)
        ops.tied_row_norms(tokens, rows, [1.0], torch.randn(examples, q * p, device=device), q)


def main(small: bool) -> None:
    """Run all of it, on the device or in the interpreter; there only some forms of the step."""
    device = "cpu" if small else "cuda"
    names = ["adam, filter of order 1"] if small else list(WATCHED)
    steps(device, names, (1, 700) if small else (1, 513, 5000))
    plain(device)
    pairs(device)
    if not small:
        torch.cuda.synchronize()
    print(RAN)


if __name__ == "__main__":
    main("--small" in sys.argv)
