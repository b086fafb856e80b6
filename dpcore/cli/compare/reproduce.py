"""``dpcore reproduce``: the papers' tables and figures, run again, and their numbers next to the papers'."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

import dpcore
from dpcore.cli.compare import made_up_text
from dpcore.cli.compare import recipe as recipes
from dpcore.cli.compare.compare import LISTS, run_comparison
from dpcore.cli.compare.recipe import Recipe
from dpcore.cli.compare.runs import Comparison, Contestant
from dpcore.cli.datasets import IDX_FILES, IDX_SETS, KEYS, cifar, text
from dpcore.cli.datasets.image_folder import pillow
from dpcore.cli.intervals import mean_interval
from dpcore.cli.options import Commands, Json, count, flag, option
from dpcore.cli.output import write_json, write_line, write_table
from dpcore.cli.train.run_folder import content_of
from dpcore.cli.train.settings import PRETRAINED, SCALED_MODELS, Settings
from dpcore.errors import ArgumentError, DataError
from dpcore.methods import PAPERS
from dpcore.spec.canonical import plain
from dpcore.spec.whole_file import whole_file
from dpcore.statement.text import counted, format_number

reproduce = Commands()  # its help is in dpcore.cli.app

_Name = Annotated[str, typer.Argument(metavar="NAME | FILE.toml", help="A recipe of dpcore reproduce list, or a file.",
    show_default=False)]  # fmt: skip
# A few steps on a few examples: what a run says then has no meaning, but everything is run.
_TINY = {"epochs": 1, "batch_size": 5, "warmup_steps": 1, "image_size": 32, "augmentations": 2, "num_workers": 0}
_TINY_SCALE = 1 / 8
_FOREIGN = "is not the one of this name that dpcore brings"
_TINY_EXAMPLES = {"train": 30, "test": 20}


@reproduce.command("list", example="dpcore reproduce list --paper pmlf")
def list_command(
    paper: Annotated[Any, option(recipes.paper_of, "PAPER", "One paper: the first word of its recipes.")] = None,
    as_json: Json = False,
) -> None:
    """List all tables and figures of the papers that show a private result: a command for each, or a reason."""
    found = [one for one in map(recipes.find, recipes.names()) if paper in (None, one.name.partition("-")[0])]
    if as_json:
        write_json({"recipes": [_to_dict(one) for one in found]})
        return
    for key in dict.fromkeys(one.paper for one in found):
        rows = [(one.name, one.place, _short(one)) for one in found if one.paper == key]
        write_table(("recipe", "place", "how"), rows, title=PAPERS[key][0].title, wraps=2)
        write_line()
    counts = (
        f"{sum(bool(one.arms) for one in found)} by dpcore compare, {sum(bool(one.study) for one in found)} by a study"
    )
    write_line(
        f"{len(found)} recipes: {counts}, {sum(bool(one.reason) for one in found)} by neither, for the reason given."
    )


@reproduce.command("show", example="dpcore reproduce show pmlf-table-4-mnist")
def show_command(name: _Name, as_json: Json = False) -> None:
    """Show a recipe: what the paper prints, each setting with its source, and what makes it again."""
    one = recipes.find(name)
    if as_json:
        write_json(_to_dict(one))
        return
    about = [("paper", PAPERS[one.paper][0].text()), ("place", one.place), ("shows", one.title)]
    about += [(key, text) for key in ("data", "model", "note") if (text := getattr(one, key))]
    about += [("methods", "; ".join(one.methods or one.arms)), ("by", one.how)]
    if one.arms:
        about.append(("tolerance", f"± {one.tolerance.value:g} ({one.tolerance.source})"))
    if not one.built_in:
        about.append(("recipe", f"{one.name}: {_FOREIGN}"))
    write_table(("", ""), [(key, escape(text)) for key, text in about], wraps=1)
    write_line(f"\nprinted: {one.printed.unit}")
    if one.printed.rows:
        rows = [tuple(map(escape, (row, *cells))) for row, cells in one.printed.rows.items()]
        write_table(("", *one.printed.columns), rows, wraps=0, right=len(one.printed.columns))
    write_line()
    rows = [("all", key, _value(item.value), item.source) for key, item in one.settings.items()]
    for arm, table in one.arms.items():
        rows += [(arm, key, _value(item.value), item.source) for key, item in table.items()]
    write_table(("arm", "setting", "value", "source"), [tuple(map(escape, row)) for row in rows], wraps=3)


@reproduce.command(
    "run", example="dpcore reproduce run pmlf-table-4-mnist --data-dir data/mnist --jobs 2 --out table-4"
)
def run_command(
    name: _Name,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder; the same command continues where it stopped.")],
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of the data's files.")] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of the weights that a recipe begins from.")
    ] = None,
    model_dir: Annotated[str | None, typer.Option(metavar="DIR", help="For texts: folder of the model.")] = None,
    tiny: Annotated[
        bool, flag("--tiny", "A few steps of an arm of each kind on made-up data: to see that it runs.")
    ] = False,
    jobs: Annotated[int, option(count, "N", "Runs side by side, one thread each.")] = 1,
    seeds: Annotated[Any, option(count, "N", "Runs of each arm, instead of the recipe's.")] = None,
    as_json: Json = False,
) -> int:
    """Run a recipe by dpcore compare, one contestant an arm, and show the paper's numbers next to those found here."""
    one = recipes.find(name)
    if one.reason:
        raise ArgumentError(f"recipe {one.name!r}: cannot be run: {one.reason}")
    if one.study:
        return _study(one, data_dir, out, tiny or seeds is not None or jobs != 1, as_json)
    begins = None if tiny or "weights" not in one.settings else one.settings["weights"].value
    if begins is not None and weights is None:
        raise ArgumentError(f"weights=None: {one.name} begins from {begins}; name its file")
    if begins is None and weights is not None:
        why = "makes up its own with --tiny" if tiny else "begins from none"
        raise ArgumentError(f"weights={weights!r}: must be left out, since {one.name} {why}")
    changed: dict[str, Any] = {"weights": weights}
    if tiny:
        known = ("digits", *IDX_SETS, *cifar.FILES, "image-folder", *text.TASKS)
        if (data := one.settings["data"].value) not in known:
            raise ArgumentError(f"--tiny: makes up {', '.join(known)}, and not data={data!r}; leave it out")
        changed = {"epsilon": one.comparison().epsilon[:1], **_TINY}
        if isinstance(rates := one.settings["lr"].value if "lr" in one.settings else None, list):
            changed["lr"] = rates[:1]
        grids = ((key, item.value) for table in one.arms.values() for key, item in table.items() if key not in LISTS)
        changed |= {key: values[:1] for key, values in grids if isinstance(values, list)}
        if one.settings["model"].value in SCALED_MODELS:
            changed |= {"model_scale": _TINY_SCALE, "batch_size": 15}
        if one.settings["model"].value in PRETRAINED:
            changed |= {"model": "pretrained", "max_length": made_up_text.LENGTH}
            model_dir = str(out / "model")
        data_dir = None if data == "digits" else str(out / "data")
        changed["weights"] = str(out / "weights.safetensors")
    comparison = one.comparison(1 if tiny and seeds is None else seeds, data_dir, model_dir, **changed)
    if tiny:
        comparison = _one_of_each(comparison)
    _begin(one, out)
    if tiny:
        _make_up(comparison.shared.data, out / "data")
        if one.settings["model"].value in PRETRAINED:
            made_up_text.model(one.settings["model"].value, out / "model")
        if comparison.shared.weights is not None:
            _make_up_weights(comparison.shared)
    said = StringIO()
    with redirect_stdout(said) if as_json else nullcontext():
        status = run_comparison(comparison, out / "comparison", jobs=jobs, overwrite=False, as_json=as_json)
    if status:
        sys.stdout.write(said.getvalue())
        return status
    made = content_of(out / "comparison" / "results.json")["summary"]["rows"]
    content = _result(one, list(_compared(one, made)), comparison.seeds, tiny)
    lines = _lines(one, content)
    _write(out / "paper.json", json.dumps(plain(content), indent=2) + "\n")
    _write(out / "paper.txt", "\n".join([*lines, ""]))
    if as_json:
        write_json({**content, "folder": str(out), "comparison": json.loads(said.getvalue())})
        return 0
    for line in ("", *lines, f"Files: {out / 'paper.txt'}, {out / 'paper.json'}"):
        write_line(line)
    return 0


