"""The doctor: all checks of a user's own objects, one after the other, with nothing left behind."""

import hashlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError, DeltaWarning, DpcoreError
from dpcore.spec import validate
from dpcore.stages.clipping.clipped_sum import norms_of
from dpcore.stages.method import Method
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data, join, read_examples
from dpcore.torch.data.remarks import remarks
from dpcore.torch.doctor.audit_run import add_up, audited
from dpcore.torch.doctor.finding import Finding, Findings, NotTried, fault, not_tried, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject, unchanged
from dpcore.torch.gradients.per_example import WAYS, Loss
from dpcore.torch.model.check_module import Modes, refusals, shared_memory
from dpcore.torch.model.functional import in_mode
from dpcore.torch.model.joint import JointLoss, trained_parameters
from dpcore.torch.model.state_probe import Snapshot
from dpcore.torch.peers import check_plain, is_sharded, peers_of
from dpcore.torch.randomness import OTHER, TRIAL, seeded
from dpcore.torch.wrong_arguments import check_method

_READ = 16  # examples of a dataset that are read one by one, several times
_TRAINED_ON = 32  # real examples that are differentiated
_REPLACED = 16  # real examples that are replaced, one after the other
_TOLERANCE = 1e-3

# Checks that need no run; the first is of make_private, which stops at the first layer.


def layers(subject: Subject) -> Iterator[Finding]:
    """Layers that are known to be unfit by their class and settings."""
    check_plain(subject.model)
    yield from map(of_error, refusals(subject.model))


def parameters(subject: Subject) -> Iterator[Finding]:
    """Parameters that share memory and are not one."""
    yield from map(of_error, shared_memory(subject.model))


def mode(subject: Subject) -> Iterator[Finding]:
    """Whether dropout is on."""
    sentence = Modes(subject.model, ()).off()
    if sentence is not None:
        yield of_error(ArgumentError(sentence))


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
    """Whether an index is the same example at every reading, and `collate_fn` makes the same row of it with others.

    Under one seed the readings must agree; otherwise the data set keeps state, or draws from a generator that dpcore
    cannot set. Under another seed an example may be augmented. If it is *another index's* example of the first reading,
    or has another target, the set changes its order, and an index is no longer one person.
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

    batch, again, augmented = read(TRIAL), read(TRIAL), read(OTHER)
    first, second, other = ([list(batches.leaves(each)) for each in found] for found in (batch, again, augmented))
    moved = [k for k in range(len(places)) if not _same(first[k], second[k]) or not _same(first[k], other[k])]
    strangers = [k for k in moved if any(_is_anothers(first, later[k], k) for later in (second, other))]
    drifting = [k for k in moved if not _same(first[k], second[k])]
    relabeled = [k for k in moved if not drifting and not _same(labels(batch[k]), labels(augmented[k]))]
    if strangers or relabeled:
        problem = "was another index's example" if strangers else "has another target"
        yield fault(
            f"index {places[(strangers or relabeled)[0]]} {problem} at another reading: the data set changes its "
            "order, or mixes examples, so that an index is not one example to count and clip.",
            "let __getitem__ return example i for index i; do not shuffle, since the run draws batches itself",
        )
    elif drifting:
        yield fault(
            f"example {places[drifting[0]]} reads differently at a second reading from the same seed: the data set "
            "keeps something between readings, or draws from a generator that dpcore cannot set (of the operating "
            "system, or made at each call).",
            "draw by the global generators of torch, NumPy or random, or by one that the data set has",
        )
    elif (mixed := _mixed(source, places)) is not None:
        yield fault(
            f"collate_fn makes a different row of example {mixed} with others than alone: a run gives it each example "
            "alone, so that its combination of several is lost.",
            "compute every row of a batch from its own example",
        )
    elif moved:
        yield ok("examples are augmented at random: the draws of reading follow from the run's key.")
    else:
        yield ok(f"{len(places)} examples read the same three times.")


def _mixed(source: Data, places: NDArray[np.int64]) -> int | None:
    """Return the first example that `collate_fn` changes when others are there; None, too, if it draws."""
    if source.collate is join:
        return None

    def rows(of: list[Any], seed: bytes) -> list[torch.Tensor]:
        with seeded(source.device, seed, source.generators):
            return list(batches.leaves(source.collate(of)))

    with seeded(source.device, TRIAL, source.generators):
        examples = read_examples(source.dataset, [int(place) for place in places])
    alone = [rows([example], TRIAL) for example in examples]
    if any(not _same(row, rows([example], OTHER)) for row, example in zip(alone, examples, strict=True)):
        return None
    try:
        together = rows(examples, TRIAL)
    except Exception:  # noqa: BLE001 - examples of several lengths, say: a run never joins them
        return None
    changed = [k for k, row in enumerate(alone) if not _same(row, [leaf[k : k + 1] for leaf in together])]
    return int(places[changed[0]]) if changed else None


def values(subject: Subject) -> Iterator[Finding]:
    """Yield `make_private`'s remarks on values: whether they are finite, and of the size that models expect."""
    for text in remarks(subject.source, subject.loss):
        sentence, _, remedy = text.partition("; ")
        status = fault if "not finite" in sentence else remark
        yield status(f"{sentence}.", remedy, "" if status is fault else "values of the data")


