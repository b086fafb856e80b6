"""Break copies of the tree on purpose and name the tests that notice: `make mutations`.

Each mutation of tests/mutations.py replaces one piece of one file. One that no test notices is a failure of the tests,
and of this script. Arguments choose mutations by a part of their name; by default all are made. Results go to
mutations.json.
"""

import argparse
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib.util import cache_from_source
from io import BytesIO
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).parent))
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 600.0
"""Seconds after which a mutated copy counts as broken: some mutations make a loop endless."""


class Result(TypedDict):
    """What became of one mutation."""

    name: str
    path: str
    noticed: list[str]
    seconds: float


def copy_to(folder: Path) -> None:
    """Copy the working tree as git sees it: tracked files and new ones, without what is ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                archive.add(ROOT / name, arcname=name)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder, filter="data")


def red(folder: Path, tests: Sequence[str], *options: str) -> list[str]:
    """Run tests of a copy and return those that fail."""
    path = os.pathsep.join([str(folder), str(folder / "backends"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return [f"still running after {TIMEOUT:.0f} s"]
    if done.returncode == 0:
        return []
    if done.returncode < 0:  # a kernel that writes beyond its arrays
        return [f"crashed by signal {-done.returncode}"]
    if found := re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE):
        return sorted(set(found))
    raise SystemExit(f"{' '.join(tests)}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")


def make(mutation: Mutation, folder: Path) -> Result:
    """Break one copy, run the mutation's tests until one fails, and mend the copy."""
    begin = time.monotonic()
    path = folder / mutation.path
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.path}: {mutation.old!r} must stand there once; the mutation is out of date")

    def write(changed: str) -> None:
        path.write_text(changed)
        # Python takes bytecode for current if its file has the same size and the same second.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    write(text.replace(mutation.old, mutation.new))
    try:
        noticed = red(folder, shlex.split(mutation.tests), "-x")
    finally:
        write(text)
    return Result(name=mutation.name, path=mutation.path, noticed=noticed, seconds=round(time.monotonic() - begin, 1))


def make_all(chosen: Sequence[Mutation], folders: Sequence[Path]) -> list[Result]:
    """Make the mutations, one worker for each copy of the tree."""
    waiting: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
    for mutation in chosen:
        waiting.put(mutation)
    results: list[Result] = []
    problems: list[BaseException] = []

    def work(folder: Path) -> None:
        try:
            while not problems:
                result = make(waiting.get_nowait(), folder)
                results.append(result)
                print(
                    f"{len(results):4d}/{len(chosen)} {result['seconds']:6.1f} s  {result['name']} ({result['path']})"
                )
                print(f"       {' '.join(result['noticed']) or 'NOTHING NOTICES'}", flush=True)
        except queue.Empty:
            return
        except (SystemExit, OSError) as problem:  # told in the main thread
            problems.append(problem)

    workers = [threading.Thread(target=work, args=(folder,)) for folder in folders]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if problems:
        raise problems[0]
    return results


def main() -> int:
    """Make the chosen mutations; the exit status is 1 where one was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[""], help="parts of the names of mutations")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, default=ROOT / "mutations.json")
    options = parser.parse_args()
    chosen = [one for one in MUTATIONS if any(part in one.name for part in options.parts)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(i) for i in range(max(1, min(options.workers, len(chosen))))]
        for folder in folders:
            copy_to(folder)
        results = make_all(chosen, folders)
        # A test that is red by itself notices nothing.
        noticing = sorted({test for result in results for test in result["noticed"] if "::" in test})
        broken = red(folders[0], noticing, "-n", str(len(folders))) if noticing else []
        for result in results:
            result["noticed"] = [test for test in result["noticed"] if test not in broken]
    for test in broken:
        print(f"{test} fails without any mutation")
    unnoticed = [result["name"] for result in results if not result["noticed"]]
    options.json.write_text(json.dumps(sorted(results, key=lambda result: -result["seconds"]), indent=1) + "\n")
    minutes = (time.monotonic() - begin) / 60
    print(f"{len(results)} mutations in {minutes:.1f} minutes, {len(unnoticed)} that nothing notices: {unnoticed}")
    return bool(unnoticed)


if __name__ == "__main__":
    sys.exit(main())
