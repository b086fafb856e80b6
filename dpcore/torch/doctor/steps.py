"""Steps of a run that is thrown away: odd batches, and a checkpoint's round trip."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore.errors import ArgumentError
from dpcore.sampling.sharding import Shard
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.doctor.finding import Finding, NotTried, fault, ok, remark
from dpcore.torch.doctor.subject import Subject, kept_values
from dpcore.torch.model.functional import whole_state
from dpcore.torch.randomness import TRIAL
from dpcore.torch.run import PrivateRun

_TOLERANCE = 1e-3
_COMPARED = 16
"""So many real examples are replaced, one after the other."""


@dataclass(frozen=True)
class _Given(Shard):
    """The share of a batch that nobody drew: of so many users, if users are drawn, with `each` examples."""

    users: int
    each: int

    def units(self, key: bytes, step: int) -> NDArray[np.int64] | None:
        return None if self.sampler.unit_of_privacy == "example" else np.full(self.users, self.each)


def add_up(run: PrivateRun, batch: Tree, public: Tree = None, each: int = 1) -> None:
    """Sum a batch that nobody drew, as ``private.step`` does; see `take`."""
    engine = run._engine
    wanted = run.plan.method.update.second_moment == "public"
    users = batches.size(batch) // (engine.views * each)
    engine.mechanism.share = _Given(run.plan.sampler, 0, 1, users, each)
    engine.accumulate(batch, (batch if public is None else public) if wanted else None)


def take(run: PrivateRun, batch: Tree, public: Tree = None, each: int = 1) -> None:
    """Take one step on a batch that nobody drew: the sum and the release of ``private.step``.

    `public` is a batch of public data, where the method takes one; `batch` itself if not given. Where users are drawn,
    each `each` neighbors are one user's examples.
    """
    add_up(run, batch, public, each)
    run._engine.release(run.optimizer._settings())


def odd_batch(subject: Subject, examples: int) -> Iterator[Finding]:
    """A step on a batch of so few examples, through the run's own step."""
    run = subject.another()
    public = batches.tree_map(lambda t: t.repeat_interleave(run._engine.views, 0), subject.made(3))
    with kept_values(subject.model):
        take(run, batches.tree_map(lambda t: t[: examples * run._engine.views], public), public)
        if all(bool(p.isfinite().all()) for p in run.model.parameters() if p.requires_grad):
            yield ok("a step on it is taken like any other.")
            return
    yield fault(
        "the step left parameters that are not finite.", "take a smaller learning rate, or a larger eps of the update"
    )


def nan_row(subject: Subject) -> Iterator[Finding]:
    """What an example of NaN does to the sum of a batch."""
    run, three = subject.run, subject.made(3)
    inputs, targets = batches.normalize(three)
    if not any(tensor.is_floating_point() for tensor in batches.leaves(inputs)):
        raise NotTried("the inputs are integers, which have no NaN.")
    bad = batches.tree_map(_with_nan, inputs)
    batch = (bad, *targets) if targets else bad
    try:
        with_nan = _summed(run, batch)
    except ArgumentError as refused:
        yield remark(
            f"one example of NaN ends the run with an error ({refused}).",
            "let the data set hold none: an error that depends on one example tells of it",
        )
        return
    alone = _summed(run, batches.tree_map(lambda t: t[[0, 2]], three))
    moved = np.linalg.norm(with_nan - alone) > _TOLERANCE * float(np.linalg.norm(alone))
    if not np.isfinite(with_nan).all():
        yield fault("an example of NaN makes the step's sum NaN.", "please report this")
    elif run._engine.gradient.draws or not moved:
        yield ok("an example of NaN adds nothing, and the others add what they would without it.")
    elif np.isfinite(_own(run, batches.tree_map(lambda t: t[1:2], batch))):
        yield ok("the model makes a finite gradient of NaN, which is clipped like any other.")
    else:
        yield fault(
            "an example of NaN moves what the others add to the sum.", "make the model treat each example alone"
        )


