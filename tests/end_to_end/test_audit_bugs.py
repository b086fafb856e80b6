"""Every planted bug is flagged by the audit, and its honest twin passes; nightly at the audit's default settings."""

import json
import re
from pathlib import Path

import pytest

from tests.depth import chosen
from tests.end_to_end.planted_bugs import BUGS, Bug, audited, table

ROOT = Path(__file__).resolve().parents[2]
FEW = list(BUGS)[::2]
"""Those that a change audits; the nightly job audits all."""


def few_runs(bug: Bug) -> dict[str, int]:
    """As many as show the bug: what a direct check finds is in a few runs."""
    return chosen({"runs": 16 if bug.bound_exceeds else 4}, {})


@pytest.mark.parametrize("name", chosen(FEW, list(BUGS)))
def test_a_planted_bug_is_flagged(name: str) -> None:
    found = audited(BUGS[name], planted=True, **few_runs(BUGS[name]))
    assert found.flagged, str(found)
    assert found.findings
    if BUGS[name].bound_exceeds:
        assert found.lower_bound > found.claimed_epsilon, str(found)


# The key is fixed: the same method, sampler and steps make the same audit.
TWINS = list({(id(bug.method), id(bug.sampler), bug.steps): name for name, bug in BUGS.items()}.values())


@pytest.mark.parametrize("name", chosen(TWINS[::2], TWINS))
def test_its_honest_twin_passes(name: str) -> None:
    found = audited(BUGS[name], planted=False, **few_runs(BUGS[name]))
    assert not found.flagged, str(found)
    assert found.lower_bound < found.claimed_epsilon


def test_the_pages_table_is_the_measured_one() -> None:
    rows = json.loads((ROOT / "docs/results/audit.json").read_text())
    assert {row["bug"] for row in rows} == set(BUGS)
    head, rule, *measured = (re.sub(" +", " ", line) for line in table(rows).splitlines())
    page = re.sub(" +", " ", (ROOT / "docs/audit.md").read_text())
    _, _, after = page.partition(f"{head}\n{rule}\n")
    shown = after.partition("\n\n")[0].splitlines()
    assert len(shown) >= 10
    assert set(shown) <= set(measured)
    assert f"All {len(BUGS)} bugs are flagged" in page
