"""Whether the data are what a run needs: readable, the same at every reading, finite, and of examples apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore.errors import ArgumentError
from dpcore.stages.clipping.blocks import Block
from dpcore.stages.clipping.together import norms_of
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data, join
from dpcore.torch.doctor.finding import Finding, fault, ok
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.model.state_probe import Snapshot
from dpcore.torch.randomness import TRIAL, seeded

_READ = 16  # examples read one by one, several times
_LOOKED_AT = 256  # examples whose values are looked at
_TRAINED_ON = 32  # of these, differentiated
_OTHER = b"\1" * 32


def data(subject: Subject) -> Iterator[Finding]:
    """Whether the data can be read by index, and public examples have their form."""
    source = subject.source
    form = ", ".join(
        f"{name.removeprefix('batch')} {tuple(tensor.shape[1:])} {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in batches.named(source.template()).items()
    )
    source.example(subject.options.get("example_batch"))
    yield ok(f"{source.length:,} examples; one has {form}.", details={"examples": source.length})


def reading(subject: Subject) -> Iterator[Finding]:
    """Whether an index is the same example at every reading, and `collate_fn` makes the same row of it beside others.

    Under one seed the readings must agree, or the data set keeps something, or draws from what dpcore cannot set.
    Under another seed an example may be augmented; where it is *another index's* example of the first reading, or has
    another target, the set orders itself anew, and an index is no longer one person.
    """
    source = subject.source
    if source.tensors is not None:
        yield ok("the data are tensors: an index is always the same row.")
        return
    places = source.spread(_READ)

    def read(seed: bytes) -> list[Tree]:
        return [source.batch(places[k : k + 1], _seed(seed, k)) for k in range(len(places))]

    def labels(batch: Tree) -> list[torch.Tensor]:
        return list(batches.leaves(batches.normalize(batch)[1]))

    batch, again, augmented = read(TRIAL), read(TRIAL), read(_OTHER)
    first, second, other = ([list(batches.leaves(each)) for each in found] for found in (batch, again, augmented))
    moved = [k for k in range(len(places)) if not _same(first[k], second[k]) or not _same(first[k], other[k])]
    strangers = [k for k in moved if any(_is_anothers(first, later[k], k) for later in (second, other))]
    drifting = [k for k in moved if not _same(first[k], second[k])]
    relabeled = [k for k in moved if not drifting and not _same(labels(batch[k]), labels(augmented[k]))]
    if strangers or relabeled:
        told = f"index {places[(strangers or relabeled)[0]]} "
        if strangers:
            told += "was another index's example at another reading: the data set orders itself anew"
        else:
            told += "has another target at another reading: the data set orders itself anew, or mixes examples"
        yield fault(
            f"{told}, and what is counted and clipped as one example is not.",
            "let __getitem__ return example i for index i; shuffle nowhere, since the run draws batches itself",
        )
    elif drifting:
        yield fault(
            f"example {places[drifting[0]]} reads differently at a second reading from the same seed: the data set "
            "keeps something between readings, or draws from a generator that dpcore cannot set (of the operating "
            "system, or made at each call).",
            "draw by the global generators of torch, NumPy or random, or by one that the data set holds",
        )
    elif (mixed := _mixed(source, places)) is not None:
        yield fault(
            f"collate_fn makes another row of example {mixed} beside others than alone: a run gives it each example "
            "alone, so that whatever it makes of several is lost.",
            "compute every row of a batch from its own example",
        )
    elif moved:
        yield ok("examples are augmented at random: what reading draws follows from the run's key.")
    else:
        yield ok(f"{len(places)} examples read the same three times.")


def _mixed(source: Data, places: NDArray[np.int64]) -> int | None:
    """Return the first example of which `collate_fn` makes another row beside others; None too where it draws."""
    reader = source._reader
    if reader.collate is join:
        return None

    def rows(of: list[Any], seed: bytes) -> list[torch.Tensor]:
        with seeded(source.device, seed, reader.generators):
            return list(batches.leaves(reader.collate(of)))

    with seeded(source.device, TRIAL, reader.generators):
        examples = source.examples([int(place) for place in places])
    alone = [rows([example], TRIAL) for example in examples]
    if any(not _same(row, rows([example], _OTHER)) for row, example in zip(alone, examples, strict=True)):
        return None
    try:
        together = rows(examples, TRIAL)
    except Exception:  # noqa: BLE001 - examples of several lengths, say: a run never asks for them together
        return None
    found = [k for k, row in enumerate(alone) if not _same(row, [leaf[k : k + 1] for leaf in together])]
    return int(places[found[0]]) if found else None


def values(subject: Subject) -> Iterator[Finding]:
    """Whether the values are finite; looks at them."""
    places = subject.source.spread(_LOOKED_AT)
    whole = subject.source.batch(places, TRIAL)
    bad = ~_finite(whole)
    names = [
        name.removeprefix("batch")
        for name, tensor in batches.named(whole).items()
        if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if not bad.any():
        yield ok(f"{len(bad)} examples were looked at; all their values are finite.")
        return
    first = int(places[int(np.flatnonzero(bad)[0]) // subject.source.views])
    yield fault(
        f"{int(bad.sum())} of {len(bad)} examples hold NaN or infinity in data{', '.join(names)} (the first is example "
        f"{first}): such an example adds nothing to any step, and nobody is told.",
        "drop these examples or fill the gaps, by a rule that looks at one example at a time",
    )


def clipping(subject: Subject) -> Iterator[Finding]:
    """Gradients of real examples: whether they can be taken, are finite, and how they lie about the clip norm."""
    run = subject.run
    engine, plan = run._engine, run.plan
    batch = subject.source.batch(subject.source.spread(_TRAINED_ON), TRIAL)
    values, backend = engine.gradient.parameters(), engine.mechanism.backend
    norms: list[float] = []
    for start in range(0, batches.size(batch), engine.microbatch_size):
        blocks = _blocks(subject, values, batches.tree_map(lambda t: t[start : start + engine.microbatch_size], batch))  # noqa: B023
        members = [tuple(range(len(blocks)))]
        norms += backend.to_numpy(norms_of(backend, blocks, members, [None] * len(blocks))[0]).tolist()
    found = np.array(norms)
    lost = int((~np.isfinite(found) & _finite(batch)).sum())  # of the others `values` tells
    if lost:
        yield fault(
            f"{lost} of {len(found)} examples have a gradient that is not finite: each adds nothing to any step.",
            "look for divisions by 0, logarithms of 0, or targets that the loss ignores as a whole",
            "finite gradients",
        )
    if "unused parameters" in subject.faults:
        return
    if not np.nan_to_num(found).any():
        yield fault(
            "all gradients of real examples are 0: nothing would be learned.",
            "check the loss, the targets and what is frozen",
            "finite gradients",
        )
        return
    bound = plan.clip_at(0, engine.mechanism.clip_norm).max_grad_norm
    median = float(np.nanmedian(found))
    yield ok(
        f"gradients of {len(found)} examples have a median norm of {median:.3g}; the clip norm is {bound:.3g}, and "
        f"{float((found > bound).mean()):.0%} exceed it.",
        name="clip norm",
        details={"median_norm": median, "clip_norm": bound},
    )


def _blocks(subject: Subject, values: list[torch.Tensor], batch: Tree) -> list[Block]:
    engine = subject.run._engine
    try:
        return [block.map(engine.to_array) for block in engine.gradient(values, batch, TRIAL)]
    except ArgumentError as cause:
        inner = cause.__cause__
        if inner is None:
            raise
        told = str(inner).splitlines()[0][:120] if str(inner) else ""
        raise ArgumentError(
            f"real examples fail where made-up ones do not ({type(inner).__name__}: {told}): check labels and inputs "
            "for values out of range"
        ) from cause


def _finite(batch: Tree) -> NDArray[np.bool_]:
    """Return for each row of a batch whether its floating values are finite."""
    found = np.ones(batches.size(batch), dtype=bool)
    for tensor in (leaf for leaf in batches.leaves(batch) if leaf.is_floating_point()):
        found &= tensor.reshape(len(tensor), -1).isfinite().all(1).cpu().numpy()
    return found


def _seed(base: bytes, k: int) -> bytes:
    """Return the seed of the k-th reading: with one for all, a set that draws its index would draw the same one."""
    return hashlib.sha256(base + bytes([k])).digest()


def _is_anothers(first: list[list[torch.Tensor]], row: list[torch.Tensor], k: int) -> bool:
    """Whether a row, of index k, is what another index gave at the first reading, and k did not."""
    return any(j != k and _same(known, row) and not _same(known, first[k]) for j, known in enumerate(first))


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return Snapshot({"rows": left}).changed(Snapshot({"rows": right})) is None
