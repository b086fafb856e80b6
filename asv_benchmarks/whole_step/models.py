"""The models and their synthetic data, in plain torch: nothing of any contestant, and no layer that mixes examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model, its batch size, and what its data look like: images of a shape, or tokens of a vocabulary.

    `sequence` says that every token has a target; else one class an example. `update` is "sgd" or "adam".
    """

    build: Callable[[], nn.Module]
    batch_size: int
    shape: tuple[int, ...]
    vocabulary: int | None = None
    classes: int = 10
    sequence: bool = False
    update: str = "sgd"

    def data(self, batches: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of `batches` batches."""
        generator = torch.Generator().manual_seed(seed)
        count = batches * self.batch_size
        targets = torch.randint(self.classes, (count, *self.shape) if self.sequence else (count,), generator=generator)
        if self.vocabulary is None:
            return torch.randn(count, *self.shape, generator=generator), targets
        return torch.randint(self.vocabulary, (count, *self.shape), generator=generator), targets


def losses(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return one loss an example: the cross-entropy of its class, or the mean over its tokens."""
    if target.dim() == 1:
        return F.cross_entropy(output, target, reduction="none")
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean of the examples' losses."""
    return losses(output, target).mean()


def cnn(channels: tuple[int, ...]) -> nn.Module:
    """Four 3x3 convolutions with tanh, three of them pooled, and one linear layer, for images of 28x28."""
    layers: list[nn.Module] = []
    for place, (incoming, outgoing) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv2d(incoming, outgoing, 3, padding=1), nn.Tanh()]
        layers += [nn.MaxPool2d(2)] if place < 3 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1] * 9, 10))


def mlp(width: int) -> nn.Module:
    """784, two hidden layers, 10."""
    return nn.Sequential(
        nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm, plus the identity, or a 1x1 convolution if the shape changes."""

    def __init__(self, incoming: int, outgoing: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(incoming, outgoing, 3, stride, 1, bias=False), nn.GroupNorm(min(32, outgoing), outgoing),
            nn.ReLU(),
            nn.Conv2d(outgoing, outgoing, 3, 1, 1, bias=False), nn.GroupNorm(min(32, outgoing), outgoing),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or incoming != outgoing:
            self.shortcut = nn.Sequential(
                nn.Conv2d(incoming, outgoing, 1, stride, bias=False), nn.GroupNorm(min(32, outgoing), outgoing)
            )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(inputs) + self.shortcut(inputs))


def resnet_18(width: int) -> nn.Module:
    """ResNet-18 for 32x32: a 3x3 stem, four stages of two blocks, GroupNorm in place of BatchNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(min(32, width), width), nn.ReLU()]
    incoming = width
    for stage in range(4):
        outgoing = width * 2**stage
        layers += [ResidualBlock(incoming, outgoing, 1 if stage == 0 else 2), ResidualBlock(outgoing, outgoing, 1)]
        incoming = outgoing
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(incoming, 10))


class LowRank(nn.Module):
    """LoRA: a frozen linear layer plus a trained product of two thin ones, which starts at zero."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Attention(nn.Module):
    """Multi-head attention by four linear layers, so that every contestant has a rule for it."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.causal = heads, causal

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(inputs).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(seen.transpose(1, 2).flatten(-2))


class TransformerLayer(nn.Module):
    """Attention and a feed-forward part of four times the width; the norms stand before them, or after as in BERT."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(width, heads, causal)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.before = causal

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for part, norm in zip((self.attention, self.feed), self.norms, strict=True):
            inputs = inputs + part(norm(inputs)) if self.before else norm(inputs + part(inputs))
        return inputs


class Transformer(nn.Module):
    """Token and position embeddings, layers, a head: at every token (causal), or at the first one (BERT's shape)."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        length: int,
        classes: int | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        causal = classes is None
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads, causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.pool = nn.Identity() if causal else nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, vocabulary if classes is None else classes, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight
        self.causal = causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        # contiguous: Opacus's ghost mode takes views of it
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens).contiguous()
        hidden = self.tokens(tokens) + self.positions(places)
        if self.causal:
            return self.head(self.norm(self.layers(hidden)))
        return self.head(self.pool(self.layers(self.norm(hidden))[:, 0]))


def low_rank(model: Transformer, rank: int) -> Transformer:
    """Freeze the model but for its pool and head, and put LoRA on the queries and values."""
    for part in (model.tokens, model.positions, model.layers, model.norm):
        part.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Attention):
            module.query, module.value = LowRank(module.query, rank), LowRank(module.value, rank)
    return model


class Recurrent(nn.Module):
    """An embedding, an LSTM of some layers, and a class from its last output."""

    def __init__(self, vocabulary: int, embedding: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, width, num_layers=layers, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output, _ = self.lstm(self.tokens(tokens))
        return self.head(output[:, -1])


def cases(quick: bool = False) -> dict[str, Case]:
    """Return the models by name, in full size, or small ones of the same kinds that take moments."""
    tokens: dict[str, Any] = {"update": "adam"}
    if quick:
        bert = {"batch_size": 4, "shape": (16,), "vocabulary": 200, "classes": 2, **tokens}
        return {
            "cnn": Case(lambda: cnn((8, 8, 8, 8)), 16, (1, 28, 28)),
            "mlp": Case(lambda: mlp(64), 32, (784,)),
            "transformer": Case(lambda: Transformer(100, 32, 2, 2, 16), 4, (16,), 100, 100, sequence=True, **tokens),
            "resnet-18": Case(lambda: resnet_18(8), 4, (3, 32, 32)),
            "bert": Case(lambda: Transformer(200, 32, 2, 2, 16, 2), **bert),
            "bert-lora": Case(lambda: low_rank(Transformer(200, 32, 2, 2, 16, 2), 4), **bert),
            "lstm": Case(lambda: Recurrent(100, 16, 16, 2), 8, (8,), 100, **tokens),
            "gpt-2": Case(
                lambda: Transformer(100, 32, 2, 2, 16, tied=True), 4, (16,), 100, 100, sequence=True, **tokens
            ),
        }
    bert = {"batch_size": 16, "shape": (128,), "vocabulary": 30522, "classes": 2, **tokens}
    return {
        "cnn": Case(lambda: cnn((16, 32, 32, 64)), 256, (1, 28, 28)),
        "mlp": Case(lambda: mlp(1024), 512, (784,)),
        "transformer": Case(lambda: Transformer(8000, 256, 4, 4, 128), 32, (128,), 8000, 8000, sequence=True, **tokens),
        "resnet-18": Case(lambda: resnet_18(64), 64, (3, 32, 32)),
        "bert": Case(lambda: Transformer(30522, 384, 6, 6, 128, 2), **bert),
        "bert-lora": Case(lambda: low_rank(Transformer(30522, 384, 6, 6, 128, 2), 8), **bert),
        "lstm": Case(lambda: Recurrent(8000, 128, 256, 2), 64, (64,), 8000, **tokens),
        "gpt-2": Case(
            lambda: Transformer(50257, 768, 12, 12, 128, tied=True), 4, (128,), 50257, 50257, sequence=True, **tokens
        ),
    }
