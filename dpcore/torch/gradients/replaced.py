"""Replacements for some functions of torch while a graph is captured: operations that the proof follows.

Bags of embeddings are lookups and sums, each example's own, and a bilinear layer is two products. What vmap
would call example by example is written entry by entry. A recurrent layer is one operation of the graph, with the
loop over time inside, in both directions. torch's own layer sums the gradient of its weights over the examples.
Unrolled it would be tens of thousands of operations for a sequence of a thousand. Here the products with the input
weight are one product over all times. The recurrent part is one operation; its backward pass returns the gradient by
the gates' inputs at every time. The gradients of both weights and biases are products and sums of these, outside of the
operation, where the proof finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dpcore.torch.gradients.errors import NotCaptured

Tensor = torch.Tensor
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}

_library = torch.library.Library("dpcore", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "recurrence(str kind, Tensor inputs, Tensor hidden, Tensor cell, Tensor weight, Tensor bias, bool backward)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(  # type: ignore[no-untyped-call]
    "recurrence_backward(str kind, Tensor gradient, Tensor last_hidden, Tensor last_cell, Tensor outputs, Tensor cells,"
    " Tensor gates, Tensor hidden, Tensor cell, Tensor weight, Tensor bias, bool backward)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
    kind: str, inputs: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor, backward: bool
) -> Any:
    """Return all outputs (T, N, H), all cells of an LSTM (T, N, H), and the gates after their nonlinearity (T, N, G).

    `inputs` (T, N, G) is the inputs' part of the gates, biases included; `weight` (H, G); `bias` (G,) is added to the
    state's part, which a GRU's reset gate multiplies. A GRU's gates end with the state's part of the new gate.
    """
    times, examples, width = inputs.shape
    size = hidden.shape[-1]
    outputs = inputs.new_empty(times, examples, size)
    cells = inputs.new_empty(times if kind == "lstm" else 0, examples, size)
    gates = inputs.new_empty(times, examples, 4 * size if kind == "gru" else width)
    h, c = hidden[0], cell[0] if kind == "lstm" else hidden[0]
    order = range(times - 1, -1, -1) if backward else range(times)
    for t in order:
        if kind == "gru":
            part = torch.addmm(bias, h, weight)
            reset, update = torch.sigmoid(inputs[t, :, : 2 * size] + part[:, : 2 * size]).split(size, 1)  # type: ignore[no-untyped-call]
            inner = part[:, 2 * size :]
            new = torch.tanh(inputs[t, :, 2 * size :] + reset * inner)
            h = new + update * (h - new)
            torch.cat((reset, update, new, inner), 1, out=gates[t])
        else:
            z = torch.addmm(inputs[t], h, weight)
            if kind == "lstm":
                i, f, g, o = z.split(size, 1)  # type: ignore[no-untyped-call]
                i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
                c = torch.addcmul(f * c, i, g)
                h = o * torch.tanh(c)
                torch.cat((i, f, g, o), 1, out=gates[t])
                cells[t] = c
            else:
                h = torch.tanh(z) if kind == "rnn_tanh" else torch.relu(z)
                gates[t] = h
        outputs[t] = h
    return outputs, cells, gates


def _backward(
    kind: str, gradient: Tensor, last_hidden: Tensor, last_cell: Tensor, outputs: Tensor, cells: Tensor, gates: Tensor,
    hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor, backward: bool,
) -> Any:  # fmt: skip
    """Return the gradients by `inputs`, by the state's part of the gates (T, N, G), and by the first states.

    `gradient` is that by all outputs; those by the last states are added at the last time.
    """
    times, examples, size = outputs.shape
    into = gates.new_empty(times, examples, GATES[kind] * size)
    inner = into if kind != "gru" else torch.empty_like(into)
    dh, dc = last_hidden[0], last_cell[0] if kind == "lstm" else None
    order = range(times) if backward else range(times - 1, -1, -1)
    step = 1 if backward else -1
    transposed = weight.t()
    for t in order:
        dh = dh + gradient[t]
        before = t + step
        first = before < 0 or before >= times
        h = hidden[0] if first else outputs[before]
        if kind == "lstm":
            i, f, g, o = gates[t].split(size, 1)  # type: ignore[no-untyped-call]
            tanh = torch.tanh(cells[t])
            dc = dc + dh * o * (1 - tanh * tanh)
            c = cell[0] if first else cells[before]
            torch.cat(
                (dc * g * i * (1 - i), dc * c * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)),
                1,
                out=into[t],
            )
            dc = dc * f
            dh = into[t] @ transposed
        elif kind == "gru":
            reset, update, new, state = gates[t].split(size, 1)  # type: ignore[no-untyped-call]
            dn = dh * (1 - update) * (1 - new * new)
            du = dh * (h - new) * update * (1 - update)
            dr = dn * state * reset * (1 - reset)
            torch.cat((dr, du, dn), 1, out=into[t])
            torch.cat((dr, du, dn * reset), 1, out=inner[t])
            dh = dh * update + inner[t] @ transposed
        else:
            y = gates[t]
            into[t] = dh * (1 - y * y) if kind == "rnn_tanh" else dh * (y > 0)
            dh = into[t] @ transposed
    if inner is into:
        inner = into.new_empty(0, examples, 0)
    return into, inner, dh.unsqueeze(0), dc.unsqueeze(0) if dc is not None else cell.new_empty(0, *hidden.shape[1:])


for _name, _function in (("recurrence", _forward), ("recurrence_backward", _backward)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("dpcore::recurrence")  # type: ignore[untyped-decorator]
def _(kind: str, inputs: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor, backward: bool) -> Any:
    times, examples, width = inputs.shape
    size = hidden.shape[-1]
    return (
        inputs.new_empty(times, examples, size),
        inputs.new_empty(times if kind == "lstm" else 0, examples, size),
        inputs.new_empty(times, examples, 4 * size if kind == "gru" else width),
    )


@torch.library.register_fake("dpcore::recurrence_backward")  # type: ignore[untyped-decorator]
def _(kind: str, gradient: Tensor, _lh: Any, _lc: Any, outputs: Tensor, _c: Any, gates: Tensor, hidden: Tensor, cell: Tensor,
      *_rest: Any) -> Any:  # fmt: skip
    times, examples, size = outputs.shape
    return (
        gates.new_empty(times, examples, GATES[kind] * size),
        gates.new_empty(times, examples, 3 * size) if kind == "gru" else gates.new_empty(0, examples, 0),
        hidden.new_empty(hidden.shape),
        cell.new_empty(hidden.shape) if kind == "lstm" else cell.new_empty(0, *hidden.shape[1:]),
    )


class _Recurrence(torch.autograd.Function):
    """One layer, one direction."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, inputs: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, bias: Tensor, backward: bool
    ) -> Any:
        outputs, cells, gates = torch.ops.dpcore.recurrence(kind, inputs, hidden, cell, weight, bias, backward)
        ctx.save_for_backward(outputs, cells, gates, hidden, cell, weight, bias)
        ctx.kind, ctx.back = kind, backward
        end = 0 if backward else -1
        last = outputs[end].unsqueeze(0)
        return outputs, last.clone(), cells[end].unsqueeze(0).clone() if kind == "lstm" else last.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, last_hidden: Tensor, last_cell: Tensor) -> Any:
        outputs, cells, gates, hidden, cell, weight, bias = ctx.saved_tensors
        into, inner, dh, dc = torch.ops.dpcore.recurrence_backward(
            ctx.kind, gradient, last_hidden, last_cell, outputs, cells, gates, hidden, cell, weight, bias, ctx.back
        )
        inner = inner if ctx.kind == "gru" else into
        # The state before each time: the first state, then all outputs but the last.
        states = torch.cat((outputs[1:], hidden) if ctx.back else (hidden, outputs[:-1]))
        by_weight = states.flatten(0, 1).t() @ inner.flatten(0, 1) if ctx.needs_input_grad[4] else None
        by_bias = inner.sum((0, 1)) if ctx.needs_input_grad[5] else None
        return None, into, dh, dc if ctx.kind == "lstm" else None, by_weight, by_bias, None


