"""The results as the markdown tables of a page of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

SPLIT = ("dpcore", "dpcore per-layer", "dpcore DiSK", "torch.func")  # in the others clip and noise are one


def markdown(results: Iterable[dict[str, Any]]) -> str:
    """Return the tables of some results: time and memory for each, and refusals."""
    return "\n\n".join(_of(result) for result in results)


def _of(result: dict[str, Any]) -> str:
    models = {name: found for name, found in result["models"].items() if "contestants" in found}
    names = list(dict.fromkeys(name for found in models.values() for name in found["contestants"]))
    names.remove("non-private")
    threads = f"{result['threads']} thread{'s' if result['threads'] > 1 else ''}"
    measured = f"{threads}, {result['rounds']} rounds"
    parts = [f"Time of a step over the non-private step, {measured}: of the medians / of the minima"]
    parts += [_table(models, ["non-private, ms", *names], _time)]
    parts += ["Forward, backward, norms and sum alone, over the non-private forward and backward"]
    parts += [_table(models, ["non-private, ms", *(name for name in names if name in SPLIT)], _sum)]
    with_memory = {
        name: found for name, found in models.items() if any("memory" in row for row in found["contestants"].values())
    }
    if with_memory:
        parts += ["Peak memory above model and data, over the non-private step's"]
        parts += [_table(with_memory, ["non-private, MB", *names], _memory)]
    refused: dict[str, list[str]] = {}
    for model, found in models.items():
        for name, row in found["contestants"].items():
            if "refused" in row:
                refused.setdefault(f"{name}: {row['refused']}", []).append(model)
    if refused:
        parts += ["Refused:", "\n".join(f"- {reason} ({', '.join(where)})" for reason, where in refused.items())]
    return "\n\n".join([*parts, _source(result)])


def _table(models: dict[str, Any], columns: list[str], cell: Callable[[dict[str, Any]], str]) -> str:
    lines = [f"| model | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for model, found in models.items():
        rows = found["contestants"]
        cells = [cell(rows.get(column.partition(",")[0], {})) for column in columns]
        lines.append(f"| {model}, B={found['batch_size']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(row: dict[str, Any]) -> str:
    if "median_s" not in row:
        return "refused" if "refused" in row else "-"
    if row.get("ratio_of_medians", 1.0) == 1.0:
        return f"{1e3 * row['median_s']:.1f} / {1e3 * row['min_s']:.1f}"
    return f"{row['ratio_of_medians']:.2f} / {row['ratio_of_minima']:.2f}"


def _sum(row: dict[str, Any]) -> str:
    return _time({name.removeprefix("sum_"): value for name, value in row.items() if name[:4] in ("sum_", "refu")})


def _memory(row: dict[str, Any]) -> str:
    needed = row.get("memory", {})
    if "above_data_mb" not in needed:
        return "refused" if "refused" in needed else "-"
    ratio = needed.get("ratio", 1.0)
    return f"{needed['above_data_mb']:.0f}" if ratio == 1.0 else f"{ratio:.2f}"


def _source(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "numpy", "opacus"))
    allocator = result["allocator"]["times"]
    kept = allocator if isinstance(allocator, str) else " ".join(f"{name}={value}" for name, value in allocator.items())
    before, after = result["machine"]["load_before"][0], result["load_after"][0]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; load {before:.1f} before, "
        f"{after:.1f} after; Python {machine['python']}, {versions}; commit {machine['commit'][:7]}; "
        f"allocator of the times: {kept}, of the memory: {result['allocator']['memory']}.\n\n    {result['command']}"
    )
