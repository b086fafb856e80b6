"""The array interface: arguments, privacy of the result, and what it refuses."""

import pickle
from pathlib import Path

import numpy as np
import pytest

import dpcore
from dpcore import methods, sampling
from dpcore.accounting import Gaussian, NonPrivate
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.spec.keys import RunKeys
from dpcore.spec.ops import NoiseRow

METHOD = methods.dp_sgd(lr=0.1, noise_multiplier=1.0)
PUBLIC = methods.dp_adam(lr=0.1, noise_multiplier=1.0, variant="side_information")
SAMPLER = sampling.PoissonSampler(dataset_size=20, batch_size=5)


def gradient(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return x[None] - indices[:, None].astype(x.dtype) / 20


def test_results_are_of_the_asked_kind() -> None:
    x0 = np.zeros(3, np.float32)
    result = dpcore.minimize(gradient, x0, SAMPLER, METHOD, steps=4, record=True)
    assert result.x.dtype == np.float32
    assert result.path.shape == (5, 3)
    assert (result.path[0] == x0).all()
    assert (result.path[-1] == result.x).all()
    assert (x0 == 0).all()
    assert result.statement(1e-5).epsilon["pld"] == result.plan.epsilon(1e-5)


def test_two_runs_never_share_noise_unless_asked_to() -> None:
    def run(**arguments):
        return dpcore.minimize(gradient, np.zeros(3), SAMPLER, METHOD, steps=3, **arguments).x.tobytes()

    key = bytes(32)
    assert run() != run()
    assert run(key=key) != run(key=key)
    assert run(key=key, exact_key=True) == run(key=key, exact_key=True)


def test_neither_result_nor_noise_row_gives_keys_away() -> None:
    key = bytes(range(32))
    result = dpcore.minimize(gradient, np.zeros(3), SAMPLER, METHOD, steps=3, key=key, exact_key=True)
    written = pickle.dumps(result) + repr(result).encode()
    for secret in (key, RunKeys.new(key, exact_key=True).sampling):
        assert secret not in written
        assert repr(secret) not in repr(NoiseRow(secret, 0, 0, 1.0))
    assert any("no other run used that key" in caveat for caveat in result.statement(1e-5).caveats)


def test_a_wrong_gradient_is_refused_without_the_size_of_the_secret_batch() -> None:
    with pytest.raises(ArgumentError) as caught:
        dpcore.minimize(lambda x, i: np.zeros((len(i) + 1, 3)), np.zeros(3), SAMPLER, METHOD, steps=3)
    assert not any(character.isdigit() for character in str(caught.value).replace("3", ""))


def test_empty_batches_are_steps_of_noise_alone() -> None:
    result = dpcore.minimize(gradient, np.zeros(3), [[0], [], [1]], METHOD, record=True)
    assert np.isfinite(result.path).all()
    assert (result.path[2] != result.path[1]).all()


def test_a_list_of_batches_is_public_and_fixed() -> None:
    result = dpcore.minimize(gradient, np.zeros(3), [[0, 1], [1, 2], [1]], METHOD)
    assert result.event == Gaussian(1.0, 3, "zero-out")


def test_the_callers_noise_is_used_and_voids_the_guarantee() -> None:
    noise = np.random.default_rng(0).normal(size=(2, 3))
    batches = [[0], [1]]
    method = methods.dp_sgd(lr=0.5, max_grad_norm=2.0, noise_multiplier=3.0, batch_size=4)
    quiet = methods.dp_sgd(lr=0.5, max_grad_norm=2.0, noise_multiplier=0.0, batch_size=4)

    def constant(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.ones((len(indices), 3))

    result = dpcore.minimize(constant, np.zeros(3), batches, method, noise=noise)
    without = dpcore.minimize(constant, np.zeros(3), batches, quiet)
    np.testing.assert_allclose(
        result.x - without.x, -0.5 * 3.0 * 2.0 / 4 * noise.sum(axis=0), atol=1e-9
    )  # a grid of 2^-36
    assert isinstance(result.event, NonPrivate)
    assert not result.statement(1e-5).private


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"x0": np.zeros((3, 1))}, ArgumentError, "x0.shape=(3, 1)"),
    ({"x0": np.zeros(3, np.int64)}, ArgumentTypeError, "x0.dtype=int64"),
    ({"x0": np.zeros(3, np.float16)}, ArgumentTypeError, "x0.dtype=float16"),
    ({"x0": np.array([0, np.nan, 0])}, ArgumentError, "x0: must be finite"),
    ({"steps": None}, ArgumentError, "steps=None"), ({"steps": 0}, ArgumentError, "steps=0"),
    ({"noise": np.zeros((2, 3))}, ArgumentError, "noise.shape=(2, 3)"),
    ({"noise": np.array([["a"] * 3] * 4)}, ArgumentTypeError, "noise: must be numbers, not <U1"),
    ({"key": b"short"}, ArgumentError, "5 bytes"),
    ({"method": methods.dp_sgd(lr=0.1)}, PrivacyError, "noise_multiplier=None"),
    ({"per_example_gradient": lambda x, i: x}, ArgumentError, "per_example_gradient: must return one row of 3"),
    ({"per_example_gradient": lambda x, i: np.zeros((len(i), 3), np.float32)}, ArgumentTypeError, "float32"),
    ({"batches": [[0, 0]], "steps": None}, ArgumentError, "twice"),
    ({"batches": "poisson"}, ArgumentTypeError, "batches='poisson': must be a sampler from dpcore.sampling"),
    ({"per_example_gradient": None}, ArgumentTypeError, "per_example_gradient=None: must be a function"),
    ({"method": PUBLIC, "public_gradient": 3}, ArgumentTypeError, "public_gradient=3: must be a function"),
    ({"method": PUBLIC, "public_gradient": lambda x: x * np.nan}, ArgumentError, "public_gradient: returned"),
])  # fmt: skip
def test_bad_calls(change: dict, error: type, words: str) -> None:
    arguments = {"per_example_gradient": gradient, "x0": np.zeros(3), "batches": SAMPLER, "method": METHOD, "steps": 4}
    with pytest.raises(error) as caught:
        dpcore.minimize(**(arguments | change))
    assert words in str(caught.value)


