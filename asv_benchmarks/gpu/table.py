"""The results as markdown tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any

from ..predicted import CHIPS, RECORDED


def markdown(result: dict[str, Any]) -> str:
    """Return the tables of a whole result: checks, kernels, host, training, models, and missing parts."""
    parts = [_head(result)]
    kinds = [
        ("checks", _checks),
        ("kernels", _kernels),
        ("kernels", _host),
        ("training", _training),
        ("models", _models),
    ]
    for chunk, rows in kinds:
        found = result["chunks"].get(chunk, {}).get("parts", {})
        parts += [rows(result, found)] if found else []
    for title in ("failed", "left_out"):
        if result[title]:
            lines = "\n".join(f"- {name}: {_short(why)}" for name, why in result[title].items())
            parts.append(f"{title.replace('_', ' ').capitalize()}:\n\n{lines}")
    if result["chunks_not_run"]:
        parts.append(f"Chunks that did not run: {', '.join(result['chunks_not_run'])}")
    return "\n\n".join(parts)


def _head(result: dict[str, Any]) -> str:
    machine, rate = result["machine"], result["copy_bytes_per_s"]
    versions = ", ".join(f"{name} {machine.get(name, '?')}" for name in ("python", "torch", "triton", "numpy"))
    driver = f"driver {machine.get('driver', 'none')}"
    first = f"{machine.get('gpu') or 'No GPU'}, {driver}; {versions}; commit {machine.get('commit', '?')[:12]}"
    if result["small"]:
        return f"{first}\n\nSmall form, through Triton's interpreter: nothing here is a timing."
    copied = "not measured" if rate is None else f"{rate / 1e12:.2f} TB/s read and written"
    return f"{first}\n\nDevice-to-device copy: {copied}."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(text: str) -> str:
    return " ".join(text.split())[:160]


def _times(part: dict[str, Any]) -> str:
    """Return both medians: their distance is the spread."""
    if "ms" in part:
        return " / ".join(f"{ms:.3f}" for ms in part["ms"])
    return "not timed" if part["status"] == "done" else part["status"]


def _checks(result: dict[str, Any], parts: dict[str, Any]) -> str:
    rows = []
    for name, part in parts.items():
        outcome = part.get("outcomes") or part.get("said") or part.get("tool") or part.get("same")
        count = f"{sum(outcome.values())} of {len(outcome)}" if outcome is part.get("same") and outcome else outcome
        rows.append([name, part["status"], _short(str(count or part.get("error") or part.get("reason") or ""))])
    return _table(["check", "result", "said"], rows)


def _kernels(result: dict[str, Any], parts: dict[str, Any]) -> str:
    rows = []
    for name, part in parts.items():
        if name.startswith("host"):
            continue
        count, moved = part.get("coordinates"), part.get("bytes")
        each = f"{moved / count:.1f}" if count and moved else "-"
        rate = f"{statistics.mean(part['bytes_per_s']) / 1e9:.0f}" if "bytes_per_s" in part else "-"
        share = " / ".join(f"{share:.0%}" for share in part.get("share_of_copy_rate", ())) or "-"
        rows.append([name, each, _times(part), rate, share])
    return _table(["kernel", "bytes each", "ms, twice", "GB/s", "share of copy rate"], rows)


def _host(result: dict[str, Any], parts: dict[str, Any]) -> str:
    rows = []
    for name, part in parts.items():
        if name.startswith("host"):
            took = " / ".join(f"{ms:.3f}" for ms in part.get("host_ms", ())) or _times(part)
            kernels = sum(part["on_device"].values()) if "on_device" in part else "-"
            waits = part.get("synchronizations", "-")
            launches = part.get("launches", "-")
            rows.append([f"{name}, {part.get('tensors', '?')} tensors", took, str(launches), str(kernels), str(waits)])
    header = ["step", "host ms, twice", "launches of dpcore_triton", "kernels and copies on the device",
              "synchronizations (one is the profiler's)"]  # fmt: skip
    return _table(header, rows)


def _training(result: dict[str, Any], parts: dict[str, Any]) -> str:
    rows = []
    for name, part in parts.items():
        model, _, kind = name.partition(": ")
        ratio = ""
        if kind == "private":
            found = result["ratios_of_training"].get(model, {})
            ratio = ", ".join(f"{value:.2f} {over}" for over, value in found.items())
        peak = f"{part['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in part else "-"
        rows.append([model, kind, _times(part), peak, ratio or "-"])
    return _table(["model", "step", "ms, twice", "peak GiB", "private over plain"], rows)


def _models(result: dict[str, Any], parts: dict[str, Any]) -> str:
    """Return each contestant over the compiled plain step, and what was predicted for this chip without running it."""
    chip = next((chip for chip in CHIPS if chip in str(result["machine"].get("gpu"))), None)
    recorded = json.loads(RECORDED.read_text())
    rows = []
    for name, part in parts.items():
        model, _, kind = name.rpartition(": ")
        ratios = result["ratios_of_models"].get(model, {})
        over = [f"{ratios[key]:.2f}" if key in ratios else "-" for key in (kind, f"{kind}, peak memory")]
        said = recorded.get(f"step of {model}, {chip}", {}).get("private / plain", "-")
        took = _short(part["refused"]) if "refused" in part else _times(part)
        rows.append([model, kind, took, *over, str(said) if kind == "dpcore compiled" else "-"])
    header = ["model, in bfloat16", "step", "ms, twice", "over compiled plain", "peak memory over it", "predicted"]
    return _table(header, rows)
