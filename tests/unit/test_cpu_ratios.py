"""`asv_benchmarks/cpu_ratios.py` fails on a slower private step, and not on one slow measurement."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = {"machine": {"cpu": "this"}, "ratios": {"mlp": 2.0, "cnn": 1.5}}


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "asv_benchmarks"))
    return importlib.import_module("cpu_ratios")


@pytest.mark.parametrize(
    ("cpu", "measured", "named"),
    [
        ("this", [2.2, 1.6], []),
        ("this", [2.4, 2.2, 1.6], []),  # slow once
        ("this", [2.4, 2.4, 1.6], ["mlp: 20% over the recorded ratio; the limit is 15%"]),
        ("this", [2.0, 1.8, 1.75], ["cnn: 17% over the recorded ratio; the limit is 15%"]),
        ("another", [2.4, 1.8], []),
        ("another", [3.2, 3.1, 1.8], ["mlp: 55% over the recorded ratio; the limit is 50%"]),
    ],
)
def test_a_ratio_over_its_limit_twice_is_named(ratios: Any, cpu: str, measured: list[float], named: list[str]) -> None:
    given = iter(measured)
    assert ratios.worse(lambda model: next(given), RECORD, cpu) == named
    assert next(given, None) is None


def test_a_ratio_is_of_processor_time_in_turns(ratios: Any) -> None:
    recorded = json.loads(ratios.RECORDED.read_text())
    assert set(recorded["ratios"]) == set(ratios.MODELS)
    workers = importlib.import_module("whole_step.workers")
    row = {"seconds": [9.0] * 3, "cpu_seconds": [3.0, 8.0, 5.0], "sum_seconds": [], "draw_seconds": []}
    plain = {"seconds": [1.0] * 3, "cpu_seconds": [1.0, 2.0, 2.0], "sum_seconds": [], "draw_seconds": []}
    workers.summarize(row, plain)
    assert row["ratio_of_pairs"] == 3.0
    assert row["ratio_of_medians"] == 9.0
