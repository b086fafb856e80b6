"""A private run equals a loop over examples: autograd, clip, sum, the stream's normals, torch's own optimizer."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
import dpcore.torch
from dpcore.sampling import FixedBatches
from dpcore.spec.backends import load_backend
from dpcore.spec.layout import Layout
from dpcore.spec.stream import Stream
from dpcore.torch.randomness import seeded
from tests.depth import pairs
from tests.unit import torch_runs
from tests.unit.torch_runs import KEY, finish, load, model, saved


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    net = model().to(dtype)
    return net, (torch.randn(30, 5, dtype=dtype), torch.arange(30) % 3)


def start(net: nn.Module, data: Any, method: dpcore.Method, **options: Any) -> dpcore.torch.PrivateRun:
    return torch_runs.start(net, method, data=data, **{"epochs": 2, **options})


def train(run: dpcore.torch.PrivateRun) -> list[torch.Tensor]:
    finish(run)
    return [p.detach().clone() for p in run.model.parameters()]


def close(left: list[torch.Tensor], right: list[torch.Tensor], **tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def per_example(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(F.cross_entropy(model(x[None]), y[None]), list(model.parameters())))


def brute_force(
    model: nn.Module,
    data: tuple[torch.Tensor, torch.Tensor],
    batches: list[np.ndarray],
    *,
    optimizer: torch.optim.Optimizer,
    clip: float,
    rule: str,
    sigma: float,
    batch_size: float,
    query: tuple[float, float] | None = None,
    low_pass: tuple[list[float], list[float]] | None = None,
    average: float | None = None,
) -> list[torch.Tensor]:
    """Algorithms.md sections 2 to 4, written down once more with autograd and a torch optimizer."""
    parameters = list(model.parameters())
    layout = Layout.of((name, p.shape) for name, p in model.named_parameters())
    draw = load_backend("numpy").normal
    displacement = [torch.zeros_like(p) for p in parameters]
    released: list[list[torch.Tensor]] = []
    filtered: list[list[torch.Tensor]] = []
    c: list[float] = []
    for t, batch in enumerate(batches):
        total = [torch.zeros_like(p) for p in parameters]
        for i in batch:
            x, y = data[0][i], data[1][i]
            here = per_example(model, x, y)
            vector = here
            if query is not None and t > 0:
                kappa, gamma = query
                w = (1 - kappa) / (kappa * gamma)
                moved = [p.detach().clone() for p in parameters]
                with torch.no_grad():
                    for p, d in zip(parameters, displacement, strict=True):
                        p.copy_(p + gamma * d)
                there = per_example(model, x, y)
                with torch.no_grad():
                    for p, old in zip(parameters, moved, strict=True):
                        p.copy_(old)
                vector = [w * a + (1 - w) * b for a, b in zip(there, here, strict=True)]
            norm = math.sqrt(sum(v.double().square().sum().item() for v in vector))
            if not math.isfinite(norm):
                continue
            factor = min(1.0, clip / norm) if rule == "standard" else clip / (norm + 0.01)
            total = [s + factor * v for s, v in zip(total, vector, strict=True)]
        noise = [
            torch.from_numpy(draw(KEY, t, Stream.GRADIENT, e.first, e.size).reshape(e.shape)) for e in layout.entries
        ]
        g = [(s + sigma * clip * z) / batch_size for s, z in zip(total, noise, strict=True)]
        released.append(g)
        if average is not None:
            g = g if t == 0 else [(1 - average) * m + average * v for m, v in zip(filtered[-1], g, strict=True)]
            filtered.append(g)
        elif low_pass is not None:
            b, a = low_pass
            m = [sum(bk * released[t - k][j] for k, bk in enumerate(b) if k <= t) for j in range(len(g))]
            m = [v - sum(ak * filtered[t - k][j] for k, ak in enumerate(a, 1) if k <= t) for j, v in enumerate(m)]
            filtered.append(m)
            c.append(sum(b[: t + 1]) - sum(ak * c[t - k] for k, ak in enumerate(a, 1) if k <= t))
            g = [v / c[t] for v in m]
        before = [p.detach().clone() for p in parameters]
        for p, v in zip(parameters, g, strict=True):
            p.grad = v.clone()
        optimizer.step()
        displacement = [p.detach() - old for p, old in zip(parameters, before, strict=True)]
    return [p.detach() for p in parameters]


CLIP = 0.05  # below every example's gradient norm here: a dropped clip would show
SETTINGS = {"max_grad_norm": CLIP, "noise_multiplier": 0.8, "batch_size": 8}
# fmt: off
METHODS = {  # the method, torch's optimizer, and what else the brute force needs
    "dp_sgd": (
        lambda: dpcore.methods.dp_sgd(lr=0.3, weight_decay=0.1, **SETTINGS),
        lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1), {"rule": "standard"}),
    "dp_sgd momentum": (
        lambda: dpcore.methods.dp_sgd(lr=0.3, base="momentum", **SETTINGS),
        lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9), {"rule": "standard"}),
    "doppler": (
        lambda: dpcore.methods.doppler(lr=0.3, filter="second-order", **SETTINGS),
        lambda p: torch.optim.SGD(p, lr=0.3),
        {"rule": "standard", "low_pass": ([1 / 58, 2 / 58, 1 / 58], [-92 / 58, 38 / 58])}),
    "disk": (
        lambda: dpcore.methods.disk(lr=0.3, **SETTINGS),
        lambda p: torch.optim.SGD(p, lr=0.3), {"rule": "automatic", "query": (0.7, 0.5), "average": 0.7}),
    "dp_adam": (
        lambda: dpcore.methods.dp_adam(lr=0.05, weight_decay=0.1, **SETTINGS),
        lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1), {"rule": "standard"})
}
# fmt: on


CLOSE = {"one-by-one": (1e-7, 1e-9), "auto": (3e-4, 2e-6)}


@pytest.mark.parametrize(("name", "way"), pairs(METHODS, CLOSE, 2))
def test_equals_brute_force(name: str, way: str) -> None:
    """On a grid of 2^-36; vectors that are not formed have factors of 16 bits."""
    (make, optimizer, settings), close_to = METHODS[name], CLOSE[way]
    model, data = problem()
    run = start(model, data, make(), microbatch_size=3, gradients=way, epochs=1)
    indices = [run.plan.sampler.indices(run._engine.mechanism.keys.sampling, t) for t in range(run.plan.steps)]
    assert 0 < min(map(len, indices)) < max(map(len, indices))
    twin, _ = problem()
    settings = {"optimizer": optimizer(twin.parameters()), "clip": CLIP, "sigma": 0.8, "batch_size": 8, **settings}
    close(train(run), brute_force(twin, data, indices, **settings), rtol=close_to[0], atol=close_to[1])
    assert all(p.grad is None for p in model.parameters())


def test_microbatch_size_changes_nothing_but_rounding() -> None:
    results = []
    for size in (1, 4, 64):
        model, data = problem()
        results.append(train(start(model, data, METHODS["disk"][0](), microbatch_size=size, epochs=1)))
    close(results[0], results[1], rtol=1e-9, atol=1e-10)
    close(results[0], results[2], rtol=1e-9, atol=1e-10)


def test_empty_batch_is_a_step_of_pure_noise() -> None:
    model, data = problem()
    before = [p.detach().clone() for p in model.parameters()]
    method = dpcore.methods.dp_sgd(lr=1.0, noise_multiplier=2.0, max_grad_norm=0.5, batch_size=8)
    run = start(model, data, method, sampling=FixedBatches([[], [1, 2]], dataset_size=30, batch_size=8), epochs=1)
    inputs, targets = next(iter(run.loader))
    assert (inputs.shape, inputs.dtype) == ((0, 5), torch.float64)
    assert (targets.shape, targets.dtype) == ((0,), torch.int64)
    run.step((inputs, targets))
    layout = Layout.of((name, p.shape) for name, p in model.named_parameters())
    for old, new, entry in zip(before, model.parameters(), layout.entries, strict=True):
        z = load_backend("numpy").normal(KEY, 0, Stream.GRADIENT, entry.first, entry.size)
        want = old - 2.0 * 0.5 / 8 * torch.from_numpy(z).reshape(entry.shape)
        torch.testing.assert_close(new.detach(), want, rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*not finite:dpcore.errors.TrainingWarning")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_example_adds_exactly_nothing(bad: float) -> None:
    model, (inputs, targets) = problem()
    twin, _ = problem()
    method = dpcore.methods.disk(lr=0.3, noise_multiplier=0.5, batch_size=4)
    inputs = inputs.clone()
    inputs[1, 2] = bad
    with_it = FixedBatches([[0, 1, 2, 3]] * 3, dataset_size=30, batch_size=4)
    without = FixedBatches([[0, 2, 3]] * 3, dataset_size=30, batch_size=4)
    got = train(start(model, (inputs, targets), method, sampling=with_it, epochs=1))
    want = train(start(twin, (inputs, targets), method, sampling=without, epochs=1))
    close(got, want, rtol=1e-9, atol=1e-10)
    assert all(p.isfinite().all() for p in got)


def test_parameters_without_gradients_are_left_alone() -> None:
    model, data = problem()
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model[0].parameters()]
    run = start(model, data, dpcore.methods.dp_adam(lr=0.1, noise_multiplier=1.0, batch_size=8))
    after = train(run)
    assert run.plan.tensors == ("2.weight", "2.bias")
    close(after[:2], before, rtol=0, atol=0)
    assert not any(torch.equal(a, b) for a, b in zip(after[2:], problem()[0][2].parameters(), strict=True))


def test_users_gradients_and_modes_stay() -> None:
    model, data = problem()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    hooks = [len(m._forward_hooks) for m in model.modules()]
    forward = type(model).forward
    run = start(model, data, METHODS["disk"][0]())
    train(run)
    assert all((p.grad == 7).all() for p in model.parameters())
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert type(model).forward is forward
    assert "forward" not in vars(model)
    assert run.optimizer.state == {}
    assert all(set(vars(p)) == set() for p in model.parameters())


def test_bfloat16_keeps_its_small_steps_in_float32() -> None:
    """Three steps of pure noise, each far below bfloat16's resolution: the float32 state is their exact sum."""
    model, (inputs, targets) = problem(torch.float32)
    model = model.bfloat16()
    before = [p.detach().float() for p in model.parameters()]
    method = dpcore.methods.dp_sgd(lr=1e-4, noise_multiplier=1.0, batch_size=1)
    sampler = FixedBatches([[], [], [], [0]], dataset_size=30, batch_size=1)
    run = start(model, (inputs.bfloat16(), targets), method, sampling=sampler, epochs=None, steps=3)
    finish(run)
    layout = Layout.of((name, p.shape) for name, p in model.named_parameters())
    draw = load_backend("numpy").normal
    state = zip(before, run._engine.working.tensors(), model.parameters(), layout.entries, strict=True)
    for old, wide, parameter, entry in state:
        normals = [draw(KEY, t, Stream.GRADIENT, entry.first, entry.size) for t in range(3)]
        want = old - 1e-4 * torch.from_numpy(np.sum(normals, axis=0)).reshape(entry.shape)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.double(), want, rtol=1e-6, atol=1e-9)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, wide.bfloat16())
    with torch.no_grad():
        model[0].bias.fill_(3.0)  # what the user loads counts
    run._engine.working.refresh()
    assert (run._engine.working.tensors()[1] == 3).all()


