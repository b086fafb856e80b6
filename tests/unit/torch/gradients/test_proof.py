"""The proof on a model's graph: what mixes examples is refused, the rest gives autograd's own gradients."""

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpcore
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.torch import make_private
from dpcore.torch.gradients import axis
from dpcore.torch.gradients.capture import COUNTS
from dpcore.torch.gradients.errors import Mixes, NotCaptured, NotProved
from tests.unit.torch.gradients import one_by_one
from tests.unit.torch.models import Called

CLASSES = 5
Tensor = torch.Tensor
Middle = Callable[[Tensor, Any], Any]


program = partial(one_by_one.program, loss=F.cross_entropy)


class Two(nn.Module):
    """Two linear layers, a function of the values between them and of the model, and parameters for it."""

    def __init__(self, middle: Middle = lambda h, _: torch.tanh(h)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(8, 16), nn.Linear(16, CLASSES), middle
        self.scale = nn.Parameter(torch.ones(()))
        self.part, self.square = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.middle(self.first(x), self)))


# ------------------------------------------------------------------------------------------- what is refused


def dropblock(h: Tensor, _: Any) -> Tensor:
    kept = (torch.rand_like(h) > 0.1).float()
    return h * kept / kept.mean()


def mixup(h: Tensor, _: Any) -> Tensor:
    share = torch.rand(())
    return share * h + (1 - share) * h.flip(0)


def with_dropout(h: Tensor, _: Any) -> Tensor:
    h = F.dropout(h, 0.1)
    return 0.6 * h + 0.4 * h.flip(0)


def places(h: Tensor) -> Tensor:
    return torch.arange(len(h))


