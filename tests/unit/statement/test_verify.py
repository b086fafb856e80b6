"""A tampered number is found: every leaf of real statements is changed, with and without a new hash."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from dpcore import methods
from dpcore.plan.plan import Plan
from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedBatches,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
    UserSampler,
)
from dpcore.spec.keys import CALLER, Provenance
from dpcore.spec.layout import Layout
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.strategies import BandedToeplitz
from dpcore.statement import Statement
from dpcore.statement.build import of_selection, state
from dpcore.statement.statement import _DERIVED
from dpcore.statement.verify import Finding, holds, verify

TENSORS = ("a.weight", "a.bias", "b.weight")
Path = tuple[Any, ...]


def halfway(plan: Plan, **changes: Any) -> Statement:
    said = {"steps_taken": plan.steps // 2, "backend": "numpy", "note": "Stopped."}
    said["keys"] = Provenance(forks=int(bool(changes.get("abandoned"))))
    return state(plan, 1e-5, **(said | changes))


def statements() -> dict[str, Statement]:
    poisson, order = (kind(dataset_size=110, batch_size=10) for kind in (PoissonSampler, FixedOrderSampler))
    others = (
        ShuffledSampler(dataset_size=110, batch_size=10),
        CyclicPoissonSampler(dataset_size=110, batch_size=10, groups=4),
        TruncatedPoissonSampler(dataset_size=110, batch_size=10, max_batch_size=15),
        FixedSizeSampler(dataset_size=110, batch_size=10),
        UserSampler(PoissonSampler(dataset_size=10, batch_size=5), [i % 10 for i in range(30)], 2),
    )
    common: dict[str, Any] = {"lr": 0.1, "noise_multiplier": 1.2}
    adam = methods.dp_adam(clipping_groups="per_layer", **common)
    scaled = methods.dp_adam(variant="scale_then_privatize", max_scaled_norm=3.0, **common)
    by_method = {
        "moments": (methods.dp_adam(variant="independent_moments", **common), order), "scaled": (scaled, order),
        "adaptive": (methods.dp_sgd(adaptive_clip=AdaptiveClip(bit_noise_std=2.0), **common), poisson),
        "list": (methods.dp_sgd(**common), FixedBatches([[0, 1], [2, 3]])),
    }  # fmt: skip
    abandoning = {type(sampler).__name__: (methods.dp_sgd(**common), sampler) for sampler in others}
    abandoning["banded"] = methods.memf(strategy=BandedToeplitz((1.0, 0.5)), **common), others[1]
    layered, layout = Plan(adam, poisson, 22, TENSORS), Layout.of([(name, (3,)) for name in TENSORS])
    return {
        "poisson": halfway(layered, layout=layout, caveats=("Mine.",)),
        "forked": halfway(layered, keys=Provenance(CALLER, 2), abandoned=3),
        "matrix": halfway(Plan(methods.memf(strategy="tree", **common), order, 22), abandoned=1),
        "selection": of_selection(halfway(layered, steps_taken=22, note=""), (20.0, 1.0), {"ledger": "1", "run": "2"}),
        "caller": halfway(layered, caller_noise=True),
        **{name: halfway(Plan(*parts, 22)) for name, parts in by_method.items()},
        **{name: halfway(Plan(*parts, 22), abandoned=2) for name, parts in abandoning.items()},
    }


STATEMENTS = statements()


def test_a_selection_is_of_whole_runs():
    whole, law, ledger = STATEMENTS["selection"], (20.0, 1.0), {"ledger": "1", "run": "2"}
    assert holds(verify(whole))
    assert holds(verify(replace(whole, steps_taken=11)))  # a winner that stopped by results: its whole plan counts
    half = halfway(
        Plan(methods.dp_adam(lr=0.1, noise_multiplier=1.2), PoissonSampler(dataset_size=110, batch_size=10), 22)
    )
    assert not holds(verify(of_selection(replace(half, event_planned=half.event), law, ledger)))
    assert not holds(verify(replace(whole, steps_abandoned=1)))


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path


def placed(content: dict[str, Any], path: Path, new: Any) -> dict[str, Any]:
    changed = copy.deepcopy(content)
    place: Any = changed
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = new(place[path[-1]]) if callable(new) else new
    return changed


def another(old: Any) -> Any:
    """A value of the same type."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return old + 1
    if isinstance(old, float):
        return old * 0.99 if old else 0.5
    if isinstance(old, str):
        return old + "x"
    return 1 if old is None else {"x": 1} if isinstance(old, dict) else ["x"]


def mutated(content: dict[str, Any], path: Path) -> dict[str, Any]:
    return placed(content, path, another)


def rehashed(content: dict[str, Any]) -> dict[str, Any]:
    """The work of somebody who knows how the hash is made."""
    read = Statement.unchecked(content)
    hashes = {"settings_hash": read.settings_hash, "statement_hash": read.statement_hash}
    return {**content, **hashes, "delta_is_below_1/n": read.delta_is_small}


# 110 examples in batches of 10 and 11 of 22 steps: one more or less matters, cutting off a rest does not.
FREE = {("rows_abandoned",), ("noise", "layout_sha256"), ("sampler", "shuffle"), ("sampler", "drop_last")}


