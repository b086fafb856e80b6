"""Per-example gradients equal a loop over examples with autograd, by every way and at several points."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling import FixedOrderSampler, UserSampler
from dpcore.torch.gradients.per_example import WAYS, PerExampleGradient
from dpcore.torch.model.models import build
from tests.depth import chosen
from tests.unit.torch.gradients.one_by_one import alone
from tests.unit.torch.models import Called
from tests.unit.torch_runs import DATA, METHODS, Tied, finish, model, public_batch, start, values


def repeated() -> nn.Module:
    """One layer under two names, and a weight of it tied to another layer."""
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 3), nn.Linear(3, 2))
    model[3].weight = layer.weight
    return model


def two_inputs() -> nn.Module:
    return Called(lambda m, left, right: m.a(left) * m.b(right), a=nn.Linear(3, 2), b=nn.Linear(5, 2))


def labels(n: int, classes: int) -> torch.Tensor:
    return torch.arange(n) % classes


# fmt: off
CASES = {
    "cnn-5": lambda: (build("cnn-5", (1, 8, 8), 10), F.cross_entropy, (torch.randn(4, 1, 8, 8), labels(4, 10))),
    "mlp float64": lambda: (
        build("mlp", (6,), 3).double(), F.cross_entropy, (torch.randn(5, 6, dtype=torch.float64), labels(5, 3))),
    "tied": lambda: (Tied(), F.cross_entropy, (torch.randint(0, 9, (4, 3)), labels(4, 9))),
    "tied, table and rows": lambda: (
        Tied(300, 8), F.cross_entropy, (torch.randint(0, 300, (4, 30)), labels(4, 300)),
    ),
    "a layer twice": lambda: (repeated(), F.cross_entropy, (torch.randn(4, 3), labels(4, 2))),
    "two inputs": lambda: (two_inputs(), F.mse_loss, ((torch.randn(4, 3), torch.randn(4, 5)), torch.randn(4, 2))),
    "keywords": lambda: (
        two_inputs(), lambda out: out.square().sum(), {"right": torch.randn(4, 5), "left": torch.randn(4, 3)}),
    "frozen layer": lambda: (
        nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 2)),
        F.cross_entropy, (torch.randn(4, 3), labels(4, 2))),
    "unused parameter": lambda: (
        nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}),
        F.mse_loss, (torch.randn(4, 3), torch.randn(4, 2)))
}
# fmt: on


def rows(gradient: PerExampleGradient, *call: Any, **options: Any) -> list[torch.Tensor]:
    """The blocks as explicit gradients."""
    shapes = [value.shape for value in gradient.parameters()]
    blocks = gradient(*call, **options)
    return [block.rows().reshape(-1, *shape) for block, shape in zip(blocks, shapes, strict=True)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_equals_the_loop_over_examples(make: Callable, way: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = make()
    if isinstance(model, nn.ModuleDict):
        model.forward = model["used"].forward  # type: ignore[method-assign]
    gradient = PerExampleGradient(model, loss, way)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    got = rows(gradient, [value.clone() for value in gradient.parameters()], batch)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    want = alone(model, loss, batch)
    assert len(got) == len(want) == len(gradient.names)
    assert not isinstance(model, Tied) or gradient.names == ("embed.weight",)
    for ours, theirs, p in zip(got, want, gradient.parameters(), strict=True):
        assert (ours.shape, ours.dtype) == ((len(theirs), *p.shape), p.dtype)
        torch.testing.assert_close(ours.flatten(1).double(), theirs, rtol=1e-4, atol=1e-6)
    assert max(t.abs().max().item() for t in want) > 1e-3
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_same_seed_same_dropout_masks_and_examples_differ(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 200), nn.Dropout(0.5))
    gradient = PerExampleGradient(model, lambda out: out.sum(), way)
    batch = torch.ones(3, 1)
    state = torch.get_rng_state()
    at = gradient.parameters()
    first = rows(gradient, at, batch, seed=bytes([1]))[1]
    same = rows(gradient, [p * 2 for p in at], batch, seed=bytes([1]))[1]
    other = rows(gradient, at, batch, seed=bytes([2]))[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert not torch.equal(first[0], first[1])
    model.eval()
    assert torch.equal(rows(gradient, at, batch)[1], torch.ones(3, 200))


@pytest.mark.parametrize("way", WAYS)
def test_an_error_on_private_data_quotes_nothing_of_it(way: str) -> None:
    gradient = PerExampleGradient(nn.Linear(3, 2), F.cross_entropy, way)
    with pytest.raises(ArgumentError, match=r"check labels.*may hold private values") as caught:
        gradient(gradient.parameters(), (torch.randn(4, 3), torch.tensor([0, 1, 1, 73])))
    assert "73" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_no_error_of_a_models_own_code_leaves_a_step_on_private_data() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] and float(x.detach()[0, 0]) > 100:
                raise OSError(f"no record of patient {float(x.detach()[0, 0]):.0f}")
            return super().forward(x)

    gradient = PerExampleGradient(Reads(3, 2), F.cross_entropy, "one-by-one")
    with pytest.raises(ArgumentError, match="may hold private values") as caught:
        gradient(gradient.parameters(), (torch.full((2, 3), 4414.0), torch.tensor([0, 1])))
    assert "4414" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_loss_must_be_one_number() -> None:
    gradient = PerExampleGradient(nn.Linear(3, 2), lambda out: out, "one-by-one")
    with pytest.raises(ArgumentError, match="one number"):
        gradient(gradient.parameters(), torch.randn(2, 3))


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentTypeError, match="loss="):
        PerExampleGradient(nn.Linear(2, 2), "mse")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="requires gradients"):
        PerExampleGradient(nn.Linear(2, 2).requires_grad_(False), F.cross_entropy)


@pytest.mark.parametrize("name", ["pmlf", "accelerated_srgd"])
def test_all_points_of_an_example_see_the_same_dropout_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(model(), METHODS[name](8), sampling="fixed_order", microbatch_size=4)
    seeds: list[bytes] = []
    call = type(run._engine.gradient).__call__

    def told(self: Any, point: Any, batch: Any, seed: bytes, **more: Any) -> list[torch.Tensor]:
        seeds.append(seed)
        return call(self, point, batch, seed, **more)

    monkeypatch.setattr(type(run._engine.gradient), "__call__", told)
    earlier: set[bytes] = set()
    for batch in run.loader:
        earlier.update(seeds)
        seeds.clear()
        points = len(run._engine.mechanism.points())
        run.step(batch)
        micro = -(-len(batch[0]) // 4)
        assert len(seeds) == points * micro
        assert len(set(seeds)) == micro
        assert seeds == [seed for seed in dict.fromkeys(seeds) for _ in range(points)]
        assert earlier.isdisjoint(seeds)


def test_the_public_gradient_is_the_mean_by_autograd_without_a_clip() -> None:
    method = dpcore.methods.dp_adam(
        lr=0.1, betas=(0.0, 0.0), eps=1e-3, variant="side_information", noise_multiplier=0.0, batch_size=8,
        max_grad_norm=1e6
    )  # fmt: skip
    run = start(model().double(), method, data=(DATA[0].double(), DATA[1]), sampling="fixed_order", microbatch_size=3)
    batch = next(iter(run.loader))
    before = values(run.model)
    inputs, targets = 100 * torch.ones(7, 5, dtype=torch.float64), torch.arange(7) % 3

    def mean(x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(run.model(x), y, reduction="sum") / count
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.model.parameters()))])

    public, private = mean(inputs, targets, 7), mean(*batch, 8)
    run.step(batch, public=(inputs, targets))
    torch.testing.assert_close(values(run.model), before - 0.1 * private / (public.abs() + 1e-3), rtol=1e-3, atol=1e-5)
    assert any("declares public" in caveat for caveat in run.statement().caveats)


PUBLIC_REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "missing": ("adam public", lambda: None, "public=None: must be a batch of public data"),
    "not wanted": ("adam", lambda: DATA, "public: must be None for this method"),
    "empty": ("adam public", lambda: (DATA[0][:0], DATA[1][:0]), "at least one example"),
    "the private data": ("adam public", lambda: (DATA[0][:2], DATA[1][:2]), "shares memory with the private data"),
    "uneven": ("adam public", lambda: (DATA[0][:2], DATA[1][:3]), "disagree about the number"),
}


@pytest.mark.parametrize("name", PUBLIC_REFUSED)
def test_public_batches_refused(name: str) -> None:
    method, public, words = PUBLIC_REFUSED[name]
    run = start(model(), METHODS[method](8))
    batch = next(iter(run.loader))
    with pytest.raises(ArgumentError, match=words):
        run.step(batch, public())
    assert run.steps_taken == 0
    run.step(batch, public_batch(run))


TOKENS = torch.arange(240).reshape(30, 8) * 7 % 13, torch.arange(30) % 13
SOME = ("adaptive clip", "per layer", "disk", "srg_memf", "adam scaled")  # norms, groups, two points, scales


class Reader(nn.Module):
    """An embedding tied to the head, positions, attention, normalization and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(13, 6), nn.Parameter(0.1 * torch.randn(1, 8, 6))
        self.mix = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 13)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(tokens) + self.places)
        return self.head(self.twice(torch.tanh(self.twice(x))).mean(1))


