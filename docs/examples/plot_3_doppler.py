"""
DOPPLER's spectrum
==================

DOPPLER filters what was released. Its idea is one picture: the gradient changes slowly, so its power lies at low frequencies, while the noise has the same power at
all of them. A low-pass filter keeps the first and takes away most of the second. Does a real run look like that?
"""

import matplotlib.pyplot as plt
import numpy as np
from dpcore.analysis import spectrum
from dpcore.analysis.filters import frequency_response, limiting_noise_factor

import dpcore
from dpcore.cli.datasets import load

digits = load("digits")
inputs = digits.train_inputs.reshape(len(digits.train_inputs), -1).astype(np.float64)
one_hot = np.eye(10)[digits.train_targets]


def gradient(x, indices):
    """Logistic regression's gradients, (B, 640)."""
    scores = inputs[indices] @ x.reshape(64, 10)
    scores -= scores.max(axis=1, keepdims=True)
    odds = np.exp(scores)
    errors = odds / odds.sum(axis=1, keepdims=True) - one_hot[indices]
    return (inputs[indices][:, :, None] * errors[:, None, :]).reshape(len(indices), -1)


# %%
# A run that keeps what it releases
# ---------------------------------
# ``record_gradients`` keeps the noisy averages and what the filter made of them. Both are released quantities.

STEPS, BATCH = 1200, 256
sampler = dpcore.sampling.PoissonSampler(dataset_size=len(inputs), batch_size=BATCH)
method = dpcore.methods.doppler(lr=0.2, filter="first-order v1", max_grad_norm=1.0, noise_multiplier=2.0)
result = dpcore.minimize(gradient, np.zeros(640), sampler, method, steps=STEPS, record_gradients=True)
print(f"epsilon = {result.plan.epsilon(delta=1e-5):.2f} after {STEPS} steps")

# %%
# The spectrum
# ------------
# The mechanism's noise has standard deviation s = C sigma / B in each coordinate, so its density is the constant :math:`d s^2`. Above it lies what is not the
# mechanism's noise: the gradient, and the randomness of the batches.

frequencies = np.linspace(0, 0.5, 400)
floor = spectrum.noise_floor(1.0 * 2.0 / BATCH, 640)
before, after = (
    spectrum.power_spectral_density(spectrum.autocorrelation(each, STEPS // 2), frequencies)
    for each in (result.gradients, result.filtered)
)
passed = np.abs(frequency_response(method.filter, frequencies)) ** 2

figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
axis.plot(frequencies, before, label="released gradients")
axis.plot(frequencies, after, label="after the filter")
axis.axhline(floor, color="gray", linestyle="--", label="noise floor, $d s^2$")
axis.plot(frequencies, floor * passed, color="gray", linestyle=":", label="floor times $|H(f)|^2$")
axis.set(xlabel="cycles a step", ylabel="power density", yscale="log", ylim=(floor / 1e3, None))
axis.legend()

high = frequencies > 0.25
print(f"above 0.25 cycles a step: {before[high].mean() / floor:.2f} times the floor")
assert 0.9 < before[high].mean() / floor < 1.2

# %%
# How to read it
# --------------
# To the right the released gradients lie on the noise floor: there is nothing but noise. The gradient stands out at the far left only, and that is all that the filter
# passes. In the long run it leaves this share of the noise's variance:

print(f"{limiting_noise_factor(method.filter):.3f}")
share = spectrum.share_below(spectrum.autocorrelation(result.gradients, STEPS // 2), 0.02)
print(f"share of all power below 0.02 cycles a step: {share:.2f}; of white noise: 0.04")

# %%
# The picture does not say that the model gets better. SGD adds up its gradients, and a sum is a low-pass filter, too: what the filter takes away at high
# frequencies would have averaged out anyway when the learning rate is small. :doc:`plot_4_disk` has a case where that matters.
# ``dpcore inspect gradients`` draws the same of a run folder.
