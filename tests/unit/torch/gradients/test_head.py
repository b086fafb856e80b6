"""A head without its logits: found where it is one, and each example's gradient beside autograd of it alone."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpcore.errors import ArgumentError
from dpcore.sampling import PoissonSampler, UserSampler
from dpcore.spec.backends import load_backend
from dpcore.stages.clipping import blocks
from dpcore.stages.clipping.blocks import Block, Chunked
from dpcore.torch.gradients import head
from dpcore.torch.gradients.head import Softmax
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.memory import storages_of
from tests.depth import pairs
from tests.unit.torch.gradients.one_by_one import alone
from tests.unit.torch.peak import peak_bytes, peak_of_sum
from tests.unit.torch_runs import METHODS, finish, start

PORT = load_backend("torch")
CLASSES = 50


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, head):
        monkeypatch.setattr(module, "CHUNK", 16)


class Language(nn.Module):
    """A model of tokens, with what may come between its head and its loss."""

    def __init__(self, tied: bool = False, bias: bool = False, classes: int = CLASSES, width: int = 8) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(classes, width), nn.Linear(width, width)
        self.out = nn.Linear(width, classes, bias=bias)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.mix(self.embed(tokens))))  # type: ignore[no-any-return]


class TimesFirst(Language):
    """Positions first inside, as recurrent models have them."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.transpose(0, 1)).transpose(0, 1)


def flat(logits: torch.Tensor, labels: torch.Tensor, **more: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **more)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "mean": flat,
    "sum": lambda z, y: flat(z, y, reduction="sum"),
    "smoothing": lambda z, y: flat(z, y, label_smoothing=0.1),
    "smoothing, sum, classes second": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), y.where(y >= 0, 3), label_smoothing=0.2, reduction="sum", ignore_index=3
    ),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y.where(y >= 0, 3), ignore_index=3),
    "log-softmax": lambda z, y: -(z.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y >= 0)).mean(),
}


