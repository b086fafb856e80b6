"""The suite itself: what a GPU run repeats, how long a test may take there, and a machine with few packages."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import device
from tests.depth import chosen
from tests.fresh import python

ROOT = Path(__file__).resolve().parents[2]
# What pip installs beside torch and Triton; and what tests compare with. pytest's own plugins are not loaded below.
OPTIONAL = (
    "accelerate", "asv", "build", "cryptography", "datasets", "dp_accounting", "importlinter", "jax", "lightning",
    "matplotlib", "numpydoc", "opacus", "pandas", "peft", "pytest_cov", "pytorch_lightning", "rich", "safetensors",
    "sklearn", "sphinx", "tensorboard", "torchvision", "transformers", "tree", "typer", "xdist",
)  # fmt: skip
# Finders that find nothing, as where it is not installed: torch only asks whether some of these are there.
MISSING = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {missing} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import pytest
raise SystemExit(pytest.main(sys.argv[1:]))
"""


def pytest_says(*arguments: str, missing: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    """Run pytest in a process of its own, without plugins but hypothesis and without the packages `missing`."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("DPCORE_TEST_GPU", "PYTEST_ADDOPTS")}
    plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    options = ("-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider", "-q", "--hypothesis-profile=mutation")
    done = subprocess.run(
        [sys.executable, "-c", MISSING.format(missing=missing), *options, *arguments], cwd=ROOT, check=False,
        env={**inherited, **plain, **environment}, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def collected(*arguments: str) -> set[str]:
    """The functions of tests that pytest would run: `file::name`."""
    code, said = pytest_says("--collect-only", *arguments)
    assert code in (0, 5), said
    return {line.partition("[")[0] for line in said.splitlines() if "::" in line and not line.startswith("SKIPPED")}


@pytest.mark.slow
def test_a_machine_with_few_packages_skips_and_has_no_errors() -> None:
    pytest.importorskip("torch")
    rooms = chosen(["tests/unit/accounting", "tests/unit/cli"], ["tests"])
    streams = ["tests/spec/test_stream.py", *chosen([], ["tests/agreement/test_ops_stream.py"])]
    code, said = pytest_says("-k", "stream or (unit and refuses)", *rooms, *streams, missing=OPTIONAL)
    assert code == 0, said[-3000:]
    for package in ("dp_accounting", "cryptography"):
        assert f"could not import '{package}'" in said


def test_a_gpu_run_repeats_the_tests_of_the_port() -> None:
    """All of a folder, but what runs nothing; elsewhere those whose backend is "triton", and those that are marked."""
    pytest.importorskip("triton")
    folders = ("tests/agreement/test_bad_input.py", "tests/spec/test_recurrence.py", "tests/unit/backends/test_step.py")
    static, single = "tests/unit/backends/test_compile.py", "tests/unit/mechanism/test_sums.py"
    repeated = collected("-m", "gpu", *folders, static, single)
    assert {name.partition("::")[0] for name in repeated} == {*folders, single}
    assert [name for name in repeated if single in name] == [
        f"{single}::test_one_example_moves_a_sum_by_its_clip_norm_under_triton"
    ]
    assert {path.parent.name for path in map(Path, folders)} == {folder.name for folder in device.PORT}


@pytest.mark.skipif(device.has_gpu(wanted=True), reason="there is a CUDA device")
def test_a_gpu_run_without_a_device_fails() -> None:
    code, said = pytest_says("--collect-only", "tests/spec", DPCORE_TEST_GPU="1")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "DPCORE_TEST_GPU=1: torch finds no CUDA device" in said


def test_a_test_that_takes_too_long_fails_once() -> None:
    runs = []

    @given(st.integers())
    def forever(number: int) -> None:
        runs.append(number)
        time.sleep(60)

    # Hypothesis begins slowly on a busy machine, and an exception is lost in some places of it: first without a limit.
    given(st.integers())(lambda number: None)()
    begun = time.monotonic()
    with (
        tempfile.TemporaryFile() as report,
        pytest.raises(device.TooLong, match="more than 2 seconds"),
        device.limited(2, 60, report.fileno()),
    ):
        forever()
    assert len(runs) == 1
    assert time.monotonic() - begun < 50
    # Neither limit outlives what it is for. A busy machine must not let them pass before: the second one ends pytest.
    with tempfile.TemporaryFile() as report, device.limited(1, 1, report.fileno()):
        pass
    time.sleep(2.2)


def test_what_hangs_outside_of_python_ends_the_process() -> None:
    program = """
import signal, time
from tests import device
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
with device.limited(1, 1, 2):
    time.sleep(60)
"""
    done = python("-c", program, seconds=50)
    assert done.returncode == 1
    assert "time.sleep" in done.stderr or "line 6" in done.stderr
