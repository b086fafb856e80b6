"""The studies of docs/studies run, and the first one's many problems at once are so many runs of dpcore.minimize."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

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


def test_for_free_adds_noise_of_sigma_to_each_release_and_costs_more(study: Any):
    logistic = study("logistic_1d")
    batches = FixedOrderSampler(dataset_size=10, batch_size=1, shuffle=False)
    plans = {
        name: dpcore.Plan(dpcore.methods.dp_adagrad(variant=variant, lr=1.0, noise_multiplier=sigma), batches, 10)
        for name, (variant, sigma) in logistic.METHODS.items()
        if sigma
    }
    free = plans["independent moments for free"]
    assert np.isclose(free.noise_standard_deviation(), plans["post-processing"].noise_standard_deviation())
    assert np.isclose(free.square_noise_standard_deviation(), logistic.SIGMA)
    epsilon = {name: plan.epsilon(1e-5) for name, plan in plans.items()}
    assert epsilon["independent moments"] == epsilon["post-processing"] < epsilon["independent moments for free"]


def test_the_excess_loss_is_exact(study: Any):
    excess = study("logistic_1d").excess
    rng = np.random.default_rng(1)
    x = rng.standard_normal(400_000)
    likely = 1 / (1 + np.exp(-x))
    for theta in (0.0, 0.4, 2.5):
        sampled = np.logaddexp(0, theta * x) - np.logaddexp(0, x) - likely * (theta - 1) * x
        assert abs(excess(theta) - sampled.mean()) < 5 * sampled.std() / np.sqrt(len(x))
    assert excess(1.0) == 0
    assert (excess(np.linspace(-2, 5, 51)) > 0).all()


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


def test_a_law_that_is_not_the_normal_one_is_noticed(study: Any):
    """Counts of 10^8 numbers whose middle or scale is off by little."""
    module = study("normal_law")

    def counts(shift: float, scale: float) -> Any:
        return np.diff(np.round(10**8 * norm.cdf(module.edges(), shift, scale))).astype(np.int64)

    assert module.law(counts(0, 1))["chi_square_p"] > 0.999  # nothing but rounding
    assert module.law(counts(0, 1))["kolmogorov_smirnov_p"] > 0.5
    assert module.law(counts(5e-4, 1))["kolmogorov_smirnov_p"] < 1e-3
    assert module.law(counts(0, 1.001))["kolmogorov_smirnov_p"] < 1e-3
    assert module.law(counts(0, 1.01))["chi_square_p"] < 1e-3  # the counts have no noise that would add to it


def test_neighbors_come_in_turn(study: Any):
    module = study("dieharder")
    rows = next(module.stream_words("rows", "philox")).reshape(-1, module.NEIGHBORS)
    for i in (0, 1, 15):
        row = module.backend.words(module.KEY, module.ROW + i, 0, 0, module.WORDS, rng="philox")
        assert np.array_equal(rows[:, i], row)
    keys = next(module.stream_words("keys", "chacha20")).reshape(-1, module.NEIGHBORS)
    assert len({column.tobytes() for column in keys.T}) == module.NEIGHBORS
    pieces = module.stream_words("elements", "chacha20")
    joined = np.concatenate([next(pieces), next(pieces)])
    assert np.array_equal(joined, module.backend.words(module.KEY, module.ROW, 0, 0, 2 * module.WORDS))


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
