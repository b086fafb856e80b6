"""Refusals of models: every one names the module, its class and the remedy; harmless models pass untouched."""

from typing import Any

import pytest
import torch
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.per_example import WAYS, PerExampleGradient, try_out
from dpcore.torch.model.check_module import check_module, check_still_frozen
from dpcore.torch.model.models import build
from tests.depth import pairs
from tests.unit.torch.models import Called
from tests.unit.torch_runs import Tied

IMAGES = torch.zeros(1, 1, 8, 8)
ROWS = torch.zeros(1, 6)
SEQUENCES = torch.zeros(1, 5, 6)
TOKENS = torch.zeros(1, 5, dtype=torch.int64)


def check(model: nn.Module, example: Tree, way: str = "auto") -> tuple[nn.Module, ...]:
    frozen = check_module(model)
    try_out(PerExampleGradient(model, lambda output: output.float().square().sum()), example, frozen, way)
    return frozen


def conv_bn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sequential(nn.BatchNorm2d(8)), nn.Flatten(), nn.Linear(288, 2))


def picky(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Refuses NaN, by a value that decides: it sees batches of one."""
    if x.isnan().any():
        raise ValueError("NaN")
    return x - x.mean(0, keepdim=True)


def counter(replace: bool) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if replace:
            m.seen = m.seen + x.sum()
        else:
            m.seen += x.sum()
        return x

    model = Called(forward)
    model.register_buffer("seen", torch.zeros(()))
    return model


def cache(anew: bool) -> nn.Module:
    """Keeps what follows from shapes alone, filled once or made anew."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if anew or "rows" not in m.stats:
            m.stats["rows"] = torch.arange(x.shape[-1])
        return x

    return Called(forward, stats={})


def last_state(batch_first: bool) -> nn.Module:
    """Takes the last state of an LSTM's output."""
    return Called(lambda m, x: m.lstm(x)[0][:, -1], lstm=nn.LSTM(6, 4, batch_first=batch_first))


MEAN = "Sequential: mean runs over the examples", "test_check_module.py, line", "in ", "GroupNorm"

# fmt: off
REFUSED = {
    "batchnorm": (conv_bn, IMAGES, "'1.0'", "BatchNorm2d", "GroupNorm(4, 8)"),
    "sync batchnorm": (lambda: nn.Sequential(nn.SyncBatchNorm(6)), ROWS, "'0'", "SyncBatchNorm", "GroupNorm"),
    "instancenorm": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)),
        IMAGES, "'1'", "InstanceNorm2d", "track_running_stats=False"),
    "lstm": (lambda: last_state(False), SEQUENCES, "Called", "line", "batch_first=True"),
    "attention": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8),
        SEQUENCES, "TransformerEncoderLayer", "batch_first=True"),
    "embedding max_norm": (
        lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), TOKENS, "'0'", "Embedding", "max_norm=None"),
    "embedding sparse": (lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True)), TOKENS, "'0'", "Embedding", "sparse="),
    "mixer that checks its inputs": (
        lambda: nn.Sequential(nn.Linear(6, 6), Called(picky)), ROWS, "gradient is 0", "contrast within a batch"),
    "faint mixer": (
        lambda: nn.Sequential(nn.Linear(6, 6), Called(lambda m, x: x - 1e-12 * x.mean(0)), nn.Linear(6, 2)),
        ROWS, *MEAN),
    "mixes in training mode only": (
        lambda: nn.Sequential(nn.Linear(6, 6), Called(lambda m, x: x - x.mean(0) if m.training else x)).eval(),
        ROWS, *MEAN),
    "buffer in place": (lambda: nn.Sequential(nn.Linear(6, 2), counter(False)), ROWS, "'1'", "Called", "eval()"),
    "buffer replaced": (lambda: nn.Sequential(nn.Linear(6, 2), counter(True)), ROWS, "'1'", "Called", "eval()")
}
# fmt: on


