"""Strategies: what they stream is C^{-1} Z, for every kind, and matrices that cannot be one are refused."""

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import special

from dpcore.errors import ArgumentError
from dpcore.mechanism.noise_state import correlated, normalizer_of
from dpcore.spec.backends import load_backend
from dpcore.spec.check import order_of
from dpcore.spec.ops import FilterCoefficients, RingCoefficients
from dpcore.stages import strategies
from dpcore.stages.noise import CorrelatedGaussian
from dpcore.stages.strategies.streaming import way

from dpcore.stages.strategies import (  # isort: skip
    BLT, Banded, BandedInverseToeplitz, BandedToeplitz, Dense, Identity, SquareRoot, Strategy, Tree,
    TreeOptimal, banded_inverse_square_root, check_steps, from_matrix, identify, in_blocks, nodes_touched, strategy
)  # fmt: skip

T = 21
Floats = NDArray[np.float64]


def random_lower(steps: int, bands: int, seed: int) -> Floats:
    """Return a well-conditioned time-varying matrix: its diagonal outweighs the rest of its row."""
    rng = np.random.default_rng(seed)
    matrix = np.triu(np.tril(rng.uniform(-1, 1, (steps, steps))), 1 - bands)
    np.fill_diagonal(matrix, 0.0)
    np.fill_diagonal(matrix, rng.uniform(0.5, 3, steps) + np.abs(matrix).sum(axis=1))
    return matrix * rng.uniform(0.1, 10)


KINDS: list[Strategy] = [
    Identity(), Dense(random_lower(T, T, 1)), Banded.from_matrix(random_lower(T, 4, 2)),
    Banded.from_matrix(random_lower(T, 1, 3)), Banded(np.ones((1, T))), BandedToeplitz((2.0, 1.0, -0.5)),
    BandedToeplitz((3.0,)), SquareRoot(T), BandedInverseToeplitz((1.0, -0.4, 0.3), T), banded_inverse_square_root(4, T),
    banded_inverse_square_root(1, T), Tree(T), TreeOptimal(T), BLT((0.4, 0.15), (0.9, 0.5), T),
    in_blocks(Dense(random_lower(T, T, 4)), 4),
    in_blocks(banded_inverse_square_root(3, T), 1), in_blocks(Tree(T), 8), in_blocks(SquareRoot(T), 2 * T),
]  # fmt: skip
NAMES = [f"{number}-{kind.describe()['kind']}" for number, kind in enumerate(KINDS)]


def stream(chosen: Strategy, seeds: Floats, *, by_rows: bool = False, bits: int = 36) -> Floats:
    """Return the noise of each step as a run makes it, (steps, d)."""
    if by_rows:
        return np.array([sum(weight * seeds[row] for row, weight in chosen.rows(t)) for t in range(len(seeds))])
    backend = load_backend("numpy")
    state = [np.zeros(seeds.shape[1]) for _ in range(chosen.order)]

    def normal(row: int, start: int = 0, stop: int | None = None) -> Floats:
        return seeds[row, start:stop].copy()

    noise = [correlated(backend, chosen, t, state, normal, bits) / normalizer_of(chosen, t) for t in range(len(seeds))]
    return np.array(noise)


