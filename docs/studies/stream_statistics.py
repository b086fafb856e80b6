"""The random stream through a battery of tests, and its normals against the normal law.

    python docs/studies/stream_statistics.py --out FOLDER

writes stream-statistics.json there. The battery is dieharder (a Debian package); without it there is no study. See
docs/decisions/index.md#one-random-stream.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dieharder import CONTROL, REPEATED, TESTS, battery, summary
from normal_law import count, report, tail
from study import out_folder, save


@dataclass(frozen=True)
class Settings:
    """What is drawn: words by source and generator, rounds of three draws of `size` normals, tiles of the rest."""

    sources: tuple[tuple[str, str], ...] = (
        ("elements", "chacha20"),
        ("rows", "chacha20"),
        ("streams", "chacha20"),
        ("keys", "chacha20"),
        ("rows", "philox"),
        CONTROL,
    )
    tests: tuple[int, ...] = TESTS
    repeated: int = REPEATED
    rounds: tuple[tuple[str, int], ...] = (("chacha20", 318), ("philox", 32))
    size: int = 1 << 20
    rest_tiles: int = 256


def study(out: Path, settings: Settings, program: str = "dieharder") -> dict[str, Any]:
    """Run all of it and write the JSON."""
    began = time.perf_counter()
    normals, seconds = {}, {}
    for rng, rounds in settings.rounds:
        start = time.perf_counter()
        normals[rng] = report(count(rng, rounds, settings.size))
        seconds[f"normals, {rng}"] = round(time.perf_counter() - start, 1)
        print(f"{rng}: {normals[rng]}")
    start = time.perf_counter()
    far = tail(settings.rest_tiles)
    seconds["tail"] = round(time.perf_counter() - start, 1)
    print(f"tail: {far}")
    start = time.perf_counter()
    found = battery(program, settings.sources, settings.tests, settings.repeated)
    seconds["battery"] = round(time.perf_counter() - start, 1)
    result = {
        "command": "python docs/studies/stream_statistics.py --out FOLDER",
        "versions": {"torch": version("torch"), "dieharder": _version(program)},
        "seconds_by_part": seconds,
        "settings": vars(settings),
        "battery_summary": summary(found),
        "normals": normals,
        "tail_of_the_rest": far,
        "battery": found,
    }
    save(out / "stream-statistics.json", result, began)
    return result


def _version(program: str) -> str:
    listed = subprocess.run([program, "-l"], capture_output=True, text=True, check=False).stdout
    words = listed.split()
    return words[words.index("version") + 1] if "version" in words else "unknown"


if __name__ == "__main__":
    if shutil.which("dieharder") is None:
        raise SystemExit("dieharder: must be installed, as by apt-get install dieharder")
    study(out_folder(__doc__.splitlines()[0]), Settings())
