"""Passes in 16 bits, from autocast to the sum: what is kept, what surrounds a run, and examples that overflow."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dpcore
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.stages.clipping.blocks import Linear, Rows
from dpcore.torch.data import batches
from dpcore.torch.memory import arrays_of
from tests.depth import pairs
from tests.refused import refused
from tests.unit.torch.models import Called
from tests.unit.torch.peak import blocks_of
from tests.unit.torch_runs import DATA, METHODS, finish, model, sgd, start, values

BF16 = torch.bfloat16


def autocast(dtype: torch.dtype = BF16) -> Any:
    return torch.autocast("cpu", dtype)


def words() -> nn.Module:
    """Rows of a layer of many positions and of its bias, pairs of a head of one, a table, and norms in float32."""
    torch.manual_seed(0)
    parts = {
        "embed": nn.Embedding(50, 24),
        "norm": nn.LayerNorm(24),
        "mix": nn.Linear(24, 16),
        "head": nn.Linear(16, 3),
    }
    return Called(lambda m, tokens: m.head(m.mix(m.norm(m.embed(tokens))).tanh().mean(1)), **parts)


TOKENS = (torch.arange(30 * 40).reshape(30, 40) * 7 % 50, torch.arange(30) % 3)


def totals(run: Any, batch: Any = None) -> list[torch.Tensor]:
    """The integers that a sum of one batch comes to."""
    run._engine.accumulate(next(iter(run.loader)) if batch is None else batch)
    found = [torch.as_tensor(total).clone() for total in run._engine.mechanism.vectors.totals]
    run._engine.mechanism.discard()
    return found


def test_what_the_graph_gives_in_16_bits_is_kept_in_16_bits() -> None:
    wide, narrow = (start(words(), data=TOKENS, precision=given) for given in (None, "bf16"))
    blocks = dict(zip(narrow._engine.gradient.names, blocks_of(narrow, 4), strict=True))
    kept = {
        name: {str(array.dtype).removeprefix("torch.") for array in arrays_of(block)} for name, block in blocks.items()
    }
    assert kept == {
        "embed.weight": {"int64", "float32"}, "norm.weight": {"float32"}, "norm.bias": {"float32"},
        "mix.weight": {"bfloat16"}, "mix.bias": {"bfloat16"}, "head.weight": {"bfloat16"}, "head.bias": {"bfloat16"},
    }  # fmt: skip
    assert isinstance(blocks["mix.weight"], Rows)
    assert isinstance(blocks["head.weight"], Linear)
    before, after = ({layer.name: layer.bytes for layer in run.explain().layers} for run in (wide, narrow))
    for name in ("mix.weight", "mix.bias", "head.weight", "head.bias"):
        assert before[name] == 2 * after[name] > 0


def test_a_clipped_sum_of_kept_16_bits_is_that_of_their_float32_numbers() -> None:
    """To the bit: the norm is of what is kept."""
    run = start(words(), data=TOKENS, precision="bf16", sampling="fixed-order")
    found, engine = totals(run), run._engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.working, "kept", lambda dtype: torch.float32 if dtype.is_floating_point else dtype)
        assert all(map(torch.equal, found, totals(run)))
    assert any(total.any() for total in found)


def inside(net: nn.Module) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with autocast():
            return m.net(x).float()

    return Called(forward, net=net)


@pytest.mark.parametrize("way", ["pairs", "one-by-one"])
def test_it_is_autocast_of_the_forward_pass_whatever_is_around(way: str) -> None:
    """torch's own advice: around the forward pass and the loss. What surrounds the run's calls changes no bit."""
    options: dict[str, Any] = {"data": TOKENS, "sampling": "fixed-order", "gradients": way}
    wanted = finish(start(inside(words()), **options), stop=3)
    run = start(words(), precision="bf16", **options)
    for around in (contextlib.nullcontext(), autocast(), autocast(torch.float16)):
        with around:
            run.step(next(iter(run.loader)))
    assert torch.equal(values(run.model), wanted)
    with autocast(torch.float16):
        again = start(words(), precision="bf16", **options)
    assert torch.equal(finish(again, stop=3), wanted)
    assert not torch.equal(finish(start(words(), **options), stop=3), wanted)


def test_autocast_around_make_private_must_be_around_every_step() -> None:
    with autocast():
        run = start(words(), data=TOKENS)
        batch = next(iter(run.loader))
    refused(ArgumentError, "autocast off around private.step, to bfloat16 around make_private", run.step, batch)
    with autocast(torch.float16):
        refused(ArgumentError, "autocast to float16 around private.step, to bfloat16", run.step, batch)
    with autocast():
        run.step(batch)


def test_the_statement_and_explain_name_it() -> None:
    sentence = "Gradients come from forward passes in bfloat16 (autocast), and are clipped as they were computed."
    with autocast():
        runs = [start(words(), data=TOKENS)]
    runs += [start(words(), data=TOKENS, precision="bf16"), start(words(), data=TOKENS)]
    assert [sentence in run.statement().caveats for run in runs] == [True, True, False]
    with autocast():
        assert runs[0].explain().autocast == "to bfloat16"
    assert [run.explain().autocast for run in runs[1:]] == ["to bfloat16", "off"]
    assert "autocast of forward passes: to bfloat16\n" in str(runs[1].explain())


def test_what_it_may_be() -> None:
    refused(
        ArgumentError, "precision='fp16': must be 'bf16' or None; .* private data", start, model(), precision="fp16"
    )
    refused(ArgumentError, "precision='bfloat16': .*'bf16'", start, model(), precision="bfloat16")


@pytest.mark.parametrize(("name", "backend"), pairs(["disk", "per layer", "adam scaled"], ["torch", "numpy"], 2))
def test_points_and_scales_combine_in_float32(name: str, backend: str) -> None:
    """As if what was found in 16 bits had been widened first."""
    dpcore.set_backend(backend)
    try:
        options: dict[str, Any] = {"data": TOKENS, "precision": "bf16", "sampling": "fixed-order"}
        run, other = (start(words(), METHODS[name](8), **options) for _ in range(2))
        kept = other._engine.working
        kept.kept = lambda dtype: torch.float32 if dtype.is_floating_point else dtype  # type: ignore[method-assign]
        assert torch.equal(finish(run, stop=3), finish(other, stop=3))
    finally:
        dpcore.set_backend(None)


@pytest.mark.parametrize("cast", ["precision", "bfloat16", "float16"])
def test_what_is_not_finite_in_one_example_is_that_examples_alone(cast: str) -> None:
    """Also what is finite in float32 and not in float16. Such an example adds exactly 0."""
    dtype = torch.float32 if cast == "precision" else getattr(torch, cast)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).to(dtype)
    net[0].weight.data.fill_(0.5)
    run = start(net, precision="bf16" if cast == "precision" else None, data=(DATA[0].to(dtype), DATA[1]))
    gradient, labels = run._engine.gradient, DATA[1][:8]

    def rows(value: float) -> list[torch.Tensor]:
        inputs = DATA[0][:8].clone()
        inputs[3] = value
        blocks = gradient(gradient.parameters(), (inputs.to(dtype), labels))
        weights = torch.full((8,), 2.0**30, dtype=torch.float64)
        norms = torch.stack([block.norms(run._engine.mechanism.backend) for block in blocks]).sum(0)
        weights[~norms.isfinite()] = 0
        sums = []
        for block in blocks:
            total = torch.zeros(block.rows().shape[1], dtype=torch.float64)
            block.add_sum(run._engine.mechanism.backend, weights, total)
            sums.append(total)
        return [norms, *(block.rows() for block in blocks), *sums]

    others, infinite = torch.arange(8) != 3, (float("nan"), float("inf"), 6e4)[: 3 if cast == "float16" else 2]
    usual, (first, *more) = rows(0.5), map(rows, infinite)
    assert all(part.isfinite().all() for part in usual)
    count = 1 + len(gradient.names)
    for found in (first, *more):
        assert not found[0][3].isfinite()
        assert all(map(torch.equal, (part[others] for part in found[:count]), (part[others] for part in usual[:count])))
        assert all(map(torch.equal, found[count:], first[count:]))
        assert all(total.isfinite().all() for total in found[count:])
    assert any(total.any() for total in first[count:])


def mixed() -> nn.Module:
    """A layer whose weight and bias differ in dtype, and a later one in 16 bits."""
    net = model()
    net[0].weight.data = net[0].weight.data.to(BF16)
    net[2].to(BF16)
    return net


MODELS = {
    "words": (words, TOKENS), "mixed dtypes": (mixed, DATA),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)),
        (torch.arange(30 * 50).reshape(30, 2, 5, 5).sin(), DATA[1]),
    ),
    "lstm": (
        lambda: Called(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(4, 5, batch_first=True),
                       head=nn.Linear(5, 3)),
        (torch.arange(30 * 28).reshape(30, 7, 4).sin(), DATA[1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=3)
@given(examples=st.integers(1, 30), seed=st.integers(0, 1000))
def test_it_is_the_gradient_of_each_example_alone(name: str, examples: int, seed: int) -> None:
    """By autograd of one example after the other, in the same precision."""
    make, data = MODELS[name]
    torch.manual_seed(seed)
    run = start(make(), data=data, precision="bf16")
    gradient = run._engine.gradient
    assert gradient.way == "pairs"
    batch = batches.tree_map(lambda t: t[torch.randperm(30)[:examples]], data)
    blocks = gradient(gradient.parameters(), batch)
    alone = gradient.one_by_one(gradient.parameters(), batch)
    largest = torch.stack([block.rows().double().abs().amax(1) for block in alone]).amax(0)
    assert (largest > 0).all()
    for block, right in zip(blocks, alone, strict=True):
        apart = (block.rows().double() - right.rows().double()).abs().amax(1)
        assert (apart <= 2.0**-5 * largest).all()


def test_inputs_with_gaps_and_expanded_ones() -> None:
    """The same as contiguous copies, to the bit."""
    whole = torch.arange(30 * 10.0).reshape(30, 10).sin()
    for inputs in (whole[:, ::2], whole[:1, :5].expand(30, 5)):
        made = [
            finish(start(model(), data=(given, DATA[1]), precision="bf16", sampling="fixed-order"), stop=2)
            for given in (inputs, inputs.contiguous())
        ]
        assert torch.equal(*made)


def test_float32_masters_of_a_model_in_16_bits_go_on_with_rows_in_16_bits() -> None:
    run = start(model().to(BF16), sgd(), data=(DATA[0].to(BF16), DATA[1]))
    assert {array.dtype for block in blocks_of(run, 3) for array in arrays_of(block)} == {BF16}
    finish(run, stop=3)
    assert all(wide.dtype == torch.float32 for wide in run._engine.working.tensors())
    assert np.isfinite(values(run.model).float().numpy()).all()


def test_a_grad_scaler_moves_nothing() -> None:
    run = start(model())
    before, scaler = values(run.model), torch.amp.GradScaler("cpu")
    loss = F.cross_entropy(run.model(DATA[0]), DATA[1])
    scaler.scale(loss).backward()
    refused(PrivacyError, "no batch was summed; call private.step", scaler.step, run.optimizer)
    assert torch.equal(values(run.model), before)