def _with_nan(rows: torch.Tensor) -> torch.Tensor:
    """Return rows of which the second one is NaN; integers have none."""
    found = rows.clone()
    if rows.is_floating_point():
        found[1] = float("nan")
    return found


def _own(run: PrivateRun, one: Tree) -> float:
    """Return the square of an example's gradient."""
    blocks = run._engine.gradient(run._engine.gradient.parameters(), one, synthetic=True)
    return float(sum(block.rows().double().square().sum() for block in blocks))


def _summed(run: PrivateRun, batch: Tree) -> NDArray[np.float64]:
    """Return the sum of clipped gradients before any noise, of each example with as many views as the run takes."""
    views, mechanism = run._engine.views, run._engine.mechanism
    add_up(run, batches.tree_map(lambda t: t.repeat_interleave(views, 0), batch), batch)
    backend, totals = mechanism.backend, mechanism.vectors.totals
    found = mechanism.unit * np.concatenate([backend.to_numpy(total).reshape(-1) for total in totals])
    mechanism.discard()
    return found


def neighbours(subject: Subject) -> Iterator[Finding]:
    """Whether one example moves the sum of clipped gradients by no more than is claimed, where nothing is proved."""
    run = subject.run
    engine, plan = run._engine, run.plan
    if engine.gradient.way == "pairs":
        return
    places = np.arange(min(_COMPARED + 1, subject.source.length))
    if len(places) < 3:
        raise NotTried("there are too few examples.")
    # Of the data's own views the first one is taken.
    whole = batches.tree_map(lambda t: t[:: engine.views], subject.source.batch(places, TRIAL))
    batch = batches.tree_map(lambda t: t[:-1], whole)
    spare = [t[-1] for t in batches.leaves(whole)]
    claim = plan.sensitivity_at(run.steps_taken, engine.mechanism.clip_norm).contribution
    base, moved = _summed(run, batch), 0.0
    for place in range(len(places) - 1):
        other = batches.tree_map(torch.clone, batch)
        for row, new in zip(batches.leaves(other), spare, strict=True):
            row[place] = new
        moved = max(moved, float(np.linalg.norm(_summed(run, other) - base)))
    told = f"an example of {len(places) - 1} real ones that is replaced moves the sum by at most {moved / claim:.3g} C"
    if moved > 2 * claim * (1 + _TOLERANCE):
        yield fault(f"{told}: 2 C is claimed.", "make the model treat each example alone")
    else:
        yield ok(f"{told}; 2 C is claimed.")


def checkpoint(subject: Subject) -> Iterator[Finding]:
    """Whether model and optimizer come back from a checkpoint as they were saved."""
    with kept_values(subject.model):
        yield _round_trip(subject)


def _round_trip(subject: Subject) -> Finding:
    model, run = subject.model, subject.another()
    made = batches.tree_map(lambda t: t.repeat_interleave(run._engine.views, 0), subject.made(2))
    take(run, made)
    stored = io.BytesIO()
    torch.save({"model": whole_state(model), "optimizer": run.optimizer.state_dict()}, stored)
    stored.seek(0)
    saved = torch.load(stored, weights_only=True)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    other = subject.another()
    model.load_state_dict(saved["model"])
    other.optimizer.load_state_dict(saved["optimizer"])
    lost = [name for name, p in model.named_parameters() if not torch.equal(p, kept[name])]
    if lost:
        return fault(
            f"{len(lost)} parameters, {lost[0]!r} among them, do not come back from the model's state_dict().",
            "let state_dict() hold every parameter, and load_state_dict() load it",
        )
    if other.steps_taken != run.steps_taken:
        return fault("the run's state does not come back from its state_dict().", "please report this")
    return ok(f"model and optimizer come back; the state has {len(stored.getvalue()):,} bytes.")
