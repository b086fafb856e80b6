"""Lines fit a terminal, and nothing trails them in a pipe."""

import io
import json
import threading
import warnings

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
from dpcore.cli import main, output

LONG = "dpcore: out='runs/digits': already has a run; name another folder or add --overwrite, and then it is replaced"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _eighty(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_terminal_gets_lines_that_it_shows_whole():
    fitted = output.fitted(LONG, Terminal())
    assert max(map(len, fitted.splitlines())) <= 80
    assert " ".join(fitted.split()) == LONG
    assert "--overwrite," in fitted.split()
    assert output.fitted("short", Terminal()) == "short"
    assert output.fitted("", Terminal()) == ""
    assert output.fitted("one\n\ntwo", Terminal()) == "one\n\ntwo"


def test_a_warning_is_a_remark_without_its_line_of_code(capsys):
    former = warnings.showwarning
    with output.remarked_warnings(), warnings.catch_warnings():
        warnings.simplefilter("always")
        output.warnings.warn("slow", stacklevel=1)
    assert capsys.readouterr().err == "remark: slow\n"
    assert warnings.showwarning is former


# A command that computes for long says so once, on standard error, within a second of its first work.


PLAN = ["--sample-rate", "1e-4", "--steps", "1e9"]


@pytest.mark.parametrize(
    "words",
    [
        ["epsilon", *PLAN, "--noise-multiplier", "3", "--delta", "1e-6"],
        ["delta", *PLAN, "--noise-multiplier", "3", "--epsilon", "1"],
        ["calibrate", *PLAN, "--epsilon", "3", "--delta", "1e-6"],
        ["curve", "steps", *PLAN, "--noise-multiplier", "3", "--delta", "1e-6"],
    ],
)
def test_what_takes_long_is_named_once_and_json_stays_pure(words: list[str], capsys, monkeypatch):
    """The computation itself is replaced: what is tested is the line, and not the machine."""
    from dpcore import accounting

    monkeypatch.setattr(output, "_PATIENCE", 0.01)
    said = threading.Event()
    monkeypatch.setattr(output, "fitted", lambda text, _: said.set() or text)

    def wait_and(value: float):
        def found(*_: object, **__: object) -> float:
            assert said.wait(60)
            return value

        return found

    for name in ("epsilon", "delta"):
        monkeypatch.setattr(accounting, name, wait_and(1.0))
    for name in ("epsilon_interval", "delta_interval"):
        monkeypatch.setattr(accounting, name, wait_and(accounting.Interval(1.0, 1.0)))
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    lines = [line for line in err.splitlines() if "still computing" in line]
    assert len(lines) == 1
    assert lines[0].startswith("remark: still computing: certified bounds on the privacy loss; ")
