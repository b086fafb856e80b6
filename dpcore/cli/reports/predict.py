"""``dpcore predict``: what filters, windows and momentum are worth on a quadratic, from the exact recursion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from dpcore.cli import plots
from dpcore.cli.options import Json, Picture, count, one_of, option, real, reals
from dpcore.cli.output import told_if_slow, write_json, write_line, write_table
from dpcore.errors import ArgumentError, DataError
from dpcore.methods import METHODS, BestRate, best_rate, keywords
from dpcore.methods.predict import query_of
from dpcore.stages.method import Method
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine

_BASELINE = "dp_sgd"
# Rate and noise are found or given for all, and nothing is clipped.
_WITHOUT_EFFECT = (
    "lr",
    "noise_multiplier",
    "batch_size",
    "max_grad_norm",
    "clipping",
    "clipping_groups",
    "adaptive_clip",
)
_MOST_NOISE, _MOST_STEPS = 1e6, 1_000_000


def _contestants(value: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of each contestant of ``dp_sgd,doppler:filter=f3,disk:kappa=0.9:gamma=1``, by its text."""
    found: dict[str, dict[str, Any]] = {}
    for text in filter(None, (part.strip() for part in str(value).split(","))):
        name, *settings = text.split(":")
        method = one_of(METHODS)(name)
        given: dict[str, Any] = {"method": method}
        for setting in settings:
            key, equals, content = setting.partition("=")
            if not equals or not content:
                raise typer.BadParameter(f"{text!r}: write settings as NAME=VALUE, such as doppler:filter=f3")
            given[one_of([name for name in keywords(method) if name not in _WITHOUT_EFFECT])(key)] = _value(content)
        found[":".join((method, *settings))] = given
    if not found:
        raise typer.BadParameter(f"{value!r} has no method; write methods with commas between them")
    return found


def _value(text: str) -> Any:
    """Return a setting's value: a whole number, a number, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _spectrum(value: Any) -> NDArray[np.float64]:
    """Return curvatures and distances, (2, H), of ``power:EXPONENT:COUNT`` or of a file with one or two columns."""
    text = str(value)
    if text.startswith("power:"):
        parts = text.split(":")[1:]
        if len(parts) != 2 or not 1 <= count(parts[1]) <= 10_000:
            raise typer.BadParameter(f"{text!r}: write power:EXPONENT:COUNT, such as power:1:30, with COUNT <= 10,000")
        curvatures = np.arange(1.0, count(parts[1]) + 1) ** -real(parts[0])
        return np.stack([curvatures, np.ones_like(curvatures)])
    try:
        columns = np.loadtxt(Path(text), ndmin=2, delimiter="," if Path(text).suffix == ".csv" else None)
    except ValueError as cause:
        raise DataError(
            f"{text}: must have a curvature in each line, and after it, if wanted, the distance of the start"
        ) from cause
    if not columns.size or columns.shape[1] > 2:
        raise DataError(f"{text}: has {columns.shape[1] if columns.size else 0} columns; must be one or two")
    distances = columns[:, 1] if columns.shape[1] == 2 else np.ones(len(columns))
    return np.stack([columns[:, 0], distances])


@told_if_slow("the losses")
def predict(
    methods: Annotated[Any, option(_contestants, "M1,M2:KEY=VALUE,...",
        "Methods, each with settings of its own after colons; dp_sgd is always among them.",
    )] = "dp_sgd,dp_sgd:base=momentum,doppler,disk,pmlf,inner_outer",
    noise: Annotated[Any, option(reals, "R1,R2,...",
        "Norm of the noise in one average over the gradient's norm at the start: noise multiplier x clip norm x "
        "sqrt(parameters) / (batch size x gradient's norm).")] = "0.1,0.3,1,3,10,30",
    steps: Annotated[int, option(count, "N", "Steps of the run.")] = 500,
    spectrum: Annotated[Any, option(_spectrum, "power:A:N | FILE",
        "Curvatures: N of them, i to the power -A, or a file with one a line, and a second column with the start's "
        "distance in that direction (1 if left out).")] = "power:1:30",
    schedule: Annotated[Any, option(one_of(("constant", "cosine")), "NAME", "Of the learning rate.")] = "constant",
    ema: Annotated[Any, option(real, "DECAY",
        "Decay of an average of the parameters, whose loss is then predicted.")] = None,
    out: Picture = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Predict the loss of methods on a quadratic at their best learning rates, without data."""
    if not noise or not 0 < min(noise) <= max(noise) <= _MOST_NOISE:
        given = ", ".join(f"{value:g}" for value in noise)
        raise ArgumentError(f"--noise {given}: must be numbers above 0, and at most {_MOST_NOISE:g}")
    if not 1 <= steps <= _MOST_STEPS:
        raise ArgumentError(f"--steps {steps}: must be from 1 to {_MOST_STEPS:,}, since each is computed")
    curvatures, distances = spectrum
    own: dict[str, Any] = {"schedule": WarmupCosine() if schedule == "cosine" else None}
    own |= {"averaging": None if ema is None else ExponentialAverage(ema)}
    made = {text: _method(given, own) for text, given in ({_BASELINE: {"method": _BASELINE}} | methods).items()}
    gradient = float(np.linalg.norm(curvatures * distances))
    scale, levels = gradient / math.sqrt(len(curvatures)), np.array(noise)
    first = float(curvatures @ distances**2 / 2)
    # A vector that is longer than a gradient needs a clip norm, and so noise, as much larger.
    best = {
        text: best_rate(method, curvatures, steps, noise_std=scale * query_of(method).size * levels, start=distances)
        for text, method in made.items()
    }
    if out is not None:
        _draw(out, noise, best, f"{schedule} rate, {steps:,} steps, {len(curvatures)} curvatures")
    if as_json:
        rows = {
            text: {
                "gradients_a_step": query_of(made[text]).gradients,
                "loss": (found.loss / first).tolist(),
                "lr": found.lr.tolist(),
                "over_dp_sgd": (found.loss / best[_BASELINE].loss).tolist(),
            }
            for text, found in best.items()
        }
        write_json({"steps": steps, "schedule": schedule, "ema": ema, "noise": list(noise),
            "curvatures": curvatures.tolist(), "start": distances.tolist(), "methods": rows,
            **({"picture": str(out)} if out else {})})  # fmt: skip
        return
    _write(noise, made, best, first)
    if out is not None:
        write_line(f"\npicture: {out}")


