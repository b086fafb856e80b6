"""Statements forged as a whole: events, epsilons, sentences and hashes changed together, as one who knows how would.

`test_report_verify` changes one leaf at a time. Here the forger also renews everything that follows from the change.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpcore import methods
from dpcore.accounting import Composed, Event, Gaussian, MatrixGaussian, PoissonSampledGaussian, SelfComposed
from dpcore.accounting.phases import demand_phases
from dpcore.errors import DataError
from dpcore.plan.plan import Plan
from dpcore.sampling import (
    NAMES,
    CyclicPoissonSampler,
    FixedBatches,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    RandomAllocationSampler,
    ShuffledSampler,
    UserSampler,
    sampler,
)
from dpcore.spec.keys import Provenance
from dpcore.spec.rounded_normal import distance
from dpcore.stages.clipping import AdaptiveClip, Clip
from dpcore.stages.noise import IndependentGaussian
from dpcore.stages.strategies import BLT, BandedToeplitz, Dense
from dpcore.stages.updates import SGD
from dpcore.statement import Statement
from dpcore.statement.assumptions import SECRET_BATCHES, assumptions
from dpcore.statement.build import guarantee, state
from dpcore.statement.text import visible
from dpcore.statement.verify import holds, verify
from tests.refused import refused
from tests.unit.ledger_tools import Coins

SIZES: dict[str, Any] = {"dataset_size": 110, "batch_size": 10}
COMMON: dict[str, Any] = {"lr": 0.1, "noise_multiplier": 1.2}
POISSON, ORDER = PoissonSampler(**SIZES), FixedOrderSampler(**SIZES)
DENSE = np.tril(np.ones((22, 22))) + np.eye(22)
PATTERNS = {"[ab]*": 1.0, "?": 2.0, "*": 0.5}
BANDED = np.eye(22) + 0.5 * np.diag(np.ones(21), -1)


class MySampler(FixedSizeSampler):
    def describe(self) -> dict[str, Any]:
        return {"sampler": "mine", "dataset_size": self.dataset_size, "adjacency": "replace-one"}


class TwoRates(Coins):
    """The even steps at one rate, the odd ones at another."""

    def event(self, noise_multiplier: float, steps: int) -> Any:
        rates = (self.sample_rate, (steps + 1) // 2), (0.05, steps // 2)
        return Composed(tuple(PoissonSampledGaussian(rate, noise_multiplier, count) for rate, count in rates))


class OftenWhole(Coins):
    """The even steps with all examples, whose event has no number of steps; the odd ones by coins."""

    def event(self, noise_multiplier: float, steps: int) -> Any:
        coins = PoissonSampledGaussian(self.sample_rate, noise_multiplier, steps // 2)
        return Composed((Gaussian(noise_multiplier, (steps + 1) // 2, self.adjacency), coins))


class People(Coins):
    """Draws users, and does not describe them."""

    @property
    def unit_of_privacy(self) -> str:
        return "user"


class Ordered(FixedOrderSampler):
    """Does not say how many examples a batch has."""

    def describe(self) -> dict[str, Any]:
        return {"sampler": "ordered", "adjacency": "zero-out"}


class TakenBack(Dense):
    """A strategy of the caller's, whose settings stand in an order of its own."""

    def describe(self) -> dict[str, Any]:
        return {"kind": "taken back", "steps": self.steps, "decay": 0.5}


@dataclass(frozen=True, kw_only=True)
class MySGD(SGD):
    """Not of the library."""


@dataclass(frozen=True)
class MyClip(Clip):
    """Not of the library."""


class Bound:
    """Has what a clip must have, and says nothing of itself."""

    rule = "standard"

    def grouping(self, tensors: tuple[str, ...]) -> Any:
        return Clip().grouping(tensors)

    def sensitivity(self, grouping: Any) -> Any:
        return Clip().sensitivity(grouping)


@dataclass(frozen=True)
class MyNoise(IndependentGaussian):
    """Not of the library."""


