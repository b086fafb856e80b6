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
    "gelu tanh": lambda h, m: F.gelu(h, approximate="tanh"), "exp": lambda h, m: (-h * h).exp(),
    "round": lambda h, m: h + h.round(), "maximum": lambda h, m: torch.maximum(h, m.scale),
    "addcdiv": lambda h, m: torch.addcdiv(h, h, 2 + h.square()), "nan_to_num": lambda h, m: h.nan_to_num(0.0),
    "where": lambda h, m: torch.where(h > 0, h, 0.1 * m.scale),
    "masked_fill": lambda h, m: h.masked_fill(h < -0.5, -1.0),
    "by parameters": lambda h, m: (h * m.scale + m.one) / (1 + m.one.exp()),
    "in place": lambda h, m: h.mul(2).add_(1).relu_(), "threshold": lambda h, m: F.threshold(h, 0.1, 20.0),
    "to double": lambda h, m: h.double().tanh().float(), "to half": lambda h, m: h.to(torch.bfloat16).tanh().float(),
    "detached": lambda h, m: h * h.detach().sigmoid(), "comparison": lambda h, m: h * (h > h.mean(-1, keepdim=True)),
    "heaviside": lambda h, m: h + torch.heaviside(h.detach(), torch.zeros(())),
    "complex": lambda h, m: torch.view_as_real(torch.complex(h, h.tanh()).exp()),
    "complex size": lambda h, m: torch.complex(h, h + 1).abs(), "own shape": lambda h, m: h / h.shape[1] + h.size(-1),
    "shape as a tensor": lambda h, m: h * torch.tensor(h.shape)[1],
    "shape as a tensor, feature": lambda h, m: h / torch.tensor(h.shape[1:]).prod(),
}

REDUCTIONS: dict[str, Function] = {
    "sum": lambda h, m: h.sum(1), "mean": lambda h, m: h.mean(-1), "mean of two": lambda h, m: h.mean((1, 2))[:, None],
    "var": lambda h, m: h.var(1), "std": lambda h, m: h.std(-1, keepdim=True) + h, "norm": lambda h, m: h.norm(dim=1),
    "vector norm 3": lambda h, m: torch.linalg.vector_norm(h, 3, -1),
    "matrix norm": lambda h, m: torch.linalg.matrix_norm(h)[:, None], "amax": lambda h, m: h.amax(1),
    "max": lambda h, m: h.max(1).values, "min": lambda h, m: h.min(-1)[0], "amin": lambda h, m: h.amin((1, 2))[:, None],
    "median": lambda h, m: h.median(1).values, "quantile": lambda h, m: h.quantile(0.3, dim=1),
    "kthvalue": lambda h, m: h.kthvalue(2, 1).values, "prod": lambda h, m: h.prod(-1),
    "logsumexp": lambda h, m: h.logsumexp(1), "softmax": lambda h, m: h.softmax(1),
    "log_softmax": lambda h, m: h.log_softmax(-1), "softmin": lambda h, m: F.softmin(h, 2),
    "normalize": lambda h, m: F.normalize(h, dim=-1),
    "cosine": lambda h, m: F.cosine_similarity(h, m.scale[None, None], -1), "cumsum": lambda h, m: h.cumsum(1),
    "cumprod": lambda h, m: h.cumprod(-1), "cummax": lambda h, m: h.cummax(1).values,
    "logcumsumexp": lambda h, m: h.logcumsumexp(1), "diff": lambda h, m: h.diff(dim=1),
    "aminmax": lambda h, m: torch.cat(torch.aminmax(h, dim=1), 1),
    "count": lambda h, m: h * h.count_nonzero(1)[:, None], "any": lambda h, m: h * (h > 0).any(1, keepdim=True),
    "argmax": lambda h, m: h * F.one_hot(h.argmax(-1), 6),
    "sum of all but one": lambda h, m: h - h.sum(1, keepdim=True), "nansum": lambda h, m: h.nansum(1),
    "nanmean": lambda h, m: h.nanmean(1), "var_mean": lambda h, m: torch.cat(torch.var_mean(h, 1), 1),
    "sort": lambda h, m: h.sort(1).values, "argsort": lambda h, m: h.gather(1, h.argsort(1)),
    "topk": lambda h, m: h.topk(2, 1).values, "msort of an example": lambda h, m: torch.vmap(torch.msort)(h),
    "mode": lambda h, m: h * h.round().mode(1).values[:, None],
}

