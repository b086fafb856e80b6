"""Every method on a torch model is the method on arrays: one problem, the same batches, the same key."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
import dpcore.torch
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.stages.updates.galore import GaLore
from tests.depth import chosen
from tests.unit.torch_runs import KEY, METHODS, start

EXAMPLES, DIMENSION, STEPS = 14, 9, 7
RNG = np.random.default_rng(5)
A, LABELS = RNG.standard_normal((EXAMPLES, DIMENSION)), RNG.choice([-1.0, 1.0], EXAMPLES)
PUBLIC = RNG.standard_normal((7, DIMENSION)), RNG.choice([-1.0, 1.0], 7)
X0 = RNG.standard_normal(DIMENSION)
FOURS = [[0, 3, 7, 11], [1, 2, 5], [4, 6, 8, 9, 10], [12, 13], []]
ONES = [[i] for i in range(5)]


class Logistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.from_numpy(X0.copy()))

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a @ self.x


def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.softplus(-label * output).sum()


def gradients(x: np.ndarray, a: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Of log(1 + exp(-label <a, x>)), one row for each example, by hand."""
    return -(labels / (1 + np.exp(labels * (a @ x))))[:, None] * a


def method_and_sampler(name: str) -> tuple[dpcore.Method, FixedBatches]:
    method = METHODS[name](4)
    batches = ONES if method.batch_size == 1 else FOURS
    return method, FixedBatches(batches, dataset_size=EXAMPLES, batch_size=method.batch_size)


def on_arrays(name: str, record: bool) -> Any:
    method, sampler = method_and_sampler(name)
    public = method.update.second_moment == "public"
    return dpcore.minimize(
        lambda x, indices: gradients(x, A[indices], LABELS[indices]),
        X0,
        sampler,
        method,
        steps=STEPS,
        key=KEY,
        exact_key=True,
        record_gradients=record,
        public_gradient=(lambda x: gradients(x, *PUBLIC).mean(0)) if public else None,
    )


def on_torch(name: str, record: bool) -> dpcore.torch.PrivateRun:
    method, sampler = method_and_sampler(name)
    run = start(
        Logistic(), method, data=(A, LABELS), loss=loss, sampling=sampler, steps=STEPS, epochs=None, microbatch_size=2,
        gradients="one-by-one",
    )  # fmt: skip
    if record:
        run.record_gradients(1000)
    public = method.update.second_moment == "public"
    while run.steps_taken < STEPS:
        for batch in run.loader:
            run.step(batch, tuple(map(torch.from_numpy, PUBLIC)) if public else None)
    return run


@pytest.mark.parametrize("record", chosen([True], [False, True]))
# A vector has no subspace for GaLore, which is compared with the mechanism below, and no layers.
@pytest.mark.parametrize("name", [name for name in METHODS if "galore" not in name and "layer" not in name])
def test_a_torch_run_is_minimize(name: str, record: bool) -> None:
    want, run = on_arrays(name, record), on_torch(name, record)
    output = run.output_state_dict()["x"].numpy()
    np.testing.assert_allclose(output, want.x, rtol=1e-9, atol=1e-12)
    assert np.abs(output - X0).max() > 1e-3
    if not record:
        return
    recorded = run.recorded
    assert recorded["dimension"] == DIMENSION
    np.testing.assert_allclose(recorded["released"], want.gradients, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(recorded["filtered"], want.filtered, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(recorded["negative_share"], want.negative_share)
    assert run.statement().epsilon == want.statement(1e-5).epsilon
    caveats = run.statement().caveats
    assert set(want.statement(1e-5).caveats) <= set(caveats)


def test_galore_is_that_of_the_mechanism_and_leaves_kernels_alone() -> None:
    """The weight of the linear layer is projected; that of the convolution, which is no matrix, is not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 4, 3, bias=False), nn.Flatten(), nn.Linear(28, 5, bias=False)).double()
    inputs, targets = torch.randn(EXAMPLES, 1, 9, dtype=torch.float64), torch.arange(EXAMPLES) % 5
    method = dpcore.methods.dp_adam(
        lr=0.05, galore=GaLore(2, every=3), noise_multiplier=0.5, batch_size=4, weight_decay=0.1
    )
    sampler = FixedBatches(FOURS, dataset_size=EXAMPLES, batch_size=4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = start(net, method, data=(inputs, targets), sampling=sampler, steps=5, epochs=None)
    for batch in run.loader:
        run.step(batch)

    shapes = [(name, tuple(value.shape)) for name, value in before.items()]
    parameters = [value.numpy().copy() for value in before.values()]
    mechanism = Mechanism(
        Plan(method, sampler, 5, tuple(before)),
        Layout.of(shapes),
        parameters,
        backend=load_backend("numpy"),
        keys=RunKeys.new(KEY, exact_key=True),
    )
    assert [name for name in mechanism.state_dict()["public"]["arrays"] if name.endswith("projection")] == [
        "2.weight/projection"
    ]
    for batch in FOURS:
        rows: list[list[np.ndarray]] = [[] for _ in parameters]
        for i in batch:
            values = {n: torch.from_numpy(p).requires_grad_() for n, p in zip(before, parameters, strict=True)}
            output = torch.func.functional_call(net, values, inputs[i : i + 1])
            found = torch.autograd.grad(F.cross_entropy(output, targets[i : i + 1]), list(values.values()))
            for row, gradient in zip(rows, found, strict=True):
                row.append(gradient.numpy().ravel())
        mechanism.add([np.array(row).reshape(len(batch), p.size) for row, p in zip(rows, parameters, strict=True)])
        mechanism.release(parameters)
    for got, want in zip(net.parameters(), parameters, strict=True):
        np.testing.assert_allclose(got.detach().numpy(), want, rtol=3e-4, atol=1e-5)
