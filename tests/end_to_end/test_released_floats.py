"""Two neighboring data sets, one released step from zero: does any float of it rule one of them out?

The attack is Mironov's: a float normal can only make some values of ``S + s z``, other ones for every S. It asks of
each coordinate whether a candidate's sum S, noise that can be drawn and the arithmetic of the release make it.
"""

from collections.abc import Callable

import numpy as np
import pytest

import dpcore
import dpcore_numpy
from dpcore.mechanism.noise_state import normalizer_of
from dpcore.plan.plan import Plan, grid_of
from dpcore.sampling import FixedBatches
from dpcore.spec.backends import use_backend
from dpcore.spec.grid import nearest, step_of
from dpcore.spec.rounded_normal import LARGEST
from dpcore.stages.strategies import BLT, BandedToeplitz, SquareRoot, Tree, banded_inverse_square_root, in_blocks

B = 64
LR = 0.01


def gradients(d: int) -> np.ndarray:
    """B + 1 gradients below the clip norm 1, which clipping leaves as they are."""
    found = np.random.default_rng(1).standard_normal((B + 1, d)).astype(np.float32)
    return found * (0.9 / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def method_of(n: int, lr: float, **more: object) -> dpcore.Method:
    settings = {"lr": lr, "batch_size": n, "noise_multiplier": 1.0, "max_grad_norm": 1.0, **more}
    return dpcore.methods.memf(**settings) if "strategy" in settings else dpcore.methods.dp_sgd(**settings)


def near(values: np.ndarray, count: int = 6) -> list[np.ndarray]:
    """Floats next to these, and these."""
    found, up, down = [values], values, values
    for _ in range(count):
        up, down = np.nextafter(up, np.inf, dtype=values.dtype), np.nextafter(down, -np.inf, dtype=values.dtype)
        found += [up, down]
    return found


def excluded_by_floats(y: np.ndarray, g: np.ndarray, n: int, lr: float, run: int) -> int:
    """Coordinates that no float32 normal explains, where S + z is what a library with float noise releases."""
    s = g[:n].astype(np.float64).sum(0)
    possible = np.zeros(len(y), bool)
    for z in near((-y.astype(np.float64) / np.float64(np.float32(lr)) * run - s).astype(np.float32)):
        possible |= np.float32(0) - np.float32(lr) * ((s + z.astype(np.float64)) / run).astype(np.float32) == y
    return int((~possible).sum())


def excluded(y: np.ndarray, g: np.ndarray, n: int, lr: float, run: int) -> int:
    """Coordinates that no integer of the noise explains, with the grid of a run on `run` examples."""
    grid = grid_of(Plan(method_of(run, lr), FixedBatches([range(run)], batch_size=run), 1), len(y))
    u = step_of(1.0 * (1 + grid.raised), grid.bits)
    a = nearest(g[:n].astype(np.float64).sum(0) * (1 / u))
    kind, possible = y.dtype.type, np.zeros(len(y), bool)
    for average in near((-y / kind(lr)).astype(y.dtype)):
        t = nearest(average.astype(np.float64) / (u / run))
        made = (t * (u / run)).astype(y.dtype) == average
        made &= kind(0) - kind(lr) * average == y
        possible |= made & (np.abs(t - a) < LARGEST * 2.0**grid.bits)
    return int((~possible).sum())


def by_minimize(g: np.ndarray, n: int, lr: float, dtype: type, **more: object) -> np.ndarray:
    start = np.zeros(g.shape[1], dtype)
    rows = g.astype(dtype)
    return dpcore.minimize(lambda x, i: rows[i], start, [np.arange(n)], method_of(n, lr, **more)).x


def by_torch(g: np.ndarray, n: int, lr: float) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from dpcore.torch import make_private

    class Zero(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(g.shape[1]))

        def forward(self, x: object) -> object:
            return (x * self.w).sum(-1)

    model, data = Zero(), (torch.from_numpy(g[:n]), torch.zeros(n))
    private = make_private(
        model, data, method_of(n, lr), steps=1, sampling="fixed_order", loss=lambda output, y: output
    )
    for batch in private.loader:
        private.step(batch)
    return model.w.detach().numpy().copy()


@pytest.mark.parametrize("truth", [B, B + 1])
def test_floats_for_noise_betray_the_data(truth: int) -> None:
    """What this library did, and others do: the true data set is possible and its neighbor is not."""
    g = gradients(20_000)
    z = np.random.default_rng(2).standard_normal(20_000).astype(np.float32)
    s = g[:truth].astype(np.float64).sum(0)
    y = np.float32(0) - np.float32(LR) * ((s + z.astype(np.float64)) / truth).astype(np.float32)
    assert excluded_by_floats(y, g, truth, LR, truth) == 0
    assert excluded_by_floats(y, g, 2 * B + 1 - truth, LR, truth) > 200


@pytest.mark.parametrize("truth", [B, B + 1])
@pytest.mark.parametrize("lr", [1.0, LR])
@pytest.mark.parametrize(
    "release",
    [
        pytest.param(lambda g, n, lr: by_minimize(g, n, lr, np.float32), id="minimize"),
        pytest.param(lambda g, n, lr: by_minimize(g, n, lr, np.float64), id="minimize float64"),
        pytest.param(by_torch, id="make_private"),
    ],
)
def test_no_released_float_rules_out_a_neighbor(release: Callable[..., np.ndarray], lr: float, truth: int) -> None:
    g = gradients(20_000)
    y = release(g, truth, lr)
    assert np.abs(y).max() > 0
    for candidate in (B, B + 1):
        assert excluded(y, g, candidate, lr, truth) == 0


def by_adam(g: np.ndarray, n: int) -> np.ndarray:
    start = np.zeros(g.shape[1], np.float32)
    method = dpcore.methods.dp_adam(lr=1.0, batch_size=n, noise_multiplier=1.0, max_grad_norm=1.0, eps=1.0)
    return dpcore.minimize(lambda x, i: g[i], start, [np.arange(n)], method).x


def explained_by_adam(y: np.ndarray, run: int) -> np.ndarray:
    """The integers of the release that Adam's first step from 0 makes of it; -1 where there is none."""
    plan = Plan(method_of(run, 1.0), FixedBatches([range(run)], batch_size=run), 1)
    grid, found = grid_of(plan, len(y)), np.full(len(y), -1.0)
    u = step_of(1 + grid.raised, grid.bits)
    settings = dpcore.methods.dp_adam(lr=1.0, batch_size=run, noise_multiplier=1.0, eps=1.0).update.settings()
    for average in near((-y.astype(np.float64) / (1 - np.abs(y.astype(np.float64)))).astype(np.float32), 40):
        t, x = nearest(average.astype(np.float64) / (u / run)), np.zeros_like(y)
        moments = [np.zeros_like(y), np.zeros_like(y)]
        dpcore_numpy.update("adam", x, average.copy(), moments, settings, 1)
        found = np.where((x == y) & ((t * (u / run)).astype(np.float32) == average), t, found)
    return found


@pytest.mark.parametrize("truth", [B, B + 1])
def test_adams_first_step_rules_out_no_neighbor(truth: int) -> None:
    g = gradients(3_000)
    t = explained_by_adam(by_adam(g, truth), truth)
    assert (t != -1).all()
    for candidate in (B, B + 1):
        a = g[:candidate].astype(np.float64).sum(0) * 2.0**36
        assert (np.abs(t - a) < LARGEST * 2.0**36).all()


@pytest.mark.parametrize("truth", [B, B + 1])
def test_an_adapters_first_step_rules_out_no_neighbor(truth: int) -> None:
    """LoRA's B is zero at first; its gradient is a product that is never formed."""
    torch = pytest.importorskip("torch")
    from dpcore.torch import make_private

    width, rank = 40, 8
    x = torch.from_numpy(np.random.default_rng(5).standard_normal((B + 1, width)).astype(np.float32))

    class Adapter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(3)
            self.down = torch.nn.Linear(width, rank, bias=False).requires_grad_(False)
            self.down.weight.data = torch.randn(rank, width, generator=generator) / 8
            self.up = torch.nn.Linear(rank, width, bias=False)
            self.up.weight.data.zero_()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.up(self.down(x))

    model, data = Adapter(), (x[:truth], torch.zeros(truth, width))
    private = make_private(
        model, data, method_of(truth, 1.0), steps=1, sampling="fixed_order",
        loss=lambda output, y: ((output - y) ** 2).mean(-1), gradients="pairs",
    )  # fmt: skip
    for batch in private.loader:
        private.step(batch)
    y, h = model.up.weight.detach().numpy().reshape(-1), model.down(x).detach().numpy()
    rows = (2 / width * x.numpy()[:, :, None] * h[:, None, :]).reshape(B + 1, -1)
    g = rows * np.minimum(1, 1 / np.linalg.norm(rows, axis=1, keepdims=True))
    for candidate in (B, B + 1):
        assert excluded(y, g, candidate, 1.0, truth) == 0


def test_the_attack_sees_a_sum_beside_the_grid() -> None:
    """The attack can fail: where the sum is not rounded, float64 parameters rule out the neighbor."""
    g = gradients(5_000)
    s = g[:B].astype(np.float64).sum(0)
    grid = grid_of(Plan(method_of(B, 1.0), FixedBatches([range(B)], batch_size=B), 1), 5_000)
    u = step_of(1 + grid.raised, grid.bits)
    m = np.floor(np.random.default_rng(3).standard_normal(5_000) * 2.0**grid.bits)
    assert excluded(-((s / u + m) * (u / B)), g, B, 1.0, B) > 1_000
    assert excluded(-((nearest(s / u) + m) * (u / B)), g, B, 1.0, B) == 0


def test_triton_releases_on_the_grid() -> None:
    pytest.importorskip("triton")
    g = gradients(600)
    with use_backend("triton"):
        y = by_minimize(g, B, 1.0, np.float32)
    for candidate in (B, B + 1):
        assert excluded(y, g, candidate, 1.0, B) == 0


STRATEGIES = {
    "a ring of noise": BandedToeplitz((1.0, 0.5, 0.25)), "a ring of rows": banded_inverse_square_root(3, 6),
    "a recurrence": BLT((0.4, 0.15), (0.9, 0.5), 6), "rows drawn again": Tree(6),
    "rows in blocks": in_blocks(SquareRoot(6), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", STRATEGIES)
def test_correlated_noise_stays_on_the_grid(name: str) -> None:
    """All steps' averages are whole multiples of each step's own grid: no digit of the sum is left beside it."""
    d, steps, n = 300, 6, 8
    g = gradients(d)[: n * steps].astype(np.float64)
    method = method_of(n, 1.0, strategy=STRATEGIES[name], base="sgd")
    batches = [np.arange(n * t, n * t + n) for t in range(steps)]
    result = dpcore.minimize(lambda x, i: g[i], np.zeros(d), batches, method, record_gradients=True)
    grid = grid_of(result.plan, d)
    for t, average in enumerate(result.gradients):
        scale = result.plan.noise_standard_deviation() * (1 + grid.raised)
        u = step_of(scale, grid.bits, normalizer_of(STRATEGIES[name], t))
        integers = nearest(average / (u / n))
        assert np.array_equal(integers * (u / n), average)
