"""What a process of its own measures: the time of all contestants in turn, the memory of one, whether they agree.

Each function returns what goes into the JSON. The processes are started by `training_vs_peers.py`, which loads nothing
large itself.
"""

from __future__ import annotations

import ctypes
import gc
import random
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from whole_step.contestants import CONTESTANTS, SAME_RULE, Contestant, Refused, Setting
from whole_step.models import cases

WARM_UP = 2  # steps of each before the clock runs: optimizers allocate their state, pages are touched


def attempt(name: str, setting: Setting, steps: int) -> tuple[Contestant | None, str]:
    """Build a contestant and take `steps` steps. Return it and "", or None and the reason in one line."""
    try:
        built = CONTESTANTS[name](setting)
        for _ in range(steps):
            built.step(built.draw())
    except Exception as cause:  # noqa: BLE001 (who cannot train a model is a result)
        return None, one_line(cause)
    return built, ""


def one_line(cause: Exception) -> str:
    """Return an error in one line."""
    line = " ".join(str(cause).split())
    return line if isinstance(cause, Refused) else f"{type(cause).__name__}: {line}"[:300]


def times(model: str, names: list[str], quick: bool, rounds: int, **options: Any) -> dict[str, Any]:
    """Time whole steps of the contestants: `rounds` rounds, in each of them every contestant once, in random order."""
    setting = Setting(cases(quick)[model], **options)
    found: dict[str, dict[str, Any]] = {}
    racing: dict[str, Contestant] = {}
    for name in names:
        built, reason = attempt(name, setting, WARM_UP)
        if built is None:
            found[name] = {"refused": reason}
        else:
            found[name] = {"seconds": [], "cpu_seconds": [], "sum_seconds": [], "draw_seconds": [], "page_faults": []}
            racing[name] = built
        gc.collect()
    order = random.Random(setting.seed)
    for _ in range(rounds):
        for name in order.sample(list(racing), len(racing)):
            one(racing[name], found[name])
    for name in racing:
        summarize(found[name], found.get("non-private"))
    trained = [parameter.numel() for parameter in setting.model().parameters() if parameter.requires_grad]
    described = {"batch_size": setting.case.batch_size, "update": setting.update, "trained_parameters": sum(trained)}
    described["torch_threads"] = torch.get_num_threads()
    return {**described, "tensors": len(trained), "contestants": found}


def one(contestant: Contestant, row: dict[str, Any]) -> None:
    """Take one step by the clock, and by the processor's time, which other programs hardly blur."""
    gc.collect()
    before = time.perf_counter()
    batch = contestant.draw()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    used, begin = time.process_time(), time.perf_counter()
    contestant.step(batch)
    row["seconds"].append(time.perf_counter() - begin)
    row["cpu_seconds"].append(time.process_time() - used)
    row["page_faults"].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
    row["draw_seconds"].append(begin - before)
    row["sum_seconds"] += [at - begin for at in contestant.summed]


def summarize(row: dict[str, Any], reference: dict[str, Any] | None) -> None:
    """Add medians, minima, and their ratios to those of the non-private step: of whole steps, and up to the noise.

    `ratio_of_pairs` is the median of the ratios of processor time within a round.
    """
    for kind, prefix in (("seconds", ""), ("sum_seconds", "sum_"), ("draw_seconds", "draw_")):
        if not row[kind]:
            continue
        row |= {f"{prefix}median_s": statistics.median(row[kind]), f"{prefix}min_s": min(row[kind])}
        if reference and kind != "draw_seconds":
            row[f"{prefix}ratio_of_medians"] = row[f"{prefix}median_s"] / statistics.median(reference[kind])
            row[f"{prefix}ratio_of_minima"] = row[f"{prefix}min_s"] / min(reference[kind])
    if reference:
        pairs = zip(row["cpu_seconds"], reference["cpu_seconds"], strict=True)
        row["ratio_of_pairs"] = statistics.median(own / other for own, other in pairs)


def memory(model: str, names: list[str], quick: bool, steps: int = 3, **options: Any) -> dict[str, Any]:
    """Return the resident memory of one contestant's first steps, in MB. Call it in a separate process."""
    (name,) = names
    # The libraries' own code is no part of it: they are imported before the first reading.
    attempt(name, Setting(cases(quick=True)["mlp"], **options), 1)
    setting = Setting(cases(quick)[model], **options)
    setting.model()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with_data = resident()
    built, reason = attempt(name, setting, 0)
    if built is None:
        return {"refused": reason}
    gc.collect()
    before_steps, peak_of_build = resident(), resident("VmHWM")
    forget_peak()
    try:
        for _ in range(steps):
            built.step(built.draw())
    except Exception as cause:  # noqa: BLE001
        return {"refused": one_line(cause)}
    peak = resident("VmHWM")
    return {
        "peak_mb": max(peak, peak_of_build),
        "above_data_mb": peak - with_data,  # state and buffers, wherever they were made, and the steps
        "above_first_step_mb": peak - before_steps,
        "build_above_data_mb": peak_of_build - with_data,
    }


def resident(field: str = "VmRSS") -> float:
    """Return resident memory, or with "VmHWM" its peak, in MB: getrusage's peak, but not inherited from the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Reset the kernel's peak."""
    Path("/proc/self/clear_refs").write_text("5")


def agreement(model: str, names: list[str], **options: Any) -> dict[str, float | str]:
    """Return how far one step of each, almost without noise, ends from torch.func's, relative to the step's length.

    On the small models, by SGD with rate 1: whoever does another thing than DP-SGD with flat clipping shows here.
    """
    setting = Setting(cases(quick=True)[model], **options | {"update": "sgd", "noise_multiplier": 1e-9})
    setting.learning_rate = 1.0
    begin = trained(setting.model())
    moved: dict[str, torch.Tensor] = {}
    found: dict[str, float | str] = {}
    for name in dict.fromkeys(("torch.func", *names)):
        if name not in SAME_RULE:
            continue
        built, reason = attempt(name, setting, 0)
        if built is None:
            found[name] = reason
            continue
        order = by_values(before := trained(built.model))
        if not torch.equal(joined(before, order), joined(begin, by_values(begin))):
            found[name] = "begins at other values than the model's"
            continue
        try:
            built.step(built.draw())
        except Exception as cause:  # noqa: BLE001
            found[name] = one_line(cause)
            continue
        moved[name] = joined(trained(built.model), order) - joined(before, order)
    if "torch.func" in moved:
        reference = moved.pop("torch.func")
        found |= {name: float((each - reference).norm() / reference.norm()) for name, each in moved.items()}
    return found


def trained(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of the trained parameters in float64; FastDP keeps in an attribute of its own which they are."""
    initially = [p for p in model.parameters() if getattr(p, "initially_requires_grad", p.requires_grad)]
    return [parameter.detach().double().flatten() for parameter in initially]


def by_values(tensors: list[torch.Tensor]) -> list[int]:
    """Return an order that depends on the values alone: Opacus's LSTM has the same tensors in another order."""
    return sorted(range(len(tensors)), key=lambda place: (len(tensors[place]), float(tensors[place].sum())))


def joined(tensors: list[torch.Tensor], order: list[int]) -> torch.Tensor:
    """Return the tensors as one vector."""
    return torch.cat([tensors[place] for place in order])
