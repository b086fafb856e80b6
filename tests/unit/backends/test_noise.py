"""Box-Muller as the kernels compute it, word by word: within 8 ulps of the float64 definition, at every edge."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

import triton.language as tl

from dpcore.spec.backends import load_backend

SIZE = 1 << 17


@pytest.fixture(scope="module")
def box_muller_kernel():
    load_backend("triton")
    from dpcore_triton.launch import kernel
    from dpcore_triton.noise import box_muller, refine_tail

    globals().update(box_muller=box_muller, refine_tail=refine_tail)

    @kernel()
    def run(words, out, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
        i = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
        w0 = tl.load(words + i).to(tl.uint32, bitcast=True)
        w1 = tl.load(words + SIZE + i).to(tl.uint32, bitcast=True)
        w_tail = tl.load(words + 2 * SIZE + i).to(tl.uint32, bitcast=True)
        z0, z1 = box_muller(w0, w1, refine_tail(w0, w_tail))
        tl.store(out + i, z0)
        tl.store(out + SIZE + i, z1)

    return run


def definition(w0: np.ndarray, w1: np.ndarray, w_tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`dpcore.spec.ops.Backend.normal` in float64. w1 times 2^-32 is exact, and so is taking quarter turns off it."""
    low = (w0 + np.where(w0 < 4096, (w_tail + 0.5) * 2.0**-32, 0.5)) * 2.0**-32
    log_u = np.where(w0 < 2**31, np.log(low), np.log1p(-((2.0**32 - 1 - w0) + 0.5) * 2.0**-32))
    turns = w1 * 2.0**-32
    quarter = np.round(4 * turns)
    angle = 2 * np.pi * (turns - quarter / 4)
    k = quarter.astype(int) % 4
    cosine = np.choose(k, [np.cos(angle), -np.sin(angle), -np.cos(angle), np.sin(angle)])
    sine = np.choose(k, [np.sin(angle), np.cos(angle), -np.sin(angle), -np.cos(angle)])
    rho = np.sqrt(-2 * log_u)
    return rho * cosine, rho * sine


def edges() -> np.ndarray:
    """Words at which a formula changes, each with its neighbors; and words of every magnitude from both ends."""
    places = [0, 4096, 3 * 2**29, 3 * 2**30, 2**32 - 1, round(2**32 * 0.70710677), *2 ** np.arange(32)]
    places += [round(2**32 * 2.0**-e * 2**-0.5) for e in range(20)]
    near = np.add.outer(np.array(places, dtype=np.int64), np.arange(-3, 4)).reshape(-1)
    return np.unique(np.clip(np.concatenate([near, 2**32 - 1 - near]), 0, 2**32 - 1)).astype(np.uint32)


def test_normals_of_chosen_words_lie_within_8_ulps(box_muller_kernel) -> None:
    import torch

    from dpcore_triton.launch import ELEMENTS, default_device, launch

    rng = np.random.default_rng(1)
    w0, w1, w_tail = rng.integers(0, 2**32, (3, SIZE), dtype=np.uint32)
    special = edges()
    half = SIZE // 2
    w0[:half] >>= rng.integers(0, 32, half, dtype=np.uint32)
    w0[: half // 2] = ~w0[: half // 2]
    w1[::3] >>= rng.integers(0, 32, w1[::3].size, dtype=np.uint32)
    w0[1 : 1 + 4 * special.size] = np.repeat(special, 4)
    w1[-4 * special.size :] = np.repeat(special, 4)
    # Every edge of the one meets every edge of the other somewhere.
    pairs = np.stack(np.meshgrid(special[::5], special[::7])).reshape(2, -1)
    w0[half : half + pairs.shape[1]], w1[half : half + pairs.shape[1]] = pairs
    w_tail[::2] >>= rng.integers(0, 32, w_tail[::2].size, dtype=np.uint32)

    device = default_device()
    words = torch.from_numpy(np.concatenate([w0, w1, w_tail]).view(np.int32)).to(device)
    out = torch.full((2 * SIZE,), float("nan"), device=device)
    assert SIZE % ELEMENTS == 0
    # In programs as the kernels': one program of all would take the device minutes to compile, and spill.
    launch(box_muller_kernel, (SIZE // ELEMENTS,), device, words, out, SIZE=SIZE, ELEMENTS=ELEMENTS)
    got = out.cpu().numpy().reshape(2, SIZE).astype(np.float64)
    for ours, exact in zip(got, definition(w0, w1, w_tail), strict=True):
        unit = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 23)
        error = np.abs(ours - exact) / unit
        # sin and cos of a multiple of a quarter turn are 0 here and 1e-17 in float64.
        error[np.abs(exact) < 1e-15] = np.abs(ours[np.abs(exact) < 1e-15]) / 1e-15
        worst = int(np.argmax(error))
        assert error[worst] <= 8, (error[worst], w0[worst], w1[worst], w_tail[worst])
    assert np.abs(got).max() > 8.5
