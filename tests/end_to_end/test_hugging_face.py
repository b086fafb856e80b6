"""Models of transformers and peft, tiny and of random weights: their graphs beside autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dpcore.torch.gradients.errors import NotCaptured
from tests.depth import pairs
from tests.unit.torch.gradients.one_by_one import assert_same, proved, randomized

# Warnings of those packages to each other.
pytestmark = pytest.mark.filterwarnings("ignore")


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computes."""
    return output.loss


def moved(model: torch.nn.Module) -> torch.nn.Module:
    return randomized(model, torch.float32, 0.1)


WORDS, TIMES = 37, 7
MASK = torch.ones(4, TIMES, dtype=torch.long)
MASK[1, 5:] = MASK[2, 4:] = 0
BASE = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ONE_KEY = {"num_key_value_heads": 1}
SMALL = {"vocab_size": WORDS, "d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0}
GPT2 = {
    "vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

# fmt: off
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "LlamaForCausalLM": ("LlamaConfig", {**BASE, **ONE_KEY}),
    "Qwen2ForCausalLM": ("Qwen2Config", {**BASE, **ONE_KEY}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", BASE),
    "T5ForConditionalGeneration": (
        "T5Config", {**SMALL, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    ),
    "BertForSequenceClassification": ("BertConfig", {**BASE, **STILL, "num_labels": 3}),
    "RobertaForSequenceClassification": ("RobertaConfig", {**BASE, **STILL, "num_labels": 3, "pad_token_id": 1}),
    "DistilBertForSequenceClassification": ("DistilBertConfig", {
        "vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 32,
        "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3,
    }),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", {
        **BASE, **STILL, "num_labels": 3, "relative_attention": True, "position_buckets": 4, "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm", "pooler_dropout": 0.0, "pooler_hidden_size": 16,
    }),
}
# fmt: on


def built(name: str, attention: str = "eager") -> torch.nn.Module:
    """Return a model of random weights, in training mode."""
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    torch.manual_seed(0)
    config, values = MODELS[name]
    try:
        made = getattr(transformers, config)(**values, attn_implementation=attention)
        model = getattr(transformers, name)(made)
    except ValueError:
        pytest.skip(f"{name} has no attention {attention!r}")
    return moved(model.train())


def batch_of(name: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    words = torch.randint(2, WORDS, (4, TIMES))
    if "Sequence" in name:
        return {"input_ids": words, "attention_mask": MASK, "labels": torch.arange(4) % 3}
    return {"input_ids": words, "attention_mask": MASK, "labels": words.masked_fill(MASK == 0, -100)}


@pytest.mark.parametrize(
    ("name", "attention"), pairs([name for name in MODELS if "Deberta" not in name], ["eager", "sdpa"], 2)
)
def test_the_loss_that_the_model_computes(name: str, attention: str) -> None:
    assert_same(built(name, attention), own_loss, batch_of(name), sizes=(4, 2))


def test_labels_that_choose_among_the_examples_have_no_proof() -> None:
    """DeBERTa leaves out examples with negative labels: with a loss of logits its graph is proved."""
    name = "DebertaV2ForSequenceClassification"
    with pytest.raises(NotCaptured, match=r"a value decides.*modeling_deberta_v2\.py, line"):
        proved(built(name), own_loss, batch_of(name))


def of_logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def with_labels_apart(name: str) -> Any:
    inputs = batch_of(name)
    return inputs, inputs.pop("labels").clamp(min=0)


@pytest.mark.parametrize(
    "name",
    ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForSequenceClassification", "DebertaV2ForSequenceClassification"],
)
def test_a_loss_of_logits(name: str) -> None:
    assert_same(built(name), of_logits, with_labels_apart(name), sizes=(4, 1))


@pytest.mark.parametrize(("name", "reentrant"), pairs(
    ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForSequenceClassification"], [True, False], 2
))  # fmt: skip
def test_gradient_checkpoints(name: str, reentrant: bool) -> None:
    assert_same(with_checkpoints(name, reentrant), own_loss, batch_of(name), sizes=(4,))


def test_gradient_checkpoints_of_relative_places() -> None:
    """Their table passes from layer to layer; checkpoints that nest backward passes cannot follow."""
    name = "DebertaV2ForSequenceClassification"
    assert_same(with_checkpoints(name, False), of_logits, with_labels_apart(name), sizes=(4,))


def with_checkpoints(name: str, reentrant: bool) -> torch.nn.Module:
    model: Any = built(name)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompts"])
def test_adapters_of_frozen_models(kind: str) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = {
        "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", lora_dropout=0.0),
        "dora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", use_dora=True),
        "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
        "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }[kind]()
    model = peft.get_peft_model(built("LlamaForCausalLM"), config)
    assert_same(moved(model), own_loss, batch_of("LlamaForCausalLM"), sizes=(4, 1))


def test_adapters_under_gradient_checkpoints() -> None:
    """The common recipe: the frozen embedding's output is made to require gradients."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    model = peft.get_peft_model(
        built("GPT2LMHeadModel"), peft.LoraConfig(task_type="CAUSAL_LM", r=2, fan_in_fan_out=True)
    )
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    assert_same(moved(model), own_loss, batch_of("GPT2LMHeadModel"), sizes=(4,))


def test_speech() -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    still = dict.fromkeys(
        ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop"), 0.0
    )
    config = transformers.Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        num_labels=3, conv_dim=(8, 8), conv_stride=(3, 2), conv_kernel=(5, 3), num_conv_pos_embeddings=4,
        classifier_proj_size=8,
        num_conv_pos_embedding_groups=2, apply_spec_augment=False, final_dropout=0.0, **still,
    )  # fmt: skip
    torch.manual_seed(0)
    model = moved(transformers.Wav2Vec2ForSequenceClassification(config).train())
    assert_same(model, own_loss, {"input_values": torch.randn(4, 60), "labels": torch.arange(4) % 3}, sizes=(4, 1))
