"""A model's passes that are captured and replayed: the gradients of every batch are those of the model itself.

In the interpreter recorded operations are made again; on a device a CUDA graph is replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpcore
import dpcore_triton
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.sampling import FixedOrderSampler, UserSampler
from dpcore.stages.clipping.blocks import Embedding, Linear, Rows
from dpcore.torch import make_private
from dpcore.torch.model.per_example import PerExampleGradient
from dpcore.torch.model.repeated import RepeatedPasses, alike
from dpcore.torch.model.trial import try_out
from dpcore_triton import launch, passes
from dpcore_triton.graphs import Graphs
from dpcore_triton.passes import Passes
from dpcore_triton.recording import repeated
from tests.depth import chosen
from tests.refused import refused
from tests.unit.torch_runs import KEY

DEVICE = launch.default_device()
EXAMPLES = 4


class Shifted(nn.Module):
    """Dropout, a buffer, a frozen and a trained parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.shift)


class Words(nn.Module):
    """Attention and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.table(tokens)).mean(1))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def vectors(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(EXAMPLES, 5, generator=draw)


def tokens(draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 7, (EXAMPLES, 6), generator=draw)


def pictures(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(EXAMPLES, 1, 5, 5, generator=draw)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor], str]] = {
    "pairs": (Shifted, vectors, "pairs"),
    "vmap": (Shifted, vectors, "vmap"),
    "words": (Words, tokens, "pairs"),
    "images": (images, pictures, "pairs"),
}


class Side:
    """Gradients of one model, with passes that are repeated or without."""

    def __init__(self, model: nn.Module, example: Any, way: str = "pairs", graphs: bool = True) -> None:
        self.model = model.to(DEVICE)
        self.gradient = PerExampleGradient(self.model, F.cross_entropy)
        self.gradient.example = example
        try_out(self.gradient, example, way=way)
        if graphs:
            self.gradient.repeated = RepeatedPasses([self.model], Graphs(dpcore_triton))

    def __call__(self, batch: Any, number: int) -> list[torch.Tensor]:
        return _rows(self.gradient(self.gradient.parameters(), batch, bytes([number]) * 32, regular="here"))

    @property
    def replays(self) -> int:
        assert self.gradient.repeated is not None
        return sum(one.replays for one in self.gradient.repeated.passes.kept.values())

    @property
    def refused(self) -> str | None:
        assert self.gradient.repeated is not None
        return self.gradient.repeated.refused


def sides(make: Callable[[], nn.Module], example: Any, way: str = "pairs") -> tuple[Side, Side]:
    model = make()
    return Side(model, example, way, graphs=False), Side(model, example, way)


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        if launch.INTERPRETED:
            assert torch.equal(left, right)
        else:  # the order of a sum may be another
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def batch_of(inputs: Callable[[torch.Generator], torch.Tensor], draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    return inputs(draw).to(DEVICE), torch.randint(0, 3, (EXAMPLES,), generator=draw).to(DEVICE)


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_the_batch_the_parameters_the_buffers_and_the_masks(case: str) -> None:
    make, inputs, way = CASES[case]
    draw = torch.Generator().manual_seed(1)
    plain, repeating = sides(make, batch_of(inputs, draw), way)
    for number in range(12):
        batch = batch_of(inputs, draw)
        same(plain(batch, number), repeating(batch, number))
        with torch.no_grad():
            for tensor in (*plain.model.parameters(), *plain.model.buffers()):
                tensor += 0.1 * torch.randn(tensor.shape, generator=draw).to(DEVICE)
    assert repeating.refused is None
    # Not in calls 1, 2, 4, 8, where the model's state is looked at, nor in the first one beside them.
    assert repeating.replays == 7


def test_a_displaced_point_is_another_pass_and_its_values_are_handed_over() -> None:
    draw = torch.Generator().manual_seed(2)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    for _ in range(12):
        batch = batch_of(vectors, draw)
        here = plain.gradient.parameters()
        points = {"here": here} | {
            name: [v + torch.randn(v.shape, generator=draw).to(DEVICE) for v in here] for name in ("there", "elsewhere")
        }
        found = [repeating.gradient(values, batch, KEY, regular=name) for name, values in points.items()]
        for values, blocks in zip(points.values(), found, strict=True):  # both are there, as a query combines them
            same(_rows(plain.gradient(values, batch, KEY)), _rows(blocks))
    assert repeating.refused is None
    assert repeating.replays > 15


def _rows(blocks: Sequence[Any]) -> list[torch.Tensor]:
    return [block.rows().clone() for block in blocks]


def test_another_form_mode_or_buffer_is_another_pass() -> None:
    draw = torch.Generator().manual_seed(3)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    whole = batch_of(vectors, draw)

    def changed(number: int) -> Any:
        if number == 20:
            plain.model.eval()
        if number == 40:
            plain.model.shift = torch.tensor([2.0], device=DEVICE)
        return tuple(t[:3] for t in whole) if number >= 60 else whole

    for number in range(80):
        batch = changed(number)
        same(plain(batch, number), repeating(batch, number))
    assert repeating.refused is None
    assert len(repeating.gradient.repeated.passes.kept.values()) == 4  # type: ignore[union-attr]


class Counting(nn.Module):
    """What it computes depends on a number that Python changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.temperature


