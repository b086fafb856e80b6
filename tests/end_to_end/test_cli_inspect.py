"""`dpcore inspect` says what SciPy says, in tables, JSON and pictures, and refuses nonsense in one sentence."""

from pathlib import Path

import numpy as np
import pytest
import scipy.signal

from dpcore.cli import main
from dpcore.cli.gradients import save_gradients
from dpcore.stages.filters import NAMED_FILTERS
from tests.end_to_end.command_line import ask, say

PNG = b"\x89PNG\r\n\x1a\n"


def record(
    folder: Path, *, s: float = 0.5, signal: float = 0.2, white: bool = True, moments: bool = True
) -> np.ndarray:
    """A run whose filter is f4 and whose gradient never changes."""
    generator = np.random.default_rng(7)
    b, a = NAMED_FILTERS["f4"]
    g = signal + s * generator.standard_normal((400, 300))
    y = scipy.signal.lfilter(b, [1, *a], g, axis=0) / scipy.signal.lfilter(b, [1, *a], np.ones(400))[:, None]
    share = np.linspace(0.5, 0.1, 400) if moments else np.full(400, np.nan)
    folder.mkdir()
    save_gradients(folder, g, y, share, dimension=1000, noise_std=s, white_noise=white)
    return g


@pytest.mark.parametrize("words", [["first-order v1"], ["First_Order-V1"], ["b=1/11,1/11 a=-9/11"]])
def test_a_filters_numbers(words: list[str], capsys):
    told = ask("inspect", "filter", *words)
    kappa = scipy.signal.lfilter([1 / 11, 1 / 11], [1, -9 / 11], np.eye(1, 500)[0])
    assert told["accepted"] is True
    assert told["gain"] == pytest.approx(1)
    assert told["poles"] == [{"real": pytest.approx(9 / 11), "imaginary": 0, "modulus": pytest.approx(9 / 11)}]
    assert told["noise_factor"]["limit"] == pytest.approx((kappa**2).sum())
    assert told["noise_factor"]["10"] == pytest.approx((kappa[:10] ** 2).sum() / kappa[:10].sum() ** 2)
    assert told["delay"] == pytest.approx((np.arange(500) * kappa).sum())
    _, h = scipy.signal.freqz([1 / 11, 1 / 11], [1, -9 / 11], worN=[2 * np.pi * told["cutoff"]])
    assert abs(h[0]) ** 2 == pytest.approx(0.5)
    printed = say(capsys, ["inspect", "filter", *words]).out
    assert "0.09091" in printed
    assert "5 steps" in printed


def test_every_named_filter_in_one_table(capsys):
    told = ask("inspect", "filter")["filters"]
    assert [item["filter"] for item in told] == list(NAMED_FILTERS)
    assert all(item["accepted"] and item["stable"] for item in told)
    lines = say(capsys, ["inspect", "filter"]).out.splitlines()
    for name in NAMED_FILTERS:
        assert sum(line.startswith(f"{name}  ") for line in lines) == 1


@pytest.mark.parametrize(("words", "why", "numbers"), [
    ("b=0.1 a=-1.1", "unstable, its pole 1.1", {"stable": False, "gain": pytest.approx(-1), "cutoff": None}),
    ("b=0.5 a=-1", "unstable", {"stable": False, "gain": None, "half_life": None}),
    ("b=0.5 a=-0.9", "the gain is 5 and must be 1", {"stable": True, "gain": pytest.approx(5)}),
    ("b=1,-1,1", "the normalizer c_t is 0 at step 1", {"stable": True, "gain": 1}),
    ("b=0 a=0", "the gain is 0", {"gain": 0, "delay": None}),
])  # fmt: skip
def test_a_filter_that_runs_refuse_is_shown_and_ends_with_2(words: str, why: str, numbers: dict, capsys, tmp_path):
    told = ask("inspect", "filter", words, "--out", tmp_path / "a.png", status=2)
    assert told["accepted"] is False
    assert why in told["refused_because"]
    assert {key: told[key] for key in numbers} == numbers
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    printed = say(capsys, ["inspect", "filter", words], 2)
    assert "No run takes this filter: " in printed.out
    assert why in printed.out
    assert printed.err == ""


