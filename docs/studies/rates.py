"""Learning rates that need no search, compared with searched ones.

    OMP_NUM_THREADS=1 python docs/studies/rates.py --data-dir DIR --out FOLDER

Each rule has its published defaults everywhere. SGD is searched for each problem on a grid of factors of 2, once at a
constant rate and once with half a cosine, and the better of the two counts, at no cost of privacy: nobody has that
baseline for free. All rules meet the same batches and the same noise. Prints the table of rates.md, writes rates.json.

Quadratics: excess loss over that of searched SGD. Digits (logistic regression), MNIST (an MLP, and the same one trained
on 2,000 public images before): test accuracy in percent below that of searched SGD.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from dpcore.schedules import Doubling, WarmupCosine
from numpy.typing import NDArray
from study import generator, rounded, save

from dpcore import accounting
from dpcore.cli.datasets import load

Floats = NDArray[Any]
Gradient = Callable[[Floats, int], Floats]  # the clipped average, without noise

DELTA = 1e-5


class Rule:
    """SGD whose rate is `rate(x, g, t)`; a function of released gradients g and public numbers."""

    def __init__(self, x: Floats, steps: int, clip: float, s: float) -> None:
        self.start, self.steps, self.s, self.sum = x.copy(), steps, s, 0.0
        self.bound = np.sqrt(clip**2 + x.size * s**2)  # on a release's root mean square norm

    def rate(self, x: Floats, g: Floats, t: int) -> float:
        raise NotImplementedError

    def move(self, x: Floats, g: Floats, t: int) -> Floats:
        return x - self.rate(x, g, t) * g

    def answer(self, x: Floats) -> Floats:
        return x


class Constant(Rule):
    """The searched one; `schedule` of dpcore."""

    def __init__(self, *run: Any, lr: float, schedule: WarmupCosine | None = None) -> None:
        super().__init__(*run)
        self.lr, self.schedule = lr, schedule

    def rate(self, x: Floats, g: Floats, t: int) -> float:
        return self.lr * (1.0 if self.schedule is None else self.schedule.factor(t, self.steps))


class Public(Rule):
    """What theory takes for an optimum at distance 1, D / (G sqrt(T)), with half a cosine."""

    def rate(self, x: Floats, g: Floats, t: int) -> float:
        return WarmupCosine().factor(t, self.steps) / (self.bound * np.sqrt(self.steps))


class DoG(Rule):
    """Ivgi, Hinder, Carmon 2023, with its average; `known` takes the noise's share off the squared distance."""

    def __init__(self, *run: Any, known: bool = False, first: float = 1e-6) -> None:
        super().__init__(*run)
        self.known, self.noise, self.average = known, 0.0, self.start
        self.far = first * (1 + float(np.linalg.norm(self.start)))

    def rate(self, x: Floats, g: Floats, t: int) -> float:
        self.sum += float(g @ g)
        squared = float((x - self.start) @ (x - self.start)) - (self.noise if self.known else 0.0)
        self.far = max(self.far, np.sqrt(max(squared, 0.0)))
        rate = self.far / np.sqrt(self.sum)
        self.noise += rate**2 * x.size * self.s**2
        return float(rate)

    def move(self, x: Floats, g: Floats, t: int) -> Floats:
        moved = super().move(x, g, t)
        self.average = self.average + 9 / (9 + t) * (moved - self.average)
        return moved

    def answer(self, x: Floats) -> Floats:
        return self.average


class Prodigy(Rule):
    """Mishchenko, Defazio 2023, algorithm 1, with half a cosine; G is the public bound."""

    distance, product = 1e-6, 0.0

    def rate(self, x: Floats, g: Floats, t: int) -> float:
        self.sum += self.distance**2 * float(g @ g)
        return float(
            WarmupCosine().factor(t, self.steps)
            * self.distance**2
            / np.sqrt(self.distance**2 * self.bound**2 + self.sum)
        )

    def move(self, x: Floats, g: Floats, t: int) -> Floats:
        rate = self.rate(x, g, t)
        self.product += rate * float(g @ (self.start - x))
        moved = x - rate * g
        self.distance = max(self.distance, self.product / max(float(np.linalg.norm(moved - self.start)), 1e-30))
        return moved


