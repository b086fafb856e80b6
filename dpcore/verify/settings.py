"""Checks of a statement's settings: each derived quantity from those that it follows from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dpcore import scales
from dpcore.assumptions import SECRET_BATCHES, assumptions
from dpcore.keys import CALLER, EXACT, OPERATING_SYSTEM
from dpcore.plan import Plan
from dpcore.report.canonical import digest
from dpcore.report.statement import Statement
from dpcore.stating import NO_KEY, adaptive_noise, adaptive_norms
from dpcore.verify.finding import FAILED, OK, REMARK, TRUSTED, Finding, difference
from dpcore.verify.rederive import USERS, adaptive_of, sampler_of, strategy_of, update_of


def check_sampler(statement: Statement) -> Iterator[Finding]:
    """The sampler's derived settings, and its unit and adjacency."""
    made, said = sampler_of(statement.sampler), dict(statement.sampler)
    kind = said.get("sampler", "no name")
    if said.get("unit", "example") != statement.unit:
        yield Finding(
            "unit", FAILED, f"is {statement.unit!r}, and the sampler draws by {said.get('unit', 'example')!r}"
        )
    else:
        yield Finding("unit", OK, f"one {statement.unit}")
    if said.pop("adjacency", "none") != statement.adjacency and statement.adjacency != "none":
        yield Finding("sampler", FAILED, "has another adjacency than the statement")
    if made is None:
        yield Finding("sampler", TRUSTED, f"{kind}: the description does not hold all that it does")
        return
    derived = made.describe()
    derived.pop("adjacency")
    of_users = {name: said.pop(name) for name in USERS if name in said and statement.unit == "user"}
    if of_users:
        words = f"{of_users['examples']} examples of {statement.dataset_size} users: only a digest of whose is whose"
        yield Finding("users", TRUSTED, words)
    yield _finding("sampler", difference(said, derived), f"{kind}, n = {statement.dataset_size}")


def check_clip(statement: Statement) -> Iterator[Finding]:
    """The norm of every group, and the sensitivities that follow."""
    clip, method = statement.clip, statement.method
    described = dict(method["clip"])
    if not isinstance(described["groups"], str):
        described.pop("max_grad_norm")
    norms: dict[str, float] = clip["group_norms"]
    query = method["query"]
    scaled_norm = query.get("max_scaled_norm") or described.get("max_grad_norm")
    at_once = query["kind"] == "Preconditioned" and query["unscaled_steps"] == 0
    derived = {**described, "group_norms": _norms(described, norms, scaled_norm if at_once else None)}
    derived["sensitivity"] = _sensitivity(described["rule"], derived["group_norms"])
    if adaptive_of(described) is not None:
        derived |= adaptive_norms(described["max_grad_norm"])
    if query["kind"] == "Preconditioned":
        update = update_of(method["update"])
        scaled = _sensitivity(described["rule"], _norms(described, norms, scaled_norm))
        derived["max_scaled_norm"] = scaled_norm if scaled_norm is not None else clip.get("max_scaled_norm")
        derived["scaled_sensitivity"] = scaled
        if update is not None:
            sigma = statement.noise["noise_multiplier"]
            derived["standard_deviation_on_scaled_sum"] = scales.gradient_noise(update, sigma, scaled)
    words = (
        f"{described['rule']}, {len(norms)} group(s), one example moves the sum by at most {clip['sensitivity']:.6g}"
    )
    yield _finding("clip", difference(clip, derived), words)


def _norms(described: Mapping[str, Any], norms: Mapping[str, float], scaled: float | None) -> dict[str, float]:
    """C / sqrt(L) for each of L groups, or the norms that a mapping gives."""
    if not isinstance(described["groups"], str):
        return dict(described["groups"])
    whole = described["max_grad_norm"] if scaled is None else scaled
    names = list(norms) if described["groups"] != "flat" else ["all"]
    return dict.fromkeys(names, whole / math.sqrt(max(len(names), 1)))


def _sensitivity(rule: str, norms: Mapping[str, float]) -> float:
    return math.sqrt(len(norms)) if rule == "normalized" else math.sqrt(math.fsum(norm**2 for norm in norms.values()))


