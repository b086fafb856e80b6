"""Merge the chunks' results: shares of the copy rate, private over plain, failures, and parts left out."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from .record import CHUNKS, NOT_A_TIMING, ROOT, load, path_of
from .table import markdown

ENDED = "the chunk was ended from outside"
PLAIN = "non-private compiled"  # what the models' other steps are compared with


def main(out: Path, name: str | None) -> int:
    """Write the whole result and print its table; return 1 if a part failed or a chunk is broken."""
    chunks = {chunk: load(out, chunk) for chunk in CHUNKS if path_of(out, chunk).exists()}
    if not chunks:
        print(f"{out}: no chunk has run")
        return 1
    result = together(chunks)
    chosen = name or ("small" if result["small"] else _slug(result))
    text = json.dumps(result, indent=1) + "\n"
    places = [out / f"gpu_{chosen}.json"]
    # What the interpreter did is no figure to keep.
    places += [] if result["small"] else [ROOT / "asv_benchmarks" / "recorded" / f"gpu_{chosen}.json"]
    for place in places:
        place.write_text(text)
    (out / "table.md").write_text(table := markdown(result) + "\n")
    print(table)
    print("\n".join(f"written: {place}" for place in places), flush=True)
    return 1 if result["failed"] else 0


def together(chunks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return all that was found, with what follows from it."""
    for chunk in chunks.values():
        for part in chunk["parts"].values():
            if part["status"] in ("waiting", "running"):
                part.update(status="left out", reason=ENDED)
    small = any(chunk["small"] for chunk in chunks.values())
    rate = None if small else copy_rate(chunks)
    if rate is not None:
        for part in chunks["kernels"]["parts"].values():
            if "bytes_per_s" in part:
                part["share_of_copy_rate"] = [found / rate for found in part["bytes_per_s"]]
    failed, left_out = _named(chunks, "failed", "error"), _named(chunks, "left out", "reason")
    failed |= {name: chunk["error"] for name, chunk in chunks.items() if "error" in chunk}
    return {
        "machine": next((chunk["machine"] for chunk in chunks.values() if chunk["machine"]), {}),
        "small": small,
        "timed": not small,
        **({"note": NOT_A_TIMING} if small else {}),
        "copy_bytes_per_s": rate,
        "ratios_of_training": ratios(chunks),
        "ratios_of_models": ratios_of_models(chunks),
        "failed": failed,
        "left_out": left_out,
        "chunks_not_run": [name for name in CHUNKS if name not in chunks],
        "chunks": chunks,
    }


def copy_rate(chunks: dict[str, dict[str, Any]]) -> float | None:
    """Return the best of the copies, each by its median: bytes read and written in a second."""
    parts = chunks.get("kernels", {}).get("parts", {})
    found = [statistics.mean(part["bytes_per_s"]) for name, part in parts.items()
             if name.startswith("copy") and "bytes_per_s" in part]  # fmt: skip
    return max(found, default=None)


def ratios(chunks: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, for each model, the private step over the plain ones, of time and of peak memory."""
    parts = chunks.get("training", {}).get("parts", {})
    found: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        model, _, kind = name.partition(": ")
        private = parts.get(f"{model}: private", {})
        if kind != "private" and "ms" in part and "ms" in private:
            short = kind.removeprefix("plain, ")
            own = found.setdefault(model, {})
            own[f"time over {short}"] = statistics.mean(private["ms"]) / statistics.mean(part["ms"])
            own[f"peak memory over {short}"] = private["peak_bytes"] / part["peak_bytes"]
    return found


def ratios_of_models(chunks: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, for each model, the time and the peak memory of each contestant over those of the compiled plain step."""
    parts = chunks.get("models", {}).get("parts", {})
    found: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        model, _, kind = name.rpartition(": ")
        plain = parts.get(f"{model}: {PLAIN}", {})
        if "ms" in part and "ms" in plain and kind != PLAIN:
            own = found.setdefault(model, {})
            own[kind] = statistics.mean(part["ms"]) / statistics.mean(plain["ms"])
            own[f"{kind}, peak memory"] = part["peak_bytes"] / plain["peak_bytes"]
    return found


def _named(chunks: dict[str, dict[str, Any]], status: str, why: str) -> dict[str, str]:
    return {
        f"{chunk}: {name}": part.get(why, "")
        for chunk, found in chunks.items()
        for name, part in found["parts"].items()
        if part["status"] == status
    }


def _slug(result: dict[str, Any]) -> str:
    """Return the GPU's name as a part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", str(result["machine"].get("gpu") or "unknown").lower()).strip("_")
