"""What no operation can carry out is refused with a sentence, by every backend, and nothing is half written."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from one_layer import linear_norms, linear_sum

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.ops import FilterCoefficients, NoiseRow, RingCoefficients, Slot, UpdateSettings
from dpcore.spec.stream import MAX_ELEMENTS
from tests.refused import refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

KEY = bytes(range(32))
SIZE = 12
SETTINGS = UpdateSettings(0.1, 0.0, 0.9, 0.99, 1e-8)
FILTER = FilterCoefficients((0.5, 0.5), (-0.25,))
RING = RingCoefficients((0.5, 0.25), 1)
NOISE_FILTER = FilterCoefficients((1.0, 0.5, 0.25), (-0.25,))


@pytest.fixture(params=["numpy", "torch", "triton"])
def backend(request: pytest.FixtureRequest) -> Any:
    return load_backend(request.param)


class Call:
    """An operation with sound arguments by name, any of which may be replaced, and those that it changes in place."""

    def __init__(self, backend: Any, run: Callable[..., Any], arrays: dict[str, Any], changed: tuple[str, ...]) -> None:
        self.backend, self.run, self.arrays, self.changed = backend, run, arrays, changed

    def __call__(self, **other: Any) -> Any:
        return self.run({**self.arrays, **other})

    def kept(self) -> dict[str, Any]:
        return {name: self.backend.to_numpy(array) for name, array in self.arrays.items()}


def step_call(backend: Any, f: Callable[[str], Any], correlation: Any) -> Call:
    arrays = {name: f("float32") for name in ("parameter", "filter_state", "moments_0", "moments_1", "displacement",
                                              "scale", "square")}  # fmt: skip
    arrays |= {name: f("float64") for name in ("noise_state_0", "noise_state_1", "total")}
    second = Slot(f("float32"), f("float64"), 4096, (f("float32"),), (f("float32"), f("float32")), None,
                  (f("float64"), f("float64")), None, f("float32"))  # fmt: skip

    def run(a: dict[str, Any]) -> None:
        slot = Slot(
            a["parameter"], a["total"], 0, (a["filter_state"],), (a["moments_0"], a["moments_1"]), a["displacement"],
            (a["noise_state_0"], a["noise_state_1"]), a["scale"], a["square"],
        )  # fmt: skip
        noise = NoiseRow(KEY, 1, 0, 1.0)
        options = {"unit": 2.0**-36, "correlation": correlation, "square": "given"}
        backend.step([slot, second], noise, 2.0, [FILTER], "adam", [SETTINGS] * 2, 1, **options)

    return Call(backend, run, arrays, tuple(name for name in arrays if name not in ("total", "scale", "square")))


def calls(backend: Any, size: int = SIZE) -> Iterator[tuple[str, Call]]:
    def f(dtype: str) -> Any:
        return backend.from_numpy(np.ones(size, dtype=dtype))

    def norm(dtype: str) -> Any:
        return backend.from_numpy(np.ones((3, size), dtype=dtype))

    yield "step", step_call(backend, f, RING)
    yield (
        "recurrence",
        Call(backend, lambda a: backend.recurrence(a["x"], [a["s0"], a["s1"]], FILTER),
             {"x": f("float32"), "s0": f("float32"), "s1": f("float32")}, ("s0", "s1")),
    )  # fmt: skip
    yield (
        "ring",
        Call(backend, lambda a: backend.correlate(a["z"], [a["v0"], a["v1"]], RING),
             {name: f("float64") for name in ("z", "v0", "v1")}, ("v0", "v1")),
    )  # fmt: skip
    yield (
        "correlate",
        Call(backend, lambda a: backend.correlate(a["z"], [a["s0"], a["s1"]], NOISE_FILTER),
             {name: f("float64") for name in ("z", "s0", "s1")}, ("s0", "s1")),
    )  # fmt: skip
    yield (
        "update",
        Call(backend, lambda a: backend.update("adam", a["x"], a["g"], [a["m"], a["v"]], SETTINGS, 1, a["h"]),
             {name: f("float32") for name in ("x", "g", "m", "v", "h")}, ("x", "m", "v")),
    )  # fmt: skip
    weights = backend.from_numpy(np.ones(3))
    yield (
        "weighted_sum",
        Call(backend, lambda a: backend.weighted_sum([a["rows"]] * 2, [a["weights"]] * 2, [a["o0"], a["o1"]]),
             {"rows": norm("float32"), "weights": weights, "o0": f("float64"), "o1": f("float64")}, ("o0", "o1")),
    )  # fmt: skip


OPERATIONS = ("step", "recurrence", "ring", "correlate", "update", "weighted_sum")


def call_of(name: str, backend: Any, size: int = SIZE) -> Call:
    return dict(calls(backend, size))[name]


def unchanged(call: Call, before: dict[str, Any]) -> None:
    for name, array in call.kept().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_changed_in_place_shares_no_memory(backend: Any, name: str) -> None:
    call = call_of(name, backend)
    before = call.kept()
    tried = 0
    for target in call.changed:
        for other, array in call.arrays.items():
            # One of the same dtype is put in the other's place; of totals only a part can be shared.
            if other == target or array.dtype != call.arrays[target].dtype or array.shape != call.arrays[target].shape:
                continue
            refused(ArgumentError, "shares memory with .*: it is changed in place and must have memory of its own",
                    call, **{target: array})  # fmt: skip
            tried += 1
    assert tried >= 2
    unchanged(call, before)
    call()
    assert any((call.kept()[name] != before[name]).any() for name in call.changed)


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_element_in_common_is_too_many(backend: Any, name: str) -> None:
    call = call_of(name, backend)
    first, second = call.changed[:2]
    dtype = "float64" if name in ("weighted_sum", "ring", "correlate") else "float32"
    memory = backend.from_numpy(np.ones(2 * SIZE, dtype=dtype))
    refused(ArgumentError, "shares memory", call, **{first: memory[:SIZE], second: memory[SIZE - 1 : -1]})
    np.testing.assert_array_equal(backend.to_numpy(memory), np.ones(2 * SIZE))
    call(**{first: memory[:SIZE], second: memory[SIZE:]})  # side by side


def test_arrays_that_are_only_read_may_be_one(backend: Any) -> None:
    call = call_of("step", backend)
    call(scale=call.arrays["square"])
    call_of("update", backend)
    update = call_of("update", backend)
    update(g=update.arrays["h"])


def test_another_slots_memory_and_another_dtypes_are_found(backend: Any) -> None:
    if backend.name == "triton":
        pytest.skip("takes no float64 but totals")
    memory = backend.from_numpy(np.ones(2 * SIZE, dtype=np.float32))
    total = memory.view(np.float64 if backend.arrays == "numpy" else torch.float64)
    good = Slot(backend.from_numpy(np.ones(SIZE, np.float32)), backend.from_numpy(np.ones(SIZE)), 4096)
    bad = Slot(memory[:SIZE], total, 0)
    arguments = (NoiseRow(KEY, 1, 0, 1.0), 1.0, [], "sgd", [SETTINGS] * 2, 1)
    refused(ArgumentError, r"slots\[1\].parameter shares memory with slots\[1\].total", backend.step, [good, bad],
            *arguments, unit=2.0**-36)  # fmt: skip
    refused(ArgumentError, r"slots\[.\].parameter shares memory with slots\[.\].parameter", backend.step,
            [good, good._replace(first=0)], *arguments, unit=2.0**-36)  # fmt: skip
    np.testing.assert_array_equal(backend.to_numpy(good.parameter), np.ones(SIZE))


@pytest.mark.parametrize("name", OPERATIONS)
def test_arrays_elsewhere_change_nothing(backend: Any, name: str) -> None:
    if backend.arrays == "numpy":
        pytest.skip("NumPy's arrays are all on the CPU")
    call = call_of(name, backend)
    before = call.kept()
    for other, array in call.arrays.items():
        refused(ArgumentError, "device=", call, **{other: array.to("meta")})
        refused((ArgumentError, ArgumentTypeError), "must be", call, **{other: backend.to_numpy(array)})
    refused(ArgumentError, "device=meta", call, **{other: array.to("meta") for other, array in call.arrays.items()})
    unchanged(call, before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_arrays_of_another_dtype_change_nothing(backend: Any, name: str) -> None:
    call = call_of(name, backend)
    before = call.kept()
    for other, array in call.arrays.items():
        host = backend.to_numpy(array)
        third = "float64" if host.dtype == np.float32 else "float32"
        # Rows may be of either or of 16 bits, whatever the weights are, but under Triton not of float64.
        free = () if other != "rows" else ("float16",) if backend.name == "triton" else ("float16", third)
        for dtype in {"float16", "int32", third}.difference(free):
            refused(
                ArgumentTypeError, "dtype=|must be float32", call, **{other: backend.from_numpy(host.astype(dtype))}
            )
    unchanged(call, before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_cannot_be_written_changes_nothing(backend: Any, name: str) -> None:
    call = call_of(name, backend)
    before = call.kept()
    for other in call.changed:
        array = call.arrays[other]
        if backend.arrays == "numpy":
            locked = array.copy()
            locked.flags.writeable = False
            refused(ArgumentTypeError, "read-only", call, **{other: locked})
        else:
            expanded = array[:1].expand(SIZE)
            refused((ArgumentError, ArgumentTypeError), "expanded|not contiguous", call, **{other: expanded})
    unchanged(call, before)


@pytest.mark.parametrize("name", OPERATIONS)
def test_arrays_of_no_elements_are_taken(backend: Any, name: str) -> None:
    call = call_of(name, backend, 0)
    call()
    for array in call.kept().values():
        assert array.size in (0, 3)


def test_operations_without_places_take_arrays_of_no_elements(backend: Any) -> None:
    for examples, size in ((0, 5), (3, 0), (0, 0)):
        rows = backend.from_numpy(np.ones((examples, size), dtype=np.float32))
        norms = backend.row_norms([rows])
        assert backend.to_numpy(norms).tolist() == [0.0] * examples
        (weights,) = backend.clip_factors([norms], "standard", [1.0], [size], [rounding_of_rows(size)], 2.0**-20)
        assert backend.to_numpy(weights).tolist() == [2.0**20] * examples
        out = backend.from_numpy(np.ones(size))
        backend.weighted_sum([rows], [weights], [out])
        np.testing.assert_array_equal(backend.to_numpy(out), np.ones(size))
        left, right = (backend.from_numpy(np.ones((examples, 2, size), dtype=np.float32)) for _ in range(2))
        linear_norms(backend, [left], [right], [1.0])
        out = backend.from_numpy(np.ones(size * size))
        linear_sum(backend, [left], [right], [1.0], weights, out)
        np.testing.assert_array_equal(backend.to_numpy(out), np.ones(size * size))
    for draw in (backend.words, backend.normal):
        assert backend.to_numpy(draw(KEY, 0, 0, 4095, 0)).size == 0
    backend.step([], NoiseRow(KEY, 0, 0, 1.0), 1.0, [], "sgd", [], 1, unit=2.0**-36)


@pytest.mark.parametrize("rng", ["chacha20", "philox"])
def test_elements_beyond_the_streams_end_are_refused(backend: Any, rng: str) -> None:
    last = MAX_ELEMENTS[rng]
    text = rf"must be at most {last}, the last element of rng='{rng}'"
    for draw in (backend.words, backend.normal):
        refused(ArgumentError, text, draw, KEY, 0, 0, last - 4, 5, rng=rng)
        refused(ArgumentError, text, draw, KEY, 0, 0, 0, last + 1, rng=rng)
        assert backend.to_numpy(draw(KEY, 0, 0, last - 4, 4, rng=rng)).size == 4
    good, bad = (
        Slot(backend.from_numpy(np.ones(5, np.float32)), backend.from_numpy(np.ones(5)), first)
        for first in (last - 5, last - 4)
    )
    for noise in (NoiseRow(KEY, 0, 0, 1.0, rng), NoiseRow(KEY, 0, 0, 0.0, rng)):
        refused(ArgumentError, text, backend.step, [good, bad], noise, 1.0, [], "sgd", [SETTINGS] * 2, 1, unit=2.0**-36)
    np.testing.assert_array_equal(backend.to_numpy(good.parameter), np.ones(5))
    backend.step([good], NoiseRow(KEY, 0, 0, 1.0, rng), 1.0, [], "sgd", [SETTINGS], 1, unit=2.0**-36)
    assert not (backend.to_numpy(good.parameter) == 1).any()
