"""What is mistyped in a call of a method is answered by name, with what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.methods import METHODS
from dpcore.stages.strategies import check_steps, from_matrix


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: methods.disk(lr=0.1, gama=0.5), ArgumentError, "did you mean 'gamma'?"),
        (lambda: methods.doppler(lr=0.1, base="adam", filtr="f1"), ArgumentError, "did you mean 'filter'?"),
        (lambda: methods.dp_adam(lr=0.1, base="sgd"), ArgumentError, "keyword of dp_adam()='base'"),
        (lambda: methods.inner_outer(lr=0.1, outer_momentum=1.0), ArgumentError, "outer_momentum=1.0"),
        (lambda: methods.doppler(lr=0.1, b=1.0, a=[]), ArgumentTypeError, "b=1.0: must be a sequence of numbers"),
        (lambda: methods.doppler(lr=0.1, b="1", a=[]), ArgumentTypeError, "b='1': must be a sequence of numbers"),
        (lambda: methods.dp_adam(lr=0.1, betas=0.9), ArgumentTypeError, "betas=0.9: must be a sequence of numbers"),
        (lambda: methods.doppler(lr=0.1, base="adam", betas=0.9), ArgumentTypeError, "betas=0.9: must be a sequence"),
        (
            lambda: methods.dp_adam(lr=0.1, variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=0),
            ArgumentError,
            "scaled_steps=0",
        ),
        (lambda: methods.memf(lr=0.1, strategy=np.zeros((3, 3))), ArgumentError, "0: the matrix is singular; take"),
        (lambda: methods.memf(lr=0.1, strategy=-np.eye(3)), ArgumentError, "greater than 0: multiply that row by -1"),
    ],
)
def test_one_sentence_names_the_argument(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)
    assert ";," not in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_unknown_keywords_are_refused_by_every_method(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"keyword of .*='nonsense'"):
        METHODS[name](lr=0.1, nonsense=1)


def test_a_matrix_of_too_few_rows_is_not_taken_for_a_named_strategy() -> None:
    with pytest.raises(ArgumentError, match=r"the strategy \(banded\) has 3 rows"):
        check_steps(from_matrix(np.eye(3)), 4)
