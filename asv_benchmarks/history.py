"""Static figures of kernels and predicted steps at the last 30 commits (of first parents) that touch kernels or engine.

    python asv_benchmarks/history.py                completes asv_benchmarks/recorded/history.json
    python asv_benchmarks/history.py --ratios 6     measures private over plain steps on this CPU at every sixth of them
    python docs/history_picture.py                  draws it

Each commit is checked out, and its kernels are compiled for sm_90 with the Triton at hand and measured by today's
script. A commit with the same kernels as another one has its figures. Predicted steps are those that the commit itself
recorded; earlier commits recorded none. What does not compile is left out, with the reason. Ratios of private to plain
steps are measured at the checkout by today's `cpu_ratios.py`: processor time in turn, which a shared machine hardly
blurs; those of another processor are measured again.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from whole_step.record import machine

HERE = Path(__file__).resolve().parent
ROOT, RECORDED = HERE.parent, HERE / "recorded" / "history.json"
PATHS = ("backends/dpcore_triton", "dpcore/torch/gradients", "dpcore/torch/engine.py")
COMMITS, CHIP = 30, 90
KERNELS = (
    "row_norms: squares", "weighted_sum", "pairs: norms", "pairs: inner products", "linear_norms: tiles, scale",
    "linear_sums, one position", "embedding_sum, scale", "tied_norms: both parts", "update adam",
    "core tiles, bf16", "core inner products, bf16", "core sums, bf16",
)  # fmt: skip
KEPT = "all instructions an element", "instructions", "instructions of the loop", "registers", "spills"


def git(*arguments: str) -> str:
    """Return what git prints, without its last line's end; an empty text if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def load(name: str, path: Path) -> Any:
    """Import a file under a name, and return the module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(checkout: Path) -> dict[str, Any]:
    """Return the figures of a checkout's kernels. Call it in a process of its own."""
    os.environ.pop("TRITON_INTERPRET", None)
    static = load("static", HERE / "static.py")
    sys.path[:0] = [str(checkout), str(checkout / "backends")]
    load("tests.unit.backends.listing", ROOT / "tests/unit/backends/listing.py")
    today = load("today", ROOT / "tests/unit/backends/test_compile.py")
    today.ROOT = checkout
    today.without_a_gpu()
    theirs = importlib.import_module("tests.unit.backends.test_compile")
    cores = getattr(theirs, "core_cases", list)
    of_cores = cores(CHIP) if inspect.signature(cores).parameters else cores()
    cases = {case[0]: case for case in theirs.cases() + of_cores}
    found = {}
    for name in KERNELS:
        try:
            figures = static.figures(today.compile_and_measure(*cases[name], CHIP)) if name in cases else {}
            found[name] = {each: figures[each] for each in KEPT if each in figures}
        except Exception as cause:  # noqa: BLE001 (a kernel of then that today's compiler refuses leaves a gap)
            found[name] = {"error": f"{type(cause).__name__}: {cause}"[:200]}
    return {name: figures for name, figures in found.items() if figures}


def of_checkout(commit: str, command: list[str], environment: dict[str, str]) -> tuple[dict[str, Any], str | None]:
    """Check a commit out as TREE, and return the JSON that a command prints there, and why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        tree = f"{folder}/tree"
        git("worktree", "add", "--detach", tree, commit)
        try:
            given = {**os.environ, **{name: text.replace("TREE", tree) for name, text in environment.items()}}
            asked = [sys.executable, *(word.replace("TREE", tree) for word in command)]
            done = subprocess.run(asked, env=given, capture_output=True, text=True, check=False)
        finally:
            git("worktree", "remove", "--force", tree)
    if done.returncode:
        return {}, done.stderr.strip().splitlines()[-1][:200]
    return json.loads(done.stdout.splitlines()[-1]), None


def measure_ratios(every: int) -> None:
    """Add the ratios of every so many of the recorded commits, the last one included, and write the file."""
    recorded, cpu = json.loads(RECORDED.read_text()), machine()["cpu"]
    if recorded.get("cpu") != cpu:
        for each in recorded["commits"]:
            each["ratios"] = {}
    recorded["cpu"] = cpu
    for each in recorded["commits"][::-1][::every]:
        if not each.get("ratios"):
            command = [str(HERE / "cpu_ratios.py"), "--measure"]
            each["ratios"], gap = of_checkout(each["commit"], command, {"PYTHONPATH": "TREE:TREE/backends"})
            print(each["commit"], each["ratios"], gap or "", flush=True)
            RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


def steps(commit: str) -> dict[str, float]:
    """Return the predicted private over plain steps that a commit recorded."""
    recorded = json.loads(git("show", f"{commit}:asv_benchmarks/recorded/static.json") or "{}")
    prefix = "step of "
    return {name.removeprefix(prefix): found["private / plain"] for name, found in recorded.items() if prefix in name}


def main() -> None:
    """Measure the commits that are not recorded yet, and write the file."""
    import triton

    before = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"triton": triton.__version__, "commits": []}
    # Figures of two compilers do not make one history.
    known = before["commits"] if before["triton"] == triton.__version__ else []
    ratios = {each["commit"]: each.get("ratios", {}) for each in before["commits"]}
    by_tree = {each["kernels"]: {name: each[name] for name in ("figures", "gap")} for each in known}
    log = git("log", "--first-parent", f"-{COMMITS}", "--format=%H|%as|%s", "--", *PATHS).splitlines()
    found: list[Any] = []
    with tempfile.TemporaryDirectory() as cache:
        for line in reversed(log):
            commit, date, subject = line.split("|", 2)
            tree = git("rev-parse", f"{commit}:backends/dpcore_triton")
            if tree not in by_tree:
                environment = {"TRITON_CACHE_DIR": cache, "PYTHONPATH": ""}
                figures, gap = of_checkout(commit, [__file__, "TREE"], environment)
                by_tree[tree] = {"figures": figures, "gap": gap}
            about = {"commit": commit[:12], "date": date, "subject": subject, "kernels": tree}
            found.append({**about, **by_tree[tree], "steps": steps(commit), "ratios": ratios.get(commit[:12], {})})
            counts = {name: len(found[-1][name]) for name in ("figures", "steps")}
            print(f"{commit[:12]} {date} {counts['figures']} kernels, {counts['steps']} steps", flush=True)
    about = {"triton": triton.__version__, "chip": f"sm_{CHIP}", "cpu": before.get("cpu")}
    text = json.dumps({**about, "commits": found}, indent=1)
    RECORDED.write_text(text + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--ratios"]:
        measure_ratios(int(sys.argv[2]))
    elif sys.argv[1:]:
        print(json.dumps(compiled(Path(sys.argv[1]))))
    else:
        main()
