"""Models of transformers, tiny and of random weights, made from their configurations: nothing is downloaded.

Parameters are moved off their starting values, which are so small and so often 0 that examples could mix unseen.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.isolation.models import BATCH, Case

Values = dict[str, Any]

COUNT = BATCH + 1
WORDS, TIMES, CLASSES = 37, 8, 3


def words(times: int = TIMES) -> torch.Tensor:
    """Token numbers; those below 4 are left to padding and marks."""
    return torch.randint(4, WORDS, (COUNT, times))


def lengths(times: int = TIMES) -> torch.Tensor:
    """Padding masks: each example has at least three tokens, and pads on the right."""
    return (torch.arange(times) < torch.randint(3, times + 1, (COUNT, 1))).long()


def classes(*shape: int, count: int = CLASSES) -> torch.Tensor:
    return torch.randint(count, (COUNT, *shape))


def text(times: int = TIMES, mask: bool = True, **more: Any) -> Values:
    return {"input_ids": words(times), **({"attention_mask": lengths(times)} if mask else {}), **more}


def continued(times: int = TIMES, mask: bool = True) -> Values:
    """Next tokens: labels are the tokens, but for padding."""
    given = text(times, mask)
    labels = given["input_ids"].clone()
    return {**given, "labels": labels.masked_fill(given["attention_mask"] == 0, -100) if mask else labels}


def masked(times: int = TIMES, mask: bool = True) -> Values:
    """Some tokens are to be found: never the same number in all examples, but always the first."""
    given, asked = continued(times, mask), torch.rand(COUNT, times) < 0.4
    asked[:, 0] = True
    return {**given, "labels": given["labels"].masked_fill(~asked, -100)}


def tagged() -> Values:
    given = text()
    return {**given, "labels": classes(TIMES).masked_fill(given["attention_mask"] == 0, -100)}


def translated(times: int = TIMES) -> Values:
    return text(times, labels=words(5).masked_fill(lengths(5) == 0, -100))


def boxed() -> Values:
    corners = torch.randint(0, 16, (COUNT, TIMES, 4))
    corners[..., 2:] += corners[..., :2]
    return text(labels=classes(), bbox=corners)


def picture(size: int = 16, channels: int = 3) -> Values:
    return {"pixel_values": torch.randn(COUNT, channels, size, size), "labels": classes()}


def sound(times: int = 80, mask: bool = True) -> Values:
    given: Values = {"input_values": torch.randn(COUNT, times), "labels": classes()}
    if mask:
        given["attention_mask"] = (torch.arange(times) < torch.randint(40, times + 1, (COUNT, 1))).long()
    return given


def series() -> Values:
    past, future = 12, 4
    return {
        "past_values": torch.randn(COUNT, past), "past_time_features": torch.randn(COUNT, past, 1),
        "past_observed_mask": lengths(past), "future_values": torch.randn(COUNT, future),
        "future_time_features": torch.randn(COUNT, future, 1),
    }  # fmt: skip


MAKERS: dict[str, Callable[..., Values]] = {
    "words": text, "classes": lambda times=TIMES, mask=True: text(times, mask, labels=classes()),
    "pairs": lambda: text(labels=classes(), token_type_ids=(torch.arange(TIMES) > 3).long().expand(COUNT, -1).clone()),
    "ended": lambda: {"input_ids": torch.cat([words(TIMES - 1), torch.full((COUNT, 1), 2)], 1), "labels": classes()},
    "tags": tagged, "next": continued, "masked": masked,
    "found out": lambda mask=True: text(mask=mask, labels=classes(TIMES, count=2)),
    "choice": lambda: {
        "input_ids": torch.stack([words(), words()], 1), "attention_mask": torch.stack([lengths(), lengths()], 1),
        "labels": classes(count=2),
    },
    "translated": translated, "boxes": boxed, "picture": picture,
    "unlabelled picture": lambda size: {"pixel_values": torch.randn(COUNT, 3, size, size)},
    "painted in": lambda: {
        "pixel_values": torch.randn(COUNT, 3, 16, 16), "bool_masked_pos": torch.rand(COUNT, 4) < 0.5,
    },
    "parts": lambda: {"pixel_values": torch.randn(COUNT, 3, 16, 16), "labels": classes(16, 16)},
    "video": lambda: {"pixel_values": torch.randn(COUNT, 4, 3, 8, 8), "labels": classes()},
    "inputs": lambda: {"inputs": words(), "attention_mask": lengths(), "labels": classes()}, "sound": sound,
    "letters": lambda: {**sound(), "labels": torch.randint(1, WORDS, (COUNT, 3))},  # for all ways to place them in time
    "features": lambda *shape, field="input_features": {field: torch.randn(COUNT, *shape), "labels": classes()},
    "whisper": lambda: {"input_features": torch.randn(COUNT, 8, 16), "labels": words(5)}, "series": series,
    "patches": lambda: {"past_values": torch.randn(COUNT, 12, 2), "future_values": torch.randn(COUNT, 4, 2)},
}  # fmt: skip


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model computes."""
    loss: torch.Tensor = output.loss
    return loss


