"""The tables and pictures of docs/studies/scattering.md, from the rows that scattering.py wrote.

python docs/studies/scattering_report.py ROWS --out docs/_static --page docs/studies/scattering.md
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import scipy.stats
from numpy.typing import NDArray
from scattering import read
from study import COLORS, STYLE

from dpcore.cli.intervals import mean_interval
from dpcore.cli.plots import Curves, by_epsilon
from dpcore.stages.filters import LowPass, named_filter
from dpcore.theory.analysis.filters import frequency_response, limiting_noise_factor

Floats = NDArray[np.float64]
# Between these two lines of the page stands what is written here.
MARKS = "<!-- from here: written by scattering_report.py --page -->", "<!-- to here -->"
PLANNED, FEWEST = 10, 5
BASELINES = ("DP-SGD", "DP-SGD with momentum")


@dataclass(frozen=True)
class Result:
    """The rows of a study: its tuned contestants, and the seeds that are complete for all of them."""

    rows: list[dict[str, Any]]

    def of(self, kind: str, name: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == kind and row["name"] == name]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(row["name"] for row in self.rows if row["kind"] == "tuning"))

    @property
    def watched(self) -> list[str]:
        """The contestants whose spectrum is there."""
        return [name for name in self.names if self.of("spectrum", name)]

    @property
    def seeds(self) -> list[int]:
        found = [{row["seed"] for row in self.of("final", name)} for name in self.names]
        return sorted(set.intersection(*found))

    def accuracy(self, name: str) -> Floats:
        """(seeds, looks), in percent."""
        by_seed = {row["seed"]: row["accuracy"] for row in self.of("final", name)}
        return np.array([by_seed[seed] for seed in self.seeds])


def differences(result: Result) -> list[dict[str, Any]]:
    """Each method less each baseline, paired by seed: 95 % interval, and Bonferroni's for all comparisons together."""
    pairs = [(name, base) for name in result.names if name not in BASELINES for base in BASELINES]
    freedom = len(result.seeds) - 1
    wider = scipy.stats.t.ppf(1 - 0.025 / len(pairs), freedom) / scipy.stats.t.ppf(0.975, freedom)
    found = []
    for name, base in pairs:
        estimate = mean_interval(result.accuracy(name)[:, -1] - result.accuracy(base)[:, -1])
        adjusted = wider * estimate.half_width
        verdict = "not told apart"
        if abs(estimate.center) > adjusted:
            verdict = "above" if estimate.center > 0 else "below"
        found.append({"method": name, "baseline": base, "difference": estimate.center, "half": estimate.half_width,
                      "adjusted": adjusted, "verdict": verdict})  # fmt: skip
    return found


def winners(result: Result) -> list[str]:
    """The methods whose adjusted intervals lie above 0 for both baselines."""
    found = differences(result)
    return [name for name in result.names if name not in BASELINES
            and all(row["verdict"] == "above" for row in found if row["method"] == name)]  # fmt: skip


def said(settings: dict[str, Any]) -> str:
    """A contestant's own settings in words."""
    parts = [f"{name} {value}" for name, value in settings.items() if name != "base"]
    return ", ".join(parts).replace("[", "(").replace("]", ")") or "-"


def heading(columns: tuple[str, ...]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]


def tables(result: Result) -> str:
    """The page's tables, as Markdown."""
    columns = ("contestant", "own settings", "learning rate", "steps", "noise multiplier", "held-out, %", "test, %")
    lines = heading(columns)
    for name in result.names:
        final = result.of("final", name)[0]
        chosen = next(
            row for row in result.of("tuning", name) if (row["setting"], row["lr"]) == (final["setting"], final["lr"])
        )
        end = mean_interval(result.accuracy(name)[:, -1])
        lines.append(
            f"| {name} | {said(final['settings'])} | {final['lr']:.4g} | {final['steps']:,} "
            f"| {final['noise_multiplier']:.3f} | {chosen['accuracy'][-1]:.2f} "
            f"| {end.center:.3f} ± {end.half_width:.3f} |"
        )
    lines += ["", *heading(("method", "less", "difference, points", "95 %", "all comparisons together", ""))]
    lines += [
        f"| {row['method']} | {row['baseline']} | {row['difference']:+.3f} | ± {row['half']:.3f} "
        f"| ± {row['adjusted']:.3f} | {row['verdict']} |"
        for row in differences(result)
    ]
    columns = ("contestant", "signal / noise", "signal below 0.01", "batch below 0.01", "signal above noise up to",
               "noise behind the filter")  # fmt: skip
    lines += ["", *heading(columns)]
    for name in result.watched:
        row = result.of("spectrum", name)[0]
        found, noise = row["spectrum"], row["noise_std"] ** 2
        _, left = after_filter(row)
        reach = f"{crossing(row):.2g}" if crossing(row) else "nowhere"
        lines.append(
            f"| {name} | {found['signal_power'] / noise:.2g} | {100 * found['signal_below']['0.01']:.1f} % "
            f"| {100 * found['batch_below']['0.01']:.1f} % | {reach} | {100 * left:.3g} % |"
        )
    return "\n".join(lines)


