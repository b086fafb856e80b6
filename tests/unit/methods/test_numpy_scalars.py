"""Numbers of NumPy are taken for the numbers that they hold, by every stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dpcore
from dpcore import methods
from dpcore.sampling import FixedOrderSampler
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine

NUMBERS = {"lr": 0.1, "max_grad_norm": 0.7, "noise_multiplier": 1.5, "radius": 3.0}
SCALARS = [
    (methods.dp_sgd, {"momentum": 0.5, "base": "momentum", "weight_decay": 0.1}),
    (methods.disk, {"kappa": 0.7, "gamma": 0.5}),
    (methods.doppler, {"b": [0.25, 0.25], "a": [-0.5], "base": "adam", "betas": (0.0, 0.9), "eps": 1e-3}),
    (methods.pmlf, {"window": 2, "beta": 0.3}),
    (methods.srg_memf, {"decay": 0.25}),
    (methods.srg_memf, {"decay": [0.0, 0.25, 0.5, 0.5]}),
    (methods.dp_adam, {"variant": "scale_then_privatize", "scale_eps": 0.1, "max_scaled_norm": 2.0}),
    (methods.dp_sgd, {"schedule": (WarmupCosine, (1, 0.1)), "averaging": (ExponentialAverage, (0.9,))}),
    (methods.dp_sgd, {"adaptive_clip": (AdaptiveClip, (0.4, 0.3, 4.0))}),
]


@pytest.mark.parametrize("kind", [np.float64, np.array])
@pytest.mark.parametrize(("make", "own"), SCALARS)
def test_numpy_scalars_are_the_numbers_that_they_hold(make: Any, own: dict[str, Any], kind: Callable[..., Any]) -> None:
    """In float32 runs too, where an array of float64 does not fit."""

    def convert(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            if value and callable(value[0]):
                return value[0](*map(convert, value[1]))
            return np.array(value) if kind is not np.float64 else [np.float64(entry) for entry in value]
        return kind(value) if isinstance(value, float) else np.int64(value) if type(value) is int else value

    def plain(value: Any) -> Any:
        return value[0](*value[1]) if isinstance(value, tuple) and callable(value[0]) else value

    def run(method: Any, batch_size: Any) -> Any:
        sampler = FixedOrderSampler(dataset_size=8, batch_size=2)
        return dpcore.minimize(
            lambda x, i: np.outer(np.float32(1) + i, x).astype(np.float32), np.ones(3, np.float32), sampler,
            make(**method, batch_size=batch_size), steps=4, key=bytes(32), exact_key=True, record=True,
        )  # fmt: skip

    settings = NUMBERS | own
    expected = run({name: plain(value) for name, value in settings.items()}, 2.0)
    got = run({name: convert(value) for name, value in settings.items()}, kind(2.0))
    assert got.path.dtype == np.float32
    assert got.path.tobytes() == expected.path.tobytes()
    assert json.dumps(got.plan.method.describe()) == json.dumps(expected.plan.method.describe())
