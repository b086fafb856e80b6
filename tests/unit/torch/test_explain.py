"""`private.explain()`: what it says is so."""

import json
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from asv_benchmarks import predicted
from dpcore import methods, use_backend
from dpcore.errors import SpeedWarning
from dpcore.sampling import FixedOrderSampler, PoissonSampler, UserSampler
from dpcore.spec.backends import load_backend
from dpcore.spec.pair_ops import LinearPairs
from dpcore.torch import make_private
from tests.unit.torch.models import Called
from tests.unit.torch_runs import METHODS, Tied, model, start


class Every(nn.Module):
    """A tensor of every rule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.place = nn.Parameter(torch.zeros(12, 6))
        self.mix, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.frozen(self.mix(self.embed(tokens) + self.place)))
        return self.head(hidden.mean(1))


TOKENS = torch.arange(360).reshape(30, 12) % 11, torch.arange(30) % 3
USERS = UserSampler(PoissonSampler(dataset_size=10, batch_size=4), np.arange(30) % 10, max_examples_per_user=2)


def test_every_tensor_has_a_row_that_says_how_it_is_taken() -> None:
    run = start(Every(), METHODS["dp_sgd"](6), data=TOKENS, sampling="fixed-order", microbatch_size=4)
    told = run.explain()
    rows = {layer.name: layer for layer in told.layers}
    assert (told.way, told.reasons, told.microbatch_size, told.examples, told.points) == ("pairs", {}, 4, 6.0, 1)
    assert {name: (row.rule, row.rows, row.parameters, row.bytes) for name, row in rows.items() if row.rule} == {
        "embed.weight": ("table of tokens", 12, 66, 12 * (8 + 6 * 4)),
        "place": ("rows", 0, 72, 72 * 4),
        "mix.weight": ("pairs: tiles", 12, 48, 12 * (6 + 8) * 4),
        "mix.bias": ("rows", 0, 8, 32),
        "norm.weight": ("rows", 0, 8, 32),
        "norm.bias": ("rows", 0, 8, 32),
        "head.weight": ("pairs: inner products", 1, 24, (8 + 3) * 4),
        "head.bias": ("rows", 0, 3, 12),
        "2 frozen tensors": ("frozen", 0, 72, 0),
    }
    assert rows["embed.weight"].operations == ("embedding",)
    assert (rows["mix.weight"].operations, rows["mix.bias"].operations) == (("linear",), ("sum",))
    assert rows["norm.bias"].operations == ("layer_norm",)
    assert told.limit_bytes is None
    assert told.limit_source == "microbatch_size was given"


def test_a_gpu_says_how_its_chip_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = load_backend("triton")
    linear, chips = (import_module(f"dpcore_triton.{name}") for name in ("linear", "chips"))

    def words(chip: str | None, time: int, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        monkeypatch.setattr(linear, "chip_of", lambda device: chip and chips.CHIPS[chip])
        a, e = (torch.empty(2, time, width, dtype=dtype, device="meta") for width in (768, 3072))
        exact = options.pop("exact", False)
        return triton.linear_way(LinearPairs([a], [e], [1.0], exact=exact), torch.device("cuda"), **options)

    assert words(None, 512) == "tiles in float64: chip unknown"
    assert words("L4", 512) == "tiles, 3 products of 16 bits"
    assert words("L4", 512, torch.float64) == "tiles, 3 products of 16 bits"  # the backend keeps them in float32
    assert words("L4", 512, torch.bfloat16) == "tiles, one product of 16 bits"
    assert words("L4", 64, torch.bfloat16) == "inner products, one product of 16 bits"
    assert words("L4", 64, scaled=True) == "tiles in float64: scaled"
    assert words("L4", 64, exact=True) == "tiles in float64: points subtracted"
    assert words("H200", 1) == "one position, sum of 8 bits"
    assert words(None, 1) == "one position in float64: chip unknown"

    def copies(chip: str | None, time: int, dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> bool:
        monkeypatch.setattr(linear, "chip_of", lambda device: chip and chips.CHIPS[chip])
        a, e = (torch.empty(2, time, 768, dtype=dtype, device="meta") for dtype in dtypes)
        return triton.copies_halves(LinearPairs([a], [e], [1.0]), torch.device("cuda"), **options)

    both = torch.bfloat16, torch.bfloat16
    assert not copies("L4", 512, both)
    assert copies("L4", 512, both, scaled=True)
    assert copies("L4", 512, (torch.float32, torch.bfloat16))  # which tensor cores take as two numbers each
    assert not copies("L4", 1, both)
    assert copies(None, 512, both)

    def prefers(
        chip: str | None, time: int, *sizes: int, dtype: torch.dtype = torch.bfloat16, weights: Any = (1.0,)
    ) -> bool:
        monkeypatch.setattr(linear, "chip_of", lambda device: chip and chips.CHIPS[chip])
        a, e = (torch.empty(2, time, width, dtype=dtype, device="meta") for width in sizes)
        layer = LinearPairs([a] * len(weights), [e] * len(weights), weights)
        return triton.prefers_pairs(layer, torch.device("cuda"))

    # The layers of ViT-S, T = 197, whose matrices are large for the memory of an L4.
    found = {chip: prefers(chip, 197, 384, 1536) for chip in ("H200", "A100", "L4", "4090", None)}
    assert found == {"H200": True, "A100": True, "L4": True, "4090": True, None: False}
    assert not prefers("H200", 197, 64, 64)  # a tile would be empty but for these
    assert not prefers("L4", 1024, 768, 768)  # not in one chain
    for chip, time in product(predicted.CHIPS, (24, 64, 128, 197, 256, 257)):
        assert prefers(chip, time, 384, 1536) == predicted.prefers_pairs(chip, time)
    assert not prefers("L4", 197, 384, 1536, dtype=torch.float32)
    assert not prefers("L4", 64, 384, 1536, weights=(1.0, -1.0))
    assert not prefers("L4", 64, 24, 16)


@pytest.mark.parametrize(("name", "pairs"), [("dp_sgd", True), ("disk", False)])
def test_a_gpu_keeps_pairs_of_16_bits_where_they_are_cheaper_than_matrices(
    monkeypatch: pytest.MonkeyPatch, name: str, pairs: bool
) -> None:
    """The same step as with matrices, but for what is rounded; DiSK subtracts points, which tensor cores do not."""
    linear, chips = (import_module(f"dpcore_triton.{each}") for each in ("linear", "chips"))
    monkeypatch.setattr(linear, "chip_of", lambda device: chips.CHIPS["L4"])
    found = []
    for chosen in (linear.prefers_pairs, lambda layer, device: False):
        monkeypatch.setattr(load_backend("triton"), "prefers_pairs", chosen)
        torch.manual_seed(0)
        model, data = nn.Linear(64, 128), (torch.randn(4, 32, 64), torch.randn(4, 32, 128))
        method = getattr(methods, name)(lr=1.0, noise_multiplier=1.0, batch_size=4)
        with use_backend("triton"):
            private = make_private(
                model, data, method, steps=1, loss=F.mse_loss, precision="bf16", key=bytes(32), exact_key=True,
                sampling=FixedOrderSampler(dataset_size=4, batch_size=4, shuffle=False),
            )  # fmt: skip
        for batch in private.loader:
            private.step(batch)
        found.append((private.explain().layers[0].rule.startswith("pairs"), model.weight.detach()))
    assert [kind for kind, _ in found] == [pairs, False]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-4)


def test_points_that_cancel_are_taken_in_float64_and_held_for_every_point() -> None:
    one, two = (start(model(), METHODS[name](8), sampling="fixed-order").explain() for name in ("dp_sgd", "srg_memf"))
    assert (one.points, two.points) == (1, 2)
    assert one.layers[0].rule == "pairs: inner products"
    assert two.layers[0].rule == "pairs: float64"
    assert two.layers[0].bytes == 2 * one.layers[0].bytes
    assert two.layers[1].bytes == one.layers[1].bytes  # rows are added
    assert two.layers[0].rows == one.layers[0].rows == 1
    assert two.limit_bytes is not None


def test_other_ways_say_why_and_hold_rows() -> None:
    rows = Called(lambda m, inputs: torch.stack([m.layer(row) for row in inputs]), layer=nn.Linear(5, 3))
    with pytest.warns(SpeedWarning, match="slower"):
        told = start(rows).explain()
    assert told.way != "pairs"
    assert "pairs" in told.reasons
    assert told.reasons["pairs"] in str(told)
    assert (told.layers[0].rule, told.layers[0].operations) == ("rows", ())
    tied = start(Tied(), data=(TOKENS[0][:, :4] % 9, TOKENS[0][:, 0] % 9)).explain().layers[0]
    assert (tied.rule, tied.operations) == ("tied: table and pairs", ("linear", "embedding"))
    tied = start(Tied(300, 8), data=(torch.arange(900).reshape(30, 30) % 300, torch.arange(30))).explain().layers[0]
    assert (tied.rule, tied.operations, tied.rows) == ("tied: table and rows", ("linear", "embedding"), 0)
    users = start(model(), METHODS["dp_sgd"](4), sampling=USERS, gradients="one-by-one").explain()
    assert users.layers[0].rule == "rows"
    assert users.examples == 12


def test_the_text_has_every_field_and_as_dict_is_plain() -> None:
    run = start(Every(), data=TOKENS, max_memory="64 MB")
    told = run.explain()
    text = str(told)
    for part in ("'pairs'", "micro-batch: 14 examples, of about 8", "max_memory='64 MB'", "costs no privacy"):
        assert part in text
    assert all(layer.name in text for layer in told.layers)
    again = json.loads(json.dumps(told.as_dict()))
    assert again["layers"][0]["name"] == told.layers[0].name
    assert again["layers"][0]["operations"] == list(told.layers[0].operations)
    assert told.limit_bytes == 64_000_000
    assert 0 < told.peak_bytes < 64_000_000