class Mechanic(Rule):
    """Cutkosky, Defazio, Mehta 2023, over SGD with a rate that falls in a line; without its weight decay."""

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.way = np.zeros_like(self.start)
        self.betas = 1 - 10.0 ** -np.arange(1, 7)
        self.scale, self.most, self.squares, self.reward = np.zeros((4, 6))

    def move(self, x: Floats, g: Floats, t: int) -> Floats:
        h = float(g @ self.way)
        self.most = np.maximum(self.betas * self.most, abs(h))
        self.squares = self.betas**2 * self.squares + h**2
        self.reward = np.maximum(0, self.betas * self.reward - self.scale * h)
        self.scale = (1e-6 / 6 * self.most + self.reward) / (np.sqrt(self.squares) + 1e-30)
        self.way = self.way - (1 - t / self.steps) / self.bound * g
        moved: Floats = (self.start + self.scale.sum() * self.way).astype(x.dtype)
        return moved


class ScheduleFree(Rule):
    """Defazio and others 2024; needs a rate, and gets the one of theory at distance 1."""

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.z = self.average = self.start

    def move(self, y: Floats, g: Floats, t: int) -> Floats:
        self.z = self.z - g / (self.bound * np.sqrt(self.steps))
        self.average = self.average + (self.z - self.average) / (t + 1)
        moved: Floats = 0.1 * self.z + 0.9 * self.average
        return moved

    def answer(self, x: Floats) -> Floats:
        return self.average


class Found(Rule):
    """`dpcore.schedules.Doubling` with its defaults, as dpcore.methods.dp_sgd(schedule=Doubling()) moves."""

    def __init__(self, *run: Any) -> None:
        super().__init__(*run)
        self.schedule, self.since = Doubling(), self.start
        self.statistics = self.schedule.initial()

    def rate(self, x: Floats, g: Floats, t: int) -> float:
        before, way = self.statistics[0], x - self.since
        if before == 0:
            self.statistics = self.schedule.begin(float(g @ g), self.steps)
        elif self.schedule.searches(t, self.steps):
            self.statistics = self.schedule.observe(self.statistics, float(g @ way), self.s**2 * float(way @ way))
        if self.statistics[0] != before:
            self.since = x
        return 0.1 * self.statistics[0] * self.schedule.factor(t, self.steps)


RULES: dict[str, Callable[..., Rule]] = {
    "DoG": DoG,
    "DoG, from 0.01": partial(DoG, first=0.01),
    "DoG, from 0.01, noise off the distance": partial(DoG, first=0.01, known=True),
    "Prodigy": Prodigy,
    "Mechanic": Mechanic,
    "schedule-free at distance 1": ScheduleFree,
    "theory at distance 1": Public,
    "Doubling": Found,
}


@np.errstate(over="ignore", invalid="ignore")
def run(make: Callable[..., Rule], gradient: Gradient, x: Floats, noise: Floats, clip: float, s: float) -> Floats:
    rule = make(x, len(noise), clip, s)
    for t, z in enumerate(noise):
        x = rule.move(x, gradient(x, t) + s * z, t)
    return rule.answer(x)


def searched(score: Callable[[Callable[..., Rule]], float], rates: Floats) -> dict[str, Any]:
    """Scores by rate, lower is better, and the best of all."""
    curves = {
        name: [score(partial(Constant, lr=rate, schedule=schedule)) for rate in rates]
        for name, schedule in (("constant", None), ("cosine", WarmupCosine()))
    }
    return {"rates": rounded(rates), **every(curves), "best": min(map(min, curves.values()))}


def every(values: dict[str, Any]) -> dict[str, Any]:
    return {name: rounded(value) for name, value in values.items()}


