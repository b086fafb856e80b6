"""Made-up texts in the formats of their data sets, and a tiny model of transformers with a tokenizer for them."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dpcore.cli.datasets import text
from dpcore.cli.train.settings import PRETRAINED
from dpcore.errors import MissingPackageError
from dpcore.spec.extras import needs

LENGTH: Final = 12
_WORDS: Final = ("good", "bad", "film", "is", "the", "a", "what", "food", ":", "|")
_SPECIAL: Final = ("[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]")


def texts(data: str, folder: Path, examples: Sequence[int]) -> None:
    """Write so many texts of each part: the first word tells the class, and the answer to a text."""
    names = text.FILES[data]
    if data == "arxiv":  # whose parts follow from the ids
        lines = [json.dumps({"id": f"{n:07}", "abstract": f" the {_said(n)} film"}) for n in range(sum(examples))]
        (folder / names[0]).write_text("\n".join(lines))
        return
    for name, count in zip(names, examples, strict=True):
        with (folder / name).open("w", newline="") as file:
            if data == "dart":
                json.dump([_entry(n) for n in range(count)], file)
            elif data == "e2e":
                rows = [("mr", "ref"), *((f"food[{_said(n)}]", f"the {_said(n)} food") for n in range(count))]
                csv.writer(file).writerows(rows)
            else:
                task = text.GLUE[data]
                table = [(*task.columns, task.label)]
                for n in range(count):
                    place = n % len(task.labels)
                    table.append((*(f"the {_WORDS[place]} film" for _ in task.columns), task.labels[place]))
                csv.writer(file, "excel-tab", quoting=csv.QUOTE_NONE).writerows(table)


def model(name: str, folder: Path) -> None:
    """Write a model of the kind of `PRETRAINED` with random weights, and a tokenizer of a few words."""
    try:
        import tokenizers
        import torch
        import transformers
    except ImportError:
        raise MissingPackageError(needs("a model for texts", "transformers"), name="transformers") from None
    entry = PRETRAINED[name]
    assert entry is not None
    kind, words = entry[0], {word: at for at, word in enumerate((*_SPECIAL, *_WORDS))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    marks = [(word, words[word]) for word in ("[CLS]", "[SEP]")]
    made.post_processor = tokenizers.processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", marks)
    given = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]",
        "unk_token": "[UNK]", "mask_token": "[MASK]", "model_input_names": ["input_ids", "attention_mask"]}  # fmt: skip
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **given).save_pretrained(folder)
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(words), hidden_size=8, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=16, max_position_embeddings=LENGTH + 2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2)  # fmt: skip
    torch.manual_seed(0)  # a command that goes on has the same model
    head = {"gpt2": "AutoModelForCausalLM"}.get(kind, "AutoModelForMaskedLM")
    getattr(transformers, head).from_config(config).save_pretrained(folder)


def _said(number: int) -> str:
    return _WORDS[number % 2]


def _entry(number: int) -> dict[str, Any]:
    return {"tripleset": [["film", "IS", _said(number)]], "annotations": [{"text": f"the {_said(number)} film"}]}
