"""Every mutation of tests/mutations.py still finds the line that it breaks, and the tests that notice it exist."""

import importlib.util
import shlex
from pathlib import Path

TESTS = next(folder for folder in Path(__file__).parents if folder.name == "tests")


def test_every_mutation_finds_its_line_once() -> None:
    spec = importlib.util.spec_from_file_location("mutations", TESTS / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    mutations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutations)
    assert len(mutations.MUTATIONS) > 20
    names = [mutation.name for mutation in mutations.MUTATIONS]
    assert len(names) == len(set(names))
    for mutation in mutations.MUTATIONS:
        found = (TESTS.parent / mutation.path).read_text().count(mutation.old)
        assert found == 1, f"{mutation.name}: {mutation.old!r} stands {found} times in {mutation.path}"
        assert mutation.new != mutation.old
        assert mutation.tests
        for name in shlex.split(mutation.tests):
            path, *functions = name.partition("[")[0].split("::")
            assert (TESTS.parent / path).exists(), f"{mutation.name}: no {path}"
            for function in functions:
                assert f"def {function}(" in (TESTS.parent / path).read_text(), f"{mutation.name}: no {name}"
