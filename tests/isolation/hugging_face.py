"""Models of transformers, tiny and of random weights, made from their configurations: nothing is downloaded.

Parameters are moved off their starting values, which are so small and so often 0 that examples could mix unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.isolation.case import BATCH, Case

Values = dict[str, Any]
Maker = Callable[[], tuple[Values, Any]]
"""Makes the examples: keyword arguments of the model, and targets or None."""

COUNT = BATCH + 1
WORDS, TIMES, CLASSES = 37, 8, 3

# ------------------------------------------------------------------------------------------------------------ examples


def words(times: int = TIMES) -> torch.Tensor:
    """Token numbers; those below 4 are left to padding and marks."""
    return torch.randint(4, WORDS, (COUNT, times))


def lengths(times: int) -> torch.Tensor:
    """Padding masks: each example has at least three tokens, and pads on the right."""
    return (torch.arange(times) < torch.randint(3, times + 1, (COUNT, 1))).long()


def text(times: int = TIMES, mask: bool = True) -> Values:
    return {"input_ids": words(times), **({"attention_mask": lengths(times)} if mask else {})}


def classified(times: int = TIMES, mask: bool = True) -> tuple[Values, Any]:
    return {**text(times, mask), "labels": torch.randint(CLASSES, (COUNT,))}, None


def pairs_of_sentences() -> tuple[Values, Any]:
    given, _ = classified()
    return {**given, "token_type_ids": (torch.arange(TIMES) > 3).long().expand(COUNT, -1).contiguous()}, None


def bare() -> tuple[Values, Any]:
    return text(), None


def ended() -> tuple[Values, Any]:
    """The last token marks the end, once."""
    ends = torch.cat([words(TIMES - 1), torch.full((COUNT, 1), 2)], 1)
    return {"input_ids": ends, "labels": torch.randint(CLASSES, (COUNT,))}, None


def regressed() -> tuple[Values, Any]:
    return {**text(), "labels": torch.randn(COUNT)}, None


def several_labels() -> tuple[Values, Any]:
    return {**text(), "labels": torch.randint(2, (COUNT, CLASSES)).float()}, None


def tagged(times: int = TIMES) -> tuple[Values, Any]:
    given = text(times)
    labels = torch.randint(CLASSES, (COUNT, times))
    return {**given, "labels": labels.masked_fill(given["attention_mask"] == 0, -100)}, None


def continued(times: int = TIMES, mask: bool = True) -> tuple[Values, Any]:
    """Next tokens: labels are the tokens, but for padding."""
    given = text(times, mask)
    labels = given["input_ids"].clone()
    return {**given, "labels": labels.masked_fill(given["attention_mask"] == 0, -100) if mask else labels}, None


def masked(times: int = TIMES, mask: bool = True) -> tuple[Values, Any]:
    """Some tokens are to be found: never the same number in all examples, but always the first."""
    given, _ = continued(times, mask)
    asked = torch.rand(COUNT, times) < 0.4
    asked[:, 0] = True
    return {**given, "labels": given["labels"].masked_fill(~asked, -100)}, None


def answered() -> tuple[Values, Any]:
    return {**text(), **{f"{end}_positions": torch.randint(TIMES, (COUNT,)) for end in ("start", "end")}}, None


def chosen(choices: int = 2) -> tuple[Values, Any]:
    mask = torch.stack([lengths(TIMES) for _ in range(choices)], 1)
    given = torch.stack([words() for _ in range(choices)], 1)
    return {"input_ids": given, "attention_mask": mask, "labels": torch.randint(choices, (COUNT,))}, None


def translated(times: int = TIMES, mask: bool = True) -> tuple[Values, Any]:
    labels = words(5)
    return {**text(times, mask), "labels": labels.masked_fill(lengths(5) == 0, -100)}, None


def apart_labels(maker: Maker) -> tuple[Values, Any]:
    """The same examples with labels as targets, for a loss of logits."""
    given, _ = maker()
    return given, given.pop("labels")


def picture(size: int = 16, channels: int = 3) -> tuple[Values, Any]:
    return {"pixel_values": torch.randn(COUNT, channels, size, size), "labels": torch.randint(CLASSES, (COUNT,))}, None


def segmented(size: int = 16) -> tuple[Values, Any]:
    labels = torch.randint(CLASSES, (COUNT, size, size))
    return {"pixel_values": torch.randn(COUNT, 3, size, size), "labels": labels}, None


def video() -> tuple[Values, Any]:
    return {"pixel_values": torch.randn(COUNT, 4, 3, 8, 8), "labels": torch.randint(CLASSES, (COUNT,))}, None


def sound(times: int = 80, mask: bool = True) -> tuple[Values, Any]:
    given: Values = {"input_values": torch.randn(COUNT, times), "labels": torch.randint(CLASSES, (COUNT,))}
    if mask:
        given["attention_mask"] = (torch.arange(times) < torch.randint(40, times + 1, (COUNT, 1))).long()
    return given, None


def unpadded() -> tuple[Values, Any]:
    return sound(mask=False)


def transcribed() -> tuple[Values, Any]:
    """Sounds with their letters, for a loss over all ways to place these in time."""
    given, _ = sound()
    return {**given, "labels": torch.randint(1, WORDS, (COUNT, 3))}, None


def features(times: int = 20, width: int = 8, name: str = "input_features") -> tuple[Values, Any]:
    return {name: torch.randn(COUNT, times, width), "labels": torch.randint(CLASSES, (COUNT,))}, None


def whisper() -> tuple[Values, Any]:
    return {"input_features": torch.randn(COUNT, 8, 16), "labels": words(5)}, None


def series() -> tuple[Values, Any]:
    past, future = 12, 4
    return {
        "past_values": torch.randn(COUNT, past),
        "past_time_features": torch.randn(COUNT, past, 1),
        "past_observed_mask": lengths(past),
        "future_values": torch.randn(COUNT, future),
        "future_time_features": torch.randn(COUNT, future, 1),
    }, None


def patched() -> tuple[Values, Any]:
    return {"past_values": torch.randn(COUNT, 12, 2), "future_values": torch.randn(COUNT, 4, 2)}, None


def boxed() -> tuple[Values, Any]:
    corners = torch.randint(0, 16, (COUNT, TIMES, 4))
    corners[..., 2:] += corners[..., :2]
    given, _ = classified()
    return {**given, "bbox": corners}, None


def paired() -> tuple[Values, Any]:
    """Words and pictures."""
    return {**text(), "pixel_values": torch.randn(COUNT, 3, 8, 8)}, None


# -------------------------------------------------------------------------------------------------------------- losses


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computes."""
    loss: torch.Tensor = output.loss
    return loss


