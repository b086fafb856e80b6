"""Options of all methods: who takes which, what the sampling follows, and that they reach the method."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("typer")

from dpcore.cli.train.settings import DEFAULT_LR, Settings
from dpcore.errors import ArgumentError, DpcoreError, PrivacyError
from dpcore.methods import METHODS
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.strategies import NamedStrategy
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine
from tests.refused import refused


def build(method: str, **settings: Any) -> Any:
    return Settings(method=method, epsilon=3, **settings).build_method(1000)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_built_from_defaults(method: str):
    settings = Settings(method=method, epsilon=3)
    assert settings.build_method(1000).name == method
    assert settings.learning_rate == DEFAULT_LR[settings.update]
    expected = "fixed-order" if method in ("memf", "srg_memf", "accelerated_srgd") else "poisson"
    assert settings.sampling == expected


def test_options_reach_the_method():
    pmlf = build("pmlf", window=4, beta=0.3, filter="first-order v1")
    assert (pmlf.query.window, pmlf.query.beta) == (4, 0.3)
    assert build("inner_outer", outer_momentum=0.7).update.momentum == 0.7
    assert build("srg_memf", decay=0.2).query.decay == 0.2
    assert build("accelerated_srgd", variant="unaccelerated").update.variant == "unaccelerated"
    scaled = build("dp_adam", variant="scale_then_privatize", max_scaled_norm=2.0, scale_eps=0.1, eps=1e-4)
    assert (scaled.query.max_scaled_norm, scaled.query.scale_eps, scaled.update.eps) == (2.0, 0.1, 1e-4)
    banded = build("memf", strategy="banded-inverse-square-root", bands=3)
    assert banded.noise.strategy == NamedStrategy("banded-inverse-square-root", 3)
    released = build("dp_sgd", schedule="cosine", warmup_steps=5, ema=0.9, radius=2.0)
    assert released.schedule == WarmupCosine(5)
    assert released.averaging == ExponentialAverage(0.9)
    assert released.radius == 2.0
    assert build("dp_sgd", clip_quantile=0.7).clip.adaptive == AdaptiveClip(0.7)
    adapted = build("dp_sgd", max_grad_norm=3.0, clip_quantile=0.7, clip_lr=0.1, bit_noise=9.0).clip
    assert (adapted.max_grad_norm, adapted.adaptive) == (3.0, AdaptiveClip(0.7, 0.1, 9.0))
    refused(ArgumentError, "learning_rate=0", build, "dp_sgd", clip_quantile=0.7, clip_lr=0.0)


@pytest.mark.parametrize(("method", "settings", "sampling"), [
    ("dp_sgd", {"strategy": "tree"}, "fixed-order"), ("accelerated_srgd", {"variant": "independent"}, "poisson"),
    ("dp_adam", {"variant": "independent_moments"}, "fixed-order"),
    ("dp_adam", {"variant": "bias_corrected"}, "poisson"),
])  # fmt: skip
def test_the_sampling_follows_the_method(method: str, settings: dict[str, Any], sampling: str):
    assert Settings(method=method, epsilon=3, **settings).sampling == sampling
    if sampling == "fixed-order":
        with pytest.raises(PrivacyError, match=r"\(sampling='fixed-order'\)"):
            Settings(method=method, epsilon=3, sampling="poisson", **settings).plan(1000)


def test_samplings_that_fit():
    assert Settings(epsilon=3, sampling="truncated-poisson", max_batch_size=20).max_batch_size == 20
    Settings(epsilon=3, method="dp_adam", variant="independent_moments", sampling="truncated-poisson")
    Settings(epsilon=3, method="memf", sampling="shuffled")
    Settings(epsilon=3, sampling="cyclic-poisson", groups=4)


@pytest.mark.parametrize(("settings", "words"), [
    ({"max_batch_size": 20}, "max_batch_size=20: is only for sampling 'truncated-poisson'"),
    ({"groups": 2, "sampling": "shuffled"}, "groups=2: is only for sampling 'cyclic-poisson'"),
    ({"sampling": "cyclic-poisson"}, "groups=None: must be given with sampling 'cyclic-poisson'"),
    ({"method": "memf", "sampling": "truncated-poisson"}, "sampler=TruncatedPoissonSampler: correlated noise"),
    ({"method": "dp_adam", "variant": "independent_moments", "sampling": "fixed-size"}, "zero-out adjacency; use"),
])  # fmt: skip
def test_what_is_another_samplings_is_refused_with_the_plan(settings: dict[str, Any], words: str):
    refused(DpcoreError, words, Settings(epsilon=3, **settings).plan, 1000)


def test_epsilon_is_named_as_it_was_typed():
    refused(ArgumentError, r"^epsilon=-1: must be greater than 0", Settings, epsilon=-1)


@pytest.mark.parametrize(("method", "settings", "words"), [
    ("memf", {"kappa": 0.5}, "is only for the method disk, not for memf"),
    ("inner_outer", {"base": "sgd"}, "is only for the method dp_sgd, doppler, disk"),
    ("dp_sgd", {"eps": 0.1}, "is only for --base adam, adamw or adagrad, not for sgd"),
    ("accelerated_srgd", {"weight_decay": 0.1}, "not for accelerated"),
    ("inner_outer", {"momentum": 0.1}, "is only for the method dp_sgd, .* not for inner_outer"),
    ("dp_sgd", {"bands": 3}, "banded-inverse-square-root"),
    ("dp_sgd", {"clip_lr": 0.1}, "clip_lr=0.1: is only for --clip-quantile"),
    ("dp_sgd", {"bit_noise": 3.0}, "bit_noise=3.0: is only for --clip-quantile"),
    ("dp_sgd", {"warmup_steps": 3}, "is only for --schedule cosine"), ("dp_sgd", {"ema": 1.0}, "ema=1.0"),
    ("dp_adam", {"variant": "side_information"}, "make_private"),
    ("dp_adam", {"variant": "noiseless_preconditioner", "allow_nonprivate": True}, "guarantees nothing"),
])  # fmt: skip
def test_what_does_not_fit_is_one_sentence(method: str, settings: dict[str, Any], words: str):
    with pytest.raises(ArgumentError, match=words) as caught:
        Settings(method=method, epsilon=3, **settings)
    assert "\n" not in str(caught.value)
