"""Where a step's processor time goes: forward, backward, dpcore's port, noise and update; torch's operators."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dpcore.spec.backends import load_backend
from dpcore.spec.ops import Backend
from whole_step.contestants import Contestant, Setting
from whole_step.models import cases
from whole_step.workers import WARM_UP, attempt

OPERATORS = 12  # of torch, those that take most
clock = time.process_time


# Of this module, and the clock on torch's own classes: dpcore refuses a model that reaches values which change.
calls: list[tuple[str, float, float]] = []
running: list[str] = []


@contextmanager
def timing(owner: Any, attribute: str, name: str) -> Iterator[None]:
    """Time a function of a module or class for the length of the block; what it calls belongs to it."""
    original: Callable[..., Any] = getattr(owner, attribute)

    def timed(*arguments: Any, **options: Any) -> Any:
        if running:
            return original(*arguments, **options)
        running.append(name)
        begin = clock()
        try:
            return original(*arguments, **options)
        finally:
            calls.append((name, begin, clock()))
            running.clear()

    setattr(owner, attribute, timed)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def split(model: str, names: list[str], quick: bool, rounds: int, seed: int) -> dict[str, str]:
    """Return the split of every contestant's step as text, medians over the rounds."""
    setting = Setting(cases(quick)[model], seed)
    lines = []
    for name in names:
        built, reason = attempt(name, setting, WARM_UP)
        lines.append(f"{model}, {name}{'' if built else f': refused: {reason}'}")
        if built is None:
            continue
        built.clock = clock
        steps = [phases(built) for _ in range(rounds)]
        found = {key: statistics.median(step.get(key, 0.0) for step in steps) for step in steps for key in step}
        whole = statistics.median(sum(step.values()) for step in steps)
        lines += [f"  {1e3 * took:9.1f} ms  {took / whole:6.1%}  {key}" for key, took in found.items()]
        lines += [f"  {1e3 * whole:9.1f} ms          whole step, with these clocks in it", operators(built), ""]
    return {"text": "\n".join(lines)}


def phases(built: Contestant) -> dict[str, float]:
    """Take one step and return the seconds of its parts, in order."""
    backend, batch = load_backend("torch"), built.draw()
    calls.clear()
    with ExitStack() as stack:
        stack.enter_context(timing(torch.nn.Module, "__call__", "forward"))
        stack.enter_context(timing(torch.autograd, "_engine_run_backward", "backward"))
        for operation in (name for name, kind in vars(Backend).items() if callable(kind) and name[0] != "_"):
            stack.enter_context(timing(backend, operation, operation))
        begin = clock()
        built.step(batch)
        end = clock()
    summed = built.summed[0] if built.summed else end
    found: dict[str, float] = defaultdict(float)
    for name, first, last in calls:
        found[name if first < summed else f"noise and update: {name}"] += last - first
    before = sum(took for name, took in found.items() if not name.startswith("noise"))
    found["the rest before the noise"] = summed - begin - before
    if built.summed:
        after = sum(took for name, took in found.items() if name.startswith("noise"))
        found["noise and update: the rest"] = end - summed - after
    return dict(found)


def operators(built: Contestant) -> str:
    """Take one step under torch's profiler and return the operators that take most of it."""
    batch = built.draw()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        built.step(batch)
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_cpu_time_total)[:OPERATORS]
    return "\n".join(f"  {row.self_cpu_time_total / 1e3:9.1f} ms  {row.count:6d} calls  {row.key[:60]}" for row in rows)
