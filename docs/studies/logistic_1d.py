"""Private AdaGrad on one-dimensional logistic regression ("On Design Principles for Private Adaptive Optimizers", 5.1).

    python docs/studies/logistic_1d.py --out FOLDER

writes logistic-1d.json and studies-logistic-1d.png there and prints two tables: every method at one learning rate, the
best one without noise, and every method at its own best one. See docs/studies.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from dpcore.method import Method
from numpy.typing import NDArray
from study import COLORS, generator, out_folder, picture, rounded, save

import dpcore
from dpcore.cli.intervals import mean_interval
from dpcore.sampling import FixedOrderSampler

Floats = NDArray[np.float64]

SIGMA = 0.1
CLIP = 1.0
RATES = tuple(2 ** (k / 2) for k in range(-6, 5))

# Name: variant of dpcore.methods.dp_adagrad, noise multiplier. Independent moments at sigma add noise of
# sqrt(2) sigma to each of the two releases, which together cost what one release at sigma costs. "For free" adds noise
# of sigma to each. That is independent moments at sigma / sqrt(2), and this is what it costs: NOT what the others cost.
METHODS = {
    "non-private": ("post_processing", 0.0),
    "post-processing": ("post_processing", SIGMA),
    "independent moments": ("independent_moments", SIGMA),
    "independent moments for free": ("independent_moments", SIGMA / np.sqrt(2)),
}
PAPER = {
    "non-private": 0.0,
    "post-processing": 0.0034,
    "independent moments": 0.0005,
    "independent moments for free": 0.0004,
}


@dataclass(frozen=True)
class Settings:
    """How many data sets the rates are chosen on, how many others the tables are about, draws of noise for each."""

    tuning_sets: int = 30
    test_sets: int = 60
    draws: int = 30
    examples: int = 1000
    rates: tuple[float, ...] = RATES
    strategies: tuple[str, ...] = ("square-root", "identity")


def data(sets: int, examples: int) -> tuple[Floats, Floats]:
    """Inputs and labels, (examples, sets): x ~ N(0, 1), y ~ Bernoulli(1 / (1 + exp(-x))), then 90 % of x set to 0."""
    rng = generator(1)
    x = rng.standard_normal((sets, examples)).T
    y = (1 / (1 + np.exp(-x)) > rng.random((sets, examples)).T).astype(float)
    return np.where(rng.random((sets, examples)).T < 0.1, x, 0.0), y


def excess(theta: Floats) -> Floats:
    """Expected loss on inputs that are not set to 0, less that of theta = 1, by Gauss-Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    weights = weights / weights.sum()
    label = 1 / (1 + np.exp(-nodes))

    def loss(t: Floats) -> Floats:
        z = t[..., None] * nodes
        return (np.logaddexp(0, z) - label * z) @ weights

    return loss(np.asarray(theta)) - loss(np.asarray(1.0))


@cache
def correlation(strategy: str, steps: int) -> Floats:
    """C^{-1}, (steps, steps), of a strategy of dpcore: the noise of a run is C^{-1} Z."""
    found, inverse = dpcore.strategies.strategy(strategy, steps), np.zeros((steps, steps))
    for t in range(steps):
        for s, weight in found.rows(t):
            inverse[t, s] = weight
    return inverse


def run_all(variant: str, sigma: float, rate: float, x: Floats, y: Floats, noise: Floats) -> Floats:
    """Return theta after one epoch at batch size 1 for each of L independent problems, (L,).

    One call of dpcore.minimize, with one problem in each coordinate. The noise is (steps, 2, L): for the gradient and
    for its square. Three things are to be set right, and tests/end_to_end/test_studies.py compares with L single calls:

    - the clip: in one dimension it is a clip of each coordinate to [-CLIP, CLIP]. The gradient is clipped so here, and
      dpcore's clip of the whole vector is at the norm that this implies, sqrt(L) CLIP, where it changes nothing;
    - the gradient's noise is sigma times that norm, so sigma is divided by sqrt(L);
    - the noise of its square is sigma times that norm squared, so that sqrt(L) too much remains: it is taken off here.
    """
    steps, problems = x.shape
    widening = np.sqrt(problems)

    def gradient(theta: Floats, indices: NDArray[np.int64]) -> Floats:
        probability = 1 / (1 + np.exp(-theta * x[indices]))
        return np.clip((probability - y[indices]) * x[indices], -CLIP, CLIP)

    method: Method = dpcore.methods.dp_adagrad(
        variant=variant, lr=rate, max_grad_norm=CLIP * widening, noise_multiplier=sigma / widening
    )
    normals = noise[:, 0]
    if variant == "independent_moments":
        normals = np.stack([noise[:, 0], noise[:, 1] / widening], axis=1)
    batches = FixedOrderSampler(dataset_size=steps, batch_size=1, shuffle=False)
    theta: Floats = dpcore.minimize(gradient, np.zeros(problems), batches, method, steps=steps, noise=normals).x
    return theta


