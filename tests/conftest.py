"""What every test shares: Triton's mode, chosen once before anything imports it, hypothesis profiles, and entropy."""

import hashlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import device, interpreter

WANTS_GPU = os.environ.get("DPCORE_TEST_GPU") == "1"
HAS_GPU = device.has_gpu(WANTS_GPU)

# triton.jit reads the variable when it decorates: one process runs either the interpreter or the device, never both.
# A value that is already there wins, so that the interpreter can be tried on a machine with a GPU.
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# On shared cores and in the interpreter a test is slow without being wrong: no deadlines anywhere.
_COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.register_profile("dev", _COMMON, max_examples=12, print_blob=False)
settings.register_profile("ci", _COMMON, max_examples=8, derandomize=True)
settings.register_profile("nightly", _COMMON, max_examples=300)
# For tests/run_mutations.py, which wants to know that a test fails and not the smallest reason.
_QUICK = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}
settings.register_profile("mutation", settings.get_profile("ci"), max_examples=12, **_QUICK)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to skip or to interpret what was asked for: a GPU run without a GPU is no green page."""
    if WANTS_GPU and not HAS_GPU:
        raise pytest.UsageError("DPCORE_TEST_GPU=1: torch finds no CUDA device; unset it to run Triton's interpreter")
    if WANTS_GPU and INTERPRETED:
        raise pytest.UsageError("DPCORE_TEST_GPU=1: TRITON_INTERPRET=1 compiles no kernel; unset one of them")
    if WANTS_GPU:
        config.stash[_stderr] = device.kept_stderr()


def pytest_report_header(config: pytest.Config) -> str:
    """Say which Triton ran."""
    mode = "interpreter on the CPU" if INTERPRETED else "compiled for the GPU"
    threads = os.environ.get("OMP_NUM_THREADS", "default")
    return f"triton: {mode}; gpu: {'yes' if HAS_GPU else 'no'}; omp threads: {threads}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a GPU run repeats, before `-m` chooses by it."""
    missing = None if HAS_GPU else "needs a CUDA device"
    device.mark(items, "TRITON_INTERPRET=1: the kernels are not compiled" if HAS_GPU and INTERPRETED else missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> object:
    """Let no compilation hang a GPU run."""
    if _stderr not in item.config.stash:
        return (yield)
    with device.limited(device.SECONDS, device.GRACE, item.config.stash[_stderr]):
        return (yield)


# Which fork of the test's process this one is: the number of each ancestor among its parent's, and of those made here.
_forks = [0]


def _note_child() -> None:
    _forks[:] = [*_forks, 0]


def _note_fork() -> None:
    _forks[-1] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_fork, after_in_child=_note_child)


def _entropy(name: str) -> Callable[[int], bytes]:
    """Bytes that no call gets twice, the same ones at every run of the test of this name."""
    calls = itertools.count()
    _forks[:] = [0]

    def read(size: int) -> bytes:
        # A forked child must not repeat its parent, nor another child.
        child = _forks[:-1]
        return hashlib.shake_256(f"{name} {child} {next(calls)}".encode()).digest(size)

    return read


def _come_again(name: str, patch: pytest.MonkeyPatch) -> None:
    """Under CI's profile, let keys, forks and names from the operating system follow from a name."""
    if settings.default is None or not settings.default.derandomize:
        return
    read = _entropy(name)
    patch.setattr(os, "urandom", read)
    patch.setattr(random, "_urandom", read)  # where `secrets` takes it from
    if torch := sys.modules.get("torch"):  # whose own generator begins anew in every process
        torch.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]))


@pytest.fixture(autouse=True)
def _keys_that_come_again(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, forks and names from the operating system are no dice of CI's: there they follow from the test's name.

    As with hypothesis, a change is not to fail by bad luck, and what fails is to fail again. Other profiles draw anew.
    """
    _come_again(request.node.nodeid, monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def _ledgers_in_temporary_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let ledgers of tests lie where pytest's folders are, which may be a tmpfs."""
    from dpcore.ledger import storage

    kind, _ = storage.file_system(tmp_path_factory.getbasetemp())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "KNOWN", storage.KNOWN | {kind})
        yield


@pytest.fixture(autouse=True, scope="session")
def _a_fast_interpreter() -> Iterator[None]:
    """Spare Triton's interpreter what it repeats, in the tests of this process."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED and "triton" in sys.modules:
            interpreter.hasten(patch)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest) -> object:
    """Fixtures of a whole module are set up before those of a test, for whichever test comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        _come_again(f"{request.node.nodeid} {fixturedef.argname}", patch)
        return (yield)
