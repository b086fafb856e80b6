"""A device runs the programs of a launch at once, and the interpreter one after the other, where no race can show.

So the interpreter tells here which addresses each program loads, stores and adds to: where two programs meet at one,
both only load, or both only add.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton.runtime.interpreter as interpreter
from numpy.typing import NDArray

import dpcore_triton
from asv_benchmarks.gpu import small_steps
from dpcore.spec.pair_ops import LinearPairs
from dpcore_triton import chips, launch
from tests.depth import chosen

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="the interpreter tells the addresses")

# Those of a device, with which small arrays take several programs.
SIZES = {
    "BLOCKS": (128, "noise", "step", "stream"),
    "ELEMENTS": (512, "correlate", "filter", "update"),
    "COLUMNS": (512, "clip", "joined", "row_norms"),
    "ROWS": (4, "clip", "core_linear", "embedding", "pairs", "row_norms"),
    "SQUARED_ROWS": (1, "gram", "row_norms"),
}


def cores() -> None:
    """Norms and sums on tensor cores, by tiles, by inner products, and by bytes."""
    draw = torch.Generator().manual_seed(0)
    for examples, time, p, q in ((5, 70, 136, 72), (3, 20, 200, 168), (9, 1, 130, 70)):
        inputs, gradients = (torch.randn(examples, time, width, generator=draw) for width in (p, q))
        layer, out = LinearPairs([inputs], [gradients], [1.0]), torch.zeros(q * p, dtype=torch.float64)
        (norms,) = dpcore_triton.linear_norms([layer])
        dpcore_triton.linear_sums([layer], [2.0**36 / norms], [out], None, [2.0**36])


WORK: dict[str, Callable[[], None]] = {
    "pairs": lambda: small_steps.pairs("cpu"),
    "single tensors": lambda: small_steps.plain("cpu"),
    "cores": cores,
    "steps": lambda: small_steps.steps("cpu", ["momentum, philox", "sgd, banded 8", "adam, scale"], (1, 5000)),
}


KERNELS = list(zip(WORK, (13, 10, 8, 1), strict=True))


class Met:
    """What the programs of a launch did: columns of addresses and programs."""

    def __init__(self) -> None:
        self.launches = set[str]()
        self.of = dict[str, list[NDArray[np.uint64]]]()

    def noting(self, kind: str, method: Callable[..., Any], pointers: int, mask: int) -> Callable[..., Any]:
        """Return a method of the interpreter that notes where the present program loads, stores or adds."""

        def noted(builder: Any, *args: Any) -> Any:
            at = args[pointers].data
            at = at[np.broadcast_to(args[mask].data, at.shape)].astype(np.uint64)
            self.of[kind].append(np.stack([at, np.full_like(at, builder.grid_idx[0])]))
            return method(builder, *args)

        return noted

    def checking(self, start: Callable[..., None]) -> Callable[..., None]:
        """Return a launch that fails if two programs meet where one stores, or one adds and one loads."""

        def launched(executor: Any, *args: Any, **options: Any) -> None:
            self.of = {kind: [np.zeros((2, 0), np.uint64)] for kind in ("load", "store", "add")}
            start(executor, *args, **options)
            load, store, add = (np.unique(np.concatenate(each, axis=1), axis=1) for each in self.of.values())
            addresses, programs = np.unique(
                np.unique(np.concatenate([load, store, add], axis=1), axis=1)[0], return_counts=True
            )
            name = f"{executor.fn.__module__}.{executor.fn.__name__}"
            assert load.size, name
            assert store.size + add.size, name
            assert not np.isin(store[0], addresses[programs > 1]).any(), name
            assert not np.isin(add[0], load[0]).any(), name
            self.launches.add(name)

        return launched


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Met:
    for size, (value, *names) in SIZES.items():
        for name in names:
            monkeypatch.setattr(sys.modules[f"dpcore_triton.{name}"], size, value)
    found, builder, executor = Met(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    for kind, name, pointers, mask in (
        ("load", "create_masked_load", 0, 1),
        ("store", "create_masked_store", 0, 2),
        ("add", "create_atomic_rmw", 1, 3),
    ):
        monkeypatch.setattr(builder, name, found.noting(kind, getattr(builder, name), pointers, mask))
    monkeypatch.setattr(executor, "__call__", found.checking(executor.__call__))
    return found


@pytest.mark.parametrize(("name", "kernels"), chosen(KERNELS[:2], KERNELS))
def test_programs_of_a_launch_do_not_meet(met: Met, name: str, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "cores":
        monkeypatch.setattr(sys.modules["dpcore_triton.linear"], "chip_of", lambda _: chips.CHIPS["L4"])
    WORK[name]()
    assert len(met.launches) == kernels
