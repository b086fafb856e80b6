"""`dpcore predict` shows what `dpcore.methods.best_rate` finds, and refuses nonsense in one sentence."""

from pathlib import Path

import numpy as np
import pytest

import dpcore
from dpcore.cli import main
from dpcore.methods import best_rate
from dpcore.stages.updates.schedules import WarmupCosine
from tests.end_to_end.command_line import ask, say


def test_the_numbers_are_those_of_the_recursion(tmp_path: Path, capsys):
    file = tmp_path / "spectrum.txt"
    file.write_text("1.0 0.5\n0.25 2\n")
    words = ["--methods", "doppler:filter=f3,inner_outer:window=3", "--noise", "0.5,4", "--steps", "20"]
    found = ask("predict", *words, "--spectrum", str(file), "--schedule", "cosine")
    h, start = np.array([1, 0.25]), np.array([0.5, 2])
    scale = np.linalg.norm(h * start) / np.sqrt(2)
    plain = best_rate(dpcore.methods.dp_sgd(lr=1, schedule=WarmupCosine()), h, 20, noise_std=scale * 0.5, start=start)
    outer = dpcore.methods.inner_outer(lr=1, window=3, schedule=WarmupCosine())
    longer = best_rate(outer, h, 20, noise_std=scale * 4 * 1.11, start=start)
    assert list(found["methods"]) == ["dp_sgd", "doppler:filter=f3", "inner_outer:window=3"]
    assert found["methods"]["dp_sgd"]["loss"][0] == pytest.approx(plain.loss / (h @ start**2 / 2))
    assert found["methods"]["dp_sgd"]["over_dp_sgd"] == [1, 1]
    row = found["methods"]["inner_outer:window=3"]
    assert row["lr"][1] == pytest.approx(longer.lr)
    assert row["gradients_a_step"] == 3
    printed = say(capsys, ["predict", *words, "--spectrum", str(file), "--schedule", "cosine"]).out
    assert f"{row['over_dp_sgd'][1]:.3f}" in printed


def test_a_picture_is_drawn(tmp_path: Path):
    found = ask(
        "predict", "--methods", "disk", "--steps", "5", "--spectrum", "power:2:3", "--out", str(tmp_path / "p.png")
    )
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert found["curvatures"] == pytest.approx([1, 1 / 4, 1 / 9])


@pytest.mark.parametrize(("words", "sentence"), [
    (["--methods", "dopler"], "did you mean doppler"),
    (["--methods", "doppler:filtre=f3"], "did you mean filter"),
    (["--methods", "doppler:f3"], "write settings as NAME=VALUE"),
    (["--methods", ","], "has no method"),
    (["--methods", "dp_adam"], "update=Adam(...): cannot be predicted"),
    (["--methods", "pmlf:window=x"], "window='x'"),
    (["--noise", "0"], "must be numbers above 0"),
    (["--steps", "0"], "must be from 1 to 1,000,000"),
    (["--spectrum", "power:1"], "write power:EXPONENT:COUNT"),
    (["--spectrum", "nowhere.txt"], "nowhere.txt"),
])  # fmt: skip
def test_nonsense_is_one_sentence(words: list[str], sentence: str, capsys):
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_a_file_that_is_no_spectrum(tmp_path: Path, capsys):
    file = tmp_path / "three.txt"
    file.write_text("1 2 3\n")
    assert main(["predict", "--spectrum", str(file)]) == 2
    assert "has 3 columns; must be one or two" in capsys.readouterr().err
    file.write_text("curvature\n")
    assert main(["predict", "--spectrum", str(file)]) == 2
    assert "must have a curvature in each line" in capsys.readouterr().err