def test_pictures_are_pictures(capsys, tmp_path):
    told = ask("inspect", "filter", "f6", "--out", tmp_path / "f6.png")
    assert told["picture"] == str(tmp_path / "f6.png")
    record(tmp_path / "run")
    for words in (["filter", "none"], ["filter", "kappa=0.7"], ["gradients", tmp_path / "run"]):
        assert main(["inspect", *map(str, words), "--out", str(tmp_path / "picture.png")]) == 0
        assert (tmp_path / "picture.png").read_bytes().startswith(PNG)
        (tmp_path / "picture.png").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f6.png", "run"]
    assert main(["inspect", "filter", "momentum", "--out", str(tmp_path / "picture.svg")]) == 0
    assert b"<svg" in (tmp_path / "picture.svg").read_bytes()


def test_recorded_gradients(capsys, tmp_path):
    g = record(tmp_path / "run")
    told = ask("inspect", "gradients", tmp_path / "run")
    assert (told["steps"], told["coordinates_recorded"], told["dimension"]) == (400, 300, 1000)
    assert told["noise_floor"] == pytest.approx(1000 * 0.25)
    assert told["power_per_coordinate"]["before"] == pytest.approx((g**2).mean(), rel=1e-5)
    before, after = told["signal_to_noise"]["before"], told["signal_to_noise"]["after"]
    # Signal 0.2^2 over noise 0.5^2; f4 leaves a fifth of the noise and all of the signal.
    assert before["value"] == pytest.approx(0.04 / 0.25, abs=5 * before["error"])
    assert told["signal_to_noise"]["noise_factor"] == pytest.approx(0.2, rel=1e-3)
    assert after["value"] == pytest.approx(0.04 / 0.05, abs=6 * after["error"])
    shares = {row["frequency"]: row for row in told["share_of_power_below"]}
    assert shares[0.1]["white_noise"] < shares[0.1]["before"] < shares[0.1]["after"]
    assert told["negative_share"]["first_tenth"] > 0.45 > 0.15 > told["negative_share"]["last_tenth"]
    printed = say(capsys, ["inspect", "gradients", str(tmp_path / "run")]).out
    assert "it costs no privacy" in printed
    assert "0.2 of the variance" in printed


def test_what_a_record_cannot_tell_is_not_told(capsys, tmp_path):
    record(tmp_path / "correlated", white=False, moments=False)
    told = ask("inspect", "gradients", tmp_path / "correlated")
    assert told["signal_to_noise"]["before"] is told["signal_to_noise"]["after"] is told["negative_share"] is None
    printed = say(capsys, ["inspect", "gradients", str(tmp_path / "correlated")]).out
    assert "not flat" in printed
    assert "signal to noise" not in printed
    g = np.random.default_rng(0).standard_normal((50, 40))
    for name, filtered, said in (
        ("other", np.sign(g), "no fixed weights make the output"),
        ("zero", 0 * g, "the filter's output is zero"),
    ):
        (tmp_path / name).mkdir()
        save_gradients(tmp_path / name, g, filtered, np.full(50, np.nan), dimension=40, noise_std=1)
        assert main(["inspect", "gradients", str(tmp_path / name), "--out", str(tmp_path / f"{name}.png")]) == 0
        assert said in capsys.readouterr().out
        assert ask("inspect", "gradients", tmp_path / name)["signal_to_noise"]["after"] is None
    # No noise at all.
    save_gradients(tmp_path / "zero", g, g, np.full(50, np.nan), dimension=40, noise_std=0)
    assert "is not private" in say(capsys, ["inspect", "gradients", str(tmp_path / "zero")]).out
