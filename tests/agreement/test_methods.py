"""Whole runs of the four methods: NumPy and Triton draw the same batches and words, and end at the same place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpcore
from dpcore import methods, sampling
from dpcore.filters import NAMED_FILTERS
from dpcore.spec.ops import CLIP_RULES

pytest.importorskip("triton")

EXAMPLES, STEPS = 30, 3

bases = st.sampled_from(["sgd", "momentum", "adam", "adamw"])
common = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.01, 0.3]),
        "max_grad_norm": st.sampled_from([0.1, 1.0, 30.0]),
        "clipping": st.sampled_from(CLIP_RULES),
        "noise_multiplier": st.sampled_from([0.3, 2.0]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
    }
)
dp_sgd = st.builds(lambda base, rest: methods.dp_sgd(base=base, **rest), bases, common)
doppler = st.builds(
    lambda name, base, rest: methods.doppler(filter=name, base=base, **rest),
    st.sampled_from(sorted(NAMED_FILTERS)), bases, common,
)  # fmt: skip
disk = st.builds(
    lambda kappa, gamma, base, rest: methods.disk(kappa=kappa, gamma=gamma, base=base, **rest),
    st.sampled_from([0.3, 0.7, 1.0]), st.sampled_from([-1.0, 0.5, 1.0]), bases, common,
)  # fmt: skip
dp_adam = st.builds(lambda rest: methods.dp_adam(**rest), common)


def run(backend: str, method: dpcore.Method, dimension: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(EXAMPLES, dimension)).astype(np.float32)
    start = rng.normal(size=dimension).astype(np.float32)
    drawn: list[bytes] = []

    def gradient(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        drawn.append(indices.tobytes())
        return np.tanh(features[indices] @ x)[:, None] * features[indices]

    sampler = sampling.PoissonSampler(dataset_size=EXAMPLES, batch_size=6)
    with dpcore.use_backend(backend):
        key = seed.to_bytes(4, "little") * 8
        result = dpcore.minimize(gradient, start, sampler, method, steps=STEPS, key=key, exact_key=True, record=True)
    assert result.path is not None
    assert result.backend == backend
    run.drawn = drawn  # type: ignore[attr-defined]
    return result.path


@pytest.mark.parametrize("methods_of", [dp_sgd, doppler, disk, dp_adam], ids=["dp_sgd", "doppler", "disk", "dp_adam"])
def test_whole_runs_agree(methods_of: st.SearchStrategy[dpcore.Method]) -> None:
    @settings(max_examples=4, deadline=None)
    @given(methods_of, st.sampled_from([1, 5, 4097]), st.integers(0, 2**32 - 1))
    def check(method: dpcore.Method, dimension: int, seed: int) -> None:
        expected = run("numpy", method, dimension, seed)
        batches = run.drawn  # type: ignore[attr-defined]
        got = run("triton", method, dimension, seed)
        assert run.drawn == batches  # type: ignore[attr-defined]
        assert got.dtype == expected.dtype == np.float32
        # Every step rounds each coordinate a few dozen times; Adam's quotient keeps relative errors as they are.
        scale = np.abs(expected).max() + np.abs(np.diff(expected, axis=0)).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=256 * np.finfo(np.float32).eps * scale)

    check()
