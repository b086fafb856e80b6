"""Arrays of 16 bits are the float32 arrays of their numbers: every operation's result is, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import fewer, fewest, seeds

from dpcore.spec.backends import load_backend
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import Block, Embedding, Linear, Rows, Tied, joined

pytest.importorskip("triton")

pytestmark = pytest.mark.usefixtures("poisoned_memory")

KINDS = [("numpy", torch.float16)]  # NumPy has no bfloat16
KINDS += [(name, kind) for name in ("torch", "triton") for kind in (torch.bfloat16, torch.float16)]
NAMES = [f"{name} {str(kind).removeprefix('torch.')}" for name, kind in KINDS]
each = pytest.mark.parametrize(("name", "kind"), KINDS, ids=NAMES)
SPECIAL = (0.0, 1e-7, 6e4, np.inf, -np.inf, np.nan)  # 1e-7 is denormal in float16


class Drawn:
    """Arrays of a backend in 16 bits, and the float32 ones of the same numbers."""

    def __init__(self, name: str, kind: Any, seed: int, *, special: bool = False) -> None:
        self.backend, self.kind = load_backend(name), kind
        self.rng, self.special = np.random.default_rng(seed), special
        self.numpy = self.backend.arrays == "numpy"

    def floats(self, *shape: int) -> tuple[Any, Any]:
        values = self.rng.standard_normal(shape) * 2.0 ** self.rng.integers(-8, 8)
        if self.special and values.size:
            values.reshape(-1)[self.rng.integers(values.size)] = self.rng.choice(SPECIAL)
        half = torch.from_numpy(values).to(self.kind)
        if half.dim() == 3 and self.rng.random() < 0.5:  # no array of its own: some columns of a wider one
            wider = torch.zeros(*half.shape[:2], half.shape[2] + 3, dtype=self.kind)
            wider[:, :, : half.shape[2]] = half
            half = wider[:, :, : half.shape[2]]
        return (half.numpy(), half.float().numpy()) if self.numpy else (half, half.float())

    def array(self, values: Any) -> Any:
        return self.backend.from_numpy(np.asarray(values))

    def weights(self, examples: int) -> Any:
        found = np.abs(self.rng.standard_normal(examples)) * 2.0**20
        found[self.rng.integers(examples)] = 0
        return self.array(found)


def bits(drawn: Drawn, arrays: Any) -> list[bytes]:
    """The arrays' bytes, with one NaN for all."""
    found = map(drawn.backend.to_numpy, arrays)
    return [np.where(np.isnan(array), array.dtype.type(np.nan), array).tobytes() for array in found]


@each
@pytest.mark.parametrize("size", [70, 3001])
@fewer
@given(seeds, st.booleans())
def test_rows_of_16_bits(name: str, kind: Any, size: int, seed: int, special: bool) -> None:
    """Beside float32 rows in the same call, as LayerNorm's are under autocast."""
    drawn, results = Drawn(name, kind, seed, special=special), []
    both, second, other = drawn.floats(3, size), drawn.floats(3, size), drawn.floats(3, 7)[1]
    scales = [drawn.array(drawn.rng.standard_normal(size).astype(np.float32)), None] if seed % 2 else None
    weights = drawn.weights(3)
    for rows, more in zip(both, second, strict=True):
        out = [drawn.array(np.zeros(n)) for n in (size, 7)]
        norms = drawn.backend.row_norms([rows, other], scales)
        drawn.backend.weighted_sum([rows, other], [weights] * 2, out, scales)
        results.append(bits(drawn, [norms, *out, *drawn.backend.combine([rows], [more], (1.5, -0.75))]))
    assert results[0] == results[1]


FORMS = [(1, 5, 4), (3, 40, 9), (23, 4, 6), (30, 9, 5)]  # time and widths
SIDES = [(0, 0), (0, 1), (1, 0)]  # which are of 16 bits: those numbered 0


