"""Copies, the plain operations of the port, and the optimizers that others have: each with the bytes it must move."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import multiple_of
from dpcore.spec.pair_ops import LinearPairs
from dpcore_numpy.slices import sliced_factors
from dpcore_triton.chips import chip_of

from .clock import times
from .runner import Setting
from .steps import BATCH, KEY, LARGEST_DISTANCE, NOISE, UNIT, WINDOW, distance

PARAMETERS, TENSORS = 100_000_000, 10


def sizes(setting: Setting) -> list[int]:
    """Return sizes of tensors: a hundred million parameters, 400 MB a vector, beyond any cache; small ones else."""
    return [300, 5000] if setting.small else [PARAMETERS // TENSORS] * TENSORS


def measured(
    run: Callable[[], object], setting: Setting, bytes_: int | None, moved: str, **found: Any
) -> dict[str, Any]:
    """Time `run` and state the bytes that it must move, and of what they consist."""
    rate: dict[str, Any] = times(run, timed=not setting.small)
    if rate["timed"] and bytes_ is not None:
        rate["bytes_per_s"] = [bytes_ / (1e-3 * ms) for ms in rate["ms"]]
    return {"bytes": bytes_, "moved": moved, **found, **rate}


def near(got: torch.Tensor, expected: Any, allowed: float = LARGEST_DISTANCE) -> float:
    """Return the relative distance; raise if it is larger than allowed, or not a number."""
    wide = expected.cpu().numpy() if isinstance(expected, torch.Tensor) else expected
    found = distance(got.cpu().numpy(), wide)
    if not found <= allowed:
        raise AssertionError(f"differs from the reference by {found:.1e}, allowed are {allowed:.1e}")
    return found


def poison(size: int, setting: Setting, dtype: torch.dtype = torch.float32) -> None:
    """Fill memory with NaN and give it back: the next array of this size lies there."""
    torch.full((size,), float("nan"), dtype=dtype, device=setting.device)


def copy(setting: Setting, gigabytes: int) -> dict[str, Any]:
    """Device to device: the rate that all others are compared with."""
    count = 1000 if setting.small else gigabytes * 10**9 // 4
    source = torch.randn(count, device=setting.device)
    target = torch.full_like(source, float("nan"))
    found = measured(lambda: target.copy_(source), setting, 2 * source.nbytes, "read once, written once")
    if not torch.equal(source, target):
        raise AssertionError("the copy differs from its source")
    return found


def normals(setting: Setting, rng: str) -> dict[str, Any]:
    """Standard normals: nothing is read."""
    ops, reference = load_backend("triton"), load_backend("numpy")
    count = sum(sizes(setting))
    poison(count, setting, torch.float64)
    got = ops.normal(KEY, 3, 0, 0, count, rng=rng)
    starts = sorted({0, count // 2, count - min(WINDOW, count)})
    for start in starts:
        stop = min(start + WINDOW, count)
        expected = reference.normal(KEY, 3, 0, start, stop - start, rng=rng)
        if not np.array_equal(got[start:stop].cpu().numpy(), expected):
            raise AssertionError(f"normals {start} to {stop} have other bits than the reference's")
    moments = got.mean().item(), got.std().item()
    if not (abs(moments[0]) < 6 / count**0.5 and abs(moments[1] - 1) < 6 / count**0.5):
        raise AssertionError(f"mean and deviation of {count} normals are {moments}")  # also if one is NaN
    del got
    run = lambda: ops.normal(KEY, 3, 0, 0, count, rng=rng)  # noqa: E731
    return measured(run, setting, 8 * count, "written: float64", coordinates=count)


def _rows(setting: Setting) -> torch.Tensor:
    return torch.randn((4, 3000) if setting.small else (64, 10_000_000), device=setting.device)


def row_norms(setting: Setting) -> dict[str, Any]:
    """Norms of 64 vectors of ten million."""
    ops, rows = load_backend("triton"), _rows(setting)
    poison(len(rows), setting, torch.float64)
    expected = torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows])
    # A backend may raise a norm by 2^-17 (`Backend.row_norms`).
    found = near(ops.row_norms([rows]), expected, 2.0**-16)
    return measured(
        lambda: ops.row_norms([rows]), setting, rows.nbytes, "read: float32",
        coordinates=rows.numel(), largest_distance=found,
    )  # fmt: skip


def clip_factors(setting: Setting) -> dict[str, Any]:
    """64 factors: so few bytes that it is the time of its launches."""
    ops, norms = load_backend("triton"), torch.rand(64, dtype=torch.float64, device=setting.device) * 2 + 0.1
    run = lambda: ops.clip_factors([norms], "standard", [1.0], [1000], [0.0], UNIT)[0]  # noqa: E731
    found = near(UNIT * run(), (1 / norms).clamp(max=1.0))
    return measured(run, setting, None, "hardly any: the time is that of launches", largest_distance=found)


def weighted_sum(setting: Setting) -> dict[str, Any]:
    """Weighted sum of 64 vectors of ten million."""
    ops, rows = load_backend("triton"), _rows(setting)
    weights = torch.rand(len(rows), dtype=torch.float64, device=setting.device) / UNIT
    total = (torch.randn(rows.shape[1], dtype=torch.float64, device=setting.device) / UNIT).round()
    columns = [slice(0, WINDOW), slice(rows.shape[1] // 2, rows.shape[1] // 2 + WINDOW), slice(-WINDOW, None)]
    expected = [total[part] + (weights[:, None] * rows[:, part].double()).round().sum(dim=0) for part in columns]
    ops.weighted_sum([rows], [weights], [total])
    largest = max(near(total[part], exact, 0.0) for part, exact in zip(columns, expected, strict=True))
    return measured(
        lambda: ops.weighted_sum([rows], [weights], [total]), setting, rows.nbytes + 2 * total.nbytes,
        "read: rows float32, the sum float64; written: the sum",
        coordinates=rows.numel(), largest_distance=largest,
    )  # fmt: skip


def norms_of_one(setting: Setting) -> dict[str, Any]:
    """Norms of 4,096 gradients of a layer of one position, in bfloat16."""
    ops, (examples, p, q) = load_backend("triton"), (70, 65, 130) if setting.small else (4096, 2048, 2048)
    a, e = (torch.randn((examples, 1, width), device=setting.device).bfloat16() for width in (p, q))
    layer = LinearPairs([a], [e], [1.0])
    expected = a[:, 0].double().norm(dim=1) * e[:, 0].double().norm(dim=1)
    found = near(ops.linear_norms([layer])[0], expected, 2.0**-18)
    return measured(
        lambda: ops.linear_norms([layer])[0], setting, a.nbytes + e.nbytes, "read: both sides in bfloat16",
        coordinates=a.numel() + e.numel(), largest_distance=found,
    )  # fmt: skip


def sliced_sums(setting: Setting) -> dict[str, Any]:
    """Weighted sum of 4,096 gradients of a layer of one position: by bytes, or float64 on a chip that is not known."""
    ops, sliced = load_backend("triton"), chip_of(setting.device) is not None
    examples, p, q = (70, 65, 130) if setting.small else (4096, 2048, 2048)
    a, e = (torch.randn((examples, 1, width), device=setting.device) for width in (p, q))
    weights = 2.0**36 / ops.linear_norms([LinearPairs([a], [e], [1.0])])[0]
    total, layer = torch.zeros(q * p, dtype=torch.float64, device=setting.device), LinearPairs([a], [e], [1.0])

    def run() -> None:
        ops.linear_sums([layer], [weights], [total], None, [2.0**36])

    run()
    x, y = sliced_factors(*(each[:, 0].cpu().numpy() for each in (a, e)), weights.cpu().numpy(), 2.0**36)
    rows = slice(q - 32, q)
    expected = multiple_of(2.0**36) * (y[:, rows].T @ x).astype(np.float64)
    found = near(total.view(q, p)[rows], expected, 0.0 if sliced else 2.0**-8)
    moved = "read: both sides in float32, and the sum; written: the sum in float64"
    bytes_ = a.nbytes + e.nbytes + 2 * total.nbytes
    return measured(run, setting, bytes_, moved, coordinates=p * q, largest_distance=found, sliced=sliced)


def _parameters(setting: Setting) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.randn(size, device=setting.device)) for size in sizes(setting)]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def _torch_optimizer(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, fused=True)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](parameters, lr=1e-3, fused=True)


def torch_optimizer(setting: Setting, name: str) -> dict[str, Any]:
    """Torch's own fused optimizer: no privacy, a float32 gradient."""
    parameters = _parameters(setting)
    optimizer = _torch_optimizer(name, parameters)
    count = sum(parameter.numel() for parameter in parameters)
    each = 12 if name == "sgd" else 28
    moved = "gradient read; parameter" + ("" if name == "sgd" else " and two moments") + " read and written: float32"
    return measured(optimizer.step, setting, each * count, moved, coordinates=count)


