"""Strategies: matrices that correlate the noise of a run over its steps, and their privacy cost."""

from dpcore.stages.strategies.base import Strategy, check_steps, check_streaming, identify
from dpcore.stages.strategies.kinds import (
    BLT,
    NAMES,
    Banded,
    BandedInverseToeplitz,
    BandedToeplitz,
    Dense,
    Identity,
    NamedStrategy,
    SquareRoot,
    Tree,
    TreeOptimal,
    banded_inverse_square_root,
    from_matrix,
    nodes_touched,
    strategy,
)
from dpcore.stages.strategies.recommended import Recommendation, Recommended, candidates, for_run, recommend
from dpcore.stages.strategies.saved import load, save
from dpcore.stages.strategies.search.optimize import Optimum, lower_bound, optimal
from dpcore.stages.strategies.search.optimize import folder as cache_folder
from dpcore.stages.strategies.sensitivity import sensitivity
from dpcore.stages.strategies.streaming import InBlocks, StreamingCost, in_blocks, streaming_cost
from dpcore.stages.strategies.workloads import Workload, error_of, rmse

__all__ = [
    "BLT", "NAMES", "Banded", "BandedInverseToeplitz", "BandedToeplitz", "Dense", "Identity",
    "InBlocks", "NamedStrategy", "Optimum", "Recommendation", "Recommended", "SquareRoot", "Strategy",
    "StreamingCost", "Tree", "TreeOptimal", "Workload", "banded_inverse_square_root", "cache_folder", "candidates",
    "check_steps", "check_streaming", "error_of", "for_run", "from_matrix", "identify", "in_blocks", "load",
    "lower_bound", "nodes_touched", "optimal", "recommend", "rmse", "save", "sensitivity",
    "strategy", "streaming_cost",
]  # fmt: skip
