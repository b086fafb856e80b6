"""Private training on real data learns, and costs what the plan said."""

import pytest
import torch

import dpcore
import dpcore.torch
from dpcore.cli import datasets
from dpcore.torch.model.models import build
from tests.depth import chosen

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