def _seed(base: bytes, k: int) -> bytes:
    """Return the seed of the k-th reading: with one for all, a set that draws its index would draw the same one."""
    return hashlib.sha256(base + bytes([k])).digest()


def _is_anothers(first: list[list[torch.Tensor]], row: list[torch.Tensor], k: int) -> bool:
    """Whether a row, of index k, equals the first reading of another index, but not that of k."""
    return any(j != k and _same(known, row) and not _same(known, first[k]) for j, known in enumerate(first))


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return Snapshot({"rows": left}).changed(Snapshot({"rows": right})) is None


# Checks of the run that make_private made.


def plan(subject: Subject) -> Iterator[Finding]:
    """Yield the cost of method, sampling and steps."""
    run, delta = subject.run.plan, subject.delta
    epsilon = run.epsilon(delta)
    yield ok(
        f"{run.steps} steps of about {run.batch_size:g} of {subject.source.length:,} examples at noise multiplier "
        f"{run.noise_multiplier:.4g}: epsilon = {epsilon:.4g} at delta = {delta:.3g}.",
        details={"epsilon": epsilon, "delta": delta, "steps": run.steps},
    )
    yield from (replace(of_error(each), status="remark") for each in subject.warned if isinstance(each, DeltaWarning))


def gradients(subject: Subject) -> Iterator[Finding]:
    """Yield the way to find gradients, and the proof."""
    gradient = subject.run.engine.gradient
    if gradient.way == WAYS[0]:
        graph = list(gradient.proved.programs.values())[-1]
        sums = Counter(source.operation for each in graph.sources for source in each)
        yield ok(
            f"it is proved that the examples stay apart: all {graph.operations} operations of the graph were followed, "
            f"and examples are added up only in {', '.join(f'{n} {name}' for name, n in sums.items())}."
        )
    elif WAYS[0] in gradient.reasons:
        yield remark(
            f"gradients are found by {gradient.way!r}, which is slower: {gradient.reasons[WAYS[0]]}.",
            "see docs/engine.md for the conditions of the fast way",
        )


def clipping(subject: Subject) -> Iterator[Finding]:
    """Yield findings on gradients of real examples: whether they exist, are finite, and their size by the clip norm."""
    run, engine = subject.run, subject.run.engine
    batch = subject.examples(subject.source.spread(_TRAINED_ON))
    size, backend = engine.microbatch_size, engine.mechanism.backend
    norms: list[float] = []
    for start in range(0, batches.size(batch), size):
        micro = batches.tree_map(lambda t: t[start : start + size], batch)  # noqa: B023
        blocks = [block.map(engine.to_array) for block in engine.gradient(engine.gradient.parameters(), micro, TRIAL)]
        whole = norms_of(backend, blocks, [tuple(range(len(blocks)))], [None] * len(blocks))[0]
        norms += backend.to_numpy(whole).tolist()
    lengths = np.array(norms)
    lost = int((~np.isfinite(lengths)).sum())
    if lost:
        yield fault(
            f"{lost} of {len(lengths)} examples have a gradient that is not finite: each adds nothing to any step.",
            "look for divisions by 0, logarithms of 0, or targets that the loss ignores as a whole",
            "finite gradients",
        )
    bound = run.plan.clip_at(0, engine.mechanism.clip_norm).max_grad_norm
    median = float(np.nanmedian(lengths))
    yield ok(
        f"gradients of {len(lengths)} examples have a median norm of {median:.3g}; the clip norm is {bound:.3g}, and "
        f"{float((lengths > bound).mean()):.0%} exceed it.",
        name="clip norm",
        details={"median_norm": median, "clip_norm": bound},
    )