def of_logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """A loss over classes, of whatever the labels have positions."""
    return F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def of_hidden(output: Any) -> torch.Tensor:
    """A loss of bare models without heads: no two numbers have the same weight in it."""
    hidden = output.last_hidden_state
    weights = torch.linspace(-1, 1, hidden[0].numel(), dtype=hidden.dtype).view(hidden[0].shape)
    return (hidden * weights).tanh().sum()


def of_embeds(output: Any) -> torch.Tensor:
    """The same of one vector for each example."""
    vector = next(output[name] for name in ("pooler_output", "text_embeds", "image_embeds") if name in output)
    return (vector * torch.linspace(-1, 1, vector.shape[-1])).tanh().sum()


# ------------------------------------------------------------------------------------------------------ configurations

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BASE = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
SHARED = {**BASE, "num_key_value_heads": 1}
ENCODER = {**BASE, **STILL, "num_labels": CLASSES}
EXPERTS = {**SHARED, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    "vocab_size": WORDS, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
DISTIL = {
    "vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 20, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "qa_dropout": 0.0, "num_labels": CLASSES,
}  # fmt: skip
DEBERTA = {
    **ENCODER, "relative_attention": True, "position_buckets": 4, "share_att_key": True, "pos_att_type": ["p2c", "c2p"],
    "norm_rel_ebd": "layer_norm", "pooler_dropout": 0.0, "pooler_hidden_size": 16,
}  # fmt: skip
XLNET = {
    "vocab_size": WORDS, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 20, "dropout": 0.0,
    "summary_last_dropout": 0.0,    "num_labels": CLASSES, "pad_token_id": 0, "start_n_top": 2, "end_n_top": 2,
}  # fmt: skip
XLM = {
    "vocab_size": WORDS, "emb_dim": 16, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0,
    "max_position_embeddings": 32, "num_labels": CLASSES, "pad_index": 0, "pad_token_id": 0,
    "summary_first_dropout": 0.0,
}  # fmt: skip
FUNNEL = {
    "vocab_size": WORDS, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 16, "n_head": 2, "d_head": 8,
    "d_inner": 20, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "num_labels": CLASSES,
    "pad_token_id": 0,
}  # fmt: skip
MOBILE = {**ENCODER, "embedding_size": 8, "intra_bottleneck_size": 16, "num_feedforward_networks": 2}
T5 = {
    "vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3, "num_labels": CLASSES, "classifier_dropout": 0.0,
}  # fmt: skip
BART = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "max_position_embeddings": 32,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2, "num_labels": CLASSES,
}  # fmt: skip
PICTURE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "image_size": 16,
    "patch_size": 8, "num_channels": 3, "num_labels": CLASSES, **STILL,
}  # fmt: skip
SWIN = {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4,
    "drop_path_rate": 0.0, "num_labels": CLASSES, **STILL,
}  # fmt: skip
SOUND = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20,
    "num_labels": CLASSES, "conv_dim": (8, 8), "conv_stride": (3, 2), "conv_kernel": (5, 3),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
    "classifier_proj_size": 8,
    "apply_spec_augment": False, "final_dropout": 0.0, "hidden_dropout": 0.0, "activation_dropout": 0.0,
    "attention_dropout": 0.0, "feat_proj_dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip
CLIP_TEXT = {**BASE, "projection_dim": 8}
CLIP_PICTURE = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "image_size": 8,
    "patch_size": 4, "projection_dim": 8,
}  # fmt: skip
STATE_SPACE = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 2,
    "conv_kernel": 3, "expand": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
SERIES = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3, 4], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0, "scaling": "mean",
}  # fmt: skip
PATCHES = {
    "num_input_channels": 2, "context_length": 12, "prediction_length": 4, "patch_length": 4, "patch_stride": 4,
    "d_model": 16, "num_layers": 1, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 20, "dropout": 0.0,
    "head_dropout": 0.0,
}  # fmt: skip

