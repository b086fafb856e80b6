"""
Private fine-tuning with LoRA
=============================

The noise of a private step has a norm that grows with the root of the number of trained parameters. So fine-tuning trains few of them: a small vision transformer is
trained on public data first, and then adapted to private data through LoRA. Nothing is downloaded: the model is made here, with random weights, and
both parts are taken from the built-in digits. Public is one half of the training set; private is the other half, as another scanner would deliver it, with light and dark exchanged.
"""

import copy
import warnings

import matplotlib.pyplot as plt
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import ViTConfig, ViTForImageClassification
from transformers.utils import logging

import dpcore
from dpcore.cli.datasets import load
from dpcore.cli.intervals import mean_interval
from dpcore.torch import make_private

logging.set_verbosity_error()
EPSILON, DELTA, EPOCHS, BATCH = 3.0, 1e-4, 6, 96


class Scores(torch.nn.Module):
    """The model with its scores as output, so that the loss is a plain cross entropy."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return self.model(pixel_values=pixels).logits


def vision_transformer():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


digits = load("digits")
train, train_labels = torch.tensor(digits.train_inputs), torch.tensor(digits.train_targets)
test, test_labels = torch.tensor(digits.test_inputs), torch.tensor(digits.test_targets)
half = len(train) // 2
public = train[:half], train_labels[:half]
secret = 1 - train[half:], train_labels[half:]
held_out = 1 - test, test_labels
print(f"{len(public[0])} public and {len(secret[0])} private examples")


@torch.no_grad()
def accuracy(model):
    model.eval()
    return 100 * (model(held_out[0]).argmax(1) == held_out[1]).double().mean().item()


# %%
# Public training
# ---------------
# Plain AdamW on the public digits. No privacy is spent here.

backbone = vision_transformer()
optimizer = torch.optim.AdamW(backbone.parameters(), lr=2e-3)
for _ in range(25):
    for batch in torch.randperm(len(public[0])).split(64):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(backbone(public[0][batch]).logits, public[1][batch]).backward()
        optimizer.step()

before = accuracy(Scores(backbone))
print(f"on the other scanner's digits, before any private training: {before:.1f} %")

# %%
# Private training, three ways
# ----------------------------
# The same method, the same two learning rates tried, the same epsilon. *From scratch* trains everything from random weights, *all* continues with every weight of
# the public model, *LoRA* adds matrices of rank 4 to the attention and trains them with a new head, which *all* has, too.


def with_fresh_head():
    model = copy.deepcopy(backbone)
    torch.manual_seed(1)
    model.classifier.reset_parameters()
    return model


def from_scratch():
    return Scores(vision_transformer())


def all_weights():
    return Scores(with_fresh_head())


def lora():
    projections = [
        name for name, part in backbone.named_modules() if name.endswith(("q_proj", "v_proj", "query", "value"))
    ]
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=projections, modules_to_save=["classifier"])
    return Scores(get_peft_model(with_fresh_head(), config))


def trained(make, rate):
    model = make()
    method = dpcore.methods.dp_adam(lr=rate, batch_size=BATCH, clipping="automatic")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dpcore.errors.SpeedWarning)
        private = make_private(model, secret, method, target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS)
    for _ in range(EPOCHS):
        for batch in private.loader:
            private.step(batch)
    assert private.epsilon() <= EPSILON
    return accuracy(model), private


RATES, WAYS = (0.005, 0.03), {"from scratch": from_scratch, "all weights": all_weights, "LoRA": lora}
found = {}
for name, make in WAYS.items():
    count = sum(weight.numel() for weight in make().parameters() if weight.requires_grad)
    rate = max(RATES, key=lambda rate: trained(make, rate)[0])
    found[name] = count, mean_interval([trained(make, rate)[0] for _ in range(3)])
    print(
        f"{name:13} {count:6d} parameters, rate {rate}: {found[name][1].center:.1f} ± {found[name][1].half_width:.1f} %"
    )

# %%

figure, axis = plt.subplots(figsize=(6, 3.2), layout="constrained")
for number, (_, interval) in enumerate(found.values()):
    axis.barh(number, interval.center, xerr=interval.half_width, capsize=4, color=f"C{number}")
axis.set_yticks(range(len(found)), [f"{name}\n{count:,} trained" for name, (count, _) in found.items()])
axis.set(xlabel=f"held-out accuracy, %, epsilon = {EPSILON:g}; 95 % over three runs", xlim=(0, 100))
axis.axvline(before, color="gray", linestyle=":")

# %%
# Three runs give wide intervals. Starting from the public model is what helps; between LoRA and all weights they do not decide, though LoRA trains a ninth of the parameters.
#
# What a step does with such a model: the rule by which each tensor's gradients are clipped, and its memory.

_, private = trained(lora, 0.01)
print(private.explain())
assert np.isfinite(private.epsilon())

# %%
# The rates were searched on the held-out digits, with runs that no statement counts: the digits are public. On private data a sweep is charged to a
# ledger: :doc:`plot_6_ledger`.
