"""The quick looks at whole lists of arrays: they refuse what the long checks refuse, with the same sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.errors import DpcoreError
from dpcore.spec import check_rows, memory
from dpcore.stages.clipping.blocks import Rows, as_blocks, as_rows

torch = pytest.importorskip("torch")

QUICK = [(memory, "_are_apart"), (memory, "_are_together"), (check_rows, "_are_rows"), (check_rows, "_are_sums")]


def said(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except DpcoreError as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return "taken"


def slowly(check: Callable[..., None], *arguments: Any) -> str:
    patches = [mock.patch.object(module, name, return_value=False) for module, name in QUICK]
    for patch in patches:
        patch.start()
    try:
        return said(check, *arguments)
    finally:
        for patch in patches:
            patch.stop()


def both(check: Callable[..., None], *arguments: Any) -> str:
    found = said(check, *arguments)
    assert found == slowly(check, *arguments)
    return found


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.sampled_from([1, 1, 1, 2])), max_size=6)


@given(spans, spans)
def test_shared_memory_is_found_as_by_the_long_way(changed: list[Any], read: list[Any]) -> None:
    whole = torch.zeros(50, dtype=torch.float64)

    def named(name: str, places: list[Any]) -> list[Any]:
        arrays = [whole[start : start + step * size : step] for start, size, step in places]
        return memory.listed(name, [a.view(torch.int64) if i % 3 == 2 else a for i, a in enumerate(arrays)])

    both(memory.check_place, named("changed", changed), named("read", read))


def test_shared_memory_is_found_and_neighbors_are_not() -> None:
    whole = torch.zeros(40)
    parts = list(whole.split(10))
    assert (
        both(memory.check_place, memory.listed("a", parts[:2]), memory.listed("b", [*parts[2:], parts[3]])) == "taken"
    )
    for first, second, text in (
        (parts[:2], [whole[19:25]], "a[1] shares memory with b[0]"),
        (parts[:2], [whole[:1]], "a[0] shares memory with b[0]"),
        ([whole[:12], parts[1]], parts[3:], "a[1] shares memory with a[0]"),
        ([parts[0], parts[0]], [], "a[1] shares memory with a[0]"),
        ([whole[5:15]], [whole[:8]], "a[0] shares memory with b[0]"),
    ):
        assert text in both(memory.check_place, memory.listed("a", first), memory.listed("b", second))


def as_given(library: str, array: np.ndarray) -> Any:
    return torch.from_numpy(array) if library == "torch" else array


# What is done to one argument of a sound weighted sum of three blocks; "b" stands for one array of the list.
DEFECTS: dict[str, Callable[[Any], Any]] = {
    "none": lambda b: b,
    "another length": lambda b: b[:-1],
    "a dimension more": lambda b: b[None],
    "no dimension": lambda b: b.reshape(-1)[0],
    "float64": lambda b: b.astype(np.float64) if isinstance(b, np.ndarray) else b.double(),
    "float32": lambda b: b.astype(np.float32) if isinstance(b, np.ndarray) else b.float(),
    "int32": lambda b: b.astype(np.int32) if isinstance(b, np.ndarray) else b.int(),
    "gaps": lambda b: (np.repeat(b, 2) if isinstance(b, np.ndarray) else b.repeat_interleave(2))[::2],
    "elsewhere": lambda b: b if isinstance(b, np.ndarray) else b.to("meta"),
    "another library": lambda b: torch.from_numpy(b) if isinstance(b, np.ndarray) else b.numpy(),
    "a list": lambda b: b.tolist(),
    "nothing": lambda b: None,
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("defect", list(DEFECTS))
@pytest.mark.parametrize("place", [0, 2])
def test_defects_of_sums_are_found_as_by_the_long_way(library: str, defect: str, place: int) -> None:
    taken = 0
    for name in ("rows", "weights", "out"):
        weights = as_given(library, np.ones(4))
        arguments: dict[str, list[Any]] = {
            "rows": [as_given(library, np.ones((4, size), np.float32)) for size in (3, 5, 2)],
            "weights": [weights] * 3,
            "out": [as_given(library, np.zeros(size)) for size in (3, 5, 2)],
        }
        arguments[name][place] = DEFECTS[defect](arguments[name][place])
        try:
            taken += both(check_rows.check_weighted_sum, *arguments.values()) == "taken"
            both(check_rows.check_rows, arguments["rows"], None)
        except (AttributeError, TypeError):  # of what is no array both ways know no sentence, everywhere
            assert defect in ("a list", "nothing")
    assert taken == 3 or defect != "none"
    assert taken < 3 or defect in ("none", "elsewhere", "float64", "gaps")


def test_rows_are_taken_quickly_or_left_to_the_long_way() -> None:
    values = [np.ones((4, size), np.float32) for size in (3, 5)]
    assert as_rows(values, [3, 5]) == as_blocks(values, [3, 5]) == [Rows(value) for value in values]
    for other in ([*values[:1], Rows(values[1])], values[::-1], [values[0], values[1][:2]], [values[0][0], values[1]],
                  [None, values[1]], [values[0].tolist(), values[1]], []):  # fmt: skip
        assert as_rows(other, [3, 5]) is None