@pytest.mark.parametrize("chosen", KINDS, ids=NAMES)
class TestContract:
    """What holds for every strategy."""

    @pytest.mark.parametrize("steps", [1, 2, 8, T])
    def test_streams_the_solution_of_c_n_equals_z(self, chosen: Strategy, steps: int) -> None:
        seeds = np.random.default_rng(steps).standard_normal((steps, 5))
        solved = np.linalg.solve(chosen.matrix(steps), seeds)
        assert stream(chosen, seeds) == pytest.approx(solved, rel=1e-8, abs=2e-9)  # a grid of 2^-36
        assert stream(chosen, seeds, by_rows=True) == pytest.approx(solved, rel=1e-10, abs=1e-11)
        strategies.check_streaming(chosen, steps)

    def test_is_lower_triangular_with_a_positive_diagonal_and_unit_columns(self, chosen: Strategy) -> None:
        matrix = chosen.matrix(T)
        assert matrix.shape == (T, T)
        assert matrix.dtype == np.float64
        assert not np.triu(matrix, 1).any()
        assert (np.diagonal(matrix) > 0).all()
        assert np.linalg.norm(matrix, axis=0).max() == pytest.approx(1, rel=1e-12)

    def test_blocks_columns_and_row_norms_are_those_of_the_matrix(self, chosen: Strategy) -> None:
        matrix = chosen.matrix(T)
        for steps in (0, 1, 9, T):
            block = matrix[:steps, :steps]
            assert np.array_equal(chosen.matrix(steps), block)
            picked = np.arange(0, steps, 3)
            assert np.array_equal(chosen.columns(picked, steps), block[:, picked])
            squares = np.square(np.linalg.inv(block)).sum(axis=1)
            assert chosen.inverse_row_norms(steps) == pytest.approx(squares, rel=1e-10)

    def test_rows_reach_no_later_step(self, chosen: Strategy) -> None:
        for step in range(T):
            rows = [row for row, _ in chosen.rows(step)]
            assert all(type(row) is int and 0 <= row <= step for row in rows)
            assert len(set(rows)) == len(rows)
            assert all(type(weight) is float and weight for _, weight in chosen.rows(step))
        found = [chosen.coefficients(step) for step in range(T)]
        assert len({None if c is None else len(c[0]) for c in found}) == 1
        if isinstance(found[0], FilterCoefficients):
            assert order_of(found[0]) == chosen.order
        elif isinstance(found[0], RingCoefficients):
            assert len(found[0].weights) == chosen.order
            assert [c.place for c in found] == [t % max(chosen.order, 1) for t in range(T)]
        else:
            assert (chosen.order == 0) == (way(chosen) == "redrawn")

    def test_describes_itself_compares_and_hashes(self, chosen: Strategy) -> None:
        assert json.loads(json.dumps(chosen.describe())) == chosen.describe()
        assert "array" not in identify(chosen)
        twin = dataclasses.replace(chosen) if dataclasses.fields(chosen) else Identity()
        assert twin == chosen
        assert hash(twin) == hash(chosen)
        assert [other for other in KINDS if other == chosen] == [chosen]
        with pytest.raises(dataclasses.FrozenInstanceError):
            chosen.series = chosen.steps = 3

    def test_refuses_steps_beyond_its_rows(self, chosen: Strategy) -> None:
        assert check_steps(chosen, T) == T
        assert CorrelatedGaussian(None, chosen).with_noise_multiplier(2.0).noise_multiplier == 2.0
        with pytest.raises(ArgumentError, match="step=-1"):
            chosen.rows(-1)
        if chosen.steps is None:
            return
        with pytest.raises(ArgumentError, match=f"steps={T + 1}: .* has {T} rows; take at most {T} steps"):
            check_steps(chosen, T + 1)
        for refused in (chosen.matrix, chosen.inverse_row_norms):
            with pytest.raises(ArgumentError, match=f"steps={T + 1}: must be at most {T}"):
                refused(T + 1)
        with pytest.raises(ArgumentError, match=f"step={T}: the strategy has {T} rows"):
            chosen.rows(T)


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2**31), st.booleans())
def test_any_banded_matrix_streams_its_inverse(steps: int, bands: int, seed: int, stop_early: bool) -> None:
    given_matrix = random_lower(steps, bands, seed)
    chosen = Banded.from_matrix(given_matrix)
    assert chosen.order == min(bands, steps) - 1
    used = (steps + 1) // 2 if stop_early else steps
    seeds = np.random.default_rng(seed).standard_normal((used, 3))
    scale = np.linalg.norm(given_matrix, axis=0).max()
    solved = np.linalg.solve(given_matrix[:used, :used] / scale, seeds)
    assert stream(chosen, seeds) == pytest.approx(solved, rel=1e-9, abs=1e-10)
    squares = np.square(np.linalg.inv(given_matrix[:used, :used] / scale)).sum(axis=1)
    assert chosen.inverse_row_norms(used) == pytest.approx(squares, rel=1e-9)


def test_few_bands_stream_and_many_are_drawn_again() -> None:
    assert isinstance(from_matrix(random_lower(40, 5, 0)), Banded)
    assert isinstance(from_matrix(random_lower(40, 30, 0)), Dense)
    assert from_matrix(np.eye(1)) == Banded(np.ones((1, 1)))
    assert from_matrix(random_lower(T, 4, 2)) == KINDS[2]


def test_scale_and_memory_of_the_callers_matrix_do_not_matter() -> None:
    mine = random_lower(9, 9, 5)
    chosen = Dense(mine)
    assert Dense(np.asfortranarray(8.0 * mine)) == chosen
    assert Dense(mine + 1e-9 * np.eye(9)) != chosen
    mine[0, 0] = 77.0
    assert chosen.matrix(9)[0, 0] != 77.0
    with pytest.raises(ValueError, match="read-only"):
        chosen.entries[0, 0] = 1.0


@pytest.mark.parametrize("steps", [1, 2, 50, 1000])
def test_square_root_times_itself_is_all_ones(steps: int) -> None:
    matrix = SquareRoot(steps).matrix(steps)
    closed = np.abs(special.binom(-0.5, np.arange(steps)))
    norm = np.linalg.norm(closed)
    assert matrix[:, 0] == pytest.approx(closed / norm, rel=1e-9)
    assert np.abs(matrix @ matrix * norm**2 - np.tril(np.ones((steps, steps)))).max() < 1e-10
    # Columns only lose entries at their lower end: the first is the longest, and each has the norm of its head.
    heads = np.sqrt(np.cumsum(closed**2))[::-1] / norm
    assert np.linalg.norm(matrix, axis=0) == pytest.approx(heads, rel=1e-9)


