"""Arrays that share memory: found by their addresses, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from dpcore.errors import ArgumentError
from dpcore.spec import memory

torch = pytest.importorskip("torch")


def check(first: list[Any], second: list[Any]) -> None:
    memory.check_place(memory.listed("a", first), memory.listed("b", second))


def test_shared_memory_is_found_and_neighbors_are_not() -> None:
    whole = torch.zeros(40)
    parts = list(whole.split(10))
    check(parts[:2], [*parts[2:], parts[3]])
    check(parts[:2], [parts[0][:0]])
    for first, second, text in (
        (parts[:2], [whole[19:25]], r"a\[1\] shares memory with b\[0\]"),
        (parts[:2], [whole[:1]], r"a\[0\] shares memory with b\[0\]"),
        ([whole[:12], parts[1]], parts[3:], r"a\[1\] shares memory with a\[0\]"),
        ([parts[0], parts[0]], [], r"a\[1\] shares memory with a\[0\]"),
        ([whole[5:15]], [whole[:8]], r"a\[0\] shares memory with b\[0\]"),
        ([whole[:20:2]], [whole[18:19]], r"a\[0\] shares memory with b\[0\]"),
    ):
        with pytest.raises(ArgumentError, match=text):
            check(first, second)
