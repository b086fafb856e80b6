"""The scripts that docs/tried.md shows run, and the doctor says of them what the page has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.cli import main
from tests.end_to_end.test_documentation import blocks
from tests.unit.cli.test_idx import encode

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/tried.md").read_text()
SCRIPTS = sorted((ROOT / "docs/tried").glob("*.py"))
EPOCH = r"epoch {}: \d+\.\d\d %, epsilon \d\.\d{{3}}, \d+ s"


def shown(begin: str) -> str:
    """What the page shows of a command's output."""
    (found,) = re.findall(rf"^```text\n\$ [^\n]*{re.escape(begin)}\n(.*?)^```$", PAGE, re.S | re.M)
    return str(found)


def test_the_page_shows_files_and_no_code_of_its_own():
    assert [file.name for file in SCRIPTS] == ["faults.py", "mnist.py"]
    assert re.findall(r"^```\{literalinclude\} tried/(\S+)$", PAGE, re.M) == ["faults.py", "mnist.py"]
    assert "code-block" not in PAGE
    assert "```py" not in PAGE


def test_mnist_trains_on_files_in_its_form(tmp_path: Path):
    random = np.random.default_rng(0)
    for part, count in (("train", 130), ("t10k", 20)):
        pictures = random.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(encode(pictures))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(encode((np.arange(count) % 10).astype(np.uint8)))
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs/tried/mnist.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, page = done.stdout.splitlines(), shown("mnist.py DIR").splitlines()
    assert told[:3] == page[:3]
    assert "  model: Sequential, 26,010 trained parameters" in told
    for number, lines in ((1, told[-2:]), (2, told[-2:]), (1, page[-2:]), (2, page[-2:])):
        assert re.fullmatch(EPOCH.format(number), lines[number - 1])


def test_the_doctor_finds_both_faults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["dpcore"])
    assert main(["doctor", str(ROOT / "docs/tried/faults.py")]) == 1
    assert capsys.readouterr().out.startswith(shown("dpcore doctor faults.py").removesuffix("...\n"))


def test_the_doctor_finds_the_ten_lines_sound(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = tmp_path / "ten.py"
    script.write_text(blocks("README.md")[0])
    assert main(["doctor", str(script), "--no-audit"]) == 0
    told = capsys.readouterr().out.splitlines()
    lines = [line for line in shown("dpcore doctor ten.py").splitlines() if line != "..."]
    audited = lines.index(next(line for line in lines if "audit*:" in line))
    assert [line for line in lines[:audited] if line not in told] == []
