"""DP-PMLF and InnerOuter (algorithms.md 8) against loops, and DP-PMLF at k = 1 as DOPPLER."""

from __future__ import annotations

import numpy as np
import pytest
from loops import SIZE, assert_same, loop, low_pass, of, run

import dpcore
from dpcore import methods
from dpcore.stages.filters import NAMED_FILTERS
from dpcore.stages.queries import ParameterWindow


def window(k: int, beta: float, normalized: bool = True):
    def query(t, points, i):
        count = min(k, t + 1)
        c = sum(beta**j for j in range(count)) if normalized else 1.0
        return sum(beta**j / c * of(points[t - j], i) for j in range(count))

    return query


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
    m = 0.0

    def move(t, x, g, y, clean):
        nonlocal m
        m = 0.8 * m + y
        return x - 0.2 * m

    method = methods.inner_outer(
        lr=0.2, window=k, beta=0.4, outer_momentum=0.8, max_grad_norm=0.7, noise_multiplier=0.5, batch_size=SIZE
    )
    assert_same(run(method), loop(window(k, 0.4, normalized=False), move=move))


def test_the_defaults_are_the_papers() -> None:
    method = methods.pmlf(lr=0.5)
    assert method.query == ParameterWindow(2, 0.1)
    assert method.filter == dpcore.stages.filters.named_filter("pmlf-mnist")
    assert method.clip.max_grad_norm == 1
    assert method.clip.rule == "standard"


@pytest.mark.parametrize("clipping", ["standard", "normalized"])
def test_a_window_of_one_point_is_doppler(clipping: str) -> None:
    common = {"lr": 0.3, "filter": "pmlf-cifar", "clipping": clipping, "noise_multiplier": 0.5, "batch_size": SIZE}
    for beta in (0.1, 0.9):
        assert run(methods.pmlf(window=1, beta=beta, **common)).tobytes() == run(methods.doppler(**common)).tobytes()


def test_without_low_pass_and_window_it_is_dp_sgd() -> None:
    common = {"lr": 0.3, "noise_multiplier": 0.5, "batch_size": SIZE}
    np.testing.assert_allclose(
        run(methods.pmlf(window=1, filter="none", **common)), run(methods.dp_sgd(**common)), rtol=1e-14
    )
