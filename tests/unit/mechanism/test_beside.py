"""New arrays go where the run's are: whatever a run asks of its backend, it asks beside its own arrays.

With several GPUs the current one need not be the model's. The stand-in has two places: arrays made outside of `beside`
are in the wrong one.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dpcore_numpy
from dpcore import methods
from dpcore.stages.updates.galore import GaLore
from tests.unit.mechanism.test_mechanism import BANDS, STATEFUL, advance, build

MAKERS = ("from_numpy", "normal", "words")
CASES = STATEFUL | {
    "tree": methods.memf(lr=0.1, strategy="tree", noise_multiplier=1.0),
    "two streams, in blocks": methods.dp_adam(
        lr=0.1, variant="independent_moments", strategy="tree", noise_multiplier=1.0
    ),
    "galore, banded": methods.doppler(
        lr=0.1, base="adam", galore=GaLore(2, 3), strategy=BANDS, noise_multiplier=1.0
    ),
}  # fmt: skip


class TwoPlaces:
    """dpcore_numpy with a place that is entered, and what was made outside of it."""

    def __init__(self) -> None:
        self.inside, self.entered = 0, 0
        self.made: list[str] = []
        self.backend = SimpleNamespace(**{name: getattr(dpcore_numpy, name) for name in dpcore_numpy.__all__})
        for name in MAKERS:
            setattr(self.backend, name, self._watched(name))
        self.backend.beside = self._beside

    @contextmanager
    def _beside(self, array: Any) -> Iterator[None]:
        assert isinstance(array, np.ndarray)
        self.inside, self.entered = self.inside + 1, self.entered + 1
        try:
            yield
        finally:
            self.inside -= 1

    def _watched(self, name: str) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            assert self.inside, f"{name} was called outside of the run's place"
            self.made.append(name)
            return getattr(dpcore_numpy, name)(*args, **kwargs)

        return made


def test_all_methods_are_looked_at() -> None:
    assert {method.name for method in CASES.values()} >= set(methods.METHODS)


@pytest.mark.parametrize("name", CASES)
def test_a_run_makes_its_arrays_beside_its_own(name: str) -> None:
    places = TwoPlaces()
    mechanism, x = build(CASES[name], backend=places.backend)
    advance(mechanism, x, 4)
    saved = mechanism.state_dict()
    mechanism.negative_share()
    mechanism.output(x)
    mechanism.ahead(5)
    mechanism.draw()
    resumed, y = build(CASES[name], backend=places.backend)
    if mechanism.vectors.secret(mechanism.layout, list):  # made anew from the stream, before the next step
        saved["secret"]["arrays"] = {}
    resumed.load_state_dict(saved)
    resumed.discard()
    advance(resumed, y, 2)
    resumed.join()
    resumed.state_dict(own=True)
    assert places.inside == 0
    assert places.entered >= 12
    assert {"from_numpy", "normal"} <= set(places.made) or name not in DRAWING


# Some whose noise is drawn without the fused operation, or whose state is made anew from the stream.
DRAWING = {
    "doppler, galore", "memf, banded", "bias", "independent", "everything", "srg_memf", "tree",
    "two streams, in blocks", "galore, banded",
}  # fmt: skip


def test_tritons_arrays_go_to_the_device_of_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dpcore.spec.backends import load_backend

    triton, entered = load_backend("triton"), []
    arrays = importlib.import_module("dpcore_triton.arrays")

    class Device:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *exception: object) -> None:
            entered.append(None)

    monkeypatch.setattr(arrays, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    elsewhere = SimpleNamespace(device=torch.device("cuda", 1))
    with triton.beside(elsewhere):
        assert entered == [torch.device("cuda", 1)]
    assert entered[1:] == [None]
