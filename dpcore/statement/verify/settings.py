"""Checks of a statement's settings: each derived quantity from those that it follows from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dpcore.plan import scales
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches
from dpcore.sampling.base import largest_batch
from dpcore.spec.canonical import digest
from dpcore.spec.keys import CALLER, EXACT, OPERATING_SYSTEM
from dpcore.stages.clipping import Sensitivity
from dpcore.stages.method import Method
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.stages.updates import SGD, Update
from dpcore.statement.assumptions import OWN_SAMPLER, SECRET_BATCHES, assumptions
from dpcore.statement.build import NO_KEY, adaptive_noise, adaptive_norms
from dpcore.statement.statement import Statement
from dpcore.statement.text import format_epsilon
from dpcore.statement.verify.finding import FAILED, OK, REMARK, TRUSTED, Finding, difference
from dpcore.statement.verify.parts import LISTED
from dpcore.statement.verify.rederive import USERS, adaptive_of, clip_of, sampler_of, stand_in, strategy_of, update_of


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
        begin, end = OWN_SAMPLER
        said_so = any(words.startswith(begin) and words.endswith(end) for words in statement.caveats)
        if kind == LISTED:
            yield from _listed(said)
        elif not said_so:
            yield Finding("sampler", FAILED, f"{kind} is none of the library's, and no sentence says whose it is")
        return
    derived = made.describe()
    derived.pop("adjacency")
    of_users: dict[str, Any] = {name: said.pop(name) for name in USERS if name in said and statement.unit == "user"}
    if of_users:
        yield _users(of_users, made.dataset_size)
    yield _finding("sampler", difference(said, derived), f"{kind}, n = {statement.dataset_size}")


def _listed(said: Mapping[str, Any]) -> Iterator[Finding]:
    """What a list of batches says beside its digest."""
    derived = FixedBatches([[0]]).describe()
    derived |= {name: said[name] for name in ("dataset_size", "expected_batch_size", "steps_per_epoch", *USERS)
                if name in said}  # fmt: skip
    derived["batches_sha256"] = said["batches_sha256"]
    del derived["adjacency"]
    problem = difference(said, derived)
    if problem is None and not _is_digest(said["batches_sha256"]):
        problem = f"{said['batches_sha256']!r} is no SHA-256"
    if problem is not None:
        yield Finding("sampler", FAILED, problem)


def _users(said: Mapping[str, Any], users: int) -> Finding:
    examples, most = said["examples"], said["max_examples_per_user"]
    if not (isinstance(examples, int) and examples >= users and isinstance(most, int) and most >= 1):
        return Finding("users", FAILED, f"{examples!r} examples, at most {most!r} of each of {users} users: impossible")
    if not _is_digest(said["users_sha256"]):
        return Finding("users", FAILED, f"{said['users_sha256']!r} is no SHA-256")
    words = f"{examples} examples of {users} users: only a digest of whose is whose"
    return Finding("users", TRUSTED, words)


def check_method(statement: Statement) -> Iterator[Finding]:
    """The stages of a method, all of them and no more."""
    expected, stated = set(Method(update=SGD(lr=1.0)).describe()), set(statement.method)
    if expected == stated:
        yield Finding("method", OK, "all its stages are stated")
        return
    extra = sorted(stated - expected)
    words = f"has {extra[0]!r}, which no method has" if extra else f"lacks {sorted(expected - stated)[0]!r}"
    yield Finding("method", FAILED, words)


def check_clip(statement: Statement) -> Iterator[Finding]:
    """The norm of every group, and the sensitivities that follow."""
    clip, method = statement.clip, statement.method
    described = dict(method["clip"])
    if clip_of(described) is None:
        words = f"{described.get('kind')}: of an unknown kind; that an example moves the sum by at most "
        yield Finding("clip", TRUSTED, f"{words}{clip['sensitivity']:.6g} is the caller's word")
        common = [name for name in described if name in clip]
        problem = difference({name: clip[name] for name in common}, {name: described[name] for name in common})
        if problem is not None:
            yield Finding("clip", FAILED, problem)
        return
    if not isinstance(described["groups"], str):
        described.pop("max_grad_norm")
    norms: dict[str, float] = clip["group_norms"]
    query = method["query"]
    scaled_norm = query.get("max_scaled_norm") or described.get("max_grad_norm")
    at_once = query["kind"] == "Preconditioned" and query["unscaled_steps"] == 0
    derived = {**described, "group_norms": _norms(described, norms, scaled_norm if at_once else None)}
    terms = _terms(statement)
    derived["sensitivity"] = _sensitivity(described["rule"], derived["group_norms"], terms)
    if adaptive_of(described) is not None:
        derived |= adaptive_norms(described["max_grad_norm"])
    if query["kind"] == "Preconditioned":
        update = update_of(method["update"]) or stand_in(method["update"])
        scaled = _sensitivity(described["rule"], _norms(described, norms, scaled_norm), terms)
        derived["max_scaled_norm"] = scaled_norm if scaled_norm is not None else clip.get("max_scaled_norm")
        derived["scaled_sensitivity"] = scaled
        sigma = statement.noise["noise_multiplier"]
        derived["standard_deviation_on_scaled_sum"] = scales.gradient_noise(update, sigma, scaled)
    if not norms:
        yield Finding("clip", FAILED, "has no group, and whatever is trained is in one")
    most = format_epsilon(float(clip["sensitivity"]), 6)
    words = f"{described['rule']}, {len(norms)} group(s), one {statement.unit} moves the sum by at most {most}"
    yield _finding("clip", difference(clip, derived), words)


def _norms(described: Mapping[str, Any], norms: Mapping[str, float], scaled: float | None) -> dict[str, float]:
    """C / sqrt(L) for each of L groups, or the norms that a mapping gives."""
    if not isinstance(described["groups"], str):
        return dict(described["groups"])
    whole = described["max_grad_norm"] if scaled is None else scaled
    names = list(norms) if described["groups"] != "flat" else ["all"]
    return dict.fromkeys(names, whole / math.sqrt(max(len(names), 1)))


def _sensitivity(rule: str, norms: Mapping[str, float], terms: int) -> float:
    squares = float(len(norms)) if rule == "normalized" else math.fsum(norm**2 for norm in norms.values())
    return Sensitivity(math.sqrt(squares)).of_sums(terms).contribution


def _terms(statement: Statement) -> int:
    """The most vectors that a step can sum."""
    made = sampler_of(statement.sampler)
    if made is not None:
        return largest_batch(made)
    return int(statement.sampler.get("max_batch_size") or statement.dataset_size or 0)


def check_noise(statement: Statement, plan: Plan | None) -> Iterator[Finding]:
    """Standard deviation = multiplier x sensitivity; the strategy's digest and sensitivity."""
    noise, method = statement.noise, statement.method
    sigma, contribution = noise["noise_multiplier"], statement.clip["sensitivity"]
    derived: dict[str, Any] = {**method["noise"], "mechanism": "Gaussian"}
    strategy, update = method["noise"].get("strategy"), update_of(method["update"])
    yield from _stage(method["noise"], strategy, sigma)
    if update is None:
        words = f"{method['update'].get('kind')}: of an unknown kind; that it releases nothing unstated is its word"
        yield Finding("update", TRUSTED, words)
        update = stand_in(method["update"])
    name = "standard_deviation_on_sum" if strategy is None else "seed_standard_deviation_on_sum"
    multiplier, adaptive = sigma, adaptive_of(method["clip"])
    if adaptive is not None:
        derived |= adaptive_noise(adaptive, sigma, method["batch_size"])
        multiplier = derived["multiplier_on_sum"]
    derived[name] = scales.gradient_noise(update, multiplier, contribution)
    if update.second_moment in ("independent", "joint") and sigma > 0:
        most = _largest_batch(statement, update) if plan is None else plan.sampler.max_batch_size
        if plan is None and most is not None:
            yield Finding("noise", TRUSTED, f"that no batch has more than {most:,} examples")
        square = scales.square_noise(update, sigma, contribution, method["batch_size"], most)
        derived["standard_deviation_on_square"] = square
        if update.second_moment == "joint":
            derived["joint_scale"] = scales.joint_scale(update, contribution)
            derived["sensitivity_under_replacement"] = 2 * contribution
        else:
            derived["sensitivity_of_square"] = square / (math.sqrt(2) * sigma)
    if strategy is not None:
        derived["strategy_sha256"] = digest(strategy)
        whole = noise.get("sensitivity_of_run") if plan is None else getattr(plan.event, "sensitivity", None)
        if whole is not None:
            derived["sensitivity_of_run"] = whole
        if strategy_of(strategy) is None:
            yield Finding("strategy", TRUSTED, f"{strategy['kind']}: only a digest of its matrix is stated")
    stated = dict(noise)
    if "layout_sha256" in stated:
        text = str(stated.pop("layout_sha256"))
        good = _is_digest(text)
        words = "a digest of names and shapes of the tensors" if good else f"{text!r} is no SHA-256"
        yield Finding("layout of the noise", TRUSTED if good else FAILED, words)
    stated_scale = noise.get(name, math.nan)
    words = f"standard deviation {stated_scale:.6g} = multiplier {multiplier:.6g} x sensitivity {contribution:.6g}"
    yield _finding("noise", difference(stated, derived), words)