def check_noise(statement: Statement, plan: Plan | None) -> Iterator[Finding]:
    """Standard deviation = multiplier x sensitivity; the strategy's digest and sensitivity."""
    noise, method = statement.noise, statement.method
    sigma, contribution = noise["noise_multiplier"], statement.clip["sensitivity"]
    derived: dict[str, Any] = {**method["noise"], "mechanism": "Gaussian"}
    strategy, update = method["noise"].get("strategy"), update_of(method["update"])
    if update is None:
        yield Finding("noise", TRUSTED, "the update is of an unknown kind, and may release more than one vector")
        return
    name = "standard_deviation_on_sum" if strategy is None else "seed_standard_deviation_on_sum"
    multiplier, adaptive = sigma, adaptive_of(method["clip"])
    if adaptive is not None:
        derived |= adaptive_noise(adaptive, sigma, method["batch_size"])
        multiplier = derived["multiplier_on_sum"]
    derived[name] = scales.gradient_noise(update, multiplier, contribution)
    if update.second_moment in ("independent", "joint") and sigma > 0:
        most = statement.sampler["expected_batch_size"] if plan is None else plan.sampler.max_batch_size
        square = scales.square_noise(update, sigma, contribution, method["batch_size"], most)
        derived["standard_deviation_on_square"] = square
        if update.second_moment == "joint":
            derived["joint_scale"] = scales.joint_scale(update, contribution)
            derived["sensitivity_under_replacement"] = 2 * contribution
        else:
            derived["sensitivity_of_square"] = square / (math.sqrt(2) * sigma)
    if strategy is not None:
        derived["strategy_sha256"] = digest(strategy)
        whole = None if plan is None else getattr(plan.event, "sensitivity", None)
        derived["sensitivity_of_run"] = noise.get("sensitivity_of_run") if whole is None else whole
        if strategy_of(strategy) is None:
            yield Finding("strategy", TRUSTED, f"{strategy['kind']}: only a digest of its matrix is stated")
    stated = dict(noise)
    if "layout_sha256" in stated:
        text = str(stated.pop("layout_sha256"))
        good = len(text) == 64 and set(text) <= set("0123456789abcdef")
        words = "a digest of names and shapes of the tensors" if good else f"{text!r} is no SHA-256"
        yield Finding("layout of the noise", TRUSTED if good else FAILED, words)
    stated_scale = noise.get(name, math.nan)
    words = f"standard deviation {stated_scale:.6g} = multiplier {multiplier:.6g} x sensitivity {contribution:.6g}"
    yield _finding("noise", difference(stated, derived), words)


def check_randomness(statement: Statement) -> Iterator[Finding]:
    """Generator and origin of the keys, as far as they contradict each other."""
    said = statement.randomness
    derived = {**said, "cryptographic": said["rng"] == "chacha20" and said["key"] != NO_KEY}
    origins = (OPERATING_SYSTEM, CALLER, EXACT, NO_KEY)
    problem = difference(said, derived)
    if problem is None and said["key"] not in origins:
        problem = f"key: {said['key']!r} is no origin of keys"
    if problem is None and said["rng"] not in ("chacha20", "philox"):
        problem = f"rng: {said['rng']!r} is no generator"
    yield _finding("randomness", problem, f"{said['rng']}, key: {said['key']}, {said['forks']} fork(s)")


def check_assumptions(statement: Statement) -> Iterator[Finding]:
    """Every sentence that must be there is there."""
    said = statement.randomness
    needed = assumptions(
        unit=statement.unit,
        # A sampler of the caller's own need not say.
        secret_batches=bool(statement.sampler.get("secret", SECRET_BATCHES in statement.caveats)),
        second_moment=statement.method["update"].get("second_moment", "filtered"),
        origin="" if said["key"] == NO_KEY else said["key"],
        forks=said["forks"],
        abandoned=statement.steps_abandoned,
        ledger=statement.ledger,
    )
    missing = [sentence for sentence in needed if sentence not in statement.caveats]
    problem = f"lacks: {missing[0]}" if missing else None
    yield _finding("assumptions", problem, f"all {len(needed)} sentences that these settings need")


def check_delta(statement: Statement) -> Iterator[Finding]:
    """Delta below 1/n."""
    n = statement.dataset_size
    if n is None:
        yield Finding("delta", TRUSTED, "the number of examples is not stated")
    elif statement.delta_is_small:
        yield Finding("delta", OK, f"{statement.delta:g} is below 1/n = {1 / n:.3g}")
    else:
        words = f"{statement.delta:g} is not below 1/n = {1 / n:.3g}: it allows an example to be published outright"
        yield Finding("delta", REMARK, words)


def _finding(check: str, problem: str | None, words: str) -> Finding:
    return Finding(check, OK, words) if problem is None else Finding(check, FAILED, problem)
