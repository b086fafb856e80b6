"""What processes make of their sums: integers, added exactly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcore_torch as backend
from dpcore.methods import disk, dp_adam, dp_sgd, memf
from dpcore.spec.layout import Layout
from dpcore.stages.strategies import BandedToeplitz
from dpcore.torch import make_private, processes
from dpcore.torch.processes import Processes
from tests.end_to_end.test_processes import in_processes
from tests.unit import torch_runs
from tests.unit.torch_runs import finish

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

WORLD = 3
LAYOUT = Layout.of([("a", (7, 5)), ("b", (4,)), ("c", (1,))])


def summed(rank: int, folder: Path) -> None:
    processes._MESSAGE = 12  # several messages, the last one shorter
    peers = Processes(torch.distributed.group.WORLD)
    totals = peers.totals([torch.zeros(entry.size) for entry in LAYOUT.entries], backend)
    every = np.rint(np.random.default_rng(5).standard_normal((WORLD, LAYOUT.dimension)) * 2.0**45)
    ends = np.cumsum([35, 4])
    for total, part in zip(totals, np.split(every[rank], ends), strict=True):
        total[...] = torch.from_numpy(part)
    pieces = LAYOUT.pieces(rank, WORLD)
    parts = peers.reduced(totals, pieces)
    true = np.split(every.astype(np.int64).sum(0), ends)
    for part, (i, start, stop) in zip(parts, pieces, strict=True):
        assert part.tolist() == true[i][start:stop].tolist()


def test_sums_of_processes_are_exact(tmp_path: Path):
    in_processes(WORLD, summed, tmp_path)


class Elementwise(torch.nn.Module):
    """Whose gradients have the same bits in a batch of any size: no product runs over examples."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = torch.nn.Parameter(torch.randn(37, generator=generator))
        self.b = torch.nn.Parameter(torch.zeros(37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.w + self.b)


STEPS = {
    "dp_sgd": lambda: dp_sgd(lr=0.3, batch_size=8, noise_multiplier=1.0, max_grad_norm=2.0),
    "disk": lambda: disk(lr=0.3, batch_size=8, noise_multiplier=1.0),
    "adaptive clip": lambda: torch_runs.METHODS["adaptive clip"](8),
    "scaled": lambda: dp_adam(
        lr=0.3, batch_size=8, noise_multiplier=1.0, variant="delayed_preconditioner", unscaled_steps=1, scaled_steps=2
    ),
    "correlated": lambda: memf(lr=0.3, batch_size=8, noise_multiplier=1.0, strategy=BandedToeplitz((1.0, 0.5))),
}


def trained(name: str, microbatch_size: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(30, 37, generator=generator), torch.randn(30, 37, generator=generator)
    net = Elementwise()
    sampling = {"sampling": "fixed_order"} if name == "correlated" else {}
    private = make_private(
        net, data, STEPS[name](), loss=lambda output, y: ((output - y) ** 2).sum(-1), epochs=2,
        key=bytes(32), exact_key=True, microbatch_size=microbatch_size, **sampling,
    )  # fmt: skip
    finish(private)
    return [p.detach().clone() for p in net.parameters()]


def alike(rank: int, folder: Path) -> None:
    for name in STEPS:
        found = trained(name)
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parameters_are_the_same_bits_for_any_number_of_processes(world: int, tmp_path: Path):
    in_processes(world, alike, tmp_path)
    for name in STEPS:
        for ours, theirs in zip(torch.load(tmp_path / f"{name}.pt"), trained(name), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("name", STEPS)
def test_parameters_are_the_same_bits_for_any_micro_batch(name: str):
    whole = trained(name)
    for size in (1, 3, 5):
        for ours, theirs in zip(trained(name, size), whole, strict=True):
            assert torch.equal(ours, theirs), size


def test_the_table_of_the_page_is_what_the_script_prints(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "asv_benchmarks"))
    import processes_on_paper

    assert processes_on_paper.table() in (root / "docs/processes.md").read_text()
    # What test_what_a_step_sends counts of a real step: 8 bytes of sums and 4 of parameters of all others' coordinates.
    assert processes_on_paper.row(3e9, 3)[0] == pytest.approx(12 * 2)
