"""Recurrent layers, unrolled: one product of all times with the input weight, one a step with the recurrent weight.

The loss's gradient by what the gates are made of is that by their input part. So one tap there tells, for all times at
once, what both weights and both biases need; the recurrent weight's input is the state of the time before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.places import Layout, UnknownLayout
from dpcore.torch.sources.rules.linear import summed
from dpcore.torch.sources.tracer import Operation, Rule

States = tuple[torch.Tensor, ...]
Step = Callable[[torch.Tensor, States, torch.Tensor, Any], tuple[States, torch.Tensor | None]]
"""Takes the input's part of the gates, the states (N, H), the recurrent weight (H, G) and its bias; gives the states,
and what a bias of the recurrent part alone passes through (the new gate of a GRU resets it)."""


def recurrent(step: Step) -> Rule:
    """Return the rule of ``torch._VF.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""

    def rule(operation: Operation) -> Any:
        inputs, states, weights, biases, layers, dropout, training, both, *rest = operation.args
        if not isinstance(biases, bool) or operation.kwargs:
            raise UnknownLayout("a recurrent layer on packed sequences")
        x = inputs.transpose(0, 1) if rest[0] else inputs
        each = len(weights) // (layers * (1 + both))
        first = states if isinstance(states, (tuple, list)) else (states,)
        last: list[States] = []
        for layer in range(layers):
            directions = []
            for backward in (False, True)[: 1 + both]:
                place = len(last)
                mine = weights[place * each : (place + 1) * each]
                out, end = _layer(operation, step, x, tuple(s[place] for s in first), mine, biases, backward)
                directions.append(out)
                last.append(end)
            x = torch.cat(directions, -1) if both else directions[0]
            if dropout and training and layer < layers - 1:
                x = F.dropout(x, dropout)
        return (x.transpose(0, 1) if rest[0] else x), *(torch.stack(state) for state in zip(*last, strict=True))

    return rule


def cell(step: Step) -> Rule:
    """Return the rule of ``torch._VF.lstm_cell``, ``gru_cell``, ``rnn_tanh_cell`` or ``rnn_relu_cell``."""

    def rule(operation: Operation) -> Any:
        names = ("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh")
        values = dict(zip(names, operation.args, strict=False)) | operation.kwargs
        inputs, states, *weights = (values.get(name) for name in names)
        first = tuple(states) if isinstance(states, (tuple, list)) else (states,)
        biases = weights[2] is not None
        _, end = _layer(operation, step, inputs.unsqueeze(0), first, weights, biases, False)
        return end if len(end) > 1 else end[0]

    return rule


def _layer(
    operation: Operation,
    step: Step,
    x: torch.Tensor,
    states: States,
    weights: Sequence[Any],
    biases: bool,
    backward: bool,
) -> tuple[torch.Tensor, States]:
    """Run one layer one way over (T, N, p); return the outputs (T, N, H) and the last states."""
    layout = _examples_along(operation)

    def rows(t: torch.Tensor) -> torch.Tensor:
        return operation.examples_first(t, layout).reshape(operation.examples, -1, t.shape[-1])

    input_bias, bias = weights[2:4] if biases else (None, None)
    w_ih, w_hh, b_ih, b_hh = (operation.derived(t) for t in (*weights[:2], input_bias, bias))
    kept: list[torch.Tensor] = []

    def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        e = inner = rows(gradient)
        if len(kept) > 1:
            inner = e.clone()
            inner[..., -kept[1].shape[-1] :] *= rows(kept[1])
        for matrix, vector, ours, a in ((w_ih, b_ih, e, saved[0]), (w_hh, b_hh, inner, kept[0])):
            if matrix is not None:
                yield matrix, matrix.product(ours, rows(a).to(e.dtype))
            if vector is not None:
                yield vector, summed(vector, ours)

    together = step is not gru and biases
    given = F.linear(x, weights[0], input_bias + bias if together else input_bias)  # type: ignore[operator]
    parts = operation.tap(given, (x,), collect).unbind(0)
    recurrent_weight, inner_bias = weights[1].t(), None if together else bias
    project = _projection(operation, weights[-1], len(x), states, rows) if len(weights) % 2 else None
    first = states[0]
    outs: list[torch.Tensor] = []
    resets: list[torch.Tensor] = []
    for t in range(len(x))[:: -1 if backward else 1]:
        states, reset = step(parts[t], states, recurrent_weight, inner_bias)
        if project is not None:
            states = project(t, states[0]), *states[1:]
        outs.append(states[0])
        if reset is not None:
            resets.append(reset)
    before = [first, *outs[:-1]]
    order = slice(None, None, -1 if backward else 1)
    kept.append(torch.stack(before[order]).detach())
    if resets:
        kept.append(torch.stack(resets[order]).detach())
    return torch.stack(outs[order]), states


def _examples_along(operation: Operation) -> Layout:
    """Return where the examples lie in (T, N, ...): along N, whatever the order of the operation's input."""
    values = operation.args[0] if operation.args else operation.kwargs["input"]
    layout = operation.layout(values)
    batch = 0 if values.dim() == 2 or operation.args[-1] is True else 1
    if layout is None or layout.dim != batch:
        raise UnknownLayout("a recurrent layer whose input holds no examples")
    return Layout(1, layout.rows)


def _projection(operation: Operation, weight: Any, times: int, states: States, rows: Any) -> Any:
    """Return what makes the outputs of an LSTM smaller; zeros, added each time, learn their gradients together."""
    matrix = operation.derived(weight)
    raw: dict[int, torch.Tensor] = {}

    def collect(gradient: torch.Tensor, _: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        if matrix is not None:
            hidden = torch.stack([raw[t] for t in range(times)])
            yield matrix, matrix.product(rows(gradient), rows(hidden))

    zeros = operation.tap(states[0].new_zeros(times, *states[0].shape), (), collect).unbind(0)

    def project(t: int, hidden: torch.Tensor) -> torch.Tensor:
        raw[t] = hidden.detach()
        return torch.addmm(zeros[t], hidden, weight.t())

    return project


def lstm(given: torch.Tensor, states: States, weight: torch.Tensor, _: Any) -> tuple[States, torch.Tensor | None]:
    """See `Step`."""
    hidden, memory = states
    into, forget, new, out = torch.addmm(given, hidden, weight).chunk(4, 1)
    memory = forget.sigmoid() * memory + into.sigmoid() * new.tanh()
    return (out.sigmoid() * memory.tanh(), memory), None


def gru(given: torch.Tensor, states: States, weight: torch.Tensor, bias: Any) -> tuple[States, torch.Tensor | None]:
    """See `Step`."""
    (hidden,) = states
    inner = hidden @ weight if bias is None else torch.addmm(bias, hidden, weight)
    size = hidden.shape[1]
    gates = (given[:, : 2 * size] + inner[:, : 2 * size]).sigmoid()
    reset, keep = gates.chunk(2, 1)
    new = torch.addcmul(given[:, 2 * size :], reset, inner[:, 2 * size :]).tanh()
    return (torch.lerp(new, hidden, keep),), reset


def plain(activation: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    """Return the step of a network without gates."""

    def step(given: torch.Tensor, states: States, weight: torch.Tensor, _: Any) -> tuple[States, None]:
        return (activation(torch.addmm(given, states[0], weight)),), None

    return step