@pytest.mark.parametrize("part", [slice(None), slice(1)], ids=["all", "a part"])
def test_two_parameters_in_one_memory_are_refused(part: slice) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.data[part])
    with pytest.raises(ArgumentError, match=r"'0\.weight' and '1\.weight' are two and share memory, .*: assign"):
        check_module(model)
    model[1].weight.requires_grad_(False)
    assert check_module(model) == ()


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_name_class_and_remedy(case: tuple) -> None:
    make, example, *words = case
    model = make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError) as caught:
        check(model, example)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


ACCEPTED = {
    "cnn-5": (lambda: build("cnn-5", (1, 8, 8), 10), IMAGES),
    "groupnorm": (lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(4, 8)), IMAGES),
    "instancenorm": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4)), IMAGES),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 2)), ROWS),
    "lstm": (lambda: last_state(True), SEQUENCES),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), SEQUENCES),
    "tied": (Tied, TOKENS),
    "filled cache": (lambda: nn.Sequential(nn.Linear(6, 2), cache(False)), ROWS),
    "cache made anew": (lambda: nn.Sequential(nn.Linear(6, 2), cache(True)), ROWS),
    "folds dimensions": (lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 2), nn.Unflatten(0, (-1, 5))), SEQUENCES),
    "bfloat16": (lambda: nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)).bfloat16(), ROWS.bfloat16()),
}


@pytest.mark.parametrize(("name", "training"), pairs(ACCEPTED, [True, False], 2))
def test_harmless_models_pass_and_stay_as_they_are(name: str, training: bool) -> None:
    make, example = ACCEPTED[name]
    model = make().train(training)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert check(model, example) == ()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training == training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("own", [[nn.Linear(6, 6)], (torch.ones(6, 6, requires_grad=True),)], ids=["layer", "tensor"])
def test_what_is_used_and_not_registered_is_refused(own: Any) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.inner(x @ getattr(own[0], "weight", own[0]))

    for way in WAYS:
        with pytest.raises(
            ArgumentError, match=r"shape \(6, 6\) that requires gradients and is not registered.*ModuleList"
        ):
            check(Called(forward, inner=nn.Linear(6, 2), own=own), ROWS, way)
    check(Called(lambda m, x: m.inner(x), inner=nn.Linear(6, 2), template=own), ROWS)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"'0' \(RecursiveScriptModule\) is compiled by torch.jit"):
        check(nn.Sequential(torch.jit.script(nn.Linear(6, 2))), ROWS)


def test_a_refused_model_keeps_its_weights() -> None:
    weight = nn.Parameter(torch.full((9, 4), 5.0))
    model = Called(lambda m, x: nn.functional.embedding(x, m.weight, max_norm=1.0), weight=weight)
    with pytest.raises(ArgumentError, match=r"the model itself .Called. changes its parameter 'weight' in forward"):
        check(model, TOKENS)
    assert torch.equal(model.weight, torch.full((9, 4), 5.0))


def test_frozen_batchnorm_is_accepted_while_it_stays_frozen() -> None:
    model = conv_bn()
    model[1].eval()
    with pytest.raises(ArgumentError, match="requires_grad_"):
        check(model, IMAGES)
    model[1].requires_grad_(False)
    frozen = check(model, IMAGES)
    assert frozen == (model[1][0],)
    check_still_frozen(model, frozen)
    model.train()
    with pytest.raises(ArgumentError, match=r"'1\.0' \(BatchNorm2d\).*eval\(\)"):
        check_still_frozen(model, frozen)


def test_dtypes_refused_where_they_are_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(2, 2))
    with pytest.raises(ArgumentTypeError, match=r"'0\.weight' has dtype"):
        check_module(model)
    model[0].requires_grad_(False)
    check_module(model)


def test_lazy_parameters_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'0\.weight' is not initialized"):
        check_module(nn.Sequential(nn.LazyLinear(3)))
