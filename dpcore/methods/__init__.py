"""The papers' methods by name: each one choice of the five stages.

Every method takes the keywords of `Common` (or of `Shared` or `Adaptive`, if it has its own update) and its own.
"""

from dpcore.methods.adaptive import VARIANTS, Adaptive, dp_adagrad, dp_adam
from dpcore.methods.common import BASES, METHODS, Common, Shared, keywords
from dpcore.methods.filtered import disk, doppler, dp_sgd, inner_outer, pmlf
from dpcore.methods.papers import PAPERS, Paper
from dpcore.methods.predict import BestRate, best_rate, expected_loss
from dpcore.methods.recursive import accelerated_srgd, memf, srg_memf

_MAKERS = (dp_sgd, doppler, disk, pmlf, inner_outer, memf, srg_memf, accelerated_srgd, dp_adam, dp_adagrad)
METHODS.update({make.__name__: make for make in _MAKERS})

__all__ = [
    "BASES", "METHODS", "PAPERS", "VARIANTS", "Adaptive", "BestRate", "Common", "Paper", "Shared", "accelerated_srgd",
    "best_rate", "disk", "doppler", "dp_adagrad", "dp_adam", "dp_sgd", "expected_loss", "inner_outer", "keywords",
    "memf", "pmlf", "srg_memf",
]  # fmt: skip
