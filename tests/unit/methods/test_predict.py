"""The predicted loss is that of `dpcore.minimize`: by its response to the start and to each noise, one at a time."""

import warnings
from typing import Any

import numpy as np
import pytest

import dpcore
from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError, TrainingWarning
from dpcore.methods import best_rate, expected_loss
from dpcore.methods.predict import query_of
from dpcore.stages.filters import Accumulation, OptimalFIR, ScalarKalman
from dpcore.stages.method import Method
from dpcore.stages.noise import IndependentGaussian
from dpcore.stages.queries import RecursiveDifference
from dpcore.stages.updates import SGD
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.schedules import Doubling, WarmupCosine

STEPS = 7
# No vector of the test comes near this clip norm, which is the standard deviation of the noise, too.
C = 1e3
PLAIN: dict[str, Any] = {"lr": 0.3, "max_grad_norm": C, "clipping": "standard"}
LINEAR = {
    "dp_sgd": methods.dp_sgd(**PLAIN),
    "momentum": methods.dp_sgd(base="momentum", **PLAIN),
    "nesterov, weight decay": methods.dp_sgd(base="nesterov", weight_decay=0.1, **PLAIN),
    "doppler": methods.doppler(**PLAIN),
    "second order, cosine": methods.doppler(filter="second-order", schedule=WarmupCosine(2), **PLAIN),
    "disk": methods.disk(**PLAIN),
    "storm and a filter": methods.disk(gamma=-1.0, filter="f3", **PLAIN),
    "kalman": methods.disk(kappa=ScalarKalman(0.1, 0.5, 2.0), **PLAIN),
    "pmlf": methods.pmlf(window=3, **PLAIN),
    "inner_outer": methods.inner_outer(window=3, lr=0.1, max_grad_norm=C),
    "exponential average": methods.dp_sgd(averaging=ExponentialAverage(0.8), **PLAIN),
    "uniform average": methods.pmlf(averaging=UniformAverage(3), **PLAIN),
    "differences": Method(
        query=RecursiveDifference(0.9),
        filter=Accumulation(0.9),
        update=SGD(0.3),
        clip=methods.dp_sgd(**PLAIN).clip,
        noise=IndependentGaussian(None),
    ),
}


def last(method: Method, h: float, x0: float, noise: np.ndarray, errors: np.ndarray) -> float:
    """Return the last point in one direction; step t takes the one example whose gradient has the error errors[t]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        found = dpcore.minimize(
            lambda x, indices: h * x + errors[indices, None],
            np.array([x0]),
            [[step] for step in range(len(noise))],
            method.with_noise_multiplier(1.0),
            noise=noise[:, None] / C,
        )
    return float(found.x[0])


@pytest.mark.parametrize("name", LINEAR)
def test_it_is_the_response_to_the_start_and_to_every_noise(name: str):
    method, h, start, noise_std, gradient_std = LINEAR[name], 0.7, 1.3, 0.4, 0.9
    zero, units = np.zeros(STEPS), np.eye(STEPS)
    squares = last(method, h, start, zero, zero) ** 2
    squares += noise_std**2 * sum(last(method, h, 0.0, unit, zero) ** 2 for unit in units)
    squares += gradient_std**2 * sum(last(method, h, 0.0, zero, unit) ** 2 for unit in units)
    predicted = expected_loss(method, [h], STEPS, noise_std=noise_std, start=start, gradient_std=gradient_std)
    assert predicted == pytest.approx(h * squares / 2, rel=1e-6)


def test_rates_are_those_given_and_an_unstable_one_is_infinite():
    method, h = LINEAR["doppler"], [1.0, 0.1]
    each = [expected_loss(methods.doppler(**{**PLAIN, "lr": lr}), h, 50, noise_std=0.1) for lr in (0.1, 0.5)]
    found = expected_loss(method, h, 50, noise_std=0.1, rates=[0.1, 0.5])
    assert found == pytest.approx(each)
    assert np.isinf(expected_loss(method, h, 3000, noise_std=0.1, rates=[80.0]))


@pytest.mark.parametrize("name", ["dp_sgd", "second order, cosine", "pmlf"])
def test_the_best_rate_is_that_of_a_fine_grid(name: str):
    h, noise = 1 / np.arange(1, 9), np.array([0.5, 2.0])
    found = best_rate(LINEAR[name], h, 40, noise_std=noise)
    for n, std in enumerate(noise):
        losses = expected_loss(LINEAR[name], h, 40, noise_std=std, rates=np.logspace(-4, 1.5, 1200))
        assert losses.min() <= found.loss[n] <= losses.min() * 1.002
        assert best_rate(LINEAR[name], h, 40, noise_std=std) == (found.lr[n], found.loss[n])


def test_a_query_counts_its_gradients_and_its_length():
    assert query_of(LINEAR["dp_sgd"]) == (1, 1)
    assert query_of(LINEAR["disk"]) == (2, pytest.approx(1))
    assert query_of(LINEAR["pmlf"]) == (3, pytest.approx(1))
    assert query_of(LINEAR["inner_outer"]) == (3, pytest.approx(1.11))
    assert query_of(LINEAR["differences"]).size == 1


@pytest.mark.parametrize(("method", "sentence"), [
    (methods.dp_adam(lr=1), r"update=Adam\(\.\.\.\): cannot be predicted"),
    (methods.dp_sgd(schedule=Doubling()), r"schedule=Doubling\(.*\): cannot be predicted"),
    (methods.doppler(lr=1, filter=OptimalFIR(3)), r"filter=OptimalFIR\(\.\.\.\): cannot be predicted"),
    (methods.dp_sgd(lr=1, strategy="tree"), "strategy: cannot be predicted"),
    (methods.dp_sgd(lr=1, radius=1), "radius: cannot be predicted"),
])  # fmt: skip
def test_a_method_that_is_not_linear_is_refused(method: Method, sentence: str):
    with pytest.raises(ArgumentError, match=sentence):
        expected_loss(method, [1.0], 3, noise_std=1)


@pytest.mark.parametrize(("changed", "sentence"), [
    ({"curvatures": []}, "curvatures: must be"),
    ({"curvatures": "abc"}, "curvatures: must be"),
    ({"curvatures": [0.0, 0.0]}, "curvatures: must be"),
    ({"curvatures": [1.0, -1.0]}, "curvatures: must be"),
    ({"start": [1.0, 2.0]}, "start: must be a number of at least 0, or one for each of the 1 curvatures"),
    ({"gradient_std": -1.0}, "gradient_std: must be"),
    ({"noise_std": "much"}, "noise_std="),
    ({"noise_std": -1.0}, "noise_std=-1.0: must"),
    ({"steps": 0}, "steps=0: must be an integer of at least 1"),
])  # fmt: skip
def test_nonsense_is_refused(changed: dict[str, Any], sentence: str):
    given = {"curvatures": [1.0], "steps": 3, "noise_std": 1.0} | changed
    curvatures, steps = given.pop("curvatures"), given.pop("steps")
    for function in (expected_loss, best_rate):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=sentence):
            function(LINEAR["dp_sgd"], curvatures, steps, **given)
        with pytest.raises(ArgumentTypeError, match="method=None: must be"):
            function(None, curvatures, steps, **given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"rates=\[0.0\]: must be finite learning rates"):
        expected_loss(LINEAR["dp_sgd"], [1.0], 3, noise_std=1, rates=[0.0])