def excess_losses(strategy: str, settings: Settings) -> dict[str, Floats]:
    """Return, for each method, the excess loss by rate, data set and draw. All methods meet the same data and noise."""
    sets, draws, steps = settings.tuning_sets + settings.test_sets, settings.draws, settings.examples
    x, y = data(sets, steps)
    seeds = generator(2).standard_normal((2, steps, sets * draws))
    noise = np.stack([correlation(strategy, steps) @ stream for stream in seeds], axis=1)
    found = {}
    for name, (variant, sigma) in METHODS.items():
        many = draws if sigma else 1
        noisy = noise if sigma else np.zeros((steps, 2, sets))
        inputs, labels = np.repeat(x, many, axis=1), np.repeat(y, many, axis=1)
        losses = [excess(run_all(variant, sigma, rate, inputs, labels, noisy)) for rate in settings.rates]
        found[name] = np.reshape(losses, (len(settings.rates), sets, many))
    return found


def inflation(strategy: str, settings: Settings) -> float:
    """Return by how much post-processing's denominator is larger than it is without noise, at theta = 1 and the end.

    The denominator is the root of the sum of the squares of all released gradients, noise included.
    """
    x, y = data(settings.tuning_sets + settings.test_sets, settings.examples)
    gradient = np.clip((1 / (1 + np.exp(-x)) - y) * x, -CLIP, CLIP)
    signal = (gradient**2).sum(0).mean()
    noise = SIGMA**2 * (correlation(strategy, settings.examples) ** 2).sum()
    return float(np.sqrt((signal + noise) / signal))


def table(losses: dict[str, Floats], settings: Settings) -> dict[str, Any]:
    """Choose the rates on the first data sets; on the others, give means over data sets with 95 % intervals.

    The draws on one data set are not independent, so a data set counts once, by its mean.
    """
    tuned = {name: int(values[:, : settings.tuning_sets].mean((1, 2)).argmin()) for name, values in losses.items()}
    tables: dict[str, Any] = {}
    for which in ("shared", "tuned"):
        chosen = {name: tuned["non-private" if which == "shared" else name] for name in losses}
        tested = {name: values[chosen[name], settings.tuning_sets :] for name, values in losses.items()}
        means = {name: values.mean(1) for name, values in tested.items()}
        rows = {}
        for name, of_sets in means.items():
            over = {
                "theta = 1": of_sets,
                "non-private": of_sets - means["non-private"],
                "independent moments": of_sets - means["independent moments"],
            }
            intervals = {what: mean_interval(values) for what, values in over.items()}
            rows[name] = {
                "learning_rate": settings.rates[chosen[name]],
                "excess_over": {
                    what: {"mean": rounded(i.center), "half_width": rounded(i.half_width)}
                    for what, i in intervals.items()
                },
                "excess_by_set_and_draw": rounded(tested[name], 4),
            }
        tables[which] = rows
    return tables


def report(strategy: str, tables: dict[str, Any]) -> None:
    for which, rows in tables.items():
        print(f"\n{strategy} noise, {which} learning rate: excess loss x 10^4 over theta = 1, non-private, independent")
        for name, row in rows.items():
            cells = [f"{1e4 * c['mean']:7.1f} +- {1e4 * c['half_width']:5.1f}" for c in row["excess_over"].values()]
            print(f"  {name:30s} lr {row['learning_rate']:6.3f}  {'  '.join(cells)}   (paper {1e4 * PAPER[name]:.0f})")


def draw(path: Path, losses: dict[str, dict[str, Floats]], settings: Settings) -> None:
    """Excess loss against the learning rate, on the data sets of the tables."""
    with picture(path, len(losses)) as axes:
        for axis, (strategy, of_methods) in zip(np.atleast_1d(axes), losses.items(), strict=True):
            for color, (name, values) in zip(COLORS, of_methods.items(), strict=False):
                intervals = [mean_interval(1e4 * at_rate.mean(1)) for at_rate in values[:, settings.tuning_sets :]]
                center = np.array([interval.center for interval in intervals])
                half = np.array([interval.half_width for interval in intervals])
                axis.plot(settings.rates, center, "o-", color=color, label=name, markersize=3)
                axis.fill_between(settings.rates, center - half, center + half, color=color, alpha=0.15, linewidth=0)
            axis.set(yscale="log", xlabel="learning rate", ylabel="excess loss over $\\theta = 1$, times $10^4$")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set(ylim=(15, 3000), yticks=(20, 50, 100, 200, 500, 1000, 2000))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.minorticks_off()
            axis.set_title(f"noise: {strategy}")
            axis.legend(fontsize=7)


def study(out: Path, settings: Settings) -> dict[str, Any]:
    began = time.perf_counter()
    losses = {strategy: excess_losses(strategy, settings) for strategy in settings.strategies}
    tables = {strategy: table(found, settings) for strategy, found in losses.items()}
    inflated = {strategy: rounded(inflation(strategy, settings), 4) for strategy in settings.strategies}
    for strategy, found in tables.items():
        report(strategy, found)
        print(f"  noise makes the denominator of post-processing {inflated[strategy]:.2f} times as large")
    curves = {
        strategy: {name: rounded(values[:, settings.tuning_sets :].mean((1, 2))) for name, values in found.items()}
        for strategy, found in losses.items()
    }
    described = {"sigma": SIGMA, "clip": CLIP, "batch_size": 1, **vars(settings)}
    result = {
        "settings": described,
        "tables": tables,
        "denominator_inflation": inflated,
        "mean_excess_by_rate": curves,
        "paper": PAPER,
    }
    save(out / "logistic-1d.json", result, began)
    draw(out / "studies-logistic-1d.png", losses, settings)
    return result


if __name__ == "__main__":
    study(out_folder(__doc__.splitlines()[0]), Settings())
