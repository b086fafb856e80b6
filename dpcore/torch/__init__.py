"""The PyTorch edge: per-example gradients, batches and a private optimizer for a torch model."""

from dpcore.torch.doctor import Finding, Findings, RunAudit, audit, doctor
from dpcore.torch.export import export
from dpcore.torch.make_private import make_private
from dpcore.torch.optimizer import PrivateOptimizer
from dpcore.torch.run import PrivateRun
from dpcore.torch.state.checkpoint import public_state
from dpcore.torch.state.saving import save_state

__all__ = [
    "Finding",
    "Findings",
    "PrivateOptimizer",
    "PrivateRun",
    "RunAudit",
    "audit",
    "doctor",
    "export",
    "make_private",
    "public_state",
    "save_state",
]
