"""Attention within each example: masks of all kinds, positions, and encoders."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.isolation.models import CLASSES, ROWS, SEQUENCE, Case, Function, Tensor, built, table

T, D = SEQUENCE
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def heads(h: Tensor, count: int = 2) -> Tensor:
    return h.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(h: Tensor) -> Tensor:
    return h.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Any = 0) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5 + bias).softmax(-1) @ v


def grouped(h: Tensor, m: Any) -> Tensor:
    """Three heads of queries share one of keys and values."""
    q, kv = heads(h @ m.square, 3), heads(h[..., :2], 1)
    return joined(F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True))


def rotated(h: Tensor, m: Any) -> Tensor:
    angle = torch.arange(T)[:, None] / torch.tensor([1.0, 10.0, 100.0])
    one, two = h.chunk(2, -1)
    turned = torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], -1)
    return attend(turned, turned, h)


def relative(h: Tensor, m: Any) -> Tensor:
    places = torch.arange(T)[:, None] - torch.arange(T)[None] + T - 1
    return attend(h, h, h, m.bias(places)[..., 0])


def skewed(h: Tensor, m: Any) -> Tensor:
    """Transformer-XL's shift of the scores by their distance."""
    scores = F.pad(h @ m.square[:T].T, (1, 0)).view(len(h), T + 1, T)[:, 1:]
    return attend(h, h, h, scores)


def own_lengths(h: Tensor, m: Any = None) -> Tensor:
    """A padding mask (B, T) that follows from the example."""
    return torch.arange(T) < 1 + (h[..., 0].detach() > 0).sum(1, keepdim=True)


def windowed(h: Tensor, m: Any) -> Tensor:
    parts = F.pad(h, (0, 0, 0, 1)).view(len(h), 3, 2, D)
    return attend(parts, parts, parts).flatten(1, 2)


def linear(h: Tensor, m: Any) -> Tensor:
    q, k = F.elu(h) + 1, F.elu(h @ m.square) + 1
    return q @ (k.mT @ h) / (q @ k.sum(1)[..., None])


def recurrent(h: Tensor, m: Any) -> Tensor:
    """A state-space layer: each step decays what came before."""
    state, found = torch.zeros(len(h), D), []
    for step in h.unbind(1):
        state = m.scale.sigmoid() * state + step @ m.square
        found.append(state)
    return torch.stack(found, 1)


def cached(h: Tensor, m: Any) -> Tensor:
    keys: list[Tensor] = []
    found = []
    for step in h.split(1, 1):
        keys.append(step)
        past = torch.cat(keys, 1)
        found.append(attend(step, past, past))
    return torch.cat(found, 1)


# fmt: off
SPELLED: dict[str, Function] = {
    "heads": lambda h, m: joined(attend(heads(h), heads(h), heads(h))),
    "causal": lambda h, m: (h @ h.mT).masked_fill(~CAUSAL, float("-inf")).softmax(-1) @ h,
    "causal by triu": lambda h, m: attend(h, h, h, torch.full((T, T), float("-inf")).triu(1)),
    "own padding": lambda h, m: (h @ h.mT).masked_fill(~own_lengths(h)[:, None], -1e9).softmax(-1) @ h,
    "own padding, causal": lambda h, m: attend(h, h, h, torch.where(own_lengths(h)[:, None] & CAUSAL, 0.0, -1e9)),
    "cosine": lambda h, m: attend(F.normalize(h, dim=-1) * 3, F.normalize(h, dim=-1), h),
    "to one query": lambda h, m: attend(m.scale.expand(len(h), 1, D), h, h),
    "sdpa": lambda h, m: F.scaled_dot_product_attention(h, h, h),
    "sdpa, heads": lambda h, m: joined(F.scaled_dot_product_attention(heads(h), heads(h), heads(h))),
    "sdpa, causal": lambda h, m: F.scaled_dot_product_attention(heads(h), heads(h), heads(h), is_causal=True),
    "sdpa, bool": lambda h, m: F.scaled_dot_product_attention(h, h, h, CAUSAL),
    "sdpa, own mask": lambda h, m: F.scaled_dot_product_attention(heads(h), heads(h), heads(h), own_lengths(h)[:, None, None]),
    "sdpa, own bias": lambda h, m: F.scaled_dot_product_attention(h, h, h, (h @ h.mT).tanh()),
    "sdpa, trained bias": lambda h, m: F.scaled_dot_product_attention(heads(h), heads(h), heads(h), m.square[:T, :T]),
    "sdpa, dropout": lambda h, m: F.scaled_dot_product_attention(h, h, h, dropout_p=0.2),
    "sdpa, a class query": lambda h, m: F.scaled_dot_product_attention(m.scale.expand(len(h), 1, D), h, h),
    "sdpa of three dimensions, heads first": lambda h, m: F.scaled_dot_product_attention(heads(h).reshape(-1, T, 3), heads(h).reshape(-1, T, 3), heads(h).reshape(-1, T, 3)).view(len(h), -1),
    "GQA": grouped, "rotary": rotated, "relative": relative, "skewed": skewed,
    "ALiBi": lambda h, m: attend(h, h, h, -(torch.arange(T)[:, None] - torch.arange(T)[None]).abs() / 2),
    "windows": windowed, "linear attention": linear, "state space": recurrent, "cached keys": cached,
    "top keys": lambda h, m: attend(h, h, h, torch.where((s := h @ h.mT) >= s.topk(2, -1).values[..., -1:], 0.0, -1e9)),
    "talking heads": lambda h, m: joined(torch.einsum("bhst,hg->bgst", (heads(h) @ heads(h).mT).softmax(-1), m.square[:2, :2]) @ heads(h)),
    "two kinds of tokens": lambda h, m: attend(torch.cat([h, m.square[None].expand(len(h), -1, -1)], 1), h, h),
    "squeezed heads": lambda h, m: attend(heads(h, 1).squeeze(1), h, h),
}
# fmt: on


