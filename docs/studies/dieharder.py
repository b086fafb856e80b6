"""The words of the random stream through dieharder: elements one after another, and neighbors interleaved."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

import dpcore_numpy as backend
from dpcore.spec.stream import Stream, derive_key

KEY = derive_key(bytes(range(32)), "docs/studies/stream_statistics.py")
ROW = 1_000_000
WORDS = 1 << 16
NEIGHBORS = 16
# dieharder's numbers of tests. Left out: those that its own list calls suspect or not to be used, and those that take
# half a minute and more. Repeated less than a hundred times, its test of all repetitions together finds p-values near 1
# that are none; some are left, which is why there is a control.
TESTS = (0, 2, 3, 4, 8, 9, 10, 11, 12, 13, 15, 16, 100, 101, 102)
REPEATED = 100
# Of the words handed to it dieharder takes so many a repetition to measure how fast they come, and looks at none.
TIMED = 10**6

Words = NDArray[np.uint32]
# Of each: which (key, row, stream) give the words that come next to each other, all for the same element.
SOURCES: dict[str, Callable[[], list[tuple[bytes, int, int]]]] = {
    "elements": lambda: [(KEY, ROW, Stream.GRADIENT)],
    "rows": lambda: [(KEY, ROW + i, Stream.GRADIENT) for i in range(NEIGHBORS)],
    "streams": lambda: [(KEY, ROW, stream) for stream in Stream],
    "keys": lambda: [(bytes([*KEY[:-1], i]), ROW, Stream.GRADIENT) for i in range(NEIGHBORS)],
}
CONTROL = ("control", "os.urandom")


def stream_words(source: str, rng: str) -> Iterator[Words]:
    """Yield words without end; of several rows, streams or keys, a word of each in turn."""
    while (source, rng) == CONTROL:
        yield np.frombuffer(os.urandom(4 * WORDS * NEIGHBORS), dtype=np.uint32)
    places = SOURCES[source]()
    for piece in count():
        drawn = [backend.words(*place, piece * WORDS, WORDS, rng=rng) for place in places]
        yield np.stack(drawn, axis=1).reshape(-1)


def parsed(output: str) -> list[dict[str, Any]]:
    """Return the rows of dieharder's table."""
    found = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and re.fullmatch(r"[01]\.\d+", cells[4]):
            name, size, samples, repeated, p, verdict = cells
            found.append(
                {"test": name, "ntup": int(size), "samples": int(samples), "repeated": int(repeated), "p": float(p),
                 "verdict": verdict}
            )  # fmt: skip
    return found


def run(program: str, test: int, repeated: int, pieces: Iterator[Words]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of one of dieharder's tests, and how many bytes were handed to it. It cannot rewind a pipe."""
    command = [program, "-g", "200", "-d", str(test), "-p", str(repeated)]
    handed = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has read what it needed
            for piece in pieces:
                process.stdin.write(piece.astype("<u4", copy=False).data)
                handed += piece.nbytes
        rows = parsed(process.stdout.read().decode())
        with suppress(BrokenPipeError):
            process.stdin.close()
    if not rows:
        raise RuntimeError(f"{' '.join(command)}: printed no result")
    return rows, handed


def battery(
    program: str, sources: Sequence[tuple[str, str]], tests: Sequence[int], repeated: int
) -> list[dict[str, Any]]:
    """Run the tests on each source; each goes on in the source where the test before it stopped."""
    found = []
    for source, rng in sources:
        pieces, handed, rows = stream_words(source, rng), 0, []
        for test in tests:
            more, read = run(program, test, repeated, pieces)
            rows, handed = rows + more, handed + read
        least = min(rows, key=lambda row: row["p"])
        verdicts = {name: sum(row["verdict"] == name for row in rows) for name in ("PASSED", "WEAK", "FAILED")}
        looked_at = max(handed - 4 * TIMED * repeated * len(tests), 0)
        found.append(
            {
                "source": source,
                "rng": rng,
                "bytes_looked_at": looked_at,
                "verdicts": verdicts,
                "least": least,
                "rows": rows,
            }
        )
        print(f"{rng} {source}: {looked_at / 2**30:.2f} GiB, {verdicts}, least {least['test']} p={least['p']:g}")
    return found


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what all p-values of the stream say together, beside those of the control."""
    both = {}
    for name, control in (("stream", False), ("control", True)):
        chosen = [each for each in found if ((each["source"], each["rng"]) == CONTROL) == control]
        p = np.array([row["p"] for each in chosen for row in each["rows"]])
        if len(p):
            both[name] = {
                "bytes_looked_at": sum(each["bytes_looked_at"] for each in chosen),
                "p_values": len(p),
                "below_0.005": int((p < 0.005).sum()),
                "above_0.995": int((p > 0.995).sum()),
                "least_p": float(p.min()),
                "probability_of_one_so_small": min(1.0, float(p.min()) * len(p)),
                "failed": sum(each["verdicts"]["FAILED"] for each in chosen),
            }
    return both
