"""Functions of hidden values that treat each example alone: one model for each operation and layout."""

from typing import Any

import torch
import torch.nn.functional as F

from tests.isolation.models import IMAGE, ROW, SEQUENCE, Case, Function, Tensor, table


def noise(like: Tensor) -> Tensor:
    return torch.empty(like.shape).uniform_()


def written(h: Tensor, index: Any, value: Any) -> Tensor:
    h = h.clone()
    h[index] = value
    return h


def scattered(h: Tensor, m: Any) -> Tensor:
    index = h.argsort(-1)
    return torch.zeros_like(h).scatter(-1, index, h)


def unpooled(h: Tensor, m: Any) -> Tensor:
    pooled, places = F.max_pool2d(h, 2, return_indices=True)
    return F.max_unpool2d(pooled, places, 2)


def symmetric(h: Tensor) -> Tensor:
    return h.mT @ h + torch.eye(6)


# fmt: off
ENTRIES: dict[str, Function] = {  # every pointwise operation of torch is in the proof's own tests, test_rules.py
    "where": lambda h, m: torch.where(h > 0, h, 0.1 * m.scale),
    "by parameters": lambda h, m: (h * m.scale + m.one) / (1 + m.one.exp()),
    "in place": lambda h, m: h.mul(2).add_(1).relu_(), "to half": lambda h, m: h.to(torch.bfloat16).tanh().float(),
    "detached": lambda h, m: h * h.detach().sigmoid(), "comparison": lambda h, m: h * (h > h.mean(-1, keepdim=True)),
    "complex": lambda h, m: torch.view_as_real(torch.complex(h, h.tanh()).exp()),
    "own shape": lambda h, m: h / h.shape[1] + h.size(-1),
    "shape as a tensor": lambda h, m: h * torch.tensor(h.shape)[1],
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda h, m: h.sum(1), "mean of two": lambda h, m: h.mean((1, 2))[:, None], "var": lambda h, m: h.var(1),
    "vector norm 3": lambda h, m: torch.linalg.vector_norm(h, 3, -1), "max": lambda h, m: h.max(1).values,
    "median": lambda h, m: h.median(1).values, "quantile": lambda h, m: h.quantile(0.3, dim=1),
    "prod": lambda h, m: h.prod(-1), "logsumexp": lambda h, m: h.logsumexp(1), "softmax": lambda h, m: h.softmax(1),
    "normalize": lambda h, m: F.normalize(h, dim=-1),
    "cosine": lambda h, m: F.cosine_similarity(h, m.scale[None, None], -1), "cumsum": lambda h, m: h.cumsum(1),
    "cummax": lambda h, m: h.cummax(1).values, "aminmax": lambda h, m: torch.cat(torch.aminmax(h, dim=1), 1),
    "any": lambda h, m: h * (h > 0).any(1, keepdim=True), "argmax": lambda h, m: h * F.one_hot(h.argmax(-1), 6),
    "sum of all but one": lambda h, m: h - h.sum(1, keepdim=True),
    "sort": lambda h, m: h.sort(1).values, "argsort": lambda h, m: h.gather(1, h.argsort(1)),
    "topk": lambda h, m: h.topk(2, 1).values,
}

VIEWS: dict[str, Function] = {
    "reshape": lambda h, m: h.reshape(len(h), 3, 10),
    "flatten and back": lambda h, m: h.flatten(0, 1).tanh().view(-1, 5, 6),
    "rows of all": lambda h, m: h.reshape(-1, 6) @ m.square if h.shape[1] == 1 else (h.reshape(-1, 6) @ m.square).reshape(h.shape),
    "permute": lambda h, m: h.permute(0, 2, 1),
    "there and back": lambda h, m: h.permute(2, 0, 1).tanh().permute(1, 2, 0),
    "squeeze": lambda h, m: h.unsqueeze(2).squeeze(2), "expand": lambda h, m: h[:, :1].expand(-1, 4, -1),
    "repeat": lambda h, m: h.repeat(1, 2, 1),
    "repeat_interleave": lambda h, m: h.repeat_interleave(2, 1), "unfold": lambda h, m: h.unfold(1, 3, 1),
    "roll": lambda h, m: h.roll(1, 1), "flip": lambda h, m: h.flip(1, 2), "slices": lambda h, m: h[:, 1:4, ::2],
    "index list": lambda h, m: h[:, [0, 0, 3]],
    "index_select": lambda h, m: h.index_select(2, torch.tensor([5, 0])), "pad": lambda h, m: F.pad(h, (1, 2)),
    "cat": lambda h, m: torch.cat([h, h.tanh()], 1),
    "stack first": lambda h, m: torch.stack([h, h.tanh()]).sum(0), "split": lambda h, m: h.split([2, 3], 1)[1],
    "unbind": lambda h, m: sum(h.unbind(1)), "diagonal": lambda h, m: h.diagonal(dim1=1, dim2=2),
    "diag_embed": lambda h, m: torch.diag_embed(h[:, 0]), "tril": lambda h, m: h.tril(),
    "as parameter's rows": lambda h, m: h + m.square[:5],
    "class token": lambda h, m: torch.cat([m.scale.expand(len(h), 1, -1), h], 1),
    "rows in a list": lambda h, m: torch.stack([row.tanh() for row in h]),
    "contiguous": lambda h, m: h.mT.contiguous().view(len(h), 30),
    "as_strided": lambda h, m: h.contiguous().as_strided((len(h), 3), (30, 2)),
    "view after draws": lambda h, m: (h + noise(h)).view(len(h), -1),
    "view of a transposed": lambda h, m: h.mT.reshape(len(h), -1).view(-1, 6, 5).mT.reshape(len(h), -1),
    "meshgrid": lambda h, m: h + torch.stack(torch.meshgrid(torch.arange(5), torch.arange(6), indexing="ij")).sum(0),
}