def quadratic(d: int, ratio: float, noise: float, clip: float, distance: float) -> dict[str, Any]:
    """Curvatures from 1 down to 1 / ratio, optimum at `distance`; the clip norm in norms of the first gradient.

    `noise` is the norm of a release's noise over the clip norm.
    """
    steps, seeds, c = 300, 3, np.geomspace(1, 1 / ratio, d)
    problems = []
    for seed in range(seeds):
        a = generator(1, d, seed).standard_normal(d)
        a *= distance / np.linalg.norm(a)
        problems.append((a, clip * np.linalg.norm(c * a), generator(2, d, seed).standard_normal((steps, d))))

    def score(make: Callable[..., Rule]) -> float:
        left = []
        for a, norm, z in problems:

            def clipped(x: Floats, _: int, a: Floats = a, norm: float = norm) -> Floats:
                g = c * (x - a)
                return g * min(1.0, norm / max(float(np.linalg.norm(g)), 1e-300))

            x = run(make, clipped, np.zeros(d), z, norm, noise * norm / np.sqrt(d))
            left.append(c @ (x - a) ** 2 / (c @ a**2))
        return float(np.nan_to_num(np.mean(left), nan=np.inf, posinf=np.inf))

    best = searched(score, distance / problems[0][1] / np.sqrt(steps) * 2.0 ** np.arange(-7, 9))
    return {"sgd": best, "over_best": every({name: score(make) / best["best"] for name, make in RULES.items()})}


class Network:
    """Linear layers with ReLU between them, softmax; per-example clipping by the norms of the layers' factors."""

    def __init__(self, *widths: int) -> None:
        self.shapes = [(a + 1, b) for a, b in itertools.pairwise(widths)]
        self.size = sum(a * b for a, b in self.shapes)

    def start(self, seed: int) -> Floats:
        """torch's first weights; of logistic regression 0."""
        if len(self.shapes) == 1:
            return np.zeros(self.size, np.float32)
        rng = generator(3, seed)
        return np.concatenate([rng.uniform(-1, 1, a * b) / np.sqrt(a - 1) for a, b in self.shapes], dtype=np.float32)

    def _layers(self, x: Floats) -> list[Floats]:
        ends = np.cumsum([a * b for a, b in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(x, ends), self.shapes, strict=True)]

    def logits(self, x: Floats, inputs: Floats) -> tuple[Floats, list[Floats]]:
        h = [inputs]
        for number, w in enumerate(self._layers(x)):
            inputs = h[number] @ w[:-1] + w[-1]
            h.append(np.maximum(inputs, 0))
        return inputs, h[:-1]

    def clipped_sum(self, x: Floats, inputs: Floats, labels: Floats, clip: float) -> Floats:
        logits, h = self.logits(x, inputs)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        deltas = [p]
        for w, below in zip(self._layers(x)[:0:-1], h[:0:-1], strict=True):
            deltas.insert(0, (deltas[0] @ w[:-1].T) * (below > 0))
        squares = sum((e**2).sum(1) * ((b**2).sum(1) + 1) for e, b in zip(deltas, h, strict=True))
        factors = np.nan_to_num(np.minimum(1, clip / np.sqrt(squares + 1e-30)))[:, None].astype(np.float32)
        parts = [np.vstack([b.T @ (factors * e), (factors * e).sum(0)]) for e, b in zip(deltas, h, strict=True)]
        return np.nan_to_num(np.concatenate([part.reshape(-1) for part in parts]))


