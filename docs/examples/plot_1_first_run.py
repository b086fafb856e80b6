"""
A first private run
===================

A small network on the built-in digits, trained twice by the same loop: plainly, and with differential privacy at epsilon = 2. What does privacy cost in
accuracy, and how does epsilon grow while the model trains?
"""

import matplotlib.pyplot as plt
import torch

import dpcore
from dpcore.cli.datasets import load
from dpcore.torch import make_private

digits = load("digits")
inputs, labels = torch.tensor(digits.train_inputs), torch.tensor(digits.train_targets)
held_out, truth = torch.tensor(digits.test_inputs), torch.tensor(digits.test_targets)
EPOCHS, BATCH, DELTA = 15, 96, 1e-5


def network():
    torch.manual_seed(0)  # of the initial weights; the noise never has a seed
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))


@torch.no_grad()
def accuracy(model):
    return 100 * (model(held_out).argmax(1) == truth).double().mean().item()


# %%
# The plain loop
# --------------

plain, plain_curve = network(), []
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for _ in range(EPOCHS):
    for batch in torch.randperm(len(inputs)).split(BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(plain(inputs[batch]), labels[batch]).backward()
        optimizer.step()
    plain_curve.append(accuracy(plain))

# %%
# The private loop
# ----------------
# The batches, the clip and the noise are now the plan's; the noise is calibrated to the target. The model stays the caller's own.

model, curve, spent = network(), [], []
method = dpcore.methods.dp_sgd(lr=0.5, batch_size=BATCH, clipping="automatic")
private = make_private(model, (inputs, labels), method, target_epsilon=2, target_delta=DELTA, epochs=EPOCHS)
for _ in range(EPOCHS):
    for batch in private.loader:
        private.step(batch)
    curve.append(accuracy(model))
    spent.append(private.epsilon())
print(private)

# %%
# What it cost
# ------------
# Epsilon belongs to the whole run: reading it at each epoch costs nothing. Accuracy on the held-out digits, which are not part of the
# private data, costs nothing either.

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
epochs = range(1, EPOCHS + 1)
left.plot(epochs, plain_curve, "o-", label="plain SGD")
left.plot(epochs, curve, "o-", label="DP-SGD")
left.set(xlabel="epoch", ylabel="held-out accuracy, %")
left.legend()
right.plot(epochs, spent, "o-", color="C2")
right.axhline(2, color="gray", linestyle=":")
right.set(xlabel="epoch", ylabel=f"epsilon at delta = {DELTA:g}", ylim=(0, 2.2))

print(f"plain {plain_curve[-1]:.1f} %, private {curve[-1]:.1f} % at epsilon = {spent[-1]:.3f}")
assert spent[-1] <= 2

# %%
# What is guaranteed, in words:

print(private.statement().summary())