def peer_step(setting: Setting) -> dict[str, Any]:
    """Noise, division and fused Adam after clipping: Opacus's own code if it is installed, else the same in torch.

    The bytes are those of one pass over memory, the least for this work, as they are for dpcore's step.
    """
    parameters = _parameters(setting)
    adam = _torch_optimizer("adam", parameters)
    totals = [torch.randn_like(parameter) for parameter in parameters]
    if importlib.util.find_spec("opacus") is not None:
        run, what = _opacus(parameters, adam, totals), "Opacus: add_noise, scale_grad, the original optimizer's step"
    else:
        what = "Opacus is not installed: torch.normal, add, divide, fused Adam, in torch"

        def run() -> None:
            for parameter, total in zip(parameters, totals, strict=True):
                noise = torch.normal(0.0, NOISE, total.shape, device=total.device)
                parameter.grad = (total + noise) / BATCH
            adam.step()

    count = sum(parameter.numel() for parameter in parameters)
    moved = "the least, in one pass: sum read; parameter and two moments read and written: float32"
    return measured(run, setting, 28 * count, moved, coordinates=count, what=what, noise="torch.normal")


def _opacus(
    parameters: list[torch.nn.Parameter], adam: torch.optim.Optimizer, totals: list[torch.Tensor]
) -> Callable[[], None]:
    from opacus.optimizers import DPOptimizer

    optimizer = DPOptimizer(adam, noise_multiplier=NOISE, max_grad_norm=1.0, expected_batch_size=int(BATCH))
    for parameter in parameters:
        parameter.grad_sample = torch.empty(0)  # type: ignore[attr-defined]  # only counted: one micro-batch

    def run() -> None:
        for parameter, total in zip(parameters, totals, strict=True):
            # A new view each time: Opacus marks the tensor as processed and refuses to noise it twice.
            parameter.summed_grad = total.detach()  # type: ignore[attr-defined]
        optimizer.add_noise()
        optimizer.scale_grad()
        optimizer.original_optimizer.step()

    return run
