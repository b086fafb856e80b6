"""What people type, and what it means: one table of options for commands, files and methods."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("typer")
import typer

from dpcore.cli import app, options
from dpcore.cli.options import count, group_norms, names, one_of, real, reals, whole
from dpcore.cli.train import train
from dpcore.cli.train.settings import DEFAULT_LR, SETTINGS, Settings
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, DpcoreError, PrivacyError
from dpcore.methods import METHODS, keywords
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.filters import NAMED_FILTERS, OptimalFIR, butterworth, chebyshev, named_filter
from dpcore.stages.filters.designs import DESIGNS, filter_of
from dpcore.stages.strategies import NamedStrategy
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Doubling, WarmupCosine
from tests.refused import refused

# Options build these, or give them another name.
BUILT = {"adaptive_clip", "averaging", "a", "b", "galore"}


@dataclass(frozen=True)
class Table:
    rate: Annotated[float | None, options.option(real, "R", "A rate.")] = None
    on: Annotated[bool | None, options.flag("--on", "A flag.")] = None
    left: Annotated[float, options.option(real, "L", "Left out.")] = 2.0


def options_of(command: str) -> set[str]:
    place = import_module(f"dpcore.cli.{command}.{command}")
    group = typer.Typer()
    group.command()(getattr(place, command))
    return {str(parameter.name) for parameter in typer.main.get_command(group).params}


def test_every_keyword_of_every_method_is_an_option():
    known = {keyword for method in METHODS for keyword in keywords(method)}
    assert known - BUILT <= set(SETTINGS)


def test_commands_take_the_settings_by_their_names():
    assert set(SETTINGS) <= options_of("train")
    # One value of these is not enough for a comparison, or it decides them itself.
    assert set(SETTINGS) - options_of("compare") == {"allow_nonprivate", "method", "noise_multiplier", "seed"}


@pytest.mark.parametrize("name", app.COMMANDS)
def test_the_help_of_all_says_what_the_command_says(name: str):
    place, words, example = app._COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        assert words == found.__doc__
    assert example.startswith(f"dpcore {name} ")


def test_a_table_becomes_options():
    heard: dict[str, Any] = {}
    group = typer.Typer()

    @group.command()
    @options.takes(Table, without=("left",))
    def command(**given: Any) -> None:
        heard.update(given)

    group(["--rate", "1/4", "--on"], standalone_mode=False)
    assert heard == {"rate": 0.25, "on": True}
    read = options.parsers(Table)
    assert (read["rate"]("1/2"), read["on"](False), read["left"](3)) == (0.5, False, 3.0)


# What people type, and what it means.


@pytest.mark.parametrize(("text", "value"), [
    ("0.1", 0.1), ("1e-5", 1e-5), ("1E-5", 1e-5), (" 60000 ", 60000), ("60_000", 60000),
    ("1/60000", 1 / 60000), ("-3", -3), (3, 3), (0.25, 0.25),
])  # fmt: skip
def test_numbers_as_typed(text: Any, value: float):
    assert real(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", [
    "", "x", "0,1", "1,23", "1..2", "1/0", "1/2/3", "nan", "inf", "-inf", "1e999",
    "60k", "1%", "60,000", "10^", True, None, [1],
])  # fmt: skip
def test_what_is_no_number_is_refused_with_a_hint(text: Any):
    refused(typer.BadParameter, "is not", real, text)


def test_counts_are_whole_and_not_negative():
    assert count("6e4") == 60000
    for text in ("0.5", "-1", "1/3"):
        refused(typer.BadParameter, "whole number", count, text)
    assert whole("-7") == -7


def test_whole_numbers_keep_every_digit_and_end_where_64_bits_do():
    assert count("9007199254740993") == 2**53 + 1  # no float is this number
    assert count("9_223_372_036_854_775_807") == 2**63 - 1
    assert whole("-9_223_372_036_854_775_807") == 1 - 2**63
    for text in ("9223372036854775808", "1e30", "1e300", 10**400):
        refused(typer.BadParameter, "is too large|is not a number", count, text)
    refused(typer.BadParameter, "is too large; write a whole number of at most 9,223,372", whole, "-1e20")


def test_lists():
    assert reals("0.9, 0.999") == reals("0.9 0.999") == reals([0.9, "0.999"]) == reals("(0.9,0.999)") == (0.9, 0.999)
    refused(typer.BadParameter, "has no number", reals, " , ")
    for text in ("1,,2", ",1", "1,", "(1,,2)"):
        refused(typer.BadParameter, "lacks a number at one of its commas", reals, text)
    refused(typer.BadParameter, "lacks a name at one of its commas", names(("disk", "pmlf")), "disk,,pmlf")
    refused(typer.BadParameter, "has no name", names(("disk",)), [])


def test_names_in_any_spelling_and_the_nearest_one():
    parse = one_of(lambda: ("dp_sgd", "doppler", "disk"))
    assert [parse(text) for text in ("dp-sgd", "DP_SGD", "DiSK", " doppler")] == ["dp_sgd", "dp_sgd", "disk", "doppler"]
    with pytest.raises(
        typer.BadParameter, match=r"'dopler' is unknown; did you mean doppler\? known: dp_sgd, doppler, disk"
    ):
        parse("dopler")
    refused(typer.BadParameter, r"'qqq' is unknown; known: ", parse, "qqq")


def test_filters_by_name_or_design():
    parse = options.name_or_design(NAMED_FILTERS, DESIGNS)
    assert [parse(text) for text in ("First-Order V1", " Butterworth  2 0.1", "optimal_fir 8")] == [
        "first-order v1", "butterworth 2 0.1", "optimal-fir 8",
    ]  # fmt: skip
    refused(typer.BadParameter, "did you mean chebyshev", parse, "chebishev 2 0.1 1")
    refused(typer.BadParameter, "did you mean momentum", parse, "momentun")
    wanted = {
        "butterworth 2 0.1": butterworth(2, 0.1), "chebyshev 3 0.2 1": chebyshev(3, 0.2, 1.0),
        "optimal-fir 8": OptimalFIR(8), "optimal-fir 8 paper": OptimalFIR(8, "paper"), "f3": named_filter("f3"),
    }  # fmt: skip
    for text, made in wanted.items():
        assert Settings(method="doppler", epsilon=1.0, filter=text).build_method().filter == made
    for text in ("butterworth 2", "chebyshev 2 0.1 1 1", "optimal-fir x"):
        refused(ArgumentError, f"filter='{text}': must be '", filter_of, text)
    refused(ArgumentTypeError, "order=2.5", filter_of, "butterworth 2.5 0.1")


def test_clipping_groups():
    assert group_norms("per-layer") == "per_layer"
    assert group_norms("conv*=0.5, *=1") == group_norms({"conv*": "0.5", "*": 1}) == {"conv*": 0.5, "*": 1.0}
    refused(typer.BadParameter, "did you mean flat", group_norms, "flatt")
    refused(typer.BadParameter, "is not a number", group_norms, "conv*=big")
    refused(typer.BadParameter, "lacks a norm at one of its commas", group_norms, "a=1,,b=2")
    refused(typer.BadParameter, "has a norm without a pattern", group_norms, "=3")
    refused(typer.BadParameter, "has two norms for one pattern", group_norms, "a=1,*=2,a=3")


# Settings from a file: the options' names, the command line first, unknown keys named.


def run_train(arguments: list[str]) -> dict[str, Any]:
    app, seen = typer.Typer(), {}

    @app.command()
    def train(
        config: Annotated[Path | None, typer.Option(is_eager=True, callback=train.use_config)] = None,
        lr: Annotated[float, typer.Option(parser=real)] = 0.1,
        batch_size: int = 256,
        betas: Annotated[Any, typer.Option(parser=reals)] = None,
        clipping_groups: Annotated[Any, typer.Option(parser=group_norms)] = "flat",
        overlay: bool = False,
        as_json: Annotated[bool, typer.Option("--json")] = False,
    ) -> None:
        seen.update(lr=lr, batch_size=batch_size, betas=betas, groups=clipping_groups, overlay=overlay)

    app(arguments, standalone_mode=False)
    return seen


def test_the_file_sets_defaults_and_the_command_line_wins(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'lr = "1/4"\nbatch-size = 512\nbetas = [0.9, 0.99]\noverlay = true\n[clipping_groups]\n"0.*" = 0.5\n'
    )
    expected = {"lr": 0.25, "batch_size": 512, "betas": (0.9, 0.99), "groups": {"0.*": 0.5}, "overlay": True}
    assert run_train(["--config", str(path)]) == expected
    assert run_train(["--config", str(path), "--lr", "3"]) == expected | {"lr": 3}
    assert run_train(["--lr", "3", "--config", str(path), "--no-overlay"]) == expected | {"lr": 3, "overlay": False}


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
        run_train(["--config", str(path)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_binary_files_are_one_sentence(tmp_path):
    path, other = tmp_path / "run.toml", tmp_path / "config.json"
    refused(DataError, "cannot be read", run_train, ["--config", str(path)])
    path.write_bytes(b"\xff\xfe\x00")
    refused(DataError, "is not valid TOML", run_train, ["--config", str(path)])
    other.write_text("[]")
    refused(DataError, "has no settings", run_train, ["--config", str(other)])


# Options of all methods: who takes which, what the sampling follows, and that they reach the method.


def build(method: str, **settings: Any) -> Any:
    return Settings(method=method, epsilon=3, **settings).build_method(1000)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_built_from_defaults(method: str):
    settings = Settings(method=method, epsilon=3)
    assert settings.build_method(1000).name == method
    assert settings.learning_rate == DEFAULT_LR[settings.update]
    expected = "fixed-order" if method in ("memf", "srg_memf", "accelerated_srgd") else "poisson"
    assert settings.sampling == expected


def test_options_reach_the_method():
    pmlf = build("pmlf", window=4, beta=0.3, filter="first-order v1")
    assert (pmlf.query.window, pmlf.query.beta) == (4, 0.3)
    assert build("inner_outer", outer_momentum=0.7).update.momentum == 0.7
    assert build("srg_memf", decay=0.2).query.decay == 0.2
    assert build("accelerated_srgd", variant="unaccelerated").update.variant == "unaccelerated"
    scaled = build("dp_adam", variant="scale_then_privatize", max_scaled_norm=2.0, scale_eps=0.1, eps=1e-4)
    assert (scaled.query.max_scaled_norm, scaled.query.scale_eps, scaled.update.eps) == (2.0, 0.1, 1e-4)
    banded = build("memf", strategy="banded-inverse-square-root", bands=3)
    assert banded.noise.strategy == NamedStrategy("banded-inverse-square-root", 3)
    released = build("dp_sgd", schedule="cosine", warmup_steps=5, ema=0.9, radius=2.0, galore_rank=3)
    assert (released.galore, build("dp_sgd").galore) == (GaLore(3), None)
    assert build("dp_sgd", galore_rank=3, galore_every=7).galore == GaLore(3, 7)
    assert released.schedule == WarmupCosine(5)
    found = build("dp_sgd", schedule="doubling")
    assert (found.schedule, found.update.settings().learning_rate) == (Doubling(), 0.1)
    assert released.averaging == ExponentialAverage(0.9)
    assert released.radius == 2.0
    assert build("dp_sgd", clip_quantile=0.7).clip.adaptive == AdaptiveClip(0.7)
    adapted = build("dp_sgd", max_grad_norm=3.0, clip_quantile=0.7, clip_lr=0.1, bit_noise=9.0).clip
    assert (adapted.max_grad_norm, adapted.adaptive) == (3.0, AdaptiveClip(0.7, 0.1, 9.0))
    refused(ArgumentError, "learning_rate=0", build, "dp_sgd", clip_quantile=0.7, clip_lr=0.0)


@pytest.mark.parametrize(("method", "settings", "sampling"), [
    ("dp_sgd", {"strategy": "tree"}, "fixed-order"), ("accelerated_srgd", {"variant": "independent"}, "poisson"),
    ("dp_adam", {"variant": "independent_moments"}, "fixed-order"),
    ("dp_adam", {"variant": "bias_corrected"}, "poisson"),
])  # fmt: skip
def test_the_sampling_follows_the_method(method: str, settings: dict[str, Any], sampling: str):
    assert Settings(method=method, epsilon=3, **settings).sampling == sampling
    if sampling == "fixed-order":
        with pytest.raises(PrivacyError, match="sampling='fixed-order'"):
            Settings(method=method, epsilon=3, sampling="poisson", **settings).plan(1000)


def test_samplings_that_fit():
    assert Settings(epsilon=3, sampling="truncated-poisson", max_batch_size=20).max_batch_size == 20
    Settings(epsilon=3, method="dp_adam", variant="independent_moments", sampling="truncated-poisson")
    Settings(epsilon=3, method="memf", sampling="shuffled")
    Settings(epsilon=3, sampling="cyclic-poisson", groups=4)


@pytest.mark.parametrize(("settings", "words"), [
    ({"max_batch_size": 20}, "max_batch_size=20: is only for sampling 'truncated-poisson'"),
    ({"groups": 2, "sampling": "shuffled"}, "groups=2: is only for sampling 'cyclic-poisson'"),
    ({"sampling": "cyclic-poisson"}, "groups=None: must be given with sampling 'cyclic-poisson'"),
    ({"method": "memf", "sampling": "truncated-poisson"}, "sampler=TruncatedPoissonSampler: correlated noise"),
    ({"method": "dp_adam", "variant": "independent_moments", "sampling": "fixed-size"}, "zero-out adjacency; use"),
])  # fmt: skip
def test_what_is_another_samplings_is_refused_with_the_plan(settings: dict[str, Any], words: str):
    refused(DpcoreError, words, Settings(epsilon=3, **settings).plan, 1000)


def test_epsilon_is_named_as_it_was_typed():
    refused(ArgumentError, r"^epsilon=-1: must be greater than 0", Settings, epsilon=-1)


@pytest.mark.parametrize(("method", "settings", "words"), [
    ("memf", {"kappa": 0.5}, "is only for the method disk, not for memf"),
    ("inner_outer", {"base": "sgd"}, "is only for the method dp_sgd, doppler, disk"),
    ("dp_sgd", {"eps": 0.1}, "is only for --base adam, adamw or adagrad, not for sgd"),
    ("accelerated_srgd", {"weight_decay": 0.1}, "not for accelerated"),
    ("inner_outer", {"momentum": 0.1}, "is only for the method dp_sgd, .* not for inner_outer"),
    ("dp_sgd", {"bands": 3}, "banded-inverse-square-root"),
    ("dp_sgd", {"clip_lr": 0.1}, "clip_lr=0.1: is only for --clip-quantile"),
    ("dp_sgd", {"bit_noise": 3.0}, "bit_noise=3.0: is only for --clip-quantile"),
    ("dp_sgd", {"warmup_steps": 3}, "is only for --schedule cosine"),
    ("dp_sgd", {"warmup_steps": 3, "schedule": "doubling"}, "is only for --schedule cosine"),
    ("dp_adam", {"schedule": "doubling"}, "and for SGD; take dp_sgd"), ("dp_sgd", {"ema": 1.0}, "ema=1.0"),
    ("dp_adam", {"variant": "side_information"}, "make_private"),
    ("dp_adam", {"variant": "noiseless_preconditioner", "allow_nonprivate": True}, "guarantees nothing"),
    ("dp_adam", {"variant": "noiseless_scale_then_privatize", "allow_nonprivate": True}, "guarantees nothing"),
])  # fmt: skip
def test_what_does_not_fit_is_one_sentence(method: str, settings: dict[str, Any], words: str):
    with pytest.raises(ArgumentError, match=words) as caught:
        Settings(method=method, epsilon=3, **settings)
    assert "\n" not in str(caught.value)
