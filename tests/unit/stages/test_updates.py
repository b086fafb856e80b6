"""Update rules against torch's own optimizers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpcore.spec.ops import SECOND_MOMENT, UPDATE_RULES, UpdateSettings
from dpcore.stages.updates import SGD, AdaGrad, Adam, AdamW, Momentum, Nesterov, Update
from dpcore_numpy import update

CASES = [
    (SGD(0.1), "SGD", {}),
    (SGD(0.1, weight_decay=0.3), "SGD", {"weight_decay": 0.3}),
    (Momentum(0.1, 0.8), "SGD", {"momentum": 0.8}),
    (Momentum(0.1, 0.8, 0.2), "SGD", {"momentum": 0.8, "weight_decay": 0.2}),
    (Nesterov(0.1), "SGD", {"momentum": 0.9, "nesterov": True}),
    (Nesterov(0.1, 0.8, 0.2), "SGD", {"momentum": 0.8, "weight_decay": 0.2, "nesterov": True}),
    (Adam(0.01), "Adam", {}),
    (Adam(0.01, (0.5, 0.9), 1e-3, 0.1), "Adam", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (AdamW(0.01), "AdamW", {"weight_decay": 0.01}),
    (AdamW(0.01, (0.5, 0.9), 1e-3, 0.4), "AdamW", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.4}),
    (AdaGrad(0.1, 1e-10), "Adagrad", {}),
    (AdaGrad(0.1, 1e-2, 0.3), "Adagrad", {"eps": 1e-2, "weight_decay": 0.3}),
    (AdaGrad(0.1), "Adagrad", {"eps": 0.0}),
]


@pytest.mark.parametrize(("rule", "name", "settings"), CASES, ids=str)
def test_twenty_steps_are_torchs(rule: Update, name: str, settings: dict) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=17)
    parameter = torch.tensor(x, requires_grad=True)
    optimizer = getattr(torch.optim, name)([parameter], lr=rule.settings().learning_rate, **settings)
    moments = [np.zeros_like(x) for _ in range(UPDATE_RULES[rule.rule])]
    for step in range(20):
        gradient = rng.normal(size=17) * 10.0 ** rng.integers(-3, 3)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        update(rule.rule, x, gradient, moments, rule.settings(), step + 1)
        np.testing.assert_allclose(x, parameter.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_accelerated_steps_are_the_three_sequences() -> None:
    rng = np.random.default_rng(2)
    x, z = rng.normal(size=(2, 17))
    got, moments = x.copy(), [z.copy(), np.full(17, np.nan)]
    for weight, coupling in ((1.0, 0.0), (2.0, 0.5), (3.5, 0.25), (1.0, 1.0)):
        g = rng.normal(size=17)
        z = z - 0.3 * g
        y = x - 0.3 / weight * g
        x = (1 - coupling) * y + coupling * z
        settings = UpdateSettings(0.3, weight_decay=7.0, weight=weight, coupling=coupling)
        update("accelerated", got, g, moments, settings, 1)
        for ours, expected in zip((got, *moments), (x, z, y), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=1e-14)


@pytest.mark.parametrize("rule", sorted(SECOND_MOMENT))
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_the_denominator_coordinate_by_coordinate(rule: str, eps: float) -> None:
    """Bias, floor and a given square against a loop; v below the bias, at the floor, and negative."""
    settings = UpdateSettings(0.3, 0.0, 0.9, 0.99, eps, bias=0.5, floor=0.25)
    square = np.array([-1.0, 0.0, 0.5, 0.55, 0.5625, 0.6, 4.0])
    x, g = np.ones(7), np.linspace(-1, 2, 7)
    moments = [np.zeros(7) for _ in range(UPDATE_RULES[rule])]
    update(rule, x, g, moments, settings, 1, square)
    # After one step the corrected averages are g and the square themselves.
    for i, (u, numerator) in enumerate(zip(square, g, strict=True)):
        denominator = math.sqrt(max(u - 0.5, 0.25**2)) + eps
        assert x[i] == pytest.approx(1 - 0.3 * numerator / denominator, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", sorted(SECOND_MOMENT))
def test_a_denominator_of_zero_moves_nothing(rule: str, dtype: str) -> None:
    tiny = 1e-60 if dtype == "float32" else 0.0  # 0 as the array holds it
    x, g = np.ones(3, dtype), np.array([1.0, 2.0, 3.0], dtype)
    moments = [np.zeros(3, dtype) for _ in range(UPDATE_RULES[rule])]
    settings = UpdateSettings(0.1, beta1=0.9, beta2=0.99, eps=tiny, bias=1.0)
    update(rule, x, g, moments, settings, 1, np.array([0.0, 0.5, -3.0], dtype))
    assert (x == 1).all()
