"""Layers of torch that treat each example alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.isolation.models import CLASSES, TOKENS, Case, Tensor, built, inputs
from tests.unit.torch.models import Called


class Wrapped(nn.Module):
    """A layer between a scale and a head; of several results the first one counts."""

    def __init__(self, layer: nn.Module, features: int, scaled: bool, second: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(())) if scaled else None
        self.layer, self.last, self.second = layer, nn.Linear(features, CLASSES), second

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.scale is None else x * self.scale
        found = self.layer(x.transpose(0, 1) if self.second else x)
        found = found[0] if isinstance(found, tuple) else found
        return self.last((found.transpose(0, 1) if self.second else found).flatten(1))


def wrapped(make: Callable[[], nn.Module], shape: tuple[int, ...], second: bool = False) -> Any:
    def model() -> nn.Module:
        layer = make()
        x = torch.zeros(3, *shape, dtype=torch.int64 if shape == TOKENS else torch.float32)
        with torch.no_grad():
            found = layer(x.transpose(0, 1) if second else x)
        found = found[0] if isinstance(found, tuple) else found
        return Wrapped(layer, found.numel() // 3, shape != TOKENS, second)

    return built(model, lambda: inputs(shape))


ROW, SEQUENCE, IMAGE, LINE, SPACE = (6,), (5, 6), (4, 6, 6), (4, 9), (2, 4, 4, 4)


def last_state(body: nn.Module) -> nn.Module:
    """A recurrent layer's last hidden state."""

    def forward(m: Any, x: Tensor) -> Tensor:
        state = m.body(x)[1]
        return (state[0] if isinstance(state, tuple) else state)[-1]

    return Called(forward, body=body)


