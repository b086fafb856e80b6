"""Remarks on data before a run: values that are not finite, inputs on another scale than models expect, no labels.

Why remarks are allowed. The guarantee is about a run's releases: parameters, statement, records. Whoever starts the run
has the data and may look at them. A remark goes to that person, as a Python warning, and changes nothing: the run
draws, sums and releases the same with it and without. It is in no statement, state or run folder. It names no value, no
place and no number of examples, so that a log that is published by mistake reveals one bit. To refuse such data would
be worse: then the existence of a run, which cannot be hidden, would depend on one example.

For the same reason nothing is said during the run: that a gradient was not finite is known of a drawn batch only.

Of a dataset some examples are read, evenly spaced, as long as that takes little time. They are read one by one under a
public seed, all generators are put back, and none is kept. One that cannot be read ends the look without a word: the
run says it when it draws that example.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data
from dpcore.torch.randomness import TRIAL

_PIECE = 1 << 22  # numbers that are looked at at once
_MOST = 1 << 28  # numbers of a tensor that are looked at, so that data larger than memory are not read for a remark
_EXAMPLES = 64  # of a dataset
_SECONDS = 0.5  # after which no further one is read
_LARGE = 20.0

_NOT_FINITE = (
    "some values are not finite (NaN or infinite). The gradient of such an example is not finite, so it counts as zero "
    "at every step and the model learns nothing of it; replace these values before training. This remark is about "
    "private data: keep it with them"
)
_UNSCALED = (
    f"its values are far from 1 in size (their root mean square is above {_LARGE:g}), as of raw pixels or raw columns; "
    "training then oscillates or stalls. Divide them by constants that are known without the data, such as 255 for "
    "pixels: means and deviations of private data are private. If the model itself scales its inputs, all is well"
)
_ROWS = 1 << 12  # targets that are looked at
_NO_LABEL = (
    "some examples have labels of -100 alone, as if cut off before their answer. The mean over none of their tokens is "
    "not finite, so they count as zero at every step. This remark is about private data: keep it with them"
)
_NO_PROBABILITIES = (
    "targets of floats under loss=cross_entropy are the probabilities of classes, and these are none (a value is "
    "negative, or a row does not add up to 1); for measured values give loss=, as torch.nn.functional.mse_loss"
)


def remarks(data: Data, loss: object = None) -> list[str]:
    """Return a sentence for each finding in data that are tensors, or in some examples of a dataset."""
    looks: dict[str, _Look] = {}
    unlabeled: set[str] = set()
    for tree in [data.tree] if data.tree is not None else _examples(data):
        inputs = {id(tensor) for tensor in batches.leaves(batches.normalize(tree)[0])}
        for name, tensor in batches.named(tree).items():
            if tensor.is_floating_point() and tensor.numel():
                # The log-probability of a whole text is far from 1, and a loss's input rather than a layer's.
                look = looks.setdefault(name, _Look(id(tensor) in inputs and "logps" not in name))
                look.add(tensor)
                if not look.of_inputs and loss is F.cross_entropy and tensor.dim() == 2 and look.finite:
                    look.probable = look.probable and _probabilities(tensor[:_ROWS])
            # In uint8 -100 would be 156.
            elif tensor.dim() > 1 and tensor.numel() and bool((tensor[:_ROWS].long() == -100).flatten(1).all(1).any()):
                unlabeled.add(name)
    sentences = [f"{name.replace('batch', 'data', 1)}: {_NO_LABEL}" for name in sorted(unlabeled)]
    for name, look in looks.items():
        path = name.replace("batch", "data", 1)
        if not look.finite:
            sentences.append(f"{path}: {_NOT_FINITE}")
        if look.of_inputs and look.numbers and math.sqrt(look.squares / look.numbers) > _LARGE:
            sentences.append(f"{path}: {_UNSCALED}")
        if look.finite and not look.probable:
            sentences.append(f"{path}: {_NO_PROBABILITIES}")
    return sentences


def _examples(data: Data) -> Iterator[Tree]:
    end = time.monotonic() + _SECONDS
    for place in data.spread(_EXAMPLES):
        try:
            yield data.batch(np.array([place]), TRIAL)
        except Exception:  # noqa: BLE001 - a user's own data set may raise anything
            return
        if time.monotonic() > end:
            return


@dataclass
class _Look:
    """Statistics of a tensor: sum and number of the squares of the finite pieces."""

    of_inputs: bool
    finite: bool = True
    probable: bool = True
    squares: float = 0.0
    numbers: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        rows = max(1, _PIECE * len(tensor) // tensor.numel())
        for start in range(0, min(len(tensor), max(rows, _MOST * len(tensor) // tensor.numel())), rows):
            piece = tensor[start : start + rows].detach()
            norm = float(torch.linalg.vector_norm(piece, dtype=torch.promote_types(piece.dtype, torch.float32)))
            if math.isfinite(norm) or bool(piece.isfinite().all()):
                self.squares += norm**2 if norm < 1e150 else math.inf
                self.numbers += piece.numel()
            else:
                self.finite = False


def _probabilities(rows: torch.Tensor) -> bool:
    sums = rows.detach().double().sum(dim=1)
    return bool((rows >= 0).all()) and bool(((sums - 1).abs() < 1e-2).all())
