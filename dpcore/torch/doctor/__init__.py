"""The doctor: checks of a user's own model, data, loss and method, before any of it trains privately."""

from dpcore.torch.doctor.audit_run import audit
from dpcore.torch.doctor.examine import doctor
from dpcore.torch.doctor.finding import Finding, Findings

__all__ = ["Finding", "Findings", "audit", "doctor"]
