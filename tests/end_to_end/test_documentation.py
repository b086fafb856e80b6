"""What README and docs show runs as it stands: the Python, and the commands as far as they cost little."""

import json
import re
import shlex
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
import typer

import dpcore
from dpcore.audit import auditing
from dpcore.cli.app import COMMANDS as NAMES
from dpcore.cli.app import application, run

ROOT = Path(__file__).resolve().parents[2]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
PAGES = ["README.md", *(str(page.relative_to(ROOT)) for page in DOCS)]
# typer brings its own copy of click or uses the installed one, depending on its version.
UsageProblem = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
CHEAP = ("epsilon", "calibrate", "inspect filter")


def blocks(page: str) -> list[str]:
    """The ```python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def theirs(page: str) -> list[str]:
    """The ```py blocks of a page: code of another library, which is not run."""
    return re.findall(r"^```py\n(.*?)^```$", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """The lines of a page's other code, fenced or indented, that are commands of ours; continued lines are joined."""
    text = re.sub(r"^```python\n.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    dpcore .*(?:\\\n.*)*", text, flags=re.MULTILINE)
    lines = "\n".join([*fenced, *indented]).replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("$ ") for line in lines if re.match(r"\s*(\$ )?dpcore ", line)]


# Scripts of processes and of other libraries: test_processes.py and test_hosts_pages.py run them as such.
SCRIPTS = ("docs/processes.md", "docs/hosts.md")
WITH_PYTHON = [page for page in PAGES if blocks(page) and page not in SCRIPTS]
COMMANDS = sorted({command for page in PAGES for command in commands(page)})


def test_every_method_and_its_page_are_looked_at():
    assert {f"docs/methods/{name}.md" for name in dpcore.methods.METHODS} <= set(WITH_PYTHON)
    assert {"README.md", "docs/start.md", "docs/extending.md", "docs/which-method.md"} <= set(WITH_PYTHON)
    assert len(COMMANDS) > 5


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_examples_run_in_the_order_of_the_page(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)  # what an example writes goes here
    if page == "docs/tables.md":
        pytest.importorskip("sklearn")
    # An honest method is flagged once in a hundred audits, and not here.
    monkeypatch.setattr(auditing, "new_key", lambda: bytes(range(32)))
    namespace: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(blocks(page)):
        code = compile(block, f"{page}, block {number}", "exec", dont_inherit=True)
        exec(code, namespace)  # noqa: S102 - our own documentation
    assert dpcore.get_backend() == "numpy"
    if page.startswith(("README", "docs/start", "docs/methods")):
        assert capsys.readouterr().out


@pytest.mark.parametrize("page", [page for page in PAGES if theirs(page)])
def test_code_of_other_libraries_is_python_and_stands_beside_ours(page: str):
    for number, block in enumerate(theirs(page)):
        compile(block, f"{page}, block {number} of another library", "exec", dont_inherit=True)
    assert blocks(page)


def test_the_page_on_opacus_shows_what_is_said(capsys: pytest.CaptureFixture[str]):
    (shown,) = re.findall(
        r"^```text\n(epsilon = .*?)^\.\.\.\n```$", (ROOT / "docs/migrating/opacus.md").read_text(), re.S | re.M
    )
    assert run(["epsilon", "--opacus", str(ROOT / "tests/golden/opacus-prv.pt"), "--delta", "1e-5"]) == 0
    assert capsys.readouterr().out.startswith(shown)