def test_non_finite_gradients_are_ordinary_steps() -> None:
    def broken(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.full((len(indices), 3), np.nan)

    result = dpcore.minimize(broken, np.zeros(3), [[0, 1]], METHOD, key=bytes(32), exact_key=True)
    empty = dpcore.minimize(gradient, np.zeros(3), [[], [0, 1]], METHOD, key=bytes(32), exact_key=True, record=True)
    assert result.x.tobytes() == empty.path[1].tobytes()


def test_a_gradient_that_fails_gives_back_what_no_step_took(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l.db", budget=(1e3, 1e-5))
    calls = []

    def failing(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        calls.append(x)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return gradient(x, indices)

    with pytest.raises(KeyboardInterrupt):
        # Of a random key's batches one in 300 is empty, and asks for no gradient.
        dpcore.minimize(failing, np.zeros(2), SAMPLER, METHOD, steps=400, ledger=ledger, key=bytes(32), exact_key=True)
    (run,) = ledger.runs()
    assert run.releases == 3


@pytest.mark.parametrize("groups", ["per_layer", "per_tensor"])
def test_one_vector_has_no_layers(groups: str) -> None:
    method = methods.dp_sgd(lr=0.1, noise_multiplier=1.0, clipping_groups=groups)
    with pytest.raises(ArgumentError, match=f"clipping_groups='{groups}': must be 'flat'"):
        dpcore.minimize(lambda x, i: np.ones((len(i), 2)), np.zeros(2), [[0]], method)
    named = methods.dp_sgd(lr=1.0, noise_multiplier=0.0, clipping_groups={"*": 0.5})
    found = dpcore.minimize(lambda x, i: np.ones((len(i), 1)), np.zeros(1), [[0]], named)
    assert found.x[0] == pytest.approx(-0.5)


def test_float64_under_triton_is_refused_by_its_name() -> None:
    pytest.importorskip("triton")
    with dpcore.use_backend("triton"), pytest.raises(ArgumentTypeError, match=r"x0\.dtype=float64: must be float32"):
        dpcore.minimize(
            lambda x, i: np.ones((len(i), 1)), np.zeros(1), [[0]], methods.dp_sgd(lr=1.0, noise_multiplier=1.0)
        )