# --------------------------------------------------------------------------------------------------------------- cases


def build(
    model: str, config: str, values: Values, maker: Maker, loss: Any, attention: str | None, size: float
) -> tuple[nn.Module, Any, Any, Any]:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    chosen = {} if attention is None else {"attn_implementation": attention}
    made = getattr(transformers, model)(getattr(transformers, config)(**values, **chosen)).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * size)
    inputs, targets = maker()
    return made, inputs, targets, loss


def case(
    name: str,
    model: str,
    config: str,
    values: Values,
    maker: Maker,
    *,
    loss: Callable[..., torch.Tensor] = own_loss,
    attention: str | None = None,
    kind: str = "apart",
    size: float = 0.1,
) -> Case:
    return Case(f"hf {name}", partial(build, model, config, values, maker, loss, attention, size), kind)


def decoder(name: str, family: str, values: Values = SHARED, **more: Any) -> Case:
    """A causal language model, with padding on the right."""
    return case(name, f"{family}ForCausalLM", f"{family}Config", values, more.pop("maker", continued), **more)


def classifier(name: str, family: str, values: Values = ENCODER, **more: Any) -> Case:
    maker = more.pop("maker", classified)
    return case(name, f"{family}ForSequenceClassification", f"{family}Config", values, maker, **more)


def in_pictures(name: str, family: str, values: Values, **more: Any) -> Case:
    maker = more.pop("maker", picture)
    return case(name, f"{family}ForImageClassification", f"{family}Config", values, maker, **more)


def in_sounds(name: str, family: str, values: Values = SOUND, **more: Any) -> Case:
    maker = more.pop("maker", sound)
    return case(name, f"{family}ForSequenceClassification", f"{family}Config", values, maker, **more)


