"""What a stream costs, by counting what a run does; blocks of steps; and what is refused."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.stages import strategies
from tests.refused import refused
from tests.unit.stages.test_strategies import random_lower

from dpcore.stages.strategies import (  # isort: skip
    BLT, Banded, BandedToeplitz, Dense, Identity, InBlocks, NamedStrategy, SquareRoot, StreamingCost, Tree,
    banded_inverse_square_root, in_blocks, streaming_cost,
)  # fmt: skip

T = 100
DENSE = Dense(random_lower(T, T, 1))


@pytest.mark.parametrize(("chosen", "expected", "words"), [
    (Identity(), ("recurrence", 0, 1, 0), "nothing kept; 1 row of noise and 0 bytes a step"),
    (BandedToeplitz((2.0,)), ("ring", 0, 1, 0), "nothing kept; 1 row of noise and 0 bytes a step"),
    (BandedToeplitz((2.0, 1.0)), ("ring", 1, 1, 16), "a ring of 1 vector; 1 row of noise and 16 bytes a step"),
    (Banded.from_matrix(random_lower(T, 5, 2)), ("ring", 4, 1, 40), "a ring of 4 vectors; 1 row of noise and 40 bytes"),
    (banded_inverse_square_root(4, T), ("ring", 3, 1, 32), "a ring of 3 vectors;"),
    (BLT((0.4, 0.1), (0.9, 0.5), T), ("recurrence", 2, 1, 32), "a recurrence with 2 vectors; 1 row of noise and 32"),
    (DENSE, ("redrawn", 0, 50.5, 808), "rows drawn again, no vectors; 50.5 rows of noise and 808 bytes a step"),
    # The first step of block k draws 10 k + 1 rows, the others one each; each row of the triangle of a block and the
    # square before it is added once, and each sum is cleared and read once.
    (in_blocks(DENSE, 10), ("blocks", 10, (10 * 45 + 100) / T, 8 * (2 * 5050 + 200) / T), "10 sums; 5.5 rows"),
    (in_blocks(DENSE, 1), ("redrawn", 0, 50.5, 808), "rows drawn again"),
    (in_blocks(SquareRoot(T), 10), ("blocks", 10, 5.5, 824), "blocks of 10 sums"),
    # Row t of C^{-1} reaches back by 3: 1 + 2 + 3 rows are missing in the beginning.
    (in_blocks(banded_inverse_square_root(4, T), 1), ("redrawn", 0, (4 * T - 6) / T, 16 * (4 * T - 6) / T), "3.9 rows"),
    (in_blocks(banded_inverse_square_root(4, T), 10), ("blocks", 10, (T + 9 * 3) / T, None), "sums; 1.3 rows"),
    (in_blocks(Tree(64), 1), ("redrawn", 0, 127 / 64, None), "; 2 rows"),
])  # fmt: skip
def test_costs(chosen: Any, expected: tuple[str, int, float, float | None], words: str) -> None:
    cost = streaming_cost(chosen, min(T, chosen.steps or T))
    how, vectors, rows, moved = expected
    assert (cost.how, cost.vectors) == (how, vectors)
    assert cost.rows_drawn == pytest.approx(rows)
    assert moved is None or cost.bytes_moved == pytest.approx(moved)
    assert words in cost.words
    assert cost == StreamingCost(*(getattr(cost, name) for name in ("how", "vectors", "rows_drawn", "bytes_moved")))


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**31), st.integers(1, 30))
def test_the_additions_of_a_block_are_the_rows_of_the_inverse(steps: int, block: int, seed: int, bands: int) -> None:
    """In ascending order, each row drawn once in a block."""
    chosen = InBlocks(Dense(random_lower(steps, bands, seed)), block)
    inverse = np.linalg.inv(chosen.matrix(steps))
    sums = np.zeros((chosen.order or 1, steps))
    for step in range(steps):
        if step % block == 0:
            sums[:], before = 0, -1
        for row, weights in chosen.additions(step):
            assert before < row <= step
            before = row
            for place, weight in weights:
                sums[place, row] += weight
        assert before == step
        np.testing.assert_allclose(sums[step % block], inverse[step], atol=1e-10)


def test_a_strategy_in_blocks_is_the_same_matrix(tmp_path: Any) -> None:
    chosen = in_blocks(in_blocks(DENSE, 7), 16)
    assert chosen == InBlocks(DENSE, 16)
    assert strategies.identify(chosen) == strategies.identify(DENSE)
    assert chosen.of(T) is chosen
    strategies.save(tmp_path / "c.npz", chosen)
    assert strategies.load(tmp_path / "c.npz") == DENSE
    waiting = in_blocks(NamedStrategy("square-root"), 3)
    assert waiting.of(T) == InBlocks(SquareRoot(T), 3)
    patterns = [np.arange(first, T, 20) for first in range(20)]
    assert strategies.sensitivity(chosen, patterns, T) == strategies.sensitivity(DENSE, patterns, T)


@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda: in_blocks(DENSE, 0), ArgumentError, "block=0"),
    (lambda: in_blocks(DENSE, 1.5), ArgumentTypeError, "block=1.5"),
    (lambda: in_blocks("tree", 4), ArgumentTypeError, "strategy='tree': must be a strategy"),
    (lambda: in_blocks(Identity(), 4), ArgumentError, "strategy='identity': must be one that draws rows again"),
    (lambda: in_blocks(NamedStrategy("identity"), 4).of(9), ArgumentError, "strategy='identity': must be one that"),
    (lambda: in_blocks(BandedToeplitz((1.0, 0.5)), 4), ArgumentError, "strategy='banded-toeplitz': must be one that"),
    (lambda: in_blocks(Banded(np.ones((1, 9))), 4), ArgumentError, "strategy='banded': must be one that"),
    (lambda: streaming_cost(DENSE, T + 1), ArgumentError, f"steps={T + 1}"),
    (lambda: streaming_cost(DENSE, 0), ArgumentError, "steps=0"),
])  # fmt: skip
def test_bad_input(call: Any, error: type[Exception], words: str) -> None:
    refused(error, re.escape(words), call)
