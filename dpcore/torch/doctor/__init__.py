"""The doctor: checks of a user's own model, data, loss and method, before any of it trains privately."""

from dpcore.torch.doctor.audit import audit
from dpcore.torch.doctor.examine import doctor
from dpcore.torch.doctor.finding import Finding, Findings
from dpcore.torch.doctor.run_audit import RunAudit

__all__ = ["Finding", "Findings", "RunAudit", "audit", "doctor"]