def data(times: int, examples: int = 4, classes: int = CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, labels = torch.randint(classes, (2, examples, times))
    labels[1, : times // 2] = -100
    return tokens, labels


def gradient_of(model: nn.Module, loss: Any, batch: Any, lean: bool = True) -> PerExampleGradient:
    gradient = PerExampleGradient(model, loss)
    gradient.proved.lean = lean
    gradient.proved.prove(batch)
    return gradient


def blocks_of(model: nn.Module, loss: Any, batch: Any, lean: bool = True) -> dict[str, Block]:
    gradient = gradient_of(model, loss, batch, lean)
    return dict(zip(gradient.names, gradient(gradient.parameters(), batch, synthetic=True), strict=True))


def summed(block: Block, weights: torch.Tensor) -> torch.Tensor:
    block.norms(PORT)
    out = torch.zeros(math.prod(block.shape), dtype=torch.float64)
    block.add_sum(PORT, weights, out)
    return out


def check(found: dict[str, Block], wanted: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    """Each example's vector, its norm, and what a sum adds of it alone: integers, no longer than the norm says."""
    size = torch.stack([row.abs().amax(1) for row in wanted]).amax(0)
    for name, block, right in zip(found, found.values(), wanted, strict=True):
        assert ((block.rows().double() - right).abs().amax(1) <= tolerance * size).all(), name
        norms = block.norms(PORT)
        for i in range(block.examples):
            weights = torch.zeros(block.examples, dtype=torch.float64)
            weights[i] = 2.0**36 / float(norms[i]) if norms[i] > 0 else 1.0
            added = summed(block, weights)
            assert torch.equal(added, added.round())
            assert added.norm() <= weights[i] * norms[i] + block.rounding, name
            assert float(norms[i]) <= float(right[i].norm()) * (1 + 1e-3) + 1e-3 * float(size[i]), name
            torch.testing.assert_close(added / weights[i], right[i], rtol=0, atol=float(1e-3 * size[i]) + 1e-30)


KINDS = [("plain", 1), ("tied", 6), ("tied, bias", 30)]


@pytest.mark.parametrize(("name", "form"), pairs(LOSSES, KINDS, 3))
def test_each_examples_gradient_is_that_of_autograd(name: str, form: tuple[str, int]) -> None:
    kind, times = form
    model = Language(tied="tied" in kind, bias="bias" in kind)
    batch, loss = data(times), LOSSES[name]
    found = blocks_of(model, loss, batch)
    assert {key for key, block in found.items() if isinstance(block, Chunked)} == {
        "embed.weight" if "tied" in kind else "out.weight", *(["out.bias"] if "bias" in kind else []),
    }  # fmt: skip
    check(found, alone(model, loss, batch))


def test_a_classifier_and_one_whose_inputs_are_not_trained() -> None:
    batch = torch.randn(4, 8), torch.tensor([3, 0, 49, -100])
    for model in (nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, CLASSES)), nn.Linear(8, CLASSES)):
        loss = lambda z, y: F.cross_entropy(z, y, reduction="sum")  # noqa: E731
        found = blocks_of(model, loss, batch)
        assert [isinstance(block, Chunked) for block in found.values()][-2:] == [True, True]
        check(found, alone(model, loss, batch))


ELSEWHERE: dict[str, Loss] = {
    "of the logits": lambda z, y: flat(z, y) + 1e-3 * z.square().mean(),
    "of the log-normalizers": lambda z, y: flat(z, y) + 1e-3 * z.logsumexp(-1).square().mean(),
    "of the probabilities": lambda z, y: flat(z, y) * 0.5 - (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean(),
    "by their largest, without a gradient": lambda z, y: flat(z, y) * z.detach().amax(),
    "by the loss itself": lambda z, y: flat(z, y).square(),
    "rounded": lambda z, y: flat(z.half().float(), y),
    "a temperature": lambda z, y: flat(z / 2, y),
    "a part of the positions": lambda z, y: flat(z[:, 1:], y[:, 1:]),
    "targets that are probabilities": lambda z, y: F.cross_entropy(z[:, 0], torch.ones_like(z[:, 0]) / CLASSES),
}


@pytest.mark.parametrize("name", [*ELSEWHERE, "positions first"])
def test_logits_that_are_used_otherwise_stay(name: str) -> None:
    model, batch = (Language if name in ELSEWHERE else TimesFirst)(tied=True), data(6)
    batch[1].clamp_(min=0)
    loss = ELSEWHERE.get(name, flat)
    found = blocks_of(model, loss, batch)
    assert not any(isinstance(block, Chunked) for block in found.values())
    check(found, alone(model, loss, batch))


class Twisted(torch.autograd.Function):
    """Logits as they are, and a gradient of other places."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.transpose(1, 2).reshape(gradient.shape)


class Twists(Language):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return Twisted.apply(super().forward(tokens))  # type: ignore[no-any-return]


def test_a_gradient_whose_places_are_not_the_logits_stays() -> None:
    model, batch = Twists(classes=6), data(6, classes=6)  # of 6 positions and 6 classes: the shapes do not tell
    found = blocks_of(model, flat, batch)
    assert not any(isinstance(block, Chunked) for block in found.values())
    check(found, alone(model, flat, batch))


@pytest.mark.parametrize(("times", "spoils"), [(1, "no label"), (30, "NaN")])
def test_an_example_without_a_label_or_with_nan_leaves_all_others(times: int, spoils: str) -> None:
    model, batch = Language(), data(times)
    batch[1].clamp_(min=0)
    batch[0].clamp_(max=40)
    with torch.no_grad():
        model.embed.weight[41] = math.nan
    gradient = gradient_of(model, LOSSES["mean"], batch)

    def sums(tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        block = gradient(gradient.parameters(), (tokens, labels), synthetic=True)[-1]
        norms = block.norms(PORT)
        weights = torch.where(torch.isfinite(norms), 2.0**20 / norms, 0.0)
        weights[2] = 0
        return norms, summed(block, weights)

    tokens, labels = (each.clone() for each in batch)
    if spoils == "NaN":
        tokens[2, -1] = 41
    else:
        labels[2] = -100
    (norms, total), (others, without) = sums(*batch), sums(tokens, labels)
    assert torch.isfinite(norms).all()
    assert not torch.isfinite(others[2]) if spoils == "NaN" else others[2] == 0
    assert torch.equal(norms[[0, 1, 3]], others[[0, 1, 3]])
    assert torch.equal(total, without)


def test_labels_out_of_range_raise() -> None:
    batch = data(6)
    gradient = gradient_of(Language(), LOSSES["mean"], batch)
    for label in (CLASSES, -5):
        labels = batch[1].clone()
        labels[0, 0] = label
        with pytest.raises(ArgumentError, match="out of range"):
            gradient(gradient.parameters(), (batch[0], labels))


@pytest.mark.parametrize("times", [9, 30])
def test_an_examples_part_has_the_same_bits_among_any_others(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Language(), data(times, examples=5)
    part: Any = blocks_of(model, LOSSES["mean"], batch)["out.weight"]
    one = Chunked(tuple(each.map(lambda t: t[3:4]) for each in part.parts), part.shape)
    weights = torch.tensor([0, 0, 0, 2.0**20, 0], dtype=torch.float64)
    made, rows = head._logits, []

    def alone(inputs: torch.Tensor, *others: Any) -> torch.Tensor:
        rows.append((len(inputs), inputs.data_ptr() % 64))
        return made(inputs, *others)

    # Not every library shows it in the bits: the products are alike, and lie alike in memory.
    monkeypatch.setattr(head, "_logits", alone)
    assert torch.equal(part.norms(PORT)[3:4], one.norms(PORT))
    assert set(rows) == {(times if times >= 24 else 256, 0)}
    assert torch.equal(summed(part, weights), summed(one, weights[3:4]))


# ------------------------------------------------------------------------------------------------- what is certified


@given(
    seed=st.integers(0, 2**31), times=st.sampled_from([1, 2, 9, 30, 70]), scale=st.sampled_from([1e-3, 1.0, 30.0, 1e3]),
    classes=st.sampled_from([1, 2, 15, 16, 17, 50]), tied=st.booleans(),
    points=st.sampled_from([(1.0,), (0.5, 0.5), (1.0, -1.0)]),
)  # fmt: skip
def test_what_is_added_is_no_longer_than_the_norm_says(
    seed: int, times: int, scale: float, classes: int, tied: bool, points: tuple[float, ...]
) -> None:
    """By float64, of logits that are nearly equal up to ones of which one class has all probability."""
    torch.manual_seed(seed)
    examples, width = 3, 5

    def part(weight: float) -> Softmax:
        a, w, y = (
            torch.randn(examples, times, width),
            torch.randn(classes, width) * scale,
            torch.randint(classes, (examples, times)),
        )
        normalizers, _ = torch.ops.dpcore.head(a.flatten(0, 1), w, None)
        own = -torch.rand(examples, times)
        return Softmax(a, normalizers.view(examples, times), y, own, None, w, None, False, times, weight)

    parts: list[Any] = [part(weight) for weight in points]
    exact = sum(
        p.point_weight * torch.einsum("btv,btp->bvp", _gradient(p), p.inputs.double()).flatten(1) for p in parts
    )
    if tied:
        table = blocks.Embedding(
            (torch.randint(classes, (examples, times)),), (torch.randn(examples, times, width),), (1.0,), classes
        )
        parts.append(table)
        exact = exact + table.rows().double()
    block = Chunked(tuple(parts), (classes, width))
    norms = block.norms(PORT)
    largest = sum(float(p.inputs.double().norm()) * float(p.own.norm()) for p in parts if isinstance(p, Softmax))
    for i in range(examples):
        weights = torch.zeros(examples, dtype=torch.float64)
        weights[i] = 2.0**40 / max(float(norms[i]), 1e-30)
        added = summed(block, weights)
        assert added.norm() <= weights[i] * norms[i] * (1 + 1e-12) + block.rounding
        # Logits of 1e3 are known to 1e-4 or so, and probabilities to as much.
        torch.testing.assert_close(added / weights[i], exact[i], rtol=0, atol=2e-5 * max(scale, 1) * (1 + largest))


def _gradient(part: Softmax) -> torch.Tensor:
    """The gradient by the logits, in float64."""
    z = part.inputs.double() @ part.weight.double().T
    return part.own.double()[..., None] * (F.one_hot(part.labels, z.shape[-1]) - z.softmax(-1))


def test_the_sum_makes_the_bits_that_were_measured() -> None:
    for times in (1, 6, 30):
        block: Any = blocks_of(Language(bias=True), LOSSES["mean"], data(times))["out.weight"]
        block.norms(PORT)
        assert all(
            torch.equal(piece.norms(PORT), kept) for (piece, _, _), kept in zip(block.pieces(), block.kept, strict=True)
        )


@pytest.mark.parametrize("again", [1 + 1e-6, math.nan])
def test_a_chunk_that_comes_out_longer_than_it_was_measured_adds_nothing(
    again: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    block: Any = blocks_of(Language(), LOSSES["mean"], data(30))["out.weight"]
    weights = torch.full((4,), 2.0**20, dtype=torch.float64)
    right = summed(block, weights)
    made = Softmax._gradients

    def longer(self: Softmax, inputs: torch.Tensor, first: int, last: int) -> torch.Tensor:
        found = made(self, inputs, first, last)
        found[2] *= again if first == 16 else 1.0
        return found

    out = torch.zeros_like(right)
    with monkeypatch.context() as patch:
        patch.setattr(Softmax, "_gradients", longer)
        block.add_sum(PORT, weights, out)
    kept = torch.ones(4, dtype=torch.float64)
    kept[2] = 0
    for _, place, _ in block.pieces():
        second = place.start == 16 * block.shape[1]
        assert torch.equal(out[place], summed(block, weights * kept)[place] if second else right[place])


def test_a_sum_without_norms_is_no_sum() -> None:
    block = blocks_of(Language(), LOSSES["mean"], data(6))["out.weight"]
    with pytest.raises(ValueError, match="zip"):
        block.add_sum(PORT, torch.ones(4, dtype=torch.float64), torch.zeros(CLASSES * 8, dtype=torch.float64))


@pytest.mark.parametrize(("backend", "tied"), [("numpy", True), ("triton", False)])
def test_other_backends_add_the_same(backend: str, tied: bool) -> None:
    port = load_backend(backend)
    block = blocks_of(Language(tied, classes=20), LOSSES["mean"], data(3, 2, 20))[
        "embed.weight" if tied else "out.weight"
    ]
    own = block.map(lambda t: t.numpy()) if backend == "numpy" else block
    norms = torch.as_tensor(own.norms(port))
    weights = 2.0**40 / norms
    out = torch.zeros(math.prod(block.shape), dtype=torch.float64)
    own.add_sum(port, weights.numpy() if backend == "numpy" else weights, out.numpy() if backend == "numpy" else out)
    torch.testing.assert_close(norms, block.norms(PORT), rtol=1e-3, atol=0)
    torch.testing.assert_close(out / 2.0**40, summed(block, weights) / 2.0**40, rtol=0, atol=1e-4)


def test_under_autocast_logits_have_16_bits_as_with_them() -> None:
    model, batch = Language(tied=True, bias=True), data(30)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (blocks_of(model, flat, batch, lean) for lean in (True, False))
    assert isinstance(found["out.bias"], Chunked)
    assert found["out.bias"].parts[0].weight.dtype == torch.bfloat16
    assert {block.dtype for block in found.values()} == {"float32"}
    for name, block in found.items():
        one, two = block.rows().float(), wanted[name].rows().float()
        assert (one - two).norm() < 0.01 * two.norm(), name


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled() -> None:
    model, batch = Language(True, bias=True), data(6)
    gradient = PerExampleGradient(model, flat)
    gradient.proved.lean = gradient.proved.compiled = True
    gradient.proved.prove(batch)
    found = gradient(gradient.parameters(), batch, synthetic=True)
    assert isinstance(found[0], Chunked)
    check(dict(zip(gradient.names, found, strict=True)), alone(model, flat, batch))


# ------------------------------------------------------------------------------------------------------- whole runs

USERS = UserSampler(PoissonSampler(dataset_size=10, batch_size=4), np.arange(30) % 10, max_examples_per_user=3)


@pytest.mark.parametrize(("name", "tied"), pairs(["disk", "per layer", "users", "scale"], [False, True], 2))
def test_a_run_goes_where_it_goes_with_logits(name: str, tied: bool) -> None:
    """Several points, also subtracted ones; users; groups; scaled gradients."""
    torch.manual_seed(1)
    tokens, labels = data(5, examples=30)

    def ends(lean: bool) -> torch.Tensor:
        torch.manual_seed(0)
        users = name == "users"
        method = METHODS[{"users": "dp_sgd", "scale": "adam scaled"}.get(name, name)](4 if users else 8)
        run = start(
            Language(tied, bias=True), method, data=(tokens, labels.clamp(min=0)), loss=flat,
            sampling=USERS if users else "fixed-order", max_memory=1 if lean else "1 GB",
        )  # fmt: skip
        assert run._engine.gradient.proved.lean == lean
        return finish(run, stop=2)

    torch.testing.assert_close(ends(True), ends(False), rtol=1e-4, atol=1e-4)


def test_it_is_chosen_where_logits_leave_no_room_and_explained() -> None:
    def explained(model: nn.Module, loss: Any, **options: Any) -> Any:
        run = start(model, data=data(8, examples=30, classes=2000), loss=loss, sampling="fixed-order", **options)
        return run, run.explain()

    roomy, told = explained(Language(classes=2000), flat, max_memory="200 MB")
    assert told.reasons == {}
    assert not roomy._engine.gradient.proved.lean
    scarce, told = explained(Language(True, classes=2000), flat, max_memory="800 KB")
    rules = {layer.name: layer for layer in told.layers}
    assert rules["embed.weight"].rule == "tied: head without logits"
    assert rules["embed.weight"].operations == ("head", "embedding")
    assert rules["embed.weight"].rows == 8
    assert "not 'logits': they leave room for a micro-batch of 3 examples in 781 KiB" in str(told)
    assert scarce.microbatch_size > 1
    other, told = explained(Language(classes=2000), ELSEWHERE["of the logits"], max_memory="400 KB")
    assert not other._engine.gradient.proved.lean
    assert told.reasons == {}


# ----------------------------------------------------------------------------------------------------------- memory


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """The most bytes of one tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages_of((args, kwargs))}
        own = [s.nbytes() for s in storages_of(found) if s._cdata not in given]
        self.size = max(self.size, *own, 0)
        return found


@pytest.mark.parametrize(("times", "tied"), [(1, False), (30, True)])
def test_no_memory_grows_with_the_classes_but_the_weights(
    times: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocks, head):
        monkeypatch.setattr(module, "CHUNK", 500)
    sizes = []
    for classes in (2000, 8000):
        model, batch = Language(tied, classes=classes), data(times, examples=8, classes=classes)
        gradient = gradient_of(model, flat, batch)
        out = torch.zeros(classes * 8, dtype=torch.float64)

        def step(gradient: Any = gradient, batch: Any = batch, out: Any = out) -> None:
            block = gradient(gradient.parameters(), batch, synthetic=True)[0 if tied else -1]
            block.add_sum(PORT, 1 / block.norms(PORT), out)

        step()
        with Largest() as most:
            step()
        assert most.size <= 4 * max(2 * 8 * times, 256) * 500
        sizes.append(peak_bytes(step))
    assert sizes[1] < sizes[0] + 12 * 8192  # a chunk's norms are kept
    assert sizes[1] < 0.6 * 4 * 8 * times * 8000 + 4 * 256 * 500


@pytest.mark.parametrize(("way", "times"), [("two points", 24), ("users", 8)])
def test_what_follows_from_the_graph_is_what_a_sum_takes(times: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, head):
        monkeypatch.setattr(module, "CHUNK", 512)
    method = METHODS["disk" if way == "two points" else "dp_sgd"](4 if way == "users" else 8)
    sampling: Any = USERS if way == "users" else "fixed-order"
    batch, options = data(times, 30, 2000), {"loss": flat, "sampling": sampling, "max_memory": 1}
    run = start(Language(classes=2000, width=16), method, data=batch, **options)
    peak_of_sum(run, 12)  # a first call imports
    needed, taken = run._rehearsal.needed(12), peak_of_sum(run, 12)
    assert 0.93 * taken < needed < 2.5 * taken, needed / taken