def test_banded_inverse_square_root_is_the_square_root_of_the_inverse_cut_off() -> None:
    chosen = banded_inverse_square_root(4, 300)
    inverse = np.linalg.inv(chosen.matrix(300))
    wanted = special.binom(0.5, np.arange(4)) * np.array([1, -1, 1, -1])
    assert inverse[:4, 0] / inverse[0, 0] == pytest.approx(wanted, rel=1e-9)
    assert np.abs(inverse[4:, 0]).max() < 1e-12
    assert banded_inverse_square_root(300, 300).matrix(300) == pytest.approx(SquareRoot(300).matrix(300), abs=1e-12)
    # The recurrence of C, and so C, dies out, however many rows there are.
    assert banded_inverse_square_root(4, 5000).first_column(5000)[-1] < 1e-12


def nodes_of(steps: int) -> list[range]:
    """Every complete dyadic block of 0 .. steps - 1."""
    sizes = [2**k for k in range(steps.bit_length())]
    return [range(first, first + size) for size in sizes for first in range(0, steps - size + 1, size)]


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 21, 64, 100])
def test_tree_prefixes_carry_the_noise_of_their_own_nodes(steps: int) -> None:
    tree = Tree(steps)
    rows = [range(t - (t & -t), t) for t in range(1, steps + 1)]  # the nodes that the rows of C mark
    matrix = np.array([[float(s in row) for s in range(steps)] for row in rows])
    touched = matrix.sum(axis=0)
    assert touched.max() == nodes_touched(steps) == 1 + math.floor(math.log2(steps))
    assert tree.matrix(steps) * math.sqrt(touched.max()) == pytest.approx(matrix, abs=1e-15)
    decoder = np.tril(np.ones((steps, steps))) @ np.linalg.inv(tree.matrix(steps))
    for step in range(steps):
        mine = [t - 1 for t in range(1, step + 2) if (step + 1) >> (k := (t & -t).bit_length() - 1) << k == t]
        assert sorted(itertools.chain(*(rows[row] for row in mine))) == list(range(step + 1))
        assert len(mine) == (step + 1).bit_count()
        direct = np.zeros(steps)
        direct[mine] = math.sqrt(touched.max())
        assert decoder[step] == pytest.approx(direct, abs=1e-9)
        assert len(tree.rows(step)) <= nodes_touched(steps)


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 13, 32])
def test_optimal_tree_has_the_nodes_products_and_the_least_squares_error(steps: int) -> None:
    nodes = np.array([[float(s in node) for s in range(steps)] for node in nodes_of(steps)])
    gram = nodes.T @ nodes
    matrix = TreeOptimal(steps).matrix(steps)
    assert matrix.T @ matrix == pytest.approx(gram / gram.diagonal().max(), abs=1e-12)
    prefixes = np.tril(np.ones((steps, steps)))
    estimate = prefixes @ np.linalg.pinv(nodes) * math.sqrt(gram.diagonal().max())
    decoder = prefixes @ np.linalg.inv(matrix)
    assert decoder @ decoder.T == pytest.approx(estimate @ estimate.T, abs=1e-9)
    naive = prefixes @ np.linalg.inv(Tree(steps).matrix(steps))
    assert np.all(np.square(decoder).sum(axis=1) <= np.square(naive).sum(axis=1) + 1e-9)


@pytest.mark.parametrize("kind", ["banded-toeplitz", "banded", "inverse"])
def test_noise_is_the_seed_noise_up_to_the_grid_after_many_steps(kind: str) -> None:
    # C times the noise that was added is what the analysis calls Z: rounding must not pile up in the recurrence.
    steps, root = 2000, SquareRoot(2000).first_column(8)
    chosen: Strategy = banded_inverse_square_root(8, steps)
    if kind != "inverse":
        chosen = BandedToeplitz(tuple(root.tolist()))
    if kind == "banded":
        chosen = from_matrix(chosen.matrix(steps))
        assert isinstance(chosen, Banded)
    seeds = np.floor(np.random.default_rng(3).standard_normal((steps, 4)) * 2.0**20) * 2.0**-20
    noise, step = stream(chosen, seeds, bits=20), 2.0**-20
    # Half a step of the grid in each row; rows of earlier seeds carry it on.
    assert np.abs(chosen.matrix(steps) @ noise - seeds).max() < (20 if kind == "inverse" else 0.51) * step


