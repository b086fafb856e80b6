"""The random stream is a contract: RFC vectors, golden words, and every way of cutting it."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.layout import Layout
from dpcore.spec.rounded_normal import tables
from dpcore.spec.stream import Stream, derive_key, new_key
from dpcore_numpy import normal, words
from dpcore_numpy import stream as reference
from tests.refused import refused
from tests.spec.scalar_normal import first_accepted, integer_of, parts_of

KEY = bytes(range(32))
with_cryptography = pytest.mark.skipif(reference.Cipher is None, reason="could not import 'cryptography'")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "stream.json").read_text())


def test_chacha20_block_of_rfc_8439_section_2_3_2() -> None:
    nonce = tuple(np.frombuffer(bytes.fromhex("000000090000004a00000000"), dtype="<u4").tolist())
    block = reference.chacha20_blocks(KEY, 1, 1, nonce)
    expected = """e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
                  466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"""
    assert [f"{word:08x}" for word in block[0]] == expected.split()


# RFC 8439, appendix A.1: (key, counter, nonce, first four words of the block).
RFC_BLOCKS = [
    (bytes(32), 0, "000000000000000000000000", "ade0b876 903df1a0 e56a5d40 28bd8653"),
    (bytes(32), 1, "000000000000000000000000", "bee7079f 7a385155 7c97ba98 0d082d73"),
    (bytes(31) + b"\x01", 1, "000000000000000000000000", "2452eb3a 9249f8ec 8d829d9b ddd4ceb1"),
    (b"\x00\xff" + bytes(30), 2, "000000000000000000000000", "fb4dd572 4bc42ef1 df922636 327f1394"),
    (bytes(32), 0, "000000000000000000000002", "374dc6c2 3736d58c b904e24a cd3f93ef"),
]


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), RFC_BLOCKS)
@pytest.mark.parametrize(
    "generate", [reference.chacha20_blocks, pytest.param(reference.chacha20_keystream, marks=with_cryptography)]
)
def test_chacha20_blocks_of_rfc_8439_appendix_a(generate, key, counter, nonce, expected) -> None:
    numbers = tuple(np.frombuffer(bytes.fromhex(nonce), dtype="<u4").tolist())
    assert [f"{word:08x}" for word in generate(key, counter, 1, numbers)[0, :4]] == expected.split()


def test_hkdf_is_rfc_5869() -> None:
    """Against the `cryptography` package, and RFC 5869's case 3 by the same formula (its key is of 22 bytes)."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    for info in (b"", b"dpcore sampling", bytes(80)):
        assert derive_key(KEY, info) == HKDF(hashes.SHA256(), 32, None, info).derive(KEY)


