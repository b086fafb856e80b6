"""Weights of linear maps: `dpcore_numpy.linear` and its bounds, with torch's products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dpcore.spec.contributions import FACTOR_BITS
from dpcore.spec.pair_ops import LinearPairs
from dpcore_numpy import linear as reference
from dpcore_numpy import tied
from dpcore_numpy.gram import narrow_root
from dpcore_numpy.pairs import U64, Floats, Indices, Side, Wide, factors_of, gamma, rounding_of, terms_of
from dpcore_numpy.tiles import scaled_terms
from dpcore_torch.arithmetic import bounded
from dpcore_torch.arrays import Widened, view
from dpcore_torch.clip import add_rows, row_norms

# Entries of the tiles that are made at once, of all examples: 8 MiB of float32.
_TILES, _WIDTH = 1 << 21, 1024
_EXAMPLES = 32  # at least: sums pass over their float64 total once for so many
_OUTER = 64, 4, 1024  # examples, rows and columns
_ROWS = 1024  # of several examples in a float64 product
_COLUMNS = 1024  # of a float32 inner product
_MOST = 2.0**160  # of a factor that is taken apart into two float32 numbers, each of which a row may multiply


@bounded()
def linear_norms(
    layers: Sequence[LinearPairs[torch.Tensor]], scales: Sequence[torch.Tensor | None] | None = None
) -> tuple[torch.Tensor, ...]:
    """See `dpcore.spec.pair_ops.PairOperations.linear_norms`."""
    return tuple(map(torch.from_numpy, reference.linear_norms(_viewed(layers), view(scales), arithmetic=TORCH)))


@bounded()
def linear_sums(
    layers: Sequence[LinearPairs[torch.Tensor]],
    weights: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None] | None = None,
    longest: Sequence[float] | None = None,
    *,
    overwrite: bool = False,
    arithmetic: reference.Arithmetic | None = None,
) -> None:
    """See `dpcore.spec.pair_ops.PairOperations.linear_sums`; `arithmetic` is another one than `TORCH`."""
    by = arithmetic or TORCH
    given = _viewed(layers), view(weights), view(out), view(scales), longest
    reference.linear_sums(*given, overwrite=overwrite, arithmetic=by)


def _viewed(layers: Sequence[LinearPairs[torch.Tensor]]) -> list[LinearPairs[Floats]]:
    """Return the layers with what NumPy sees of their tensors."""
    return [LinearPairs(*view(layer)) for layer in layers]


@bounded()
def tied_norms(*args: Any, **options: Any) -> torch.Tensor:
    """See `dpcore.spec.pair_ops.PairOperations.tied_norms`."""
    return torch.from_numpy(tied.tied_norms(*map(view, args), **options, arithmetic=TORCH))


class _Side(Side):
    """A side whose rows torch measures."""

    @staticmethod
    def squares(rows: Floats) -> Wide:
        """See `dpcore_numpy.pairs.Side.squares`."""
        found: Wide = torch.linalg.vector_norm(torch.from_numpy(rows), dim=2).double().square_().numpy()
        return found

    def wide(self, chosen: slice | Indices, columns: slice = slice(None), *, normalized: bool = True) -> Wide:
        """See `dpcore_numpy.pairs.Side.wide`."""
        if self.double:
            return super().wide(chosen, columns, normalized=normalized)
        powers = np.ldexp(1.0, -self.measured[0][chosen]) if normalized else np.ones(1)
        blocks = [_picked(part, chosen)[:, :, columns].double() for part in self.parts]
        for block, ratio in zip(blocks, self.ratios, strict=True):
            if not np.all(ratio * powers == 1):
                block.mul_(torch.from_numpy(ratio * powers)[:, None, None])
        found: Wide = (blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)).numpy()
        return found


def _picked(part: Floats | Widened, chosen: slice | Indices) -> torch.Tensor:
    """Return some examples of a part, in its own dtype."""
    whole = part.tensor if isinstance(part, Widened) else torch.from_numpy(part)
    picked: torch.Tensor = whole[chosen if isinstance(chosen, slice) else torch.from_numpy(chosen)]
    return picked


def norms(rows: Sequence[Floats]) -> Wide:
    """Return `row_norms` of arrays."""
    found: Wide = row_norms([torch.from_numpy(block) for block in rows]).numpy()
    return found


def gram_narrow(a: Side, e: Side) -> tuple[Wide, Wide]:
    """See `dpcore_numpy.gram.gram_narrow`.

    torch adds the entries of one array, and those of one of several arrays, in different orders. NumPy's products of
    vectors add each row by a call of its own.
    """
    square, off = np.empty((2, a.examples))
    x, y = (np.sqrt(side.measured[1]) for side in (a, e))
    count = max(1, _TILES // max(1, 4 * a.time**2))
    for first in range(0, a.examples, count):
        chosen = slice(first, first + count)
        inputs, gradients = _inner(narrow(a, chosen)), _inner(narrow(e, chosen))
        square[chosen] = np.vecdot(inputs.numpy(), gradients.numpy()).sum(axis=1)
        apart = _form(gradients.abs_(), x[chosen])
        off[chosen] = apart + _form(inputs.abs_(), y[chosen])
    terms = terms_of(a, e)
    return narrow_root(a, e, square, off, terms, _COLUMNS), terms


def _form(matrices: torch.Tensor, x: Wide) -> Wide:
    """Return ``x^T M x`` for each example's matrix M (n, T, T) and vector x (n, T)."""
    found: Wide = np.vecdot(np.vecdot(matrices.numpy(), x[:, None]), x)
    return found