@each
@fewest
@given(
    seeds, st.sampled_from(FORMS), st.sampled_from(SIDES), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from([(1.0,), (2.5, -1.0)]),
)  # fmt: skip
@example(1, (30, 9, 5), (0, 0), False, False, False, (1.0,))
@example(2, (30, 9, 5), (0, 0), True, False, False, (1.0,))
def test_layers_of_16_bits(
    name: str, kind: Any, seed: int, form: tuple[int, int, int], sides: tuple[int, int], gram: bool, scaled: bool,
    special: bool, points: tuple[float, ...],
) -> None:  # fmt: skip
    """Of one side of 16 bits and one of float32, and of both."""
    drawn, (time, p, q) = Drawn(name, kind, seed, special=special), form
    inputs, gradients = ([drawn.floats(3, time, n) for _ in points] for n in (p, q))
    scale = drawn.array(drawn.rng.standard_normal(q * p).astype(np.float32)) if scaled else None
    weights, results = drawn.weights(3), []
    for a, e in (sides, (1, 1)):
        layer = LinearPairs([x[a] for x in inputs], [x[e] for x in gradients], points, gram, len(points) > 1)
        out = drawn.array(np.zeros(q * p))
        norms = drawn.backend.linear_norms([layer], [scale])
        drawn.backend.linear_sums([layer], [weights], [out], [scale])
        results.append(bits(drawn, [*norms, out]))
    assert results[0] == results[1]


@each
@fewest
@given(seeds, st.booleans(), st.booleans(), st.sampled_from([(1.0,), (2.5, -1.0)]))
def test_tables_of_16_bits(
    name: str, kind: Any, seed: int, scaled: bool, special: bool, points: tuple[float, ...]
) -> None:
    drawn, size, p = Drawn(name, kind, seed, special=special), 11, 6
    index = [drawn.array(drawn.rng.integers(-1, size, (2, 6))) for _ in points]
    tokens, inputs = ([drawn.floats(2, 6, p) for _ in points] for _ in range(2))
    gradients, whole = [drawn.floats(2, 6, size) for _ in points], drawn.floats(2, size * p)
    scale = drawn.array(drawn.rng.standard_normal(size * p).astype(np.float32)) if scaled else None
    weights, results = drawn.weights(2), []
    for k in range(2):
        rows = [pair[k] for pair in tokens]
        out = drawn.array(np.zeros(size * p))
        norms = drawn.backend.embedding_norms(index, rows, points, size, scale=scale)
        drawn.backend.embedding_sum(index, rows, points, weights, out, scale=scale)
        head = [pair[k] for pair in inputs], [pair[k] for pair in gradients], points
        tied = drawn.backend.tied_norms(index, rows, points, *head, size)
        formed = drawn.backend.tied_row_norms(index, rows, points, whole[k], size)
        results.append(bits(drawn, [norms, out, tied, formed]))
    assert results[0] == results[1]


def blocks_of(drawn: Drawn) -> list[list[Block]]:
    """A block of each kind: of 16 bits, and of the float32 numbers."""
    rows, tokens, inputs, gradients = (drawn.floats(*shape) for shape in ((4, 66), (4, 5, 6), (4, 5, 6), (4, 5, 11)))
    index, found = drawn.array(drawn.rng.integers(-1, 11, (4, 5))), list[list[Block]]()
    for row, token, a, e in zip(rows, tokens, inputs, gradients, strict=True):
        table, head = Embedding((index,), (token,), (1.0,), 11), Linear((a,), (e,), (1.0,))
        found.append([Rows(row), table, head, Tied(table, head)])
    return found


@pytest.mark.parametrize("name", ["numpy", "torch"])
@pytest.mark.parametrize("seed", range(5))
def test_what_is_made_of_blocks_of_16_bits(name: str, seed: int) -> None:
    """Sums of units, of uses and of points are no sums in 16 bits."""
    drawn = Drawn(name, torch.float16, seed)
    results = []
    for blocks in blocks_of(drawn):
        made = [made for b in blocks for made in (b.units(2), b.weighted(0.3), b.units(4).weighted(1e-7))]
        made += [joined((blocks[0], other)) for other in blocks]
        results.append(bits(drawn, [0 * block.rows() + block.rows() for block in made]))
        assert {block.dtype for block in made} == {"float32"}
    # A sum over positions may be added in another order, where arrays lie otherwise.
    for found, right in zip(*results, strict=True):
        np.testing.assert_allclose(np.frombuffer(found, np.float32), np.frombuffer(right, np.float32), 1e-4, 1e-4)