INDEXED: dict[str, Function] = {
    "gather": lambda h, m: h.gather(1, (h > 0).long()),
    "take_along_dim": lambda h, m: h.take_along_dim(h.argmax(1, keepdim=True), 1), "scatter": scattered,
    "index_add": lambda h, m: h.index_add(1, torch.tensor([0, 2]), h[:, :2]),
    "set slice": lambda h, m: written(h, (slice(None), 1), 0.5), "set mask": lambda h, m: written(h, h > 1, 0.0),
    "own row": lambda h, m: h[torch.arange(len(h)), h.sum(-1).argmax(1)],
    "length's row": lambda h, m: h[torch.arange(len(h)), (h[..., 0] > 0).sum(1).clamp(max=4)],
    "bucketize": lambda h, m: h + torch.bucketize(h.detach(), torch.linspace(-1, 1, 5)),
    "table": lambda h, m: m.square[(h[..., 0] > 0).long()] + h,
    "bincount of an example": lambda h, m: h + F.one_hot((h > 0).long().sum(1), 7).sum(1)[:, None, :6],
    "masked_scatter": lambda h, m: h.masked_scatter(h > 9, h.tanh()),
}

PRODUCTS: dict[str, Function] = {
    "matmul": lambda h, m: h @ m.square, "linear": lambda h, m: F.linear(h, m.square, m.scale),
    "einsum": lambda h, m: torch.einsum("btd,de->bte", h, m.square),
    "einsum pairs": lambda h, m: torch.einsum("bsd,btd->bst", h, h),
    "einsum outer": lambda h, m: torch.einsum("btd,bte->bde", h, h), "bmm": lambda h, m: torch.bmm(h, h.mT),
    "addmm": lambda h, m: torch.addmm(m.scale, h.flatten(0, 1), m.square).view(-1, 5, 6),
    "bilinear": lambda h, m: F.bilinear(h, h, m.square.expand(2, 6, 6).contiguous()),
    "cross": lambda h, m: torch.linalg.cross(h[..., :3], h[..., 3:]),
    "cdist": lambda h, m: torch.cdist(h, h[:, :2] + 1), "fft": lambda h, m: torch.fft.rfft(h, dim=1).abs(),
    "fft2": lambda h, m: torch.fft.fft2(h).real, "inverse": lambda h, m: torch.linalg.inv(symmetric(h)),
    "solve": lambda h, m: torch.linalg.solve(symmetric(h), h.mT),
    "equal eigenvalues": lambda h, m: h @ torch.linalg.eigh(h[:, :1].mT @ h[:, :1] + torch.eye(6))[1],
    "of parameters": lambda h, m: h @ torch.linalg.inv(m.square @ m.square.mT + torch.eye(6)),
    "vmap": lambda h, m: torch.vmap(lambda one: one @ m.square + one.mean(0))(h),
    "softmax attention": lambda h, m: (h @ h.mT).softmax(-1) @ h,
}