def test_graph_of_the_old_parameters_cannot_be_used_after_a_step() -> None:
    model, data = problem()
    run = start(model, data, METHODS["dp_sgd"][0]())
    output = (model[2].weight * model[2].weight).sum()
    run.step(next(iter(run.loader)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_dropout_masks_follow_from_the_secret_key_alone() -> None:
    """Under a seed that somebody may know, removing an example shifts all later masks: the sum moves by more than C."""
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=0.0, batch_size=1)  # of the key the masks alone are left
    data = (torch.ones(4, 5), torch.zeros(4, dtype=torch.int64))

    def end(seed: int, key: bytes = KEY, fork: bool | None = None) -> list[torch.Tensor]:
        def fresh() -> dpcore.torch.PrivateRun:
            torch.manual_seed(3)
            net = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3))
            torch.manual_seed(seed)
            sampler = FixedBatches([[0]] * 4, dataset_size=4, batch_size=1)
            return start(net, data, method, sampling=sampler, epochs=None, steps=3, key=key)

        run = fresh()
        if fork is not None:
            run = load(fresh(), saved(run), fork)
        state = torch.get_rng_state()
        found = train(run)
        assert torch.equal(torch.get_rng_state(), state)
        return found

    right = end(1)
    assert all(map(torch.equal, right, end(2)))
    assert all(map(torch.equal, right, end(1, fork=False)))
    assert not any(map(torch.equal, right, end(1, bytes(32))))
    assert not any(map(torch.equal, right, end(1, fork=True)))


