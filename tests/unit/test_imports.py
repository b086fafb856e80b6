"""Imports: dpcore needs numpy and scipy and touches nothing else; what is missing is named with its extra."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from dpcore.spec.extras import EXTRAS, needs
from tests.fresh import ROOT, after, python

# Runs in its own process, for this one has imported everything already. Every installed package but ours, numpy and
# scipy is refused there, and what was tried is told, also where an `except ImportError` hid it.
PROBE = """
import json, sys
from importlib.metadata import packages_distributions

ALLOWED = {{"dpcore", "numpy", "scipy"}}
REFUSED = {{name for name, owners in packages_distributions().items() if not ALLOWED & set(owners)}} | set({optional!r})
tried = set()

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in REFUSED:
            tried.add(name)
            raise ModuleNotFoundError(f"{{name}} is refused here", name=name)
        return None

sys.meta_path.insert(0, Refuse())
{code}
print(json.dumps(sorted(tried)))
"""

OPTIONAL = {"torch", "triton", "dpcore_triton", "typer", "rich", "matplotlib", "tensorboard", "sklearn", "safetensors"}


def tried_by(code: str) -> set[str]:
    """Optional packages that `code` tries to import, in an interpreter that has none of them."""
    return set(json.loads(after(PROBE.format(code=code, optional=sorted(OPTIONAL))))) & (OPTIONAL | {"cryptography"})


def test_dpcore_and_a_private_run_on_arrays_need_numpy_and_scipy_only():
    code = """
from dpcore import *
assert not tried, tried
import dpcore, numpy as np
method = dpcore.methods.disk(lr=0.1, noise_multiplier=1.0)
sampler = dpcore.sampling.PoissonSampler(dataset_size=100, batch_size=10)
result = dpcore.minimize(lambda x, i: np.ones((len(i), x.size)), np.zeros(3), sampler, method, steps=2)
assert np.isfinite(result.x).all() and result.plan.epsilon(1e-5) > 0
"""
    # cryptography is tried, as the faster road to the same words, and done without.
    assert tried_by(code) <= {"cryptography"}


def test_the_probe_notices_a_hidden_import():
    names = OPTIONAL - {"dpcore_triton"}
    assert tried_by("\n".join(f"try:\n    import {each}\nexcept ImportError:\n    pass" for each in names)) == names


def modules_after(code: str) -> set[str]:
    """The modules that a new interpreter holds after `code`."""
    return set(after(f"import sys\n{code}\nprint(*sys.modules)").split())


def test_import_dpcore_imports_a_name_when_it_is_used():
    code = """
import dpcore
print(*{name.partition(".")[0] for name in sys.modules})
assert set(dpcore.__all__) <= set(dir(dpcore))
dpcore.errors.ArgumentError, dpcore.Clip
assert "dpcore.stages.clipping" in sys.modules
assert "dpcore.mechanism" not in sys.modules
"""
    assert set(after(f"import sys\n{code}").split()) & {*OPTIONAL, "numpy", "scipy"} == set()


def test_a_name_that_dpcore_lacks_is_an_attribute_error():
    import dpcore

    with pytest.raises(AttributeError, match="module 'dpcore' has no attribute 'clip'"):
        dpcore.clip  # noqa: B018


def test_import_of_all_names_is_quick():
    """Modules are counted, not seconds: scipy.special alone takes longer than numpy and all of dpcore."""
    # An editable install's finder brings importlib.resources and the like; what numpy brings is not ours.
    held = modules_after("from dpcore import *") - modules_after("import numpy")
    assert {name.partition(".")[0] for name in held} & {*OPTIONAL, "scipy", "sqlite3", "multiprocessing"} == set()
    assert len([name for name in held if not name.startswith("dpcore")]) < 150


def test_other_libraries_are_imported_when_they_are_asked_for():
    pytest.importorskip("torch")
    held = modules_after("import dpcore.torch, dpcore.torch.hosts")
    assert {name.partition(".")[0] for name in held} & {"transformers", "accelerate", "pytorch_lightning"} == set()


def test_help_is_quick():
    """The help of all commands imports none of them, nor what they need."""
    pytest.importorskip("typer")
    held = modules_after("from dpcore.cli import main\nassert main(['--help']) == 0")
    assert {name.partition(".")[0] for name in held} & {"torch", "numpy", "scipy", "matplotlib", "sqlite3"} == set()
    assert len(held) < 450
    assert not {name for name in held if re.match(r"dpcore\.cli\.(train|compare|accounting|reports|plots)", name)}


def test_data_sets_need_no_command_line():
    held = modules_after("import dpcore.cli.datasets, dpcore.cli")
    assert {name.partition(".")[0] for name in held} & OPTIONAL == set()


# Without an extra, what needs it is refused by one sentence that names it, and what does not need it works.


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Runs in its own process. A refused package is one that is not installed. Each command runs in a folder of its own.
WITHOUT = """
import contextlib, io, json, os, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None

sys.meta_path.insert(0, Refuse())
from dpcore.cli import main
found = []
for number, words in enumerate(json.loads(sys.argv[1])):
    os.mkdir(str(number))
    with contextlib.chdir(str(number)), contextlib.redirect_stderr(io.StringIO()) as said:
        found.append((main(words.split()), said.getvalue(), os.listdir()))
print()
print(json.dumps(found))
"""
NO_EXTRAS = {*EXTRAS, "cryptography", "sklearn", "PIL", "transformers"}


def test_the_table_names_extras_of_the_distribution_that_bring_the_package():
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package) for line in PROJECT["optional-dependencies"][extra]), package


def test_sentences():
    sentence = "a picture needs matplotlib; install it with: pip install 'dpcore[plots]'"
    assert needs("a picture", "matplotlib") == sentence
    assert needs("the command line", "rich") == "the command line needs rich; install it with: pip install rich"


def without_extras(folder: Path, *commands: str) -> list[tuple[int, str, list[str]]]:
    """The status of each command, what it said of errors, and the files that it left behind."""
    done = python("-c", WITHOUT.format(refused=NO_EXTRAS), json.dumps(commands), folder=folder, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_accounting_needs_no_extra(tmp_path: Path):
    found = without_extras(
        tmp_path,
        "epsilon --sample-rate 0.01 --noise-multiplier 1.1 --steps 100 --delta 1e-6",
        "calibrate --dataset-size 6000 --batch-size 256 --epochs 2 --epsilon 3 --delta 1e-5",
        "ledger create a.ledger --budget-epsilon 3 --budget-delta 1e-5",
        "strategy optimize --kind banded-toeplitz --steps 64 --bands 4 --no-cache --out best.npz",
    )
    assert [status for status, _, _ in found] == [0] * 4, found


def test_what_is_missing_is_named_with_its_extra(tmp_path: Path):
    missing = {
        "train --data digits --model mlp --method disk --epsilon 1 --delta 1e-5 --epochs 1": "torch",
        "compare --methods dp_sgd,disk --epsilon 1 --delta 1e-5 --epochs 1 --out compared": "torch",
        "demo --out demo": "torch",
        "train --data image-folder --data-dir . --epsilon 1": "pillow",
        "inspect filter momentum --out a.png": "matplotlib",
        "train --data sst-2 --data-dir . --model gpt2 --model-dir . --epsilon 1": "transformers",
    }
    for package, (status, said, files) in zip(missing.values(), without_extras(tmp_path, *missing), strict=True):
        assert status == 2
        assert said.splitlines()[-1].endswith(needs("", package))
        assert "Traceback" not in said
        assert files == [], "a refused command leaves nothing behind"
