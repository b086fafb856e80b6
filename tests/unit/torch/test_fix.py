"""`dpcore.torch.fix`: what it replaces is accepted and keeps everything else; what it cannot is named."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.torch import fix, make_private
from tests.unit.torch_runs import sgd


class Net(nn.Module):
    """Modules of all kinds that are replaced; one twice, one in a plain list, one with a hook on the model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 4, max_norm=0.5, sparse=True, scale_grad_by_freq=True)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4, eps=1e-3)
        self.again = self.norm
        self.steps = nn.ModuleDict({"instance": nn.InstanceNorm1d(4, affine=True, track_running_stats=True)})
        self.last = nn.Sequential(nn.Dropout(0.1), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.plain = [self.norm]
        self.calls: list[str] = []
        self.last[2].register_forward_hook(self.called)

    def called(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        assert module is self.last[2]
        return output + self.shift

    shift = 0.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.again(self.plain[0](self.norm(self.conv(self.embed(ids).movedim(1, 2)))))
        return self.last(self.steps["instance"](h).mean(2))


DATA = (torch.arange(120).reshape(20, 6) % 30, torch.arange(20) % 3)


def accepted(model: nn.Module, data: Any = DATA) -> None:
    private = make_private(model, data, sgd(batch_size=5), steps=1, target_delta=1e-5)
    for batch in private.loader:
        private.step(batch)


def test_what_is_fixed_is_accepted_and_the_old_model_is_untouched():
    model = Net()
    nn.init.normal_(model.norm.weight)
    model.norm.bias.requires_grad_(False)
    model.last[2].eval()
    before, kept = copy.deepcopy(model.state_dict()), list(model.named_modules())
    with pytest.raises(ArgumentError, match="module 'embed'"):
        accepted(model)
    fixed, found = fix(model)
    accepted(fixed)
    assert found.ok
    assert list(model.named_modules()) == kept
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not {id(each) for each in fixed.parameters()} & {id(each) for each in model.parameters()}
    told = [finding.sentence.partition(")")[0] for finding in found if finding.status == "remark"]
    assert [each for each in told if "norm'" in each] == ["module 'norm' (BatchNorm1d"]  # once, though it is used twice
    assert len(told) == 7


def test_weights_modes_hooks_and_shared_modules_are_kept():
    model = Net()
    nn.init.normal_(model.norm.weight)
    model.norm.bias.requires_grad_(False)
    model.last[2].eval()
    fixed, _ = fix(model.double())
    norm = fixed.norm
    assert type(norm) is nn.GroupNorm
    assert (norm.num_groups, norm.num_channels, norm.eps) == (1, 4, 1e-3)
    assert norm is fixed.again is fixed.plain[0]
    assert torch.equal(norm.weight, model.norm.weight)
    assert norm.weight.dtype == torch.float64
    assert (norm.weight.requires_grad, norm.bias.requires_grad) == (True, False)
    assert not fixed.last[2].training
    calls: list[bool] = []
    model.norm.register_full_backward_hook(lambda module, before, after: calls.append(type(module) is nn.GroupNorm))
    again, _ = fix(model)
    again.norm(torch.randn(5, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert calls == [True]
    fixed.shift = 7.0  # the hook is the new model's
    hidden = fixed.last[2](torch.randn(5, 4, dtype=torch.float64))
    assert torch.allclose(hidden.mean(), torch.tensor(7.0, dtype=torch.float64))


def test_tied_parameters_stay_tied():
    one, two = nn.BatchNorm2d(64), nn.BatchNorm2d(64)
    two.weight = one.weight
    fixed, _ = fix(nn.Sequential(one, two, nn.Conv2d(64, 64, 1)))
    assert fixed[0].weight is fixed[1].weight
    assert fixed[0].num_groups == 32


def test_an_embedding_answers_as_it_did():
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=0.7))
    ids = torch.arange(9)
    expected = model(ids).detach().clone()  # torch's own rescaling, of rows longer than 0.7
    fixed, _ = fix(model)
    assert torch.allclose(fixed(ids), expected, atol=1e-6)
    with torch.no_grad():
        fixed[0].weight.mul_(10)
    assert float(fixed(ids).detach().norm(dim=1).max()) > 5


class Activated(nn.BatchNorm2d):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs).relu()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Activated(4), "mixes the examples of a batch"),
        (Activated(2), "GroupNorm(1, 2)"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
    ],
)
def test_what_cannot_be_fixed_is_named_with_its_refusal(module: nn.Module, words: str):
    fixed, found = fix(nn.Sequential(module))
    assert type(fixed[0]) is type(module)
    assert words in str(found.faults[0])


def test_a_frozen_norm_and_a_sound_model_stay():
    frozen = nn.BatchNorm1d(4).requires_grad_(False).eval()
    fixed, found = fix(nn.Sequential(frozen, nn.Linear(4, 2)))
    assert type(fixed[0]) is nn.BatchNorm1d
    assert fixed[0] is not frozen
    assert [finding.status for finding in found] == ["ok"]


@pytest.mark.parametrize("channels", [1, 2])
def test_a_norm_of_too_few_values_is_to_go(channels: int):
    _, found = fix(nn.BatchNorm1d(channels))
    assert "take it out" in found[0].remedy


def test_nonsense_is_one_sentence():
    with pytest.raises(ArgumentTypeError, match="must be a torch"):
        fix(3)  # type: ignore[arg-type]
    model = nn.Sequential(nn.BatchNorm1d(2))
    model[0].extra = torch.ones(2, requires_grad=True) * 2  # no leaf
    model.extra = model[0].extra
    with pytest.raises(ArgumentError, match="deepcopy can copy"):
        fix(model)
    with pytest.raises(ArgumentError, match="uninitialized parameter"):
        fix(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(ArgumentError, match=r"model\.module"):
        fix(nn.DataParallel(model))
