"""Every mutation of tests/mutate.py still finds the line that it breaks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_mutation_finds_its_line_once() -> None:
    spec = importlib.util.spec_from_file_location("mutate", TESTS / "mutate.py")
    assert spec is not None
    assert spec.loader is not None
    mutate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutate)
    assert len(mutate.MUTATIONS) > 20
    for mutation in mutate.MUTATIONS:
        found = (TESTS.parent / mutation.path).read_text().count(mutation.old)
        assert found == 1, f"{mutation.name}: {mutation.old!r} stands {found} times in {mutation.path}"
        assert mutation.new != mutation.old
        for name in mutation.tests.split():
            assert (TESTS.parent / name.partition("::")[0]).exists(), f"{mutation.name}: no {name}"
