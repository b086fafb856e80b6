"""Words of the random stream: ChaCha20 (RFC 8439) and Philox4x32-10, cut as `dpcore.spec.stream` says."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.stream import LANES, TILE, WORDS_PER_BLOCK, check_key, check_range

try:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
except ImportError:
    Cipher = None  # type: ignore[assignment,misc]

Words = NDArray[np.uint32]


def words(key: bytes, row: int, stream: int, start: int, size: int, *, part: int = 0, rng: str = "chacha20") -> Words:
    """See `dpcore.spec.ops.Backend.words`."""
    first, last = start // TILE, -(-(start + size) // TILE)
    blocks = tile_blocks(key, row, stream, first, last - first, part=part, rng=rng)
    return blocks.transpose(0, 2, 1).reshape(-1)[start - first * TILE :][:size]


def tile_blocks(
    key: bytes, row: int, stream: int, first: int, count: int, *, part: int = 0, rng: str = "chacha20"
) -> Words:
    """Return the cipher blocks of whole tiles, (count, 256, 16): tile, lane, word of the block.

    The elements of a tile are its words in the order word, lane.
    """
    check_key(key)
    check_range(row, stream, first * TILE, count * TILE, rng)
    blocks = blocks_of(key, first * LANES, count * LANES, (row, int(stream), part), rng)
    return blocks.reshape(count, LANES, WORDS_PER_BLOCK)


def blocks_of(key: bytes, counter: int, count: int, nonce: tuple[int, int, int], rng: str) -> Words:
    """Return `count` blocks of 16 words from block `counter` on, (count, 16), by the generator `rng`."""
    generate = philox_blocks if rng == "philox" else chacha20_keystream if Cipher is not None else chacha20_blocks
    return generate(key, counter, count, nonce)


def chacha20_keystream(key: bytes, counter: int, count: int, nonce: tuple[int, int, int]) -> Words:
    """The same bits as `chacha20_blocks`, from the ``cryptography`` package, about twenty times as fast."""
    if count == 0:
        return np.empty((0, WORDS_PER_BLOCK), dtype=np.uint32)
    initial = np.array([counter, *nonce], dtype="<u4").tobytes()
    encryptor = Cipher(algorithms.ChaCha20(key, initial), None).encryptor()
    out = np.empty((count, WORDS_PER_BLOCK), dtype="<u4")
    encryptor.update_into(_zeros(out.nbytes), out.data.cast("B"))
    return out.astype(np.uint32, copy=False)


def _zeros(size: int) -> bytes:
    """Return the plain text whose encryption is the keystream; small sizes, which recur, are cached."""
    return _kept_zeros(size) if size <= 1 << 21 else bytes(size)


@lru_cache(maxsize=8)
def _kept_zeros(size: int) -> bytes:
    return bytes(size)


def chacha20_blocks(key: bytes, counter: int, count: int, nonce: tuple[int, int, int]) -> Words:
    """Return `count` blocks of 16 words from block `counter` on: (count, 16). RFC 8439, section 2.3."""
    initial: list[Any] = [np.uint32(word) for word in (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)]
    initial += list(np.frombuffer(key, dtype="<u4").astype(np.uint32))
    initial += [np.arange(counter, counter + count, dtype=np.uint64).astype(np.uint32)]
    initial += [np.uint32(word) for word in nonce]
    x = [np.full(count, word, dtype=np.uint32) for word in initial]
    for _ in range(10):
        for column in range(4):
            _quarter_round(x, column, 4 + column, 8 + column, 12 + column)
        for column in range(4):
            _quarter_round(x, column, 4 + (column + 1) % 4, 8 + (column + 2) % 4, 12 + (column + 3) % 4)
    return np.stack([word + start for word, start in zip(x, initial, strict=True)], axis=1)


def _quarter_round(x: list[Words], a: int, b: int, c: int, d: int) -> None:
    """RFC 8439, section 2.1."""
    for target, source, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[target] = x[target] + x[source]
        x[mixed] = x[mixed] ^ x[target]
        x[mixed] = (x[mixed] << np.uint32(bits)) | (x[mixed] >> np.uint32(32 - bits))


def philox_blocks(key: bytes, counter: int, count: int, nonce: tuple[int, int, int]) -> Words:
    """Return `count` blocks of 16 words, (count, 16): Philox4x32-10 (Salmon et al. 2011), four calls a block."""
    c = [np.arange(4 * counter, 4 * (counter + count), dtype=np.uint64)]
    c += [np.full(4 * count, word, dtype=np.uint64) for word in nonce]
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = (int(word) for word in np.frombuffer(key[:8], dtype="<u4"))
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32).reshape(count, WORDS_PER_BLOCK)
