"""Models of transformers and peft, tiny and of random weights: their graphs beside autograd."""

from typing import Any

import pytest
import torch

from dpcore.torch.gradients.errors import NotCaptured
from tests.depth import chosen, pairs
from tests.isolation import hugging_face
from tests.isolation.hugging_face import of_logits
from tests.unit.torch.gradients.one_by_one import assert_same, proved, randomized

# Warnings of those packages to each other.
pytestmark = pytest.mark.filterwarnings("ignore")

CASES = {case.name.removeprefix("hf "): case for case in hugging_face.CASES}


def built(name: str) -> tuple[Any, Any, Any]:
    """Return a model of random weights, its loss, and a batch."""
    torch.manual_seed(0)
    model, inputs, targets, loss = CASES[name].build()
    return model, loss, inputs if targets is None else (inputs, targets)


USUAL = ("gpt2 eager", "gpt2 sdpa", "llama", "t5", "bert", "distilbert")
MORE = ("llama eager", "qwen2", "bert eager", "roberta", "bert pairs", "bert tags", "bart", "vit", "whisper")


@pytest.mark.parametrize("name", chosen(USUAL, USUAL + MORE))
def test_the_loss_that_the_model_computes(name: str) -> None:
    assert_same(*built(name), sizes=(4, 2))


@pytest.mark.parametrize("name", ["gpt2 loss of logits", "bert loss of logits"])
def test_a_loss_of_logits(name: str) -> None:
    assert_same(*built(name), sizes=(4, 1))


def relative_places() -> tuple[Any, Any, Any]:
    """DeBERTa, with a loss of its logits."""
    model, _, inputs = built("deberta v2")
    return model, of_logits, (inputs, inputs.pop("labels"))


def test_labels_that_choose_among_the_examples_have_no_proof() -> None:
    """DeBERTa leaves out examples with negative labels: with a loss of logits its graph is proved."""
    with pytest.raises(NotCaptured, match=r"a value decides.*modeling_deberta_v2\.py, line"):
        proved(*built("deberta v2"))
    assert_same(*relative_places())


def checkpointed(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()


@pytest.mark.parametrize(("name", "reentrant"), pairs(["gpt2 sdpa", "llama", "bert"], [True, False], 2))
def test_gradient_checkpoints(name: str, reentrant: bool) -> None:
    model, loss, batch = built(name)
    checkpointed(model, reentrant)
    assert_same(model, loss, batch, sizes=(4,))


def test_gradient_checkpoints_of_relative_places() -> None:
    """Their table passes from layer to layer; checkpoints that nest backward passes cannot follow."""
    model, loss, batch = relative_places()
    checkpointed(model, reentrant=False)
    assert_same(model, loss, batch, sizes=(4,))


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "prompts", "lora under checkpoints"])
def test_adapters_of_frozen_models(kind: str) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = {
        "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", lora_dropout=0.0),
        "dora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", use_dora=True),
        "ia3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
        "prompts": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "lora under checkpoints": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, fan_in_fan_out=True),
    }[kind]()
    model, loss, batch = built("gpt2 sdpa" if "checkpoints" in kind else "llama")
    model = peft.get_peft_model(model, config)
    if "checkpoints" in kind:  # the common recipe: the frozen embedding's output is made to require gradients
        checkpointed(model, reentrant=True)
    assert_same(randomized(model, torch.float32, 0.1), loss, batch, sizes=(4, 1))


def test_speech() -> None:
    assert_same(*built("wav2vec2 without padding"))
