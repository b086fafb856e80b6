"""Scale-then-privatize for badly scaled gradients ("On Design Principles for Private Adaptive Optimizers", 4.1 to 4.3).

    python docs/studies/scale_then_privatize.py --out FOLDER

writes scale-then-privatize.json and studies-scale-then-privatize.png there and prints two tables. See docs/studies.md.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from quadratic import BETAS, excess_left, second_moment
from study import COLORS, generator, out_folder, picture, rounded, save

import dpcore
from dpcore.cli.intervals import mean_interval
from dpcore.sampling import FixedOrderSampler

VARIANTS = (
    "non-private", "post-processing", "noiseless preconditioner", "scale-then-privatize", "delayed preconditioner"
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Part 1: a constant gradient. Part 2: a quadratic with two groups of coordinates, tuned, then run anew."""

    coordinates: int = 64
    noise: float = 0.3
    constant_steps: int = 2000
    ratios: tuple[float, ...] = (1.0, 10.0, 100.0)
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
    scale_eps: tuple[float, ...] = (1e-3, 1e-2, 1e-1)
    cycle: int = 10  # unscaled steps of the delayed preconditioner, and as many scaled ones
    unscaled_factors: tuple[float, ...] = (1.0, 10.0)
    batch_size: int = 16
    noise_multiplier: float = 0.32
    steps: int = 200
    tuning_seeds: int = 2
    seeds: int = 12


# ------------------------------------------------------------------ 1. the preconditioner, for a constant gradient


