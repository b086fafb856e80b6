"""The study of docs/studies/scattering.md runs in small, and its page has the numbers of its rows."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

import dpcore

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
ROWS, PAGE = ROOT / "docs/results/scattering.jsonl", ROOT / "docs/studies/scattering.md"


@pytest.fixture
def study(monkeypatch) -> Any:
    """Imports a study by name, as Python does when its file is run."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "studies"))
    return importlib.import_module


@pytest.mark.parametrize("peak", [-5.0, -2.0, 0.0, 1.0, 3.0, 4.5, 8.0])
@pytest.mark.parametrize("settings", [1, 3])
def test_the_search_spends_its_budget_and_finds_a_peak_within_reach(study: Any, peak: float, settings: int):
    search = study("scattering_search").search
    tried: list[tuple[int, float]] = []

    def evaluate(setting: int, k: float) -> float:
        tried.append((setting, k))
        return setting - abs(k - peak)

    setting, k = search(evaluate, settings, 9)
    assert len(tried) == len(set(tried)) == 9
    assert setting == settings - 1  # the best of the settings, wherever the rate is
    assert abs(k - peak) <= (1 if abs(peak) <= 5 else 3)
    assert (setting, k) == max(tried, key=lambda one: one[0] - abs(one[1] - peak))


def test_the_search_goes_in_the_order_of_the_plan(study: Any):
    def order(peak: float, settings: int) -> list[tuple[int, float]]:
        tried: list[tuple[int, float]] = []

        def evaluate(setting: int, k: float) -> float:
            tried.append((setting, k))
            return -abs(k - peak) - setting

        study("scattering_search").search(evaluate, settings, 9)
        return tried

    rates = [0, 2, -2, 4, 6]  # by factors of 4, and no further than five runs
    assert order(7.1, 3) == [*((0, k) for k in rates), (1, 6), (2, 6), (0, 7), (0, 5)]
    assert order(0.1, 1) == [(0, k) for k in (0, 2, -2, 1, -1, 0.5, -0.5, 0.25, -0.25)]


def test_the_spectrums_gradient_is_the_librarys(study: Any):
    """One step without noise moves the weights by the clipped sum that the spectra are made of."""
    clipped_sum = study("scattering_spectrum").clipped_sum
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(40, 6, generator=generator), torch.randint(10, (40,), generator=generator)
    model = torch.nn.Linear(6, 10, bias=False)
    torch.nn.init.normal_(model.weight, std=2, generator=generator)
    before = model.weight.detach().clone()
    method = dpcore.methods.dp_sgd(lr=1, clipping="automatic", noise_multiplier=0, batch_size=20)
    private = importlib.import_module("dpcore.torch").make_private(
        model, (inputs, labels), method, steps=1, target_delta=1e-5
    )
    for batch in private.loader:
        private.step(batch)
        moved = before - model.weight.detach()
        torch.testing.assert_close(moved, clipped_sum(before, *batch) / 20, rtol=1e-4, atol=1e-6)
        assert moved.abs().max() > 1e-3


def test_the_study_runs_in_small_goes_on_where_it_was_and_spends_equal_gradients(study: Any, tmp_path: Path):
    module, report = study("scattering"), study("scattering_report")
    data = module.features("digits", None, tmp_path / "features.pt")
    small = module.Settings(
        epochs=2, batch_size=128, configurations=3, seeds=2, held_out=300, looks=2, subset=100
    )  # fmt: skip
    path = tmp_path / "scattering.jsonl"
    module.study(data, module.Rows(path), small, until="00:00")  # too late for any round, so only the search
    assert not [row for row in module.read(path) if row["kind"] == "final"]
    module.study(data, module.Rows(path), small)
    rows = module.read(path)
    module.study(data, module.Rows(path), small)
    assert [row["kind"] for row in module.read(path)[len(rows) :]] == ["session"]

    result = report.Result(rows)
    assert result.seeds == [0, 1]
    for name in module.CONTESTANTS:
        assert [len(result.of(kind, name)) for kind in ("tuning", "final", "spectrum")] == [3, 2, 1]
        for row in result.of("final", name):
            spent = row["steps"] * row["gradients_an_example"] * small.batch_size / row["examples"]
            assert 2 <= spent < 2.3
            assert 0.99 < row["epsilon"] <= 1
    # The same key gives the same run.
    first, best = result.of("final", "DOPPLER")[1], result.of("final", "DOPPLER")[1]["setting"]
    again = module.train(data, module.CONTESTANTS["DOPPLER"], best, first["lr"], first["seed"], small)
    assert again["accuracy"] == first["accuracy"]
    report.tables(result)
    report.draw_accuracy(tmp_path / "accuracy.png", result)
    report.draw_spectra(tmp_path / "spectra.png", result)
    assert min((tmp_path / f"{name}.png").stat().st_size for name in ("accuracy", "spectra")) > 10_000


def made_up(lead: float) -> list[dict[str, Any]]:
    """Rows in which one method is ahead of both baselines by `lead`, give or take 0.01."""
    rows: list[dict[str, Any]] = []
    for name in ("DP-SGD", "DP-SGD with momentum", "DOPPLER"):
        rows.append({"kind": "tuning", "name": name})
        for seed in range(5):
            end = 90 + 0.3 * seed + (lead + 0.01 * (-1) ** seed if name == "DOPPLER" else 0)
            rows.append({"kind": "final", "name": name, "seed": seed, "accuracy": [50.0, end]})
    return [*rows, {"kind": "final", "name": "DP-SGD", "seed": 5, "accuracy": [50.0, 0.0]}]


def test_a_winner_is_above_both_baselines_and_incomplete_seeds_do_not_count(study: Any):
    report = study("scattering_report")
    assert report.Result(made_up(0.1)).seeds == [0, 1, 2, 3, 4]
    assert report.winners(report.Result(made_up(0.1))) == ["DOPPLER"]
    assert report.winners(report.Result(made_up(0.0))) == []
    assert {row["verdict"] for row in report.differences(report.Result(made_up(-0.1)))} == {"below"}
    (row, _) = report.differences(report.Result(made_up(0.1)))
    # Two comparisons and five seeds: quantiles of Student's t from a table.
    assert math.isclose(row["adjusted"] / row["half"], 3.495 / 2.776, rel_tol=1e-3)
    assert math.isclose(row["difference"], 0.102, rel_tol=1e-9)


def test_the_page_has_the_numbers_of_the_rows(study: Any):
    report = study("scattering_report")
    result, page = report.Result(report.read(ROWS)), PAGE.read_text()
    assert f"{report.MARKS[0]}\n\n{report.verdict(result)}\n\n{report.tables(result)}\n\n{report.MARKS[1]}" in page
    tried = {name: len(result.of("tuning", name)) for name in result.names}
    assert tried == {name: 9 if name == "DP-SGD" else 7 for name in study("scattering_search").CONTESTANTS}
    assert all(row["epsilon"] <= 1 for row in result.rows if row["kind"] == "final")


def test_the_page_is_written_between_its_marks(study: Any, tmp_path: Path):
    report = study("scattering_report")
    result, page = report.Result(report.read(ROWS)), tmp_path / "page.md"
    page.write_text(f"before\n{report.MARKS[0]}\nstale\n{report.MARKS[1]}\nafter\n")
    report.write(page, result)
    text = page.read_text()
    assert (text[:7], text[-7:]) == ("before\n", "\nafter\n")
    assert "stale" not in text
    report.write(page, result)
    assert page.read_text() == text
