"""The sampler as the kernels compute it, word by word: the integers of the NumPy reference, at every edge."""

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton.language as tl

from dpcore.spec import rounded_normal as law
from dpcore.spec.backends import load_backend
from dpcore_numpy import noise as reference

SIZE, ELEMENTS = 1 << 14, 1 << 9


@pytest.fixture(scope="module")
def kernels():
    load_backend("triton")
    from dpcore_triton.launch import kernel
    from dpcore_triton.noise import NUMBERS, of_rest, rest, signed, size_of

    globals().update(NUMBERS=NUMBERS, device_rest=rest, of_rest=of_rest, device_signed=signed, device_size=size_of)

    @kernel("bits")
    def quick(words, out, tables, bits, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
        i = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
        w0 = tl.load(words + i).to(tl.uint32, bitcast=True)
        w1 = tl.load(words + SIZE + i).to(tl.uint32, bitcast=True)
        k, region = device_size(w0, w1, tables)  # noqa: F821
        z = device_signed(k, w0.to(tl.int32, bitcast=True) < 0, bits)  # noqa: F821
        tl.store(out + i, z)
        tl.store(out + SIZE + i, region.to(tl.float64))

    @kernel()
    def trials(words, out, tables, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
        i = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
        block = ()
        for k in tl.static_range(16):
            block += (tl.load(words + k * SIZE + i).to(tl.uint32, bitcast=True),)
        accepted, found = of_rest(block, tables)
        tl.store(out + i, tl.where(accepted, found, -1))

    @kernel()
    def heights(strips, out, tables, SIZE: tl.constexpr, ELEMENTS: tl.constexpr):
        i = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
        numbers = (tables + NUMBERS).to(tl.pointer_type(tl.float64), bitcast=True)
        tl.store(out + i, device_rest(tl.load(strips + i), tl.load(strips + SIZE + i), numbers))  # noqa: F821

    return quick, trials, heights


def run(kernel, arrays: np.ndarray, dtype: torch.dtype, rows: int, *arguments: int) -> np.ndarray:
    """Launch a kernel on arrays (k, SIZE) of 4-byte integers; return `rows` arrays."""
    from dpcore_triton.launch import current_stream, default_device, launch
    from dpcore_triton.noise import tables_on

    device = default_device()
    sent = torch.from_numpy(np.ascontiguousarray(arrays).reshape(-1).view(np.int32)).to(device)
    out = torch.full((rows * SIZE,), -7, dtype=dtype, device=device)
    tables = tables_on(device, current_stream(device))
    launch(kernel, (SIZE // ELEMENTS,), device, sent, out, tables, *arguments, SIZE=SIZE, ELEMENTS=ELEMENTS)
    return out.cpu().numpy().reshape(rows, SIZE)


def chosen_words() -> tuple[np.ndarray, np.ndarray]:
    """First words on both sides of every column's threshold; second words whose places lie on both sides of a step."""
    draw = np.random.default_rng(1)
    w0, w1 = draw.integers(0, 2**32, (2, SIZE), dtype=np.uint32)
    column = np.tile(np.arange(1024, dtype=np.uint32), 4)
    threshold = law.tables().columns[column] >> np.uint32(10)
    near = np.clip(threshold.astype(np.int64) + np.repeat([-1, 0, 1, 2**14], 1024), 0, 2**14 - 1).astype(np.uint32)
    w0[:4096] = column | near << np.uint32(10) | w0[:4096] >> np.uint32(24) << np.uint32(24)
    # t + c on both sides of 511, at the ends of a step.
    t = draw.integers(0, 512, 8192)
    c = np.clip(511 - t + draw.integers(-1, 2, 8192), 0, 511)
    place = (c << 21) | np.where(draw.random(8192) < 0.5, 0, 2**21 - 1)
    w0[4096:12288] = w0[4096:12288] & np.uint32(0x80FFFFFF) | (t >> 2 << 24).astype(np.uint32)
    w1[4096:12288] = (place << 2 | t & 3).astype(np.uint32)
    w1[-4:] = 0, 2**32 - 1, 3, 2**32 - 4
    return w0, w1


@pytest.mark.parametrize("bits", [36, 30, 12, 0])
def test_integers_of_chosen_words(kernels, bits: int) -> None:
    w0, w1 = chosen_words()
    k, region = reference.size_of(w0, w1)
    expected = reference.signed(k, w0, bits) * 2.0**bits
    assert len(np.unique(region)) > 500
    assert (region == law.REST).any()
    got, regions = run(kernels[0], np.stack([w0, w1]), torch.float64, 2, bits)
    np.testing.assert_array_equal(regions, region)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bits", [36, 30, 0])
def test_integers_of_chosen_words_in_torchs_threads(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    from dpcore_torch import noise

    words = [w.reshape(-1, 256, 16) for w in chosen_words()]
    assert (reference.size_of(*words)[1] == law.REST).any()
    for module in (reference, noise):
        monkeypatch.setattr(module, "tile_blocks", lambda *args, part, rng: words[part])
    drawn = [draw(bytes(32), 0, 0, 0, SIZE, bits=bits, rng="philox") for draw in (noise.integers, reference.normal)]
    np.testing.assert_array_equal(drawn[0], drawn[1] * 2.0**bits)


def blocks() -> np.ndarray:
    """Blocks (16, SIZE) whose trials choose strips at both sides of every hat's end, and beyond the last one."""
    draw = np.random.default_rng(2)
    words = draw.integers(0, 2**32, (16, SIZE), dtype=np.uint32)
    ends = np.concatenate([law.tables().ends, [np.uint64(0)]])
    for trial in range(3):
        near = (draw.choice(ends, SIZE // 2) + draw.choice(np.uint64([0, 1, 2**64 - 1]), SIZE // 2)) % np.uint64(2**63)
        near = np.where(draw.random(SIZE // 2) < 0.02, np.uint64(2**63 - 1), near) << np.uint64(1)
        words[5 * trial, : SIZE // 2] = near >> np.uint64(32)
        words[5 * trial + 1, : SIZE // 2] = near & np.uint64(2**32 - 1)
        words[5 * trial + 3, : SIZE // 8] >>= np.uint32(20)  # a low v, and a high one, which no trial accepts
        words[5 * trial + 3, SIZE // 8 : SIZE // 4] |= np.uint32(0xFFFFF000)
    return words


def test_the_first_accepted_trial_of_chosen_blocks(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    words = blocks()
    again = np.zeros(16, dtype=np.uint32)  # a second attempt: strip 0, its first place, v = 0
    expected = []
    for block in words.T:
        monkeypatch.setattr(reference, "blocks_of", lambda *args, b=block: b[None] if args[3][2] < 16 else again[None])
        expected.append(reference.of_rest(bytes(32), 0, 0, 0, 0, "philox"))
    (got,) = run(kernels[1], words, torch.int64, 1)
    rejected = got == -1
    assert 100 < rejected.sum() < SIZE / 2
    np.testing.assert_array_equal(np.where(rejected, 0, got), expected)


def test_the_rest_has_the_same_bits(kernels) -> None:
    draw = np.random.default_rng(3)
    strip, place = draw.integers(0, law.STRIPS, SIZE), draw.integers(0, 2**law.FINE_BITS, SIZE)
    strip[: 2 * law.STRIPS] = np.repeat(np.arange(law.STRIPS), 2)
    place[: 2 * law.STRIPS] = np.tile([0, 2**law.FINE_BITS - 1], law.STRIPS)
    (got,) = run(kernels[2], np.stack([strip, place]).astype(np.int32), torch.float64, 1)
    np.testing.assert_array_equal(got, law.rest(strip, place))
