"""Random models, shapes, points and weights: blocks are what autograd gives alone, and no clipped vector passes C."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpcore.spec.backends import load_backend
from dpcore.stages.clipping.blocks import joined
from dpcore.stages.clipping.clipped_sum import add_sums, norms_of
from dpcore.torch.data import batches
from dpcore.torch.gradients.per_example import PerExampleGradient, prove
from tests.unit.torch.gradients.one_by_one import alone
from tests.unit.torch.models import Called

WIDTH = 4


def over(inner: nn.Module) -> nn.Module:
    """A layer that works on (B, channels, positions)."""
    return Called(lambda m, x: m.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner)


def scaled(positions: int) -> nn.Module:
    """Parameters without a layer: one for each feature, one for all, and one for each position."""
    shapes = {"scale": (WIDTH,), "shift": (1, positions, WIDTH), "factor": ()}
    parameters = {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    return Called(lambda m, x: (x * m.scale + m.shift) * m.factor, **parameters)


def bias_only() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad_(False)
    return layer


LAYERS: dict[str, Callable[[int], nn.Module]] = {  # of the number of positions
    "linear": lambda _: nn.Linear(WIDTH, WIDTH),
    "bias only": lambda _: bias_only(),
    "no bias": lambda _: nn.Linear(WIDTH, WIDTH, bias=False),
    "layer norm": lambda _: nn.LayerNorm(WIDTH),
    "rms norm": lambda _: nn.RMSNorm(WIDTH),
    "group norm": lambda _: over(nn.GroupNorm(2, WIDTH, eps=0.1)),
    "convolution": lambda _: over(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)),
    "transposed": lambda _: over(nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "parameters": scaled,
    "weight norm": lambda _: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "prelu": lambda _: nn.PReLU(),
    "attention": lambda _: nn.TransformerEncoderLayer(WIDTH, 2, 6, 0.0, batch_first=True),
    "gelu": lambda _: nn.GELU(),
    "relu in place": lambda _: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
}


def model_of(body: nn.Module, tied: nn.Module | None) -> nn.Module:
    """The mean over positions, as logits."""
    model = Called(lambda m, x: m.head(m.body(x).mean(1)), body=body, head=nn.Linear(WIDTH, 5))
    if tied is not None:
        model.head.weight = tied.weight
    return model


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, Any, int]:
    """A model, its batch of examples, and their number."""
    torch.manual_seed(draw(st.integers(0, 99)))
    positions, examples = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=4))
    if "convolution" in kinds or "transposed" in kinds:
        positions += 1  # over one position torch's float64 kernel refuses some groups, and such a model runs explicitly
    layers = [LAYERS[kind](positions) for kind in kinds]
    if draw(st.booleans()):
        layers = [Called(lambda m, x: x + m.inner(x), inner=inner) for inner in layers]
    if draw(st.booleans()):
        layers.append(layers[0])  # a module that is used twice
    tokens = draw(st.booleans())
    if tokens:
        layers.insert(0, nn.Embedding(5, WIDTH, padding_idx=draw(st.sampled_from([None, 0]))))
    model = model_of(nn.Sequential(*layers), layers[0] if tokens and draw(st.booleans()) else None)
    double = draw(st.booleans())
    if tokens:
        inputs = torch.randint(5, (examples, positions))
    else:
        inputs = torch.randn(examples, positions, WIDTH, dtype=torch.float64 if double else torch.float32)
    return model.double() if double else model, (inputs, torch.randint(5, (examples,))), examples


@given(drawn=models(), weights=st.lists(st.sampled_from([1.0, -0.7, 3.0, 1000.0, -999.0]), min_size=1, max_size=3),
       apart=st.sampled_from([1e-2, 1e-4, 1e-6]))  # fmt: skip
def test_random_models_agree_with_one_by_one_autograd(drawn: Any, weights: list[float], apart: float) -> None:
    model, batch, examples = drawn
    gradient, backend = PerExampleGradient(model, F.cross_entropy), load_backend("numpy")
    prove(gradient, batches.tree_map(lambda t: t[:1], batch))
    here = gradient.parameters()
    points = [[value + j * apart * torch.randn_like(value) for value in here] for j in range(len(weights))]
    taken = [gradient(point, batch, synthetic=True) for point in points]
    blocks = [
        joined(block.weighted(w) for block, w in zip(column, weights, strict=True)).map(lambda t: t.detach().numpy())
        for column in zip(*taken, strict=True)
    ]
    singly = [alone(model, F.cross_entropy, batch, point) for point in points]
    # What a normalization cancels (a scale before it, say) leaves nothing but the rounding of the whole gradient.
    terms = sum(abs(w) * torch.cat(rows, 1).norm(dim=1, keepdim=True) for w, rows in zip(weights, singly, strict=True))
    unit = 1e-5 if here[0].dtype == torch.float32 else 1e-10
    for place, block in enumerate(blocks):
        wanted = sum(w * rows[place] for w, rows in zip(weights, singly, strict=True))
        found = torch.from_numpy(np.array(block.rows())).double()
        assert ((found - wanted).norm(dim=1, keepdim=True) <= 20 * unit * terms + 1e-6 * unit).all(), gradient.names[
            place
        ]

    c = 0.1
    everything = list(range(len(blocks)))
    (norms,) = norms_of(backend, blocks, [everything], [None] * len(blocks))
    sizes = [sum(value.numel() for value in here)]
    unit = c * 2.0**-36
    rounding = float(np.linalg.norm([block.rounding for block in blocks]))
    (factors,) = backend.clip_factors([norms], "standard", [c], sizes, [rounding], unit)
    for i in range(examples):
        only = np.where(np.arange(examples) == i, factors, 0)
        totals = [np.zeros(value.numel()) for value in here]
        add_sums(backend, blocks, [only] * len(blocks), totals, [None] * len(blocks))
        assert np.sqrt(sum((total.astype(np.longdouble) ** 2).sum() for total in totals)) * unit <= c
