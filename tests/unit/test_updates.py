"""Update rules against torch's own optimizers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpcore.errors import ArgumentError
from dpcore.spec.ops import UPDATE_RULES
from dpcore.updates import SGD, Adam, AdamW, Momentum, Update
from dpcore_numpy import update

CASES = [
    (SGD(0.1), "SGD", {}),
    (SGD(0.1, weight_decay=0.3), "SGD", {"weight_decay": 0.3}),
    (Momentum(0.1, 0.8), "SGD", {"momentum": 0.8}),
    (Momentum(0.1, 0.8, 0.2), "SGD", {"momentum": 0.8, "weight_decay": 0.2}),
    (Adam(0.01), "Adam", {}),
    (Adam(0.01, (0.5, 0.9), 1e-3, 0.1), "Adam", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (AdamW(0.01), "AdamW", {"weight_decay": 0.01}),
    (AdamW(0.01, (0.5, 0.9), 1e-3, 0.4), "AdamW", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.4}),
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SGD(0), "lr=0"),
        (lambda: SGD(-1), "lr=-1"),
        (lambda: SGD(math.nan), "lr=nan"),
        (lambda: SGD(0.1, -0.1), "weight_decay=-0.1"),
        (lambda: Momentum(0.1, 1.0), "momentum=1.0"),
        (lambda: Adam(0.1, (0.9,)), "betas=(0.9,)"),
        (lambda: Adam(0.1, (0.9, 1.0)), "beta2=1.0"),
        (lambda: Adam(0.1, eps=0), "eps=0"),
    ],
)
def test_bad_settings(make, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        make()
    assert words in str(caught.value)


def test_bad_calls() -> None:
    x, g = np.zeros(3), np.zeros(3)
    with pytest.raises(ArgumentError, match="did you mean 'adam'"):
        update("adan", x, g, [], SGD(1.0).settings(), 1)
    with pytest.raises(ArgumentError, match=r"len\(moments\)=0: must be 2"):
        update("adam", x, g, [], Adam(1.0).settings(), 1)
    with pytest.raises(ArgumentError, match="step_number=0"):
        update("sgd", x, g, [], SGD(1.0).settings(), 0)
    with pytest.raises(ArgumentError, match=r"direction\.shape"):
        update("sgd", x, np.zeros(4), [], SGD(1.0).settings(), 1)
