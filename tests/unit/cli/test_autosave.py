"""When `dpcore train` saves: by the plan and by time."""

from __future__ import annotations

import pytest

pytest.importorskip("typer")
pytest.importorskip("torch")

from dpcore.cli.train.training import Autosave, cost, every


def saves(steps: int, a_step: float, a_save: float) -> list[int]:
    """After which of so many steps it saves, where a step and a save take so many seconds."""
    now, found = [0.0], []

    def save() -> None:
        now[0] += a_save
        found.append(step)

    autosave = Autosave(save, steps, clock=lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += a_step
        autosave.after(step)
    return found


def test_a_crash_costs_at_most_a_hundredth_of_the_plan():
    assert saves(1000, 0.5, 0.01) == list(range(10, 1001, 10))
    assert saves(50, 0.5, 0.01) == list(range(1, 51))
    assert every(10**6) == 10**4


def test_or_a_minute():
    assert saves(10**5, 1.0, 0.5)[:3] == [60, 120, 180]
    assert saves(300, 100.0, 1.0) == [*range(1, 301)]


def test_a_save_in_any_case_counts():
    found: list[int] = []
    autosave = Autosave(lambda: found.append(0), 1000, 95, lambda: 0.0)
    autosave.after(99)
    autosave.now(100)
    autosave.after(105)
    assert len(found) == 1
    autosave.after(110)
    assert len(found) == 2


def test_it_says_what_a_crash_would_cost():
    assert "every 23 of 2,300 steps or 60 seconds" in cost(2300)
    assert "and up to 23 reserved ahead, which stay charged" in cost(2300)
