"""Writes stream.json. It was run once; the stream is a contract, so it must never be needed again."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from dpcore.spec.rounded_normal import REST, tables
from dpcore_numpy import normal, words
from dpcore_numpy.noise import size_of
from dpcore_numpy.stream import blocks_of
from tests.spec.scalar_normal import parts_of

KEYS = (bytes(32), bytes(range(32)), bytes(range(224, 256)))
PLACES = ((0, 0, 0), (1, 0, 4092), (7, 1, 255), (2**32 - 1, 2, 2**34 - 8), (123456, 0, 10_000_000))
PARTS = (0, 1, 2, 37)
# Of the rest: a row of each generator, whose first elements are looked at.
RESTS = (("chacha20", KEYS[1], 5, 0, 2**18), ("philox", KEYS[2], 6, 1, 2**18))


def case(key: bytes, row: int, stream: int, element: int, rng: str) -> dict[str, Any]:
    """An element with its words, its attempts if it is of the rest, and the integers of three grids."""
    block, word = parts_of(element)
    of = [blocks_of(key, block, 1, (row, stream, part), rng)[0] for part in range(2 + 16 * 8)]
    w0, w1 = of[0][word], of[1][word]
    found = {"key": key.hex(), "row": row, "stream": stream, "element": element, "rng": rng}
    found["words"] = f"{w0:08x} {w1:08x}"
    attempts = []
    if size_of(np.array([w0]), np.array([w1]))[1][0] == REST:
        attempts = [" ".join(f"{w:08x}" for w in of[2 + 16 * attempt + word]) for attempt in range(8)]
    found["attempts"] = attempts
    for bits in (36, 30, 12):
        (z,) = normal(key, row, stream, element, 1, bits=bits, rng=rng)
        found[f"integer of {bits} bits"] = int(z * 2.0**bits)
    return found


if __name__ == "__main__":
    golden: dict[str, Any] = {"words": [], "normals": []}
    for key in KEYS:
        for row, stream, start in PLACES:
            place = {"key": key.hex(), "row": row, "stream": stream, "start": start}
            for rng in ("chacha20", "philox"):
                for part in PARTS:
                    drawn = words(key, row, stream, start, 8, part=part, rng=rng)
                    golden["words"].append(place | {"rng": rng, "part": part, "words": [f"{w:08x}" for w in drawn]})
                golden["normals"] += [case(key, row, stream, start + k, rng) for k in (0, 5)]
    for rng, key, row, stream, size in RESTS:
        w0 = words(key, row, stream, 0, size, rng=rng)
        rest = np.flatnonzero(size_of(w0, w0)[1] == REST).tolist()
        golden["normals"] += [case(key, row, stream, element, rng) for element in rest]
    golden["tables"] = {name: hashlib.sha256(table.tobytes()).hexdigest() for name, table in tables()._asdict().items()}
    Path(__file__).with_name("stream.json").write_text(json.dumps(golden, indent=1) + "\n")