def told(repeating: Side, plain: Side, batches: int, change: Callable[[int], None]) -> list[str]:
    """Compare some batches, the last with the model's own gradients; return what was warned of."""
    draw = torch.Generator().manual_seed(4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(batches):
            change(number)
            batch = batch_of(vectors, draw)
            results = plain(batch, number), repeating(batch, number)
        same(*results)
    return [str(warning.message) for warning in found if warning.category is SpeedWarning]


def test_where_python_decides_something_else_graphs_are_given_up() -> None:
    plain, repeating = sides(Counting, batch_of(vectors, torch.Generator().manual_seed(4)))

    def change(number: int) -> None:
        plain.model.temperature = 1.0 if number < 10 else 0.5

    (sentence,) = told(repeating, plain, 40, change)
    assert "a replay's gradients are not the model's" in sentence
    assert repeating.replays == 0  # given back


class Outside(nn.Module):
    """It reads a tensor that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.held = [torch.ones(5, device=DEVICE)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.held[0])


class Checkpointed(nn.Module):
    """The backward pass draws the forward pass's mask again, from a state that the host has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.first(y)), 0.5)

        return self.last(checkpoint(part, x, use_reentrant=False))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Outside, "neither a parameter, a buffer nor the batch's"),
        (Checkpointed, "a replay's gradients are not the model's"),
    ],
)
def test_a_model_that_cannot_be_captured_runs_as_without(make: Callable[[], nn.Module], why: str) -> None:
    plain, repeating = sides(make, batch_of(vectors, torch.Generator().manual_seed(4)))
    (sentence,) = told(repeating, plain, 9, lambda _: None)
    assert sentence.startswith("cuda_graphs='model': the model's passes are not repeated (")
    assert why in sentence or not launch.INTERPRETED  # a device tells of other things first