def verdict(result: Result) -> str:
    """Which methods have won, and of how many seeds that is said."""
    seeds = len(result.seeds)
    state = "fewer than five, so that the study is unfinished" if seeds < FEWEST else f"{PLANNED} were planned"
    return f"**Winners: {', '.join(winners(result)) or 'none'}.** Complete seeds: {seeds} ({state})."


def write(page: Path, result: Result) -> None:
    """Put the verdict and the tables into the page, between the marks."""
    before, rest = page.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n\n{verdict(result)}\n\n{tables(result)}\n\n{MARKS[1]}{after}")


def crossing(row: dict[str, Any]) -> float:
    """The frequency, in cycles a step, up to which the signal's density is above the noise's; 0 if it is nowhere."""
    found = row["spectrum"]
    above = np.array(found["signal"]) > row["noise_std"] ** 2
    first = len(above) if above.all() else int(np.argmin(above))
    return float(found["frequencies"][first - 1]) if first else 0.0


def after_filter(row: dict[str, Any]) -> tuple[Floats, float]:
    """|H|^2 of the method's filter or momentum at the spectrum's frequencies, and the share of noise behind it."""
    settings = row["settings"]
    if row["method"] == "disk":
        smooth = LowPass(b=[settings["kappa"]], a=[settings["kappa"] - 1])
    elif "filter" in settings:
        smooth = named_filter(settings["filter"])
    else:
        momentum = settings.get("momentum", settings.get("betas", [0.0])[0])
        smooth = LowPass(b=[1 - momentum], a=[-momentum])
    passed = np.abs(frequency_response(smooth, row["spectrum"]["frequencies"])) ** 2
    return np.asarray(passed), limiting_noise_factor(smooth)


def draw_accuracy(path: Path, result: Result) -> None:
    looks = result.accuracy(result.names[0]).shape[1]
    epochs = tuple(25 * (look + 1) / looks for look in range(looks))
    # Without the first fifth, in which accuracy rises by more than all methods differ.
    kept = slice(looks // 5, None)
    curves = {name: Curves(epochs[kept], result.accuracy(name)[:, kept] / 100) for name in result.names}
    title = "MNIST, scattering coefficients, 25 epochs of gradients each"
    by_epsilon(path, {"epsilon 1, delta 1e-5": curves}, title=title)


def draw_spectra(path: Path, result: Result) -> None:
    with mpl.rc_context(STYLE):
        columns = max(2, math.ceil(len(result.watched) / 2))
        figure, panels = plt.subplots(2, columns, figsize=(11, 6.2), sharex=True, sharey=True,
            layout="constrained")  # fmt: skip
        for panel, name in zip(panels.flat, result.watched, strict=False):
            row = result.of("spectrum", name)[0]
            found, noise = row["spectrum"], row["noise_std"] ** 2
            x, (passed, _) = np.array(found["frequencies"]), after_filter(row)
            panel.loglog(x, found["signal"], color=COLORS[0], linewidth=2, label="signal: gradient of 6,000 images")
            panel.loglog(x, found["batch"], color=COLORS[5], linewidth=1.2, label="gradient of the batch")
            panel.axhline(noise, color=COLORS[1], linewidth=1.6, label="noise for privacy")
            panel.loglog(
                x, noise * passed, color=COLORS[1], linewidth=1.2, linestyle="--", label="noise behind the filter"
            )
            panel.set_title(name)
        for panel in panels.flat[len(result.watched) :]:
            panel.set_axis_off()
        least = min(min(result.of("spectrum", name)[0]["spectrum"]["signal"]) for name in result.watched)
        panels.flat[0].set_ylim(bottom=least / 3)
        for panel in panels[-1]:
            panel.set_xlabel("frequency (cycles per step)")
        for panel in panels[:, 0]:
            panel.set_ylabel("power density per coordinate")
        panels.flat[0].legend(fontsize=8)
        figure.savefig(path)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the pictures")
    parser.add_argument("--page", type=Path, help="where the tables are put between the marks")
    given = parser.parse_args()
    result = Result(read(given.rows))
    print(f"{tables(result)}\n\n{verdict(result)}")
    if given.page is not None:
        write(given.page, result)
    if given.out is not None:
        draw_accuracy(given.out / "studies-scattering.png", result)
        draw_spectra(given.out / "studies-scattering-spectra.png", result)


if __name__ == "__main__":
    main()