class Module(nn.Module):
    """A module of attention, which a function calls, and the mean over the steps as logits."""

    def __init__(self, body: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.body, self.call, self.last = nn.Linear(D, D), body, call, nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = self.call(self.body, self.first(x))
        return self.last((found[0] if isinstance(found, tuple) else found).mean(1))


def attention(**options: Any) -> nn.Module:
    return nn.MultiheadAttention(D, 2, **{"batch_first": True, **options})


def encoder(layers: int = 1, drop: float = 0.0, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 8, drop, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(D, 2, 8, 0.0, **{"batch_first": True, **options})


def second(body: Any, h: Tensor) -> Tensor:
    found = body(h.transpose(0, 1))
    return found.transpose(0, 1)


# fmt: off
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Any]]] = {
    "MHA": (attention, lambda f, h: f(h, h, h)), "MHA, causal": (attention, lambda f, h: f(h, h, h, attn_mask=~CAUSAL)),
    "MHA, padding": (attention, lambda f, h: f(h, h, h, key_padding_mask=~own_lengths(h))),
    "MHA, padding and causal": (attention, lambda f, h: f(h, h, h, key_padding_mask=~own_lengths(h), attn_mask=~CAUSAL)),
    "MHA, dropout": (lambda: attention(dropout=0.2), lambda f, h: f(h, h, h)),
    "MHA, mask of each example": (attention, lambda f, h: f(h, h, h, attn_mask=(~(own_lengths(h)[:, None] | CAUSAL)).repeat_interleave(2, 0))),
    "MHA, own sizes": (lambda: attention(kdim=3, vdim=3), lambda f, h: f(h, h[..., :3], h[..., 3:])),
    "MHA, more keys": (lambda: attention(add_bias_kv=True, add_zero_attn=True), lambda f, h: f(h, h, h)),
    "MHA, batch second": (lambda: attention(batch_first=False), lambda f, h: f(h.transpose(0, 1), h.transpose(0, 1), h.transpose(0, 1))[0].transpose(0, 1)),
    "the weights": (attention, lambda f, h: f(h, h, h)[1] @ h), "encoder": (encoder, lambda f, h: f(h)),
    "encoder, norm first": (lambda: encoder(norm_first=True), lambda f, h: f(h)),
    "encoder, causal": (encoder, lambda f, h: f(h, mask=~CAUSAL)),
    "encoder, is_causal": (encoder, lambda f, h: f(h, mask=nn.Transformer.generate_square_subsequent_mask(T), is_causal=True)),
    "encoder, padding": (encoder, lambda f, h: f(h, src_key_padding_mask=~own_lengths(h))),
    "encoder, dropout": (lambda: encoder(drop=0.2), lambda f, h: f(h)),
    "encoder, batch second": (lambda: encoder(batch_first=False), second),
    "decoder": (decoder, lambda f, h: f(h, h.tanh())),
    "decoder, masks": (decoder, lambda f, h: f(h, h.tanh(), tgt_mask=~CAUSAL, memory_key_padding_mask=~own_lengths(h))),
    "Transformer": (lambda: nn.Transformer(D, 2, 1, 1, 8, 0.0, batch_first=True), lambda f, h: f(h, h.flip(1))),
}
# fmt: on

CASES: list[Case] = [
    *table("apart", "attention", SEQUENCE, SPELLED, bias=lambda: nn.Embedding(2 * T, 1)),
    *[
        Case(
            f"attention module: {name}",
            built(lambda m=make, c=call: Module(m(), c), lambda: torch.randn(ROWS, T, D)),
            "apart",
        )
        for name, (make, call) in MODULES.items()
    ],
]