def test_refuses_noise_that_grows_until_its_rounding_shows() -> None:
    explosive = BandedToeplitz((1.0, -2.0))  # N_t = Z_t + 2 N_{t-1}
    with pytest.raises(ArgumentError, match=r"close to singular .* take at most 9 steps") as caught:
        check_steps(explosive, 5000)
    assert "at step 9" in str(caught.value)
    assert check_steps(explosive, 9) == 9


def test_names_arrays_and_objects_give_strategies() -> None:
    assert strategy("identity", 5) == Identity()
    assert strategy("tree", 5) == Tree(5)
    assert strategy("tree-optimal", 5) == TreeOptimal(5)
    assert strategy("square-root", 5) == SquareRoot(5)
    assert strategy("banded-inverse-square-root", 5, bands=2) == banded_inverse_square_root(2, 5)
    assert strategy(np.eye(6), 5) == Banded(np.ones((1, 6)))
    assert strategy([[1.0, 0.0], [1.0, 1.0]], 2) == Dense([[1.0, 0.0], [1.0, 1.0]])
    tree = Tree(8)
    assert strategy(tree, 5) is tree
    assert set(strategies.NAMES) == {"identity", "tree", "tree-optimal", "square-root", "banded-inverse-square-root"}


def test_a_blt_has_the_sum_of_geometric_sequences_as_its_series() -> None:
    scales, decays = (0.4, 0.15, -0.05), (0.9, 0.5, 0.0)
    series = [1.0] + [sum(w * u ** (k - 1) for w, u in zip(scales, decays, strict=True)) for k in range(1, 40)]
    chosen = BLT(scales, decays, 40)
    assert chosen.first_column(40) == pytest.approx(np.array(series) / np.linalg.norm(series), rel=1e-12)
    assert chosen.order == 3


@pytest.mark.parametrize("part", ["rows", "coefficients", "columns"])
def test_a_strategy_that_contradicts_itself_is_refused(part: str) -> None:
    class Liar(BandedToeplitz):
        """Claims one matrix and streams, or counts, another."""

    other = BandedToeplitz((1.0, 0.1))
    setattr(Liar, part, lambda self, *arguments: getattr(other, part)(*arguments))
    with pytest.raises(ArgumentError, match=r"one matrix|columns\(\)"):
        strategies.check_streaming(Liar((1.0, 0.9)), 8)

    class LateLiar(BandedInverseToeplitz):
        """Claims one matrix, and from step 40 on counts or draws less of it."""

    truth = getattr(BandedInverseToeplitz, part)

    def late(self: Any, *arguments: Any) -> Any:
        told = truth(self, *arguments)
        if part == "columns":
            return np.where(np.arange(len(told))[:, None] < 40, told, 0.5 * told)
        if arguments[0] < 40:
            return told
        return (
            tuple((row, 0.5 * w) for row, w in told)
            if part == "rows"
            else told._replace(normalizer=2 * told.normalizer)
        )

    setattr(LateLiar, part, late)
    for liar in (LateLiar((1.0, 0.5), 60), strategies.in_blocks(LateLiar((1.0, 0.5), 60), 2)):
        if part != "coefficients" or liar.coefficients(0) is not None:  # in blocks it has none
            with pytest.raises(ArgumentError, match=r"one matrix|columns\(\)"):
                strategies.check_streaming(liar, 60)


class OfTheCaller(BandedToeplitz):
    """As a caller may write it: draws rows again, in a module of its own."""

    def coefficients(self, step: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("member", "told", "words"),
    [
        ("rows", lambda self, step: ((step, 1.0), (step + 1, -0.5)), r"rows\(0\) has row 1; must be one of 0 to 0"),
        ("rows", lambda self, step: ((step, 2.0), (step, 1.0)), "off by 2"),
        ("inverse_row_norms", lambda self, steps: np.full(steps, 0.01), r"inverse_row_norms\(\) must be the squared"),
        (
            "coefficients",
            lambda self, step: FilterCoefficients((1.0 + step,), (), 1.0 + step),
            r"coefficients\(1\) has",
        ),
    ],
)
def test_rows_norms_and_recurrences_that_no_derivation_covers_are_refused(member: str, told: Any, words: str) -> None:
    strategies.check_streaming(OfTheCaller((1.0,)), 8)
    setattr(Other := type("Other", (OfTheCaller,), {}), member, told)
    with pytest.raises(ArgumentError, match=words):
        strategies.check_streaming(Other((1.0,)), 8)


def test_a_matrix_of_the_callers_own_is_scaled() -> None:
    class Unscaled(OfTheCaller):
        """As its base, in other units."""

        def ratio(self) -> Any:
            return *super().ratio()[:2], 0.5

    with pytest.raises(ArgumentError, match="has a column of norm 2; divide the matrix by"):
        strategies.check_streaming(Unscaled((1.0,)), 8)