def _largest_batch(statement: Statement, update: Update) -> int | None:
    """Return B_max under a sampler that cannot be built: as it says, or as the noise on the square has it."""
    if update.second_moment != "independent" or "max_batch_size" in statement.sampler:
        said: int | None = statement.sampler.get("max_batch_size")
        return said
    settings = statement.noise["noise_multiplier"], statement.clip["sensitivity"], statement.method["batch_size"]
    one, two = (scales.square_noise(update, *settings, most) for most in (1, 2))
    beyond: float = (statement.noise["standard_deviation_on_square"] - one) / (two - one)
    return 1 + max(round(beyond), 0)


def _stage(stated: Mapping[str, Any], strategy: Any, sigma: float) -> Iterator[Finding]:
    """What kind of noise it is, and that its settings are those of the kind and no others."""
    kind = IndependentGaussian if strategy is None else CorrelatedGaussian
    if stated.get("kind") != kind.__name__:
        yield Finding("noise", TRUSTED, f"{stated.get('kind')}: of an unknown kind, taken for Gaussian as stated")
        return
    own = {"kind": kind.__name__, "noise_multiplier": sigma} | ({} if strategy is None else {"strategy": strategy})
    problem = difference(stated, own, where="method.noise")
    if problem is not None:
        yield Finding("noise", FAILED, problem)


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")


def check_randomness(statement: Statement) -> Iterator[Finding]:
    """Generator and origin of the keys, as far as they contradict each other."""
    said = statement.randomness
    derived = {name: said[name] for name in ("rng", "key", "forks")}
    derived["cryptographic"] = said["rng"] == "chacha20" and said["key"] != NO_KEY
    origins = (OPERATING_SYSTEM, CALLER, EXACT, NO_KEY)
    problem = difference(said, derived)
    if problem is None and said["key"] not in origins:
        problem = f"key: {said['key']!r} is no origin of keys"
    if problem is None and said["rng"] not in ("chacha20", "philox"):
        problem = f"rng: {said['rng']!r} is no generator"
    if problem is None and (type(said["forks"]) is not int or said["forks"] < 0):
        problem = f"forks: {said['forks']!r} is no count"
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
        terms=_terms(statement),
    )
    missing = [sentence for sentence in needed if sentence not in statement.caveats]
    problem = f"lacks: {missing[0]}" if missing else None
    yield _finding("assumptions", problem, f"all {len(needed)} sentences that these settings need")
    further = len(set(statement.caveats) - set(needed))
    if further:
        yield Finding("assumptions", TRUSTED, f"{further} further sentence(s), which no setting asks for")


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