def unused(subject: Subject) -> Iterator[Finding]:
    """Parameters on which the loss does not depend."""
    named = trained_parameters(subject.run.model)
    loss = subject.loss_of(subject.made(1)).sum()
    values: Any = torch.autograd.grad(loss, [*named.values()], allow_unused=True)
    names = [name for name, value in zip(named, values, strict=True) if value is None]
    if names:
        listed = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        yield remark(
            f"the loss does not depend on {listed}: only noise would move them.", "call requires_grad_(False) on them"
        )


def loss(subject: Subject) -> Iterator[Finding]:
    """Whether the loss of a batch is made of the losses of its examples."""
    model, ones = subject.run.model, batches.named(subject.made(3, label=1))
    # One target differs: with equal ones a loss that pairs outputs with other examples' targets would not show.
    made = batches.named_map(lambda name, t: torch.cat([t[:1], ones[name][1:2], t[2:]]), subject.made(3))
    if isinstance(model, JointLoss) and subject.run.engine.gradient.draws:
        raise NotTried("the losses draw random numbers: others of three examples together than of one.")
    rows = [batches.tree_map(lambda t: t[i : i + 1], made) for i in range(3)]  # noqa: B023
    try:
        with in_mode(model, False), torch.no_grad():
            whole, *alone = [subject.loss_of(batch).double() for batch in (made, *rows)]
        each = torch.cat([value.reshape(1) for value in alone])
    except Exception:  # noqa: BLE001 - a loss for one example may raise anything if there are three
        raise NotTried("the loss takes no batch of several examples; training gives it one at a time.") from None
    wanted = {"list": each} if whole.numel() == len(each) else {"mean": each.mean(), "sum": each.sum()}
    # A model in bfloat16 rounds each loss to three digits.
    tolerance = max(_TOLERANCE, *(4 * torch.finfo(p.dtype).eps for p in model.parameters() if p.is_floating_point()))
    scale = tolerance * float(each.abs().max())
    near = [n for n, value in wanted.items() if torch.allclose(whole.reshape(-1), value, rtol=tolerance, atol=scale)]
    if near:
        yield ok(f"the loss of a batch is the {near[0]} of its examples' losses.")
        return
    yield fault(
        f"the loss of three examples together is {float(whole.reshape(-1)[0]):.4g}, neither the mean "
        f"({float(each.mean()):.4g}) nor the sum of their losses one by one: it mixes examples, and a private run, "
        "which gives it one example at a time, would minimize another function.",
        "give a loss that is a mean or a sum over examples, each of its own output and target",
    )


