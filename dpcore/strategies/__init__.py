"""Strategies: matrices that correlate the noise of a run over its steps, and what they cost in privacy."""

from __future__ import annotations

from dpcore.strategies.banded import Banded
from dpcore.strategies.base import Strategy, check_steps, check_streaming, identify
from dpcore.strategies.blt import BLT
from dpcore.strategies.deferred import NamedStrategy
from dpcore.strategies.dense import Dense, from_matrix
from dpcore.strategies.identity import Identity
from dpcore.strategies.named import NAMES, strategy
from dpcore.strategies.sensitivity import sensitivity
from dpcore.strategies.toeplitz import BandedInverseToeplitz, BandedToeplitz, SquareRoot, banded_inverse_square_root
from dpcore.strategies.tree import Tree, TreeOptimal, nodes_touched
from dpcore.strategies.workloads import max_error, rmse

__all__ = [
    "BLT",
    "NAMES",
    "Banded",
    "BandedInverseToeplitz",
    "BandedToeplitz",
    "Dense",
    "Identity",
    "NamedStrategy",
    "SquareRoot",
    "Strategy",
    "Tree",
    "TreeOptimal",
    "banded_inverse_square_root",
    "check_steps",
    "check_streaming",
    "from_matrix",
    "identify",
    "max_error",
    "nodes_touched",
    "rmse",
    "sensitivity",
    "strategy",
]