def layers(
    kind: str, inputs: Tensor, states: Any, weights: Any, biases: Any, count: Any, dropout: Any, training: Any, both: Any,
    batch_first: Any = None,
) -> Any:  # fmt: skip
    """Stand for ``torch._VF.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` in a graph."""
    if not isinstance(biases, bool) or batch_first is None:
        raise NotCaptured("a recurrent layer on packed sequences has no form without their lengths")
    x = inputs.transpose(0, 1) if batch_first else inputs
    each = len(weights) // (count * (1 + both))
    if each not in (2, 4):
        raise NotCaptured("an LSTM with projections has no rule")
    first = tuple(states) if isinstance(states, (tuple, list)) else (states,)
    last: list[tuple[Tensor, ...]] = []
    for layer in range(count):
        directions = []
        for backward in (False, True)[: 1 + both]:
            place = len(last)
            own = [s[place : place + 1] for s in first]
            out, *end = layer_of(kind, x, own, weights[place * each : (place + 1) * each], backward)
            directions.append(out)
            last.append(tuple(end))
        x = torch.cat(directions, -1) if both else directions[0]
        if dropout and training and layer < count - 1:
            x = F.dropout(x, dropout)
    ends = [torch.cat(state) for state in zip(*last, strict=True)]
    return (x.transpose(0, 1) if batch_first else x), *ends[: len(first)]


