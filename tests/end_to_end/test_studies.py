"""The studies of docs/studies run, and the first one's many problems at once are so many runs of dpcore.minimize."""

import importlib
import json
import math
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("torch")
import dpcore
from dpcore.sampling import FixedOrderSampler
from dpcore.spec import rounded_normal

STUDIES = Path(__file__).resolve().parents[2] / "docs" / "studies"


@pytest.fixture
def study(monkeypatch) -> Any:
    """Imports a study by name, as Python does when its file is run."""
    monkeypatch.syspath_prepend(str(STUDIES))
    pytest.importorskip("matplotlib")
    return importlib.import_module


@pytest.mark.parametrize("strategy", ["square-root", "identity"])
@pytest.mark.parametrize("variant", ["post_processing", "independent_moments"])
def test_many_problems_at_once_are_single_runs(study: Any, variant: str, strategy: str):
    logistic = study("logistic_1d")
    rng = np.random.default_rng(0)
    steps, problems, sigma, rate = 40, 3, 0.3, 0.7
    x, y = 4 * rng.standard_normal((steps, problems)), rng.integers(0, 2, (steps, problems)).astype(float)
    z = rng.standard_normal((steps, 2, problems))
    noise = np.stack([logistic.correlation(strategy, steps) @ z[:, k] for k in (0, 1)], axis=1)
    together = logistic.run_all(variant, sigma, rate, x, y, noise)

    clipped = 0
    for i in range(problems):

        def gradient(theta: Any, indices: Any, i: int = i) -> Any:
            nonlocal clipped
            g = (1 / (1 + np.exp(-theta * x[indices, i])) - y[indices, i]) * x[indices, i]
            clipped += int(abs(g[0]) > 1)
            return g[:, None]

        method = dpcore.methods.dp_adagrad(variant=variant, lr=rate, noise_multiplier=sigma, strategy=strategy)
        batches = FixedOrderSampler(dataset_size=steps, batch_size=1, shuffle=False)
        normals = z[:, :, i : i + 1] if variant == "independent_moments" else z[:, 0, i : i + 1]
        alone = dpcore.minimize(gradient, np.zeros(1), batches, method, steps=steps, noise=normals)
        np.testing.assert_allclose(together[i], alone.x[0], rtol=1e-7)  # a grid of 2^-36
    assert clipped > problems  # or the clip would not have been tested


def test_logistic_regression(study: Any, tmp_path):
    logistic = study("logistic_1d")
    settings = logistic.Settings(2, 3, 2, examples=300, rates=(0.25, 0.5), strategies=("square-root",))
    result = logistic.study(tmp_path, settings)
    written = json.loads((tmp_path / "logistic-1d.json").read_text())
    assert written["tables"] == result["tables"]
    assert written["denominator_inflation"]["square-root"] > 1
    for rows in written["tables"]["square-root"].values():
        assert set(rows) == set(logistic.METHODS)
        for row in rows.values():
            assert -1e-9 <= row["excess_over"]["theta = 1"]["mean"] < 0.2
        assert rows["non-private"]["excess_over"]["theta = 1"]["mean"] < 0.05
        assert rows["non-private"]["excess_over"]["non-private"]["mean"] == 0
    assert len({row["learning_rate"] for row in written["tables"]["square-root"]["shared"].values()}) == 1
    assert (tmp_path / "studies-logistic-1d.png").stat().st_size > 10_000


def test_scale_then_privatize(study: Any, tmp_path):
    module = study("scale_then_privatize")
    settings = module.Settings(
        coordinates=16, constant_steps=600, ratios=(20.0,), rates=(0.03,), scale_eps=(0.01,), steps=60, tuning_seeds=1,
        seeds=2,
    )  # fmt: skip
    result = module.study(tmp_path, settings)
    ratio = {name: result["constant_gradient"][name]["root_over_gradient"] for name in ("post-processing",)}
    scaled = np.array(result["constant_gradient"]["scale-then-privatize"]["root_over_gradient"])
    assert abs(scaled / result["constant_gradient"]["predicted"] - 1).max() < 0.2
    assert ratio["post-processing"][-1] > 10 * ratio["post-processing"][0]
    left = {row["method"]: row["mean"] for row in result["quadratic"]}
    assert left["non-private"] < 0.05
    assert left["scale-then-privatize"] < left["post-processing"]
    assert (tmp_path / "studies-scale-then-privatize.png").exists()