def reseeded(draw: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(0)
    return draw()


def replayed(one: Callable[[], Tensor], two: Callable[[], Tensor]) -> Tensor:
    state = torch.get_rng_state()
    first = one()
    torch.set_rng_state(state)
    return first + two()


class MeanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + gradient.sum(0) / 100


class SumsBackward(torch.autograd.Function):
    """Gives an operation sums over the examples where statistics that all share belong."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (h,) = ctx.saved_tensors
        sums = h.sum(0), h.square().sum(0)
        backward = torch.ops.aten.native_batch_norm_backward
        return backward(gradient, h, None, *sums, None, None, False, 1e-5, [True, False, False])[0]  # type: ignore[no-any-return]


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        return h * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.ones(())


TABLE, SAMPLES = torch.tensor([[0, 1]]), torch.rand(200, 1, 2, generator=torch.Generator().manual_seed(0))


def shuffled(h: Tensor) -> Tensor:
    """Four copies of the examples as the channels of one image: torch counts channels from the left."""
    images = h.repeat(4, 1).t()[:, :, None, None, None]
    return torch.channel_shuffle(images, 2).flatten(1).t().view(4, *h.shape).sum(0)


MIXING: dict[str, Middle] = {
    "mixup, drawn": mixup,
    "fixed weights and dropout": with_dropout,
    "from a size on": lambda h, _: h - h.mean(0) if len(h) >= 8 else h,
    "the largest value": lambda h, _: h / h.abs().max(),
    "DropBlock": dropblock,
    "reversed": lambda h, _: h.flip(0),
    "permuted": lambda h, _: h[torch.randperm(len(h))],
    "the first one": lambda h, _: h + h[0],
    "similarity": lambda h, _: (h @ h.T).softmax(1) @ h,
    "normalized over the batch": lambda h, _: F.batch_norm(h, None, None, training=True),
    "layer norm over all": lambda h, _: F.layer_norm(h, h.shape),
    "view across": lambda h, _: h.reshape(-1, len(h)).T.reshape(h.shape),
    "transposed and flattened": lambda h, _: h.T.reshape(len(h), -1),
    "joined": lambda h, _: torch.cat([h[1:], h[:1]]),
    "one of another": lambda h, _: h.gather(0, torch.zeros_like(h, dtype=torch.int64)),
    "scattered": lambda h, _: h + torch.zeros(16).index_add(0, (h[:, 0] > 0).long(), h[:, 0])[0],
    "chosen rows": lambda h, _: h.index_select(0, torch.zeros(len(h), dtype=torch.int64)),
    "convolved over the batch": lambda h, _: F.conv1d(h.T[None], torch.ones(16, 16, 1) / 16)[0].T + h.mean(0),
    "its norm": lambda h, _: h / h.norm(),
    "any": lambda h, _: h * (h > 3).any(),
    "sums as statistics": lambda h, _: SumsBackward.apply(h),
    "backward alone": lambda h, _: MeanBackward.apply(h),
    "repeated": lambda h, _: h.repeat(2, 1)[: len(h)] + h.repeat(2, 1).view(2, *h.shape).flip(1)[0],
    # The number of examples, and their places.
    "the number of examples": lambda h, _: h / len(h),
    "their places": lambda h, _: h * places(h)[:, None],
    "a sum of ones": lambda h, _: h * torch.ones(len(h)).sum(),
    "last place": lambda h, _: h / (1 + places(h)[-1]),
    "places from 1": lambda h, _: h * torch.arange(1, len(h) + 1).float().max(),
    "scalar_tensor": lambda h, _: h / torch.scalar_tensor(len(h)),
    "filled": lambda h, _: h / torch.full((), 2 * len(h)),
    "a bound": lambda h, _: h.clamp(max=2 * len(h)),
    "a parameter's bound": lambda h, m: h * m.scale.clamp(max=2 * len(h)),
    "a base": lambda h, _: (2 * len(h)) ** (h / 9),
    "rows of a parameter": lambda h, m: h + m.part[: len(h)].mean(0),
    "parts of features": lambda h, _: h.split(len(h), 1)[0],
    "identity matrix": lambda h, _: h / torch.eye(len(h)).sum(),
    "permutation": lambda h, _: h * torch.randperm(len(h)).sum(),
    "indices of a triangle": lambda h, _: h * torch.tril_indices(len(h), len(h)).float().mean(),
    "drawn": lambda h, _: h * torch.normal(0.0, 1.0, (len(h),)).sum(),
    "B+1": lambda h, _: h / (len(h) + 1),
    "B//2": lambda h, _: h / (len(h) // 2),
    "a branch": lambda h, _: 2 * h if len(h) > 64 else h,
    # A part of the batch, at more examples than were captured.
    "the first 100": lambda h, _: h[:100],
    "the last 100": lambda h, _: h[-100:],
    "parts of 100": lambda h, _: h.split(100)[0],
    # Other examples, by what is made of places and values.
    "places, viewed": lambda h, _: h[places(h)[:, None].expand(-1, 3).reshape(3, -1)].mean(0),
    "places, turned": lambda h, _: h[places(h)[:, None].expand(-1, 3).t()].mean(0),
    "places, wrapped": lambda h, _: h[places(h).to(torch.int8).long()],
    "is in": lambda h, _: h * (1 + torch.isin((h[:, 0] * 2).round(), (h[:, 1] * 2).round())[:, None]),
    "bucketize": lambda h, _: h * (1 + torch.bucketize(h[:, 0].detach(), h[:, 1].detach().contiguous())[:, None]),
    "a table of one row": lambda h, _: h.scatter(1, TABLE, 0.0),
    "a table of many rows": lambda h, _: F.pad(
        F.fractional_max_pool2d(h.view(-1, 1, 4, 4), 2, output_size=3, _random_samples=SAMPLES).flatten(1), (0, 7)
    ),
    "channels of one image": lambda h, _: h * shuffled(h.detach()),
    # What no program would do again.
    "seeded": lambda h, _: h * reseeded(lambda: torch.rand(16)),
    "unlike draws from one state": lambda h, _: h * replayed(
        lambda: torch.bernoulli(torch.full((16,), 0.1)), lambda: torch.bernoulli(torch.full((16,), 0.9))
    ),
    "a gradient without examples": lambda h, m: Ones.apply(h, m.scale),
    "no entries": lambda h, _: h + h[:, :0].reshape(len(h), 0).sum(1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_there_is_no_proof_for_a_model_that_mixes(name: str) -> None:
    """That no way moves the sum further than is claimed is what tests/isolation looks at."""
    with pytest.raises(NotProved) as refused:
        program(Two(MIXING[name]), batch=(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))
    named = name == "a gradient without examples" or isinstance(refused.value, NotCaptured)
    assert named or "test_proof.py, line" in str(refused.value)


def test_a_wrong_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where a rule is wrong: flip with the rule of a pointwise operation passes the proof."""
    batch = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(Mixes, match="flip runs over the examples"):
        program(Two(MIXING["reversed"]), batch=batch)
    monkeypatch.setitem(axis.RULES, "flip", axis.RULES["_to_copy"])
    program(Two(MIXING["reversed"]), batch=batch)


# ------------------------------------------------------------------------------------------------ right gradients


def recurrent(kind: Any, **more: Any) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last(m.layer(x)[0][:, -1] if m.layer.batch_first else m.layer(x.transpose(0, 1))[0][-1])

    return Called(
        forward, layer=kind(4, 6, **more), last=nn.Linear(6 * (1 + more.get("bidirectional", False)), CLASSES)
    )


def encoder(reentrant: bool | None = None) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.before(x)
        h = m.layer(h) if reentrant is None else checkpoint(m.layer, h, use_reentrant=reentrant)
        return m.last(h[:, -1])

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Called(forward, before=nn.Linear(8, 8), layer=layer, last=nn.Linear(8, CLASSES))


def tied() -> nn.Module:
    def forward(m: Any, tokens: Tensor) -> Tensor:
        return m.head(torch.tanh(m.hidden(m.table(tokens) + m.places(torch.arange(9)[None])))).mean(1)

    model = Called(forward, table=nn.Embedding(CLASSES, 12, padding_idx=0), places=nn.Embedding(9, 12),
                   hidden=nn.Linear(12, 12), head=nn.Linear(12, CLASSES, bias=False))  # fmt: skip
    model.head.weight = model.table.weight
    return model


class Derived(nn.Module):
    """Weight normalization, a token that is expanded, a matrix used twice and in parts, one token of each example."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.token, self.matrix = nn.Parameter(torch.randn(1, 1, 12)), nn.Parameter(torch.randn(12, 24))
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.last, self.table = nn.Linear(12, CLASSES), nn.Parameter(torch.randn(7, 12))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        h = self.normed(h) + self.table[torch.arange(h.shape[1]) % 7]
        query, key = (h @ self.matrix).chunk(2, -1)
        h = torch.einsum("btd,de->bte", self.attention(query, key, key)[0], self.matrix[:, :12])
        return self.last(h[torch.arange(len(x)), torch.full((len(x),), 3)])


def frames() -> nn.Module:
    """Frames of all examples in one dimension, the first frames of all of them first."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.fixed(m.group(m.conv(x.transpose(0, 1).flatten(0, 1))))
        y = m.layer(y.movedim(1, -1)).movedim(-1, 1)
        y = y + m.table((y[:, 0, 0] > 0).long()).movedim(-1, 1)[:, :, None]
        return m.last(y.view(3, -1, *y.shape[1:]).mean(0).flatten(1))

    return Called(forward, conv=nn.Conv2d(2, 4, 2), group=nn.GroupNorm(2, 4), fixed=nn.BatchNorm2d(4),
                  layer=nn.LayerNorm(4), table=nn.Embedding(9, 4), last=nn.Linear(64, CLASSES)).eval()  # fmt: skip


def images(*layers: nn.Module, shape: tuple[int, ...] = (2, 9, 9)) -> nn.Module:
    features = nn.Sequential(*layers, nn.Flatten())
    return nn.Sequential(features, nn.Linear(features(torch.zeros(1, *shape)).shape[1], CLASSES))


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def two(middle: Middle) -> tuple[Callable[[], nn.Module], Callable[[int], Tensor]]:
    return lambda: Two(middle), rows(8)


RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 9), nn.ReLU(inplace=True), nn.Linear(9, CLASSES)), rows(8)),
    "cnn": (lambda: images(nn.Conv2d(2, 4, 3, 2), nn.GroupNorm(2, 4), nn.MaxPool2d(3, 1, 1)), rows(2, 9, 9)),
    "lstm": (lambda: recurrent(nn.LSTM, batch_first=True, num_layers=2, bidirectional=True), rows(7, 4)),
    "gru, time first": (lambda: recurrent(nn.GRU, num_layers=2), rows(7, 4)),
    "encoder": (encoder, rows(6, 8)),
    "checkpoint": (lambda: encoder(False), rows(6, 8)),
    "older checkpoint": (lambda: encoder(True), rows(6, 8)),
    "tied": (tied, lambda n: torch.randint(0, CLASSES, (n, 9))),
    "derived": (Derived, rows(6, 12)),
    "frames first": (frames, rows(3, 2, 5, 5)),
    "a scalar": two(lambda h, m: h * m.scale),
    "its own row": two(lambda h, m: h[places(h), torch.full((len(h),), 3)][:, None] + h),
    "an own dimension": two(lambda h, m: h.unsqueeze(1).squeeze(1)),
    "all dimensions squeezed": two(lambda h, m: h.unsqueeze(1).squeeze()),
    "bilinear": two(lambda h, m: F.bilinear(h[:, :6], h, m.square[:, None, :6].mT.reshape(16, 6, 1) * m.part)),
    "all of the batch": two(lambda h, m: h.narrow(0, 0, len(h))),
}