def _one_of_each(comparison: Comparison) -> Comparison:
    """Keep the first contestant of those that differ in numbers, or in a filter's name, alone."""
    kinds: dict[Any, Contestant] = {}
    for each in comparison.contestants:
        given = each.settings | each.grids
        kinds.setdefault((given["method"], given.get("base"), *sorted(given)), each)
    return replace(comparison, contestants=tuple(kinds.values()))


def _begin(one: Recipe, out: Path) -> None:
    """Make the folder and put the recipe into it, or refuse one that has something else."""
    kept = out / "recipe.toml"
    if out.exists() and not out.is_dir():
        raise DataError(f"out={str(out)!r}: is a file; name a folder")
    if (out / "comparison").exists() and kept.is_file():
        if kept.read_bytes() != one.content:
            raise DataError(f"out={str(out)!r}: has the runs of another recipe, or of this one before it was changed; "
                "name another folder")  # fmt: skip
        return
    # A name with a dot is what a killed command may leave, and a recipe alone one that was refused.
    if out.is_dir() and not kept.is_file() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise DataError(f"out={str(out)!r}: is not empty and has no recipe.toml; name another folder")
    out.mkdir(parents=True, exist_ok=True)
    with whole_file(kept) as file:
        file.write(one.content)


def _make_up(data: str, folder: Path) -> None:
    """Write a made-up data set in the data's own format: each class has a bright square of its own."""
    if data == "digits":
        return
    folder.mkdir(exist_ok=True)
    if data in text.TASKS:
        made_up_text.texts(data, folder, [*_TINY_EXAMPLES.values()])
        return
    classes = 100 if data == "cifar-100" else 10
    size, channels = (28, 1) if data in IDX_SETS else (32, 3)
    arrays: dict[str, Any] = {}
    for part, examples in _TINY_EXAMPLES.items():
        labels = np.arange(examples) % classes
        row, column, pixel = np.ogrid[:size, :size, : examples * size * size : size * size]
        square = (row // 7 * 4 + column // 7) % 16 == labels % 16
        images = np.moveaxis(square * 180 + (pixel + row * 13 + column * 29) % 50, 2, 0).astype(np.uint8)
        arrays |= {f"x_{part}": np.repeat(images[..., None], channels, -1), f"y_{part}": labels.astype(np.uint8)}
    if data == "image-folder":
        for part, name in (("train", "train"), ("test", "val")):
            for number, (image, label) in enumerate(zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)):
                (folder / name / f"n{label}").mkdir(parents=True, exist_ok=True)
                pillow().fromarray(image).save(folder / name / f"n{label}" / f"{number}.JPEG")
        return
    if data not in IDX_SETS:
        *train, test = cifar.FILES[data]
        for part, names in (("train", train), ("test", [test])):
            images = arrays[f"x_{part}"].transpose(0, 3, 1, 2).reshape(_TINY_EXAMPLES[part], -1)
            labels = np.repeat(arrays[f"y_{part}"][:, None], 1 if data == "cifar-10" else 2, axis=1)
            for name, records in zip(names, np.array_split(np.hstack((labels, images)), len(names)), strict=True):
                with whole_file(folder / name) as file:
                    file.write(records.tobytes())
        return
    for name, key in zip(IDX_FILES, KEYS, strict=True):
        values = arrays[key][..., 0] if key.startswith("x") else arrays[key]
        with whole_file(folder / name) as file:
            file.write(bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes() + values.tobytes())


