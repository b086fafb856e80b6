"""A model's passes that are replayed: the gradients of every batch are those of the model's graph itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpcore_triton import launch
from tests.agreement.repeated_models import DEVICE, EXAMPLES, Shifted, batch_of, rows_of, same, sides, told, vectors
from tests.unit.torch_runs import KEY


class Words(nn.Module):
    """Attention, a tied table, and a part that runs again in the backward pass, with its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.table(tokens), use_reentrant=False).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(5, 4, num_layers=2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def tokens(draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 7, (EXAMPLES, 6), generator=draw)


def pictures(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(EXAMPLES, 1, 5, 5, generator=draw)


def sequences(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(EXAMPLES, 6, 5, generator=draw)


def halves(draw: torch.Generator) -> torch.Tensor:
    return vectors(draw).bfloat16()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor]]] = {
    "a buffer and masks": (Shifted, vectors),
    "integers and a tied table": (Words, tokens),
    "images": (images, pictures),
    "an LSTM": (Recurrent, sequences),
    "16 bits": (lambda: Shifted().bfloat16(), halves),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_the_batch_the_parameters_the_buffers_and_the_masks(case: str) -> None:
    make, inputs = CASES[case]
    draw = torch.Generator().manual_seed(1)
    plain, repeating = sides(make, batch_of(inputs, draw))
    for number in range(6):
        batch = batch_of(inputs, draw)
        same(plain(batch, number), repeating(batch, number))
        with torch.no_grad():
            for tensor in (*plain.model.parameters(), *plain.model.buffers()):
                if not tensor.is_sparse:
                    tensor += (0.1 * torch.randn(tensor.shape, generator=draw)).to(tensor)
    assert repeating.repeated.refused is None
    assert repeating.replays == 5  # the first call is as ever


def test_a_displaced_point_is_another_pass_and_its_values_are_handed_over() -> None:
    draw = torch.Generator().manual_seed(2)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    for _ in range(6):
        batch = batch_of(vectors, draw)
        here = plain.gradient.parameters()
        there, elsewhere = ([v + torch.randn(v.shape, generator=draw).to(DEVICE) for v in here] for _ in range(2))
        # Some values displaced and others not, too.
        points = {"here": here, "there": there, "elsewhere": elsewhere, "mixed": [*there[:2], *here[2:]]}
        found = [repeating.gradient(values, batch, KEY, regular=name) for name, values in points.items()]
        for values, blocks in zip(points.values(), found, strict=True):  # all are there, as a query combines them
            same(rows_of(plain.gradient(values, batch, KEY)), rows_of(blocks))
    assert repeating.repeated.refused is None
    assert repeating.replays == 4 * 5


def test_another_form_mode_or_buffer_is_another_pass() -> None:
    draw = torch.Generator().manual_seed(3)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    whole = batch_of(vectors, draw)
    other = torch.tensor([2.0], device=DEVICE)  # both are alive, and lie in two places
    kept = plain.model.shift
    for number in range(24):
        batch = tuple(t[:3] for t in whole) if number % 6 >= 4 else whole
        plain.model.train(number < 12)
        plain.model.shift = other if number % 4 > 1 else kept
        same(plain(batch, number), repeating(batch, number))
    assert repeating.repeated.refused is None
    assert len(repeating.repeated.passes.kept.values()) == 8


def test_a_parameter_that_was_moved_is_read_where_it_is() -> None:
    draw = torch.Generator().manual_seed(6)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    weight = plain.model.layers[0].weight
    kept = weight.data
    for number in range(6):
        if number == 3:
            weight.data = 2 * kept
        batch = batch_of(vectors, draw)
        same(plain(batch, number), repeating(batch, number))
    assert repeating.replays == 4


def test_values_that_lie_elsewhere_in_every_step_are_refused_at_last_and_told_once() -> None:
    plain, repeating = sides(Shifted, batch_of(vectors, torch.Generator().manual_seed(10)))
    buffers = [torch.tensor([float(k)], device=DEVICE) for k in range(40)]

    def change(number: int) -> None:
        plain.model.shift = buffers[number // 2]  # each comes twice, and is captured

    (sentence,) = told(plain, repeating, 80, change)
    assert sentence.startswith("cuda_graphs='model': the model's passes are not repeated (parameters or buffers lie")
    assert repeating.replays == 0  # given back


class Dense(nn.Module):
    """It reads a buffer that is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("edges", torch.eye(5).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.edges.to_dense())


@pytest.mark.parametrize("case", ["sparse", "elsewhere"])
def test_a_graph_with_tensors_of_other_kinds_or_devices_is_refused_and_runs_on(case: str) -> None:
    make = Dense if case == "sparse" else lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    plain, repeating = sides(make, batch_of(vectors, torch.Generator()))
    why = "a tensor is sparse, or of a class of its own"
    if case == "elsewhere":  # as if the model were there
        (program,) = repeating.gradient.proved.programs.values()
        own, program._device = program._device, torch.device("meta")
        why = f"a tensor is on {own}, not on meta"
        assert program.obstacle == why
        program._device = own
    assert told(plain, repeating, 4) == [
        f"cuda_graphs='model': the model's passes are not repeated ({why}); they run as without"
    ]


@pytest.mark.skipif(launch.INTERPRETED, reason="there is one device")
def test_a_number_that_the_host_draws_is_not_repeated() -> None:
    class Scaled(Shifted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.rand(())

    plain, repeating = sides(Scaled, batch_of(vectors, torch.Generator()))
    (sentence,) = told(plain, repeating, 4)
    assert "a tensor is on cpu, not on cuda:0" in sentence
