"""Writes stream.json. It was run once; the stream is a contract, so it must never be needed again."""

import json
from pathlib import Path
from typing import Any

from dpcore_numpy import normal, words

KEYS = (bytes(32), bytes(range(32)), bytes(range(224, 256)))
PLACES = ((0, 0, 0), (1, 0, 4092), (7, 1, 255), (2**32 - 1, 2, 2**34 - 8), (123456, 0, 10_000_000))

if __name__ == "__main__":
    golden: dict[str, list[dict[str, Any]]] = {"words": [], "normals": []}
    for key in KEYS:
        for row, stream, start in PLACES:
            place = {"key": key.hex(), "row": row, "stream": stream, "start": start}
            for rng in ("chacha20", "philox"):
                for tail in (False, True):
                    drawn = words(key, row, stream, start, 8, tail=tail, rng=rng)
                    golden["words"].append(place | {"rng": rng, "tail": tail, "words": [f"{w:08x}" for w in drawn]})
            normals = normal(key, row, stream, start, 8, dtype="float64")
            golden["normals"].append(place | {"normals": normals.tolist()})
    Path(__file__).with_name("stream.json").write_text(json.dumps(golden, indent=1) + "\n")
