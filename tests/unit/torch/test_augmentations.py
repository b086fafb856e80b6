"""Several views of an example: the mean of their gradients is clipped as one vector."""

from typing import Any

import numpy as np
import pytest
import torch

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.methods import disk, dp_sgd
from dpcore.sampling import PoissonSampler, UserSampler
from tests.unit.torch.models import Rows
from tests.unit.torch_runs import DATA, finish, load, model, saved, start, values

CLIP = 0.2


def views_of(moves: float = 1.0) -> Rows:
    """Each reading of an example is another, if `moves`."""
    return Rows(lambda index, x, y: (x + moves * torch.randn(5), y))


def clipped_sum(batch: Any, sizes: list[int], views: int) -> torch.Tensor:
    """Row by row, in float64: the sum of the units' clipped vectors."""
    net = model().double()
    rows = []
    for x, y in zip(*batch, strict=True):
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(x[None].double()), y[None]).backward()
        rows.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    units = [part.sum(0) / views for part in torch.stack(rows).split(sizes)]
    assert any(unit.norm() > CLIP for unit in units)
    return torch.stack([unit * min(1.0, CLIP / unit.norm().item()) for unit in units]).sum(0)


def users() -> UserSampler:
    return UserSampler(PoissonSampler(dataset_size=9, batch_size=4), np.arange(30) % 9, 4)


@pytest.mark.parametrize(
    ("views", "microbatch_size", "by_user"),
    [(3, None, False), (1, None, True), (3, 1, True), (3, 2, False), (1, 3, False), (3, 5, True)],
)
def test_the_mean_of_an_examples_views_is_clipped_once(views: int, microbatch_size: int | None, by_user: bool) -> None:
    method = dp_sgd(lr=0.3, noise_multiplier=1.0, batch_size=4 if by_user else 8, max_grad_norm=CLIP)
    options = {"sampling": users()} if by_user else {}
    run = start(
        model(),
        method,
        data=views_of(),
        augmentations=views,
        microbatch_size=microbatch_size,
        target_delta=1e-3,
        **options,
    )
    mechanism = run._engine.mechanism
    batch = next(iter(run.loader))
    indices = run.plan.sampler.indices(mechanism.keys.sampling, 0)
    assert len(batch[0]) == views * len(indices)
    assert torch.equal(batch[1], DATA[1][indices].repeat_interleave(views))
    assert len(batch[0].unique(dim=0)) == len(batch[0])  # views are unlike
    units = run.plan.sampler.units(mechanism.keys.sampling, 0)
    sizes = [views] * len(indices) if units is None else [views * int(size) for size in units]
    run._engine.accumulate(batch)
    found = mechanism.unit * torch.cat([torch.as_tensor(total) for total in mechanism.vectors.totals])
    assert torch.allclose(found, clipped_sum(batch, sizes, views), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", [dp_sgd, disk])
def test_views_that_are_alike_are_one_row(method: Any) -> None:
    def end(views: int) -> torch.Tensor:
        settings = {"lr": 0.3, "noise_multiplier": 1.0, "batch_size": 8, "max_grad_norm": CLIP}
        return finish(start(model(), method(**settings), data=views_of(0.0), augmentations=views), stop=3)

    alone = end(1)
    assert torch.allclose(end(4), alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(alone, values(model()), rtol=1e-2)


def test_views_follow_from_the_key_alone_and_cost_nothing() -> None:
    def run(seed: int, **options: Any) -> Any:
        torch.manual_seed(seed)
        return start(model(), data=views_of(), augmentations=2, stop=3, **options)

    one = run(1)
    assert torch.equal(values(one.model), values(run(2, num_workers=1).model))
    other = run(1, key=bytes(32))
    assert not torch.equal(values(one.model), values(other.model))
    assert one.epsilon() == start(model(), data=views_of(), stop=3).epsilon()
    assert torch.equal(finish(load(other, saved(one)), stop=6), finish(one, stop=6))


REFUSED = (
    ({"data": DATA, "augmentations": 2}, ArgumentError, "augmentations=2 with tensors as data: a row"),
    ({"data": views_of(), "augmentations": 0}, ArgumentError, "augmentations=0"),
    ({"data": views_of(), "augmentations": 1.5}, ArgumentTypeError, "augmentations=1.5"),
    ({"data": views_of(), "num_workers": -1}, ArgumentError, "num_workers=-1"),
)


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_refused(options: dict[str, Any], kind: type[DpcoreError], words: str) -> None:
    with pytest.raises(kind, match=words):
        start(model(), **options)