def of_logits(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """A loss over classes, of whatever the labels have positions."""
    return F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())


def of_hidden(output: Any) -> torch.Tensor:
    """A loss of bare models without heads: no two numbers have the same weight in it."""
    names = ("text_embeds", "image_embeds", "last_hidden_state")
    values = next(output[name] for name in names if name in output)
    weights = torch.linspace(-1, 1, values[0].numel(), dtype=values.dtype).view(values[0].shape)
    return (values * weights).tanh().sum()


STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BASE = {
    "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
SHARED = {**BASE, "num_key_value_heads": 1}
ENCODER = {**BASE, **STILL, "num_labels": CLASSES}
OPT = {**BASE, "ffn_dim": 20, "word_embed_proj_dim": 16, "dropout": 0.1, "pad_token_id": 1}
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
    "summary_last_dropout": 0.0, "num_labels": CLASSES, "pad_token_id": 0, "start_n_top": 2, "end_n_top": 2,
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


def build(
    model: str, config: str, values: Values, make: Callable[[], Values], loss: Any, attention: str | None
) -> tuple[nn.Module, Any, Any, Any]:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    chosen = {} if attention is None else {"attn_implementation": attention}
    made = getattr(transformers, model)(getattr(transformers, config)(**values, **chosen)).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    inputs = make()
    return made, inputs, inputs.pop("labels") if loss is of_logits else None, loss


def case(
    name: str, family: str, kind_of_model: str, values: Values, maker: str, *given: Any, loss: Any = own_loss,
    attention: str | None = None, kind: str = "apart", config: str = "", **options: Any,
) -> Case:  # fmt: skip
    """A model of a family, with the examples that a maker gives for these arguments."""
    make = partial(MAKERS[maker], *given, **options)
    parts = family + kind_of_model, config or f"{family}Config", values, make, loss, attention
    return Case(f"hf {name}", partial(build, *parts), kind)


def decoder(name: str, family: str, values: Values | None = None, *, head: str = "ForCausalLM", **more: Any) -> Case:
    """A causal language model, with padding on the right."""
    return case(name, family, head, SHARED if values is None else values, "next", **more)


def classifier(
    name: str, family: str, values: Values | None = None, maker: str = "classes", *given: Any, **more: Any
) -> Case:
    return case(name, family, "ForSequenceClassification", values or ENCODER, maker, *given, **more)


def in_pictures(name: str, family: str, values: Values, *given: Any, **more: Any) -> Case:
    return case(name, family, "ForImageClassification", values, "picture", *given, **more)


def in_sounds(name: str, family: str, values: Values | None = None, **more: Any) -> Case:
    return case(name, family, "ForSequenceClassification", values or SOUND, "sound", **more)


TOP_TWO = {"num_local_experts": 4, "num_experts_per_tok": 2}
DECODERS = [
    decoder("gpt2 eager", "GPT2", GPT2, head="LMHeadModel", attention="eager"),
    decoder("gpt2 sdpa", "GPT2", GPT2, head="LMHeadModel", attention="sdpa"),
    decoder("gpt2 dropout", "GPT2", {**GPT2, "resid_pdrop": 0.1, "embd_pdrop": 0.2}, head="LMHeadModel"),
    decoder("gpt2 loss of logits", "GPT2", GPT2, head="LMHeadModel", mask=False, loss=of_logits),
    classifier("gpt2 classes", "GPT2", {**GPT2, "num_labels": CLASSES}),
    decoder("opt", "OPT", {**OPT, "word_embed_proj_dim": 8}),
    decoder("opt layerdrop", "OPT", {**OPT, "dropout": 0.0, "layerdrop": 0.5}, kind="either"),
    decoder("llama eager", "Llama", attention="eager"),
    *[decoder(family.lower(), family) for family in ("Llama", "Qwen2", "Phi", "StableLm", "Olmo2", "Cohere", "SmolLM3")],
    *[decoder(family.lower(), family, {**SHARED, "head_dim": 8}) for family in ("Qwen3", "Gemma", "Glm")],
    decoder("gemma2", "Gemma2", {**SHARED, "head_dim": 8, "sliding_window": 4}),
    decoder("falcon alibi", "Falcon", {**BASE, "alibi": True, "multi_query": True, "parallel_attn": False}),
    decoder("mpt", "Mpt", {"vocab_size": WORDS, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}),
    decoder("mamba2", "Mamba2", {**STATE_SPACE, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}),
    # It keeps the last states, from which the next call may go on.
    decoder("recurrent gemma", "RecurrentGemma", {
        **SHARED, "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 4, "head_dim": 8,
    }, kind="mixer"),
    decoder("rwkv", "Rwkv", {
        "vocab_size": WORDS, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2,
        "context_length": 16, "intermediate_size": 20,
    }, mask=False),
    decoder("qwen3 next", "Qwen3Next", {
        **EXPERTS, "head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    # Experts take the tokens that are sent to them out of all examples; a token's own result depends on no other.
    decoder("mixtral", "Mixtral", {**SHARED, **TOP_TWO}),
    decoder("qwen3 moe batched", "Qwen3Moe", {**EXPERTS, "head_dim": 8, "experts_implementation": "batched_mm"}),
    # The loss that keeps experts equally busy counts the tokens of the whole batch.
    decoder("mixtral balanced", "Mixtral", {
        **SHARED, **TOP_TWO, "output_router_logits": True, "router_aux_loss_coef": 5.0,
    }, kind="mixer"),
]  # fmt: skip

PADDED = {**ENCODER, "pad_token_id": 1}
SMALL = {**ENCODER, "embedding_size": 8}
ENCODERS = [
    classifier("bert", "Bert"),
    classifier("bert eager", "Bert", attention="eager"),
    classifier("bert pairs", "Bert", None, "pairs"),
    classifier("bert loss of logits", "Bert", loss=of_logits),
    case("bert tags", "Bert", "ForTokenClassification", ENCODER, "tags"),
    case("bert masked", "Bert", "ForMaskedLM", ENCODER, "masked"),
    case("bert choice", "Bert", "ForMultipleChoice", ENCODER, "choice"),
    decoder("bert causal", "Bert", {**ENCODER, "is_decoder": True}, head="LMHeadModel"),
    case("bert bare", "Bert", "Model", ENCODER, "words", loss=of_hidden),
    classifier("roberta", "Roberta", PADDED),
    classifier("distilbert", "DistilBert", DISTIL),
    classifier("albert", "Albert", SMALL),
    classifier("electra", "Electra", SMALL),
    case("electra found out", "Electra", "ForPreTraining", SMALL, "found out", mask=False),
    classifier("deberta v2", "DebertaV2", DEBERTA),
    decoder("xlnet tokens", "XLNet", XLNET, head="LMHeadModel"),
    classifier("longformer", "Longformer", {**PADDED, "attention_window": 4}),
    # Blocks that an example attends to are drawn by NumPy when the model is called.
    classifier("big bird sparse", "BigBird", {
        **ENCODER, "block_size": 2, "num_random_blocks": 1, "attention_type": "block_sparse",
        "max_position_embeddings": 64,
    }, "classes", 32, kind="either"),
    classifier("convbert", "ConvBert", {**SMALL, "conv_kernel_size": 3, "head_ratio": 2, "num_attention_heads": 4}),
    classifier("fnet", "FNet", mask=False),
    # What its approximate inverse starts from is divided by a maximum over all examples.
    classifier("nystromformer landmarks", "Nystromformer", {
        **ENCODER, "num_landmarks": 4, "segment_means_seq_len": 8,
    }, mask=False, kind="mixer"),
    classifier("roformer", "RoFormer", {**ENCODER, "embedding_size": 16}),
    classifier("mobilebert", "MobileBert", MOBILE),
    # It keeps the range of the values that it saw.
    classifier("ibert", "IBert", PADDED, kind="mixer"),
    classifier("modernbert", "ModernBert", {
        **BASE, "num_labels": CLASSES, "local_attention": 4, "cls_token_id": 2, "sep_token_id": 3,
    }),
    classifier("layoutlm", "LayoutLM", {**ENCODER, "max_2d_position_embeddings": 40}, "boxes"),
    classifier("yoso", "Yoso", {**ENCODER, "use_expectation": True}),
    # Its hashes are drawn when it is called, from a seed that it keeps.
    classifier("reformer", "Reformer", {
        "vocab_size": WORDS, "hidden_size": 16, "attention_head_size": 8, "num_attention_heads": 2,
        "feed_forward_size": 20, "attn_layers": ["local", "lsh"], "axial_pos_shape": [2, 4],
        "axial_pos_embds_dim": [8, 8], "num_buckets": 2, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
        "max_position_embeddings": 8, "num_labels": CLASSES, "is_decoder": False, "hidden_dropout_prob": 0.0,
    }, kind="either"),
]  # fmt: skip


def translator(name: str, family: str, values: Values = BART, *given: Any, **more: Any) -> Case:
    return case(name, family, "ForConditionalGeneration", values, "translated", *given, **more)


LONG = {**T5, "local_radius": 3}
TRANSLATORS = [
    translator("t5", "T5", T5),
    case("t5 encoder", "T5", "EncoderModel", T5, "words", loss=of_hidden),
    translator("long t5 global", "LongT5", {
        **LONG, "encoder_attention_type": "transient-global", "global_block_size": 4,
    }, 12),
    # An expert takes a limited number of an example's tokens: the first ones.
    translator("switch", "SwitchTransformers", {
        **T5, "num_experts": 2, "expert_capacity": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    }),
    *[translator(family.lower(), family) for family in ("Bart", "Pegasus", "Blenderbot")],
    translator("bart layerdrop", "Bart", {**BART, "encoder_layerdrop": 0.5}, kind="either"),
    # It takes the state at the last mark of each example, which all must have.
    classifier("bart classes", "Bart", BART, "ended"),
]  # fmt: skip

SEGFORMER = {
    **STILL, "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
    "strides": [2, 2], "drop_path_rate": 0.0, "num_labels": CLASSES, "sr_ratios": [2, 1],
    "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
}  # fmt: skip
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "num_labels": CLASSES}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": CLASSES}
MOVING = {**PICTURE, "image_size": 8, "patch_size": 4, "num_frames": 4}
PERCEIVER = {
    "d_latents": 16, "num_latents": 4, "num_blocks": 1, "num_self_attends_per_block": 1, "num_self_attention_heads": 2,
    "num_cross_attention_heads": 1, "num_labels": CLASSES, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
PICTURES = [
    in_pictures("vit", "ViT", PICTURE),
    case("vit painted in", "ViT", "ForMaskedImageModeling", {
        **PICTURE, "encoder_stride": 8,
    }, "painted in", kind="either"),
    # Patches to leave out are drawn for each example.
    case("vit mae", "ViTMAE", "ForPreTraining", {
        **PICTURE, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 20,
    }, "unlabelled picture", 16, kind="either"),
    in_pictures("beit", "Beit", {
        **PICTURE, "drop_path_rate": 0.0, "use_relative_position_bias": True, "layer_scale_init_value": 0.1,
        "out_indices": [1, 2], "out_features": None,
    }),
    in_pictures("swin", "Swin", SWIN),
    in_pictures("convnext v2", "ConvNextV2", CONVNEXT),
    in_pictures("dinov2 registers", "Dinov2WithRegisters", {**PICTURE, "mlp_ratio": 2, "num_register_tokens": 2}),
    in_pictures("resnet", "ResNet", {**RESNET, "layer_type": "basic"}, kind="mixer"),
    in_pictures("bit", "Bit", {**RESNET, "num_groups": 2}),
    in_pictures("segformer", "Segformer", {**SEGFORMER, "classifier_dropout_prob": 0.0}),
    case("segformer parts", "Segformer", "ForSemanticSegmentation", {
        **SEGFORMER, "decoder_hidden_size": 8,
    }, "parts", kind="mixer"),
    case("videomae", "VideoMAE", "ForVideoClassification", {**MOVING, "tubelet_size": 2}, "video"),
    case("timesformer", "Timesformer", "ForVideoClassification", MOVING, "video"),
    case("perceiver text", "Perceiver", "ForSequenceClassification", {
        **PERCEIVER, "vocab_size": WORDS, "d_model": 16, "num_cross_attention_heads": 2, "max_position_embeddings": 32,
    }, "inputs"),
    case("clip words", "CLIP", "TextModelWithProjection", CLIP_TEXT, "words", loss=of_hidden, config="CLIPTextConfig"),
    case("clip pictures", "CLIP", "VisionModelWithProjection", CLIP_PICTURE, "unlabelled picture", 8, loss=of_hidden,
         config="CLIPVisionConfig"),
]  # fmt: skip

MEL = {
    **BART, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
SOUNDS = [
    in_sounds("wav2vec2", "Wav2Vec2"),
    in_sounds("wav2vec2 without padding", "Wav2Vec2", mask=False),
    in_sounds("wav2vec2 layer norm", "Wav2Vec2", {**SOUND, "feat_extract_norm": "layer", "do_stable_layer_norm": True}),
    # Whether a layer is left out is drawn once for the batch, by a value that decides.
    in_sounds("wav2vec2 layerdrop", "Wav2Vec2", {**SOUND, "layerdrop": 0.5}),
    case("wav2vec2 letters", "Wav2Vec2", "ForCTC", SOUND, "letters"),
    in_sounds("hubert", "Hubert", mask=False),
    in_sounds("wavlm", "WavLM", {**SOUND, "num_buckets": 8, "max_bucket_distance": 16}, mask=False),
    case("wav2vec2 bert", "Wav2Vec2Bert", "ForSequenceClassification", {
        **SOUND, "feature_projection_input_dim": 8, "conv_depthwise_kernel_size": 3, "conformer_conv_dropout": 0.0,
    }, "features", 20, 8),
    case("whisper", "Whisper", "ForConditionalGeneration", MEL, "whisper"),
    case("ast", "AST", "ForAudioClassification", {
        **PICTURE, "patch_size": 4, "max_length": 16, "num_mel_bins": 8, "time_stride": 4, "frequency_stride": 4,
    }, "features", 16, 8, field="input_values"),
]  # fmt: skip

OTHERS = [
    case("time series", "TimeSeriesTransformer", "ForPrediction", SERIES, "series"),
    case("autoformer", "Autoformer", "ForPrediction", {
        **SERIES, "moving_average": 3, "label_length": 4,
    }, "series", kind="either"),
    case("patch tst", "PatchTST", "ForPrediction", PATCHES, "patches", kind="mixer"),
    case("patch mixer", "PatchTSMixer", "ForPrediction", PATCHES, "patches"),
]  # fmt: skip

CASES: list[Case] = [*DECODERS, *ENCODERS, *TRANSLATORS, *PICTURES, *SOUNDS, *OTHERS]

HOOKS = "hooks that the model installs at its first call, to collect outputs, have other numbers later"
OF_HOOKS = (
    "wav2vec2", "wav2vec2 without padding", "wav2vec2 layer norm", "wav2vec2 layerdrop", "wav2vec2 bert", "hubert",
    "wavlm",
)  # fmt: skip
REFUSED_WRONGLY: dict[str, str] = {
    **{f"hf {name}": HOOKS for name in OF_HOOKS},
    "hf switch": "a module that is given its own dtype in forward counts as a tensor's .data that is assigned",
    "hf bert choice": "the choices of all examples are numbered in one row, and a mask is looked up by these numbers",
    "hf bart classes": "made-up words have no mark of the end, without which the model raises: it takes example_batch=",
    "hf layoutlm": "made-up boxes may end before they begin: it takes example_batch=",
}
"""Cases that are refused and should not be, and why."""