def free(path: Path, content: dict[str, Any]) -> bool:
    """`dpcore.statement.verify.FREE_TEXT`."""
    if path[0] in ("note", "date", "software", "ledger") or path[-1] in _DERIVED:
        return True
    if path[0] == "caveats" and content["caveats"][path[1]] == "Mine.":
        return True
    update = path[:2] == ("method", "update") and path[2] not in ("kind", "second_moment")
    stage = path[0] == "method" and path[1] in ("name", "filter", "schedule", "averaging", "galore", "radius")
    scaled = content["method"]["query"]["kind"] == "Preconditioned"
    held = ("kind", "max_scaled_norm", "unscaled_steps") if scaled else ()
    query = path[:2] == ("method", "query") and path[2] not in held
    return update or stage or query or path in FREE


def test_a_law_distance_that_is_not_small_is_a_remark() -> None:
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=0.5), FixedOrderSampler(dataset_size=110, batch_size=10), 110)
    found = [one for one in verify(halfway(plan, dimension=10**8)) if one.status == "remark" and one.check == "delta"]
    assert [one.words[:9] for one in found] == ["on floats"]
    assert holds(found)


@pytest.mark.parametrize("name", STATEMENTS)
def test_an_honest_statement_holds(name: str) -> None:
    findings = verify(STATEMENTS[name].to_json())
    assert [finding for finding in findings if finding.status == "failed"] == []
    assert holds(findings)
    assert findings == verify(STATEMENTS[name]) == verify(STATEMENTS[name].to_dict())


@pytest.mark.parametrize("name", ["poisson", "matrix", "list"])
def test_every_changed_leaf_is_found(name: str) -> None:
    content = json.loads(STATEMENTS[name].to_json())
    assert [path for path in leaves(content) if holds(verify(mutated(content, path)))] == []


def trusted(findings: list[Finding]) -> set[str]:
    return {finding.check for finding in findings if finding.status == "trusted"}


@pytest.mark.parametrize("name", ["forked", "matrix", "moments", "scaled", "TruncatedPoissonSampler"])
def test_new_hashes_do_not_hide_what_epsilon_rests_on(name: str) -> None:
    content = json.loads(STATEMENTS[name].to_json())
    before = trusted(verify(content))
    unnoticed = set()
    for path in leaves(content):
        try:
            findings = verify(rehashed(mutated(content, path)))
        except OSError:  # refused on reading: found
            continue
        if holds(findings) and trusted(findings) <= before:
            unnoticed.add(path)
    assert {path for path in unnoticed if not free(path, content)} == set()


def failed(content: dict[str, Any]) -> list[Finding]:
    return [finding for finding in verify(content) if finding.status == "failed"]


def test_findings_say_what_is_wrong() -> None:
    content = STATEMENTS["poisson"].to_dict()
    content["epsilon"]["rdp"] /= 2
    (finding,) = failed(rehashed(content))
    assert finding.check == "epsilon (rdp)"
    assert finding.words.endswith("too little")
    content = STATEMENTS["poisson"].to_dict()
    content["epsilon"] = {"pld2": 0.1}
    assert any("cannot be recomputed" in finding.words for finding in failed(content))
    content = STATEMENTS["poisson"].to_dict()
    content["noise"]["standard_deviation_on_sum"] = 0.1
    assert any(f.words.startswith("standard_deviation_on_sum is stated as 0.1") for f in failed(rehashed(content)))


def test_more_than_follows_is_a_remark_across_versions() -> None:
    content = STATEMENTS["poisson"].to_dict()
    content["epsilon"]["rdp"] *= 1.5
    assert not holds(verify(rehashed(content)))
    content["software"]["dpcore"] = "0.0.1"
    assert holds(verify(rehashed(content)))
    content["epsilon"]["rdp"] /= 2
    assert not holds(verify(rehashed(content)))


def test_a_large_delta_is_remarked() -> None:
    plan = Plan(methods.dp_sgd(lr=1, noise_multiplier=1), PoissonSampler(dataset_size=100, batch_size=10), 5)
    findings = verify(state(plan, 0.01, steps_taken=5, keys=Provenance(), backend="numpy"))
    assert holds(findings)
    (finding,) = [finding for finding in findings if finding.check == "delta"]
    assert finding.status == "remark"
    assert "1/n = 0.01" in finding.words


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", "1", '"statement"', '{"format": 3}', '{"format": true}', '{"format": 99}', "[" * 100_000],
)
def test_nonsense_is_a_finding(text: str) -> None:
    (finding,) = verify(text)
    assert finding.status == "failed"
    assert finding.check == "form"


@pytest.mark.parametrize("value", [None, "x", -1, 1e400, [], {}, True, {"kind": "tree", "steps": 10**15}])
def test_no_content_ends_in_a_traceback(value: Any) -> None:
    content = json.loads(STATEMENTS["matrix"].to_json())
    for path in leaves(content):
        assert all(math.isfinite(len(finding.words)) for finding in verify(placed(content, path, value)))
    content["noise"]["strategy"] = content["method"]["noise"]["strategy"] = value
    assert not holds(verify(content))