def classify(
    network: Network, data: Any, starts: list[Floats], epsilon: float, batch: int, steps: int, rates: Floats
) -> dict[str, Any]:
    """Poisson batches, clip norm 1; `starts` has the first parameters of each seed."""
    inputs, labels, test_inputs, test_labels = data
    event = partial(accounting.PoissonSampledGaussian, batch / len(inputs), steps=steps)
    s = accounting.calibrate("noise_multiplier", epsilon, DELTA, lambda sigma: event(noise_multiplier=sigma)) / batch

    def score(make: Callable[..., Rule]) -> float:
        wrong = []
        for seed, x in enumerate(starts):

            def average(x: Floats, t: int, seed: int = seed) -> Floats:
                chosen = np.flatnonzero(generator(4, seed, t).random(len(inputs)) < batch / len(inputs))
                return network.clipped_sum(x, inputs[chosen], labels[chosen], 1.0) / batch

            noise = generator(5, seed).standard_normal((steps, network.size), dtype=np.float32)
            last = run(make, average, x, noise, 1.0, s).astype(np.float32)
            wrong.append(100 * np.mean(np.nan_to_num(network.logits(last, test_inputs)[0]).argmax(1) != test_labels))
        return float(np.mean(wrong))

    best = searched(score, rates)
    return {
        "noise_norm_over_clip": rounded(np.sqrt(network.size) * s), "sgd": best,
        "below_best": every({name: score(make) - best["best"] for name, make in RULES.items()}),
    }  # fmt: skip


def images(name: str, folder: str | None) -> Any:
    found = load(name, folder)
    scale = [np.asarray(part, np.float32).reshape(len(part), -1) for part in (found.train_inputs, found.test_inputs)]
    return scale[0], np.asarray(found.train_targets), scale[1], np.asarray(found.test_targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began, result = time.perf_counter(), {}
    for d, (ratio, noise), (clip, distance) in itertools.product(
        (64, 1024), ((1, 0.3), (10, 1), (10, 5), (100, 0.3)), ((1, 1), (0.1, 1), (1, 100), (1, 0.01))
    ):
        name = f"quadratic, d {d}, condition {ratio}, noise {noise}, clip {clip}, distance {distance}"
        result[name] = quadratic(d, ratio, noise, clip, distance)
        report(name, result[name])
    digits, mnist = images("digits", None), images("mnist", given.data_dir)
    small, large = Network(64, 10), Network(784, 64, 10)
    starts = [large.start(seed) for seed in range(2)]
    public = partial(large.clipped_sum, inputs=mnist[0][:2000], labels=mnist[1][:2000], clip=1e9)
    no_noise = np.zeros((200, 1), np.float32)
    tuned = [run(partial(Constant, lr=0.5), lambda x, _: public(x) / 2000, x, no_noise, 1.0, 0.0) for x in starts]
    rest = (mnist[0][2000:], mnist[1][2000:], *mnist[2:])
    cases: list[tuple[str, int, Any]] = [
        *(("digits", e, (small, digits, [small.start(0)] * 8, e, 256, 100, 2.0 ** np.arange(-1, 7))) for e in (1, 8)),
        *(("MNIST", e, (large, mnist, starts, e, 512, 200, 2.0 ** np.arange(0, 6))) for e in (1, 8)),
        ("MNIST, pretrained", 1, (large, rest, tuned, 1, 512, 200, 2.0 ** np.arange(-3, 6))),
    ]
    for name, epsilon, arguments in cases:
        result[f"{name}, epsilon {epsilon}"] = classify(*arguments)
        report(f"{name}, epsilon {epsilon}", result[f"{name}, epsilon {epsilon}"])
    print(table(result))
    save(given.out / "rates.json", {"results": result}, began)


def table(results: dict[str, Any]) -> str:
    """The table of docs/studies/rates.md."""
    points = {name: row["below_best"] for name, row in results.items() if "below_best" in row}
    heads = ["rule", "quadratics: median", "worst", *(name.replace("epsilon ", "") for name in points)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for rule in RULES:
        ratios = [row["over_best"][rule] for row in results.values() if "over_best" in row]
        cells = [f"{np.median(ratios):.2f}", f"{max(ratios):,.1f}", *(f"{row[rule]:.1f}" for row in points.values())]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(name: str, row: dict[str, Any]) -> None:
    found = row.get("over_best") or row["below_best"]
    print(f"{name}: {row['sgd']['best']:.4g}; {found}", flush=True)


if __name__ == "__main__":
    main()
