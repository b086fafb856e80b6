"""Time the accounting of dpcore, dp-accounting and prv-accountant, on the same settings, in one process and one run.

Epsilon of each setting: dpcore's certified interval, its RDP; dp-accounting's PLD accountant (as it comes, and with the
grid at which its pessimistic and optimistic ends are as close as dpcore's) and RDP; prv-accountant's interval. Then the
calibration of a noise multiplier, and a schedule of 200 and of 1,000 different steps. The rounds go through all of them
in turn, so that a drift of the machine meets all of them; a task that took longer than a second is not repeated.

Neither is a dependency of dpcore (dp-accounting is one of its tests). Install prv-accountant next to the environment:

    pip install --no-deps --target /tmp/prv-accountant prv-accountant==0.2.0
    PYTHONPATH=/tmp/prv-accountant python asv_benchmarks/accounting_vs_peers.py \
        --output asv_benchmarks/recorded/accounting_vs_peers.json

What is not installed is left out, and the output says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Figures = tuple[float, float]  # lower and upper; the same number twice if there is only an upper bound
PEERS = {"dp_accounting": "dp-accounting", "prv_accountant": "prv-accountant"}

# name: sample rate, noise multiplier, steps, delta. The first is that of the peers' survey.
SETTINGS: dict[str, tuple[float, float, int, float]] = {
    "typical": (0.004, 1.0, 10_000, 1e-5),
    "readme": (0.01, 1.1, 1_000, 1e-6),
    "mnist": (256 / 60_000, 1.0, 2_340, 1e-5),
    "long": (0.001, 0.8, 100_000, 1e-6),
    "large rate": (0.3, 4.0, 1_000, 1e-6),
    "one step": (0.01, 1.0, 1, 1e-6),
    "rare and quiet": (1e-4, 30.0, 10, 1e-9),
    "little noise": (0.01, 0.3, 10_000, 1e-6),
    "epsilon 1000": (0.1, 0.4, 6_000, 1e-6),
}
TARGET = (3.0, 1e-5, 0.004, 10_000)  # epsilon, delta, sample rate, steps


def dpcore_tasks() -> dict[str, Callable[..., Figures]]:
    """Return how dpcore answers, with its caches emptied."""
    from dpcore import accounting
    from dpcore.accounting.pld import intervals

    def forget() -> None:
        for part in vars(intervals).values():
            if hasattr(part, "cache_clear"):
                part.cache_clear()

    def pld(q: float, sigma: float, steps: int, delta: float) -> Figures:
        forget()
        interval = accounting.epsilon_interval(accounting.PoissonSampledGaussian(q, sigma, steps), delta)
        return interval.lower, interval.upper

    def rdp(q: float, sigma: float, steps: int, delta: float) -> Figures:
        value = accounting.epsilon(accounting.PoissonSampledGaussian(q, sigma, steps), delta, "rdp")
        return value, value

    def schedule(accountant: str, phases: int) -> Figures:
        forget()
        parts = tuple(accounting.PoissonSampledGaussian(*step, 1) for step in schedule_of(phases))
        event = accounting.Composed(parts)
        if accountant == "rdp":
            return (accounting.epsilon(event, 1e-6, "rdp"),) * 2
        interval = accounting.epsilon_interval(event, 1e-6)
        return interval.lower, interval.upper

    def calibrate(accountant: str) -> Figures:
        forget()
        epsilon, delta, q, steps = TARGET
        sigma = accounting.calibrate(
            "noise_multiplier",
            epsilon,
            delta,
            lambda sigma: accounting.PoissonSampledGaussian(q, sigma, steps),
            accountant,
        )
        return sigma, sigma

    return {"pld": pld, "rdp": rdp, "schedule": schedule, "calibrate": calibrate}


def dp_accounting_tasks() -> dict[str, Callable[..., Figures]]:
    """Return how dp-accounting answers."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("absl").setLevel(logging.ERROR)

    def event(q: float, sigma: float, steps: int) -> Any:
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        return dp_accounting.SelfComposedDpEvent(step, steps)

    def pld(q: float, sigma: float, steps: int, delta: float) -> Figures:
        value = PLDAccountant().compose(event(q, sigma, steps)).get_epsilon(delta)
        return math.nan, value

    def both_ends(q: float, sigma: float, steps: int, delta: float) -> Figures:
        ends = [
            privacy_loss_distribution.from_gaussian_mechanism(
                sigma, sampling_prob=q, pessimistic_estimate=up, use_connect_dots=up, value_discretization_interval=1e-4
            )
            .self_compose(steps)
            .get_epsilon_for_delta(delta)
            for up in (False, True)
        ]
        return ends[0], ends[1]

    def rdp(q: float, sigma: float, steps: int, delta: float) -> Figures:
        value = RdpAccountant().compose(event(q, sigma, steps)).get_epsilon(delta)
        return value, value

    def schedule(accountant: str, phases: int) -> Figures:
        chosen = RdpAccountant() if accountant == "rdp" else PLDAccountant()
        for q, sigma in schedule_of(phases):
            chosen.compose(event(q, sigma, 1))
        value = chosen.get_epsilon(1e-6)
        return value, value

    def calibrate(accountant: str) -> Figures:
        epsilon, delta, q, steps = TARGET
        sigma = dp_accounting.calibrate_dp_mechanism(
            RdpAccountant if accountant == "rdp" else PLDAccountant,
            lambda sigma: event(q, sigma, steps),
            epsilon,
            delta,
            bracket_interval=dp_accounting.LowerEndpointAndGuess(0.3, 1.0),
        )
        return sigma, sigma

    return {"pld": pld, "both ends": both_ends, "rdp": rdp, "schedule": schedule, "calibrate": calibrate}


