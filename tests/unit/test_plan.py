"""The plan: what fits together, what it costs, what its statement says."""

from __future__ import annotations

import math

import pytest

import dpcore
from dpcore import accounting, methods, sampling
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.keys import RunKeys
from dpcore.plan import Plan

POISSON = sampling.PoissonSampler(dataset_size=1000, batch_size=50)


def test_the_sampler_and_the_event_are_one() -> None:
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.1), POISSON, 200)
    assert plan.event == accounting.PoissonSampledGaussian(POISSON.sample_rate, 1.1, 200)
    assert plan.epsilon(1e-5) == accounting.epsilon(plan.event, 1e-5)
    assert plan.epsilon(1e-5, steps=10) < plan.epsilon(1e-5)
    assert plan.epsilon(1e-5, steps=0) == 0
    assert plan.batch_size == 50


def test_calibration_meets_the_target() -> None:
    plan = Plan(methods.doppler(lr=0.1), POISSON, 200).calibrated(3.0, 1e-5)
    assert 3.0 * (1 - 1e-5) < plan.epsilon(1e-5) <= 3.0


def test_the_noise_scale_comes_from_the_clip() -> None:
    for rule, sensitivity in (("standard", 2.5), ("automatic", 2.5), ("normalized", 1.0)):
        method = methods.dp_sgd(lr=0.1, max_grad_norm=2.5, clipping=rule, noise_multiplier=2.0)
        assert Plan(method, POISSON, 1).noise_standard_deviation == pytest.approx(2 * sensitivity)
    per_tensor = methods.dp_sgd(lr=0.1, clipping="normalized", clipping_groups="per_tensor", noise_multiplier=2.0)
    assert Plan(per_tensor, POISSON, 1, ("a", "b", "c")).noise_standard_deviation == pytest.approx(2 * math.sqrt(3))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Plan("dp_sgd", POISSON, 1), ArgumentTypeError, "method='dp_sgd'"),
        (lambda: Plan(methods.dp_sgd(lr=1), "poisson", 1), ArgumentTypeError, "sampler='poisson'"),
        (lambda: Plan(methods.dp_sgd(lr=1), POISSON, 0), ArgumentError, "steps=0"),
        (lambda: Plan(methods.dp_sgd(lr=1, batch_size=64), POISSON, 1), ArgumentError, "batch_size=64"),
        (lambda: Plan(methods.dp_sgd(lr=1), POISSON, 1).event, PrivacyError, "noise_multiplier=None"),
        (lambda: Plan(methods.dp_sgd(lr=1), POISSON, 1).epsilon(1e-5), PrivacyError, "noise_multiplier=None"),
        (
            lambda: Plan(methods.dp_sgd(lr=1, noise_multiplier=1), POISSON, 1).epsilon(1e-5, accountant="pld"),
            ArgumentError,
            "pld",
        ),
    ],
)
def test_what_does_not_fit(make, error, words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (methods.dp_sgd, "lr=None"),
        (lambda: methods.dp_sgd(lr=-1), "lr=-1"),
        (lambda: methods.dp_sgd(lr=0.1, base="adan"), "did you mean 'adam'"),
        (lambda: methods.dp_sgd(lr=0.1, momentun=0.9, base="momentum"), "did you mean 'momentum'"),
        (lambda: methods.dp_sgd(lr=0.1, base=dpcore.updates.SGD(0.1)), "base"),
        (lambda: methods.dp_sgd(lr=0.1, noise_multiplier=-1), "noise_multiplier=-1"),
        (lambda: methods.dp_sgd(lr=0.1, noise_multiplier=math.nan), "noise_multiplier=nan"),
        (lambda: methods.dp_sgd(lr=0.1, batch_size=0), "batch_size=0"),
        (lambda: methods.doppler(lr=0.1, filter="first"), "filter='first'"),
        (lambda: methods.doppler(lr=0.1, filter="f1", b=[1.0]), "must not be given together"),
        (lambda: methods.doppler(lr=0.1, a=[-0.9]), "b=None"),
        (lambda: methods.disk(lr=0.1, gamma=0), "gamma=0"),
        (lambda: methods.disk(lr=0.1, kappa=0), "kappa=0"),
        (lambda: methods.disk(lr=0.1, kappa=1.5), "kappa=1.5"),
        (lambda: methods.dp_adam(lr=0.1, variant="bias_corrected"), "variant='bias_corrected'"),
        (lambda: dpcore.Method(update="sgd"), "update='sgd'"),
        (lambda: dpcore.Method(update=dpcore.updates.SGD(0.1), filter=dpcore.filters.Identity), "dpcore.filters"),
    ],
)
def test_bad_methods(make, words: str) -> None:
    with pytest.raises(dpcore.errors.DpcoreError) as caught:
        make()
    assert words in str(caught.value)


def test_the_statement_is_complete_and_reads_back() -> None:
    plan = Plan(methods.disk(lr=0.1, noise_multiplier=1.0), POISSON, 100)
    statement = plan.statement(1e-5, steps_taken=40, keys=RunKeys.new(), backend="numpy")
    assert statement.epsilon["rdp"] == plan.epsilon(1e-5, steps=40)
    assert statement.epsilon_planned["rdp"] == plan.epsilon(1e-5)
    assert accounting.Event.from_dict(statement.event) == plan.event_after(40)
    assert statement.noise["standard_deviation_on_sum"] == plan.noise_standard_deviation
    assert type(statement).from_json(statement.to_json()) == statement
    caller = plan.statement(1e-5, steps_taken=40, keys=RunKeys.new(bytes(32)), backend="numpy")
    assert any("stays secret" in caveat for caveat in caller.caveats)
    assert bytes(32).hex() not in caller.to_json()


@pytest.mark.parametrize("change", [{"rng": "philox"}, {"caller_noise": True}])
def test_simulations_are_not_private(change: dict) -> None:
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.0), POISSON, 100)
    statement = plan.statement(1e-5, steps_taken=100, keys=RunKeys.new(), backend="numpy", **change)
    assert not statement.private
    assert "not" in statement.text()


def test_no_noise_costs_everything() -> None:
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=0.0), POISSON, 100)
    assert plan.epsilon(1e-5) == math.inf
    assert not plan.statement(1e-5, steps_taken=1, keys=RunKeys.new(), backend="numpy").private
