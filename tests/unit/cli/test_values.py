"""What people type, and what it means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("typer")
import typer

from dpcore.cli.options import count, group_norms, names, one_of, real, reals, whole
from dpcore.methods import METHODS
from tests.refused import refused


@pytest.mark.parametrize(("text", "value"), [
    ("0.1", 0.1), ("1e-5", 1e-5), ("1E-5", 1e-5), (" 60,000 ", 60000), ("1,234,567.5", 1234567.5), ("60_000", 60000),
    ("60k", 60000), ("1.5M", 1.5e6), ("1/60,000", 1 / 60000), ("256/60k", 256 / 60000), ("1%", 0.01),
    ("10^-5", 1e-5), ("2**-20", 2**-20), ("-3", -3), (3, 3), (0.25, 0.25),
])  # fmt: skip
def test_numbers_as_typed(text: Any, value: float):
    assert real(text) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize("text", [
    "", "x", "0,1", "1,23", "1..2", "1/0", "1/2/3", "nan", "inf", "-inf", "1e999", "k", "%", "10^", True, None, [1],
])  # fmt: skip
def test_what_is_no_number_is_refused_with_a_hint(text: Any):
    refused(typer.BadParameter, "is not", real, text)


@given(st.integers(0, 10**15))
def test_every_count_survives_in_each_spelling(value: int):
    assert count(str(value)) == count(f"{value:,}") == count(f"{value:_}") == count(value) == value


def test_counts_are_whole_and_not_negative():
    assert count("6e4") == 60000
    for text in ("0.5", "-1", "1/3"):
        refused(typer.BadParameter, "whole number", count, text)
    assert whole("-7") == -7


def test_whole_numbers_keep_every_digit_and_end_where_64_bits_do():
    assert count("9007199254740993") == 2**53 + 1  # no float is this number
    assert count("9,223,372,036,854,775,807") == 2**63 - 1
    assert whole("-9_223_372_036_854_775_807") == 1 - 2**63
    for text in ("9223372036854775808", "1e30", "1e300", 10**400):
        refused(typer.BadParameter, "is too large|is not a number", count, text)
    refused(typer.BadParameter, "is too large; write a whole number of at most 9,223,372", whole, "-1e20")


def test_lists():
    assert reals("0.9, 0.999") == reals("0.9 0.999") == reals([0.9, "0.999"]) == reals("(0.9,0.999)") == (0.9, 0.999)
    refused(typer.BadParameter, "holds no number", reals, " , ")
    for text in ("1,,2", ",1", "1,", "(1,,2)"):
        refused(typer.BadParameter, "lacks a number at one of its commas", reals, text)
    refused(typer.BadParameter, "lacks a name at one of its commas", names(("disk", "pmlf")), "disk,,pmlf")
    refused(typer.BadParameter, "holds no name", names(("disk",)), [])


def test_names_in_any_spelling_and_the_nearest_one():
    parse = one_of(lambda: ("dp_sgd", "doppler", "disk"))
    assert [parse(text) for text in ("dp-sgd", "DP_SGD", "DiSK", " doppler")] == ["dp_sgd", "dp_sgd", "disk", "doppler"]
    with pytest.raises(
        typer.BadParameter, match=r"'dopler' is unknown; did you mean doppler\? known: dp_sgd, doppler, disk"
    ):
        parse("dopler")
    refused(typer.BadParameter, r"'qqq' is unknown; known: ", parse, "qqq")


@pytest.mark.parametrize(("typed", "meant"), [
    ("dop", "doppler"), ("sgd", "dp_sgd"), ("dpsgd", "dp_sgd"), ("memff", "memf"), ("inner", "inner_outer"),
    ("adam", "dp_adam"), ("momentum", None), ("d", None), ("dp", None), ("laplace", None), ("", None), ("lion", None),
])  # fmt: skip
def test_only_what_was_probably_meant_is_suggested(typed: str, meant: str | None):
    with pytest.raises(typer.BadParameter) as caught:
        one_of(METHODS)(typed)
    assert (f"did you mean {meant}?" in caught.value.message) == (meant is not None)
    assert ("did you mean" in caught.value.message) == (meant is not None)


def test_clipping_groups():
    assert group_norms("per-layer") == "per_layer"
    assert group_norms("conv*=0.5, *=1") == group_norms({"conv*": "0.5", "*": 1}) == {"conv*": 0.5, "*": 1.0}
    refused(typer.BadParameter, "did you mean flat", group_norms, "flatt")
    refused(typer.BadParameter, "is not a number", group_norms, "conv*=big")
    refused(typer.BadParameter, "lacks a norm at one of its commas", group_norms, "a=1,,b=2")
    refused(typer.BadParameter, "has a norm without a pattern", group_norms, "=3")