VIEWS: dict[str, Function] = {
    "reshape": lambda h, m: h.reshape(len(h), 3, 10), "view": lambda h, m: h.view(h.shape[0], -1),
    "view of -1": lambda h, m: h.view(-1, 30), "flatten and back": lambda h, m: h.flatten(0, 1).tanh().view(-1, 5, 6),
    "unflatten": lambda h, m: h.unflatten(2, (2, 3)).sum(2),
    "rows of all": lambda h, m: h.reshape(-1, 6) @ m.square if h.shape[1] == 1 else (h.reshape(-1, 6) @ m.square).reshape(h.shape),
    "permute": lambda h, m: h.permute(0, 2, 1),
    "there and back": lambda h, m: h.permute(2, 0, 1).tanh().permute(1, 2, 0), "movedim": lambda h, m: h.movedim(1, 2),
    "swapaxes": lambda h, m: h.swapaxes(1, 2), "squeeze": lambda h, m: h.unsqueeze(2).squeeze(2),
    "expand": lambda h, m: h[:, :1].expand(-1, 4, -1), "expand_as": lambda h, m: m.scale.expand_as(h) * h,
    "repeat": lambda h, m: h.repeat(1, 2, 1), "tile": lambda h, m: h.tile(1, 1, 2),
    "repeat_interleave": lambda h, m: h.repeat_interleave(2, 1), "unfold": lambda h, m: h.unfold(1, 3, 1),
    "roll": lambda h, m: h.roll(1, 1), "flip": lambda h, m: h.flip(1, 2), "rot90": lambda h, m: h.rot90(1, (1, 2)),
    "narrow": lambda h, m: h.narrow(1, 1, 3), "slices": lambda h, m: h[:, 1:4, ::2],
    "ellipsis": lambda h, m: h[..., -1], "select": lambda h, m: h.select(1, 2),
    "index list": lambda h, m: h[:, [0, 0, 3]], "two lists": lambda h, m: h[:, [0, 1], [2, 3]],
    "index_select": lambda h, m: h.index_select(2, torch.tensor([5, 0])), "pad": lambda h, m: F.pad(h, (1, 2)),
    "pad reflect": lambda h, m: F.pad(h, (1, 1), mode="reflect"),
    "pad circular": lambda h, m: F.pad(h, (2, 1), mode="circular"), "cat": lambda h, m: torch.cat([h, h.tanh()], 1),
    "stack": lambda h, m: torch.stack([h, h.tanh()], 1), "hstack": lambda h, m: torch.hstack([h, h]),
    "stack first": lambda h, m: torch.stack([h, h.tanh()]).sum(0), "split": lambda h, m: h.split([2, 3], 1)[1],
    "chunk": lambda h, m: torch.cat(h.chunk(3, -1)[::2], -1), "unbind": lambda h, m: sum(h.unbind(1)),
    "tensor_split": lambda h, m: h.tensor_split(2, 1)[0], "diagonal": lambda h, m: h.diagonal(dim1=1, dim2=2),
    "diag_embed": lambda h, m: torch.diag_embed(h[:, 0]), "tril": lambda h, m: h.tril(), "triu": lambda h, m: h.triu(1),
    "as parameter's rows": lambda h, m: h + m.square[:5],
    "class token": lambda h, m: torch.cat([m.scale.expand(len(h), 1, -1), h], 1),
    "rows in a list": lambda h, m: torch.stack([row.tanh() for row in h]),
    "broadcast_to": lambda h, m: torch.broadcast_to(m.scale, h.shape) + h, "atleast": lambda h, m: torch.atleast_3d(h),
    "contiguous": lambda h, m: h.mT.contiguous().view(len(h), 30),
    "as_strided": lambda h, m: h.contiguous().as_strided((len(h), 3), (30, 2)),
    "clone": lambda h, m: h.clone(memory_format=torch.contiguous_format).mT,
    "view after draws": lambda h, m: (h + noise(h)).view(len(h), -1),
    "view of a transposed": lambda h, m: h.mT.reshape(len(h), -1).view(-1, 6, 5).mT.reshape(len(h), -1),
    "ravel": lambda h, m: h.ravel().view(len(h), -1),
    "meshgrid": lambda h, m: h + torch.stack(torch.meshgrid(torch.arange(5), torch.arange(6), indexing="ij")).sum(0),
}

