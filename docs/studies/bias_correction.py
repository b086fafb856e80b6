"""What bias correction of Adam's second moment can and cannot do ("On Design Principles ...", 4.2 and 4.4).

    python docs/studies/bias_correction.py --out FOLDER

writes bias-correction.json and studies-bias-correction.png there and prints two tables. See docs/studies.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from quadratic import BETAS, excess_left, second_moment
from scipy.special import ndtr
from study import COLORS, generator, out_folder, picture, rounded, save

import dpcore
from dpcore.cli.intervals import mean_interval
from dpcore.sampling import FixedOrderSampler
from dpcore.theory import bias_correction_regime


@dataclass(frozen=True)
class Settings:
    """Part 1: constant gradients at so many times the threshold of the regime. Part 2: a quadratic, tuned, run anew."""

    dimension: int = 1024
    times_threshold: tuple[float, ...] = (0.25, 0.5, 1.0, 1.5, 2.0, 4.0)
    decays: tuple[float, ...] = (0.9, 0.99, 0.999)
    orthogonal_batch: int = 16
    floor: float = 0.01
    coordinates: int = 64
    ratio: float = 10.0
    batch_over_sigma: tuple[float, ...] = (2.0, 10.0, 50.0, 250.0)
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1)
    eps: tuple[float, ...] = (1e-2, 1e-1, 1.0)
    update_norms: tuple[float, ...] = (2.0, 8.0, 32.0)  # a step of noise-free Adam has norm 8 = sqrt(64), at most
    batch_size: int = 16
    steps: int = 200
    tuning_seeds: int = 2
    seeds: int = 12


# ------------------------------------------------------------------------------------- 1. how often it becomes negative


def constant_gradient(times: float, beta2: float, gradients: str, settings: Settings) -> dict[str, Any]:
    """Return what the debiased second moment is like in the steady state, at `times` the threshold of the regime.

    Gradients have norm 1 = C and point one way, or are orthogonal (each on coordinates of its own); all coordinates of
    their average are alike, so that they are so many independent draws of one moment.
    """
    d, size = settings.dimension, 1 if gradients == "same direction" else settings.orthogonal_batch
    example = np.kron(np.eye(size), np.full(d // size, np.sqrt(size / d)))
    g = float(example.mean(0)[0])
    threshold = bias_correction_regime(1, 1, d, beta2).threshold
    sigma = np.sqrt(size) / (times * threshold) if size > 1 else size / (times * threshold)
    regime = bias_correction_regime(size, sigma, d, beta2)
    steps = int(4 / (1 - beta2))
    method = dpcore.methods.dp_adam(
        variant="bias_corrected", lr=1e-3, betas=(0.9, beta2), eps=settings.floor * g, noise_multiplier=sigma
    )
    result = dpcore.minimize(
        lambda _, indices: example[indices % size],
        np.zeros(d),
        FixedOrderSampler(dataset_size=size, batch_size=size, shuffle=False),
        method,
        steps=steps,
        noise=generator(6, size).standard_normal((steps, d)),
        record_gradients=True,
    )
    assert result.negative_share is not None
    assert result.gradients is not None
    share = float(result.negative_share[-1])
    padded = (share * d + 2) / (d + 4)  # Agresti and Coull: an interval that does not vanish at share 0
    nu, bias = second_moment(result.gradients, beta2)[-1], (sigma / size) ** 2
    # Normal approximation of nu - bias: mean g^2, variance (2 s^4 + 4 g^2 s^2) (1 - beta2) / (1 + beta2), s^2 = bias.
    deviation = np.sqrt((2 * bias**2 + 4 * g**2 * bias) * (1 - beta2) / (1 + beta2))
    corrected = g / np.maximum(np.sqrt(np.maximum(nu - bias, 0)), settings.floor * g)
    return {
        "gradients": gradients,
        "beta2": beta2,
        "times_threshold": times,
        "batch_over_sigma": rounded(size / sigma),
        "trustworthy": regime.trustworthy_if_same_direction if size == 1 else regime.trustworthy_if_orthogonal,
        "negative_share": rounded(share),
        "half_width": rounded(1.96 * np.sqrt(padded * (1 - padded) / (d + 4))),
        "normal_approximation": rounded(ndtr(-(g**2) / deviation)),
        # The step's size in each coordinate over that of noise-free Adam: quartiles and the 99th percentile.
        "rate_corrected": rounded(np.quantile(corrected, [0.25, 0.5, 0.75, 0.99])),
        "rate_post_processing": rounded(np.quantile(g / np.sqrt(nu), [0.25, 0.5, 0.75, 0.99])),
    }


# ------------------------------------------------------------------------------------------ 2. what becomes of learning

CONTESTANTS: dict[str, dict[str, Any]] = {
    "post-processing": {"variant": "post_processing", "eps": (1e-8,)},
    "bias-corrected, tiny eps": {"variant": "bias_corrected", "eps": (1e-5,)},
    "bias-corrected, clipped update": {"variant": "bias_corrected", "eps": (1e-5,), "clipped": True},
    "bias-corrected, tuned eps": {"variant": "bias_corrected"},
    "independent moments, tuned eps": {"variant": "independent_moments"},
}


def optimize(settings: Settings) -> list[dict[str, Any]]:
    """Tune rate (and eps, or the bound on the update) by the mean excess loss left on some seeds; report others."""
    rows = []
    for over_sigma in settings.batch_over_sigma:
        sigma = settings.batch_size / over_sigma

        def left(
            name: str, rate: float, eps: float, norm: float | None, seed: int, sigma: float = sigma
        ) -> tuple[float, float]:
            return excess_left(
                settings.ratio, sigma, seed, dimension=settings.coordinates, batch_size=settings.batch_size,
                steps=settings.steps, lr=rate, eps=eps, max_update_norm=norm, variant=CONTESTANTS[name]["variant"],
            )  # fmt: skip

        for name, contestant in CONTESTANTS.items():
            norms = settings.update_norms if contestant.get("clipped") else (None,)
            grid = list(product(settings.rates, contestant.get("eps", settings.eps), norms))
            tuning = [np.mean([left(name, *point, seed) for seed in range(settings.tuning_seeds)]) for point in grid]
            rate, eps, norm = grid[int(np.argmin(tuning))]
            found = np.array([left(name, rate, eps, norm, 100 + seed) for seed in range(settings.seeds)])
            both = mean_interval(found.mean(1))
            row: dict[str, Any] = {"batch_over_sigma": over_sigma, "method": name, "learning_rate": rate, "eps": eps}
            row |= {} if norm is None else {"max_update_norm": norm}
            row |= {"mean": rounded(both.center), "half_width": rounded(both.half_width), "left": rounded(found)}
            rows.append(row)
    return rows


def draw(path: Path, moments: list[dict[str, Any]], rows: list[dict[str, Any]], settings: Settings) -> None:
    with picture(path, 3) as (negative, rates, quality):
        cases = list(dict.fromkeys((m["gradients"], m["beta2"]) for m in moments))
        for color, case in zip(COLORS, cases, strict=False):
            chosen = [m for m in moments if (m["gradients"], m["beta2"]) == case]
            x = [m["times_threshold"] for m in chosen]
            negative.errorbar(
                x, [m["negative_share"] for m in chosen], [m["half_width"] for m in chosen],
                fmt="o", color=color, markersize=4, label=f"{case[0]}, $\\beta_2$ = {case[1]:g}",
            )  # fmt: skip
            negative.plot(x, [m["normal_approximation"] for m in chosen], "--", color=color, linewidth=0.8)
        negative.set(ylabel="share negative", title="Debiased $\\nu$ below 0 (dashed: normal approx.)")
        last = [m for m in moments if (m["gradients"], m["beta2"]) == ("same direction", settings.decays[-1])]
        x = [m["times_threshold"] for m in last]
        for color, kind in zip(COLORS, ("rate_post_processing", "rate_corrected"), strict=False):
            quartiles = np.array([m[kind] for m in last]).T
            rates.plot(x, quartiles[1], "o-", color=color, markersize=4, label=kind[5:].replace("_", "-") + ", median")
            rates.plot(x, quartiles[3], ":", color=color, label="99th percentile")
            rates.fill_between(x, quartiles[0], quartiles[2], color=color, alpha=0.2, linewidth=0)
        rates.axhline(1, color="black", linewidth=0.8, linestyle="--")
        rates.set(yscale="log", ylabel="rate / rate without noise")
        rates.set_title(f"Rate of a coordinate, $\\beta_2$ = {settings.decays[-1]:g}")
        for axis in (negative, rates):
            axis.set_xlabel("signal over the threshold of the regime")
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.axvline(1, color="black", linewidth=0.8, linestyle=":")
        for color, name in zip(COLORS, CONTESTANTS, strict=False):
            chosen = [row for row in rows if row["method"] == name]
            quality.errorbar(
                [row["batch_over_sigma"] for row in chosen], [row["mean"] for row in chosen],
                [row["half_width"] for row in chosen], fmt="o-", color=color, label=name, markersize=4, capsize=3,
            )  # fmt: skip
        quality.set(xscale="log", yscale="log", xlabel="$B / \\sigma$", ylabel="share of the excess loss left")
        quality.set(ylim=(1e-3, 3), title="Quadratic, tuned, 95 % intervals (tiny eps: off the top)")
        for axis in (negative, rates, quality):
            axis.legend(fontsize=7)


def study(out: Path, settings: Settings) -> dict[str, Any]:
    began = time.perf_counter()
    cases = [("same direction", beta2) for beta2 in settings.decays] + [("orthogonal", settings.decays[-1])]
    moments = [
        constant_gradient(times, beta2, gradients, settings)
        for gradients, beta2 in cases
        for times in settings.times_threshold
    ]
    rows = optimize(settings)
    print(
        "negative share of the debiased second moment, percent (normal approximation), and rates over noise-free ones"
    )
    for m in moments:
        share, half_width, normal = (100 * m[what] for what in ("negative_share", "half_width", "normal_approximation"))
        print(
            f"  {m['gradients']:14s} beta2 {m['beta2']:5g}  {m['times_threshold']:5g} x threshold  "
            f"{share:6.2f} +- {half_width:4.2f} ({normal:5.2f})  "
            f"corrected {m['rate_corrected'][1]:7.2f} (99 %: {m['rate_corrected'][3]:6.1f})  "
            f"post-processing {m['rate_post_processing'][1]:5.2f}"
        )
    print("share of the excess loss left in the quadratic, percent")
    for row in rows:
        print(
            f"  B/sigma {row['batch_over_sigma']:5g}  {row['method']:32s} lr {row['learning_rate']:5g}  "
            f"eps {row['eps']:6g}  {100 * row['mean']:8.2f} +- {100 * row['half_width']:6.2f}"
        )
    result = {"settings": {**vars(settings), "betas": BETAS}, "constant_gradient": moments, "quadratic": rows}
    save(out / "bias-correction.json", result, began)
    draw(out / "studies-bias-correction.png", moments, rows, settings)
    return result


if __name__ == "__main__":
    study(out_folder(__doc__.splitlines()[0]), Settings())
