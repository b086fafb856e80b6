"""Preference pairs for language models: DPO and reward models, with the pair as the example.

Other libraries put the texts of B pairs into one batch of 2 B rows, all chosen ones before all rejected ones. Rows are
examples here, so each of these modules takes ``(B, 2, T)``: one row for a pair. It calls its model twice, on the chosen
and on the rejected texts, so that each call has B rows as well, and the proof holds the pairs apart.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpcore.errors import ArgumentError, ArgumentTypeError, TrainingWarning
from dpcore.spec import validate
from dpcore.torch.data.data import Data
from dpcore.torch.gradients.losses import in_float32
from dpcore.torch.model.functional import in_mode
from dpcore.torch.randomness import TRIAL

PAIRS = "An example is a pair: a chosen and a rejected text, and which of them is chosen."
"""For the statement."""


class Compared(NamedTuple):
    """What a module of pairs returns: the mean loss, in a private step each pair's own; and the pairs' margins, (B,).

    The loss is a function of the margins, which are positive where the chosen text is ahead.
    """

    loss: Tensor
    margins: Tensor


class Pairs(nn.Module):
    """A model of texts that sees them in pairs; see `DPO` and `RewardPairs`."""

    columns = ("prompt_ids", "chosen_ids", "rejected_ids")  # what TRL's collators read

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
        self.language_model = model

    def _compared(self, margins: Tensor, label_smoothing: float = 0.0) -> Compared:
        """Return ``-log sigmoid(margin)``, by a loss of torch, of which every pair gets its own."""
        wanted = torch.full_like(margins, 1 - label_smoothing)
        return Compared(F.binary_cross_entropy_with_logits(margins, wanted), margins)


class DPO(Pairs):
    """Direct preference optimization of a causal language model.

    Parameters
    ----------
    model : torch.nn.Module
        A causal model of transformers, or of peft; or one that is called alike and returns `logits`.
    beta : float
        How strongly the model is held to the reference.
    label_smoothing : float
        The share of preferences that are taken to be reversed, below 1/2.

    Notes
    -----
    The loss of a pair is -log sigmoid(m), m = beta (r(chosen) - r(rejected)), with r(y) the sum over the tokens of an
    answer y of log pi(y_t) - log pi_ref(y_t) (Rafailov et al. 2023, equation 7). With smoothing e it is
    -(1 - e) log sigmoid(m) - e log sigmoid(-m) (Mitchell 2023). It has no mean over tokens, and none over a batch.
    """

    def __init__(self, model: nn.Module, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        super().__init__(model)
        self.beta = validate.positive(beta=beta)
        if not 0 <= label_smoothing < 0.5:
            raise ArgumentError(f"label_smoothing={label_smoothing!r}: must be in [0, 1/2)")
        self.label_smoothing = float(label_smoothing)

    def forward(
        self,
        input_ids: Tensor,
        completion_mask: Tensor,
        attention_mask: Tensor | None = None,
        ref_chosen_logps: Tensor | None = None,
        ref_rejected_logps: Tensor | None = None,
        return_loss: bool = True,  # so that Trainer takes the loss although there are no labels
    ) -> Compared:
        """Compare the answers of each pair.

        Parameters
        ----------
        input_ids, completion_mask, attention_mask : (B, 2, T) tensors of integers
            Prompt and answer, the chosen one first; 1 at the answer's tokens; 0 at padding, by default nowhere.
        ref_chosen_logps, ref_rejected_logps : (B,) tensors
            The reference's log-probabilities of the answers, see `with_reference`.
        return_loss : bool
            Has no effect.
        """
        if ref_chosen_logps is None or ref_rejected_logps is None:
            raise ArgumentError(
                "ref_chosen_logps, ref_rejected_logps: must be columns of the data; dpcore.torch.preferences."
                "with_reference(model, data) adds them"
            )
        chosen, rejected = self.log_probabilities(input_ids, completion_mask, attention_mask)
        ahead = (chosen - ref_chosen_logps) - (rejected - ref_rejected_logps)
        return self._compared(self.beta * ahead, self.label_smoothing)

    def log_probabilities(
        self, input_ids: Tensor, completion_mask: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the chosen and the rejected answers, (B,) each; see `forward`."""
        if completion_mask.shape != input_ids.shape:
            raise ArgumentError("completion_mask: must have the shape of input_ids")
        labels = input_ids.masked_fill(completion_mask == 0, -100)
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]  # the token after each
        found = []
        for ids, mask, wanted in _both(input_ids, attention_mask, labels):
            logits = self.language_model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            logits = logits[:, -ids.shape[1] :]  # without a prompt that peft puts before the text
            loss = F.cross_entropy(in_float32(logits).flatten(0, 1), wanted.flatten(), reduction="none")
            found.append(-loss.view(wanted.shape).sum(1))
        return found[0], found[1]


