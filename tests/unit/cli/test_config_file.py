"""Settings from a file: the options' names, the command line first, unknown keys named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("typer")
import typer

from dpcore.cli.options import group_norms, real, reals
from dpcore.cli.train import train
from dpcore.errors import ArgumentError, DataError
from tests.refused import refused


def run(arguments: list[str]) -> dict[str, Any]:
    app, seen = typer.Typer(), {}

    @app.command()
    def train(
        config: Annotated[Path | None, typer.Option(is_eager=True, callback=train.use_config)] = None,
        lr: Annotated[float, typer.Option(parser=real)] = 0.1,
        batch_size: int = 256,
        betas: Annotated[Any, typer.Option(parser=reals)] = None,
        clipping_groups: Annotated[Any, typer.Option(parser=group_norms)] = "flat",
        tensorboard: bool = False,
        as_json: Annotated[bool, typer.Option("--json")] = False,
    ) -> None:
        seen.update(lr=lr, batch_size=batch_size, betas=betas, groups=clipping_groups, tensorboard=tensorboard)

    app(arguments, standalone_mode=False)
    return seen


def test_the_file_sets_defaults_and_the_command_line_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'lr = "1/4"\nbatch-size = 512\nbetas = [0.9, 0.99]\ntensorboard = true\n[clipping_groups]\n"0.*" = 0.5\n'
    )
    expected = {"lr": 0.25, "batch_size": 512, "betas": (0.9, 0.99), "groups": {"0.*": 0.5}, "tensorboard": True}
    assert run(["--config", str(path)]) == expected
    assert run(["--config", str(path), "--lr", "3"]) == expected | {"lr": 3}
    assert run(["--lr", "3", "--config", str(path), "--no-tensorboard"]) == expected | {"lr": 3, "tensorboard": False}


def test_the_config_of_a_run_can_be_run_again(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"kind": "dpcore run", "settings": {"lr": 0.5, "betas": None, "batch_size": 7}}))
    assert run(["--config", str(path)])["batch_size"] == 7


@pytest.mark.parametrize(("text", "message"), [
    ("learning_rate = 1\nbatch_sise = 3", "has the unknown key 'learning_rate'; known keys are"),
    ("batch_sise = 3", "has the unknown key 'batch_sise'; did you mean 'batch_size'?"),
    ("json = true", "'json' belongs to the command line"), ("config = 'a'", "'config' belongs to the command line"),
    ("[lr]\nvalue = 3", "'lr' is a table"), ("lr = ", "is not valid TOML"), ("lr = 1\nlr = 2", "is not valid TOML"),
])  # fmt: skip
def test_wrong_files_are_one_sentence(tmp_path, text: str, message: str):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises((ArgumentError, DataError)) as caught:
        run(["--config", str(path)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files_are_one_sentence(tmp_path):
    path, other = tmp_path / "run.toml", tmp_path / "config.json"
    refused(DataError, "cannot be read", run, ["--config", str(path)])
    path.write_bytes(b"\xff\xfe\x00")
    refused(DataError, "is not valid TOML", run, ["--config", str(path)])
    other.write_text("[]")
    refused(DataError, "holds no settings", run, ["--config", str(other)])