def neighbours(subject: Subject) -> Iterator[Finding]:
    """Whether one example moves the sum of clipped gradients by no more than claimed, if there is no proof."""
    run, engine = subject.run, subject.run.engine
    if engine.gradient.way == "pairs":
        return
    last = min(_REPLACED, subject.source.length - 1)
    if last < 2:
        raise NotTried("there are too few examples.")
    whole = subject.examples(np.arange(last + 1))
    claim, moved = engine.mechanism.contribution, 0.0

    def summed(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        chosen = torch.from_numpy(rows.repeat(engine.views))
        add_up(run, batches.tree_map(lambda t: t[chosen.to(t.device)], whole))
        return engine.mechanism.summed()

    base = summed(np.arange(last))
    for place in range(last):
        other = np.arange(last)
        other[place] = last
        moved = max(moved, float(np.linalg.norm(summed(other) - base)))
    engine.mechanism.discard()
    moves = f"replacing one of {last} real examples moves the sum by at most {moved / claim:.3g} C"
    if moved > 2 * claim * (1 + _TOLERANCE):
        yield fault(f"{moves}: 2 C is claimed.", "make the model treat each example separately")
    else:
        yield ok(f"{moves}; 2 C is claimed.")


class Check(NamedTuple):
    """A check, and its sentence if it finds nothing; `private` findings may show values of the data."""

    name: str
    look: Callable[[Subject], Iterator[Finding]]
    fine: str = ""
    private: bool = False


_BEFORE = (
    Check("layers", layers, "no module is of a kind that mixes examples or keeps statistics."),
    Check("tied parameters", parameters, "no two parameters share memory."),
    Check("mode", mode, "no dropout is off."),
    Check("data", data),
    Check("reading", reading),
    Check("finite values", values, "the values that were looked at are finite.", private=True),
)
_OF_A_RUN = (
    Check("plan", plan),
    Check("gradients", gradients),
    Check("unused parameters", unused, "the loss depends on all trained tensors."),
    Check("loss", loss),
    Check("real examples", clipping, private=True),
    Check("isolation", neighbours, private=True),
)


def doctor(
    model: nn.Module,
    data: Any,
    method: Method | None = None,
    *,
    loss: Loss = F.cross_entropy,
    audit: bool = True,
    confidence: float = 0.99,
    seconds: float = 60.0,
    **options: Any,
) -> Findings:
    """Examine a model, its data, a loss and a method, as `make_private` would get them.

    Nothing of a real run is spent: no ledger is opened, keys are fresh, and releases are discarded. Model, loss and
    data are restored, and so are the generators of torch, NumPy and Python.

    Parameters
    ----------
    model, data, method, loss
        As for `dpcore.torch.make_private`. Without a method a plain DP-SGD is taken.
    audit : bool
        Whether to put canaries through the run's own step, see `dpcore.torch.doctor.audit_run`.
    confidence : float
        1 minus the probability that the audit refutes a true claim.
    seconds : float
        Time of all checks; the audit takes the rest, at most half, and ends early if it is decided.
    **options
        Other keywords of `make_private`; 100 steps if neither `epochs` nor `steps` is given. Those of a real run
        (`ledger`, `key`, ...) are ignored.

    Returns
    -------
    Findings
        A list of `Finding`; ``print`` shows it, and `Findings.ok` says whether there is no fault.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For a model that is no module, a method that is no method, or keywords unknown to `make_private`.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
    if method is not None:
        check_method(method)
    validate.open_unit(confidence=confidence)
    validate.positive(seconds=seconds)
    chosen = method or methods.dp_sgd(
        lr=0.1, noise_multiplier=1.0, batch_size=_batch_size(data, options.get("collate_fn"))
    )
    subject = Subject(model, data, chosen, loss, options)
    subject.deadline = time.monotonic() + seconds
    last = [Check("audit", partial(audited, confidence=confidence), private=True)] if audit else []
    with unchanged({"model": model, "loss": loss}, data, subject.device):
        findings = examined(subject, [*_OF_A_RUN, *last])
    if method is None:
        sentence = "no method was given: plain DP-SGD was tried, at noise multiplier 1."
        findings.append(remark(sentence, "give method= to examine the run that you plan", "plan"))
    return findings


def _batch_size(data: Any, collate_fn: Any) -> int:
    """Return the batch size of a method that was not given; 1 for data that the checks will refuse."""
    try:
        return min(32, Data(data, torch.device("cpu"), collate_fn).length)
    except Exception:  # noqa: BLE001 - a user's own data may raise anything
        return 1


_READING = ("data", "reading")  # their errors may quote an example


def _checked(subject: Subject, check: Check) -> list[Finding]:
    """Return the findings of a check; an error is a finding, too."""
    findings: list[Finding] = []
    try:
        for finding in check.look(subject):
            findings.append(finding)  # noqa: PERF402 - kept if the check raises later
    except NotTried as cause:
        findings.append(not_tried(cause.sentence, cause.remedy))
    except DpcoreError as error:
        findings.append(of_error(error, private=check.name in _READING))
    except Exception as error:  # noqa: BLE001 - a user's own objects may raise anything
        message = str(error).splitlines()[0][:200] if str(error) else "no message"
        sentence = f"fails with {type(error).__name__} ({message})."
        findings.append(fault(sentence, "fix it, and examine again", private=check.name in _READING))
    findings = findings or [ok(check.fine)] * bool(check.fine)
    return [replace(each, name=each.name or check.name, private=each.private or check.private) for each in findings]


def examined(subject: Subject, of_a_run: list[Check]) -> Findings:
    """Make all checks."""
    if is_sharded(subject.model):
        reason = "this process has only parts of the model's parameters."
        return Findings([not_tried(reason, "examine the whole model in one process, before fully_shard", "model")])
    if peers_of(subject.options.get("process_group"), subject.model).world_size > 1:
        reason = "this is one of several processes."
        remedy = "examine in one process; make_private compares all of them before the first step"
        return Findings([not_tried(reason, remedy, "processes")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.build()
        findings = [finding for check in _BEFORE for finding in _checked(subject, check)]
        if subject.refused is None:
            findings += [finding for check in of_a_run for finding in _checked(subject, check)]
        else:
            findings.append(of_error(subject.refused, "make_private"))
            findings.append(not_tried("make_private refuses these objects.", "fix the faults and examine again", "run"))
    said: dict[str, Finding] = {}  # one fault may stop many checks
    return Findings(said.setdefault(finding.sentence, finding) for finding in findings if finding.sentence not in said)