def _method(given: Mapping[str, Any], own: Mapping[str, Any]) -> Method:
    settings = {name: value for name, value in given.items() if name != "method"}
    make = METHODS[given["method"]]
    try:
        return make(**{"lr": 1.0} | dict(own) | settings)
    except TypeError as cause:
        raise ArgumentError(f"{given['method']}: {cause}") from cause


def _write(noise: tuple[float, ...], made: Mapping[str, Method], best: Mapping[str, BestRate], first: float) -> None:
    head = ("method", "gradients", *(f"noise {ratio:g}" for ratio in noise))
    rows = [(f"{_BASELINE}: loss left", "1", *(f"{loss:.3g}" for loss in best[_BASELINE].loss / first))]
    rows += [
        (text, str(query_of(made[text]).gradients), *(f"{ratio:.3f}" for ratio in found.loss / best[_BASELINE].loss))
        for text, found in best.items()
        if text != _BASELINE
    ]
    write_table(head, rows, title="expected loss at the best rate, over that of dp_sgd", right=len(head) - 1)
    write_line(
        "\nFirst row: share of the loss at the start that dp_sgd leaves. Below 1 a method is better than dp_sgd.\n"
        "gradients: of an example in a step. No gradient is clipped."
    )


def _draw(out: Path, noise: tuple[float, ...], best: Mapping[str, BestRate], title: str) -> None:
    with plots.drawing(out, (6.4, 4.0), title) as figure:
        axes = figure.add_subplot()
        for index, (text, found) in enumerate(best.items()):
            style: Any = plots.DOTTED if text == _BASELINE else {"color": plots.COLORS[index % 6], "marker": "o"}
            axes.plot(noise, found.loss / best[_BASELINE].loss, label=text, **style)
        axes.set_xscale("log")
        plots.label(axes, "noise over gradient, at the start", "expected loss over that of dp_sgd")
        axes.legend()