def outcome(method: str, batch_size: int = 8, **options: Any) -> tuple[torch.Tensor, str]:
    net = Reader()
    run = start(net, METHODS[method](batch_size), data=TOKENS, loss=F.cross_entropy, epochs=None, steps=3, **options)
    finish(run)
    return values(net), run._engine.gradient.way


@pytest.mark.parametrize("method", SOME)
def test_ways_and_splits_agree(method: str) -> None:
    order: dict[str, Any] = {"sampling": "fixed_order" if method == "srg_memf" else "shuffled"}
    wanted, way = outcome(method, gradients="one-by-one", microbatch_size=8, **order)
    assert way == "one-by-one"
    assert not torch.allclose(wanted, values(Reader()), atol=1e-3)
    splits = [("pairs", 3)], [("pairs", 1), ("pairs", 3), ("pairs", 8), ("one-by-one", 3)]
    for kind, size in chosen(*splits):
        found, way = outcome(method, gradients=kind, microbatch_size=size, **order)
        assert way == kind
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("size", [1, 8])
def test_users_are_summed_before_the_clip_by_every_way(size: int) -> None:
    sampler = UserSampler(FixedOrderSampler(dataset_size=10, batch_size=4), [i // 3 for i in range(30)], 3)
    found = [outcome("disk", 4, gradients=way, microbatch_size=size, sampling=sampler)[0] for way in WAYS]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=2e-4, atol=2e-4)
