"""Models that treat the examples of a batch together, in as many spellings as came to mind: refused, or bounded."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.isolation.models import (
    CLASSES,
    IMAGE,
    ROW,
    ROWS,
    SEQUENCE,
    TOKENS,
    Between,
    Case,
    Function,
    Tensor,
    built,
    labels,
    table,
)  # fmt: skip
from tests.unit.torch.models import Called

GLOBAL = {"mean": torch.zeros(6)}


def data() -> Tensor:
    return torch.randn(ROWS, 6)


def written(h: Tensor, index: Any, value: Any) -> Tensor:
    h = h.clone()
    h[index] = value
    return h


def centered(h: Tensor) -> Tensor:
    return h - h.mean(0)


def normed(h: Tensor, *dims: int) -> Tensor:
    return (h - h.mean(dims, keepdim=True)) / (h.var(dims, keepdim=True) + 1e-5).sqrt()


def mixed_up(h: Tensor, share: Any, order: Any = None) -> Tensor:
    return share * h + (1 - share) * h[torch.randperm(len(h)) if order is None else order]


def dropped_blocks(h: Tensor) -> Tensor:
    mask = 1 - F.max_pool2d((torch.rand(len(h), 1, 6, 6) < 0.1).float(), 3, 1, 1)
    return h * mask / mask.mean()


def mixed_styles(h: Tensor) -> Tensor:
    mean, deviation = h.mean((2, 3), keepdim=True), h.var((2, 3), keepdim=True).add(1e-5).sqrt()
    order, share = torch.randperm(len(h)), torch.rand(len(h), 1, 1, 1)
    return (h - mean) / deviation * (share * deviation + (1 - share) * deviation[order]) + mixed_up(mean, share, order)


def routed(h: Tensor, m: Any) -> Tensor:
    """Two experts, of which each takes no more than half of the batch."""
    choice = (h @ m.square[:, :2]).softmax(-1)
    expert = F.one_hot(choice.argmax(-1), 2)
    kept = expert * (expert.cumsum(0) <= len(h) // 2)
    return h + kept[:, :1] * (h @ m.square) * choice[:, :1] + kept[:, 1:] * h.tanh() * choice[:, 1:]


def balanced(h: Tensor, m: Any) -> Tensor:
    share = (h @ m.square[:, :2]).softmax(-1)
    return h + share.mean(0).square().sum()


def sinkhorn(h: Tensor) -> Tensor:
    for _ in range(3):
        h = h - h.logsumexp(0, keepdim=True)
        h = h - h.logsumexp(1, keepdim=True)
    return h


def whitened(h: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(h.mT @ h + torch.eye(6))
    return h @ vectors / values.sqrt()


def nearest(h: Tensor) -> Tensor:
    return h[(torch.cdist(h, h) + 9 * torch.eye(len(h))).argmin(1)]


def looped(h: Tensor) -> Tensor:
    total, rows = torch.zeros(6), []
    for row in h:
        total = 0.5 * total + row
        rows.append(total)
    return torch.stack(rows)


# fmt: off
STATISTICS: dict[str, Function] = {
    "sum": lambda h, m: h + h.sum(0), "mean": lambda h, m: centered(h), "var": lambda h, m: h / (1 + h.var(0)),
    "batch norm by hand": lambda h, m: normed(h, 0),
    "functional": lambda h, m: F.batch_norm(h, None, None, training=True), "max": lambda h, m: h / h.abs().max(),
    "norm": lambda h, m: h / h.norm(),
    "norm of a feature": lambda h, m: F.normalize(h, dim=0), "median": lambda h, m: h - h.median(0).values,
    "quantile": lambda h, m: h - h.quantile(0.5, 0), "logsumexp": lambda h, m: h - h.logsumexp(0),
    "softmax": lambda h, m: h.softmax(0),
    "layer norm of the transposed": lambda h, m: F.layer_norm(h.T.contiguous(), h.shape[:1]).T,
    "product": lambda h, m: h + h.tanh().prod(0), "einsum": lambda h, m: h + torch.einsum("bd->d", h),
    "ones twice": lambda h, m: torch.ones(len(h), len(h)) @ h,
    "unbind": lambda h, m: h + torch.stack(h.unbind()).sum(0), "last of cumsum": lambda h, m: h + h.cumsum(0)[-1:],
    "sum_to_size": lambda h, m: h + h.sum_to_size(1, 6),
    "index_add": lambda h, m: h + torch.zeros(1, 6).index_add(0, torch.zeros(len(h), dtype=torch.int64), h),
    "scatter_add": lambda h, m: h + torch.zeros(6).expand(1, 6).scatter_add(0, torch.zeros_like(h).long(), h),
    "linear": lambda h, m: h + F.linear(h.T, torch.ones(1, len(h))).T, "addmm": lambda h, m: torch.addmm(h, h, h.T @ h),
    "bmm": lambda h, m: h + torch.bmm(torch.ones(1, 1, len(h)), h[None])[0],
    "dot": lambda h, m: h * torch.dot(h[:, 0], h[:, 1]), "trace": lambda h, m: h * (h @ h.T).trace(),
    "vecdot": lambda h, m: h * torch.linalg.vecdot(h, h, dim=0),
    "correlation": lambda h, m: h @ torch.corrcoef(h.T), "whitening": lambda h, m: whitened(h),
    "trace of 1e-6": lambda h, m: h * (1 + 1e-6 * h.sum()), "detached mean": lambda h, m: h - h.detach().mean(0),
    "mean of another": lambda h, m: h * (1 + m.one * h.mean(0)).sigmoid(),
    "view": lambda h, m: h - h.view(1, -1, 6).mean(1), "expand": lambda h, m: h + h.mean(0, keepdim=True).expand_as(h),
    "fft": lambda h, m: torch.fft.fft(h, dim=0).real, "ifft of all": lambda h, m: torch.fft.fft2(h).abs(),
    "count": lambda h, m: h * (h > 0).sum(0), "any": lambda h, m: h * (1 + (h > 2).any()),
    "argmax": lambda h, m: h * h.argmax(0), "histogram": lambda h, m: h * torch.histc(h.detach(), 6),
    "svd": lambda h, m: h / torch.linalg.svdvals(h)[0],
    "vmap over features": lambda h, m: torch.vmap(lambda one: one - one.mean(), in_dims=1, out_dims=1)(h),
    "half": lambda h, m: h - h.bfloat16().mean(0).float(), "numpy": lambda h, m: h * float(np.mean(h.detach().numpy())),
    "item": lambda h, m: h * h.sum().item(), "tolist": lambda h, m: h * sum(h[:, 0].tolist()),
}

ORDERS: dict[str, Function] = {
    "flip": lambda h, m: h + h.flip(0), "roll": lambda h, m: h + h.roll(1, 0), "sort": lambda h, m: h.sort(0).values,
    "cumsum": lambda h, m: h.cumsum(0), "cummax": lambda h, m: h.cummax(0).values,
    "diff": lambda h, m: h + h.diff(dim=0, prepend=h[:1]), "neighbor": lambda h, m: h + torch.cat([h[1:], h[:1]]),
    "first": lambda h, m: h - h[:1], "a permutation": lambda h, m: h + h[torch.randperm(len(h))],
    "fixed order": lambda h, m: h + h[torch.arange(len(h) - 1, -1, -1)],
    "gather": lambda h, m: h + h.gather(0, torch.zeros_like(h).long()),
    "index_select": lambda h, m: h + h.index_select(0, (torch.arange(len(h)) + 1) % len(h)),
    "roll of all": lambda h, m: h + h.roll(1), "rows of length": lambda h, m: h.T.reshape(h.shape) + h,
    "reshape of pairs": lambda h, m: torch.cat([h, h.flip(0)]).reshape(len(h), -1),
    "view across": lambda h, m: h.flatten()[1:-1].repeat(2)[: h.numel()].view_as(h),
    "as_strided": lambda h, m: h + torch.cat([h, h]).as_strided((len(h), 6), (5, 1)),
    "pad": lambda h, m: h + F.pad(h, (0, 0, 1, 0))[:-1],
    "toeplitz": lambda h, m: torch.ones(len(h), len(h)).tril() @ h, "loop": lambda h, m: looped(h),
    "topk": lambda h, m: h + h.topk(1, 0).values,
    "searchsorted": lambda h, m: h * (1 + torch.searchsorted(h[:, 0].detach().sort().values, h[:, 0].detach())[:, None]),
    "unique": lambda h, m: h * torch.unique((h > 0).long(), return_inverse=True, dim=0)[1][:, None],
    "set of the first": lambda h, m: written(h, 0, 1.0), "write a row": lambda h, m: written(h, slice(0, 1), h[-1:]),
    "masked_scatter": lambda h, m: h.masked_scatter(h > 0, h.abs()),
    "boolean rows": lambda h, m: h + torch.zeros_like(h).index_put((h[:, 0] > 0,), h[h[:, 0] > 0].flip(0)),
    "places": lambda h, m: h * torch.arange(1, len(h) + 1)[:, None],
    "triangle": lambda h, m: h + torch.eye(len(h), 6), "repeat": lambda h, m: h.repeat(2, 1)[1 : len(h) + 1],
    "swap of pairs": lambda h, m: h if len(h) % 2 else h.view(-1, 2, 6).flip(1).view(-1, 6),
    "stack of halves": lambda h, m: h if len(h) % 2 else torch.cat([h[: len(h) // 2] + h[len(h) // 2 :]] * 2),
    "split": lambda h, m: h if len(h) < 2 else torch.cat([part.mean(0).expand_as(part) for part in h.chunk(2)]),
    "convolution": lambda h, m: F.conv1d(h.T[None], m.square[:, :, None].expand(-1, -1, 3), padding=1)[0].T,
    "max_pool": lambda h, m: F.max_pool1d(h.T, 3, 1, 1).T, "rnn over the batch": lambda h, m: m.body(h)[0],
}

PAIRS: dict[str, Function] = {
    "logits of pairs": lambda h, m: (h @ h.T).softmax(-1) @ h,
    "einsum": lambda h, m: torch.einsum("bd,cd,ce->be", h, h, h),
    "cdist": lambda h, m: torch.cdist(h, h).sum(1, keepdim=True) + h,
    "broadcast": lambda h, m: (h[:, None] - h[None]).abs().mean(1),
    "attention": lambda h, m: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
    "multihead": lambda h, m: m.attention(h, h, h)[0], "graph": lambda h, m: ((h @ h.T) > 0).float() @ h,
    "nearest": lambda h, m: h + nearest(h),
    "minibatch discrimination": lambda h, m: torch.cat([h, (-(h[:, None] - h[None]).abs().sum(-1)).exp().sum(1, keepdim=True)], 1),
    "kron": lambda h, m: h + torch.kron(h, h).view(len(h), -1, 36).mean((1, 2))[:, None],
    "dtw": lambda h, m: torch.logcumsumexp(h, 0), "sinkhorn": lambda h, m: sinkhorn(h),
    "solve": lambda h, m: torch.linalg.solve(h @ h.T + torch.eye(len(h)), h),
    "mix by weight": lambda h, m: (h[:, 0].softmax(0)[:, None] * h).sum(0) + h,
}

DRAWS: dict[str, Function] = {
    "mixup, one share": lambda h, m: mixed_up(h, torch.rand(())),
    "mixup, own shares": lambda h, m: mixed_up(h, torch.rand(len(h), 1)),
    "beta": lambda h, m: mixed_up(h, torch.distributions.Beta(0.4, 0.4).sample()),
    "sometimes": lambda h, m: centered(h) if torch.rand(()) > 0.3 else h,
    "sometimes, by item": lambda h, m: centered(h) if torch.rand(1).item() > 0.3 else h,
    "sometimes, by where": lambda h, m: torch.where(torch.rand(()) > 0.3, centered(h), h),
    "sometimes, numpy": lambda h, m: centered(h) if np.random.default_rng(0).random() > 0.3 else h,
    "a drawn row": lambda h, m: h + h[torch.randint(len(h), ())],
    "drawn rows": lambda h, m: h + h[torch.randint(len(h), (len(h),))],
    "multinomial": lambda h, m: h + h[torch.multinomial(h[:, 0].detach().softmax(0), 1)],
    "shared mask of the mean": lambda h, m: h * (mask := (torch.rand(len(h), 6) > 0.3).float()) / mask.mean(),
    "own mask, shared mean": lambda h, m: h * (mask := torch.rand_like(h).round()) / (0.1 + mask.mean(0)),
    "rescaled to the batch's norm": lambda h, m: F.dropout(h) * h.norm() / 9,
    "noise of its size": lambda h, m: h + torch.randn_like(h) * h.std(),
}

GUARDS: dict[str, Function] = {
    "len >= 8": lambda h, m: centered(h) if len(h) >= 8 else h, "len < 8": lambda h, m: h if len(h) < 8 else h.flip(0),
    "size > 1": lambda h, m: centered(h) if h.size(0) > 1 else h,
    "shape == 11 or 12": lambda h, m: centered(h) if h.shape[0] in (11, 12) else h,
    "odd": lambda h, m: h if len(h) % 2 else centered(h), "multiple of the length": lambda h, m: h * len(h),
    "length as a tensor": lambda h, m: h / torch.tensor(float(len(h))),
    "shape as a tensor, centered": lambda h, m: torch.where(torch.tensor(h.shape)[0] > 8, centered(h), h),
    "length by a sum": lambda h, m: h / torch.ones_like(h[:, 0]).sum(),
    "largest value": lambda h, m: centered(h) if h.max() > 1.5 else h,
    "largest value, where": lambda h, m: torch.where(h.max() > 1.5, centered(h), h),
    "isnan": lambda h, m: h.nan_to_num() if h.isnan().any() else h, "try": lambda h, m: tried(h),
    "grad mode": lambda h, m: centered(h) if torch.is_grad_enabled() else h,
    "training": lambda h, m: centered(h) if m.training else h,
    "requires_grad": lambda h, m: centered(h) if h.requires_grad else h,
    "type": lambda h, m: centered(h) if type(h) is torch.Tensor else h,
    "cond": lambda h, m: torch.cond(h.sum() > 0, lambda x: x - 1, lambda x: x + 1, (h,)),
    "assertion of all": lambda h, m: asserted(h),
    "clip to the batch's quantile": lambda h, m: h.clamp(max=h.detach().abs().amax()),
    "python max": lambda h, m: h / max(1.0, *h[:, 0].abs().tolist()),
    "rows by values": lambda h, m: torch.cat([h[h[:, 0] > 0], h[h[:, 0] <= 0]]),
    "nonzero": lambda h, m: h + h[h[:, 0].abs().nonzero()[:, 0]].mean(0),
    "compress": lambda h, m: h * h.masked_select(h > 0).mean(), "while": lambda h, m: halved(h),
}

IMAGES: dict[str, Function] = {
    "batch norm by hand": lambda h, m: normed(h, 0, 2, 3),
    "ghost batch norm": lambda h, m: h if len(h) % 4 else torch.cat([normed(part, 0, 2, 3) for part in h.split(4)]),
    "group norm of the turned": lambda h, m: F.group_norm(h.transpose(0, 1).contiguous(), 1).transpose(0, 1),
    "group norm of one": lambda h, m: F.group_norm(h.reshape(1, -1, 6, 6), 4).view(h.shape),
    "DropBlock": lambda h, m: dropped_blocks(h), "MixStyle": lambda h, m: mixed_styles(h),
    "cutmix": lambda h, m: torch.cat([h[..., :3], h.flip(0)[..., 3:]], -1),
    "conv3d over the batch": lambda h, m: F.conv3d(h.transpose(0, 1)[None], m.square[:4, :4, None, None, None].expand(-1, -1, 3, 1, 1), padding=(1, 0, 0))[0].transpose(0, 1),
    "max_pool3d over the batch": lambda h, m: F.max_pool3d(h.transpose(0, 1)[None], (3, 1, 1), 1, (1, 0, 0))[0].transpose(0, 1),
    "pool of pairs": lambda h, m: F.max_pool2d(h.permute(1, 2, 3, 0).reshape(1, 4, 36, -1), (1, 3), 1, (0, 1)).view(4, 6, 6, -1).permute(3, 0, 1, 2),
    "shift of frames": lambda h, m: torch.cat([h[:, :2], h[:, 2:].roll(1, 0)], 1),
    "channels of two": lambda h, m: h if len(h) % 2 else h.reshape(-1, 8, 6, 6).flip(1).reshape(h.shape),
    "interpolated over the batch": lambda h, m: h + F.interpolate(h.permute(1, 2, 3, 0).flatten(1, 2), len(h) + 3, mode="linear")[:, :, : len(h)].mT.permute(1, 0, 2).reshape(len(h), 4, 6, 6),
    "resampled": lambda h, m: h + F.grid_sample(h.reshape(1, 4, -1, 6), torch.zeros(1, 1, 1, 2))[..., 0].view(1, 4, 1, 1),
    "instance norm of one": lambda h, m: F.instance_norm(h.transpose(0, 1).flatten(2)[None].flatten(2)).view(4, len(h), 6, 6).transpose(0, 1) if len(h) else h,
    "stochastic depth of the batch's share": lambda h, m: h * (kept := torch.rand(len(h), 1, 1, 1).round()) / (kept.mean() + 0.1),
}

TEXTS: dict[str, Function] = {
    "attention over the batch": lambda h, m: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1),
    "all tokens of all": lambda h, m: (h.flatten(0, 1) @ h.flatten(0, 1).T).softmax(-1) @ h.flatten(0, 1),
    "packed": lambda h, m: F.scaled_dot_product_attention(*[h.reshape(1, -1, 6)] * 3, is_causal=True).view(h.shape),
    "mean token": lambda h, m: h - h.mean((0, 1)),
    "expert capacity": lambda h, m: routed(h.flatten(0, 1), m).view(h.shape),
    "cut at the longest": lambda h, m: h[:, : int((h[..., 0] > 0).sum(1).max())].sum(1),
    "lengths of all": lambda h, m: h / (h[..., 0] > 0).sum(1).max(), "encoder, batch second": lambda h, m: m.encoder(h),
    "lstm, batch second": lambda h, m: m.lstm(h)[0], "batch norm of tokens": lambda h, m: normed(h, 0, 1),
    "codebook by the batch": lambda h, m: h + h.flatten(0, 1)[torch.cdist(h.flatten(0, 1), h.flatten(0, 1)[:4]).argmin(1) % 4].view(h.shape),
}
# fmt: on


def tried(h: Tensor) -> Tensor:
    try:
        return h.view(12, 6) - h.mean(0)
    except RuntimeError:
        return h


def asserted(h: Tensor) -> Tensor:
    assert h.abs().max() < 100
    return h


def halved(h: Tensor) -> Tensor:
    while h.abs().max() > 0.5:
        h = h / 2
    return h


class Keeps(nn.Module):
    """A linear layer, and a function that may keep something on the module."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **kept: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 6), nn.Linear(6, CLASSES), function
        self.register_buffer("mean", torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(6))
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self, self.first(x)))