def parse(arguments: list[str]) -> None:
    """Find the command and read its options and their values, as the command line does, without running it."""
    command, context = typer.main.get_command(application(*NAMES)), None
    while hasattr(command, "commands"):
        name, *rest = arguments or [""]
        if name in ("--help", "-h", "--version"):
            return
        if name not in command.commands:
            raise UsageProblem(f"no command {name!r}")
        context = command.make_context("dpcore", [name], parent=context, resilient_parsing=True)
        command, arguments = command.commands[name], rest
    if "--help" not in arguments:
        command.make_context("dpcore", list(arguments), parent=context)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist_with_their_options(
    line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(line, comments=True)[1:]
    for file in (word for word in arguments if word.endswith(".toml")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        ours = ROOT / file
        (tmp_path / file).write_bytes(ours.read_bytes() if ours.exists() else b"")
    for file in (word for word in arguments if word.startswith("tests/golden/")):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    parse(arguments)
    if line.removeprefix("dpcore ").startswith(CHEAP):
        status = run(arguments)
        refused = "No run takes this filter" in capsys.readouterr().out
        assert status == (2 if refused else 0)


SHOWN = re.compile(
    r"^    (dpcore (?:epsilon|delta|calibrate|methods)(?: .*)?)\n"
    r"((?:(?!    dpcore |```).*\n)*)```text\n((?:(?!```).*\n)*)",
    re.MULTILINE,
)
OUTPUTS = [(page, line, said) for page in PAGES for line, _, said in SHOWN.findall((ROOT / page).read_text())]


@pytest.mark.parametrize(("page", "line", "output"), OUTPUTS, ids=[f"{page}: {line}" for page, line, _ in OUTPUTS])
def test_figures_are_those_that_the_command_prints(
    page: str, line: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    assert run(shlex.split(line)[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [said for said in output.splitlines() if said not in (*printed, "...")] == []


def test_figures_are_found():
    assert len(OUTPUTS) >= 4
    shown = {(page.rpartition("/")[2], line) for page, line, _ in OUTPUTS}
    assert ("command-line.md", "dpcore methods") in shown
    assert ("opacus.md", "dpcore epsilon --opacus tests/golden/opacus-prv.pt --delta 1e-5") in shown


def test_the_times_of_the_command_line_are_those_that_were_recorded():
    found = json.loads((ROOT / "asv_benchmarks/recorded/command_line.json").read_text())
    page = " ".join((ROOT / "docs/command-line.md").read_text().split())
    said = median(entry["first_line_s"] for entry in found["first_line"])
    whole = median(entry["whole_s"] for entry in found["first_line"])
    assert (
        f"after {said:.2f} seconds, before it loads PyTorch; two epochs on the digits take {whole:.1f} seconds" in page
    )
    one, two = (median(found["jobs_s"][jobs]) for jobs in ("1", "2"))
    assert (
        f"{one:.1f} seconds with `--jobs 1` and {two:.1f} with `--jobs 2`: {100 * (1 - two / one):.0f} % less" in page
    )
    small, large = ([entry for entry in found["threads"] if (entry["products"] < 2**24) == below] for below in (1, 0))
    gain = min(small, key=lambda entry: entry["two_over_one"])
    assert f"gains more than {100 * (1 - gain['two_over_one']):.0f} % of a step by a second thread" in page
    assert f"({gain['two_threads_ms']:.1f} instead of {gain['one_thread_ms']:.1f} ms)" in page
    assert f"the smallest loses {100 * (small[0]['two_over_one'] - 1):.0f} %" in page
    saved = sorted(100 * (1 - entry["two_over_one"]) for entry in large)
    assert f"the second thread saves {saved[0]:.0f} to {saved[-1]:.0f} %" in page
    busy = found["threads_while_cores_are_busy"]
    slower = [[entry["two_over_one"] for entry in busy if (entry["products"] < 2**24) == below] for below in (1, 0)]
    (least, most), (least_large, most_large) = ((min(ratios), max(ratios)) for ratios in slower)
    assert f"{least:.1f} to {most:.1f} times as long as one in one thread" in page
    assert f"above 2^24 products {least_large:.1f} to {most_large:.1f} times" in page


def test_a_command_that_is_not_there_is_noticed():
    for line in ("trane --epochs 1", "inspect filters", "train --epoch-count 1", "train --method dp"):
        with pytest.raises(UsageProblem):
            parse(line.split())


def test_the_readmes_example_is_short():
    lines = [line for line in blocks("README.md")[0].splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10