def _make_up_weights(settings: Settings) -> None:
    """Write weights of a model like the one of the settings, with another number of classes."""
    from safetensors.torch import save_file

    from dpcore.torch.model.models import build

    size = settings.image_size or 32
    model = build(settings.model, (3, size, size), 7, settings.model_scale or 1)
    save_file(model.state_dict(), str(settings.weights))


def _compared(one: Recipe, made: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield, for each arm and epsilon, the paper's number, the one found here in its unit, and whether they agree."""
    for row in made:
        scaled = row["test_loss"] if one.measure == "loss" else [100 * share for share in row["test_accuracy"]]
        here, half = mean_interval(scaled)
        paper = one.printed.value(row["contestant"], row["target_epsilon"])
        yield {
            "arm": row["contestant"],
            "epsilon": row["target_epsilon"],
            "paper": paper,
            "here": here,
            "half_width_95": None if math.isnan(half) else half,
            "lr": row["lr"],
            "within_tolerance": None if paper is None else bool(abs(paper - here) <= one.tolerance.value),
        }


def _result(one: Recipe, rows: list[dict[str, Any]], seeds: int, tiny: bool) -> dict[str, Any]:
    return {
        "recipe": one.name,
        "sha256": one.digest,
        "built_in": one.built_in,
        "paper": PAPERS[one.paper][0].text(),
        "place": one.place,
        "printed": one.printed.unit,
        "measure": one.measure,
        "tolerance": one.tolerance.value,
        "seeds": seeds,
        "tiny": tiny,
        "rows": rows,
    }


def _lines(one: Recipe, content: dict[str, Any]) -> list[str]:
    """Return the result for a person: a table, and what limits it."""
    cells = [
        (
            row["arm"],
            format_number(row["epsilon"]),
            "" if row["paper"] is None else one.printed.cell(row["arm"], row["epsilon"]),
            f"{row['here']:.2f}",
            "" if row["half_width_95"] is None else f"± {row['half_width_95']:.2f}",
            _verdict(row, one.tolerance.value),
        )
        for row in content["rows"]
    ]
    head = ("arm", "epsilon", "paper", "here", "interval", "")
    write_table(head, [tuple(map(escape, each)) for each in cells], file=(table := StringIO()))
    compared = [row["within_tolerance"] for row in content["rows"] if row["within_tolerance"] is not None]
    said = f"{sum(compared)} of {len(compared)} printed numbers are within ± {one.tolerance.value:g} of those here"
    lines = [f"{PAPERS[one.paper][0].title}, {one.place}\n", table.getvalue()]
    lines.append(f"{said if compared else 'The paper prints no number to compare with'}.")
    seeds = counted(content["seeds"], "seed")
    measure = "held-out loss" if one.measure == "loss" else "% held-out accuracy"
    lines.append(f"Here: {measure}, mean of {seeds}, 95 % interval. Paper: {one.printed.unit}.")
    if content["tiny"]:
        lines.append("This is the tiny version, a few steps on made-up data: its numbers mean nothing.")
    if not one.built_in:
        lines.append(f"Recipe {one.name}: {_FOREIGN}.")
    return lines


def _verdict(row: Mapping[str, Any], tolerance: float) -> str:
    if row["within_tolerance"] is not False:
        return "within tolerance" if row["within_tolerance"] else ""
    reached = abs(row["paper"] - row["here"]) <= tolerance + (row["half_width_95"] or 0.0)
    return "outside, not by more than the interval" if reached else "OUTSIDE"


def _study(one: Recipe, data_dir: str | None, out: Path, changed: bool, as_json: bool) -> int:
    """Run the study that makes a recipe, in a copy of the repository."""
    if changed:
        raise ArgumentError(f"recipe {one.name!r}: is made by a study, which takes no --tiny, --seeds or --jobs")
    if not one.built_in:  # a stranger's file names a program
        raise ArgumentError(f"recipe {one.name!r}: {_FOREIGN}, so that its study is not run; run it yourself")
    script, *words = shlex.split(one.study)
    root = Path(dpcore.__file__).parents[1]
    if not (root / script).is_file():
        raise DataError(f"{root / script}: no such file; studies are in dpcore's repository, not in the package")
    if data_dir is None and "DIR" in words:
        raise ArgumentError(f"data_dir=None: {one.study} reads files; name their folder")
    filled = [{"DIR": str(data_dir), "FOLDER": str(out)}.get(word, word) for word in words]
    out.mkdir(parents=True, exist_ok=True)
    failed = subprocess.call([sys.executable, str(root / script), *filled], stdout=sys.stderr if as_json else None)
    if not failed and as_json:
        write_json({"recipe": one.name, "folder": str(out)})
    return int(bool(failed))


def _to_dict(one: Recipe) -> dict[str, Any]:
    content = {key: value for key, value in asdict(one).items() if key != "content"}
    return {**content, "sha256": one.digest, "built_in": one.built_in, "how": one.how}


def _short(one: Recipe) -> str:
    return "run" if one.arms else "study" if one.study else escape(one.reason)


def _value(value: Any) -> str:
    return ", ".join(map(_value, value)) if isinstance(value, list) else str(value)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode())
