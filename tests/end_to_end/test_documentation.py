"""The Python that README and docs show runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dpcore

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "docs/start.md", "docs/extending.md", "docs/accounting.md", "docs/pytorch.md"]


def blocks(page: str) -> list[str]:
    """The ```python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_in_the_order_of_the_page(page: str, capsys: pytest.CaptureFixture[str]):
    found = blocks(page)
    assert found
    namespace: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(found):
        exec(compile(block, f"{page}, block {number}", "exec"), namespace)  # noqa: S102 - our own documentation
    assert dpcore.get_backend() == "numpy"
    if page in {"README.md", "docs/start.md"}:
        assert capsys.readouterr().out


def test_the_readmes_example_is_short():
    lines = [line for line in blocks("README.md")[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