def test_bias_correction(study: Any, tmp_path):
    module = study("bias_correction")
    settings = module.Settings(
        dimension=256, times_threshold=(0.25, 1.0, 4.0), decays=(0.9, 0.99), batch_over_sigma=(50.0,), rates=(0.01,),
        eps=(0.1,), steps=40, tuning_seeds=1, seeds=2,
    )  # fmt: skip
    result = module.study(tmp_path, settings)
    for below, at, above in zip(*[iter(result["constant_gradient"])] * 3, strict=True):
        assert (below["trustworthy"], above["trustworthy"]) == (False, True)
        assert below["negative_share"] > 0.35
        assert 0.1 < at["negative_share"] < 0.45
        assert above["negative_share"] < 0.02
        assert abs(above["rate_corrected"][1] - 1) < 0.1
    left = {row["method"]: row["mean"] for row in result["quadratic"]}
    assert left["bias-corrected, tiny eps"] > 1 > left["bias-corrected, tuned eps"]
    assert (tmp_path / "studies-bias-correction.png").exists()


DIEHARDER = """#!{python}
import shutil
import sys
from fractions import Fraction
if "-l" in sys.argv:
    sys.exit("dieharder version 0.0")
read = sys.stdin.buffer.read(4_000_000 + 40)
assert len(read) == 4_000_040
print("stdin_input_raw|  2.67e+07  |1839831839|")
print("   a_test|   0|   100|   1|0.2{{}}|  PASSED".format(sys.argv[4]))
print("   a_test|   1|   100|   1|0.0{{}}|  WEAK".format(read[-1] % 10))
"""


def test_stream_statistics(study: Any, tmp_path):
    module = study("stream_statistics")
    program = tmp_path / "dieharder"
    program.write_text(DIEHARDER.format(python=sys.executable))
    program.chmod(0o755)
    settings = module.Settings(
        sources=(("rows", "chacha20"), module.CONTROL), tests=(3, 8), repeated=1, rounds=(("chacha20", 2),),
        size=1 << 16, rest_tiles=2,
    )  # fmt: skip
    result = module.study(tmp_path, settings, str(program))
    written = json.loads((tmp_path / "stream-statistics.json").read_text())
    assert written["battery"] == result["battery"]
    rows = result["battery"][0]["rows"]
    assert [(row["ntup"], row["verdict"]) for row in rows] == [(0, "PASSED"), (1, "WEAK")] * 2
    assert [row["p"] for row in rows[::2]] == [0.23, 0.28]
    assert result["battery_summary"]["stream"]["p_values"] == result["battery_summary"]["control"]["p_values"] == 4
    normals = result["normals"]["chacha20"]
    assert normals["normals"] == 6 * 2**16
    for p in (normals["kolmogorov_smirnov_p"], normals["chi_square_p"], normals["beyond"]["3"]["p"]):
        assert 1e-3 < p <= 1
    assert np.abs([*normals["moments_in_deviations"], *normals["correlations_in_deviations"].values()]).max() < 4.5
    assert normals["lowest_20_bits"]["chi_square_p"] > 1e-3
    found = result["tail_of_the_rest"]
    assert min(found["size_p"], found["beyond"]["5.5"]["p"]) > 1e-3


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_sum_of_the_rest_is_that_of_its_places(study: Any):
    """At 14 of 30 bits, against the library's own numbers; and the share that the law's docstring states."""
    module, places = study("rest_sum"), np.arange(2**14)
    for strip, found in enumerate(module.sums(20, 14)):
        r = rounded_normal.rest(np.full(2**14, strip), places, 14)
        hat = rounded_normal.tables().numbers[1, strip]
        assert found == (sum(map(Fraction, r.tolist()), Fraction(0)) / 2**14, r.min() / hat, r.max() / hat)
    # Of all strips: at so few bits the midpoints' own error cancels only over the whole.
    *_, (_, error, others) = module.errors(640, 14)
    assert 2.0**-46 < abs(error) < 2.0**-44.6
    assert others < 1e-25