@cache
def captured(name: str) -> tuple[nn.Module, Callable[..., list[Tensor]]]:
    """A model, and its rows for a batch by its graph."""
    torch.manual_seed(1)
    make, inputs = RIGHT[name]
    model = make()
    found = program(model, batch=(inputs(2), torch.zeros(2, dtype=torch.int64)))
    buffers = dict(model.named_buffers())
    given = [p.detach() for p in model.parameters()], [buffers[key] for key in found.held_names]
    return model, lambda *batch: [block.rows() for block in found(*given, [*batch])]


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_are_autograds_for_any_number_of_examples(name: str) -> None:
    model, blocks = captured(name)
    for n in (1, 7, 70):  # more than were captured, too
        x, y = RIGHT[name][1](n), torch.arange(n) % CLASSES
        found = blocks(x, y)
        for i in {0, n // 2, n - 1}:
            model.zero_grad()
            if name == "all dimensions squeezed":  # the model itself takes no example alone
                model.middle = lambda h, m: h
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
            whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
            for (key, p), block in zip(model.named_parameters(), found, strict=True):
                own = torch.zeros_like(block[i]) if p.grad is None else p.grad.flatten()
                assert (block[i] - own).norm() <= 1e-5 * whole, key


@pytest.mark.parametrize("name", RIGHT)
def test_another_example_leaves_every_row_with_the_same_bits(name: str) -> None:
    _, blocks = captured(name)
    x, y = RIGHT[name][1](6), torch.arange(6) % CLASSES
    other = x.clone()
    other[2] = RIGHT[name][1](1)[0]
    for one, two in zip(blocks(x, y), blocks(other, y), strict=True):
        assert torch.equal(one[[0, 1, 3, 4, 5]], two[[0, 1, 3, 4, 5]])


def test_the_masks_of_a_checkpoint_are_the_forward_passs_own() -> None:
    def part(h: Tensor) -> Tensor:
        return F.dropout(torch.tanh(h), 0.5)

    batch, found = (torch.randn(4, 8), torch.arange(4)), []
    for middle in (lambda h, _: part(h), lambda h, _: checkpoint(part, h, use_reentrant=False)):
        model = Two(middle)
        one = program(model, batch=batch)
        assert one.draws
        torch.manual_seed(4)
        found.append([b.rows() for b in one([p.detach() for p in model.parameters()], [], list(batch))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_no_line_on_standard_error_tells_the_number_of_micro_batches(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, CLASSES))  # whose way back vmap runs row by row
    given = list(layer.parameters()), [], (torch.randn(6, 8), torch.arange(6) % CLASSES)
    blocks = program(layer, batch=given[2])(*given)
    assert capfd.readouterr().err == ""
    F.cross_entropy(layer(given[2][0]), given[2][1], reduction="sum").backward()
    for block, parameter in zip(blocks, layer.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(block.rows().sum(0), parameter.grad.flatten())


def test_memory_that_nothing_was_written_to_holds_nothing() -> None:
    model = Two(lambda h, _: h + torch.empty(len(h), 16))
    found = program(model, batch=(torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))
    assert any("zero" in str(node.target) for node in found._module.graph.nodes)


# ------------------------------------------------------------------------------------------------ runs


def start(model: nn.Module, data: Any = None, **more: Any) -> Any:
    data = (torch.randn(40, 8), torch.arange(40) % CLASSES) if data is None else data
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=8)
    return make_private(model, data, method, steps=20, sampling="fixed-order", **more)


def test_an_lstm_is_trained_and_is_as_it_was_for_plain_use() -> None:
    model, data = recurrent(nn.LSTM, batch_first=True), (torch.randn(40, 7, 4), torch.arange(40) % CLASSES)
    private = start(model, data)
    for batch in private.loader:
        private.step(batch)
    assert all(flat is own for flat, own in zip(model.layer._flat_weights, model.layer.parameters(), strict=True))
    assert model(data[0]).isfinite().all()


def test_a_hook_on_a_parameter_is_refused_by_name() -> None:
    model = Two()
    model.last.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ArgumentError, match=r"parameter 'last\.weight' has a hook on its gradient"):
        start(model)


def test_an_attribute_that_changes_is_another_graph_and_a_global_is_noticed() -> None:
    model = Two(lambda h, m: h * m.factor)
    model.factor = 1.0
    private = start(model)
    for number, batch in zip(range(3), private.loader, strict=False):
        model.factor = 1.0 + (number > 1)
        private.step(batch)
    assert len(private._engine.gradient.proved.programs) == 2

    factor = [1.0]
    private = start(Two(lambda h, _: h * factor[0]))
    factor[0] = 2.0
    batches = (batch for _ in range(4) for batch in private.loader)
    for _ in range(15):
        private.step(next(batches))
    batch = next(batches)
    with pytest.raises(ArgumentError, match="computes something else than when it was last looked at"):
        private.step(batch)
    assert private.steps_taken == 15


def test_a_size_of_the_models_own_that_is_the_number_of_examples_at_capture() -> None:
    model = Two(lambda h, _: F.pad(h[:, None], (0, 0, 0, COUNTS[0] - 1)).sum(1) * COUNTS[0])
    private = start(model, gradients="pairs")
    assert next(iter(private._engine.gradient.proved.programs.values())).count == COUNTS[1]
    for batch in (batch for _ in range(4) for batch in private.loader):  # the model is captured again at step 16
        private.step(batch)


def test_a_buffer_of_another_shape_is_another_graph() -> None:
    model = Two(lambda h, m: h * m.mask)
    model.register_buffer("mask", torch.ones(1, 16))
    private = start(model)
    batch = next(iter(private.loader))
    model.mask = torch.rand(8, 16)  # a factor for each place in a batch
    with pytest.raises(ArgumentError, match=r"broadcast.*test_proof\.py, line"):
        private.step(batch)
    model.mask = torch.ones(())
    private.step(batch)


def test_a_frozen_layer_that_is_replaced_is_read_in_the_next_step() -> None:
    model = Two()
    model.last.requires_grad_(False)
    private = start(model)
    proved, batch = private._engine.gradient.proved, (torch.randn(3, 8), torch.zeros(3, dtype=torch.int64))
    model.last = nn.Linear(16, CLASSES).requires_grad_(False)
    found = proved.current(proved.values.parameters(), batch, real=False)[1][1]
    assert found[0].data_ptr() == model.last.weight.data_ptr()


def test_a_value_that_decides_leads_to_another_way_which_names_the_line() -> None:
    with pytest.warns(SpeedWarning, match=r"takes 'one-by-one'.*a value decides.*test_proof\.py, line"):
        start(Two(lambda h, _: h if torch.rand(()) < 2 else -h))


class Copied(nn.Module):
    """Writes into memory of its own, of which a part is looked at before; and a weight whose gradient is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two uses of one convolution, in another order of memory than its weight's."""
        x = torch.tanh(self.conv(self.conv(x.contiguous(memory_format=torch.channels_last)))).flatten(1)
        copied = torch.empty_like(x)
        seen = copied[:, 3:7]
        copied.copy_(x)
        return self.head(copied) * (1 + seen.sum(1, keepdim=True))


def test_a_copy_into_new_memory_is_what_it_is_for_autograd() -> None:
    torch.manual_seed(0)
    data, model = (torch.randn(12, 2, 4, 4), torch.randint(0, 3, (12,))), Copied()
    moved = []
    for way in ("pairs", "one-by-one"):
        net = copy.deepcopy(model)
        method = dpcore.methods.dp_sgd(lr=0.5, noise_multiplier=0.0, batch_size=6)
        options = {"sampling": "fixed-order", "key": bytes(32), "exact_key": True, "gradients": way}
        run = make_private(net, data, method, epochs=1, **options)
        for batch in run.loader:
            run.step(batch)
        moved.append(torch.cat([(a - b).flatten() for a, b in zip(net.parameters(), model.parameters(), strict=True)]))
    assert moved[0].abs().max() > 1e-2
    torch.testing.assert_close(*moved, rtol=0, atol=1e-5)
