"""Work that is captured and replayed.

In the interpreter recorded operations are made again; on a device a CUDA graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from dpcore_triton import launch, passes, recording
from dpcore_triton.passes import Passes
from dpcore_triton.recording import Recording, repeated

DEVICE = launch.default_device()


def test_a_graph_reads_what_it_was_given_and_draws_anew() -> None:
    read = torch.arange(3.0, device=DEVICE)

    def work(own: list[torch.Tensor]) -> torch.Tensor:
        own[0] += 1  # written to its own memory only
        mask = torch.bernoulli(torch.full((3,), 0.5, device=DEVICE))
        return torch.stack([own[0] * read[own[1]], mask, read.view(1, 3).expand(2, 3)[1]])

    given, order = torch.zeros(3, device=DEVICE), torch.tensor([2, 0, 1], device=DEVICE)
    one, places = Passes().of("key", [given, order], [read]), set()
    for number in range(20):
        torch.manual_seed(number)
        expected = work([given.clone(), order])
        if not one.captured:
            one.capture(work, [given, order])
        torch.manual_seed(number)
        found = one.replay([given, order])
        assert torch.equal(found, expected)
        places.add(found.data_ptr())
        given += 1
        order = order.flip(0)
        read *= 1.5
    assert one.replays == 20
    assert len(places) == 1
    assert torch.equal(given, torch.full((3,), 20.0, device=DEVICE))


def test_what_the_work_raises_goes_up() -> None:
    """Its words may show values of the data: others make a sentence of it."""
    given = [torch.ones(3, device=DEVICE)]
    one = Passes().of("key", given, [])

    def work(own: list[torch.Tensor]) -> torch.Tensor:
        raise IndexError("label 7")

    with pytest.raises(IndexError, match="label 7"):
        one.capture(work, given)
    assert one.refused is None
    assert not one.captured


def test_no_capture_follows_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_failed", [True])
    with pytest.raises(RuntimeError, match="an earlier capture of this process failed"):
        recording.captured(lambda: None, DEVICE)


@pytest.mark.skipif(not launch.INTERPRETED, reason="on a device it is what the other tests run")
def test_on_a_device_the_work_itself_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there, but for the graph, in whose place the operations are recorded."""
    ran: list[str] = []
    records: list[Any] = []

    def captured(work: Callable[[], Any], device: torch.device) -> Any:
        ran.append(f"captured on {device}")
        with Recording({}) as record:
            result = work()
        records.append(record)
        return repeated(record.calls, device), result

    def beside(work: Callable[[], Any], device: torch.device) -> None:
        ran.append("beside")
        work()

    monkeypatch.setattr(passes, "launch", SimpleNamespace(INTERPRETED=False, current_stream=lambda _: 0))
    monkeypatch.setattr(passes, "captured", captured)
    monkeypatch.setattr(passes, "beside", beside)
    read, kept = torch.arange(3.0), Passes()
    one = kept.of("key", [torch.zeros(3)], [read])
    one.capture(lambda own: own[0] * read, [torch.zeros(3)])
    for value in (1.0, 2.0, 3.0):
        assert torch.equal(one.replay([torch.full((3,), value)]), value * read)
    assert ran == ["beside", "captured on cpu"]

    def fails(work: Callable[[], Any], device: torch.device) -> Any:
        raise RuntimeError("no capture\nof this")

    monkeypatch.setattr(passes, "captured", fails)
    one = kept.of("other", [torch.zeros(3)], [read])
    one.capture(lambda own: own[0] * read, [torch.ones(3)])
    assert one.refused == "no capture"
    assert not one.captured
