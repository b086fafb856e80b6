"""The proof on a model's graph: what mixes examples is refused, the rest gives autograd's own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import dpcore
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.torch import make_private
from dpcore.torch.gradients import axis, proved
from dpcore.torch.gradients.capture import capture
from dpcore.torch.gradients.errors import Mixes, NotCaptured, NotProved
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from dpcore.torch.gradients.proved import Program
from dpcore.torch.gradients.replaced import REPLACED

CLASSES = 5


def loss_of(output: Any, targets: Any) -> torch.Tensor:
    return F.cross_entropy(output, *targets)


def program(model: nn.Module, batch: Any) -> Program:
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    return Program(capture(model, names, loss_of, batch))


class Two(nn.Module):
    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(8, 16), nn.Linear(16, CLASSES), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.middle(self.first(x))))


def dropblock(h: torch.Tensor) -> torch.Tensor:
    kept = (torch.rand_like(h) > 0.1).float()
    return h * kept / kept.mean()


def mixup(h: torch.Tensor) -> torch.Tensor:
    lam = torch.rand(())
    return lam * h + (1 - lam) * h.flip(0)


def with_dropout(h: torch.Tensor) -> torch.Tensor:
    h = F.dropout(h, 0.1)
    return 0.6 * h + 0.4 * h.flip(0)


class MeanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient + gradient.sum(0) / 100


MIXING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mixup, drawn": mixup,
    "fixed weights and dropout": with_dropout,
    "from a size on": lambda h: h - h.mean(0) if len(h) >= 8 else h,
    "the largest value": lambda h: h / h.abs().max(),
    "DropBlock": dropblock,
    "reversed": lambda h: h.flip(0),
    "rolled": lambda h: h.roll(1, 0),
    "sorted": lambda h: h.sort(0)[0],
    "permuted": lambda h: h[torch.randperm(len(h))],
    "the first one": lambda h: h + h[0],
    "the last one": lambda h: h + h[-1:],
    "running sum": lambda h: h.cumsum(0),
    "softmax over the batch": lambda h: h.softmax(0),
    "similarity": lambda h: (h @ h.T).softmax(1) @ h,
    "batched similarity": lambda h: torch.bmm(h[None], h.T[None])[0].sum(1, keepdim=True) + h,
    "distances": lambda h: h + torch.cdist(h, h).mean(1, keepdim=True),
    "normalized over the batch": lambda h: F.batch_norm(h, None, None, training=True),
    "layer norm over all": lambda h: F.layer_norm(h, h.shape),
    "view across": lambda h: h.reshape(-1, len(h)).T.reshape(h.shape),
    "transposed and flattened": lambda h: h.T.reshape(len(h), -1),
    "the number of examples": lambda h: h / len(h),
    "their places": lambda h: h * torch.arange(len(h))[:, None],
    "a sum of ones": lambda h: h * torch.ones(len(h)).sum(),
    "joined": lambda h: torch.cat([h[1:], h[:1]]),
    "one of another": lambda h: h.gather(0, torch.zeros_like(h, dtype=torch.int64)),
    "scattered": lambda h: h + torch.zeros(16).index_add(0, (h[:, 0] > 0).long(), h[:, 0])[0],
    "chosen rows": lambda h: h.index_select(0, torch.zeros(len(h), dtype=torch.int64)),
    "convolved over the batch": lambda h: F.conv1d(h.T[None], torch.ones(16, 16, 1) / 16)[0].T + h.mean(0),
    "pooled over the batch": lambda h: h + F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
    "its variance": lambda h: h / (1 + h.var(0)),
    "its norm": lambda h: h / h.norm(),
    "any": lambda h: h * (h > 3).any(),
    "top values": lambda h: h + h.topk(1, 0)[0],
    "backward alone": MeanBackward.apply,
    "repeated": lambda h: h.repeat(2, 1)[: len(h)] + h.repeat(2, 1).view(2, *h.shape).flip(1)[0],
    "unbound": lambda h: torch.stack(h.unbind(0)[::-1]),
}


def mixing_model(name: str) -> Two:
    torch.manual_seed(0)
    return Two(MIXING[name])


@pytest.mark.parametrize("name", MIXING)
def test_there_is_no_proof_for_a_model_that_mixes(name: str) -> None:
    with pytest.raises(NotProved) as refused:
        program(mixing_model(name), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))
    assert "test_proof.py, line" in str(refused.value) or isinstance(refused.value, NotCaptured)


@pytest.mark.parametrize("name", MIXING)
def test_removal_and_replacement_move_the_clipped_sum_by_one_and_two_clip_norms(name: str) -> None:
    """Whatever way is taken instead, if any."""
    model, n = mixing_model(name), 9
    gradient = PerExampleGradient(model, F.cross_entropy)
    x, y = 3 * torch.randn(n, 8), torch.arange(n) % CLASSES
    try:
        try_out(gradient, (x, y))
    except ArgumentError:
        return
    assert gradient.way != "pairs"

    def clipped(batch: Any) -> torch.Tensor:
        rows = torch.cat([b.rows() for b in gradient(gradient.parameters(), batch, bytes([7]) * 32, synthetic=True)], 1)
        return rows * (1 / rows.norm(dim=1, keepdim=True)).clamp(max=1)

    whole = clipped((x, y)).sum(0)
    for i in range(n):
        other = x.clone()
        other[i] = -5 * x[i]
        assert (clipped((other, y)).sum(0) - whole).norm() <= 2.0001
    if not gradient.draws:
        for i in range(n):
            kept = [k for k in range(n) if k != i]
            assert (clipped((x[kept], y[kept])).sum(0) - whole).norm() <= 1.0001


@pytest.mark.parametrize("name", ["mixup, drawn", "DropBlock", "from a size on", "backward alone"])
def test_pairs_means_proved_or_an_error(name: str) -> None:
    data = torch.randn(20, 8), torch.zeros(20, dtype=torch.int64)
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=8)
    with pytest.raises(ArgumentError, match=r"runs over the examples|combines|a value decides"):
        make_private(mixing_model(name), data, method, steps=2, gradients="pairs")


# ------------------------------------------------------------------------------------------------ right gradients


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **more: Any) -> None:
        super().__init__()
        self.layer = kind(4, 6, **more)
        self.first = more.get("batch_first", False)
        self.last = nn.Linear(6 * (1 + more.get("bidirectional", False)), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x)[0][:, -1] if self.first else self.layer(x.transpose(0, 1))[0][-1])


class Encoder(nn.Module):
    def __init__(self, batch_first: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.before, self.first, self.reentrant = nn.Linear(8, 8), batch_first, reentrant
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x if self.first else x.transpose(0, 1))
        h = self.layer(h) if self.reentrant is None else checkpoint(self.layer, h, use_reentrant=self.reentrant)
        return self.last(h[:, -1] if self.first else h[-1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(CLASSES, 12, padding_idx=0), nn.Embedding(9, 12)
        self.hidden, self.head = nn.Linear(12, 12), nn.Linear(12, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(self.table(tokens) + self.places(torch.arange(9)[None])))
        return self.head(h).mean(1)


class Derived(nn.Module):
    """Weight normalization, a token that is expanded, a matrix used twice and in parts, one token of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.token, self.matrix = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(12, 24))
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.last, self.table = nn.Linear(12, CLASSES), nn.Parameter(torch.randn(7, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        h = self.normed(h) + self.table[torch.arange(h.shape[1]) % 7]
        query, key = (h @ self.matrix).chunk(2, -1)
        h = torch.einsum("btd,de->bte", self.attention(query, key, key)[0], self.matrix[:, :12])
        return self.last(h[torch.arange(len(x)), torch.full((len(x),), 3)])


def images(*layers: nn.Module, shape: tuple[int, ...] = (2, 9, 9)) -> nn.Module:
    features = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(features, nn.Linear(features(torch.zeros(1, *shape)).shape[1], CLASSES))


def tokens(n: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (n, 9))


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda n: torch.randn(n, *shape)


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(inplace=True), nn.Linear(9, CLASSES)), rows(8)),
    "cnn": (lambda: images(nn.Conv2d(2, 4, 3, 2), nn.GroupNorm(2, 4), nn.MaxPool2d(3, 1, 1)), rows(2, 9, 9)),
    "grouped and dilated": (lambda: images(nn.Conv2d(2, 4, 3, groups=2, dilation=2, padding=2)), rows(2, 9, 9)),
    "transposed": (lambda: images(nn.ConvTranspose2d(2, 3, 3, 2), nn.Tanh()), rows(2, 9, 9)),
    "one dimension": (lambda: images(nn.Conv1d(2, 4, 3), nn.GELU(), nn.AvgPool1d(2), shape=(2, 9)), rows(2, 9)),
    "instance norm": (lambda: images(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True)), rows(2, 9, 9)),
    "lstm": (lambda: Recurrent(nn.LSTM, batch_first=True, num_layers=2, bidirectional=True), rows(7, 4)),
    "lstm, time first": (lambda: Recurrent(nn.LSTM), rows(7, 4)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2), rows(7, 4)),
    "rnn": (lambda: Recurrent(nn.RNN, batch_first=True), rows(7, 4)),
    "encoder": (Encoder, rows(6, 8)),
    "encoder, time first": (lambda: Encoder(False), rows(6, 8)),
    "checkpoint": (lambda: Encoder(True, False), rows(6, 8)),
    "older checkpoint": (lambda: Encoder(True, True), rows(6, 8)),
    "tied": (Tied, tokens),
    "derived": (Derived, rows(6, 12)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_autograds_for_any_number_of_examples(name: str) -> None:
    torch.manual_seed(1)
    make, inputs = RIGHT[name]
    model = make()
    found = program(model, (inputs(2), torch.zeros(2, dtype=torch.int64)))
    named = dict(model.named_parameters())
    point, held = [p.detach() for p in named.values()], [dict(model.named_buffers())[key] for key in found.held_names]
    for n in (1, 2, 7):
        x, y = inputs(n), torch.arange(n) % CLASSES
        blocks = [block.rows() for block in found(point, held, [x, y])]
        for i in range(n):
            model.zero_grad()
            loss_of(model(x[i : i + 1]), (y[i : i + 1],)).backward()
            whole = torch.cat([p.grad.flatten() for p in named.values()]).norm()
            for key, block in zip(named, blocks, strict=True):
                assert (block[i] - named[key].grad.flatten()).norm() <= 1e-5 * whole, key


@pytest.mark.parametrize("name", RIGHT)
def test_another_example_leaves_every_row_with_the_same_bits(name: str) -> None:
    torch.manual_seed(2)
    make, inputs = RIGHT[name]
    model = make()
    found = program(model, (inputs(2), torch.zeros(2, dtype=torch.int64)))
    buffers = dict(model.named_buffers())
    point, held = [p.detach() for p in model.parameters()], [buffers[key] for key in found.held_names]
    x, y = inputs(6), torch.arange(6) % CLASSES
    before = [block.rows() for block in found(point, held, [x, y])]
    other = x.clone()
    other[2] = inputs(1)[0]
    after = [block.rows() for block in found(point, held, [other, y])]
    for one, two in zip(before, after, strict=True):
        assert torch.equal(one[[0, 1, 3, 4, 5]], two[[0, 1, 3, 4, 5]])


def test_the_masks_of_a_checkpoint_are_the_forward_passs_own() -> None:
    class Dropping(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.first, self.last, self.again = nn.Linear(8, 16), nn.Linear(16, CLASSES), again

        def part(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.first(x)), 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.part, x, use_reentrant=False) if self.again else self.part(x))

    batch = torch.randn(4, 8), torch.arange(4)
    found = []
    for again in (False, True):
        model = Dropping(again)
        one = program(model, batch)
        assert one.draws
        torch.manual_seed(4)
        found.append([b.rows() for b in one([p.detach() for p in model.parameters()], [], list(batch))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------------ recurrent layers


class Through(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return REPLACED.get(function, function)(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)])
@pytest.mark.parametrize(
    "more", [{}, {"batch_first": True, "num_layers": 2}, {"bidirectional": True, "num_layers": 2}, {"bias": False}]
)
def test_recurrent_layers_are_torchs_own(kind: Any, more: dict[str, Any]) -> None:
    torch.manual_seed(5)
    layer = kind(3, 4, **more).double()
    x = torch.randn(5, 6, 3, dtype=torch.float64, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        output, states = layer(x)
        total = output.sin().sum() + sum(
            (1.3 * s).cos().sum() for s in (states if isinstance(states, tuple) else [states])
        )
        return torch.autograd.grad(total, [x, *layer.parameters()])

    wanted = gradients()
    with Through():
        found = gradients()
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_an_lstm_is_trained_and_is_as_it_was_for_plain_use() -> None:
    model = Recurrent(nn.LSTM, batch_first=True)
    data = torch.randn(40, 7, 4), torch.arange(40) % CLASSES
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=8)
    private = make_private(model, data, method, steps=3)
    for batch in private.loader:
        private.step(batch)
    assert all(flat is own for flat, own in zip(model.layer._flat_weights, model.layer.parameters(), strict=True))
    assert model(data[0]).isfinite().all()


# ------------------------------------------------------------------------------------------------ runs


def start(model: nn.Module, **more: Any) -> Any:
    data = torch.randn(40, 8), torch.arange(40) % CLASSES
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=8)
    return make_private(model, data, method, steps=20, sampling="fixed-order", **more)


