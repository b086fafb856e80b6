"""Strategies: matrices that correlate the noise of a run over its steps, and what they cost in privacy."""

from __future__ import annotations

from dpcore.stages.strategies.banded import Banded, Identity
from dpcore.stages.strategies.base import Strategy, check_steps, check_streaming, identify
from dpcore.stages.strategies.blt import BLT
from dpcore.stages.strategies.dense import Dense, from_matrix
from dpcore.stages.strategies.named import NAMES, NamedStrategy, strategy
from dpcore.stages.strategies.sensitivity import sensitivity
from dpcore.stages.strategies.toeplitz import (
    BandedInverseToeplitz,
    BandedToeplitz,
    SquareRoot,
    banded_inverse_square_root,
)
from dpcore.stages.strategies.tree import Tree, TreeOptimal, nodes_touched
from dpcore.stages.strategies.workloads import max_error, rmse

__all__ = [
    "BLT", "NAMES", "Banded", "BandedInverseToeplitz", "BandedToeplitz", "Dense", "Identity", "NamedStrategy",
    "SquareRoot", "Strategy", "Tree", "TreeOptimal", "banded_inverse_square_root", "check_steps", "check_streaming",
    "from_matrix", "identify", "max_error", "nodes_touched", "rmse", "sensitivity", "strategy",
]  # fmt: skip