PICTURES: dict[str, Function] = {
    "mean": lambda h, m: h.mean((2, 3)),
    "max_pool": lambda h, m: F.max_pool2d(h, 2), "avg_pool": lambda h, m: F.avg_pool2d(h, 3, 1, 1),
    "bilinear": lambda h, m: F.interpolate(h, (4, 5), mode="bilinear"),
    "pixel_shuffle": lambda h, m: F.pixel_shuffle(h, 2),
    "channel_shuffle": lambda h, m: h.view(len(h), 2, 2, 6, 6).transpose(1, 2).flatten(1, 2),
    "unfold": lambda h, m: F.unfold(h, 2), "fold": lambda h, m: F.fold(F.unfold(h, 2, stride=2), (6, 6), 2, stride=2),
    "patches": lambda h, m: h.unfold(2, 3, 3).unfold(3, 3, 3).flatten(4).mean(-1), "max_unpool": unpooled,
    "group_norm": lambda h, m: F.group_norm(h, 2), "layer_norm": lambda h, m: F.layer_norm(h, h.shape[1:]),
    "squeeze and excite": lambda h, m: h * h.mean((2, 3), keepdim=True).sigmoid(),
    "grid_sample": lambda h, m: F.grid_sample(h, h[:, :2].movedim(1, -1).tanh(), align_corners=False),
    "affine_grid": lambda h, m: F.grid_sample(h, F.affine_grid(torch.eye(3)[:2].expand(len(h), -1, -1), h.shape, align_corners=False), align_corners=False),
    "channels last": lambda h, m: h.contiguous(memory_format=torch.channels_last).relu(),
    "as sequence": lambda h, m: h.flatten(2).mT,
    "own filter": lambda h, m: F.conv2d(h.reshape(1, -1, 6, 6), h[:, :, :3, :3].reshape(-1, 1, 3, 3), groups=h.shape[0] * 4).view(len(h), -1),
    "cosine of places": lambda h, m: F.cosine_similarity(h, h.flip(1), 1),
}

SECOND: dict[str, Function] = {  # (T, B, D)
    "tanh": lambda h, m: h.tanh(), "linear": lambda h, m: h @ m.square, "cumsum": lambda h, m: h.cumsum(0),
    "loop": lambda h, m: torch.stack([step.tanh() @ m.square for step in h]),
    "attention": lambda h, m: torch.einsum("sbd,tbd->bst", h, h).softmax(-1).matmul(h.transpose(0, 1)).transpose(0, 1),
    "rows": lambda h, m: (h.reshape(-1, 6) @ m.square).view(5, -1, 6),
    "bmm": lambda h, m: torch.bmm(h, m.square.expand(5, 6, 6)), "positions": lambda h, m: h + m.square[:5, None],
    "cat": lambda h, m: torch.cat([h, h[:1]]),
}

DRAWN: dict[str, Function] = {
    "rand_like": lambda h, m: h + torch.rand_like(h), "uniform_ of empty": lambda h, m: h + noise(h),
    "bernoulli": lambda h, m: h * torch.bernoulli(torch.full_like(h, 0.7)),
    "bernoulli of values": lambda h, m: h * torch.bernoulli(h.detach().sigmoid()),
    "shared": lambda h, m: h + torch.rand(6), "a number for each": lambda h, m: h * torch.rand(len(h), 1, 1),
    "gumbel": lambda h, m: F.gumbel_softmax(h, dim=-1),
    "multinomial": lambda h, m: h + torch.multinomial(h.detach().flatten(0, 1).softmax(-1), 1).view(len(h), 5, 1),
    "order of features": lambda h, m: h[..., torch.randperm(6)], "rrelu": lambda h, m: F.rrelu(h, training=True),
}
# fmt: on


CASES: list[Case] = [
    *table("apart", "entries", SEQUENCE, ENTRIES), *table("apart", "reduction", SEQUENCE, REDUCTIONS),
    *table("apart", "view", SEQUENCE, VIEWS), *table("apart", "indexed", SEQUENCE, INDEXED),
    *table("apart", "product", SEQUENCE, PRODUCTS), *table("apart", "picture", IMAGE, PICTURES),
    *table("apart", "examples second", SEQUENCE, SECOND, second=True), *table("apart", "drawn", SEQUENCE, DRAWN),
    *table("apart", "row", ROW, {
        "linear": lambda h, m: h @ m.square, "softmax": lambda h, m: h.softmax(1), "sort": lambda h, m: h.sort(1).values,
        "as image": lambda h, m: h.view(-1, 1, 2, 3).tanh(), "outer": lambda h, m: h[:, :, None] * h[:, None],
        "one logit": lambda h, m: h.sum(1, keepdim=True), "first": lambda h, m: h[:, :1] + m.scale,
        "shape as a tensor": lambda h, m: h * torch.tensor(h.shape)[1],
    }),
]  # fmt: skip