def test_the_study_of_rates_finds_the_librarys_rate_and_its_page_has_its_numbers(study: Any):
    rates = study("rates")
    rng = np.random.default_rng(0)
    c, a, z = np.geomspace(1, 0.1, 20), rng.normal(size=20) / 4, rng.normal(size=(50, 20))
    batches = FixedOrderSampler(dataset_size=1, batch_size=1, shuffle=False)
    method = dpcore.methods.dp_sgd(schedule=dpcore.schedules.Doubling(), max_grad_norm=10.0, noise_multiplier=0.005)
    alone = dpcore.minimize(lambda x, _: (c * (x - a))[None], np.zeros(20), batches, method, steps=50, noise=z)
    together = rates.run(rates.Found, lambda x, _: c * (x - a), np.zeros(20), z, 10.0, 0.05)
    np.testing.assert_allclose(together, alone.x, rtol=1e-6, atol=1e-8)

    network, x = rates.Network(6, 5, 3), rates.Network(6, 5, 3).start(0)
    inputs, labels = rng.normal(size=(9, 6)).astype(np.float32), rng.integers(0, 3, 9)
    first, last = (torch.tensor(part, requires_grad=True) for part in np.split(x, [35]))
    for i in range(9):
        hidden = torch.relu(torch.tensor(inputs[i]) @ first[:30].view(6, 5) + first[30:])
        logits = hidden @ last[:15].view(5, 3) + last[15:]
        gradient = torch.autograd.grad(
            torch.nn.functional.cross_entropy(logits, torch.tensor(labels[i])), [first, last]
        )
        whole = torch.cat(gradient).numpy()
        got = network.clipped_sum(x, inputs[i : i + 1], labels[i : i + 1], 0.7)
        np.testing.assert_allclose(got, whole * min(1, 0.7 / np.linalg.norm(whole)), rtol=1e-4, atol=1e-6)
    results = json.loads((STUDIES.parent / "results/rates.json").read_text())["results"]
    assert rates.table(results) in (STUDIES / "rates.md").read_text()


def test_the_page_on_tuning_has_the_numbers_of_its_study():
    page = (STUDIES.parent / "tuning.md").read_text()
    arms = json.loads((STUDIES.parent / "results/selection.json").read_text())["arms"]
    for arm, row in arms.items():
        shown = [f"{100 * mean:.1f} ± {100 * half:.1f}" for mean, half in (row["accuracy"], row["selection_better_by"])]
        cells = [f"{row['noise_multiplier']:.2f}", *shown[: 1 if arm == "selection" else 2]]
        assert f"| {' | '.join(cells)} |" in page, arm


# The study of docs/studies/scattering.md runs in small, and its page has the numbers of its rows.


ROWS, PAGE = STUDIES.parent / "results/scattering.jsonl", STUDIES / "scattering.md"


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
        epochs=2, batch_size=256, configurations=2, seeds=2, held_out=300, looks=2, subset=100
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
        assert [len(result.of(kind, name)) for kind in ("tuning", "final", "spectrum")] == [2, 2, 1]
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


def test_predicted_losses_are_means_of_runs(study: Any):
    predicted = study("predicted")
    rows = [predicted.compare(number, kind) for number in (1, 9) for kind in predicted.KINDS]
    for row in rows:
        assert abs(row["mean"] - row["predicted"]) < 4 * row["error"], row
    recorded = json.loads((STUDIES.parent / "results" / "predicted.json").read_text())
    assert (recorded["of"], len(recorded["rows"])) == (predicted.QUADRATICS * len(predicted.KINDS),) * 2
    # Those of another method are not: the intervals are narrow enough to tell.
    assert abs(rows[0]["mean"] - rows[1]["predicted"]) > 4 * rows[0]["error"]
