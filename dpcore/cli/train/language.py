"""Models of transformers for texts: read from a folder, with the head that the task needs, and adapters."""

import warnings
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.cli.datasets import TextDataset
from dpcore.cli.datasets.text import CLASSES, MASKED, NEXT
from dpcore.cli.datasets.tokens import IGNORED
from dpcore.cli.train.settings import PRETRAINED, Settings
from dpcore.errors import DataError, MissingPackageError
from dpcore.spec.extras import needs

# The class of transformers that makes a model for a task, and what peft calls the task.
_KINDS: Final = {
    CLASSES: ("AutoModelForSequenceClassification", "SEQ_CLS"), NEXT: ("AutoModelForCausalLM", "CAUSAL_LM"),
    MASKED: ("AutoModelForMaskedLM", None),
}  # fmt: skip

_LOCAL: Final = {"local_files_only": True, "trust_remote_code": False}

EVALUATION_BATCH: Final = 16
"""Texts at a time: a language model's output has positions times tokens numbers for each."""


class Texts(nn.Module):
    """A model of transformers as a function of rows of `TextDataset` alone.

    No position sees those with the id `pad`. It is None for models that never look to the right, where padding is: with
    GPT-2's tokenizer the end of the first text has the same id.
    """

    def __init__(self, net: Any, pad: int | None) -> None:
        super().__init__()
        self.net, self.pad = net, pad

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, classes) or (batch, positions, tokens), of (batch, [2,] positions)."""
        ids, kinds = (inputs, None) if inputs.dim() == 2 else (inputs[:, 0], inputs[:, 1].long())
        more = {} if kinds is None else {"token_type_ids": kinds}
        if self.pad is not None:
            more["attention_mask"] = (ids != self.pad).long()
        logits: torch.Tensor = self.net(input_ids=ids.long(), **more).logits
        return logits


def build(settings: Settings, dataset: TextDataset) -> nn.Module:
    """Return the model in ``settings.model_dir`` for the data's task; a new head begins by torch's global generator.

    DataError if the folder has no such model, weights that the task needs are missing there, or its positions or tokens
    are too few for the data.
    """
    try:
        import transformers
    except ImportError:
        raise MissingPackageError(needs("a pretrained model", "transformers"), name="transformers") from None
    folder, (kind, adapted) = str(settings.model_dir), _KINDS[dataset.task]
    _check_kind(transformers, settings)
    transformers.logging.set_verbosity_error()  # it would remark on each new head
    transformers.logging.disable_progress_bar()
    more = {"num_labels": dataset.classes} if dataset.task == CLASSES else {}
    try:
        net, found = getattr(transformers, kind).from_pretrained(
            folder, **_LOCAL, output_loading_info=True, dtype=torch.float32, **more
        )
    except Exception as cause:  # transformers and safetensors have many kinds
        said = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise DataError(f"model_dir={folder!r}: cannot be read by {kind} ({said})") from cause
    # Of a classifier the head is new; everything else comes from the folder.
    inner = f"{net.base_model_prefix}."
    missing = [key for key in sorted(found["missing_keys"]) if adapted != "SEQ_CLS" or key.startswith(inner)]
    if missing := [key for key in missing if ".pooler." not in key]:
        raise DataError(f"model_dir={folder!r}: lacks weights of {type(net).__name__}, such as {missing[0]}")
    _try(net, dataset, folder)
    if settings.lora is not None:
        net = _with_adapters(net, settings.lora, adapted)
    return Texts(net, None if dataset.task == NEXT else dataset.pad).train()


def _check_kind(transformers: Any, settings: Settings) -> None:
    folder, expected = str(settings.model_dir), PRETRAINED[settings.model]
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
    except Exception as cause:
        raise DataError(f"model_dir={folder!r}: has no config.json of a model that transformers knows") from cause
    found = config.model_type, getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    if expected not in (None, found):
        kind, width, layers = found
        raise DataError(
            f"model_dir={folder!r}: has a model of kind {kind}, width {width}, {layers} layers, not {settings.model}; "
            "take its folder, or --model pretrained for any"
        )


def _try(net: Any, dataset: TextDataset, folder: str) -> None:
    """Refuse a model whose tables are too short for rows of this length, or for this tokenizer."""
    length, known = dataset.shape[-1], net.get_input_embeddings().num_embeddings
    if dataset.tokens > known:  # not the texts' own largest: one private text would decide
        raise DataError(f"model_dir={folder!r}: its tokenizer has more tokens than the {known:,} of its model")
    row = torch.full((1, length), 0 if dataset.pad else 1)  # no padding: some models give that no position
    try:
        with torch.no_grad():
            net.eval()(input_ids=row)
    except (IndexError, RuntimeError) as cause:
        raise DataError(f"max_length={length}: is more than the model in {folder} takes; take fewer tokens") from cause


def _with_adapters(net: Any, rank: int, task: str | None) -> Any:
    try:
        import peft
    except ImportError:
        raise MissingPackageError(needs("--lora", "peft"), name="peft") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from one of these packages to the other
        return peft.get_peft_model(net, peft.LoraConfig(task_type=task, r=rank))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the targets of one text, (1, positions, tokens) and (1, positions)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def _accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    right = (logits.argmax(dim=-1) == targets).double()  # never where nothing is predicted
    return (right.sum(dim=1) / (targets != IGNORED).sum(dim=1)).mean()


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return (losses.sum(dim=1) / (targets != IGNORED).sum(dim=1)).mean().nan_to_num(torch.inf, torch.inf)


METRICS: Final = {"test_accuracy": _accuracy, "test_loss": _loss}
"""Of the targets of a text, then of the texts: the share of tokens found, and the loss."""