def test_the_public_state_holds_nothing_that_masks_follow_from() -> None:
    model, data = problem()
    run = start(model, data, METHODS["disk"][0]())
    public = dpcore.torch.public_state(run.optimizer.state_dict())["dpcore"]["public"]
    assert set(public) == {
        "step", "branch", "branches", "layout", "rng", "arrays", "wide_parameters", "microbatch_size", "settings",
        "statistics", "corrections", "caller_noise", "recorded", "ledger", "noise",
        "stopped_by_results", "caveats", "processes",
    }  # fmt: skip


def test_a_cpu_generator_gets_more_of_the_seed_than_torch_would_keep() -> None:
    """torch.manual_seed keeps 32 bits on a CPU, few enough to try them all; so its seed must not decide the draws."""
    cpu = torch.device("cpu")
    with seeded(cpu, KEY) as drew:
        assert not drew()
        values = torch.rand(1000)
        assert drew()
        torch.manual_seed(torch.initial_seed())
        assert not torch.equal(torch.rand(1000), values)
    assert 0.45 < values.mean() < 0.55
    with seeded(cpu, KEY):
        assert torch.equal(torch.rand(1000), values)
    with seeded(cpu, bytes(32)):
        assert not torch.equal(torch.rand(1000), values)


def test_the_statement_says_that_masks_are_not_cryptographic() -> None:
    model, data = problem()
    method = METHODS["dp_sgd"][0]()
    assert not any("dropout" in c.lower() for c in start(model, data, method).statement().caveats)
    model.append(nn.Dropout(0.5)).eval()  # it may be trained in training mode later
    assert any("Dropout" in c for c in start(model, data, method).statement().caveats)


def test_noise_has_the_stated_scale() -> None:
    torch.manual_seed(0)
    model = nn.Linear(100, 40)
    before = [p.detach().clone() for p in model.parameters()]
    method = dpcore.methods.dp_sgd(lr=1.0, noise_multiplier=1.5, max_grad_norm=2.0, batch_size=10)
    sampler = FixedBatches([[], [0]], dataset_size=20, batch_size=10)
    data = (torch.randn(20, 100), torch.arange(20))
    run = start(model, data, method, sampling=sampler, steps=1, epochs=None, key=None, exact_key=False)
    run.step(next(iter(run.loader)))
    moved = torch.cat([(a - p.detach()).flatten() for a, p in zip(before, model.parameters(), strict=True)])
    # 4040 draws: the standard deviation is known to 1.1%, so 5% is more than four standard errors.
    assert moved.std().item() == pytest.approx(1.5 * 2.0 / 10, rel=0.05)