def looped(cell: nn.Module) -> nn.Module:
    """A cell in a loop of Python."""

    def forward(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state[0] if isinstance(state, tuple) else state

    return Called(forward, cell=cell)


def packed() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        return m.body(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[1][0]

    return Called(forward, body=nn.GRU(6, 6, batch_first=True))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.eval().requires_grad_(False)


def fixed(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Called(lambda m, x: function(x))


def residual(*inner: nn.Module) -> nn.Module:
    return Called(lambda m, x: x + m.inner(x), inner=nn.Sequential(*inner))


def highway() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        gate = m.gate(x).sigmoid()
        return gate * m.body(x).relu() + (1 - gate) * x

    return Called(forward, body=nn.Linear(6, 6), gate=nn.Linear(6, 6))


def experts(hard: bool = False) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        share = m.gate(x).softmax(-1)
        if hard:
            top, places = share.topk(1, -1)
            share = torch.zeros_like(share).scatter(-1, places, top)
        return (torch.stack([expert(x) for expert in m.experts], -1) * share[:, None]).sum(-1)

    return Called(forward, experts=nn.ModuleList(nn.Linear(6, 4) for _ in range(3)), gate=nn.Linear(6, 3))


def splines() -> nn.Module:
    parts = {"centers": nn.Parameter(torch.linspace(-2, 2, 5)), "weights": nn.Parameter(torch.randn(6, 5, 4) / 3)}
    return Called(
        lambda m, x: torch.einsum("bik,iko->bo", (-(x[..., None] - m.centers).square()).exp(), m.weights), **parts
    )


def hyper() -> nn.Module:
    """Each example makes the weights of its own layer."""
    return Called(lambda m, x: torch.bmm(x[:, None], m.made(x).view(-1, 6, 4))[:, 0], made=nn.Linear(6, 24))


def gated() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        u, v = x.chunk(2, -1)
        return u * m.steps(m.norm(v))

    return Called(forward, norm=nn.LayerNorm(3), steps=nn.Conv1d(5, 5, 1))


def mixes() -> nn.Module:
    """An MLP-Mixer: over the steps of an example, then over its features."""
    parts = {"steps": nn.Linear(5, 5), "features": nn.Linear(6, 6)}
    return Called(lambda m, x: m.features(x + m.steps(x.mT).mT).relu(), **parts)


def dense() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([x, m.one(x).relu()], 1)
        return torch.cat([x, m.two(x).relu()], 1)

    return Called(forward, one=nn.Conv2d(4, 2, 3, padding=1), two=nn.Conv2d(6, 2, 3, padding=1))


def u_net() -> nn.Module:
    parts = {"down": nn.Conv2d(4, 4, 2, 2), "up": nn.ConvTranspose2d(4, 4, 2, 2), "end": nn.Conv2d(8, 2, 1)}
    return Called(lambda m, x: m.end(torch.cat([x, m.up(m.down(x).relu())], 1)), **parts)


# fmt: off
ON_ROWS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 6), "LayerNorm": lambda: nn.LayerNorm(6),
    "GroupNorm": lambda: nn.GroupNorm(2, 6), "Bilinear": lambda: Called(lambda m, x: m.body(x[:, :2], x[:, 2:]), body=nn.Bilinear(2, 4, 5)),
    "two, shared": lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2), "frozen BatchNorm": lambda: frozen(nn.BatchNorm1d(6)),
    "highway": highway, "mixture of experts": experts,
    "hard experts": lambda: experts(hard=True), "KAN": splines, "hypernetwork": hyper,
}
ON_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 6), "LayerNorm": lambda: nn.LayerNorm(6),
    "GroupNorm of steps": lambda: nn.GroupNorm(5, 5), "Packed": packed, "gMLP": gated, "mixer": mixes,
    **{f"{kind.__name__}{' of two' if layers == 2 else ''}{', both ways' if both else ''}": lambda kind=kind, layers=layers, both=both: kind(6, 4, layers, batch_first=True, bidirectional=both) for kind in (nn.RNN, nn.GRU, nn.LSTM) for layers, both in ((1, False), (2, False), (1, True), (2, True))},
    **{f"{kind.__name__}, last state": lambda kind=kind: last_state(kind(6, 4, batch_first=True)) for kind in (nn.RNN, nn.GRU, nn.LSTM)},
    **{kind.__name__: lambda kind=kind: looped(kind(6, 4)) for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)},
    "projected LSTM": lambda: nn.LSTM(6, 4, proj_size=3, batch_first=True),
}
SECOND: dict[str, Callable[[], nn.Module]] = {
    **{f"{kind.__name__}{', both ways' if both else ''}": lambda kind=kind, both=both: kind(6, 4, 2 if both else 1, bidirectional=both) for kind in (nn.RNN, nn.GRU, nn.LSTM) for both in (False, True)},
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0),
}
ON_LINES: dict[str, Callable[[], nn.Module]] = {
    **{f"Conv1d {options}": lambda options=options: nn.Conv1d(4, 4, 3, **options) for options in ({}, {"groups": 2}, {"groups": 4}, {"dilation": 2}, {"stride": 2, "padding": 1}, {"padding": "same"}, *({"padding": 1, "padding_mode": mode} for mode in ("zeros", "reflect", "replicate", "circular")), {"bias": False})},
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "causal": lambda: nn.Sequential(nn.ConstantPad1d((2, 0), 0), nn.Conv1d(4, 4, 3)),
    "wavenet": lambda: nn.Sequential(nn.Conv1d(4, 8, 2, dilation=2), nn.GLU(1)),
}
ON_IMAGES: dict[str, Callable[[], nn.Module]] = {
    **{f"Conv2d {options}": lambda options=options: nn.Conv2d(4, 4, 3, **options) for options in ({}, {"groups": 2}, {"groups": 4, "padding": 1}, {"dilation": 2}, {"stride": 2}, *({"padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")))},
    "transposed": lambda: nn.ConvTranspose2d(4, 4, 2, 2),
    "separable": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1)),
    "MaxPool": lambda: nn.MaxPool2d(2),
    "FractionalMaxPool": lambda: nn.FractionalMaxPool2d(2, output_size=3), "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm((4, 6, 6)), "Upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "residual": lambda: residual(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1)),
    "dense": dense, "U-Net": u_net, "patches": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, 2), nn.Flatten(2)),
    "ConvNeXt": lambda: residual(nn.Conv2d(4, 4, 5, padding=2, groups=4), nn.GroupNorm(1, 4), nn.Conv2d(4, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1)),
    "frozen BatchNorm": lambda: frozen(nn.BatchNorm2d(4)),
    "RNN of rows": lambda: nn.Sequential(nn.Flatten(2), nn.GRU(36, 5, batch_first=True)),
}
ON_SPACE: dict[str, Callable[[], nn.Module]] = {
    "Conv3d": lambda: nn.Conv3d(2, 4, 2), "circular": lambda: nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular"),
    "GroupNorm": lambda: nn.GroupNorm(2, 2),
}
ON_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: nn.Embedding(9, 6), "padding": lambda: nn.Embedding(9, 6, padding_idx=0),
    "max norm": lambda: nn.Embedding(9, 6, max_norm=1.0),
    "scaled by frequency": lambda: nn.Embedding(9, 6, scale_grad_by_freq=True),
    "EmbeddingBag": lambda: nn.EmbeddingBag(9, 6),
    "bag, max": lambda: nn.EmbeddingBag(9, 6, mode="max"), "bags by offsets": lambda: Called(lambda m, ids: m.table(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1])), table=nn.EmbeddingBag(9, 6)), "bags, weighted": lambda: Called(lambda m, ids: m.table(ids, per_sample_weights=1 / (1 + ids.float())), table=nn.EmbeddingBag(9, 6, mode="sum")),
    "positions": lambda: Called(lambda m, ids: m.table(ids) + m.places(torch.arange(ids.shape[1])), table=nn.Embedding(9, 6), places=nn.Embedding(8, 6)),
    "text CNN": lambda: nn.Sequential(nn.Embedding(9, 6), fixed(lambda h: h.mT), nn.Conv1d(6, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(1)),
    "language model": lambda: nn.Sequential(nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True)), "hashed": lambda: Called(lambda m, ids: m.table((ids * 5 + 3) % 7) + m.table((ids[:, :1] * 31) % 7), table=nn.Embedding(7, 6)),
    "sparse": lambda: nn.Embedding(9, 6, sparse=True),
}
# fmt: on

TABLES = {
    "rows": (ON_ROWS, ROW, False),
    "sequences": (ON_SEQUENCES, SEQUENCE, False),
    "batch second": (SECOND, SEQUENCE, True),
    "lines": (ON_LINES, LINE, False),
    "images": (ON_IMAGES, IMAGE, False),
    "space": (ON_SPACE, SPACE, False),
    "tokens": (ON_TOKENS, TOKENS, False),
}

# Refusals that are right: a draw of one place for all, the batch's own frequencies, a table that is written to.
EITHER = ("images: FractionalMaxPool", "tokens: scaled by frequency", "tokens: max norm", "tokens: sparse")


def case(group: str, name: str) -> Case:
    layers, shape, second = TABLES[group]
    whole = f"{group}: {name}"
    return Case(whole, wrapped(layers[name], shape, second), "either" if whole in EITHER else "apart")


CASES = [case(group, name) for group, (layers, _, _) in TABLES.items() for name in layers]
