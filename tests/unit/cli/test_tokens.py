"""Texts as rows of ids: what is predicted where, and that no row depends on another."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("typer")

import transformers

from dpcore.cli.compare import made_up_text
from dpcore.cli.datasets import TextDataset, load, tokens
from dpcore.cli.datasets.text import CLASSES, MASKED, NEXT, Part
from dpcore.errors import ArgumentError, DataError

pytestmark = pytest.mark.filterwarnings("ignore")  # of those packages to each other

PAD, CLS, SEP, MASK, UNK, GOOD, BAD, FILM, IS, THE = range(10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    made_up_text.model("bert-tiny", made)
    return made


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return tokens.tokenizer_of(str(folder))


def test_pairs_are_cut_padded_and_told_apart_where_the_tokenizer_does(tokenizer: Any) -> None:
    part = Part(["the film", "good film is good film"], ["bad", "the"], [1, 0])
    inputs, targets = tokens.encode(tokenizer, part, CLASSES, 7)
    assert inputs.tolist() == [[CLS, THE, FILM, SEP, BAD, SEP, PAD], [CLS, GOOD, FILM, IS, SEP, THE, SEP]]
    assert targets.tolist() == [1, 0]
    tokenizer.model_input_names = ["input_ids", "token_type_ids"]
    both, _ = tokens.encode(tokenizer, part, CLASSES, 7)
    assert both[:, 0].tolist() == inputs.tolist()
    assert both.shape == (2, 2, 7)
    alone, _ = tokens.encode(tokenizer, Part(["good"], [], [0]), CLASSES, 4)
    assert alone.tolist() == [[CLS, GOOD, SEP, PAD]]


def test_the_second_text_and_the_end_are_predicted_after_the_first(tokenizer: Any) -> None:
    part = Part(["the film", "film film film film film"], ["is good", "bad"], [])
    inputs, targets = tokens.encode(tokenizer, part, NEXT, 5)
    assert inputs.tolist() == [[THE, FILM, SEP, IS, GOOD], [FILM, FILM, FILM, FILM, SEP]]
    assert targets.tolist() == [[-100, -100, IS, GOOD, SEP], [-100, -100, -100, -100, BAD]]
    longer, ends = tokens.encode(tokenizer, part, NEXT, 7)
    assert longer[0].tolist() == [THE, FILM, SEP, IS, GOOD, PAD, PAD]
    assert ends[0].tolist() == [-100, -100, IS, GOOD, SEP, -100, -100]


def test_masks_follow_from_the_text_alone_in_the_shares_of_bert(tokenizer: Any) -> None:
    words = ["good", "bad", "film", "is"]
    part = Part([" ".join(words[(n >> k) % 4] for k in range(198)) for n in range(250)], [], [])
    inputs, targets = tokens.encode(tokenizer, part, MASKED, 200)
    fewer, fewer_targets = tokens.encode(tokenizer, Part(part.first[1:], [], []), MASKED, 200)
    np.testing.assert_array_equal(fewer, inputs[1:])
    np.testing.assert_array_equal(fewer_targets, targets[1:])
    chosen, words_at = targets != tokens.IGNORED, np.s_[:, 1:199]
    assert not chosen[:, [0, 199]].any()
    assert abs(chosen[words_at].mean() - 0.15) < 5 * np.sqrt(0.15 * 0.85 / 49_500)
    true = np.array([[CLS, *tokenizer(text, add_special_tokens=False)["input_ids"], SEP] for text in part.first])
    np.testing.assert_array_equal(inputs[~chosen], true[~chosen])
    np.testing.assert_array_equal(targets[chosen], true[chosen])
    seen, was = inputs[chosen], true[chosen]
    bound = 5 * np.sqrt(0.25 / chosen.sum())
    assert abs((seen == MASK).mean() - (0.8 + 0.1 / 15)) < bound
    # Of the tenth that becomes any of 15 tokens, one in 15 is what it was.
    assert abs((seen == was).mean() - (0.1 + 0.1 / 15)) < bound
    assert set(seen) == set(range(15))


def test_no_log_says_how_long_a_text_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    told, untold = (tokens.tokenizer_of(str(folder)) for _ in range(2))
    told.model_max_length = untold.model_max_length = 2
    logger, level = logging.getLogger("transformers"), transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    logger.addHandler(caplog.handler)
    try:
        told("the film is good")
        assert "(6 > 2)" in caplog.text
        caplog.clear()
        for task in (CLASSES, NEXT, MASKED):
            tokens.encode(untold, Part(["the film is good"], ["bad"], [0]), task, 5)
        assert caplog.text == ""
        assert transformers.logging.get_verbosity() == logging.WARNING
    finally:
        logger.removeHandler(caplog.handler)
        transformers.logging.set_verbosity(level)


def test_each_text_has_a_target(tokenizer: Any) -> None:
    part = Part(["good", "bad", "film", ""], [], [])
    assert ((tokens.encode(tokenizer, part, MASKED, 3)[1] >= 0).sum(axis=1) > 0).all()


def test_a_set_of_texts_is_loaded_by_name_and_refusals_are_one_sentence(folder: Path, tmp_path: Path) -> None:
    made_up_text.texts("mnli", tmp_path, (6, 4))
    data = load("mnli", tmp_path, str(folder), 12)
    assert isinstance(data, TextDataset)
    assert (len(data), data.shape, data.classes, data.pad, data.task) == (6, (12,), 3, PAD, CLASSES)
    assert data.tokens == 15
    assert data.tested_on(1).test_targets.tolist() == [1, 0]
    assert load("mnli", tmp_path, str(folder)).shape == (128,)
    with pytest.raises(ArgumentError, match="model_dir=None: mnli is read by a model's tokenizer"):
        load("mnli", tmp_path)
    with pytest.raises(DataError, match="no such folder; name one that has a model and its tokenizer"):
        load("mnli", tmp_path, "roberta-base")
    with pytest.raises(DataError, match="has no tokenizer in the form that transformers saves"):
        load("mnli", tmp_path, str(tmp_path))


def test_a_tokenizer_that_lacks_a_token_is_refused(tokenizer: Any) -> None:
    tokenizer.mask_token = None
    with pytest.raises(DataError, match="no token for a masked token, which these data need"):
        tokens.encode(tokenizer, Part(["good"], [], []), MASKED, 4)
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no token for the end of a text"):
        tokens.encode(tokenizer, Part(["good"], ["bad"], []), NEXT, 4)
