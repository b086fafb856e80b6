"""Layers of torch that treat each example alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.isolation.case import Case
from tests.isolation.models import CLASSES, TOKENS, Tensor, built, inputs


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


class Last(nn.Module):
    """A recurrent layer's last hidden state."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        state = self.body(x)[1]
        return (state[0] if isinstance(state, tuple) else state)[-1]


class Cell(nn.Module):
    """A cell in a loop of Python."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state


class Offsets(nn.Module):
    """A bag for each example out of one list of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids.flatten(), torch.arange(0, ids.numel(), ids.shape[1]))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 6, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids, per_sample_weights=1 / (1 + ids.float()))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return self.body(packed)[1][0]


class Twice(nn.Module):
    """A bilinear layer of two parts of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Bilinear(2, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[:, :2], x[:, 2:])


ROW, SEQUENCE, IMAGE, LINE, SPACE = (6,), (5, 6), (4, 6, 6), (4, 9), (2, 4, 4, 4)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.eval().requires_grad_(False)


class Fixed(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Highway(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid()
        return gate * self.body(x).relu() + (1 - gate) * x


class Experts(nn.Module):
    def __init__(self, hard: bool = False) -> None:
        super().__init__()
        self.experts, self.gate, self.hard = nn.ModuleList(nn.Linear(6, 4) for _ in range(3)), nn.Linear(6, 3), hard

    def forward(self, x: Tensor) -> Tensor:
        share = self.gate(x).softmax(-1)
        if self.hard:
            top, places = share.topk(1, -1)
            share = torch.zeros_like(share).scatter(-1, places, top)
        return (torch.stack([expert(x) for expert in self.experts], -1) * share[:, None]).sum(-1)


class Splines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers, self.weights = nn.Parameter(torch.linspace(-2, 2, 5)), nn.Parameter(torch.randn(6, 5, 4) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bik,iko->bo", (-(x[..., None] - self.centers).square()).exp(), self.weights)


class Hyper(nn.Module):
    """Each example makes the weights of its own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Linear(6, 24)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x[:, None], self.made(x).view(-1, 6, 4))[:, 0]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.steps = nn.LayerNorm(3), nn.Conv1d(5, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = x.chunk(2, -1)
        return u * self.steps(self.norm(v))


class Mixes(nn.Module):
    """An MLP-Mixer: over the steps of an example, then over its features."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.features = nn.Linear(5, 5), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x + self.steps(x.mT).mT).relu()


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.one(x).relu()], 1)
        return torch.cat([x, self.two(x).relu()], 1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.end = nn.Conv2d(4, 4, 2, 2), nn.ConvTranspose2d(4, 4, 2, 2), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(torch.cat([x, self.up(self.down(x).relu())], 1))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(9, 6), nn.Embedding(8, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.positions(torch.arange(ids.shape[1]))


class Hashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table((ids * 5 + 3) % 7) + self.table((ids[:, :1] * 31) % 7)


# fmt: off
ON_ROWS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 6), "no bias": lambda: nn.Linear(6, 6, bias=False),
    "LayerNorm": lambda: nn.LayerNorm(6), "no affine": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "RMSNorm": lambda: nn.RMSNorm(6), "GroupNorm": lambda: nn.GroupNorm(2, 6), "Bilinear": Twice,
    "PReLU": lambda: nn.PReLU(6), "Maxout": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.MaxPool1d(3)),
    "GLU": nn.GLU, "two, shared": lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2),
    "frozen BatchNorm": lambda: frozen(nn.BatchNorm1d(6)),
    "CosineSimilarity": lambda: Fixed(lambda x: F.cosine_similarity(x[:, :3], x[:, 3:])[:, None]),
    "Softmax": lambda: nn.Softmax(1), "highway": Highway, "mixture of experts": Experts,
    "hard experts": lambda: Experts(hard=True), "KAN": Splines, "hypernetwork": Hyper,
    "Fourier features": lambda: Fixed(lambda x: torch.cat([x.sin(), x.cos()], -1)),
}
ON_SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 6), "LayerNorm": lambda: nn.LayerNorm(6),
    "LayerNorm of all": lambda: nn.LayerNorm((5, 6)), "RMSNorm": lambda: nn.RMSNorm(6),
    "GroupNorm of steps": lambda: nn.GroupNorm(5, 5), "Packed": Packed, "gMLP": Gated, "mixer": Mixes,
    **{f"{kind.__name__}{' of two' if layers == 2 else ''}{', both ways' if both else ''}": lambda kind=kind, layers=layers, both=both: kind(6, 4, layers, batch_first=True, bidirectional=both) for kind in (nn.RNN, nn.GRU, nn.LSTM) for layers, both in ((1, False), (2, False), (1, True), (2, True))},
    **{f"{kind.__name__}, last state": lambda kind=kind: Last(kind(6, 4, batch_first=True)) for kind in (nn.RNN, nn.GRU, nn.LSTM)},
    **{kind.__name__: lambda kind=kind: Cell(kind(6, 4)) for kind in (nn.RNNCell, nn.GRUCell, nn.LSTMCell)},
    "projected LSTM": lambda: nn.LSTM(6, 4, proj_size=3, batch_first=True),
    "ReLU RNN": lambda: nn.RNN(6, 4, nonlinearity="relu", batch_first=True),
}
SECOND: dict[str, Callable[[], nn.Module]] = {
    **{f"{kind.__name__}{', both ways' if both else ''}": lambda kind=kind, both=both: kind(6, 4, 2 if both else 1, bidirectional=both) for kind in (nn.RNN, nn.GRU, nn.LSTM) for both in (False, True)},
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), "Linear": lambda: nn.Linear(6, 6),
    "LayerNorm": lambda: nn.LayerNorm(6),
}
ON_LINES: dict[str, Callable[[], nn.Module]] = {
    **{f"Conv1d {options}": lambda options=options: nn.Conv1d(4, 4, 3, **options) for options in ({}, {"groups": 2}, {"groups": 4}, {"dilation": 2}, {"stride": 2, "padding": 1}, {"padding": "same"}, *({"padding": 1, "padding_mode": mode} for mode in ("zeros", "reflect", "replicate", "circular")), {"bias": False})},
    "transposed": lambda: nn.ConvTranspose1d(4, 4, 3, 2), "MaxPool": lambda: nn.MaxPool1d(2),
    "AvgPool": lambda: nn.AvgPool1d(3, 2), "AdaptiveAvg": lambda: nn.AdaptiveAvgPool1d(2),
    "AdaptiveMax": lambda: nn.AdaptiveMaxPool1d(3), "InstanceNorm": lambda: nn.InstanceNorm1d(4, affine=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4), "LPPool": lambda: nn.LPPool1d(3, 2),
    "causal": lambda: nn.Sequential(nn.ConstantPad1d((2, 0), 0), nn.Conv1d(4, 4, 3)),
    "Upsample": lambda: nn.Upsample(scale_factor=2),
    "wavenet": lambda: nn.Sequential(nn.Conv1d(4, 8, 2, dilation=2), nn.GLU(1)),
}
ON_IMAGES: dict[str, Callable[[], nn.Module]] = {
    **{f"Conv2d {options}": lambda options=options: nn.Conv2d(4, 4, 3, **options) for options in ({}, {"groups": 2}, {"groups": 4, "padding": 1}, {"dilation": 2}, {"stride": 2}, *({"padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")))},
    "1x1": lambda: nn.Conv2d(4, 2, 1), "transposed": lambda: nn.ConvTranspose2d(4, 4, 2, 2),
    "transposed, groups": lambda: nn.ConvTranspose2d(4, 4, 3, groups=2, dilation=2),
    "separable": lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 6, 1)),
    "MaxPool": lambda: nn.MaxPool2d(2), "AvgPool": lambda: nn.AvgPool2d(2), "Adaptive": lambda: nn.AdaptiveAvgPool2d(1),
    "FractionalMaxPool": lambda: nn.FractionalMaxPool2d(2, output_size=3), "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "InstanceNorm": lambda: nn.InstanceNorm2d(4, affine=True), "LayerNorm": lambda: nn.LayerNorm((4, 6, 6)),
    "LocalResponseNorm": lambda: nn.LocalResponseNorm(2), "PixelShuffle": lambda: nn.PixelShuffle(2),
    "PixelUnshuffle": lambda: nn.PixelUnshuffle(3), "ChannelShuffle": lambda: nn.ChannelShuffle(2),
    "Upsample": lambda: nn.Upsample(scale_factor=2, mode="bilinear"), "Unfold": lambda: nn.Unfold(3),
    "ZeroPad": lambda: nn.ZeroPad2d(1), "ReflectionPad": lambda: nn.ReflectionPad2d(2),
    "residual": lambda: Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, padding=1))),
    "dense": Dense, "U-Net": UNet, "patches": lambda: nn.Sequential(nn.Conv2d(4, 6, 2, 2), nn.Flatten(2)),
    "ConvNeXt": lambda: Residual(nn.Sequential(nn.Conv2d(4, 4, 5, padding=2, groups=4), nn.GroupNorm(1, 4), nn.Conv2d(4, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1))),
    "frozen BatchNorm": lambda: frozen(nn.BatchNorm2d(4)), "Softmax2d": nn.Softmax2d,
    "RNN of rows": lambda: nn.Sequential(nn.Flatten(2), nn.GRU(36, 5, batch_first=True)),
}
ON_SPACE: dict[str, Callable[[], nn.Module]] = {
    "Conv3d": lambda: nn.Conv3d(2, 4, 2), "groups": lambda: nn.Conv3d(2, 4, 2, groups=2),
    "circular": lambda: nn.Conv3d(2, 2, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: nn.ConvTranspose3d(2, 2, 2), "MaxPool": lambda: nn.MaxPool3d(2),
    "AvgPool": lambda: nn.AvgPool3d(2), "Adaptive": lambda: nn.AdaptiveAvgPool3d(2),
    "GroupNorm": lambda: nn.GroupNorm(2, 2), "InstanceNorm": lambda: nn.InstanceNorm3d(2),
}
ON_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: nn.Embedding(9, 6), "padding": lambda: nn.Embedding(9, 6, padding_idx=0),
    "max norm": lambda: nn.Embedding(9, 6, max_norm=1.0),
    "scaled by frequency": lambda: nn.Embedding(9, 6, scale_grad_by_freq=True),
    "EmbeddingBag": lambda: nn.EmbeddingBag(9, 6), "bag, sum": lambda: nn.EmbeddingBag(9, 6, mode="sum", padding_idx=0),
    "bag, max": lambda: nn.EmbeddingBag(9, 6, mode="max"), "bags by offsets": Offsets, "bags, weighted": Weighted,
    "positions": Positions, "one-hot": lambda: Fixed(lambda ids: F.one_hot(ids, 9).float()),
    "frozen table": lambda: nn.Embedding.from_pretrained(torch.ones(9, 6)),
    "text CNN": lambda: nn.Sequential(nn.Embedding(9, 6), Fixed(lambda h: h.mT), nn.Conv1d(6, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool1d(1)),
    "language model": lambda: nn.Sequential(nn.Embedding(9, 6), nn.GRU(6, 6, batch_first=True)), "hashed": Hashed,
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
