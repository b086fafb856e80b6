"""Work that is captured and replayed: what it may read, and what is refused.

In the interpreter recorded operations are made again; on a device a CUDA graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from dpcore.torch.sources.places import UnknownLayout
from dpcore_triton import launch, passes, recording
from dpcore_triton.passes import Passes
from dpcore_triton.recording import repeated

DEVICE = launch.default_device()


# What a work may not do, each of a function of (inputs, read).
def by_value(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * float(inputs[0].sum())


def by_list(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * inputs[0].tolist()[0]


def by_array(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * inputs[0].cpu().detach().numpy()[0].item()


def by_address(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * (inputs[0].data_ptr() > 0)


def by_constant(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * torch.tensor(2.0, device=DEVICE)


def by_shape(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0].nonzero()


def by_sparse(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0].reshape(1, -1).to_sparse().to_dense()


def by_storage(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0] * inputs[0].untyped_storage()[0]


def by_mask(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return inputs[0].index_put((inputs[0] > 0,), read[0])


def by_inverse(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(torch.diag(inputs[0]))


def by_own_operation(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    return torch.ops.dpcore_tests.plus_hidden(inputs[0])


@torch.library.custom_op("dpcore_tests::plus_hidden", mutates_args=())
def plus_hidden(x: torch.Tensor) -> torch.Tensor:
    return x + HIDDEN


HIDDEN = torch.ones(3, device=DEVICE)


def by_fault(inputs: list[torch.Tensor], read: torch.Tensor) -> torch.Tensor:
    raise UnknownLayout("it goes another way")


WORKS = [
    by_value, by_list, by_array, by_address, by_constant, by_shape, by_sparse, by_storage, by_mask, by_inverse,
    by_own_operation, by_fault,
]  # fmt: skip


@pytest.mark.parametrize("emulated", [False, True] if launch.INTERPRETED else [False])
@pytest.mark.parametrize("work", WORKS)
def test_what_a_graph_cannot_repeat_is_refused(
    work: Callable[..., torch.Tensor], emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if emulated:  # what is made on the way is not kept
        on_a_device(monkeypatch)
    read = torch.ones(3, device=DEVICE)
    one, inputs = Passes().of("key", [read.clone()], [read]), [read.clone()]
    one.capture(lambda own: work(own, read), inputs, [read])
    assert one.refused
    assert not one.captured


def test_memory_that_is_given_to_others_is_not_taken_for_the_pass_s_own() -> None:
    record, made = passes.Watched([]), torch.zeros(3)
    place = made.untyped_storage()._cdata
    record._know([made])
    del made
    assert all(torch.zeros(3).untyped_storage()._cdata != place for _ in range(100))


def test_attention_may_have_its_seed_on_the_host_and_nothing_else_may_be_there() -> None:
    """Outside of a capture torch's attention on a device keeps its seed on the CPU."""
    tensor, seed, attention = torch.empty(2, 2, 8, 8, device="meta"), torch.zeros((), dtype=torch.int64), torch.ops.aten
    record = passes.Watched([tensor, seed])
    with record:
        out, sums, _, offset = attention._scaled_dot_product_efficient_attention(tensor, tensor, tensor, None, True)
        attention._scaled_dot_product_efficient_attention_backward(
            out, tensor, tensor, tensor, None, out, sums, seed, offset, 0.0, [True, True, True, False]
        )
    assert record.refused is None
    with record:
        torch.add(tensor, seed)
    assert record.refused == "aten.add.Tensor: it copies between devices"


def test_an_index_by_numbers_is_no_shape_that_depends_on_values() -> None:
    inputs = [torch.arange(3.0, device=DEVICE), torch.tensor([2, 0], device=DEVICE)]
    one = Passes().of("key", inputs, [])
    one.capture(lambda own: own[0][own[1]], inputs, [])
    assert torch.equal(one.replay([inputs[0] * 2, inputs[1].flip(0)]), torch.tensor([0.0, 4.0], device=DEVICE))


def test_a_graph_reads_what_it_was_given_and_draws_anew() -> None:
    read = torch.arange(3.0, device=DEVICE)

    def work(own: list[torch.Tensor]) -> torch.Tensor:
        own[0] += 1  # written to its own memory only
        mask = torch.bernoulli(torch.full((3,), 0.5, device=DEVICE))
        return torch.stack([own[0] * read, mask, read.view(1, 3).expand(2, 3)[1]])

    one, results = Passes().of("key", [read], [read]), []
    given = torch.zeros(3, device=DEVICE)
    for number in range(20):
        torch.manual_seed(number)
        expected = work([given.clone()])
        torch.manual_seed(number)
        if not one.captured:
            one.capture(work, [given], [read])
            torch.manual_seed(number)
        found = one.replay([given])
        assert torch.equal(found, expected)
        results.append(found.data_ptr())
        given += 1
        read *= 1.5
    assert one.replays == 20
    assert len(set(results)) == 1
    assert torch.equal(given, torch.full((3,), 20.0, device=DEVICE))


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Let passes be captured as on a device, but for the graph, in whose place the operations are recorded."""
    captures: list[torch.device] = []
    kept: list[Any] = []

    def captured(work: Callable[[], Any], device: torch.device) -> Any:
        captures.append(device)
        with passes.Recording() as record:
            result = work()
        kept.append(record)
        return repeated(record.calls, device), result

    monkeypatch.setattr(passes, "launch", SimpleNamespace(INTERPRETED=False, current_stream=lambda _: 0, unseen=bool))
    monkeypatch.setattr(passes, "captured", captured)
    monkeypatch.setattr(passes, "beside", lambda work, device: work())
    return captures


def test_no_capture_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_failed", [True])
    with pytest.raises(RuntimeError, match="an earlier capture of this process failed"):
        recording.captured(lambda: None, DEVICE)


@pytest.mark.skipif(not launch.INTERPRETED, reason="on a device it is what the other tests run")
def test_on_a_device_the_work_itself_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there, but for the graph, in whose place the operations are recorded."""
    tensors, read = [torch.zeros(3)], torch.arange(3.0)
    captures = on_a_device(monkeypatch)
    one, work = Passes().of("key", tensors, [read]), lambda own: own[0] * read
    one.capture(work, tensors, [read])
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(one.replay([torch.full((3,), value)]), value * read)
    assert captures == [torch.device("cpu")]
    one = Passes().of("foreign", tensors, [])
    one.capture(work, tensors, [])
    assert "neither a parameter" in one.refused
    assert not one.captured

    def fails(work: Callable[[], Any], device: torch.device) -> Any:
        raise RuntimeError("no capture\nof this")

    monkeypatch.setattr(passes, "captured", fails)
    one = Passes().of("other", tensors, [read])
    one.capture(work, [torch.ones(3)], [read])
    assert one.refused == "no capture"
    assert not one.captured