DECODERS = [
    case("gpt2 eager", "GPT2LMHeadModel", "GPT2Config", GPT2, continued, attention="eager"),
    case("gpt2 sdpa", "GPT2LMHeadModel", "GPT2Config", GPT2, continued, attention="sdpa"),
    case("gpt2 dropout", "GPT2LMHeadModel", "GPT2Config", {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.2}, continued),
    case("gpt2 without padding", "GPT2LMHeadModel", "GPT2Config", GPT2, partial(continued, mask=False)),
    case(
        "gpt2 loss of logits", "GPT2LMHeadModel", "GPT2Config", GPT2,
        partial(apart_labels, partial(continued, mask=False)), loss=of_logits,
    ),
    classifier("gpt2 classes", "GPT2", {**GPT2, "num_labels": CLASSES}),
    case("gpt2 tags", "GPT2ForTokenClassification", "GPT2Config", {**GPT2, "num_labels": CLASSES}, tagged),
    decoder("gpt neo", "GPTNeo", {
        "vocab_size": WORDS, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 20,
        "attention_types": [[["global", "local"], 1]], "window_size": 3, "max_position_embeddings": 32,
        "bos_token_id": 2, "eos_token_id": 3,
    }),
    decoder("gpt neox", "GPTNeoX", BASE),
    decoder("gpt j", "GPTJ", {**GPT2, "rotary_dim": 4}),
    case("opt", "OPTForCausalLM", "OPTConfig", {
        **BASE, "ffn_dim": 20, "word_embed_proj_dim": 8, "dropout": 0.1, "pad_token_id": 1,
    }, continued),
    decoder("opt layerdrop", "OPT", {
        **BASE, "ffn_dim": 20, "word_embed_proj_dim": 16, "dropout": 0.0, "pad_token_id": 1, "layerdrop": 0.5,
    }, kind="either"),
    decoder("llama", "Llama"),
    decoder("llama eager", "Llama", attention="eager"),
    classifier("llama classes", "Llama", {**SHARED, "num_labels": CLASSES}),
    case("llama answers", "LlamaForQuestionAnswering", "LlamaConfig", SHARED, answered),
    decoder("mistral", "Mistral", {**SHARED, "sliding_window": 4}),
    decoder("qwen2", "Qwen2"),
    decoder("qwen3", "Qwen3", {**SHARED, "head_dim": 8}),
    decoder("gemma", "Gemma", {**SHARED, "head_dim": 8}),
    decoder("gemma2", "Gemma2", {**SHARED, "head_dim": 8, "sliding_window": 4}),
    case("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", {**SHARED, "head_dim": 8, "sliding_window": 4}, continued),
    decoder("phi", "Phi"),
    decoder("phi3", "Phi3", {**SHARED, "resid_pdrop": 0.1}),
    decoder("bloom", "Bloom", {
        "vocab_size": WORDS, "hidden_size": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0, "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }),
    decoder("falcon", "Falcon", {**BASE, "alibi": False, "multi_query": True}),
    decoder("falcon alibi", "Falcon", {**BASE, "alibi": True, "multi_query": True, "parallel_attn": False}),
    decoder("stablelm", "StableLm"),
    decoder("starcoder2", "Starcoder2"),
    decoder("olmo", "Olmo"),
    decoder("olmo2", "Olmo2"),
    decoder("cohere", "Cohere"),
    decoder("granite", "Granite"),
    decoder("nemotron", "Nemotron"),
    decoder("glm", "Glm", {**SHARED, "head_dim": 8}),
    decoder("smollm3", "SmolLM3"),
    decoder("helium", "Helium", {**SHARED, "head_dim": 8}),
    decoder("persimmon", "Persimmon", BASE),
    decoder("biogpt", "BioGpt", {**BASE, **STILL, "activation_dropout": 0.0, "pad_token_id": 1}),
    decoder("xglm", "XGLM", {
        "vocab_size": WORDS, "d_model": 16, "num_layers": 2, "attention_heads": 2, "ffn_dim": 20, "dropout": 0.0,
        "attention_dropout": 0.0, "max_position_embeddings": 32,
    }),
    decoder("mpt", "Mpt", {"vocab_size": WORDS, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}),
    case("openai gpt", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT2, continued),
    case("ctrl", "CTRLLMHeadModel", "CTRLConfig", {**GPT2, "dff": 20}, continued),
    decoder("gpt bigcode", "GPTBigCode", GPT2),
    decoder("codegen", "CodeGen", {**GPT2, "rotary_dim": 4, "n_head": 4}),
    decoder("diff llama", "DiffLlama", {**SHARED, "num_attention_heads": 4, "num_key_value_heads": 2}),
    decoder("mamba", "Mamba", STATE_SPACE),
    decoder("mamba2", "Mamba2", {
        **STATE_SPACE, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4,
    }),
    decoder("falcon mamba", "FalconMamba", STATE_SPACE),
    # It keeps the last states, from which the next call may go on.
    decoder("recurrent gemma", "RecurrentGemma", {
        **SHARED, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4, "head_dim": 8,
    }, kind="mixer"),
    decoder("rwkv", "Rwkv", {
        "vocab_size": WORDS, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2,
        "context_length": 16, "intermediate_size": 20,
    }, maker=partial(continued, mask=False)),
    decoder("qwen3 next", "Qwen3Next", {
        **EXPERTS, "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    # Experts take the tokens that are sent to them out of all examples; a token's own result depends on no other.
    decoder("mixtral", "Mixtral", {**SHARED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    decoder("qwen2 moe", "Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 8}),
    decoder("qwen3 moe", "Qwen3Moe", {**EXPERTS, "head_dim": 8}),
    decoder("qwen3 moe batched", "Qwen3Moe", {**EXPERTS, "head_dim": 8, "experts_implementation": "batched_mm"}),
    decoder("olmoe", "Olmoe", EXPERTS),
    decoder("gpt oss", "GptOss", {
        **SHARED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
    }),
    decoder("deepseek v3", "DeepseekV3", {
        **BASE, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
    }),
    # The loss that keeps experts equally busy counts the tokens of the whole batch.
    decoder("mixtral balanced", "Mixtral", {
        **SHARED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
        "router_aux_loss_coef": 5.0,
    }, kind="mixer"),
]  # fmt: skip

ENCODERS = [
    classifier("bert", "Bert"),
    classifier("bert eager", "Bert", attention="eager"),
    classifier("bert dropout", "Bert", {**ENCODER, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}),
    classifier("bert pairs", "Bert", maker=pairs_of_sentences),
    classifier("bert loss of logits", "Bert", maker=partial(apart_labels, classified), loss=of_logits),
    classifier("bert number", "Bert", {**ENCODER, "num_labels": 1}, maker=regressed),
    classifier(
        "bert several labels", "Bert", {**ENCODER, "problem_type": "multi_label_classification"}, maker=several_labels
    ),
    case("bert tags", "BertForTokenClassification", "BertConfig", ENCODER, tagged),
    case("bert masked", "BertForMaskedLM", "BertConfig", ENCODER, masked),
    case("bert choice", "BertForMultipleChoice", "BertConfig", ENCODER, chosen),
    case("bert answers", "BertForQuestionAnswering", "BertConfig", {**BASE, **STILL}, answered),
    case("bert causal", "BertLMHeadModel", "BertConfig", {**ENCODER, "is_decoder": True}, continued),
    case("bert bare", "BertModel", "BertConfig", ENCODER, bare, loss=of_hidden),
    classifier("roberta", "Roberta", {**ENCODER, "pad_token_id": 1}),
    case("roberta masked", "RobertaForMaskedLM", "RobertaConfig", {**ENCODER, "pad_token_id": 1}, masked),
    case("roberta choice", "RobertaForMultipleChoice", "RobertaConfig", {**ENCODER, "pad_token_id": 1}, chosen),
    classifier("xlm roberta xl", "XLMRobertaXL", {**ENCODER, "pad_token_id": 1}),
    classifier("camembert", "Camembert", {**ENCODER, "pad_token_id": 1}),
    classifier("distilbert", "DistilBert", DISTIL),
    case("distilbert masked", "DistilBertForMaskedLM", "DistilBertConfig", DISTIL, masked),
    case("distilbert answers", "DistilBertForQuestionAnswering", "DistilBertConfig", {
        **DISTIL, "num_labels": 2,
    }, answered),
    classifier("albert", "Albert", {**ENCODER, "embedding_size": 8}),
    case("albert masked", "AlbertForMaskedLM", "AlbertConfig", {**ENCODER, "embedding_size": 8}, masked),
    classifier("electra", "Electra", {**ENCODER, "embedding_size": 8}),
    case("electra found out", "ElectraForPreTraining", "ElectraConfig", {**ENCODER, "embedding_size": 8}, lambda: (
        {**text(mask=False), "labels": torch.randint(2, (COUNT, TIMES))}, None
    )),
    case(
        "electra found out padded", "ElectraForPreTraining", "ElectraConfig", {**ENCODER, "embedding_size": 8},
        lambda: ({**text(), "labels": torch.randint(2, (COUNT, TIMES))}, None),
    ),
    classifier("deberta", "Deberta", DEBERTA),
    classifier("deberta loss of logits", "Deberta", DEBERTA, maker=partial(apart_labels, classified), loss=of_logits),
    classifier("deberta v2", "DebertaV2", DEBERTA),
    classifier("deberta v2 dropout", "DebertaV2", {**DEBERTA, "hidden_dropout_prob": 0.2}),
    classifier("deberta v2 logits", "DebertaV2", DEBERTA, maker=partial(apart_labels, classified), loss=of_logits),
    case("deberta v2 masked", "DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA, masked),
    classifier("xlnet", "XLNet", XLNET),
    case("xlnet tokens", "XLNetLMHeadModel", "XLNetConfig", XLNET, continued),
    classifier("xlm", "XLM", XLM),
    case("xlm tokens", "XLMWithLMHeadModel", "XLMConfig", XLM, masked),
    case("xlm answers", "XLMForQuestionAnsweringSimple", "XLMConfig", {**XLM, "num_labels": 2}, answered),
    classifier("flaubert", "Flaubert", {**XLM, "layerdrop": 0.0}),
    classifier("mpnet", "MPNet", {**ENCODER, "pad_token_id": 1}),
    classifier("funnel", "Funnel", FUNNEL),
    case("funnel masked", "FunnelForMaskedLM", "FunnelConfig", FUNNEL, masked),
    classifier("longformer", "Longformer", {**ENCODER, "attention_window": 4, "pad_token_id": 1}),
    case("longformer masked", "LongformerForMaskedLM", "LongformerConfig", {**ENCODER, "attention_window": 4}, masked),
    classifier("big bird full", "BigBird", {**ENCODER, "attention_type": "original_full"}),
    # Blocks that an example attends to are drawn by NumPy when the model is called.
    classifier("big bird sparse", "BigBird", {
        **ENCODER, "block_size": 2, "num_random_blocks": 1, "attention_type": "block_sparse",
        "max_position_embeddings": 64,
    }, maker=partial(classified, 32), kind="either"),
    classifier("convbert", "ConvBert", {
        **ENCODER, "embedding_size": 8, "conv_kernel_size": 3, "head_ratio": 2, "num_attention_heads": 4,
    }),
    classifier("fnet", "FNet", ENCODER, maker=partial(classified, mask=False)),
    case("fnet masked", "FNetForMaskedLM", "FNetConfig", ENCODER, partial(masked, mask=False)),
    classifier("canine", "Canine", {
        **ENCODER, "downsampling_rate": 2, "upsampling_kernel_size": 2, "num_hash_functions": 2, "num_hash_buckets": 16,
        "local_transformer_stride": 4,
    }, maker=partial(classified, 16)),
    classifier("nystromformer", "Nystromformer", {**ENCODER, "num_landmarks": TIMES, "segment_means_seq_len": TIMES}),
    # What its approximate inverse starts from is divided by a maximum over all examples.
    classifier("nystromformer landmarks", "Nystromformer", {
        **ENCODER, "num_landmarks": 4, "segment_means_seq_len": 8,
    }, maker=partial(classified, mask=False), kind="mixer"),
    classifier("roformer", "RoFormer", {**ENCODER, "embedding_size": 16}),
    classifier("mobilebert", "MobileBert", MOBILE),
    classifier("mobilebert layer norm", "MobileBert", {**MOBILE, "normalization_type": "layer_norm"}),
    classifier("squeezebert", "SqueezeBert", {**ENCODER, "embedding_size": 16}),
    classifier("megatron bert", "MegatronBert"),
    classifier("rembert", "RemBert", {**ENCODER, "input_embedding_size": 8, "output_embedding_size": 8}),
    # It keeps the range of the values that it saw.
    classifier("ibert", "IBert", {**ENCODER, "pad_token_id": 1}, kind="mixer"),
    classifier("modernbert", "ModernBert", {
        **BASE, "num_labels": CLASSES, "local_attention": 4, "cls_token_id": 2, "sep_token_id": 3,
    }),
    classifier("esm", "Esm", {**ENCODER, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    classifier("xmod", "Xmod", {**ENCODER, "languages": ["en"], "default_language": "en", "pad_token_id": 1}),
    classifier("luke", "Luke", {**ENCODER, "entity_vocab_size": 5, "entity_emb_size": 8, "pad_token_id": 1}),
    classifier("layoutlm", "LayoutLM", {**ENCODER, "max_2d_position_embeddings": 40}, maker=boxed),
    classifier("lilt", "Lilt", {
        **ENCODER, "max_2d_position_embeddings": 40, "channel_shrink_ratio": 2, "pad_token_id": 1, "hidden_size": 24,
    }, maker=boxed),
    classifier("yoso", "Yoso", {**ENCODER, "use_expectation": True}),
    classifier("data2vec text", "Data2VecText", {**ENCODER, "pad_token_id": 1}),
    # Its hashes are drawn when it is called, from a seed that it keeps.
    classifier("reformer", "Reformer", {
        "vocab_size": WORDS, "hidden_size": 16, "attention_head_size": 8, "num_attention_heads": 2,
        "feed_forward_size": 20, "attn_layers": ["local", "lsh"], "axial_pos_shape": [2, 4],
        "axial_pos_embds_dim": [8, 8],
        "num_buckets": 2, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "max_position_embeddings": 8,
        "num_labels": CLASSES, "is_decoder": False, "hidden_dropout_prob": 0.0,
    }, kind="either"),
]  # fmt: skip

TRANSLATORS = [
    case("t5", "T5ForConditionalGeneration", "T5Config", T5, translated),
    case("t5 dropout", "T5ForConditionalGeneration", "T5Config", {**T5, "dropout_rate": 0.1}, translated),
    case("t5 gated", "T5ForConditionalGeneration", "T5Config", {**T5, "feed_forward_proj": "gated-gelu"}, translated),
    case("t5 encoder", "T5EncoderModel", "T5Config", T5, bare, loss=of_hidden),
    case("t5 tags", "T5ForTokenClassification", "T5Config", T5, tagged),
    case("umt5", "UMT5ForConditionalGeneration", "UMT5Config", T5, translated),
    case("long t5", "LongT5ForConditionalGeneration", "LongT5Config", {
        **T5, "local_radius": 3,
    }, partial(translated, 12)),
    case("long t5 global", "LongT5ForConditionalGeneration", "LongT5Config", {
        **T5, "local_radius": 3, "encoder_attention_type": "transient-global", "global_block_size": 4,
    }, partial(translated, 12)),
    # An expert takes a limited number of an example's tokens: the first ones.
    case("switch", "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", {
        **T5, "num_experts": 2, "expert_capacity": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    }, translated),
    case("bart", "BartForConditionalGeneration", "BartConfig", BART, translated),
    case("bart dropout", "BartForConditionalGeneration", "BartConfig", {**BART, "dropout": 0.1}, translated),
    case("bart layerdrop", "BartForConditionalGeneration", "BartConfig", {
        **BART, "encoder_layerdrop": 0.5,
    }, translated, kind="either"),
    # It takes the state at the last mark of each example, which all must have.
    case("bart classes", "BartForSequenceClassification", "BartConfig", BART, ended),
    case("bart answers", "BartForQuestionAnswering", "BartConfig", {**BART, "num_labels": 2}, answered),
    case("mbart", "MBartForConditionalGeneration", "MBartConfig", BART, translated),
    case("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", BART, translated),
    case("pegasus x", "PegasusXForConditionalGeneration", "PegasusXConfig", {
        **BART, "num_global_tokens": 2, "block_size": 4, "stagger_local_blocks": True,
    }, translated),
    case("marian", "MarianMTModel", "MarianConfig", {**BART, "decoder_vocab_size": WORDS}, translated),
    case("blenderbot", "BlenderbotForConditionalGeneration", "BlenderbotConfig", BART, translated),
    case("plbart", "PLBartForConditionalGeneration", "PLBartConfig", BART, translated),
    case("m2m 100", "M2M100ForConditionalGeneration", "M2M100Config", {
        **BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    }, translated),
    case("led", "LEDForConditionalGeneration", "LEDConfig", {
        **BART, "attention_window": 4, "max_encoder_position_embeddings": 32, "max_decoder_position_embeddings": 32,
    }, translated),
    case("prophetnet", "ProphetNetForConditionalGeneration", "ProphetNetConfig", {
        "vocab_size": WORDS, "hidden_size": 16, "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "num_encoder_layers": 1,
        "num_decoder_layers": 1, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "dropout": 0.0,
        "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 32, "num_buckets": 4,
        "relative_max_distance": 8, "ngram": 2, "pad_token_id": 0,
    }, translated),
    case("fsmt", "FSMTForConditionalGeneration", "FSMTConfig", {
        **BART, "langs": ["en", "de"], "src_vocab_size": WORDS, "tgt_vocab_size": WORDS,
    }, lambda: ({**translated()[0], "decoder_input_ids": words(5)}, None)),
]  # fmt: skip

PICTURES = [
    in_pictures("vit", "ViT", PICTURE),
    in_pictures("vit eager dropout", "ViT", {**PICTURE, "hidden_dropout_prob": 0.1}, attention="eager"),
    in_pictures("vit loss of logits", "ViT", PICTURE, maker=partial(apart_labels, picture), loss=of_logits),
    case("vit painted in", "ViTForMaskedImageModeling", "ViTConfig", {**PICTURE, "encoder_stride": 8}, lambda: ({
        "pixel_values": torch.randn(COUNT, 3, 16, 16), "bool_masked_pos": torch.rand(COUNT, 4) < 0.5,
    }, None), kind="either"),
    # Patches to leave out are drawn for each example.
    case("vit mae", "ViTMAEForPreTraining", "ViTMAEConfig", {
        **PICTURE, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 20,
    }, lambda: ({"pixel_values": torch.randn(COUNT, 3, 16, 16)}, None), kind="either"),
    in_pictures("deit", "DeiT", PICTURE),
    in_pictures("beit", "Beit", {
        **PICTURE, "drop_path_rate": 0.0, "use_relative_position_bias": True, "layer_scale_init_value": 0.1,
        "out_indices": [1, 2], "out_features": None,
    }),
    in_pictures("beit depth", "Beit", {**PICTURE, "drop_path_rate": 0.3}),
    in_pictures("data2vec vision", "Data2VecVision", {**PICTURE, "drop_path_rate": 0.0}),
    in_pictures("swin", "Swin", SWIN),
    in_pictures("swin depth", "Swin", {**SWIN, "drop_path_rate": 0.3}),
    in_pictures("swin v2", "Swinv2", SWIN),
    in_pictures("convnext", "ConvNext", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": CLASSES,
    }),
    in_pictures("convnext v2", "ConvNextV2", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": CLASSES,
    }),
    in_pictures("dinov2", "Dinov2", {**PICTURE, "mlp_ratio": 2}),
    in_pictures("dinov2 registers", "Dinov2WithRegisters", {**PICTURE, "mlp_ratio": 2, "num_register_tokens": 2}),
    in_pictures("mobilevit", "MobileViT", {
        "image_size": 32, "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16],
        "num_attention_heads": 2, "patch_size": 1, "num_labels": CLASSES,
    }, maker=partial(picture, 32), kind="mixer"),
    in_pictures("resnet", "ResNet", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": CLASSES,
    }, kind="mixer"),
    in_pictures("bit", "Bit", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_groups": 2, "num_labels": CLASSES,
    }),
    in_pictures("regnet", "RegNet", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4, "num_labels": CLASSES,
    }, kind="mixer"),
    in_pictures("segformer", "Segformer", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "drop_path_rate": 0.0,
        "num_labels": CLASSES, **STILL, "classifier_dropout_prob": 0.0,
    }),
    case("segformer parts", "SegformerForSemanticSegmentation", "SegformerConfig", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
        "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "drop_path_rate": 0.0,
        "num_labels": CLASSES, **STILL, "decoder_hidden_size": 8,
    }, segmented, kind="mixer"),
    in_pictures("poolformer", "PoolFormer", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2],
        "padding": [1, 1], "drop_path_rate": 0.0, "num_labels": CLASSES,
    }),
    in_pictures("pvt", "Pvt", {
        "image_size": 16, "num_encoder_blocks": 2, "depths": [1, 1], "sequence_reduction_ratios": [2, 1],
        "hidden_sizes": [8, 16], "patch_sizes": [4, 2], "strides": [4, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "drop_path_rate": 0.0, "num_labels": CLASSES, **STILL,
    }),
    in_pictures("focalnet", "FocalNet", {
        "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "focal_levels": [1, 1],
        "focal_windows": [3, 3], "hidden_sizes": [8, 16], "drop_path_rate": 0.0, "num_labels": CLASSES,
    }),
    in_pictures("hiera", "Hiera", {
        "image_size": [16, 16], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": [3, 3],
        "patch_stride": [2, 2], "patch_padding": [1, 1], "masked_unit_size": [2, 2], "query_stride": [2, 2],
        "num_query_pool": 1, "drop_path_rate": 0.0, "num_labels": CLASSES,
    }),
    in_pictures("levit", "Levit", {
        "image_size": 32, "hidden_sizes": [8, 8, 16], "num_attention_heads": [1, 1, 2], "depths": [1, 1, 1],
        "key_dim": [4, 4, 4], "drop_path_rate": 0, "num_labels": CLASSES,
    }, maker=partial(picture, 32), kind="mixer"),
    in_pictures("ijepa", "IJepa", PICTURE),
    case("imagegpt", "ImageGPTForImageClassification", "ImageGPTConfig", {**GPT2, "num_labels": CLASSES}, lambda: (
        {"input_ids": words(), "labels": torch.randint(CLASSES, (COUNT,))}, None
    )),
    case("videomae", "VideoMAEForVideoClassification", "VideoMAEConfig", {
        **PICTURE, "image_size": 8, "patch_size": 4, "num_frames": 4, "tubelet_size": 2,
    }, video),
    case("vivit", "VivitForVideoClassification", "VivitConfig", {
        **PICTURE, "image_size": 8, "num_frames": 4, "tubelet_size": [2, 4, 4],
    }, video),
    case("timesformer", "TimesformerForVideoClassification", "TimesformerConfig", {
        **PICTURE, "image_size": 8, "patch_size": 4, "num_frames": 4,
    }, video),
    case("perceiver text", "PerceiverForSequenceClassification", "PerceiverConfig", {
        "vocab_size": WORDS, "d_model": 16, "d_latents": 16, "num_latents": 4, "num_blocks": 1,
        "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
        "max_position_embeddings": 32, "num_labels": CLASSES, "attention_probs_dropout_prob": 0.0,
    }, lambda: (
        {"inputs": words(), "attention_mask": lengths(TIMES), "labels": torch.randint(CLASSES, (COUNT,))}, None
    )),
    case("perceiver pictures", "PerceiverForImageClassificationLearned", "PerceiverConfig", {
        "image_size": 8, "d_latents": 16, "num_latents": 4, "num_blocks": 1, "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2, "num_cross_attention_heads": 1, "num_labels": CLASSES,
        "attention_probs_dropout_prob": 0.0,
    }, lambda: ({"inputs": torch.randn(COUNT, 3, 8, 8), "labels": torch.randint(CLASSES, (COUNT,))}, None)),
    case("clip words", "CLIPTextModelWithProjection", "CLIPTextConfig", CLIP_TEXT, bare, loss=of_embeds),
    case("clip pictures", "CLIPVisionModelWithProjection", "CLIPVisionConfig", CLIP_PICTURE, lambda: (
        {"pixel_values": torch.randn(COUNT, 3, 8, 8)}, None
    ), loss=of_embeds),
    case("siglip pictures", "SiglipVisionModel", "SiglipVisionConfig", CLIP_PICTURE, lambda: (
        {"pixel_values": torch.randn(COUNT, 3, 8, 8)}, None
    ), loss=of_embeds),
    case("siglip words", "SiglipTextModel", "SiglipTextConfig", CLIP_TEXT, bare, loss=of_embeds),
]  # fmt: skip

SOUNDS = [
    in_sounds("wav2vec2", "Wav2Vec2"),
    in_sounds("wav2vec2 without padding", "Wav2Vec2", maker=unpadded),
    in_sounds("wav2vec2 layer norm", "Wav2Vec2", {**SOUND, "feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    in_sounds("wav2vec2 dropout", "Wav2Vec2", {**SOUND, "hidden_dropout": 0.1}, maker=unpadded),
    # Whether a layer is left out is drawn once for the batch, by a value that decides.
    in_sounds("wav2vec2 layerdrop", "Wav2Vec2", {**SOUND, "layerdrop": 0.5}),
    in_sounds("wav2vec2 augmented", "Wav2Vec2", {**SOUND, "apply_spec_augment": True, "mask_time_length": 2}),
    case("wav2vec2 letters", "Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND, transcribed),
    in_sounds("hubert", "Hubert", maker=unpadded),
    in_sounds("wavlm", "WavLM", {**SOUND, "num_buckets": 8, "max_bucket_distance": 16}, maker=unpadded),
    in_sounds("unispeech", "UniSpeech", maker=unpadded),
    in_sounds("sew", "SEW", {**SOUND, "squeeze_factor": 2}, maker=unpadded),
    in_sounds("data2vec audio", "Data2VecAudio", {**SOUND, "conv_pos_kernel_size": 3}, maker=unpadded),
    in_sounds("wav2vec2 conformer", "Wav2Vec2Conformer", {
        **SOUND, "conv_depthwise_kernel_size": 3, "conformer_conv_dropout": 0.0,
    }, maker=unpadded, kind="mixer"),
    in_sounds("wav2vec2 bert", "Wav2Vec2Bert", {
        **SOUND, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "conformer_conv_dropout": 0.0,
    }, maker=features),
    case("whisper", "WhisperForConditionalGeneration", "WhisperConfig", {
        **BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }, whisper),
    case("whisper classes", "WhisperForAudioClassification", "WhisperConfig", {
        **BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "classifier_proj_size": 8,
    }, lambda: ({"input_features": torch.randn(COUNT, 8, 16), "labels": torch.randint(CLASSES, (COUNT,))}, None)),
    case("ast", "ASTForAudioClassification", "ASTConfig", {
        **PICTURE, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "time_stride": 4, "frequency_stride": 4,
    }, partial(features, 16, 8, "input_values")),
]  # fmt: skip

OTHERS = [
    case("time series", "TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", SERIES, series),
    case("autoformer", "AutoformerForPrediction", "AutoformerConfig", {
        **SERIES, "moving_average": 3, "label_length": 4,
    }, series, kind="either"),
    case("informer", "InformerForPrediction", "InformerConfig", {**SERIES, "distil": False}, series, kind="either"),
    case("patch tst", "PatchTSTForPrediction", "PatchTSTConfig", PATCHES, patched, kind="mixer"),
    case("patch tst layer norm", "PatchTSTForPrediction", "PatchTSTConfig", {
        **PATCHES, "norm_type": "layernorm",
    }, patched),
    case("patch mixer", "PatchTSMixerForPrediction", "PatchTSMixerConfig", PATCHES, patched),
]  # fmt: skip

CASES: list[Case] = [*DECODERS, *ENCODERS, *TRANSLATORS, *PICTURES, *SOUNDS, *OTHERS]

_HOOKS = "hooks that the model installs at its first call, to collect outputs, have other numbers later"
_BOXES = "made-up boxes may end before they begin: it takes example_batch="

_CHOICES = "the choices of all examples are numbered in one row, and a mask is looked up by these numbers"

REFUSED_WRONGLY: dict[str, str] = {
    **{
        f"hf {name}": _HOOKS
        for name in (
            "wav2vec2", "wav2vec2 without padding", "wav2vec2 layer norm", "wav2vec2 dropout", "wav2vec2 layerdrop",
            "wav2vec2 augmented", "wav2vec2 bert", "hubert", "wavlm", "unispeech", "sew", "data2vec audio",
        )
    },
    "hf switch": "a module that is given its own dtype in forward counts as a tensor's .data that is assigned",
    "hf bert choice": _CHOICES,
    "hf roberta choice": _CHOICES,
    "hf bart classes": "made-up words have no mark of the end, without which the model raises: it takes example_batch=",
    "hf layoutlm": _BOXES,
    "hf lilt": _BOXES,
}  # fmt: skip
"""Cases that are refused and should not be, and why."""
