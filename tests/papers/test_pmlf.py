"""DP-PMLF and InnerOuter (algorithms.md 8) against loops; a window of one point is DOPPLER's loop."""

import pytest
from loops import SIZE, assert_same, heavy_ball, loop, low_pass, run, window

import dpcore
from dpcore import methods
from dpcore.stages.filters import NAMED_FILTERS
from dpcore.stages.queries import ParameterWindow


@pytest.mark.parametrize("name", ["pmlf-mnist", "pmlf-cifar", "p3", "p7", "none"])
@pytest.mark.parametrize(("k", "beta"), [(2, 0.1), (4, 0.6), (1, 0.5), (3, 0.0)])
def test_pmlf_is_its_loop(name: str, k: int, beta: float) -> None:
    b, a = NAMED_FILTERS[name]
    method = methods.pmlf(
        lr=0.3, window=k, beta=beta, filter=name, max_grad_norm=0.7, noise_multiplier=0.5, batch_size=SIZE
    )
    assert_same(run(method), loop(window(k, beta), low_pass(b, a)))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_inner_outer_is_its_loop(k: int) -> None:
    method = methods.inner_outer(
        lr=0.2, window=k, beta=0.4, outer_momentum=0.8, max_grad_norm=0.7, noise_multiplier=0.5, batch_size=SIZE
    )
    assert_same(run(method), loop(window(k, 0.4, normalized=False), move=heavy_ball(0.2, 0.8)))


def test_the_defaults_are_the_papers() -> None:
    method = methods.pmlf(lr=0.5)
    assert method.query == ParameterWindow(2, 0.1)
    assert method.filter == dpcore.stages.filters.named_filter("pmlf-mnist")
    assert method.clip.max_grad_norm == 1
    assert method.clip.rule == "standard"
