"""
A filter of your own
====================

A filter works on gradients that are released already, so it costs no privacy and any may be tried. Here is one that the library does not have: the mean of
all gradients while there are few of them, and a forgetting average later. It needs no base class and no registration.

.. math:: y_t = y_{t-1} + k_t\\,(g_t - y_{t-1}), \\qquad k_t = \\max\\left(\\frac{1}{t+1}, k\\right)
"""

from dataclasses import dataclass
from typing import ClassVar

import matplotlib.pyplot as plt
import numpy as np
from dpcore.analysis.filters import noise_factor, weights
from dpcore.filters import Averaging

import dpcore
from dpcore.spec.ops import FilterCoefficients


@dataclass(frozen=True)
class MeanThenForget:
    """The running mean until its weight has fallen to `least`, then an average that forgets at that rate."""

    least: float
    order: ClassVar[int] = 1
    adaptive: ClassVar[bool] = False

    def gain(self, step):
        return max(1 / (step + 1), self.least)

    def coefficients(self, step):
        # `a` of step t acts inside the output of step t + 1, whose old value keeps 1 - k_{t+1}.
        return (FilterCoefficients(b=(self.gain(step),), a=(self.gain(step + 1) - 1,)),)


mine, fixed = MeanThenForget(0.1), Averaging(0.1)

# %%
# What it does, before any run
# ----------------------------
# ``weights`` is the matrix by which gradients become outputs, and ``noise_factor`` the share of the noise's variance that is left. A fixed average begins with the
# first gradient and forgets its noise slowly; ours uses every gradient alike at first.

STEPS = 60
matrix = weights(mine, STEPS)
by_hand, y = [], 0.0
for t in range(STEPS):  # the formula above, on an impulse at step 3
    y += mine.gain(t) * ((t == 3) - y)
    by_hand.append(y)
assert np.allclose(matrix[:, 3], by_hand)

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
for step in (2, 8, 40):
    left.plot(range(step + 1), matrix[step, : step + 1], "o-", markersize=3, label=f"output of step {step}")
left.set(xlabel="gradient of step", ylabel="weight")
left.legend()
for name, chosen in {"the mean that forgets": mine, "fixed average, weight 0.1": fixed}.items():
    right.plot(noise_factor(chosen, STEPS), label=name)
right.set(xlabel="step", ylabel="share of the noise's variance left", yscale="log")
right.legend()

# %%
# In a private run
# ----------------
# It goes into a method like any other part. The epsilon is the same with and without it; the statement knows that a filter follows the release.

rng = np.random.default_rng(0)
truth = rng.standard_normal(20)
features = rng.standard_normal((4000, 20)) / np.sqrt(20)
targets = features @ truth + 0.1 * rng.standard_normal(4000)
sampler = dpcore.sampling.PoissonSampler(dataset_size=4000, batch_size=400)


def gradient(x, indices):
    return (features[indices] @ x - targets[indices])[:, None] * features[indices]


def distances(chosen):
    method = dpcore.Method(
        clip=dpcore.Clip(max_grad_norm=1.0),
        noise=dpcore.noise.IndependentGaussian(noise_multiplier=3.0),
        filter=chosen,
        update=dpcore.updates.SGD(lr=4.0),
    )
    found = [dpcore.minimize(gradient, np.zeros(20), sampler, method, steps=STEPS, record=True) for _ in range(8)]
    epsilon = found[0].plan.epsilon(delta=1e-5)
    return np.mean([np.linalg.norm(each.path - truth, axis=1) for each in found], axis=0), epsilon


figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for name, chosen in {
    "no filter": dpcore.filters.Identity(),
    "fixed average": fixed,
    "the mean that forgets": mine,
}.items():
    distance, epsilon = distances(chosen)
    axis.plot(distance, label=name)
    print(f"{name:22} epsilon {epsilon:.3f}, distance at the end {distance[-1]:.2f}")
axis.set(xlabel="step", ylabel="distance to the solution, mean of 8 runs")
axis.legend()

# %%
# At this learning rate both filters delay the gradient so much that the run swings, ours less than the other, and the run without a filter ends no worse. Whether a filter helps depends
# on the rate, which this page did not search: it shows how one is written and tried.
# :doc:`plot_4_disk` compares methods as one should.
