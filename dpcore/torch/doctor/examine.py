"""The doctor: all checks of a user's own objects, one after the other, with nothing left behind."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import nn

from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.spec import validate
from dpcore.stages.method import Method
from dpcore.torch.doctor import cost, processes, reading, steps, structure, trials
from dpcore.torch.doctor.audit_run import audited
from dpcore.torch.doctor.finding import Finding, Findings, NotTried, fault, not_tried, of_error, remark
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.doctor.unchanged import unchanged
from dpcore.torch.gradients.per_example import Loss

Check = Callable[[Subject], Iterator[Finding]]

# Those that run nothing come first; those that need a run that make_private accepts come last.
_CHECKS: tuple[tuple[str, Check], ...] = (
    ("layers", structure.layers),
    ("frozen parameters", structure.parameters),
    ("dtypes", structure.dtypes),
    ("mode", structure.mode),
    ("optimizer", structure.optimizer),
    ("data", reading.data),
    ("reading", reading.reading),
    ("finite values", reading.values),
    ("plan", cost.plan),
    ("forward", trials.trials),
    ("gradients", trials.gradients),
    ("unused parameters", structure.unused),
    ("loss", trials.loss),
    ("real examples", reading.clipping),
    ("isolation", steps.neighbours),
    ("odd batches", steps.odd_batches),
    ("checkpoint", steps.checkpoint),
    ("cost", cost.cost),
)


_OF_VALUES = ("reading", "finite values", "real examples", "isolation")  # what these say may show values of the data


def doctor(
    model: nn.Module,
    data: Any,
    method: Method | None = None,
    *,
    loss: Loss = F.cross_entropy,
    optimizer: Any = None,
    audit: bool = True,
    confidence: float = 0.99,
    seconds: float = 60.0,
    **options: Any,
) -> Findings:
    """Examine a model, its data, a loss and a method, as `make_private` would get them.

    Nothing of a real run is spent: no ledger is opened, keys are fresh, and what is released is thrown away. Model,
    loss, optimizer and data are left as they were found, and so are the generators of torch, NumPy and Python.

    Parameters
    ----------
    model, data, method, loss
        As for `dpcore.torch.make_private`. Without a method a plain DP-SGD is taken.
    optimizer : torch.optim.Optimizer, optional
        One that was made for the model: does it have the model's parameters?
    audit : bool
        Whether to put canaries through the run's own step, see `dpcore.torch.doctor.canaries.audit`.
    confidence : float
        Of the audit: 1 minus the probability that it refutes a true claim.
    seconds : float
        Of all checks; the audit takes what the others leave, at most half, and ends early where it is decided.
    **options
        Other keywords of `make_private`; 100 steps where neither `epochs` nor `steps` is given. Those of a real run
        (`ledger`, `key`, ...) are left aside.

    Returns
    -------
    Findings
        A list of `Finding`; ``print`` shows it, and `Findings.ok` says whether there is no fault.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For a model that is no module, a method that is no method, or keywords that `make_private` does not know.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
    if method is not None and not isinstance(method, Method):
        raise ArgumentTypeError(f"method={method!r}: must be a dpcore.Method, as dpcore.methods.disk(...) returns")
    validate.open_unit(confidence=confidence)
    validate.positive(seconds=seconds)
    chosen = method or methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=_batch_size(data))
    subject = Subject(model, data, chosen, loss, optimizer, options)
    subject.check_options()
    subject.deadline = time.monotonic() + seconds
    found = Findings()
    with unchanged({"model": model, "loss": loss}, data, subject.device):
        found += processes.examined(subject, lambda: _examine(subject, audit, confidence))
    if method is None:
        found.append(
            remark(
                "plan",
                "no method was given: plain DP-SGD was tried, at noise multiplier 1.",
                "give method= to examine the run that you plan",
            )
        )
    return found


def _examine(subject: Subject, with_audit: bool, confidence: float) -> Findings:
    found = Findings()
    checks = [*_CHECKS, *([("audit", lambda s: audited(s, confidence))] if with_audit else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.build()
        for name, check in checks:
            for finding in _checked(subject, name, check):
                told = [known.name for known in found.faults if known.sentence == finding.sentence]
                if finding.status == "fault" and told:
                    again = f"mend the fault {told[0]!r} first"
                    finding = not_tried(finding.name, "it fails by a fault that was named above.", again)
                found.append(finding)
                subject.faults |= {finding.name} if finding.status == "fault" else set()
    if subject.refused is not None and found.ok:
        found.append(of_error("make_private", subject.refused))
    return found


def _checked(subject: Subject, name: str, check: Check) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a finding, too."""
    try:
        yield from check(subject)
    except NotTried as cause:
        yield not_tried(name, cause.sentence, cause.remedy)
    except DpcoreError as error:
        in_trial = name in ("forward", "loss", "unused parameters")
        yield trials.fault_of(subject, error, name) if in_trial else of_error(name, error, name in _OF_VALUES)
    except Exception as error:  # noqa: BLE001 - a user's own objects may raise anything
        told = str(error).splitlines()[0][:200] if str(error) else "no message"
        yield fault(name, f"fails with {type(error).__name__} ({told}).", "mend it, and examine again")


def _batch_size(data: Any) -> int:
    first = data[0] if isinstance(data, tuple) and data else data
    try:
        return max(1, min(32, len(first)))
    except TypeError:
        raise ArgumentError("method=None: must be given for data without a length") from None