def constant_gradient(settings: Settings) -> dict[str, Any]:
    """Every example's gradient is g, from 1 down to 1e-3: what becomes of sqrt(nu) / |g|?

    The clip norms are ||g||, and w sqrt(d) for the scaled vector, whose norm is sqrt(d) once nu is g^2. The noise
    multiplier is set so that the noise on each scaled coordinate has standard deviation s = `noise`. The paper (section
    4.3.1, without a clip) has the steady state nu = g^2 / (1 - s^2).
    """
    d, s = settings.coordinates, settings.noise
    g = np.logspace(0, -3, d)
    batches = FixedOrderSampler(dataset_size=settings.constant_steps, batch_size=1, shuffle=False)
    found: dict[str, Any] = {"gradient": rounded(g), "predicted": float(1 / np.sqrt(1 - s**2))}
    for name, width in (("post-processing", 2.0), ("scale-then-privatize", 2.0), ("its clip at sqrt(d)", 1.0)):
        sigma = s / (width * np.sqrt(d))
        scaled = {"max_scaled_norm": width * np.sqrt(d), "scale_eps": 1e-5}
        method = dpcore.methods.dp_adam(
            variant="post_processing" if name == "post-processing" else "scale_then_privatize",
            lr=1e-3,
            betas=BETAS,
            max_grad_norm=float(np.linalg.norm(g)),
            noise_multiplier=sigma,
            **({} if name == "post-processing" else scaled),
        )
        z = generator(3).standard_normal((settings.constant_steps, d))
        result = dpcore.minimize(
            lambda _, indices: np.tile(g, (len(indices), 1)), np.zeros(d), batches, method,
            steps=settings.constant_steps, noise=z, record_gradients=True,
        )  # fmt: skip
        assert result.gradients is not None
        ratio = np.sqrt(second_moment(result.gradients, BETAS[1])) / g
        found[name] = {
            "noise_multiplier": sigma,
            # The noise is over time, not over runs: the last half of the steps is averaged.
            "root_over_gradient": rounded(ratio[len(ratio) // 2 :].mean(0)),
            "median_by_step": rounded(np.median(ratio, axis=1)[:: max(1, len(ratio) // 200)]),
        }
    return found


# ------------------------------------------------------------------------------ 2. minimizing a quadratic with it


def quadratic(
    name: str, ratio: float, rate: float, scale_eps: float, factor: float, settings: Settings, seed: int
) -> tuple[float, float]:
    """`excess_left` of a variant; scaled vectors are clipped at the norm that ideally scaled ones have at the start."""
    special: dict[str, Any] = {"variant": "post_processing"}
    if name == "noiseless preconditioner":
        special = {"variant": "noiseless_preconditioner", "allow_nonprivate": True}
    if name == "scale-then-privatize":
        norm = float(np.sqrt(2 * settings.coordinates))
        special = {"variant": "scale_then_privatize", "scale_eps": scale_eps, "max_scaled_norm": norm}
    if name == "delayed preconditioner":
        cycle = {"unscaled_steps": settings.cycle, "scaled_steps": settings.cycle, "unscaled_lr_factor": factor}
        norm = float(np.sqrt(2 * settings.coordinates))
        scaled = {"scale_eps": scale_eps, "eps": scale_eps, "max_scaled_norm": norm}
        special = {"variant": "delayed_preconditioner", **cycle, **scaled}
    sigma = 0.0 if name == "non-private" else settings.noise_multiplier
    return excess_left(
        ratio, sigma, seed, lr=rate, dimension=settings.coordinates, batch_size=settings.batch_size,
        steps=settings.steps, **special,
    )  # fmt: skip


def optimize(settings: Settings) -> list[dict[str, Any]]:
    """Tune rate (and scale_eps) by the mean share left on some seeds; report other seeds."""
    rows = []
    for ratio in settings.ratios:
        for name in VARIANTS:
            scaled, delayed = name == "scale-then-privatize", name == "delayed preconditioner"
            choices = settings.scale_eps if scaled or delayed else (0.0,)
            grid = list(product(settings.rates, choices, settings.unscaled_factors if delayed else (1.0,)))
            tuning = [
                np.mean([quadratic(name, ratio, *point, settings, seed) for seed in range(settings.tuning_seeds)])
                for point in grid
            ]
            point = grid[int(np.argmin(tuning))]
            left = np.array([quadratic(name, ratio, *point, settings, 100 + seed) for seed in range(settings.seeds)])
            rate, eps, factor = point
            both, steep, flat = (mean_interval(v) for v in (left.mean(1), left[:, 0], left[:, 1]))
            row = {"ratio": ratio, "method": name, "learning_rate": rate, "scale_eps": eps, "left": rounded(left)}
            row |= {"unscaled_lr_factor": factor} if delayed else {}
            row |= {"mean": rounded(both.center), "half_width": rounded(both.half_width)}
            row |= {"steep": rounded(steep.center), "flat": rounded(flat.center)}
            rows.append(row)
    return rows


def draw(path: Path, constant: dict[str, Any], rows: list[dict[str, Any]], settings: Settings) -> None:
    colors = dict(zip(VARIANTS, ("#6b6b6b", *COLORS), strict=False)) | {"its clip at sqrt(d)": COLORS[4]}
    with picture(path, 3) as (gradient, recovery, quality):
        for name in ("post-processing", "scale-then-privatize", "its clip at sqrt(d)"):
            found = constant[name]
            label = "scale-then-privatize, clip at $\\sqrt{d}$" if name.startswith("its") else name
            gradient.loglog(
                constant["gradient"], found["root_over_gradient"], ".-", color=colors[name], label=label, markersize=3
            )
            step = np.linspace(1, settings.constant_steps, len(found["median_by_step"]))
            recovery.semilogy(step, found["median_by_step"], color=colors[name], label=label)
        for axis in (gradient, recovery):
            axis.axhline(constant["predicted"], color="black", linewidth=0.8, linestyle="--", label="section 4.3.1")
            axis.legend(fontsize=7)
        gradient.set(
            xlabel="|g| of the coordinate", ylabel="$\\sqrt{\\nu}$ / |g|", title="Constant gradient: at the end"
        )
        recovery.set(xlabel="step", ylabel="median of $\\sqrt{\\nu}$ / |g|", title="... and on the way")
        for name in VARIANTS:
            chosen = [row for row in rows if row["method"] == name]
            quality.errorbar(
                [row["ratio"] for row in chosen], [row["mean"] for row in chosen],
                [row["half_width"] for row in chosen], fmt="o-", color=colors[name], label=name, capsize=3,
            )  # fmt: skip
        quality.set(xscale="log", yscale="log", xlabel="ratio of the two curvatures")
        quality.set(ylabel="share of the excess loss left", title="Quadratic, tuned, 95 % intervals")
        quality.legend(fontsize=7)


def study(out: Path, settings: Settings) -> dict[str, Any]:
    began = time.perf_counter()
    constant, rows = constant_gradient(settings), optimize(settings)
    print(f"sqrt(nu) / |g| for a constant gradient (predicted {constant['predicted']:.3f}); at |g| = 1, 0.03, 0.001:")
    for name in ("post-processing", "scale-then-privatize", "its clip at sqrt(d)"):
        ratio = constant[name]["root_over_gradient"]
        print(f"  {name:26s} {ratio[0]:9.3f} {ratio[len(ratio) // 2]:9.3f} {ratio[-1]:9.3f}")
    print("share of the excess loss left in the quadratic, percent: mean of the halves, steep half, flat half")
    for row in rows:
        mean, half_width, steep, flat = (100 * row[what] for what in ("mean", "half_width", "steep", "flat"))
        print(
            f"  ratio {row['ratio']:5g}  {row['method']:26s} lr {row['learning_rate']:5g}  "
            f"scale_eps {row['scale_eps']:5g}  {mean:7.2f} +- {half_width:5.2f}   {steep:7.2f} {flat:7.2f}"
        )
    result = {"settings": {**vars(settings), "betas": BETAS}, "constant_gradient": constant, "quadratic": rows}
    save(out / "scale-then-privatize.json", result, began)
    draw(out / "studies-scale-then-privatize.png", constant, rows, settings)
    return result


if __name__ == "__main__":
    study(out_folder(__doc__.splitlines()[0]), Settings())
