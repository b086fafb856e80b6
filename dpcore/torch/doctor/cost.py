"""What a step takes, and whether the plan holds together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from dpcore.errors import DeltaWarning, TrainingWarning
from dpcore.spec.free_memory import words
from dpcore.torch.doctor.finding import Finding, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.planning import plan_of, sampler_of, with_noise

_OF_DRAWING = ("max_batch_size", "groups")


def plan(subject: Subject) -> Iterator[Finding]:
    """Whether method, sampling and steps fit, and what they cost."""
    given = subject.options
    if subject.private is None:
        drawn = {name: given.get(name) for name in _OF_DRAWING}
        sampler = sampler_of(subject.method, subject.source.length, given.get("sampling", "poisson"), **drawn)
        names = tuple(name for name, p in subject.model.named_parameters() if p.requires_grad) or ("none",)
        found = plan_of(subject.method, sampler, given.get("epochs"), given.get("steps"), names)
        with_noise(found, given.get("target_epsilon"), given.get("target_delta"), given.get("accountant"))
        yield ok("plan", f"{found.steps} steps of about {found.batch_size:g} examples.")
        return
    run = subject.private.plan
    delta = subject.delta
    epsilon = run.epsilon(delta)
    yield ok(
        "plan",
        f"{run.steps} steps of about {run.batch_size:g} of {subject.source.length:,} examples at noise "
        f"multiplier {run.noise_multiplier:.4g}: epsilon = {epsilon:.4g} at delta = {delta:.3g}.",
        details={"epsilon": epsilon, "delta": delta, "steps": run.steps},
    )
    for told in subject.warned:
        if isinstance(told, DeltaWarning):
            yield remark("plan", of_error("plan", told).sentence, "take a delta well below 1/n")
        if isinstance(told, TrainingWarning):
            yield replace(of_error("values of the data", told, private=True), status="remark")


def cost(subject: Subject) -> Iterator[Finding]:
    """Memory and time of a step, and the rule of each layer, on made-up examples."""
    found = subject.run.explain()
    rules = Counter(layer.rule for layer in found.layers if layer.rule and layer.rule != "frozen")
    told = ", ".join(f"{count} by {rule!r}" for rule, count in rules.items())
    yield ok(
        "cost",
        f"a step takes about {found.seconds:.3g} s and {words(found.peak_bytes)}, in micro-batches of "
        f"{found.microbatch_size}; norms: {told}.",
        details=found.as_dict(),
    )