def _inner(rows: torch.Tensor) -> torch.Tensor:
    """Return the inner products of each example's rows, (n, T, T): float32 ones of few columns, added in float64.

    A product for each example, as in `_tiles`.
    """
    examples, time, width = rows.shape
    total = torch.zeros(examples, time, time, dtype=torch.float64, device="cpu")
    size = _lines(time * time)
    pieces = torch.empty(examples * size, device="cpu").as_strided(total.shape, (size, time, 1))
    for first in range(0, width, _COLUMNS):
        columns = _lined(rows[:, :, first : first + _COLUMNS])
        for own, piece in zip(columns.unbind(), pieces.unbind(), strict=True):
            torch.mm(own, own.mT, out=piece)
        total += pieces
    return total


def narrow(side: Side, chosen: slice | Indices) -> torch.Tensor:
    """Return some examples' `Side.narrow`, (n, T, width)."""
    if len(side.parts) == 1 and not side.measured[0][chosen].any():
        return _picked(side.parts[0], chosen).float()
    picked = np.arange(side.examples)[chosen]
    found = np.empty((len(picked), side.time, side.width), np.float32)
    for place, i in enumerate(picked.tolist()):
        found[place] = side.narrow(i)
    return torch.from_numpy(found)


def _tiles(
    a: Side, e: Side, used: Indices, wide: bool, weights: Wide | None = None
) -> Iterator[tuple[slice, slice, Indices, torch.Tensor]]:
    """Yield rows and columns of the matrix, some examples, and their tiles (n, rows, columns), times weights (B,).

    A product for each example, of arrays that lie alike in memory: one of several may round an example's tile otherwise
    for another number of them, and so may one whose arrays begin elsewhere in a cache line.
    """
    width = max(1, min(_WIDTH, a.width))
    height = max(1, min(e.width, _TILES // (_EXAMPLES * width)))
    count = _TILES // (height * width)
    kind = torch.float64 if wide else torch.float32
    scratch = torch.empty(min(count, len(used)) * _lines(height * width), dtype=kind, device="cpu")
    for first in range(0, len(used), count):
        chosen = used[first : first + count]
        if wide:
            ours, theirs = torch.from_numpy(a.wide(chosen)), torch.from_numpy(e.wide(chosen))
        else:
            picked = slice(None) if len(chosen) == a.examples else chosen
            ours, theirs = narrow(a, picked), narrow(e, picked)
        if weights is not None:
            if a.width < e.width:
                ours, theirs = _weighted(ours, theirs, weights[chosen])
            else:
                theirs, ours = _weighted(theirs, ours, weights[chosen])
        ours, theirs = _lined(ours), _lined(theirs)
        for row in range(0, e.width, height):
            for column in range(0, a.width, width):
                rows, columns = slice(row, min(row + height, e.width)), slice(column, min(column + width, a.width))
                tall, broad = rows.stop - rows.start, columns.stop - columns.start
                size, stride = (len(chosen), tall, broad), (_lines(tall * broad), broad, 1)
                tiles = scratch.as_strided(size, stride)
                sides = theirs[:, :, rows].unbind(), ours[:, :, columns].unbind()
                for tile, e_rows, a_rows in zip(tiles.unbind(), *sides, strict=True):
                    torch.mm(e_rows.mT, a_rows, out=tile)
                yield rows, columns, chosen, tiles


def _lined(side: torch.Tensor) -> torch.Tensor:
    """Return a side of which each example's rows lie one after the other, from the begin of a cache line on."""
    size = side[0].numel()
    if side.is_contiguous() and side.data_ptr() % 64 == 0 and size % 16 == 0:
        return side
    found = torch.empty(len(side) * _lines(size), dtype=side.dtype, device="cpu")
    return found.as_strided(side.shape, (_lines(size), side.shape[2], 1)).copy_(side)


def _weighted(one: torch.Tensor, other: torch.Tensor, weights: Wide) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sides in float32, the first times the weights.

    A weight of 2^60 or more is split: the power of two beyond that multiplies the other side, since float32 could not
    hold the product on one.
    """
    beyond = np.maximum(np.frexp(weights)[1] - 60, 0)
    if beyond.any():
        other = other * torch.from_numpy(np.ldexp(1.0, beyond)).float()[:, None, None]
        weights = np.ldexp(weights, -beyond)
    return one * torch.from_numpy(weights).float()[:, None, None], other


def _lines(size: int) -> int:
    """Return so many entries, up to the end of a cache line."""
    return -(-size // 16) * 16


def tile_norms(a: Side, e: Side, scale: Floats | None, wide: bool) -> tuple[Wide, Wide]:
    """See `dpcore_numpy.tiles.tile_norms`; squares are added in float64."""
    squares, terms = np.zeros(a.examples), terms_of(a, e) if scale is None else scaled_terms(a, e, scale, wide)
    for rows, columns, chosen, tile in _tiles(a, e, np.arange(a.examples), wide):
        if scale is not None:
            tile = tile * torch.from_numpy(scale.reshape(e.width, a.width)[rows, columns].astype(np.float64))
        if tile.dtype == torch.float64:
            flat = tile.flatten(1).numpy()
            squares[chosen] += np.vecdot(flat, flat)
        else:
            squares[chosen] += np.square(row_norms([tile.flatten(1)]).numpy())
    norms = np.sqrt(squares * (1 + 2 * gamma(a.width * e.width + 8, U64)))
    return norms + rounding_of(a, e, scale, terms, wide), terms


def add_tiles(
    a: Side,
    e: Side,
    weights: Wide,
    used: Indices,
    total: Floats,
    scale: Floats | None,
    wide: bool,
    add: Callable[..., None] = add_rows,
) -> None:
    """See `dpcore_numpy.tiles.add_tiles`; `add` is `add_rows` or another one.

    Float32 tiles are weighted before: one side's rows are, so that nothing but rounding is left to do with a tile.
    """
    before = not wide and scale is None
    factors = factors_of(a, e, weights, _MOST) if before else factors_of(a, e, weights)
    if a.time == 1 and scale is not None:
        _add_outer(a, e, factors, used, total, scale)
        return
    tiles = _tiles(a, e, used, wide, factors if before else None) if len(used) else ()
    for rows, columns, chosen, tile in tiles:
        out = torch.from_numpy(total)[rows, columns]
        # Integers are added exactly: the total itself takes them where its rows lie one after the other.
        piece = out.view(-1) if out.is_contiguous() else out.new_zeros(out.numel())
        if before:
            add(tile.flatten(1), piece)
        else:
            own = None if scale is None else torch.from_numpy(scale[rows, columns].reshape(-1))
            add(tile.flatten(1), piece, torch.from_numpy(factors[chosen]), own)
        if not out.is_contiguous():
            out += piece.view(out.shape)


def _add_outer(a: Side, e: Side, factors: Wide, used: Indices, total: Floats, scale: Floats) -> None:
    """Add scaled products of one row each, a few rows of the matrix at a time: entries that stay in a cache."""
    examples, height, width = _OUTER
    for first in range(0, len(used), examples):
        chosen = used[first : first + examples]
        x, y = (torch.from_numpy(side.wide(chosen)[:, 0]) for side in (a, e))
        y *= torch.from_numpy(factors[chosen])[:, None]
        ones = torch.ones(len(chosen), dtype=torch.float64, device="cpu")
        for row in range(0, e.width, height):
            for column in range(0, a.width, width):
                rows, columns = slice(row, row + height), slice(column, column + width)
                tile = y[:, rows, None] * x[:, None, columns]
                tile.mul_(torch.from_numpy(scale[rows, columns])).round_()
                torch.from_numpy(total)[rows, columns] += torch.mv(tile.flatten(1).T, ones).view(tile.shape[1:])


def add_factors(a: Side, e: Side, weights: Wide, used: Indices, total: Floats) -> None:
    """Add few rows by factors that are integers, in products over many examples: see `dpcore.spec.contributions`."""
    # Of rows divided by their powers. Not below what squares that underflow may hide.
    alpha = np.sqrt(np.maximum(a.measured[1], 2.0**-1000)) * (1 + 2.0**-50)
    scales = alpha * (factors_of(a, e, weights) * 2.0**-FACTOR_BITS)[:, None]
    out, count = torch.from_numpy(total), max(1, _ROWS // max(1, a.time))
    for first in range(0, len(used), count):
        chosen = used[first : first + count]
        own, scale = (torch.from_numpy(each[chosen])[:, :, None] for each in (alpha, scales))
        x = torch.from_numpy(a.wide(chosen)).mul_(2.0**FACTOR_BITS / own).round_()
        y = torch.from_numpy(e.wide(chosen)).mul_(scale).round_()
        out.addmm_(y.flatten(0, 1).mT, x.flatten(0, 1))


TORCH = reference.Arithmetic(_Side, norms, gram_narrow, tile_norms, add_tiles, add_factors)