INDEXED: dict[str, Function] = {
    "gather": lambda h, m: h.gather(1, (h > 0).long()),
    "take_along_dim": lambda h, m: h.take_along_dim(h.argmax(1, keepdim=True), 1), "scatter": scattered,
    "scatter_add": lambda h, m: torch.zeros_like(h).scatter_add(1, (h > 0).long() + 1, h),
    "scatter_reduce": lambda h, m: h.scatter_reduce(1, (h > 0).long(), h, "amax"),
    "index_add": lambda h, m: h.index_add(1, torch.tensor([0, 2]), h[:, :2]),
    "index_copy": lambda h, m: h.index_copy(1, torch.tensor([1]), h[:, :1]),
    "index_fill": lambda h, m: h.index_fill(2, torch.tensor([1]), 0.5),
    "set slice": lambda h, m: written(h, (slice(None), 1), 0.5),
    "set list": lambda h, m: written(h, (slice(None), slice(None), [0, 2]), m.one),
    "set mask": lambda h, m: written(h, h > 1, 0.0),
    "own row": lambda h, m: h[torch.arange(len(h)), h.sum(-1).argmax(1)],
    "length's row": lambda h, m: h[torch.arange(len(h)), (h[..., 0] > 0).sum(1).clamp(max=4)],
    "bucketize": lambda h, m: h + torch.bucketize(h.detach(), torch.linspace(-1, 1, 5)),
    "searchsorted": lambda h, m: h * torch.searchsorted(torch.linspace(-1, 1, 5), h.detach()),
    "table": lambda h, m: m.square[(h[..., 0] > 0).long()] + h,
    "one_hot": lambda h, m: h * F.one_hot((h[..., 0] > 0).long(), 6),
    "select_scatter": lambda h, m: h.select_scatter(h[:, 0].tanh(), 1, 2),
    "slice_scatter": lambda h, m: h.slice_scatter(h[:, :2] * 2, 1, 1, 3),
    "embedding": lambda h, m: h + F.embedding((h[..., 0] > 0).long(), m.square),
    "bincount of an example": lambda h, m: h + F.one_hot((h > 0).long().sum(1), 7).sum(1)[:, None, :6],
    "masked_scatter": lambda h, m: h.masked_scatter(h > 9, h.tanh()),
}