def prv_tasks() -> dict[str, Callable[..., Figures]]:
    """Return how prv-accountant answers: at the error that dpcore promises."""
    from prv_accountant import PRVAccountant
    from prv_accountant.privacy_random_variables import PoissonSubsampledGaussianMechanism

    def pld(q: float, sigma: float, steps: int, delta: float) -> Figures:
        expected = SEEN.get((q, sigma, steps, delta), 1.0)
        accountant = PRVAccountant(
            prvs=PoissonSubsampledGaussianMechanism(noise_multiplier=sigma, sampling_probability=q),
            max_self_compositions=steps,
            eps_error=max(1e-3 * expected, 1e-4) / 2,
            delta_error=delta / 1000,
        )
        lower, _, upper = accountant.compute_epsilon(delta=delta, num_self_compositions=[steps])
        return lower, upper

    return {"pld": pld}


SEEN: dict[tuple[float, float, int, float], float] = {}  # epsilons, for an absolute error that means the same


def schedule_of(phases: int) -> list[tuple[float, float]]:
    """Return rates and noise multipliers that change at every step."""
    return [(0.001 + 0.01 * i / phases, 2.0 - i / phases) for i in range(phases)]


def tasks(
    peers: dict[str, dict[str, Callable[..., Figures]]], long_schedules: bool
) -> dict[str, Callable[[], Figures]]:
    """Return everything that is timed, by "task | who"."""
    found: dict[str, Callable[[], Figures]] = {}
    for name, setting in SETTINGS.items():
        for who, known in peers.items():
            for kind in ("pld", "both ends", "rdp"):
                if kind in known:
                    found[f"epsilon, {name} | {who} {kind}"] = lambda known=known, kind=kind, s=setting: known[kind](*s)
    for who, known in peers.items():
        if "calibrate" in known:
            for kind in ("pld", "rdp"):
                found[f"calibrate epsilon 3 | {who} {kind}"] = lambda known=known, kind=kind: known["calibrate"](kind)
                for phases in (200, 1000):
                    if who == "dpcore" or phases == 200 or long_schedules:
                        found[f"{phases} phases | {who} {kind}"] = lambda known=known, kind=kind, phases=phases: known[
                            "schedule"
                        ](kind, phases)
    return found


def measure(found: dict[str, Callable[[], Figures]], rounds: int) -> dict[str, Any]:
    """Run each once to warm up, then in turn."""
    results: dict[str, Any] = {}
    for round_number in range(rounds + 1):
        for name, task in found.items():
            row = results.setdefault(name, {"seconds": []})
            if "error" in row or (round_number > 1 and row["seconds"][-1] > 1.0):
                continue
            begin = time.perf_counter()
            try:
                lower, upper = task()
            except Exception as error:  # noqa: BLE001 (a peer that fails is a result)
                row["error"] = f"{type(error).__name__}: {error}"[:200]
                continue
            row["seconds"].append(time.perf_counter() - begin)
            row["lower"], row["upper"] = (None if math.isnan(lower) else float(lower)), float(upper)
    for row in results.values():
        # The first call imports and warms up. It counts only if there is no other.
        seconds = row.pop("seconds")
        timed = seconds[1:] or seconds
        if timed:
            row |= {"median_s": statistics.median(timed), "min_s": min(timed), "calls": len(timed)}
    return results


def peak_memory(found: dict[str, Callable[[], Figures]]) -> dict[str, float]:
    """Return the peak of what each of dpcore's tasks allocates, in MB; measured apart from the times."""
    peaks = {}
    for name, task in found.items():
        if "| dpcore" in name:
            tracemalloc.start()
            task()
            peaks[name] = tracemalloc.get_traced_memory()[1] / 1e6
            tracemalloc.stop()
    return peaks


def machine() -> dict[str, Any]:
    """Describe where the figures were measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    found: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "load_before": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    for package in ("numpy", "scipy", *PEERS.values()):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each task that takes below a second")
    parser.add_argument("--only", default="", help="only tasks whose name contains this")
    parser.add_argument("--long-schedules", action="store_true", help="also time the peers at 1,000 phases (minutes)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")

    found = {"machine": machine()}
    peers = {"dpcore": dpcore_tasks()}
    skipped = [package for module, package in PEERS.items() if importlib.util.find_spec(module) is None]
    for package in skipped:
        print(f"{package} is not installed: left out", file=sys.stderr)
    if "dp-accounting" not in skipped:
        peers["dp-accounting"] = dp_accounting_tasks()
    if "prv-accountant" not in skipped:
        peers["prv-accountant"] = prv_tasks()
    for setting in SETTINGS.values():
        SEEN[setting] = peers["dpcore"]["pld"](*setting)[1]
    chosen = {name: task for name, task in tasks(peers, arguments.long_schedules).items() if arguments.only in name}
    results = measure(chosen, arguments.rounds)
    peaks = peak_memory(chosen)
    for name, row in results.items():
        row |= {"peak_mb": peaks[name]} if name in peaks else {}
        gap = f"{row['upper'] - row['lower']:.1e}" if row.get("lower") is not None else "-"
        said = row.get("error") or f"{1e3 * row['median_s']:10.1f} ms   {row['upper']:.6g}   gap {gap}"
        print(f"{name:55s} {said}")
    result = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "rounds": arguments.rounds,
        **found,
        "load_after": os.getloadavg()[0],
        "peak_process_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "skipped": skipped,
        "settings": {
            name: dict(zip(("q", "sigma", "steps", "delta"), row, strict=True)) for name, row in SETTINGS.items()
        },
        "results": results,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
