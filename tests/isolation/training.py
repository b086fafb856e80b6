"""What training does beside layers: dropout, tied and parametrized weights, adapters, checkpoints, hooks, losses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.isolation.models import CLASSES, ROWS, Case, Tensor, built, labels
from tests.unit.torch.models import Called


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *middle, nn.Linear(8, CLASSES))


def images(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3), *layers, nn.Flatten(), nn.Linear(64, CLASSES))


def forward(function: Callable[..., Any], **parts: Any) -> nn.Module:
    """Two layers and what else is given; its forward pass is a function."""
    return Called(function, **{"a": nn.Linear(6, 8), "b": nn.Linear(8, CLASSES), **parts})


def lora(size: int, out: int) -> nn.Module:
    parts = {"down": nn.Parameter(torch.randn(2, size) / 3), "up": nn.Parameter(torch.randn(out, 2) / 3)}
    base = nn.Linear(size, out).requires_grad_(False)
    return Called(lambda m, x: m.base(x) + x @ m.down.T @ m.up.T, base=base, **parts)


def depth(shared: bool = False) -> nn.Module:
    """Stochastic depth: each example leaves the block out by a draw of its own."""
    kept = lambda x: torch.rand(1 if shared else len(x), 1) > 0.3  # noqa: E731
    return Called(lambda m, x: x + m.body(x) * kept(x), body=nn.Linear(8, 8))


class Quantized(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


def changed(change: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = mlp()
    change(model)
    return model


def partly(*trained: str) -> nn.Module:
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    return model


def buffered(function: Callable[[Any, Any], Any], value: Tensor, persistent: bool = True) -> nn.Module:
    model = forward(function)
    model.register_buffer("kept", value, persistent=persistent)
    return model


def cached(m: Any, x: Tensor) -> Tensor:
    """Fills a cache from shapes alone, once."""
    if m.cache is None:
        m.cache = torch.arange(x.shape[1], dtype=x.dtype) / 6
    return m.b(m.a(x + m.cache).tanh())


def updated(m: Any, x: Tensor) -> Tensor:
    m.kept.add_(1)
    return m.b(m.a(x).tanh())


def counted(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    return m.b(m.a(x).tanh())


def by_value(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return m.b(h.tanh() if x[0, 0] > 0 else h.relu())


def depth_by_value(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x).tanh() * 1.1 ** int((x[0] > 0).sum()))


def averaged(m: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return m.body((m.table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


def penalized(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) + 0.1 * output.square().mean()


def focal(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def x() -> Tensor:
    return torch.randn(ROWS, 6)


def pictures() -> Tensor:
    return torch.randn(ROWS, 4, 6, 6)


def numbers(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (x(), torch.randn(ROWS, *shape))


def yes_no(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (x(), torch.randint(2, (ROWS, *shape)).float())


def with_nan() -> Tensor:
    values = x()
    values[3] = float("nan")
    return values


def without_grad(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


def autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.b(m.a(x)).float()


def halved(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / 2)
    return h.tanh()


def inner(m: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        found = torch.autograd.grad(m.a(x).tanh().sum(), x)[0]
    return F.pad(found, (0, 2))


def adapter() -> nn.Module:
    parts = {"base": nn.Conv2d(4, 4, 1).requires_grad_(False), "more": nn.Conv2d(4, 4, 1, bias=False)}
    return Called(lambda m, x: m.base(x) + m.more(x), **parts)


def last_state(body: nn.Module) -> nn.Module:
    return Called(lambda m, x: m.body(x)[0][:, -1], body=body)


def own_loss(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    logits = m.body(x)
    return {"loss": F.cross_entropy(logits, y), "logits": logits}


def tied() -> nn.Module:
    table, last = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    last.weight = table.weight
    return nn.Sequential(table, nn.Tanh(), last)


def module_twice() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), layer, nn.Linear(8, CLASSES))


def symmetric() -> nn.Module:
    layer = nn.Linear(8, 8)
    parametrize.register_parametrization(layer, "weight", Called(lambda m, x: x.triu() + x.triu(1).mT))
    return layer


# fmt: off
MODELS: dict[str, tuple[Any, ...]] = {
    # dropout and other draws
    "Dropout": (lambda: mlp(nn.Dropout(0.3)), x), "Dropout2d": (lambda: images(nn.Dropout2d(0.3)), pictures),
    "AlphaDropout": (lambda: mlp(nn.SELU(), nn.AlphaDropout(0.2)), x),
    "DropConnect": (lambda: forward(lambda m, x: m.b(F.linear(x, F.dropout(m.a.weight, 0.3), m.a.bias))), x),
    "stochastic depth": (lambda: mlp(depth()), x), "stochastic depth, one draw": (lambda: mlp(depth(shared=True)), x),
    "variational": (lambda: forward(lambda m, x: m.b(m.a(x) + torch.randn(len(x), 8) * m.a(x).exp())), x),
    "LSTM with dropout": (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), last_state(nn.LSTM(3, 8, 2, dropout=0.3, batch_first=True)), nn.Linear(8, CLASSES)), x),
    "dropout in eval mode": (lambda: mlp(nn.Dropout(0.3)).eval(), x),
    "checkpointed dropout": (lambda: forward(lambda m, x: m.b(checkpoint(lambda h: F.dropout(m.a(h), 0.3).tanh(), x, use_reentrant=False))), x),
    # weights
    "tied": (tied, lambda: torch.randint(9, (ROWS, 5)), lambda o, y: F.cross_entropy(o[:, 0], y)),
    "tied, transposed": (lambda: forward(lambda m, x: m.b(m.a(F.linear(m.a(x).tanh(), m.a.weight.T)).tanh())), x),
    "a module twice": (module_twice, x),
    "weight_norm": (lambda: changed(lambda m: parametrizations.weight_norm(m[0])), x),
    "spectral_norm in eval": (lambda: changed(lambda m: parametrizations.spectral_norm(m[2])).eval(), x),
    "orthogonal": (lambda: changed(lambda m: parametrizations.orthogonal(m[2], use_trivialization=False)), x), "symmetric": (lambda: mlp(symmetric()), x),
    "product of weights": (lambda: forward(lambda m, x: x @ (m.b.weight @ m.a.weight).T), x),
    "standardized": (lambda: forward(lambda m, x: m.b(F.linear(x, (m.a.weight - m.a.weight.mean(1, keepdim=True)) / m.a.weight.std(1, keepdim=True)))), x),
    "sign of a weight": (lambda: forward(lambda m, x: m.b(F.linear(x, Quantized.apply(m.a.weight)))), x),
    "LoRA": (lambda: nn.Sequential(lora(6, 8), nn.Tanh(), lora(8, CLASSES)), x),
    "LoRA on a convolution": (lambda: images(adapter()), pictures),
    "head only": (lambda: partly("2.weight", "2.bias"), x),
    "frozen BatchNorm": (lambda: mlp(nn.BatchNorm1d(8).eval().requires_grad_(False)), x),
    "prompt": (lambda: forward(lambda m, x: m.b(m.a(x + m.prompt).tanh()), prompt=nn.Parameter(torch.zeros(6))), x),
    "a scalar": (lambda: forward(lambda m, x: m.b(m.one * m.a(x)), one=nn.Parameter(torch.ones(()))), x),
    "an unused parameter": (lambda: forward(lambda m, x: m.b(m.a(x)), never=nn.Parameter(torch.ones(3))), x),
    "under no_grad in part": (lambda: forward(lambda m, x: m.b(without_grad(m.a, x) + m.a(x))), x),
    # numbers
    "bfloat16": (lambda: mlp().bfloat16(), lambda: x().bfloat16()),
    "double": (lambda: mlp().double(), lambda: x().double()),
    "two dtypes": (lambda: forward(lambda m, x: m.b(m.a(x.bfloat16()).float()), a=nn.Linear(6, 8).bfloat16()), x),
    "autocast inside": (lambda: forward(autocast), x), "large values": (mlp, lambda: 1e4 * x()),
    "integers": (lambda: forward(lambda m, x: m.b(m.a(x.float()))), lambda: torch.randint(9, (ROWS, 6))),
    "a row of NaN": (mlp, with_nan), "NaN of made-up examples": (lambda: forward(lambda m, x: m.b(m.a(x).log())), x),
    # passes
    "checkpoint": (lambda: forward(lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=False).tanh())), x),
    "reentrant checkpoint": (lambda: forward(lambda m, x: m.b(checkpoint(m.a, x * m.one, use_reentrant=True).tanh()), one=nn.Parameter(torch.ones(()))), x),
    "forward hook": (lambda: changed(lambda m: m[0].register_forward_hook(lambda module, x, out: out * 2)), x),
    "backward hook": (lambda: changed(lambda m: m[0].register_full_backward_hook(lambda module, to, of: None)), x),
    "hook of a tensor": (lambda: forward(lambda m, x: m.b(halved(m.a(x)))), x),
    "custom function": (lambda: forward(lambda m, x: m.b(Product.apply(x, m.a.weight).tanh())), x),
    "straight through": (lambda: forward(lambda m, x: m.b(Quantized.apply(m.a(x)))), x),
    "in place": (lambda: mlp(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Hardtanh(inplace=True)), x),
    "written input": (lambda: forward(lambda m, x: m.b(m.a(x.mul_(2)))), x),
    "inner gradient": (lambda: forward(lambda m, x: m.b(m.a(x) + inner(m, x))), x),
    "torch.func": (lambda: forward(lambda m, x: m.b(torch.vmap(m.a)(x))), x),
    "scripted": (lambda: forward(lambda m, x: m.b(m.body(m.a(x))), body=torch.jit.script(nn.Tanh())), x),
    "a value decides": (lambda: forward(by_value), x),
    "as many times as a value says": (lambda: forward(depth_by_value), x),
    # what the model holds
    "buffer": (lambda: buffered(lambda m, x: m.b(m.a(x - m.kept).tanh()), torch.ones(6)), x),
    "plain tensor": (lambda: forward(lambda m, x: m.b(m.a(x - m.kept)), kept=torch.ones(6)), x),
    "cache of shapes": (lambda: forward(cached, cache=None), x),
    "counter in a buffer": (lambda: buffered(updated, torch.zeros(())), x),
    "counter in a plain tensor": (lambda: forward(updated, kept=torch.zeros(())), x),
    "counter": (lambda: forward(counted, calls=0), x),
    # losses and outputs
    "regression": (lambda: nn.Linear(6, 1), numbers(1), F.mse_loss),
    "binary": (lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), yes_no(), F.binary_cross_entropy_with_logits),
    "label smoothing": (mlp, x, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "class weights": (mlp, x, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="sum")),
    "scaled": (mlp, x, lambda o, y: 1e4 * F.cross_entropy(o, y)), "penalized": (mlp, x, penalized),
    "focal": (mlp, x, focal), "soft targets": (mlp, lambda: (x(), torch.rand(ROWS, 3).softmax(1)), F.cross_entropy),
    "poisson": (mlp, yes_no(3), F.poisson_nll_loss),
    "several outputs": (lambda: forward(lambda m, x: (m.b(m.a(x)), m.a(x))), x, lambda o, y: F.cross_entropy(o[0], y) + o[1].square().mean()),
    "outputs by name": (lambda: forward(lambda m, x: {"logits": m.b(m.a(x)), "hidden": m.a(x)}), x, lambda o, y: F.cross_entropy(o["logits"], y)),
    "autoencoder": (lambda: forward(lambda m, x: m.c(m.a(x).tanh()), c=nn.Linear(8, 6)), lambda: (v := x(), v.clone()), F.mse_loss),
    "two targets": (mlp, lambda: (x(), (torch.randint(3, (ROWS,)), torch.randn(ROWS))), lambda o, y, w: F.cross_entropy(o, y) * w.abs()),
    "segmentation": (lambda: nn.Conv2d(4, CLASSES, 3, padding=1), lambda: (pictures(), torch.randint(3, (ROWS, 6, 6))), F.cross_entropy),
    "tokens, some left out": (lambda: nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9), Called(lambda m, h: h.mT)), lambda: (torch.randint(9, (ROWS, 5)), torch.randint(1, 9, (ROWS, 5))), nn.CrossEntropyLoss(ignore_index=0)),
    "inputs by name": (lambda: Called(averaged, table=nn.Embedding(9, 6), body=nn.Linear(6, CLASSES)), lambda: ({"ids": torch.randint(9, (ROWS, 5)), "mask": torch.randint(2, (ROWS, 5))}, labels())),
    "contrast within an example": (lambda: forward(lambda m, x: torch.stack([m.a(x), m.a(x.flip(1))], 1)), x, lambda o, y: F.cosine_similarity(o[:, 0], o[:, 1]).sum() + 0 * y.sum()),
    "CTC": (lambda: nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 3)), lambda: (x(), torch.randint(1, 3, (ROWS, 2))), lambda o, y: F.ctc_loss(o.log_softmax(-1).transpose(0, 1), y, torch.tensor([6]), torch.tensor([2]))),
    "the model's own loss": (lambda: Called(own_loss, body=mlp()), lambda: ({"x": x(), "y": torch.randint(3, (ROWS,))}, None), lambda o: o["loss"]),
}
# fmt: on

# Refusals that are right: what keeps state, a module without Python code, made-up examples that give no gradient.
EITHER = (
    "counter in a buffer",
    "counter in a plain tensor",
    "counter",
    "scripted",
    "reentrant checkpoint",
    "NaN of made-up examples",
    "written input",
    "spectral_norm in eval",
    "triplet",
)

CASES = [
    Case(f"training: {name}", built(*parts), "either" if name in EITHER else "apart") for name, parts in MODELS.items()
]