PRODUCTS: dict[str, Function] = {
    "matmul": lambda h, m: h @ m.square, "left": lambda h, m: m.square[:, :5] @ h,
    "linear": lambda h, m: F.linear(h, m.square, m.scale),
    "einsum": lambda h, m: torch.einsum("btd,de->bte", h, m.square),
    "einsum pairs": lambda h, m: torch.einsum("bsd,btd->bst", h, h),
    "einsum outer": lambda h, m: torch.einsum("btd,bte->bde", h, h),
    "einsum head": lambda h, m: torch.einsum("btd,d->bt", h, m.scale), "bmm": lambda h, m: torch.bmm(h, h.mT),
    "baddbmm": lambda h, m: torch.baddbmm(m.square[:5, :5], h, h.mT),
    "matmul 4d": lambda h, m: h[:, None] @ m.square.expand(2, 6, 6),
    "tensordot": lambda h, m: torch.tensordot(h, m.square, 1), "mv": lambda h, m: h @ m.scale,
    "inner": lambda h, m: torch.inner(h, m.square), "kron": lambda h, m: torch.vmap(torch.kron)(h, h[:, :2]),
    "addmm": lambda h, m: torch.addmm(m.scale, h.flatten(0, 1), m.square).view(-1, 5, 6),
    "bilinear": lambda h, m: F.bilinear(h, h, m.square.expand(2, 6, 6).contiguous()),
    "cross": lambda h, m: torch.linalg.cross(h[..., :3], h[..., 3:]),
    "cdist": lambda h, m: torch.cdist(h, h[:, :2] + 1),
    "chained": lambda h, m: torch.linalg.multi_dot([m.square, m.square, m.square])[0] + h,
    "fft": lambda h, m: torch.fft.rfft(h, dim=1).abs(),
    "fft real": lambda h, m: torch.view_as_real(torch.fft.fft(h, dim=-1)),
    "fft back": lambda h, m: torch.fft.irfft(torch.fft.rfft(h) * 0.5, n=6), "fft2": lambda h, m: torch.fft.fft2(h).real,
    "inverse": lambda h, m: torch.linalg.inv(symmetric(h)),
    "cholesky": lambda h, m: torch.linalg.cholesky(symmetric(h)),
    "solve": lambda h, m: torch.linalg.solve(symmetric(h), h.mT),
    "det": lambda h, m: torch.linalg.slogdet(symmetric(h))[1][:, None], "qr": lambda h, m: torch.linalg.qr(h.mT)[1],
    "equal eigenvalues": lambda h, m: h @ torch.linalg.eigh(h[:, :1].mT @ h[:, :1] + torch.eye(6))[1],
    "svdvals": lambda h, m: torch.linalg.svdvals(h), "eigvalsh": lambda h, m: torch.linalg.eigvalsh(symmetric(h)),
    "matrix_exp": lambda h, m: torch.linalg.matrix_exp(symmetric(h) / 30),
    "matrix power": lambda h, m: torch.linalg.matrix_power(symmetric(h) / 9, 3),
    "of parameters": lambda h, m: h @ torch.linalg.inv(m.square @ m.square.mT + torch.eye(6)),
    "vmap": lambda h, m: torch.vmap(lambda one: one @ m.square + one.mean(0))(h),
    "softmax attention": lambda h, m: (h @ h.mT).softmax(-1) @ h,
}

PICTURES: dict[str, Function] = {
    "mean": lambda h, m: h.mean((2, 3)), "channels' mean": lambda h, m: h.mean(1), "max": lambda h, m: h.amax((2, 3)),
    "max_pool": lambda h, m: F.max_pool2d(h, 2), "avg_pool": lambda h, m: F.avg_pool2d(h, 3, 1, 1),
    "adaptive": lambda h, m: F.adaptive_avg_pool2d(h, 2), "adaptive max": lambda h, m: F.adaptive_max_pool2d(h, 3),
    "nearest": lambda h, m: F.interpolate(h, scale_factor=2),
    "bilinear": lambda h, m: F.interpolate(h, (4, 5), mode="bilinear"),
    "bicubic": lambda h, m: F.interpolate(h, (4, 5), mode="bicubic"),
    "pixel_shuffle": lambda h, m: F.pixel_shuffle(h, 2), "pixel_unshuffle": lambda h, m: F.pixel_unshuffle(h, 2),
    "channel_shuffle": lambda h, m: h.view(len(h), 2, 2, 6, 6).transpose(1, 2).flatten(1, 2),
    "unfold": lambda h, m: F.unfold(h, 2), "fold": lambda h, m: F.fold(F.unfold(h, 2, stride=2), (6, 6), 2, stride=2),
    "patches": lambda h, m: h.unfold(2, 3, 3).unfold(3, 3, 3).flatten(4).mean(-1), "max_unpool": unpooled,
    "lp_pool": lambda h, m: F.lp_pool2d(h + 2, 2, 2), "pad": lambda h, m: F.pad(h, (1, 1, 1, 1), mode="replicate"),
    "group_norm": lambda h, m: F.group_norm(h, 2), "instance_norm": lambda h, m: F.instance_norm(h),
    "response_norm": lambda h, m: F.local_response_norm(h, 2), "layer_norm": lambda h, m: F.layer_norm(h, h.shape[1:]),
    "squeeze and excite": lambda h, m: h * h.mean((2, 3), keepdim=True).sigmoid(),
    "grid_sample": lambda h, m: F.grid_sample(h, h[:, :2].movedim(1, -1).tanh(), align_corners=False),
    "affine_grid": lambda h, m: F.grid_sample(h, F.affine_grid(torch.eye(3)[:2].expand(len(h), -1, -1), h.shape, align_corners=False), align_corners=False),
    "channels last": lambda h, m: h.contiguous(memory_format=torch.channels_last).relu(),
    "as sequence": lambda h, m: h.flatten(2).mT,
    "own filter": lambda h, m: F.conv2d(h.reshape(1, -1, 6, 6), h[:, :, :3, :3].reshape(-1, 1, 3, 3), groups=h.shape[0] * 4).view(len(h), -1),
    "cosine of places": lambda h, m: F.cosine_similarity(h, h.flip(1), 1), "flip": lambda h, m: h.flip(3),
    "crop": lambda h, m: h[:, :, 1:5, 2:],
    "dice": lambda h, m: (h.sigmoid().sum((1, 2, 3)) / h.square().sum((1, 2, 3)))[:, None],
}

