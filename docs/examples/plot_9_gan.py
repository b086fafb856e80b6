"""
A private GAN
=============

Made-up digits at epsilon = 5. The critic tells real from made-up images and sees private data; the generator sees the critic only, so its steps cost nothing.
"""

import os

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import dpcore
from dpcore.cli.datasets import load
from dpcore.torch import JointLoss, make_private

folder = os.environ.get("MNIST")  # of MNIST's four files, for minutes in the place of seconds
digits = load("mnist", folder) if folder else load("digits")
images, labels = torch.tensor(digits.train_inputs).flatten(1), torch.tensor(digits.train_targets)
held_out, truth = torch.tensor(digits.test_inputs).flatten(1), torch.tensor(digits.test_targets)
size, side = images.shape[1], int(images.shape[1] ** 0.5)
HIDDEN, BATCH, STEPS = (128, 1000, 1200) if folder else (48, 500, 300)

torch.manual_seed(0)  # of initial weights and made-up images; the noise never has a seed
critic = torch.nn.Sequential(torch.nn.Linear(size, HIDDEN), torch.nn.LeakyReLU(0.2), torch.nn.Linear(HIDDEN, 10))
generator = torch.nn.Sequential(
    torch.nn.Linear(26, 128), torch.nn.LeakyReLU(0.2), torch.nn.Linear(128, size), torch.nn.Sigmoid()
)


def score(pictures, classes):
    return (critic(2 * pictures - 1) * F.one_hot(classes, 10)).sum(1)


def made_up(classes):
    return generator(torch.cat([torch.randn(len(classes), 16), F.one_hot(classes, 10).float()], 1))


# %%
# The critic's step is private
# ----------------------------
# Its loss takes two passes, and each real image is paired with a made-up one of its class. The sum of both is *one* loss of *one* example: its gradient is clipped once,
# so an example moves the sum by the clip norm at most. The generator is held: a step reads its present values and leaves them alone.


def losses(pictures, classes):
    return F.softplus(-score(pictures, classes)) + F.softplus(score(made_up(classes), classes))


method = dpcore.methods.dp_adam(lr=0.003, betas=(0.5, 0.999), weight_decay=0.1, max_grad_norm=0.3, batch_size=BATCH)
game = JointLoss(losses, trained=[critic], held=[generator])
private = make_private(game, (images, labels), method, target_epsilon=5, target_delta=1e-5, steps=STEPS)

# %%
# The generator's step is post-processing
# ---------------------------------------
# It goes through the released critic, with noise and classes drawn here. No batch enters it, not even its size. What it leaves in the critic's ``grad`` is never read.

optimizer = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))


def accuracy():
    """Of a linear classifier that saw 2000 made-up images, on real ones held out."""
    classes = torch.arange(2000) % 10
    pictures, linear = made_up(classes).detach(), torch.nn.Linear(size, 10)
    fit = torch.optim.Adam(linear.parameters(), lr=0.01)
    for _ in range(150):
        fit.zero_grad()
        F.cross_entropy(linear(pictures), classes).backward()
        fit.step()
    return 100 * (linear(held_out).argmax(1) == truth).double().mean().item()


curve = {0: accuracy()}
while private.steps_taken < STEPS:
    for batch in private.loader:
        private.step(batch)
        classes = torch.randint(10, (200,))
        optimizer.zero_grad()
        F.softplus(-score(made_up(classes), classes)).mean().backward()
        optimizer.step()
        if private.steps_taken % (STEPS // 6) == 0:
            curve[private.steps_taken] = accuracy()
print(private)

# %%
# What it drew
# ------------
# Columns are classes. Held-out accuracy of a classifier that never saw a real image is the measure.

with torch.no_grad():
    drawn = F.pad(made_up(torch.arange(10).repeat(6)).reshape(6, 10, side, side), (1, 1, 1, 1))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(1.5, 1))
left.imshow(drawn.transpose(1, 2).reshape(6 * side + 12, 10 * side + 20), cmap="gray")
left.set_axis_off()
right.plot(list(curve), list(curve.values()), "o-")
right.set(xlabel="private steps", ylabel="held-out accuracy, %", ylim=(0, 100))

print(f"{curve[STEPS]:.1f} % at epsilon = {private.epsilon():.3f}; before training {curve[0]:.1f} %")
assert curve[STEPS] > 50

# %%
# The shapes are right, and vary little within a class. One more step costs epsilon; one more image does not.
#
# The same script on MNIST (``MNIST=FOLDER python plot_9_gan.py``, two minutes of one core): 77.1 % at epsilon = 4.996.
#
# .. image:: /_static/mnist-gan.png
#    :alt: Made-up digits of MNIST, six of each class, blurred and legible
