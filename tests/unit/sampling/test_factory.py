"""Samplers by name: one table for configurations, the command line, the PyTorch edge and stored statements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from dpcore import methods, sampling
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches, PoissonSampler, UserSampler, foreign, from_description, sampler
from tests.refused import refused

SIZES: dict[str, Any] = {"dataset_size": 110, "batch_size": 10}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "poisson": (PoissonSampler, {}),
    "truncated-poisson": (sampling.TruncatedPoissonSampler, {"max_batch_size": 15}),
    "fixed-size": (sampling.FixedSizeSampler, {}),
    "fixed-order": (sampling.FixedOrderSampler, {"shuffle": False, "drop_last": True}),
    "shuffled": (sampling.ShuffledSampler, {"drop_last": True}),
    "cyclic-poisson": (sampling.CyclicPoissonSampler, {"groups": 4, "shuffle": False}),
    "random-allocation": (sampling.RandomAllocationSampler, {}),
}


@dataclass(frozen=True, init=False)
class Mine(PoissonSampler):
    """Not the library's."""


@pytest.mark.parametrize("name", KINDS)
def test_a_sampler_is_made_by_name_and_again_from_what_it_says(name: str) -> None:
    assert set(KINDS) == set(sampling.NAMES)
    kind, settings = KINDS[name]
    expected = kind(**SIZES, **settings)
    for spelling in (name, name.replace("-", "_"), name.replace("-", " ")):
        assert sampler(spelling, dataset_size=110, batch_size=10.0, **settings, sample_rate=None) == expected
    assert from_description(json.loads(json.dumps(expected.describe()))) == expected
    assert foreign(expected) is None
    assert foreign(UserSampler(expected, [i % 110 for i in range(200)], 2)) is None


@pytest.mark.parametrize(("name", "given", "said"), [
    ("poison", SIZES, "did you mean 'poisson'"), ("cyclic-poisson", SIZES, "groups=None: must be given"),
    ("poisson", {**SIZES, "groups": 3}, "groups=3: is only for sampling 'cyclic-poisson', not 'poisson'"),
    ("shuffled", {**SIZES, "sample_rate": 0.1}, "is only for sampling 'poisson' or 'truncated-poisson'"),
    ("fixed-size", {"dataset_size": 110}, "batch_size=None: must be given"),
    ("poisson", {"dataset_size": 110}, "batch_size=None: must be given"),
])  # fmt: skip
def test_what_does_not_fit_the_name_is_refused(name: str, given: dict[str, Any], said: str) -> None:
    refused(ArgumentError, said, sampler, name, **given)


def test_batches_of_fixed_size_have_a_whole_number_of_examples() -> None:
    refused(ArgumentTypeError, r"batch_size=10\.5", sampler, "fixed-order", dataset_size=110, batch_size=10.5)
    assert sampler("poisson", dataset_size=110, batch_size=10.5).expected_batch_size == 10.5


def test_a_description_that_does_not_hold_all_makes_no_sampler() -> None:
    described = PoissonSampler(**SIZES).describe()
    assert from_description(FixedBatches([[0, 1]]).describe()) is None
    assert from_description({**described, "sampler": "mine"}) is None
    assert from_description({"sampler": 3}) is None
    with pytest.raises(DataError, match="lacks"):
        from_description({name: value for name, value in described.items() if name != "sample_rate"})
    with pytest.raises(DataError, match=r"cannot exist: sample_rate=.* contradicts"):
        from_description({**described, "expected_batch_size": 11})


def test_whose_a_sampler_is_goes_by_its_class() -> None:
    assert foreign(Mine(**SIZES)) is Mine
    assert foreign(UserSampler(Mine(**SIZES), [i % 110 for i in range(200)], 2)) is Mine


def test_an_object_that_lacks_a_member_is_no_sampler() -> None:
    class Half:
        """Draws, and does not say what correlated noise costs under it."""

        def __init__(self) -> None:
            whole = PoissonSampler(**SIZES)
            for name in ("dataset_size", "expected_batch_size", "indices", "event", "describe", "keeps_order"):
                setattr(self, name, getattr(whole, name))

    for value in (Half(), PoissonSampler, None):
        with pytest.raises(ArgumentTypeError, match=r"must be a sampler from dpcore\.sampling"):
            Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.0), value, 3)  # type: ignore[arg-type]