SECOND: dict[str, Function] = {  # (T, B, D)
    "tanh": lambda h, m: h.tanh(), "linear": lambda h, m: h @ m.square, "mean": lambda h, m: h.mean(0, keepdim=True),
    "cumsum": lambda h, m: h.cumsum(0), "softmax": lambda h, m: h.softmax(0), "flip": lambda h, m: h.flip(0),
    "loop": lambda h, m: torch.stack([step.tanh() @ m.square for step in h]),
    "pad": lambda h, m: F.pad(h, (0, 0, 0, 0, 1, 0)),
    "attention": lambda h, m: torch.einsum("sbd,tbd->bst", h, h).softmax(-1).matmul(h.transpose(0, 1)).transpose(0, 1),
    "rows": lambda h, m: (h.reshape(-1, 6) @ m.square).view(5, -1, 6),
    "bmm": lambda h, m: torch.bmm(h, m.square.expand(5, 6, 6)), "last step": lambda h, m: h[-1:],
    "layer_norm": lambda h, m: F.layer_norm(h, (6,)), "positions": lambda h, m: h + m.square[:5, None],
    "sort": lambda h, m: h.sort(0).values, "cat": lambda h, m: torch.cat([h, h[:1]]), "roll": lambda h, m: h.roll(1, 0),
}

DRAWN: dict[str, Function] = {
    "rand_like": lambda h, m: h + torch.rand_like(h), "randn of its shape": lambda h, m: h + torch.randn(h.shape),
    "uniform_ of empty": lambda h, m: h + noise(h), "normal_ of zeros": lambda h, m: h + torch.zeros_like(h).normal_(),
    "bernoulli": lambda h, m: h * torch.bernoulli(torch.full_like(h, 0.7)),
    "bernoulli of values": lambda h, m: h * torch.bernoulli(h.detach().sigmoid()),
    "randint": lambda h, m: h + torch.randint_like(h, 3), "shared": lambda h, m: h + torch.rand(6),
    "a number for each": lambda h, m: h * torch.rand(len(h), 1, 1),
    "exponential_": lambda h, m: h + torch.empty_like(h).exponential_(),
    "gumbel": lambda h, m: F.gumbel_softmax(h, dim=-1),
    "multinomial": lambda h, m: h + torch.multinomial(h.detach().flatten(0, 1).softmax(-1), 1).view(len(h), 5, 1),
    "normal": lambda h, m: torch.normal(h, 0.1), "order of features": lambda h, m: h[..., torch.randperm(6)],
    "rrelu": lambda h, m: F.rrelu(h, training=True), "bernoulli_": lambda h, m: h * torch.empty_like(h).bernoulli_(0.5),
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