# What a work may not do, each of a function of (inputs, read).
def by_value(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * float(inputs[0].sum())


def by_list(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * inputs[0].tolist()[0]


def by_array(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * inputs[0].cpu().detach().numpy()[0].item()


def by_address(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * (inputs[0].data_ptr() > 0)


def by_constant(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * torch.tensor(2.0, device=DEVICE)


def by_shape(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0].nonzero()


def by_sparse(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0].reshape(1, -1).to_sparse().to_dense()


@pytest.mark.parametrize("work", [by_value, by_list, by_array, by_address, by_constant, by_shape, by_sparse])
def test_what_a_graph_cannot_repeat_is_refused(work: Callable[..., torch.Tensor]) -> None:
    read = torch.ones(3, device=DEVICE)
    one, inputs = Passes().of("key", [read.clone()], [read]), [read.clone()]
    one.capture(lambda own: work(own, read), inputs, [read])
    assert one.refused
    assert not one.captured


def test_a_graph_reads_what_it_was_given_and_draws_anew() -> None:
    read = torch.arange(3.0, device=DEVICE)

    def work(own: list[torch.Tensor]) -> torch.Tensor:
        own[0] += 1  # written to its own memory only
        mask = torch.bernoulli(torch.full((3,), 0.5, device=DEVICE))
        return torch.stack([own[0] * read, mask, read.view(1, 3).expand(2, 3)[1]])

    one, results = Passes().of("key", [read], [read]), []
    given = torch.zeros(3, device=DEVICE)
    for number in range(20):
        torch.manual_seed(number)
        expected = work([given.clone()])
        torch.manual_seed(number)
        if not one.captured:
            one.capture(work, [given], [read])
            torch.manual_seed(number)
        found = one.replay([given])
        assert torch.equal(found, expected)
        results.append(found.data_ptr())
        given += 1
        read *= 1.5
    assert one.replays == 20
    assert len(set(results)) == 1
    assert torch.equal(given, torch.full((3,), 20.0, device=DEVICE))


@pytest.mark.skipif(not launch.INTERPRETED, reason="on a device it is what the other tests run")
def test_on_a_device_the_work_itself_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there, but for the graph, in whose place the operations are recorded."""
    tensors, read = [torch.zeros(3)], torch.arange(3.0)
    captures = []

    def captured(work: Callable[[], Any], device: torch.device) -> Any:
        captures.append(device)
        with passes.Recording() as record:
            result = work()
        kept.append(record)
        return repeated(record.calls, device), result

    kept: list[Any] = []
    monkeypatch.setattr(passes, "launch", SimpleNamespace(INTERPRETED=False, current_stream=lambda _: 0))
    monkeypatch.setattr(passes, "captured", captured)
    one, work = Passes().of("key", tensors, [read]), lambda own: own[0] * read
    one.capture(work, tensors, [read])
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(one.replay([torch.full((3,), value)]), value * read)
    assert captures == [torch.device("cpu")]
    one = Passes().of("foreign", tensors, [])
    one.capture(work, tensors, [])
    assert "neither a parameter" in one.refused
    assert not one.captured

    def fails(work: Callable[[], Any], device: torch.device) -> Any:
        raise RuntimeError("no capture\nof this")

    monkeypatch.setattr(passes, "captured", fails)
    one = Passes().of("other", tensors, [read])
    one.capture(work, [torch.ones(3)], [read])
    assert one.refused == "no capture"
    assert not one.captured


def made(change: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, t: t) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    values = [change(k, torch.randn(4, 5, generator=draw)) for k in range(6)]
    return [*map(Rows, values[:4]), Linear((values[4][:, None],), (values[5][:, None],), (1.0,))]


def only(number: int, factor: float) -> list[Any]:
    return made(lambda k, t: t * factor if k == number else t)


@pytest.mark.parametrize("number", range(6))
def test_alike_allows_for_rounding_and_for_what_the_model_varies_by_itself(number: int) -> None:
    wanted = made()
    assert alike(only(number, 1 + 1e-6), wanted, wanted)
    assert not alike(only(number, 1.01), wanted, wanted)
    assert alike(only(number, 1.01), wanted, only(number, 0.995))
    assert not alike(only(number, 1.1), wanted, only(number, 0.995))
    assert not alike(only(number, 1.01), wanted, only((number + 1) % 6, 0.9))


def test_alike_sees_other_kinds_and_values_that_are_not_finite() -> None:
    wanted = made()
    assert not alike(made(lambda _, t: t.double()), wanted, wanted)
    assert not alike(wanted[1:], wanted, wanted)
    missing = made(lambda k, t: torch.full_like(t, torch.nan) if k % 2 else t)
    assert alike(missing, missing, missing)
    assert not alike(missing, wanted, wanted)
    half = made(lambda _, t: t.bfloat16())
    assert alike(made(lambda _, t: (t * 1.002).bfloat16()), half, half)
    assert not alike(made(lambda _, t: (t * 1.5).bfloat16()), half, half)
    tokens = [Embedding((torch.tensor([[1, 2]]),), (torch.ones(1, 2, 3),), (1.0,), 5)]
    others = [Embedding((torch.tensor([[1, 3]]),), (torch.ones(1, 2, 3),), (1.0,), 5)]
    assert alike(tokens, tokens, tokens)
    assert not alike(tokens, others, others)


COMMON: dict[str, Any] = {"noise_multiplier": 0.7, "batch_size": 8, "max_grad_norm": 0.2}
USERS = [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5]  # more rows than a micro-batch's


def run(
    graphs: Any, sampling: Any, method: Any, size: int | None = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = Shifted().to(DEVICE, dtype)
    data = torch.randn(24, 5).to(dtype), torch.arange(24) % 3
    with dpcore.use_backend("triton"):
        given: dict[str, Any] = {"microbatch_size": size, "steps": 6} | options
        return make_private(
            model,
            data,
            method,
            sampling=sampling,
            key=KEY,
            exact_key=True,
            target_delta=1e-5,
            cuda_graphs=graphs,
            **given,
        )


def trained(graphs: Any, *args: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    private = run(graphs, *args, **options)
    while private.steps_taken < private.plan.steps:
        for batch in private.loader:
            private.step(batch)
    return [value.cpu() for value in private.output_state_dict().values()], private._engine.gradient.repeated


RUNS: dict[str, tuple[Any, Any, int, torch.dtype]] = {  # sampler, method, micro-batch, dtype
    "two points": (
        FixedOrderSampler(dataset_size=24, batch_size=8),
        dpcore.methods.disk(lr=0.3, base="momentum", **COMMON), 4, torch.float32,
    ),
    "users": (
        UserSampler(FixedOrderSampler(dataset_size=6, batch_size=2), USERS, 6),
        dpcore.methods.dp_sgd(lr=0.3, **{**COMMON, "batch_size": 2}), 1, torch.float32,
    ),
    "16 bits": (
        FixedOrderSampler(dataset_size=24, batch_size=8), dpcore.methods.dp_adam(lr=0.05, **COMMON), 4, torch.bfloat16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", chosen(["two points", "users"], list(RUNS)))
def test_a_training_run_is_that_without_graphs(name: str) -> None:
    (plain, _), (found, repeating) = (trained(graphs, *RUNS[name]) for graphs in (False, "model"))
    same([value.float() for value in plain], [value.float() for value in found])
    assert repeating.refused is None
    assert sum(one.replays for one in repeating.passes.kept.values()) > 0


@pytest.mark.skipif(not launch.INTERPRETED, reason="what a step takes of memory is another amount on a device")
def test_captured_passes_count_against_the_memory_and_are_given_back_where_it_is_short() -> None:
    sampling, method, *_ = RUNS["two points"]
    options: dict[str, Any] = {"size": None, "max_memory": 3_000_000}
    few, many = (run(graphs, sampling, method, **options) for graphs in ("model", True))
    assert 1 <= few.microbatch_size <= many.microbatch_size / 2
    engine = run("model", sampling, method)._engine
    engine.gradient.repeated.passes.of("key", [torch.ones(1, device=DEVICE)], [])
    with pytest.warns(SpeedWarning, match="out of memory"):
        engine._halve()
    assert engine.gradient.repeated.passes.kept.values() == []


def test_another_word_than_model_is_refused() -> None:
    sampling, method, *_ = RUNS["two points"]
    refused(ArgumentError, "cuda_graphs='all': must be False, True, or 'model'", run, "all", sampling, method)
