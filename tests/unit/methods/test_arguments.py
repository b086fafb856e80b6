"""What is mistyped in a call of a method is answered by name, with what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dpcore
from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.methods import METHODS
from dpcore.sampling import FixedOrderSampler
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.strategies import check_steps, from_matrix
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: methods.disk(lr=0.1, gama=0.5), ArgumentError, "did you mean 'gamma'?"),
        (lambda: methods.doppler(lr=0.1, base="adam", filtr="f1"), ArgumentError, "did you mean 'filter'?"),
        (lambda: methods.dp_adam(lr=0.1, base="sgd"), ArgumentError, "keyword of dp_adam()='base'"),
        (lambda: methods.inner_outer(lr=0.1, outer_momentum=1.0), ArgumentError, "outer_momentum=1.0"),
        (lambda: methods.doppler(lr=0.1, b=1.0, a=[]), ArgumentTypeError, "b=1.0: must be a sequence of numbers"),
        (lambda: methods.doppler(lr=0.1, b="1", a=[]), ArgumentTypeError, "b='1': must be a sequence of numbers"),
        (lambda: methods.dp_adam(lr=0.1, betas=0.9), ArgumentTypeError, "betas=0.9: must be a sequence of numbers"),
        (lambda: methods.doppler(lr=0.1, base="adam", betas=0.9), ArgumentTypeError, "betas=0.9: must be a sequence"),
        (
            lambda: methods.dp_adam(lr=0.1, variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=0),
            ArgumentError,
            "scaled_steps=0",
        ),
        (lambda: methods.memf(lr=0.1, strategy=np.zeros((3, 3))), ArgumentError, "0: the matrix is singular; take"),
        (lambda: methods.memf(lr=0.1, strategy=-np.eye(3)), ArgumentError, "greater than 0: multiply that row by -1"),
    ],
)
def test_one_sentence_names_the_argument(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert ";," not in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_unknown_keywords_are_refused_by_every_method(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"keyword of .*='nonsense'"):
        METHODS[name](lr=0.1, nonsense=1)


def test_a_matrix_of_too_few_rows_is_not_taken_for_a_named_strategy() -> None:
    with pytest.raises(ArgumentError, match=r"the strategy \(banded\) has 3 rows"):
        check_steps(from_matrix(np.eye(3)), 4)


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
