"""What the host does in a step outside of the model: its time, launches, copies and waits."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

import dpcore
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout

from .record import NOT_A_TIMING
from .runner import Setting
from .steps import KEY, Case, Steps

EXAMPLES, WIDTH, ROUNDS = 8, 1000, 50


def tensors(setting: Setting) -> int:
    """Return how many tensors: those of a transformer of twelve layers; in the interpreter each takes its time."""
    return 4 if setting.small else 150


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the kernels that dpcore_triton starts, by name, wherever its modules hold `launch`."""
    from dpcore_triton.launch import launch

    found: Counter[str] = Counter()

    def counting(function: Any, *arguments: Any, **options: Any) -> None:
        found[getattr(function, "__name__", None) or getattr(getattr(function, "fn", None), "__name__", "?")] += 1
        launch(function, *arguments, **options)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("dpcore_triton.") and vars(module).get("launch") is launch:
                stack.enter_context(mock.patch.object(module, "launch", counting))
        yield found


def host_cost(run: Callable[[], object], setting: Setting) -> dict[str, Any]:
    """Return host time without waiting for the device, launches of a run, and its calls of CUDA."""
    if not setting.small:
        run()
        run()  # now tables and handles exist, which are kept from step to step
    with counted() as launches:
        run()
    found: dict[str, Any] = {"launches_of_dpcore_triton": dict(launches), "launches": sum(launches.values())}
    if setting.small:
        return {**found, "timed": False, "note": NOT_A_TIMING}
    passes = []
    for _ in range(2):
        seconds = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()  # an empty queue: a full one would make the host wait
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        passes.append(1e3 * statistics.median(seconds))
    return {**found, "timed": True, "host_ms": passes, **profiled(run)}


def profiled(run: Callable[[], object]) -> dict[str, Any]:
    """Count, by torch.profiler, a run's operations on the device and its calls of CUDA."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
    events = list(found.events() or ())
    device = Counter(event.name[:100] for event in events if event.device_type == DeviceType.CUDA)
    calls = Counter(event.name for event in events if event.device_type == DeviceType.CPU and event.name[:2] == "cu")
    return {
        "on_device": dict(device),
        "calls_of_cuda": dict(calls),
        "synchronizations": sum(count for name, count in calls.items() if "Synchronize" in name),
        "remark": "the profiler itself ends with one cudaDeviceSynchronize, which is counted here",
    }


def step_alone(setting: Setting) -> dict[str, Any]:
    """`Backend.step` on many small tensors."""
    steps = Steps(Case("adam"), [WIDTH] * tensors(setting), setting.device)
    return {"tensors": tensors(setting), "check": steps.check(), **host_cost(steps.step, setting)}


def clip_and_release(setting: Setting) -> dict[str, Any]:
    """A step outside of the model: norms, factors, sums, noise and Adam, by the mechanism."""
    count, backend = tensors(setting), load_backend("triton")
    method = dpcore.methods.dp_sgd(lr=1e-3, base="adam", noise_multiplier=1.0, batch_size=EXAMPLES, max_grad_norm=1.0)
    sampler = dpcore.sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=EXAMPLES)
    plan = Plan(method, sampler, 10_000, tensors=tuple(map(str, range(count))))
    layout = Layout.of((str(index), (WIDTH,)) for index in range(count))
    parameters = [torch.randn(WIDTH, device=setting.device) for _ in range(count)]
    rows = [torch.randn(EXAMPLES, WIDTH, device=setting.device) for _ in range(count)]
    mechanism = Mechanism(plan, layout, parameters, backend=backend, keys=RunKeys.new(KEY))

    def run() -> None:
        mechanism.add(rows)
        mechanism.release(parameters)

    return {"tensors": count, "examples": EXAMPLES, **host_cost(run, setting)}
