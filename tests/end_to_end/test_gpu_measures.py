"""What `make gpu` states of a measurement: bytes, shares, medians; and its checks, which have to notice."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from asv_benchmarks.gpu import clock, merge, steps, table

# A process runs either the interpreter or the device.
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


BYTES = {  # docs/kernels.md: a table of its own
    "sgd, chacha20": 16, "momentum, philox": 24, "adam, no noise": 32, "adamw, chacha20": 32, "sgd, banded 8": 16 + 64,
    "adam, banded 32": 32 + 256, "adam, filter of order 2": 48, "sgd, noise by a recurrence of order 1": 32,
    "sgd, filter of order 1, displacement (as DiSK)": 28, "adam, scale": 36,
}  # fmt: skip


@pytest.mark.parametrize("name", BYTES)
def test_the_bytes_are_those_of_the_page(name: str) -> None:
    taken = steps.Steps(steps.CASES[name], [100, 23], DEVICE)
    assert taken.bytes_moved() == BYTES[name] * 123


def with_step(change: Any) -> steps.Steps:
    """Steps whose backend takes the step and then does something more to its slots."""
    taken = steps.Steps(steps.CASES["momentum, chacha20"], [300, 9000], DEVICE)
    honest = taken.ops

    def step(slots: Any, *arguments: Any, **options: Any) -> None:
        honest.step(slots, *arguments, **options)
        change(slots)

    taken.ops = SimpleNamespace(step=step)
    return taken


def test_the_check_accepts_an_honest_step() -> None:
    assert with_step(lambda slots: None).check()["windows"] == 5


def spoil_window(slots: Any) -> None:
    slots[1].moments[0][8900:] *= 1.01


def spoil_outside(slots: Any) -> None:
    slots[1].moments[0][8000] = float("nan")


@pytest.mark.parametrize(
    ("change", "told"), [(spoil_window, "differs from the reference"), (spoil_outside, "not finite|by nan")]
)
def test_the_check_notices_what_is_wrong(change: Any, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        with_step(change).check()


def test_the_check_notices_what_was_not_written() -> None:
    taken = steps.Steps(steps.CASES["sgd, no noise"], [30_000], DEVICE)
    honest, kept = taken.ops, taken.slots[0].parameter.clone()

    def step(slots: Any, *arguments: Any, **options: Any) -> None:
        honest.step(slots, *arguments, **options)
        slots[0].parameter[6016:6272] = kept[6016:6272]  # between the windows

    taken.ops = SimpleNamespace(step=step)
    with pytest.raises(AssertionError, match=r"2 of 234 blocks"):
        taken.check()


def test_the_same_bits_are_told_from_others() -> None:
    one = steps.Steps(steps.CASES["adam, no noise"], [700], DEVICE)
    other = one.copy()
    one.step()
    assert not steps.same_bits(one, other)
    other.step()
    assert steps.same_bits(one, other)
    other.slots[0].moments[1][3] = torch_next(other.slots[0].moments[1][3])
    assert not steps.same_bits(one, other)


def torch_next(value: Any) -> Any:
    return value.nextafter(value + 1)


class Event:
    """An event whose pass is slower from round to round, and slower in the second one."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        Event.made += 1
        self.number = Event.made

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        assert end.number == self.number + 1
        return float(end.number)


def test_times_are_the_medians_of_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "empty", lambda *shape, dtype, device: empty(4, dtype=dtype))
    ran: list[str] = []
    found = clock.times(lambda: ran.append("run"), timed=True, draw=lambda: ran.append("draw"), most=3)
    assert found == {"timed": True, "rounds": 3, "ms": [4.0, 10.0], "least_ms": 2.0, "most_ms": 12.0}
    assert ran == ["draw", "run"] * (3 + 2 * 3)


def measured(ms: float, **more: Any) -> dict[str, Any]:
    return {"status": "done", "ms": [ms, ms], **more}


def test_shares_and_ratios_of_a_run_on_a_device() -> None:
    kernels = {
        "copy 1 GB": measured(1.0, bytes=2e9, bytes_per_s=[2e12, 2e12]),
        "step: sgd": measured(2.0, bytes=16e8, bytes_per_s=[8e11, 1e12], coordinates=10**8),
        "step: killed": {"status": "running"},
    }
    training = {
        "m: plain, eager": measured(2.0, peak_bytes=2**30),
        "m: private": measured(5.0, peak_bytes=3 * 2**30),
        "m: plain, compiled": {"status": "failed", "error": "no compiler"},
    }
    common = {"small": False, "machine": {"gpu": "GPU X", "commit": "abc"}}
    result = merge.together({"kernels": {**common, "parts": kernels}, "training": {**common, "parts": training}})
    assert kernels["step: sgd"]["share_of_copy_rate"] == [0.4, 0.5]
    assert result["ratios_of_training"] == {"m": {"time over eager": 2.5, "peak memory over eager": 3.0}}
    assert result["left_out"] == {"kernels: step: killed": merge.ENDED}
    text = table.markdown(result)
    assert "| step: sgd | 16.0 | 2.000 / 2.000 | 900 | 40% / 50% |" in text
    assert "| m | private | 5.000 / 5.000 | 3.00 | 2.50 time over eager, 3.00 peak memory over eager |" in text
    assert "- training: m: plain, compiled: no compiler" in text
