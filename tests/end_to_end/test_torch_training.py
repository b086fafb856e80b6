"""Private training on real data learns, on digits and on text, and costs what the plan said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.cli import datasets
from dpcore.methods import dp_adam
from dpcore.torch.model.models import build
from tests.depth import chosen

TEXT = (Path(__file__).parents[2] / "LICENSE").read_bytes()
LENGTH, KEY = 32, bytes(range(32))


def rows(first: int, count: int) -> dict[str, torch.Tensor]:
    """Pieces of the license, letter by letter, the last ones of each padded."""
    start = [(first + i) * 23 % (len(TEXT) - LENGTH) for i in range(count)]
    tokens = torch.tensor([list(TEXT[s : s + LENGTH]) for s in start]) % 128
    mask = (torch.arange(LENGTH)[None] < LENGTH - torch.arange(count)[:, None] % 5).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {"vocab_size": 128, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**settings, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def begun(model: nn.Module, method: Any, **options: Any) -> Any:
    options = {"loss": lambda output: output.loss, "sampling": "shuffled", "key": KEY, "exact_key": True, **options}
    return dpcore.torch.make_private(model, rows(0, 256), method, **options)


def test_a_short_run_on_real_text_learns() -> None:
    model, held_out = gpt2(), rows(5000, 32)
    run = begun(model, dp_adam(lr=0.01, noise_multiplier=0.3, batch_size=64, eps=1e-3), epochs=8)
    with torch.no_grad():
        before = model(**held_out).loss.item()
        for _ in range(8):
            for batch in run.loader:
                run.step(batch)
        after = model(**held_out).loss.item()
    assert before > 4.5
    assert after < before - 1


# Private training on real data learns, and costs what the plan said.


LEARNERS = {
    "doppler": lambda: dpcore.methods.doppler(lr=1.0, batch_size=128),
    "dp_adam": lambda: dpcore.methods.dp_adam(lr=0.02, batch_size=128),
}


@pytest.mark.parametrize("name", chosen(["dp_adam"], list(LEARNERS)))
def test_digits_are_learned_at_a_stated_epsilon(name: str) -> None:
    digits = datasets.load("digits")
    torch.manual_seed(0)
    model = build("mlp", digits.train_inputs.shape[1:], digits.classes)
    data = (digits.train_inputs, digits.train_targets)
    private = dpcore.torch.make_private(
        model, data, LEARNERS[name](), target_epsilon=8, target_delta=1e-5, epochs=15, key=bytes(32), exact_key=True
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(private.optimizer, T_max=private.plan.steps)
    for _ in range(15):
        for batch in private.loader:
            private.step(batch)
            scheduler.step()
    with torch.no_grad():
        found = model(torch.tensor(digits.test_inputs)).argmax(1)
    accuracy = (found == torch.tensor(digits.test_targets)).float().mean().item()
    assert accuracy > 0.8
    statement = private.statement()
    assert 7.9 < statement.best_epsilon <= 8
    assert statement.steps_taken == private.plan.steps
