"""A small model in NumPy whose gradients are given as pairs, as rows, or as some of both.

Tokens and their places are embedded, two layers follow, and the table of tokens is the last one too.
"""

from collections.abc import Sequence

import numpy as np

from dpcore.stages.clipping.blocks import Block, Embedding, Linear, Rows, joined

TOKENS, PLACES, WIDTH, HIDDEN, TIME, EXAMPLES = 7, 4, 3, 5, 6, 12
SHAPES = [
    ("token.weight", (TOKENS, WIDTH)),
    ("place.weight", (PLACES, WIDTH)),
    ("first.weight", (HIDDEN, WIDTH)),
    ("first.bias", (HIDDEN,)),
    ("second.weight", (HIDDEN, WIDTH)),  # inputs by outputs, as Hugging Face's Conv1D keeps it
]
KINDS = ("pairs", "rows", "mixed")

_rng = np.random.default_rng(7)
TEXT = _rng.integers(0, TOKENS, (EXAMPLES, TIME))
PLACE = _rng.integers(-1, PLACES, (EXAMPLES, TIME))  # -1 is no place: padding
TARGET = _rng.normal(size=(EXAMPLES, TIME, TOKENS)) * np.exp(_rng.normal(size=(EXAMPLES, 1, 1)))
START = [_rng.normal(size=shape) / 2 for _, shape in SHAPES]


def uses(parameters: Sequence[np.ndarray], indices: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Return what each tensor met and its gradient, for the loss ``sum_t |logits_t - target_t|^2 / 2``, by hand."""
    dtype = parameters[0].dtype
    token, place, first, bias, second = (
        p.reshape(shape) for p, (_, shape) in zip(parameters, SHAPES, strict=True)
    )  # fmt: skip
    text, at = TEXT[indices], PLACE[indices]
    x = token[text] + np.where((at >= 0)[..., None], place[at], 0)
    h = np.tanh(x @ first.T + bias)
    k = np.tanh(h @ second)
    d_logits = k @ token.T - TARGET[indices].astype(dtype)
    d_k = d_logits @ token * (1 - k * k)
    d_h = d_k @ second.T * (1 - h * h)
    d_x = d_h @ first
    return [(text, d_x, k, d_logits), (at, d_x), (x, d_h), (d_h,), (h, d_k)]


def as_pairs(found: list[tuple[np.ndarray, ...]]) -> list[Block]:
    """One block for each tensor, none of them formed but the bias's."""
    (text, d_text, k, d_logits), (at, d_at), (x, d_first), (d_bias,), (h, d_second) = found
    one = (1.0,)
    table, head = Embedding((text,), (d_text,), one, TOKENS), Linear((k,), (d_logits,), one, gram=True)
    return [
        joined([head, table]),
        Embedding((at,), (d_at,), one, PLACES),
        Linear((x,), (d_first,), one),
        Rows(d_bias.sum(1)),
        Linear((d_second,), (h,), one),
    ]


def as_rows(found: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """The same vectors by loops over examples and time, in float64."""
    (text, d_text, k, d_logits), (at, d_at), (x, d_first), (d_bias,), (h, d_second) = found
    rows = [np.zeros((len(text), *shape)) for _, shape in SHAPES]
    for i in range(len(text)):
        for t in range(TIME):
            rows[0][i, text[i, t]] += d_text[i, t]
            rows[0][i] += np.outer(d_logits[i, t], k[i, t])
            if at[i, t] >= 0:
                rows[1][i, at[i, t]] += d_at[i, t]
            rows[2][i] += np.outer(d_first[i, t], x[i, t])
            rows[3][i] += d_bias[i, t]
            rows[4][i] += np.outer(h[i, t], d_second[i, t])
    return [block.reshape(len(text), -1).astype(x.dtype) for block in rows]


def gradients(kind: str, parameters: Sequence[np.ndarray], indices: np.ndarray) -> list:
    """The examples' gradients, in a kind of `KINDS`."""
    found = uses(parameters, indices)
    if kind != "mixed":
        return as_pairs(found) if kind == "pairs" else as_rows(found)
    pairs, rows = as_pairs(found), as_rows(found)
    return [pairs[0], rows[1], pairs[2], rows[3], rows[4]]