class RewardPairs(Pairs):
    """A reward model, trained by preferences.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers for sequence classification with one label, of peft, or one that is called alike and
        returns `logits` (B, 1).

    Notes
    -----
    The loss of a pair is -log sigmoid(r(chosen) - r(rejected) - margin): Bradley and Terry's model.
    """

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        margin: Tensor | None = None,
        return_loss: bool = True,  # so that Trainer takes the loss although there are no labels
    ) -> Compared:
        """Compare the rewards of the texts of each pair.

        Parameters
        ----------
        input_ids, attention_mask : (B, 2, T) tensors of integers
            The texts, the chosen one first; 0 at padding, by default nowhere.
        margin : (B,) tensor, optional
            By how much the chosen one must be ahead, by default 0.
        return_loss : bool
            Has no effect.
        """
        rewards = [
            self.language_model(input_ids=ids, attention_mask=mask).logits
            for ids, mask in _both(input_ids, attention_mask)
        ]
        if rewards[0].shape != (len(input_ids), 1):
            raise ArgumentError(
                f"model with logits of shape {tuple(rewards[0].shape)}: must be (B, 1), one reward for each text, as "
                "with num_labels=1"
            )
        ahead = in_float32(rewards[0] - rewards[1]).squeeze(1)
        return self._compared(ahead if margin is None else ahead - margin)


def _both(input_ids: Tensor, *more: Tensor | None) -> Any:
    """Return the chosen texts of all pairs, and the rejected ones, with what else belongs to them."""
    if input_ids.dim() != 3 or input_ids.shape[1] != 2:
        raise ArgumentError(
            f"input_ids of shape (B{''.join(f', {n}' for n in input_ids.shape[1:])}): must be (B, 2, T), one row for a "
            "pair, the chosen text first; a collator of TRL becomes one by dpcore.torch.preferences.paired(collator)"
        )
    return [[None if each is None else each[:, place] for each in (input_ids, *more)] for place in (0, 1)]


def paired(collator: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Return a collate function that makes one row of each pair.

    Parameters
    ----------
    collator : callable
        As TRL's ``DataCollatorForPreference``, of DPO or of rewards: of B pairs it makes tensors of 2 B rows, the
        chosen texts first; what it gives once for a pair stays. Let it pad to a fixed length, by
        ``pad_to_multiple_of`` no shorter than any text.
    """
    return partial(_paired, collator)


def _paired(collator: Callable[[list[Any]], Any], examples: list[Any]) -> dict[str, Tensor]:
    return {
        name: value if len(value) == len(examples) else torch.stack(value.chunk(2), dim=1)
        for name, value in collator(examples).items()
    }


def with_reference(
    model: nn.Module, data: Any, collate_fn: Callable[[list[Any]], Any] | None = None, *, batch_size: int = 16
) -> Any:
    """Return data for `DPO` with two columns more, the reference's log-probabilities of the answers.

    Parameters
    ----------
    model : torch.nn.Module
        The reference: a causal model before its training, or with adapters of peft, which are disabled meanwhile.
    data : mapping of tensors, list of dicts, or datasets.Dataset
        The pairs, see `DPO.forward`.
    collate_fn : callable, optional
        For lists and datasets; see `paired`.
    batch_size : int
        Pairs that are read at a time.

    Returns
    -------
    mapping, list or datasets.Dataset
        As given, with two columns more. Those of a pair depend on this pair and on the reference alone, but for last
        digits, which may depend on how many are read at a time: not with ``batch_size=1``.

    Warns
    -----
    TrainingWarning
        If the two texts of some pair begin with different prompts, or if one has no answer. Such a sentence is about
        **private** data; it stops nothing.
    """
    dpo, adapted = DPO(model), cast("Any", model)
    source = Data(data, next(model.parameters()).device, collate_fn)
    count = math.ceil(source.length / validate.integer(minimum=1, batch_size=batch_size))
    found, remarks = list[Tensor](), set[str]()
    with torch.no_grad(), in_mode(model, False), getattr(adapted, "disable_adapter", nullcontext)():
        for places in np.array_split(np.arange(source.length), count):
            pairs = source.batch(places, TRIAL)
            if not isinstance(pairs, Mapping) or not {"input_ids", "completion_mask"} <= pairs.keys():
                raise ArgumentError("data: must have the fields input_ids and completion_mask, each (2, T) of a pair")
            given = pairs["input_ids"], pairs["completion_mask"], pairs.get("attention_mask")
            found.append(torch.stack(dpo.log_probabilities(*given)).cpu())
            remarks |= _remarks(*given)
    for remark in sorted(remarks):
        sentence = f"data: {remark}. This remark is about private data: keep it with them"
        warnings.warn(sentence, TrainingWarning, stacklevel=2)
    return _with_columns(data, dict(zip(("ref_chosen_logps", "ref_rejected_logps"), torch.cat(found, 1), strict=True)))


def _remarks(ids: Tensor, completion_mask: Tensor, attention_mask: Tensor | None = None) -> set[str]:
    answers = completion_mask.cumsum(-1) > 0
    prompts = ~answers if attention_mask is None else ~answers & (attention_mask != 0)
    found = set()
    if not all(torch.equal(a[p], b[q]) for (a, b), (p, q) in zip(ids, prompts, strict=True)):
        found.add("the texts of some pairs begin with different prompts, and DPO compares two answers to one")
    if not answers.any(-1).all():
        found.add("some texts have no answer (completion_mask is 0), as if cut off by a maximum length")
    return found


def _with_columns(data: Any, columns: Mapping[str, Tensor]) -> Any:
    if isinstance(data, Mapping):
        return {**data, **columns}
    if hasattr(data, "add_column"):
        for name, values in columns.items():
            data = data.add_column(name, values.tolist())
        return data
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return [{**example, **dict(zip(columns, row, strict=True))} for example, row in zip(data, rows, strict=True)]
