"""The random stream: the words of every draw. A contract: it cannot change after the first checkpoint.

Words belong to each (key, row, stream, element), one in each part. `row` is the optimizer step, `stream` the use of the
draw, and `element` the place in the run's layout (`dpcore.spec.layout`). Elements are cut into tiles of 4096;
inside a tile, element ``r`` is word ``r // 256`` of the cipher block with counter ``256 * tile + r % 256``. So 256
neighboring elements are one word of 256 neighboring blocks, which is the order in which a GPU reads and writes them,
and any range of elements can be computed by itself: a shard, a row drawn again, a resumed run.

A normal takes its words of parts 0 and 1. The few that take more have blocks of their own: attempt a at the element of
word w has the whole block of part ``2 + 16 a + w``.

Keys are 32 bytes. With ``rng="chacha20"`` (the default) the block is RFC 8439's ChaCha20 block with the 96-bit nonce
(row, stream, part) as three little-endian words. With ``rng="philox"`` it is four calls of Philox4x32-10 keyed with the
first 64 bits: for simulations, not cryptographic.
"""

import hashlib
import hmac
import os
from enum import IntEnum
from typing import Final

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.validate import choice, integer

TILE: Final = 4096
LANES: Final = 256
WORDS_PER_BLOCK: Final = 16
KEY_BYTES: Final = 32
MAX_ROW: Final = 2**32 - 1
RNGS: Final = ("chacha20", "philox")
# Philox spends four counter values on a block, so its elements end four times earlier.
MAX_ELEMENTS: Final = {"chacha20": 2**36, "philox": 2**34}


class Stream(IntEnum):
    """The use of a draw. Numbers are never reused."""

    GRADIENT = 0
    SECOND_MOMENT = 1
    CLIP_BOUND = 2
    SAMPLING = 3


def new_key() -> bytes:
    """Return 32 fresh bytes from the operating system."""
    return os.urandom(KEY_BYTES)


def derive_key(key: bytes, info: str | bytes) -> bytes:
    """Derive an independent key by HKDF-SHA256 (RFC 5869, empty salt, one output block)."""
    check_key(key)
    label = info.encode() if isinstance(info, str) else info
    extracted = hmac.digest(bytes(32), key, hashlib.sha256)
    return hmac.digest(extracted, label + b"\x01", hashlib.sha256)


def check_key(key: bytes) -> None:
    """Refuse anything but 32 bytes, without ever printing the key."""
    if not isinstance(key, bytes):
        raise ArgumentTypeError(f"key of type {type(key).__name__}: must be {KEY_BYTES} bytes")
    if len(key) != KEY_BYTES:
        raise ArgumentError(f"key of {len(key)} bytes: must be exactly {KEY_BYTES} bytes")


def check_range(row: int, stream: int, start: int, size: int, rng: str) -> None:
    """Refuse a draw outside of the stream."""
    choice(RNGS, rng=rng)
    integer(0, row=row)
    integer(0, start=start)
    integer(0, size=size)
    if row > MAX_ROW:
        raise ArgumentError(f"row={row}: must be at most {MAX_ROW}, the last row of the stream")
    if stream not in set(Stream):
        raise ArgumentError(f"stream={stream}: must be one of {[int(s) for s in Stream]}")
    if start + size > MAX_ELEMENTS[rng]:
        raise ArgumentError(
            f"start + size = {start + size}: must be at most {MAX_ELEMENTS[rng]}, the last element of rng={rng!r}"
        )
