"""The contestants of docs/studies/scattering.md, and the search for each one's settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dpcore


@dataclass(frozen=True)
class Contestant:
    """A method, the learning rate where its search begins, and its own settings: the paper's or default ones first."""

    method: str
    rate: float
    settings: tuple[dict[str, Any], ...]

    def make(self, setting: int, lr: float, **common: Any) -> dpcore.Method:
        made: dpcore.Method = getattr(dpcore.methods, self.method)(
            lr=lr, max_grad_norm=1.0, clipping="automatic", **self.settings[setting], **common
        )
        return made

    def gradients(self, setting: int) -> int:
        """Gradients an example, after the first steps."""
        return len(self.make(setting, self.rate).query.points(100))


CONTESTANTS = {
    "DP-SGD": Contestant("dp_sgd", 1.0, ({},)),
    "DP-SGD with momentum": Contestant(
        "dp_sgd", 1 / 8, tuple({"base": "momentum", "momentum": momentum} for momentum in (0.9, 0.7, 0.95))
    ),
    "DOPPLER": Contestant(
        "doppler", 1.0, tuple({"filter": name} for name in ("first-order v1", "momentum", "second-order"))
    ),
    "DiSK": Contestant(
        "disk", 1.0, tuple({"kappa": kappa, "gamma": gamma} for kappa, gamma in ((0.7, 0.5), (0.5, 1.0), (0.3, 0.5)))
    ),
    "DP-PMLF": Contestant(
        "pmlf", 1.0, tuple({"window": 2, "beta": beta, "filter": name}
                           for beta, name in ((0.1, "pmlf-mnist"), (0.1, "p1"), (0.5, "pmlf-mnist")))
    ),
    "DP-Adam": Contestant(
        "dp_adam", 1 / 256, tuple({"betas": betas} for betas in ((0.9, 0.999), (0.9, 0.99), (0.0, 0.999)))
    ),
}  # fmt: skip


def search(evaluate: Callable[[int, float], float], settings: int, budget: int) -> tuple[int, float]:
    """Find the best (setting, k) in exactly `budget` evaluations; the learning rate is the first one times 2^k.

    First the rate by factors of 4, then the other settings at the best rate, then the neighbors of the best.
    """
    seen: dict[tuple[int, float], float] = {}

    def look(setting: int, k: float) -> None:
        if (setting, k) not in seen and len(seen) < budget:
            seen[setting, k] = evaluate(setting, k)

    def best() -> tuple[int, float]:
        return max(seen, key=seen.__getitem__)

    for k in (0.0, 2.0, -2.0):
        look(0, k)
    while len(seen) < min(5, budget):
        tried = [k for _, k in seen]
        at = best()[1]
        if min(tried) < at < max(tried):
            break
        look(0, at + 2 if at == max(tried) else at - 2)
    for setting in range(1, settings):
        look(setting, best()[1])
    step = 1.0
    while len(seen) < budget:
        before, (setting, k) = len(seen), best()
        look(setting, k + step)
        look(setting, k - step)
        step = step / 2 if len(seen) == before else step
    return best()