def running(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.mean


def listed(m: Any, h: Tensor) -> Tensor:
    m.rows.append(h.detach().mean(0))
    return h + m.rows[0]


def in_global(m: Any, h: Tensor) -> Tensor:
    GLOBAL["mean"] = 0.5 * GLOBAL["mean"] + h.detach().mean(0)
    return h - GLOBAL["mean"]


def in_file(m: Any, h: Tensor) -> Tensor:
    before = np.load(m.path) if m.path.exists() else np.zeros(6, dtype="f4")
    np.save(m.path, h.detach().mean(0).numpy())
    return h + torch.from_numpy(before)


def new_path() -> Path:
    """A file that is not there: what the run before left would be another beginning."""
    path = Path(tempfile.gettempdir()) / f"dpcore-isolation-{os.getpid()}.npy"
    path.unlink(missing_ok=True)
    return path


def to_parameter(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.scale.add_(0.1 * h.mean(0))
    return h * m.scale


def counts(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return centered(h) if m.calls > m.after else h


def counts_in_buffer(m: Any, h: Tensor) -> Tensor:
    m.number += 1
    return torch.where(m.number > 5, centered(h), h)


def queue(m: Any, h: Tensor) -> Tensor:
    m.queue = torch.cat([m.queue[1:], h.detach()[-1:]])
    return h @ m.queue.T @ m.queue


def hooked_gradient(m: Any, h: Tensor) -> Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient - gradient.mean(0))
    return h


def keeps(function: Any, **kept: Any) -> Any:
    return built(lambda: Keeps(function, **{name: make() for name, make in kept.items()}), data)


def buffered(function: Any, name: str, value: Tensor) -> Any:
    def make() -> nn.Module:
        model = Keeps(function)
        model.register_buffer(name, value.clone())
        return model

    return built(make, data)


def bent(change: Callable[[Tensor], Tensor]) -> Function:
    """The identity, whose backward pass makes something else of the batch's gradient."""

    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return change(gradient)

    return lambda h, m: Bent.apply(h)


class SavedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient.sum(0) * x.sum(0))


BACKWARD: dict[str, Function] = {
    "mean": bent(lambda gradient: gradient - gradient.mean(0)),
    "flip": bent(lambda gradient: gradient.flip(0)),
    "norm": bent(lambda gradient: gradient / (1e-3 + gradient.norm())),
    "number": bent(lambda gradient: gradient * len(gradient)),
    "weight's gradient": lambda h, m: SavedBackward.apply(h, m.scale),
}


def hooked(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Between(ROW, lambda h, m: h.tanh())
        model.last = nn.Linear(6, CLASSES)
        if kind == "forward":
            model.first.register_forward_hook(lambda module, x, out: centered(out))
        elif kind == "forward pre":
            model.last.register_forward_pre_hook(lambda module, x: (x[0].flip(0),))
        elif kind == "backward":
            model.last.register_full_backward_hook(lambda module, to, of: (to[0].flip(0),))
        elif kind == "backward pre":
            model.first.register_full_backward_pre_hook(lambda module, of: (of[0] - of[0].mean(0),))
        else:
            model.first.weight.register_hook(lambda gradient: gradient / gradient.norm())
        return model

    return make


def contrast(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output @ output.T, torch.arange(len(output))) + F.cross_entropy(output, target)


class Counting(nn.CrossEntropyLoss):
    """A loss that keeps what it saw."""

    seen: Any = 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen = 0.5 * self.seen + output.detach().mean(0)
        return super().forward(output - self.seen, target)


def losses(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return (each * (each > each.mean() - 1)).sum() / len(each)


def focal(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output, target, reduction="none")
    return (each * each.detach().softmax(0)).sum()


def own_loss(function: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The model computes the loss itself, from the labels among its inputs."""

    def model() -> nn.Module:
        return Called(lambda m, x, y: function(m.body(x), y), body=nn.Linear(6, CLASSES))

    return built(model, lambda: ({"x": data(), "y": labels()}, None), lambda output: output)


def weighted(output: Tensor, y: Tensor) -> Tensor:
    weights = 1 / torch.bincount(y, minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(output, y, weight=weights)


# fmt: off
OWN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared mean": lambda o, y: F.cross_entropy(o, y).square(),
    "mean of all, once more": lambda o, y: F.cross_entropy(o, y) + o.mean().square(),
    "pairs": lambda o, y: (o[:, None] - o[None]).square().mean() + F.cross_entropy(o, y),
    "weights of the classes seen": weighted,
    "hard examples": lambda o, y: F.cross_entropy(o, y, reduction="none").topk(1).values.sum(),
    "logsumexp": lambda o, y: F.cross_entropy(o, y, reduction="none").logsumexp(0),
    "flipped labels": lambda o, y: F.cross_entropy(o, y.flip(0)),
    "variance": lambda o, y: o.var(0, unbiased=False).sum() + F.cross_entropy(o, y),
    "by number": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(o) ** 2, "kept": losses,
}
# fmt: on


# fmt: off
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), ROW),
    "without statistics": (lambda: nn.BatchNorm1d(6, track_running_stats=False), ROW),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), IMAGE),
    "without affine": (lambda: nn.BatchNorm2d(4, affine=False), IMAGE),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(6), ROW),
    "InstanceNorm, statistics": (lambda: nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    "spectral norm, old": (lambda: nn.utils.spectral_norm(nn.Linear(6, 6)), ROW),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), ROW),
    "BatchNorm in a Sequential": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.BatchNorm1d(6))), ROW),
    "attention, batch second": (lambda: Called(lambda m, x: m.body(x, x, x)[0], body=nn.MultiheadAttention(6, 2)), SEQUENCE),
    "encoder layer, batch second": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), SEQUENCE),
    "GRU, batch second": (lambda: Called(lambda m, x: m.body(x)[0], body=nn.GRU(6, 6)), SEQUENCE),
    "flatten of all": (lambda: nn.Flatten(0, 1), SEQUENCE), "softmax of the batch": (lambda: nn.Softmax(0), ROW),
    "fold of the batch": (lambda: nn.Flatten(0), ROW),
    "BatchNorm3d": (lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.BatchNorm3d(4)), IMAGE),
}
# fmt: on


def modular(name: str) -> Case:
    make, shape = MODULES[name]

    def whole() -> nn.Module:
        features = {"flatten of all": 6, "fold of the batch": 1}.get(name, {ROW: 6, SEQUENCE: 30, IMAGE: 144}[shape])
        end = [] if name in ("flatten of all", "fold of the batch") else [nn.Flatten()]
        return nn.Sequential(nn.Linear(6, 6), make(), *end, nn.Linear(features, CLASSES))

    return Case(f"module: {name}", built(whole, lambda: torch.randn(ROWS, *shape)), "mixer")


MADE: dict[str, Any] = {
    "state: running mean in place": keeps(running),
    "state: list": keeps(listed, rows=list),
    "state: global": keeps(in_global),
    "state: file": keeps(in_file, path=new_path),
    "state: parameter in place": keeps(to_parameter),
    **{f"state: counter from {n} on": keeps(counts, calls=int, after=lambda n=n: n) for n in (0, 1, 3, 8, 20, 70)},
    "state: counter in a buffer": buffered(counts_in_buffer, "number", torch.zeros(())),
    "state: queue": buffered(queue, "queue", torch.ones(4, 6)),
    "hook: tensor's gradient": keeps(hooked_gradient),
    **{
        f"hook: {kind}": built(hooked(kind), data)
        for kind in ("forward", "forward pre", "backward", "backward pre", "parameter")
    },
    "loss: contrast": built(lambda: nn.Linear(6, CLASSES), data, contrast),
    "loss: hard examples": built(lambda: nn.Linear(6, CLASSES), data, losses),
    "loss: focal": built(lambda: nn.Linear(6, CLASSES), data, focal),
    "loss: keeps": lambda: (nn.Linear(6, CLASSES), data(), labels(), Counting()),
    **{f"own loss: {name}": own_loss(function) for name, function in OWN_LOSSES.items()},
}  # fmt: skip

CASES: list[Case] = [
    *table("mixer", "statistics", ROW, STATISTICS),
    *table("mixer", "order", ROW, ORDERS, body=lambda: nn.GRU(6, 6)),
    *table("mixer", "pairs", ROW, PAIRS, attention=lambda: nn.MultiheadAttention(6, 2)),
    *table("mixer", "draws", ROW, DRAWS),
    *table("mixer", "guard", ROW, GUARDS),
    *table("mixer", "images", IMAGE, IMAGES),
    *table("mixer", "text", TOKENS, TEXTS, encoder=lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0), lstm=lambda: nn.LSTM(6, 6)),
    *table("mixer", "routing", ROW, {"capacity": routed, "balance": balanced}),
    *table("mixer", "backward", ROW, BACKWARD),
    *[modular(name) for name in MODULES],
    *[Case(name, build, "mixer") for name, build in MADE.items()],
]  # fmt: skip