def run_of(
    method: Any, sampler: Any, steps_taken: int = 11, steps: int = 22, tensors: Any = ("x",), **said: Any
) -> Statement:
    plan = Plan(method, sampler, steps, tensors)
    keys = Provenance(forks=int(bool(said.get("abandoned"))))
    return state(plan, 1e-5, steps_taken=steps_taken, keys=keys, backend="numpy", **said)


def plain(sampler: Any = POISSON, **said: Any) -> Statement:
    return run_of(methods.dp_sgd(**COMMON), sampler, **said)


def correlated(strategy: Any, sampler: Any = ORDER, **said: Any) -> Statement:
    return run_of(methods.memf(strategy=strategy, **COMMON), sampler, **said)


def joint(sampler: Any, **said: Any) -> Statement:
    return run_of(methods.dp_adam(variant="joint_moments", **COMMON, **said), sampler)


def moments(sampler: Any) -> Statement:
    return run_of(methods.dp_adam(variant="independent_moments", **COMMON), sampler)


SGD_METHOD = methods.dp_sgd(**COMMON)
DELAYED = methods.dp_adam(
    variant="delayed_preconditioner", max_scaled_norm=3.0, unscaled_steps=2, scaled_steps=2, **COMMON
)
HONEST: dict[str, Callable[[], Statement]] = {
    "matrix by digest": lambda: correlated(DENSE, abandoned=((4, 7), (9, 11))),
    "matrix, shuffled": lambda: correlated(DENSE, ShuffledSampler(**SIZES), abandoned=1),
    "matrix, list": lambda: correlated(DENSE, FixedBatches([[0, 1], [2, 3]])),
    "matrix, whole run": lambda: correlated(BANDED, steps_taken=22),
    "matrix, no step": lambda: correlated(DENSE, steps_taken=0),
    "matrix, cyclic": lambda: correlated(BANDED, CyclicPoissonSampler(groups=4, **SIZES), abandoned=3),
    "matrix, another generator": lambda: correlated(DENSE, rng="philox"),
    "matrix, not private": lambda: run_of(
        methods.dp_adam(variant="noiseless_preconditioner", allow_nonprivate=True, strategy=DENSE, **COMMON), ORDER
    ),
    "separate moments, list": lambda: moments(FixedBatches([[0, 1], [2]], batch_size=1.5)),
    "joint, list": lambda: joint(FixedBatches([[0], [1]])),
    "joint, matrix": lambda: joint(FixedOrderSampler(dataset_size=11, batch_size=1), strategy=DENSE),
    "own sampler": lambda: plain(MySampler(**SIZES)),
    "own sampler, forked": lambda: plain(Coins(**SIZES), abandoned=3),
    "own sampler, two rates": lambda: plain(TwoRates(**SIZES), abandoned=2),
    "own sampler, often whole": lambda: plain(OftenWhole(**SIZES), abandoned=2),
    "own sampler, separate moments": lambda: moments(Ordered(**SIZES)),
    "own strategy": lambda: correlated(TakenBack(BANDED), abandoned=1),
    "own strategy, one cyclic step": lambda: correlated(
        TakenBack(np.eye(1)), CyclicPoissonSampler(groups=4, **SIZES), steps_taken=1, steps=1, abandoned=2
    ),
    "own update": lambda: run_of(replace(SGD_METHOD, update=MySGD(lr=0.1)), POISSON),
    "own clip": lambda: run_of(replace(SGD_METHOD, clip=MyClip()), POISSON),
    "own clip without groups": lambda: run_of(replace(SGD_METHOD, clip=Bound()), POISSON),
    "own clip, scaled": lambda: run_of(replace(DELAYED, clip=MyClip()), POISSON),
    "groups by pattern": lambda: run_of(
        methods.dp_sgd(clipping_groups=PATTERNS, **COMMON), POISSON, 3, tensors=("a.w", "c", "long")
    ),
    "own users": lambda: plain(People(**SIZES)),
    "users of an own sampler": lambda: plain(UserSampler(MySampler(**SIZES), [i % 110 for i in range(200)], 2)),
    "own noise": lambda: run_of(replace(SGD_METHOD, noise=MyNoise(1.2)), POISSON),
    "users, list": lambda: plain(UserSampler(FixedBatches([[0, 1], [2, 3]]), [0, 1, 2, 3, 3], 2), abandoned=3),
    "list, nothing yet": lambda: plain(FixedBatches([[], [], [2, 3]]), steps_taken=1),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_statement_holds_in_whatever_order_it_is_written_down(name: str) -> None:
    statement = HONEST[name]()
    assert [finding for finding in verify(statement) if finding.status == "failed"] == []
    assert holds(verify(json.dumps(statement.to_dict(), sort_keys=True)))
    assert Statement.from_json(statement.to_json()).to_json() == statement.to_json()


def changed(statement: Statement, places: dict[str, Any]) -> dict[str, Any]:
    content = json.loads(statement.to_json())
    for place, value in places.items():
        *way, last = place.split(".")
        at = content
        for name in way:
            at = at[name]
        at[last] = value
    return content  # type: ignore[no-any-return]


def forged(statement: Statement, event: Event | None = None, planned: Event | None = None, **places: Any) -> Any:
    """Change some places ("sampler.unit"), state other events if given, and renew all that follows from either."""
    content = changed(statement, places)
    if event is not None:
        content |= guarantee(event, planned or event, content["delta"])
    read = Statement.unchecked(content)
    renewed = {"settings_hash": read.settings_hash, "statement_hash": read.statement_hash}
    return {**content, **renewed, "delta_is_below_1/n": read.delta_is_small}


def failed(content: Any) -> list[str]:
    return [finding.words for finding in verify(content) if finding.status == "failed"]


def whole(statement: Statement) -> Event:
    return Event.from_dict(statement.event_planned)


def said_mine(statement: Statement) -> list[str]:
    words = "The sampler me.Mine is the caller's: that its batches are what its event says is taken on trust."
    return [*statement.caveats, words]


LESS = Gaussian(1.2, 0)  # what no step released
UNKNOWN = {"method.update.kind": "Mine", "method.clip.kind": "Mine", "clip.kind": "Mine"}


@pytest.mark.parametrize("names", [("method.update.kind",), ("method.clip.kind", "clip.kind")])
def test_a_stage_of_an_unknown_name_does_not_set_the_event_free(names: tuple[str, ...]) -> None:
    changes = {name: UNKNOWN[name] for name in names}
    if len(names) > 1:
        assert any("kind is stated as 'Clip'" in w for w in failed(forged(plain(), **{names[0]: "Mine"})))
    assert holds(verify(forged(plain(), **changes)))
    assert any("event is stated as" in words for words in failed(forged(plain(), LESS, **changes)))


def test_a_sampler_of_an_unknown_name_says_whose_it_is() -> None:
    words = failed(forged(plain(), **{"sampler.sampler": "mine"}))
    assert words == ["mine is none of the library's, and no sentence says whose it is"]
    renamed = {"sampler.sampler": "mine", "caveats": said_mine(plain())}
    findings = verify(forged(plain(), **renamed))
    assert holds(findings)
    assert {"sampler", "event", "event planned"} <= {f.check for f in findings if f.status == "trusted"}
    half = PoissonSampledGaussian(POISSON.sample_rate / 2, 1.2, 11)
    assert any("another sample_rate" in words for words in failed(forged(plain(), half, **renamed)))


@pytest.mark.parametrize("event", [Composed(()), SelfComposed(PoissonSampledGaussian(0.01, 9.0, 11), 0)])
def test_an_event_of_nothing_is_not_that_of_steps_taken(event: Event) -> None:
    renamed = {"sampler.sampler": "mine", "caveats": said_mine(plain()), "adjacency": "none"}
    assert any(
        "releases nothing, and 11 steps" in words for words in failed(forged(plain(), event, whole(plain()), **renamed))
    )


def test_parts_are_compared_however_deep_they_are() -> None:
    renamed = {"sampler.sampler": "mine", "caveats": said_mine(plain())}
    rate = POISSON.sample_rate
    deep = Composed((Composed((SelfComposed(PoissonSampledGaussian(rate, 2.4, 11), 1),)),))
    assert any("another noise multiplier" in words for words in failed(forged(plain(), deep, **renamed)))
    twice = SelfComposed(PoissonSampledGaussian(rate, 1.2, 11), 2)
    assert any(
        "has 22 steps, and 11" in words for words in failed(forged(plain(), twice, SelfComposed(twice, 2), **renamed))
    )
    # Twice as many steps as were taken are those planned, which a statement may count after a stop by results.
    assert holds(verify(forged(plain(), twice, twice, **renamed)))
    assert any("has 11 steps, and 22" in words for words in failed(forged(plain(), twice.repeated, **renamed)))


def test_abandoned_steps_of_an_own_sampler_are_counted_whole_or_not_at_all() -> None:
    statement = plain(Coins(**SIZES), abandoned=3)
    for steps in (10, 12, 13, 15):
        event = PoissonSampledGaussian(POISSON.sample_rate, 1.2, steps)
        assert any(
            f"has {steps} steps, and 11" in words for words in failed(forged(statement, event, whole(statement)))
        )


def test_how_many_examples_an_own_sampler_draws_is_said_to_be_on_trust() -> None:
    statement = moments(Ordered(**SIZES))
    assert "that no batch has more than 10 examples" in [finding.words for finding in verify(statement)]
    name = "standard_deviation_on_square"
    less = {f"noise.{name}": 0.99 * statement.noise[name]}
    assert any(name in words for words in failed(forged(statement, **less)))


def test_a_list_of_batches_counts_every_cycle_and_is_not_sampled() -> None:
    statement = plain(FixedBatches([[0, 1], [2, 3]]))
    few = Gaussian(1.2, 1, "zero-out")  # type: ignore[arg-type]
    assert any(
        "counts an example once in 11 steps" in words for words in failed(forged(statement, few, whole(statement)))
    )
    sampled = PoissonSampledGaussian(0.01, 1.2, 11)
    assert any("is sampled, Poisson" in words for words in failed(forged(statement, sampled)))
    left = plain(FixedBatches([[0, 1], [2, 3]]), abandoned=3)
    mixed = Composed((Gaussian(1.2, 6, "zero-out"), Gaussian(1.2, 3)))  # type: ignore[arg-type]
    assert any("is of another adjacency" in words for words in failed(forged(left, mixed)))
    for place, value in {"sampler.secret": True, "sampler.batches_sha256": "x", "sampler.audited": "yes"}.items():
        assert failed(forged(statement, **{place: value})), place


def test_how_far_an_unknown_matrix_moves_an_example_is_bounded() -> None:
    statement = correlated(DENSE)
    name = statement.event["strategy"]
    whole = statement.event_planned["sensitivity"]

    def moved(taken: float, all_steps: float) -> tuple[Event, Event]:
        return tuple(  # type: ignore[return-value]
            MatrixGaussian(1.2, norm, steps, name, "zero-out")  # type: ignore[arg-type]
            for norm, steps in ((taken, 11), (all_steps, 22))
        )

    assert holds(verify(forged(statement, *moved(1.0, whole))))
    assert any("sensitivity_of_run is stated" in words for words in failed(forged(statement, *moved(1.0, 1.5))))
    told = {"noise.sensitivity_of_run": 0.1}
    assert any("the largest has norm 1" in w for w in failed(forged(statement, *moved(0.1, 0.1), **told)))
    assert any("exceeds that of the whole run" in w for w in failed(forged(statement, *moved(9.0, whole))))
    listed = correlated(DENSE, FixedBatches([[0, 1], [2, 3]]))
    assert any("of the whole run is" in words for words in failed(forged(listed, *moved(1.0, 1.5))))


@pytest.mark.parametrize("place", [
    "randomness.audited", "method.audited", "method.noise.audited", "noise.audited", "clip.audited", "sampler.audited",
])  # fmt: skip
def test_nothing_is_said_where_nobody_looks(place: str) -> None:
    assert failed(forged(plain(), **{place: "by all authorities"}))


@pytest.mark.parametrize(
    ("place", "value"),
    [("randomness.forks", None), ("randomness.forks", -1), ("method.batch_size", None), ("method.update", {"kind": 1})],
)
def test_values_of_no_meaning_fail_or_are_not_vouched_for(place: str, value: Any) -> None:
    findings = verify(forged(plain(), **{place: value}))
    assert not holds(findings) or any(f.check == "update" and f.status == "trusted" for f in findings)


def test_a_clip_without_groups_bounds_nothing() -> None:
    statement = run_of(methods.dp_sgd(clipping_groups="per_tensor", **COMMON), POISSON)
    nothing = {"clip.group_norms": {}, "clip.sensitivity": 0.0, "noise.standard_deviation_on_sum": 0.0}
    assert any("has no group" in words for words in failed(forged(statement, **nothing)))


@pytest.mark.parametrize(
    ("place", "value"),
    [("max_scaled_norm", -3.0), ("unscaled_steps", 22), ("scaled_steps", 0), ("scale_eps", 0.0), ("audited", "yes")],
)
def test_a_scale_that_cannot_be_is_no_scale(place: str, value: Any) -> None:
    method = methods.dp_adam(variant="scale_then_privatize", max_scaled_norm=3.0, **COMMON)
    statement = run_of(method, POISSON)
    assert holds(verify(statement))
    assert any("no such run is possible" in w for w in failed(forged(statement, **{f"method.query.{place}": value})))


def test_an_adaptive_clip_is_not_renamed_away() -> None:
    """Without its bits the noise would be less: the sum would not be paid for."""
    statement = run_of(methods.dp_sgd(adaptive_clip=AdaptiveClip(bit_noise_std=2.0), **COMMON), POISSON)
    content = json.loads(statement.to_json())
    for name in ("multiplier_on_sum", "standard_deviation_on_bits", "in_force"):
        del content["noise"][name]
    for name in ("least_norm", "greatest_norm", "in_force"):
        del content["clip"][name]
    content["noise"]["standard_deviation_on_sum"] = 1.2
    content["clip"]["adaptive"]["kind"] = content["method"]["clip"]["adaptive"]["kind"] = "Mine"
    assert any("of an unknown kind, 'Mine'" in words for words in failed(forged(Statement.unchecked(content))))


@pytest.mark.parametrize(
    ("place", "value"),
    [("sampler.examples", 9), ("sampler.examples", "many"), ("sampler.max_examples_per_user", 0),
     ("sampler.users_sha256", "x")],
)  # fmt: skip
def test_users_that_cannot_be(place: str, value: Any) -> None:
    statement = plain(UserSampler(PoissonSampler(dataset_size=10, batch_size=5), [i % 10 for i in range(30)], 2))
    assert holds(verify(statement))
    assert failed(forged(statement, **{place: value}))


@pytest.mark.parametrize("name", NAMES)
def test_whoever_amplifies_says_that_batches_are_secret(name: str) -> None:
    one = sampler(name, **SIZES, **({"groups": 2} if name == "cyclic-poisson" else {}))
    plan = Plan(SGD_METHOD, one, 2)
    amplified = bool(demand_phases(plan.event).steps)
    assert (SECRET_BATCHES in assumptions(plan, Provenance(), 0, {}, on_grid=False)) == amplified


def test_random_allocation_keeps_its_batches_secret() -> None:
    statement = run_of(SGD_METHOD, RandomAllocationSampler(dataset_size=110, batch_size=55), 2, 2)
    caveats = [sentence for sentence in statement.caveats if sentence != SECRET_BATCHES]
    assert failed(forged(statement, caveats=caveats)) == [f"lacks: {SECRET_BATCHES}"]


def test_abandoned_steps_have_draws_too() -> None:
    statement = plain(abandoned=66, dimension=50)
    assert statement.noise["grid"]["law_distance"] == distance(50 * (22 + 66))
    assert [finding for finding in verify(statement) if finding.status in ("failed", "remark")] == []
    for draws in (50 * 22, 50 * 87):
        assert failed(forged(statement, **{"noise.grid.law_distance": distance(draws)}))
    assert "50: how many numbers a release has" in [f.words for f in verify(statement) if f.status == "trusted"]


def test_examples_of_a_list_are_no_users() -> None:
    statement = plain(FixedBatches([[0, 1], [2, 3]]))
    users = plain(UserSampler(FixedBatches([[0, 1], [2, 3]]), [0, 1, 2, 3], 1))
    found = failed(forged(statement, caveats=users.caveats, unit="user", **{"sampler.unit": "user"}))
    assert found == ["unit 'user': no digest says whose examples are whose"]


@pytest.mark.parametrize("ledger", [{}, {"ledger": "x", "run": "y"}])
def test_abandoned_steps_need_a_fork_or_a_ledger_that_knows_of_one(ledger: dict[str, str]) -> None:
    """Without a fork the sentence on steps that other processes took is not needed."""
    statement = state(Plan(methods.dp_sgd(**COMMON), POISSON, 22), 1e-5, steps_taken=20, abandoned=4,
        keys=Provenance(forks=1), backend="numpy", ledger=ledger)  # fmt: skip
    assert holds(verify(statement))
    caveats = [sentence for sentence in statement.caveats if "was resumed" not in sentence]
    never = ["forks: 0, and 4 steps of branches that it left are counted"]
    assert failed(forged(statement, caveats=caveats, **{"randomness.forks": 0})) == ([] if ledger else never)


def test_sentences_of_the_writers_own_are_taken_on_trust() -> None:
    findings = verify(plain(caveats=("Mine.", "Mine too.")))
    assert holds(findings)
    assert ("trusted", "2 further sentences, which no setting requires") in {(f.status, f.words) for f in findings}
    assert not any("further sentence" in finding.words for finding in verify(plain()))


@pytest.mark.parametrize(("old", "new", "words"), [
    ('"unit": "example"', '"unit": "user", "unit": "example"', "'unit' is twice"),
    ('"delta": 1e-05', '"delta": NaN', "NaN is no number"),
    ('"max_grad_norm": 1.0', '"max_grad_norm": 1e400', "1e400 is no number"),
    ('"max_grad_norm": 1.0', '"max_grad_norm": Infinity', "Infinity is no number"),
])  # fmt: skip
def test_json_that_readers_understand_differently_is_refused(old: str, new: str, words: str) -> None:
    text = plain().to_json()
    assert old in text
    damaged = text.replace(old, new, 1)
    (finding,) = verify(damaged)
    assert finding.status == "failed"
    assert words in finding.words
    refused(DataError, words, Statement.from_json, damaged)


@pytest.mark.parametrize("rows", [10**6, 10**9, 10**12, 10**400])
@pytest.mark.parametrize("name", ["tree", "tree-optimal", "square-root", "identity"])
@pytest.mark.parametrize("sampler", [ORDER, ShuffledSampler(**SIZES)])
def test_a_strategy_of_too_many_rows_is_not_computed(rows: int, name: str, sampler: Any) -> None:
    many: dict[str, Any] = {"steps_planned": rows, "steps_taken": rows}
    if name != "identity":
        many |= {"noise.strategy.steps": rows, "method.noise.strategy.steps": rows}
    if name == "identity" and sampler is not ORDER and rows == 10**6:
        return  # a list of a million orders is short work
    content = forged(correlated(name, sampler), **many)
    (words,) = failed(content)
    assert words.startswith("cannot be checked: the strategy of")


def test_random_allocation_of_a_strategy_takes_as_long_as_shuffled_epochs() -> None:
    many: dict[str, Any] = {"steps_planned": 20_000, "steps_taken": 20_000}
    for chosen, checked in ((BandedToeplitz((1.0, 0.5)), True), (BLT((-0.1,), (0.9,), 22), False)):
        if not checked:
            many |= {"noise.strategy.steps": 20_000, "method.noise.strategy.steps": 20_000}
        content = forged(correlated(chosen, RandomAllocationSampler(**SIZES)), **many)
        assert any("cannot be checked: the strategy of" in words for words in failed(content)) != checked


def test_branches_and_parts_beyond_counting_are_not_counted() -> None:
    content = forged(correlated("tree"), steps_abandoned=10**9)
    assert failed(content) == ["cannot be checked: 1,000,000,000 abandoned branches, at most 50,000 are checked"]
    content["steps_abandoned"], part = 0, LESS.to_dict()
    content["event"] = {"event": "Composed", "events": [part] * 60_000}
    assert any("60,001 parts" in words for words in failed(content))
    steps = [PoissonSampledGaussian(0.01 + i / 1000, 1.2, 11).to_dict() for i in range(20)]
    content["event"] = {"event": "Composed", "events": steps}
    assert any("20 different sampled steps" in words for words in failed(content))


@pytest.mark.parametrize(("place", "value"), [
    ("sampler.dataset_size", 10**400), ("steps_taken", 0), ("event.noise_multiplier", 1e300),
    ("event.noise_multiplier", 1e-300), ("event.count", 10**30), ("delta", 1e-300), ("noise.noise_multiplier", 1e308),
    ("clip.sensitivity", 10**400), ("steps_planned", 10**400),
])  # fmt: skip
def test_numbers_that_no_run_has_end_in_findings(place: str, value: Any) -> None:
    for statement in (plain(), plain(ORDER), correlated(DENSE)):
        assert failed(changed(statement, {place: value}))


@pytest.mark.parametrize("depth", [100, 300, 320, 480, 500, 900, 990])
def test_nesting_ends_in_a_finding(depth: int) -> None:
    content = copy.deepcopy(plain().to_dict())
    for _ in range(depth):
        content["ledger"] = {"ledger": content["ledger"]}
    assert failed(content)


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    evil = "\x1b[2J\x1b[1;1HAll is well.\u202e\ud800"
    assert visible(evil + "\n") == "\\x1b[2J\\x1b[1;1HAll is well.\\u202e\\ud800\\n"
    statement = replace(plain(), note=evil, ledger={f"a\nb{evil}": evil}, caveats=(*plain().caveats, evil))
    text = statement.text()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "a\\nb" in text
    assert "Note: \\x1b[2J" in text


def test_text_never_rounds_delta_or_what_a_ledger_spent_down() -> None:
    ledger = {"ledger": "l", "run": "r", "total": {"epsilon": 2.00000001, "delta": 1e-5}}
    statement = replace(plain(), delta=1.00000001e-5, ledger=ledger)
    text = " ".join(statement.text().split())
    assert "delta = 1.00001e-5" in text
    assert "epsilon 2.001" in text


def test_words_and_status_for_each_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("typer")
    from dpcore.cli import main

    def outcome(content: Any) -> tuple[int, str]:
        path = tmp_path / "statement.json"
        path.write_text(json.dumps(content))
        status = main(["verify", str(path)])
        return status, " ".join(capsys.readouterr().out.split())

    def times(factor: float) -> Any:
        content = plain().to_dict()
        content["epsilon"]["rdp"] *= factor
        return forged(Statement.unchecked(content))

    status, words = outcome(plain().to_dict())
    assert (status, "The statement follows from its settings" in words) == (0, True)
    status, words = outcome(plain(MySampler(**SIZES)).to_dict())
    assert (status, "its epsilon rests on an event taken on trust" in words) == (0, True)
    for factor, expected in ((0.9, "too little"), (1.1, "more than follows")):
        status, words = outcome(times(factor))
        assert status == 1
        assert expected in words
        assert "DOES NOT HOLD" in words
    status, words = outcome(forged(correlated("tree"), steps_abandoned=10**9))
    assert (status, "cannot be checked" in words) == (1, True)
    evil = forged(plain(), **{"sampler.sampler": "\x1b[2J"})
    status, words = outcome(evil)
    assert (status, "\x1b[2J" in words) == (1, False)
