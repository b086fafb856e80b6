"""`dpcore reproduce`: no table or figure is forgotten, recipes are complete, and what runs says how it compares."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from dpcore.cli import main
from dpcore.cli.compare import recipe, reproduce, runs
from dpcore.cli.compare.recipe import Recipe
from dpcore.cli.datasets import IDX_SETS
from dpcore.cli.interrupt import Stopped
from dpcore.errors import DataError
from tests.end_to_end.command_line import ask, say

ROOT = Path(__file__).resolve().parents[2]
ALL = {name: recipe.find(name) for name in recipe.names()}
RUN = [name for name, one in ALL.items() if one.arms]
# Every table and figure of the papers that shows a private result. The others show filters, settings, notation and
# algorithms: DOPPLER's figures 1, 5 and 6 and tables 1, 2 and 4, DiSK's figure 3 and tables 2 and 7, DP-PMLF's table 5,
# and figure 1 of the Adam paper.
INVENTORY = {
    "disk": {*(f"figure {n}" for n in (1, 2, 4, 5, 6, 7, 8)), *(f"table {n}" for n in (1, 3, 4, 5, 6))},
    "doppler": {*(f"figure {n}" for n in (2, 3, 4, 7, 8, 9, 10, 11, 12)), "table 3"},
    "pmlf": {*(f"figure {n}" for n in range(1, 8)), *(f"table {n}" for n in range(1, 5))},
    "srg_memf": {"figure 1"},
    "adaptive": {*(f"figure {n}" for n in range(2, 7)), "sections 4"},
}
PANELS = {
    "disk": {1: "abc", 2: "abc", 4: "abc", 6: "ab"}, "doppler": {3: "abc", 7: "abcd"}, "pmlf": {1: "ab"},
}  # fmt: skip
EXAMPLES = {
    "mnist": 60_000, "fashion-mnist": 60_000, "cifar-10": 50_000, "cifar-100": 50_000, "sst-2": 67_349, "qnli": 104_743,
    "qqp": 363_846, "mnli": 392_702, "dart": 62_659, "arxiv": 1_700_000,
    "image-folder": 1_281_167,
}  # fmt: skip
QUICK = "pmlf-figure-1-low-pass"


def paper_of(one: Recipe) -> str:
    return "adaptive" if one.paper in ("dp_adam", "dp_adagrad") else one.paper


def test_no_table_or_figure_is_forgotten():
    found: dict[str, set[str]] = {}
    panels: dict[tuple[str, int], set[str]] = {}
    for one in ALL.values():
        kind = re.match(r"(figure|table|sections) (\d+)", one.place)
        assert kind, one.place
        found.setdefault(paper_of(one), set()).add(kind[0])
        panels.setdefault((paper_of(one), int(kind[2])), set()).update(re.findall(r"\((\w)\)", one.place))
    assert found == INVENTORY
    for paper, figures in PANELS.items():
        assert {n: "".join(sorted(panels[paper, n])) for n in figures} == figures
    named = [one.place.partition(", ") for one in ALL.values() if one.paper == "pmlf"]
    assert {data for place, _, data in named if place == "figure 4"} == {
        "MNIST", "Fashion-MNIST", "CIFAR-10", "CIFAR-100",
    }  # fmt: skip
    for number in ("figure 3", "figure 6", "figure 7", "table 4"):
        assert {"MNIST", "CIFAR-10"} <= {data.removesuffix(", CNN-5") for place, _, data in named if place == number}
    assert all(one.how for one in ALL.values())


@pytest.mark.parametrize("name", RUN)
def test_every_arm_has_a_plan_at_the_size_of_the_data(name: str):
    made = ALL[name].comparison()
    for run in made.examples[: len(made.contestants)]:
        settings = made.settings_for(run)
        plan = settings.plan(EXAMPLES[settings.data])
        assert plan.steps == settings.epochs * -(-EXAMPLES[settings.data] // settings.batch_size)
        if settings.warmup_steps:
            assert settings.warmup_steps == plan.steps // 20


def test_the_numbers_of_the_study_and_of_its_recipe_are_the_same():
    rows = json.loads((ROOT / "docs/results/srg-mnist.json").read_text())["rows"]
    theirs = {row["label"]: row["paper"] for row in rows if row["label"].endswith((", exact", "one epoch"))}
    cells = {name: float(cells[0].split(" ± ")[0]) for name, cells in ALL["srg-figure-1-mnist"].printed.rows.items()}
    for ours, label in {
        "DP-MEMF, ones": "memf, ones, exact", "DP-MEMF, true": "memf, true, exact",
        "DP-SRG-MEMF, ones": "srg_memf, ones, exact", "DP-SRG-MEMF, true": "srg_memf, true, exact",
        "Non-private": "non-private, one epoch",
    }.items():  # fmt: skip
        assert cells[ours] == theirs[label]
    for one in ALL.values():
        assert not one.study or (ROOT / one.study.split()[0]).is_file()


def test_the_filters_of_table_4_are_those_that_it_prints():
    from dpcore.stages.filters import NAMED_FILTERS

    for name in ("pmlf-table-4-mnist", "pmlf-table-4-cifar-10"):
        assert list(ALL[name].arms) == list(ALL[name].printed.rows)
        for arm, settings in ALL[name].arms.items():
            a, b = (tuple(map(float, re.findall(r"[-\d.]+", part))) for part in arm.split(", b:"))
            assert NAMED_FILTERS[settings["filter"].value] == (b, a)


def test_list_and_show_have_it_all(capsys):
    listed = ask("reproduce", "list")["recipes"]
    assert [each["name"] for each in listed] == list(ALL)
    assert all(each["how"] for each in listed)
    printed = say(capsys, ["reproduce", "list", "--paper", "disk"]).out
    assert set(re.findall(r"^([a-z]+)-\S*", printed, re.MULTILINE)) == {"disk"}
    of_paper = [one for one in ALL.values() if one.paper == "disk"]
    ran, why = (sum(bool(getattr(one, key)) for one in of_paper) for key in ("arms", "reason"))
    assert f"{ran} by dpcore compare, 0 by a study, {why} by neither" in printed
    shown = ask("reproduce", "show", "pmlf table 4 mnist")
    assert shown["settings"]["lr"] == {"value": 0.5, "source": "appendix E"}
    assert shown["built_in"]
    text = say(capsys, ["reproduce", "show", "disk-table-4"]).out
    assert "are of texts that the model writes" in text
    assert "71.36" in text


def test_a_recipe_that_was_edited_in_the_package_is_not_the_one_that_dpcore_brings(tmp_path, monkeypatch):
    sums = (recipe.FOLDER / "SHA256SUMS").read_text()
    made = [f"{one.digest}  {name}.toml" for name, one in ALL.items()]
    assert sorted(sums.splitlines()) == sorted(made), "run `sha256sum *.toml > SHA256SUMS` in dpcore/recipes"
    monkeypatch.setattr(recipe, "FOLDER", tmp_path)
    (tmp_path / "SHA256SUMS").write_text(sums)
    edited = tmp_path / "pmlf-table-4-mnist.toml"
    edited.write_text(ALL[edited.stem].content.decode().replace("0.5", "0.7"))
    assert not recipe._built_in.__wrapped__(edited.stem).built_in


def result(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "paper.json").read_text()))


def run(name: str, out: Path, *more: str) -> list[str]:
    return ["reproduce", "run", name, "--tiny", "--out", str(out), *more]


def test_a_run_goes_on_where_it_stopped_and_says_what_the_paper_prints(tmp_path, capsys, monkeypatch):
    out, begun, whole = tmp_path / "out", [], runs.train_once

    def stopped_at_the_second(*given: Any) -> str:
        begun.append(given)
        if len(begun) == 2:
            raise Stopped("stopped at once", 130)
        return whole(*given)

    file = tmp_path / "mine.toml"
    text = (recipe.FOLDER / f"{QUICK}.toml").read_text()
    rows = '[printed]\nunit = "%"\ncolumns = ["epsilon 8"]\n\n[printed.rows]\nDPSGD = ["0.0 ± .1"]\nLP-DPSGD = [""]\n'
    text = text.replace('printed = "read off figure: none"\n', "").replace("[settings]", f"{rows}\n[settings]")
    file.write_text(re.sub(r"tolerance = \{ value = 1,", "tolerance = { value = 4.9,", text))
    monkeypatch.setattr(runs, "train_once", stopped_at_the_second)
    assert main(run(str(file), out)) == 130
    assert not (out / "paper.json").exists()
    said = say(capsys, run(str(file), out))
    assert "1 of 2 runs were made before and are kept" in said.err
    found = result(out)
    first, second = found["rows"]
    assert (first["paper"], second["paper"]) == (0, None)
    log = json.loads((out / "comparison" / "results.json").read_text())["summary"]["rows"]
    assert first["here"] == 100 * log[0]["mean"]
    # Of 20 held-out examples each is five points.
    assert first["within_tolerance"] == (first["here"] == 0)
    assert second["within_tolerance"] is None
    assert not found["built_in"]
    assert "mine: is not the one of this name that dpcore brings" in said.out
    assert "its numbers mean nothing" in said.out
    assert (
        f"{int(first['here'] == 0)} of 1 printed numbers are within ± 4.9 of those here"
        in (out / "paper.txt").read_text()
    )
    file.write_text(text)
    assert "has the runs of another recipe" in say(capsys, run(str(file), out), 2).err


@pytest.mark.parametrize(("within", "paper", "half", "said"), [
    (None, None, 1.0, ""), (True, 90.5, None, "within tolerance"), (False, 92.5, None, "OUTSIDE"),
    (False, 92.5, 2.0, "outside, not by more than the interval"), (False, 92.5, 1.4, "OUTSIDE"),
])  # fmt: skip
def test_a_number_outside_is_told_from_one_whose_interval_reaches_the_tolerance(within, paper, half, said):
    row = {"within_tolerance": within, "paper": paper, "here": 90.0, "half_width_95": half}
    assert reproduce._verdict(row, 1.0) == said


def test_a_start_that_was_refused_leaves_the_folder_to_another_recipe(tmp_path, capsys):
    out, kept = tmp_path / "out", tmp_path / "out" / "recipe.toml"
    for name, lacks in ((QUICK, "data_batch_1.bin"), ("pmlf-table-4-mnist", "train-images-idx3-ubyte[.gz]")):
        refused = say(capsys, ["reproduce", "run", name, "--out", str(out), "--data-dir", str(tmp_path)], 2).err
        assert f"has no {lacks}" in refused
        assert kept.read_bytes() == ALL[name].content


def test_the_answer_in_json_is_one_object_and_the_data_are_in_their_own_format(tmp_path):
    from dpcore.cli.datasets import load

    copied = tmp_path / f"{QUICK}.toml"
    copied.write_bytes((recipe.FOLDER / copied.name).read_bytes())
    answer = ask(*run(str(copied), tmp_path / "out", "--seeds", "2"))
    assert answer["built_in"]
    assert (answer["seeds"], answer["tiny"]) == (2, True)
    assert answer["comparison"]["settings"]["batch_size"] == 5
    assert all(row["half_width_95"] is not None for row in answer["rows"])
    assert load("cifar-10", tmp_path / "out" / "data").shape == (3, 32, 32)


# Whose words decide what a run does, and not the name alone.
WORDS = {
    *("data", "model", "method", "base", "variant", "strategy", "sampling", "clipping", "clipping_groups", "schedule"),
}


def paths(one: Recipe) -> set[Any]:
    """What a recipe's runs do that others do not: its data, its model, its settings, and those of each method."""
    words = {key: item.value for key, item in one.settings.items()}
    found = {one.measure, (words["data"] in IDX_SETS, words["model"])}
    for table in (one.settings, *one.arms.values()):
        found |= {(key, item.value if key in WORDS else "") for key, item in table.items()}
    return found | {(table["method"].value, key) for table in one.arms.values() for key in table}


