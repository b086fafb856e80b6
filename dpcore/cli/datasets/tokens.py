"""Texts to arrays of token ids, by the tokenizer in the folder of a model.

Every row is a function of its own text alone: with an example more or less the others are the same, bit for bit, the
tokens that are masked, too.
"""

from collections.abc import Iterator, Sequence
from hashlib import shake_256
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpcore.cli.datasets.text import CLASSES, MASKED, NEXT, Part
from dpcore.errors import DataError, MissingPackageError
from dpcore.spec.extras import needs
from dpcore.spec.silence import silence

IGNORED: Final = -100
"""Target of a position at which nothing is predicted, as cross-entropy of torch has it."""
MASKED_SHARE: Final = 0.15
"""Of the tokens; of these 80 % become the mask, 10 % another token and 10 % stay (Devlin et al., 2019, 3.1)."""
_ROWS = 10_000
_Ids = npt.NDArray[np.int32]
_Targets = npt.NDArray[np.int64]


def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer that transformers saved in a folder."""
    if not Path(folder).is_dir():
        raise DataError(f"model_dir={folder!r}: no such folder; name one that has a model and its tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingPackageError(needs("a data set of texts", "transformers"), name="transformers") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as cause:  # transformers and tokenizers have many kinds
        raise DataError(f"model_dir={folder!r}: has no tokenizer in the form that transformers saves") from cause


def encode(tokenizer: Any, part: Part, task: str, length: int) -> tuple[_Ids, _Targets]:
    """Return the inputs, (n, length), and the targets of a part: its classes, (n,), or ids, (n, length), for a task.

    A pair of texts has two rows of inputs, (n, 2, length), if the tokenizer tells the kinds of tokens. Longer texts are
    cut; shorter ones end with the id of `pad_of`.
    """
    with silence():  # transformers logs how long a text is that no model could read whole
        return {CLASSES: _classes, NEXT: _next, MASKED: _masked}[task](tokenizer, part, length)


def pad_of(tokenizer: Any) -> int:
    """Return the id that fills rows; a tokenizer without one, as GPT-2's, ends texts with it, too."""
    found = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return int(_there(found, "padding or the end"))


def most_tokens(tokenizer: Any) -> int:
    """Return the number that is above every id of a tokenizer."""
    return 1 + max(map(int, tokenizer.get_vocab().values()))


def _called(tokenizer: Any, given: Sequence[list[str]], length: int) -> Iterator[Any]:
    for first in range(0, len(given[0]), _ROWS):
        yield tokenizer(*(texts[first : first + _ROWS] for texts in given), truncation=True, max_length=length,
            padding="max_length", return_special_tokens_mask=True, return_tensors="np")  # fmt: skip


def _classes(tokenizer: Any, part: Part, length: int) -> tuple[_Ids, _Targets]:
    given = [part.first, part.second] if part.second else [part.first]
    kinds = ["token_type_ids"] if part.second and "token_type_ids" in tokenizer.model_input_names else []
    called = _called(tokenizer, given, length)
    inputs = np.concatenate([np.stack([found[key] for key in ("input_ids", *kinds)], 1) for found in called])
    inputs = inputs.astype(np.int32)
    return inputs if kinds else inputs[:, 0], np.array(part.classes, np.int64)


def _next(tokenizer: Any, part: Part, length: int) -> tuple[_Ids, _Targets]:
    """Encode first text, end, second text, end; targets are the ids of the second text, and the end."""
    end, pad = int(_there(tokenizer.eos_token_id, "the end of a text")), pad_of(tokenizer)
    inputs = np.full((len(part.first), length), pad, np.int32)
    targets = np.full(inputs.shape, IGNORED, np.int64)
    for row, (first, second) in enumerate(zip(part.first, part.second, strict=True)):
        # A first text of any length leaves room for one target.
        prompt, answer = (tokenizer(f" {text}", add_special_tokens=False)["input_ids"] for text in (first, second))
        begin = min(len(prompt), length - 1)
        ids = [*prompt[:begin], end, *answer, end][: length + 1]
        inputs[row, : len(ids) - 1], targets[row, begin : len(ids) - 1] = ids[:-1], ids[begin + 1 :]
    return inputs, targets


def _masked(tokenizer: Any, part: Part, length: int) -> tuple[_Ids, _Targets]:
    """Mask tokens by a hash of the text: once, and not anew in each epoch."""
    mask, row = int(_there(tokenizer.mask_token_id, "a masked token")), 0
    inputs = np.empty((len(part.first), length), np.int32)
    targets = np.full(inputs.shape, IGNORED, np.int64)
    for found in _called(tokenizer, [part.first], length):
        for ids, special in zip(found["input_ids"], found["special_tokens_mask"].astype(bool), strict=True):
            words = np.frombuffer(shake_256(part.first[row].encode()).digest(8 * length), "<u4") / 2.0**32
            pick, kind = words[:length] + special, words[length:]
            # The least of all, too: a text without a target has no gradient.
            chosen = (pick < MASKED_SHARE) | (pick == pick.min())
            other = ((kind - 0.8) * 10 * len(tokenizer)).astype(np.int64)
            inputs[row] = np.where(chosen & (kind < 0.9), np.where(kind < 0.8, mask, other), ids)
            targets[row, chosen] = ids[chosen]
            row += 1
    return inputs, targets


def _there(found: Any, what: str) -> Any:
    if found is None:
        raise DataError(f"model_dir: its tokenizer has no token for {what}, which these data need; take another model")
    return found