def test_a_hook_on_a_parameter_is_refused_by_name() -> None:
    model = Two(torch.tanh)
    model.last.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ArgumentError, match=r"parameter 'last\.weight' has a hook on its gradient"):
        start(model)


def test_autocast_around_the_step_alone_is_refused() -> None:
    private = start(Two(torch.tanh))
    batch = next(iter(private.loader))
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ArgumentError, match=r"autocast to bfloat16 around private\.step, off around make_private"),
    ):
        private.step(batch)
    private.step(batch)


def test_autocast_around_both_is_a_part_of_the_graph() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        private = start(Two(torch.tanh))
        (found,) = private._engine.gradient.proved.programs.values()
        assert any(
            node.kwargs.get("dtype") is torch.bfloat16
            for node in found._module.graph.nodes
            if node.op == "call_function"
        )
        private.step(next(iter(private.loader)))


def test_an_attribute_that_changes_is_another_graph_and_a_global_is_noticed() -> None:
    model = Two(torch.tanh)
    model.middle = lambda h: h * model.scale
    model.scale = 1.0
    private = start(model)
    for number, batch in enumerate(private.loader):
        model.scale = 1.0 + (number > 1)
        private.step(batch)
        if number == 2:
            break
    assert len(private._engine.gradient.proved.programs) == 2

    factor = [1.0]
    private = start(Two(lambda h: h * factor[0]))
    factor[0] = 2.0
    batches = iter(private.loader)
    for _ in range(3):
        private.step(next(batches))
    batch = next(batches)
    with pytest.raises(ArgumentError, match="computes something else than when it was last looked at"):
        private.step(batch)
    assert private.steps_taken == 3


def test_equal_models_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def noted(*given: Any) -> Any:
        captured.append(1)
        return capture(*given)

    monkeypatch.setattr(proved, "capture", noted)

    def model(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, CLASSES))

    for _ in range(3):
        start(model(23))
    assert len(captured) == 1
    start(model(24))
    assert len(captured) == 2


def test_a_value_that_decides_leads_to_another_way_which_names_the_line() -> None:
    with pytest.warns(SpeedWarning, match=r"takes 'one-by-one'.*a value decides.*test_proof\.py, line"):
        start(Two(lambda h: h if torch.rand(()) < 2 else -h))


def test_rules_are_for_operations_that_there_are() -> None:
    names = {name for name in axis.RULES if "::" not in name}
    assert len(names) > 150
    known = set(dir(torch.ops.aten))
    for name in ("view", "mm", "bmm", "sum", "index", "convolution_backward", "embedding_dense_backward"):
        assert name in names & known


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above fail where a rule is wrong: flip with the rule of a pointwise operation passes the proof."""
    batch = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(Mixes, match="flip runs over the examples"):
        program(mixing_model("reversed"), batch)
    monkeypatch.setitem(axis.RULES, "flip", axis.RULES["_to_copy"])
    program(mixing_model("reversed"), batch)