# Random123's known answers for Philox4x32-10: (counter, key, result).
PHILOX = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    c0, *nonce = (int(word, 16) for word in counter.split())
    key_bytes = np.array([int(word, 16) for word in key.split()], dtype="<u4").tobytes() + bytes(24)
    words = reference.philox_blocks(key_bytes, c0 // 4, 1, tuple(nonce)).reshape(4, 4)[c0 % 4]
    assert [f"{word:08x}" for word in words] == expected.split()


@with_cryptography
def test_keystream_and_block_function_give_the_same_bits() -> None:
    for counter, count, nonce in [(0, 1, (0, 0, 0)), (2**32 - 300, 300, (2**32 - 1, 7, 1)), (77, 513, (3, 2, 0))]:
        fast = reference.chacha20_keystream(KEY, counter, count, nonce)
        assert np.array_equal(fast, reference.chacha20_blocks(KEY, counter, count, nonce))


def test_layout_of_a_tile_word_by_word() -> None:
    tile, row, stream = 5, 9, Stream.SECOND_MOMENT
    got = words(KEY, row, stream, tile * 4096, 4096)
    for r in (0, 1, 255, 256, 257, 4095):
        block = reference.chacha20_blocks(KEY, tile * 256 + r % 256, 1, (row, int(stream), 0))
        assert got[r] == block[0, r // 256]
        other = reference.chacha20_blocks(KEY, tile * 256 + r % 256, 1, (row, int(stream), 37))
        assert words(KEY, row, stream, tile * 4096 + r, 1, part=37)[0] == other[0, r // 256]


@pytest.mark.parametrize("case", GOLDEN["words"], ids=lambda case: f"{case['rng']}-{case['row']}-{case['start']}")
def test_golden_words(case) -> None:
    got = words(
        bytes.fromhex(case["key"]), case["row"], case["stream"], case["start"], 8, part=case["part"], rng=case["rng"]
    )
    assert [f"{word:08x}" for word in got] == case["words"]


def hexadecimal(words: str) -> list[int]:
    return [int(word, 16) for word in words.split()]


@pytest.mark.parametrize("bits", [36, 30, 12])
def test_golden_normals(bits: int) -> None:
    """Integers on a grid, by the backend and by a scalar loop from the words that stand in the file."""
    for case in GOLDEN["normals"]:
        expected = case[f"integer of {bits} bits"]
        place = (bytes.fromhex(case["key"]), case["row"], case["stream"], case["element"], 1)
        assert normal(*place, bits=bits, rng=case["rng"])[0] * 2.0**bits == expected
        assert integer_of(*hexadecimal(case["words"]), map(hexadecimal, case["attempts"]), bits) == expected


def test_golden_words_of_normals() -> None:
    again = 0
    for case in GOLDEN["normals"]:
        block, word = parts_of(case["element"])
        key, row, stream, rng = bytes.fromhex(case["key"]), case["row"], case["stream"], case["rng"]
        blocks = [reference.blocks_of(key, block, 1, (row, stream, part), rng)[0, word] for part in (0, 1)]
        assert blocks == hexadecimal(case["words"])
        for attempt, words_of_block in enumerate(map(hexadecimal, case["attempts"])):
            (found,) = reference.blocks_of(key, block, 1, (row, stream, 2 + 16 * attempt + word), rng).tolist()
            assert found == words_of_block
        if case["attempts"]:
            try:
                first_accepted([hexadecimal(case["attempts"][0])])
            except AssertionError:
                again += 1
    assert sum(bool(case["attempts"]) for case in GOLDEN["normals"]) >= 5
    assert again >= 1, "one takes a second attempt"


def test_tables_of_the_law_are_the_golden_ones() -> None:
    for name, table in tables()._asdict().items():
        assert hashlib.sha256(table.tobytes()).hexdigest() == GOLDEN["tables"][name], name


ranges = st.tuples(st.integers(0, 3 * 4096), st.integers(0, 5000))


@given(ranges, st.integers(0, 2**32 - 1), st.sampled_from(["chacha20", "philox"]))
def test_a_shard_and_a_row_drawn_again_have_the_same_bits(span, row, rng) -> None:
    start, size = span
    whole = words(KEY, row, Stream.GRADIENT, 0, 5 * 4096, rng=rng)
    assert np.array_equal(words(KEY, row, Stream.GRADIENT, start, size, rng=rng), whole[start : start + size])
    for bits in (36, 20):
        normals = normal(KEY, row, Stream.GRADIENT, 0, 5 * 4096, bits=bits, rng=rng)
        shard = normal(KEY, row, Stream.GRADIENT, start, size, bits=bits, rng=rng)
        assert shard.tobytes() == normals[start : start + size].tobytes()


def test_rows_streams_keys_and_parts_differ() -> None:
    draws = [
        words(KEY, 1, Stream.GRADIENT, 0, 64),
        words(KEY, 2, Stream.GRADIENT, 0, 64),
        words(KEY, 1, Stream.SECOND_MOMENT, 0, 64),
        words(KEY, 1, Stream.GRADIENT, 4096, 64),
        words(KEY, 1, Stream.GRADIENT, 0, 64, part=1),
        words(KEY, 1, Stream.GRADIENT, 0, 64, part=2),
        words(derive_key(KEY, "other"), 1, Stream.GRADIENT, 0, 64),
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


def test_the_last_element_and_the_first_beyond() -> None:
    assert words(KEY, 2**32 - 1, Stream.GRADIENT, 2**36 - 4096, 4096).size == 4096
    with pytest.raises(ArgumentError, match="start"):
        words(KEY, 0, Stream.GRADIENT, 2**36 - 4095, 4096)
    with pytest.raises(ArgumentError, match="start"):
        words(KEY, 0, Stream.GRADIENT, 2**34, 1, rng="philox")
    with pytest.raises(ArgumentError, match="row"):
        words(KEY, 2**32, Stream.GRADIENT, 0, 1)
    refused(ArgumentError, "stream", words, KEY, 0, 99, 0, 1)
    refused(ArgumentError, "chacha20", words, KEY, 0, 0, 0, 1, rng="chacha")


def test_keys_are_checked_and_never_printed() -> None:
    assert new_key() != new_key()
    with pytest.raises(ArgumentError, match="31 bytes") as caught:
        words(bytes(range(31)), 0, 0, 0, 1)
    assert "\\x1e" not in str(caught.value)
    with pytest.raises(ArgumentTypeError, match="str"):
        words("a" * 32, 0, 0, 0, 1)  # type: ignore[arg-type]


def test_layout_starts_every_tensor_on_a_tile_of_its_own() -> None:
    layout = Layout.of([("a", (3, 5)), ("b", ()), ("c", (4096,)), ("d", (4097,)), ("e", (0,)), ("f", (1,))])
    assert [entry.first for entry in layout.entries] == [0, 4096, 8192, 12288, 20480, 24576]
    assert layout.dimension == 15 + 1 + 4096 + 4097 + 0 + 1
    assert layout.digest() != Layout.of([("a", (5, 3)), *((e.name, e.shape) for e in layout.entries[1:])]).digest()
    refused(ArgumentError, "'a'", Layout.of, [("a", (1,)), ("a", (2,))])
    with pytest.raises(ArgumentError, match="elements"):
        Layout.of([("a", (2**37,))])