def cell(kind: str, inputs: Tensor, states: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Stand for ``torch._VF.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` or ``rnn_relu_cell``."""
    first = tuple(states) if isinstance(states, (tuple, list)) else (states,)
    weights = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, b_hh]
    _, hidden, last = layer_of(kind, inputs.unsqueeze(0), [s.unsqueeze(0) for s in first], weights, False)
    return (hidden[0], last[0]) if kind == "lstm" else hidden[0]


def layer_of(kind: str, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], backward: bool) -> Any:
    """Run one layer one way over (T, N, p): outputs (T, N, H) and the last states (1, N, H)."""
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    if kind == "gru":
        inputs, inner = F.linear(x, w_ih, b_ih), b_hh if b_hh is not None else w_hh.new_zeros(w_hh.shape[0])
    else:
        inputs, inner = F.linear(x, w_ih, None if b_ih is None else b_ih + b_hh), w_hh.new_zeros(w_hh.shape[0])  # type: ignore[operator]
    hidden = states[0]
    cells = states[1] if len(states) > 1 else torch.zeros_like(hidden)
    inputs, hidden, cells = (each.to(w_hh.dtype) for each in (inputs, hidden, cells))  # autocast casts some
    return _Recurrence.apply(kind, inputs, hidden, cells, w_hh.t(), inner, backward)  # type: ignore[no-untyped-call]


def embedding_bag(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the result of ``torch.nn.functional.embedding_bag`` for bags (N, T): the sum or the mean of their rows."""
    if input.dim() != 2 or mode == "max" or max_norm is not None or scale_grad_by_freq:
        raise NotCaptured("embedding_bag has a rule for bags of one length alone, summed or averaged, of a fixed table")
    found = F.embedding(input, weight)
    kept = torch.ones_like(input) if padding_idx is None else input != padding_idx % len(weight)
    factors = kept.to(found.dtype) if per_sample_weights is None else kept * per_sample_weights
    total = (found * factors.unsqueeze(2)).sum(1)
    # The mean of a bag with nothing but padding is 0.
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)


def bilinear(first: Tensor, second: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the result of ``torch.nn.functional.bilinear``."""
    found = torch.einsum("...i,oij,...j->...o", first, weight, second)
    return found if bias is None else found + bias


def kl_div(
    input: Tensor,  # noqa: A002 - torch's own name
    target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean", log_target: bool = False,
) -> Tensor:  # fmt: skip
    """Return the result of ``torch.nn.functional.kl_div``, whose own kernel vmap would call example by example."""
    if size_average is not None or reduce is not None:
        reduction = F._Reduction.legacy_get_string(size_average, reduce)  # type: ignore[attr-defined]
    each = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    if reduction == "none":
        return each
    total = each.sum()
    return total if reduction == "sum" else total / (len(input) if reduction == "batchmean" else each.numel())


REPLACED: dict[Any, Callable[..., Any]] = {
    F.kl_div: kl_div,
    F.bilinear: bilinear,
    F.embedding_bag: embedding_bag,
    **{getattr(torch._VF, kind): partial(layers, kind) for kind in GATES},
    **{getattr(torch._VF, f"{kind}_cell"): partial(cell, kind) for kind in GATES},
}
"""Replacements for torch's functions while a graph is captured."""
