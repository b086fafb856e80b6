"""The PyTorch edge: per-example gradients, batches and a private optimizer for a torch model."""

from importlib.util import find_spec

from dpcore.errors import MissingPackageError
from dpcore.spec.extras import needs

if find_spec("torch") is None:
    raise MissingPackageError(needs("dpcore.torch", "torch"), name="torch")

from dpcore.torch.checkpoint import public_state, save_state
from dpcore.torch.doctor import Finding, Findings, audit, doctor
from dpcore.torch.export import export
from dpcore.torch.fix import fix
from dpcore.torch.held_out import HeldOut
from dpcore.torch.make_private import make_private
from dpcore.torch.model.joint import JointLoss
from dpcore.torch.opacus import read_opacus_checkpoint
from dpcore.torch.run import PrivateOptimizer, PrivateRun

__all__ = [
    "Finding",
    "Findings",
    "HeldOut",
    "JointLoss",
    "PrivateOptimizer",
    "PrivateRun",
    "audit",
    "doctor",
    "export",
    "fix",
    "make_private",
    "public_state",
    "read_opacus_checkpoint",
    "save_state",
]
