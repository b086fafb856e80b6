"""The audit of a torch run, by itself."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.stages.method import Method
from dpcore.torch.doctor.audit_run import audit_run
from dpcore.torch.doctor.finding import NotTried
from dpcore.torch.doctor.run_audit import RunAudit
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.doctor.unchanged import unchanged
from dpcore.torch.gradients.per_example import Loss


def audit(
    model: nn.Module,
    data: Any,
    method: Method,
    *,
    loss: Loss = F.cross_entropy,
    confidence: float = 0.99,
    seconds: float = 60.0,
    **options: Any,
) -> RunAudit:
    """Put canaries through the step of the run that `make_private` makes of these objects.

    It ends where the claim is refuted, or half of its noise is and the lower bound says something, or when time is
    over: the test may stop at any time (`dpcore.audit.betting`). Nothing of a real run is spent, and all objects are
    left as they were found.

    Parameters
    ----------
    model, data, method, loss
        As for `dpcore.torch.make_private`.
    confidence : float
        1 minus the probability that a true claim is flagged.
    seconds : float
        At most about so many; more steps give a bound that is nearer to what ran.
    **options
        Other keywords of `make_private`; those of a real run (`ledger`, `key`, ...) are left aside.

    Returns
    -------
    RunAudit

    Raises
    ------
    ArgumentError
        What `make_private` raises, or for a run that these canaries do not fit, with the reason.
    """
    validate.open_unit(confidence=confidence)
    validate.positive(seconds=seconds)
    subject = Subject(model, data, method, loss, None, options)
    subject.check_options()
    begin = time.monotonic()
    with unchanged({"model": model, "loss": loss}, data, subject.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.build()
        if subject.refused is not None:
            raise subject.refused
        try:
            return audit_run(subject, confidence, seconds=max(begin + seconds - time.monotonic(), 0.5))
        except NotTried as cause:
            told = f"audit: {cause.sentence.rstrip('.')}"
            raise ArgumentError(f"{told}; {cause.remedy}" if cause.remedy else told) from None
