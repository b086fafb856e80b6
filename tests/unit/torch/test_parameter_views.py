"""Working copies of parameters of 16 bits and of other memory formats."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpcore.errors import ArgumentError
from dpcore.spec.backends import load_backend
from dpcore.torch import parameter_views
from dpcore.torch.parameter_views import Working
from tests.refused import refused

NAN, INF = float("nan"), float("inf")


def working(*parameters: nn.Parameter) -> Working:
    return Working(load_backend("torch"), [f"p{i}" for i in range(len(parameters))], parameters)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype))


def one_by_one(copy: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What the copy must be after a look at the parameter, number by number."""
    found = [
        old if torch.tensor(old).to(parameter.dtype).item() == new else new
        for old, new in zip(copy.flatten().tolist(), parameter.detach().flatten().tolist(), strict=True)
    ]
    return torch.tensor(found).view(parameter.shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return torch.nan_to_num(tensor, nan=12345.0).contiguous().view(torch.int32).flatten().tolist()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda p: None,
    "one element": lambda p: p.view(-1)[1].mul_(2),
    "all": lambda p: p.neg_(),
    "a mask": lambda p: p.mul_((torch.arange(p.numel()) % 3 > 0).view(p.shape)),
    "a clamp": lambda p: p.clamp_(-0.5, 0.5),
    "NaN": lambda p: p.view(-1)[2].fill_(NAN),
    "infinity": lambda p: p.view(-1)[2].fill_(-INF),
    "another zero": lambda p: p.view(-1)[0].fill_(-0.0),
    "behind autograd's back": lambda p: p.data.view(-1)[3].fill_(7.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("together", [5, 1 << 22])
def test_copies_take_the_elements_that_were_changed_and_no_others(
    dtype: torch.dtype, change: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_views, "TOGETHER", together)
    parameters = [
        draw(4, 3, dtype=dtype),
        draw(dtype=dtype),
        draw(6, dtype=torch.float32),
        draw(0, 2, dtype=dtype),
        draw(9, dtype=dtype),
    ]
    views = working(*parameters)
    places = [tensor.data_ptr() for tensor in views.tensors()]
    for copy in views.tensors():
        copy.mul_(1 + 2**-14).add_(2**-20)  # digits that 16 bits drop
    views.tensors()[0][0, 0], views.tensors()[4][5] = 0.0, NAN
    views.store()
    with torch.no_grad():
        CHANGES[change](parameters[4])
        CHANGES[change](parameters[0])
    expected = [one_by_one(copy, p) for copy, p in zip(views.tensors(), parameters, strict=True)]
    views.refresh()
    found = views.tensors()
    assert [tensor.data_ptr() for tensor in found] == places
    assert [tensor.dtype for tensor in found] == [torch.float32] * 5
    assert [bits(tensor) for tensor in found] == [bits(tensor) for tensor in expected]
    if change != "all":
        assert any((tensor.to(dtype).float() != tensor).any() for tensor in found)


def test_the_first_look_takes_every_bit() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, NAN, INF, -INF, 2.0**-133])
    for dtype in (torch.bfloat16, torch.float16):
        parameter = nn.Parameter(values.to(dtype))
        (copy,) = working(parameter).tensors()
        assert bits(copy) == bits(parameter.detach().float())


def test_other_memory_formats_are_taken_up_as_they_are() -> None:
    turned = nn.Parameter(torch.arange(12.0).view(3, 4).T)
    views = working(turned, draw(5, dtype=torch.float32))
    (copy, plain), place = views.tensors(), views.tensors()[0].data_ptr()
    assert copy.is_contiguous()
    assert plain.data_ptr() == views.parameters[1].data_ptr()
    with torch.no_grad():
        turned[1, 2] = NAN
    views.refresh()
    assert views.tensors()[0].data_ptr() == place
    assert bits(views.tensors()[0]) == bits(turned.detach())
    turned.data = turned.detach().contiguous()
    views.refresh()
    assert views.tensors()[0].data_ptr() == turned.data_ptr()
    turned.data = turned.detach().T.contiguous().T
    views.refresh()
    assert views.tensors()[0].is_contiguous()
    assert bits(views.tensors()[0]) == bits(turned.detach())
    turned.data = turned.detach().bfloat16()
    refused(ArgumentError, "changed from .* float32 on cpu to .* bfloat16 on cpu", views.refresh)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.names.append(str(function.overloadpacket))
        return function(*args, **kwargs or {})


def test_a_look_takes_as_many_operations_for_many_tensors_and_waits_for_none() -> None:
    counts = []
    for number in (2, 50):
        views = working(*[draw(3, 2) for _ in range(number)])
        with Counted() as counted:
            views.refresh()
            views.store()
        counts.append([name for name in counted.names if "detach" not in name])
    assert counts[0] == counts[1]
    assert len(counts[0]) < 8
    assert not {"aten._local_scalar_dense", "aten.item"} & set(counts[0])
