"""The predictions of `dpcore predict` beside simulated runs on random quadratics.

    python docs/studies/predicted.py --out FOLDER

writes predicted.json there: for each of 20 quadratics and five methods the predicted loss, the mean of 200 runs with
its standard error, and how many 95 % intervals contain the prediction. The runs are loops of their own, which
share no code with the prediction.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from dpcore.schedules import WarmupCosine
from numpy.typing import NDArray
from study import generator, out_folder, rounded, save

from dpcore import methods
from dpcore.methods import expected_loss

Floats = NDArray[np.float64]
KINDS = ("sgd", "momentum", "filter", "window", "disk")
QUADRATICS, RUNS = 20, 200


def simulate(kind: str, h: Floats, start: Floats, noise: Floats, lr: float, *, cosine: bool) -> Floats:
    """Return the losses after the last step, (runs,), for noise of shape (steps, runs, H)."""
    steps, runs, _ = noise.shape
    x = np.broadcast_to(start, (runs, len(h))).copy()
    before, filtered, velocity = x.copy(), np.zeros_like(x), np.zeros_like(x)
    last_g = np.zeros_like(x)
    for t in range(steps):
        rate = lr * (0.5 * (1 + np.cos(np.pi * t / (steps - 1))) if cosine else 1.0)
        g = h * x + noise[t]
        if kind == "momentum":
            velocity = 0.9 * velocity + g
            direction = velocity
        elif (
            kind == "filter"
        ):  # first-order v1 of DOPPLER: m = 9/11 m + (g + g_before) / 11, over 1 - (9/11)^t (1 + 9/11 ...)
            filtered = 9 / 11 * filtered + (g + last_g) / 11
            ones = sum((9 / 11) ** k * (1 + (k < t)) / 11 for k in range(t + 1))
            direction = filtered / ones
        elif kind == "window":  # weights 1, 0.1 over 1.1, no filter
            direction = g if t == 0 else (h * x + 0.1 * h * before) / 1.1 + noise[t]
        elif kind == "disk":  # kappa 0.7, gamma 0.5
            w = 0.3 / 0.35
            g = w * h * (x + 0.5 * (x - before)) + (1 - w) * h * x + noise[t]
            filtered = g if t == 0 else 0.3 * filtered + 0.7 * g
            direction = filtered
        else:
            direction = g
        before, last_g = x, g
        x = x - rate * direction
    losses: Floats = (x**2 @ h) / 2
    return losses


def method_of(kind: str, lr: float, *, cosine: bool) -> Any:
    """The method of dpcore that `simulate` runs under this name."""
    own: dict[str, Any] = {"lr": lr, "schedule": WarmupCosine() if cosine else None}
    make = {
        "sgd": methods.dp_sgd,
        "momentum": lambda **own: methods.dp_sgd(base="momentum", **own),
        "filter": methods.doppler,
        "window": lambda **own: methods.pmlf(filter="none", **own),
        "disk": methods.disk,
    }
    return make[kind](**own)


def problem(number: int) -> dict[str, Any]:
    """Return a random quadratic with its steps, noise, rate and schedule."""
    draw = generator(11, number)
    h = draw.uniform(0.1, 5) * np.arange(1, draw.integers(2, 30)) ** -draw.uniform(0, 2)
    return {
        "h": h,
        "start": draw.exponential(1, len(h)),
        "steps": int(draw.integers(20, 400)),
        "noise_std": float(10 ** draw.uniform(-2, 1)),
        "lr": float(10 ** draw.uniform(-2.5, -1) / h[0]),
        "cosine": bool(draw.integers(2)),
    }


def compare(number: int, kind: str, runs: int = RUNS) -> dict[str, Any]:
    """Return the prediction and the simulated mean with its standard error."""
    p = problem(number)
    noise = p["noise_std"] * generator(12, number, KINDS.index(kind)).standard_normal((p["steps"], runs, len(p["h"])))
    losses = simulate(kind, p["h"], p["start"], noise, p["lr"], cosine=p["cosine"])
    method = method_of(kind, p["lr"], cosine=p["cosine"])
    predicted = expected_loss(method, p["h"], p["steps"], noise_std=p["noise_std"], start=p["start"])
    error = float(losses.std(ddof=1) / np.sqrt(runs))
    return {"quadratic": number, "method": kind, "predicted": predicted, "mean": float(losses.mean()), "error": error}


def main() -> None:
    began, folder = time.perf_counter(), out_folder(__doc__ or "")
    rows = [compare(number, kind) for number in range(QUADRATICS) for kind in KINDS]
    inside = [abs(row["mean"] - row["predicted"]) <= 1.96 * row["error"] for row in rows]
    worst = max(abs(row["mean"] - row["predicted"]) / row["error"] for row in rows)
    print(f"{sum(inside)} of {len(rows)} intervals contain the prediction; the farthest is {worst:.2f} errors off")
    numbers = ("predicted", "mean", "error")
    rows = [row | {key: rounded(row[key]) for key in numbers} for row in rows]
    save(
        folder / "predicted.json",
        {"inside": sum(inside), "of": len(rows), "worst": rounded(worst), "rows": rows},
        began,
    )


if __name__ == "__main__":
    main()