def few() -> list[str]:
    """Recipes that together do all that any recipe does."""
    found, left = list[str](), set[Any]().union(*(paths(ALL[name]) for name in RUN))
    while left:
        found.append(max(RUN, key=lambda name: len(paths(ALL[name]) & left)))
        left -= paths(ALL[found[-1]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", few())
def test_every_kind_of_tiny_version_runs(name: str, tmp_path: Path):
    answer = ask(*run(name, tmp_path / "out"))
    first = ALL[name].comparison().epsilon[0]
    made = [row["arm"] for row in answer["rows"]]
    kinds = {arm: (table["method"].value, *sorted(table)) for arm, table in ALL[name].arms.items()}
    assert {kinds[arm] for arm in made} == {*kinds.values()}, "an arm of each kind"
    assert made == [arm for arm in kinds if arm in made]
    assert all(row["epsilon"] == first for row in answer["rows"])
    for row, found in zip(answer["rows"], answer["comparison"]["rows"], strict=True):
        assert row["paper"] == ALL[name].printed.value(row["arm"], first)
        assert row["here"] == (found["test_loss"][0] if ALL[name].measure == "loss" else 100 * found["mean"])


@pytest.mark.parametrize(("words", "sentence"), [
    (["show", "pmlf-table-4-mnst"], "did you mean pmlf-table-4-mnist?"),
    (["show", "nothing at all"], "dpcore reproduce list names all"),
    (["show", "nowhere.toml"], "nowhere.toml: cannot be read (No such file or directory)"),
    (["list", "--paper", "dsik"], "did you mean disk?"),
    (["run", "disk-table-4", "--out", "x"], "cannot be run: BLEU, ROUGE-L, METEOR, NIST and CIDEr are of texts"),
    (["run", "disk-figure-2-mnist", "--out", "x"], "data_dir=None: mnist is read from files"),
    (["run", "disk-figure-2-mnist", "--out", "x", "--data-dir", "."], "has no train-images-idx3-ubyte[.gz]"),
    (["run", "disk-figure-8", "--out", "x", "--data-dir", "."], "has no data_batch_1.bin; it has full"),
    (["run", "disk-figure-8", "--out", "x"], "data_dir=None: cifar-10 is read from files"),
    (["run", "disk-figure-5", "--out", "x", "--data-dir", "."], "weights=None: disk-figure-5 begins from timm's"),
    (["run", "disk-figure-5", "--out", "x", "--tiny", "--weights", "w"], "left out, since disk-figure-5 makes up its"),
    (["run", "disk-figure-8", "--out", "x", "--weights", "w"], "left out, since disk-figure-8 begins from none"),
    (["run", "disk-figure-7", "--out", "x", "--data-dir", "."], "has no folder train; must have train/CLASS and val"),
    (["run", "disk-figure-8", "--out", "full", "--tiny"], "is not empty and has no recipe.toml"),
    (["run", "disk-figure-8", "--out", "full/file", "--tiny"], "is a file; name a folder"),
    (["run", "disk-table-1-mnli", "--out", "x", "--data-dir", "."], "model_dir=None: mnli is read by a model's"),
    (["run", "srg-figure-1-mnist", "--out", "x"], "data_dir=None: docs/studies/srg_mnist.py"),
    (["run", "srg-figure-1-mnist", "--out", "x", "--tiny"], "which takes no --tiny, --seeds or --jobs"),
    (["run", "full/study.toml", "--out", "x"], "so that its study is not run"),
    (["run", "full/srg-figure-1-mnist.toml", "--out", "x", "--data-dir", "."], "so that its study is not run"),
])  # fmt: skip
def test_nonsense_is_one_sentence(words: list[str], sentence: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    study = (recipe.FOLDER / "srg-figure-1-mnist.toml").read_text()
    (tmp_path / "full" / "study.toml").write_text(study)
    (tmp_path / "full" / "srg-figure-1-mnist.toml").write_text(study.replace("srg_mnist.py", "other.py"))
    error = say(capsys, ["reproduce", *words], 2).err
    assert sentence in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x" / "comparison").exists()


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ('place = "figure 1 (a)"\n', "", "lacks 'place'"),
    ('place = "', 'pleace = "', "unknown key 'pleace'; did you mean 'place'?"),
    ('title = "', "title = 3 #", "title=3: must be a text"),
    ('paper = "pmlf"', 'paper = "plmf"', "paper='plmf': must be one of"),
    ('paper = "pmlf"', 'paper = "pmlf"\nmeasure = "f1"', "measure='f1': must be one of 'accuracy', 'loss'"),
    ('printed = "', 'reason = "none"\nprinted = "', "exactly one of arms, study and reason"),
    ("epochs =", "epoch =", "unknown setting in settings 'epoch'; did you mean 'epochs'?"),
    ("epochs = { value = 100,", "epochs = { value = 100.5,", "settings.epochs: 100.5 is not a whole number"),
    ("epochs = { value = 100, source", "epochs = { value = 100, sorce", "settings.epochs={'value': 100, 'sorce'"),
    ("delta = {", "data-dir = {", "unknown setting in settings 'data_dir'"),
    ("tolerance = { value = 1,", "tolerance = { value = -1,", "tolerance=-1: must be a number of points above 0"),
    ('method = "dp_sgd"', 'method = "dpsgd"', "'dpsgd' is unknown; did you mean dp_sgd?"),
    ('data = { value = "cifar-10"', 'data = { value = "../cifar-10"', "settings.data='../cifar-10': must be a name"),
    ('method = "dp_sgd"', 'method = "dp_sgd"\ndelta = { value = 1, source = "x" }', "unknown setting in arms.DPSGD"),
    ('method = "dp_sgd"', 'method = "dp_sgd"\nkappa = { value = 1, source = "x" }', "kappa=1.0: is only for"),
    ("paper =", "paper", "is not valid TOML"),
    ('printed = "read off figure: none"', "printed = { unit = 'x', columns = ['a'], rows = { DPSGD = ['1', '2'] } }",
     "has 2 cells; must have 1"),
    ('printed = "read off figure: none"', "printed = { unit = 'x', columns = ['a'], rows = { DPSGD = 1 } }",
     "printed.rows: DPSGD=1: must be a list"),
    ('printed = "read off figure: none"', "printed = { unit = 'x', columns = ['a'], rows = { DPSGD = ['about 1'] } }",
     "'about 1'; must be text such as"),
    ('printed = "read off figure: none"', "printed = { unit = 'x', columns = ['a'], rows = { SGD = ['1'] } }",
     "'SGD' is no arm"),
])  # fmt: skip
def test_a_recipe_that_is_not_complete_is_one_sentence(old: str, new: str, sentence: str):
    text = (recipe.FOLDER / f"{QUICK}.toml").read_text()
    assert old in text
    with pytest.raises(DataError) as refused:
        recipe.read(QUICK, text.replace(old, new, 1).encode(), "own.toml")
    assert sentence in str(refused.value)
    assert str(refused.value).startswith("own.toml: ")


def test_recipes_are_in_the_package():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dpcore"]
    assert "recipes/*.toml" in package
