"""`PrivateTrainer` with language models: what is trained, saved and evaluated, with texts as TRL prepares them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dpcore
from dpcore.errors import ArgumentError

transformers = pytest.importorskip("transformers", exc_type=ImportError)
peft = pytest.importorskip("peft", exc_type=ImportError)
pytest.importorskip("accelerate", exc_type=ImportError)

from dpcore.torch.hosts import PrivateTrainer  # noqa: E402
from dpcore.torch.preferences import DPO, PAIRS, paired, with_reference  # noqa: E402
from tests.unit.torch.test_preferences import collator  # noqa: E402

# Warnings of those packages to each other.
pytestmark = pytest.mark.filterwarnings("ignore")

LETTERS = ["<pad>", "<eos>", *map(chr, range(32, 127))]
TIMES = 24


def model(adapters: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=TIMES, pad_token_id=0, bos_token_id=1, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(made, peft.LoraConfig(task_type="CAUSAL_LM", r=2)) if adapters else made


def trainer(folder: Path, net: Any, data: Any, held_out: Any = None, **options: Any) -> Any:
    given = {"num_train_epochs": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    if held_out is not None:
        given |= {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    return PrivateTrainer(
        net, transformers.TrainingArguments(str(folder), **given), train_dataset=data, eval_dataset=held_out,
        method=dpcore.methods.dp_adam(lr=0.01, batch_size=8, noise_multiplier=1.0), target_delta=1e-3, **options,
    )  # fmt: skip


def questions(count: int) -> list[dict[str, Any]]:
    """Prompts and answers of several lengths, tokenized, padded, and masked."""
    rows = []
    for i in range(count):
        prompt, answer = [5] * (3 + i % 4), [*[6 + i % 3] * (1 + i % 5), 1]
        left = TIMES - len(prompt) - len(answer)
        rows.append({
            "input_ids": prompt + answer + [0] * left, "attention_mask": [1] * (TIMES - left) + [0] * left,
            "labels": [-100] * len(prompt) + answer + [-100] * left,
        })  # fmt: skip
    return rows


def test_an_adapter_is_tuned_saved_read_again_and_writes(tmp_path: Path):
    found = trainer(tmp_path / "run", model(adapters=True), questions(16), questions(24)[16:])
    found.train()
    assert found.private.explain().way == "pairs"
    found.save_model(str(tmp_path / "out"))
    back = peft.PeftModel.from_pretrained(model(), str(tmp_path / "out"))
    for name, value in back.named_parameters():
        assert torch.equal(value, found.model.get_parameter(name))
        assert value.any() or "lora_B" not in name
    prompt = torch.full((1, 3), 5)
    written = back.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    assert written.shape[1] > 3
    assert (tmp_path / "out/statement.txt").exists()


def preferences(count: int) -> list[dict[str, Any]]:
    answers = {"rejected_ids": [7, 8], "text": "no column"}
    return [{"prompt_ids": [5] * (1 + i % 3), "chosen_ids": [6] * (1 + i % 4), **answers} for i in range(count)]


def test_pairs_are_trained_evaluated_and_saved_as_the_model_inside(tmp_path: Path):
    net, joined = model(), paired(partial(collator, length=TIMES))
    data = with_reference(net, preferences(24), joined)
    module = DPO(net)
    before = module(**joined(data[16:])).loss.item()
    found = trainer(tmp_path / "run", module, data[:16], data[16:], data_collator=joined)
    found.train()
    found.save_model(str(tmp_path / "out"))
    assert found.model is module
    assert PAIRS in found.private.statement().caveats
    for folder in (tmp_path / "out", found.state.best_model_checkpoint):
        back = transformers.LlamaForCausalLM.from_pretrained(folder)
        for name, value in net.named_parameters():
            assert torch.equal(value, back.get_parameter(name))
    after = found.evaluate()["eval_loss"]
    assert after == pytest.approx(DPO(back)(**joined(data[16:])).loss.item(), rel=1e-5)
    assert before == pytest.approx(0.6931, abs=1e-4)
    assert after != pytest.approx(before, abs=1e-4)


def test_texts_that_a_collator_joins_to_one_row_are_refused(tmp_path: Path):
    joined = transformers.DefaultDataCollator()
    joined.padding_free = True
    with pytest.raises(ArgumentError, match="padding_free=True: must give every text its own row"):
        trainer(tmp_path, model(), questions(8), data_collator=joined)
    packed = [{**one, "seq_lengths": [4, TIMES - 4]} for one in questions(8)]
    with pytest.raises(ArgumentError, match="several packed texts"):
        trainer(tmp_path, model(), packed).train()
