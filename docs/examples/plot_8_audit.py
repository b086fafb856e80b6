"""
Auditing a bug
==============

A proof says what the code should do; an audit looks at what it does. It puts canaries through the real step, lets an adversary guess which of them took part, and turns the guesses
into a lower bound on epsilon. Here a mechanism adds half of the noise that its plan promises. Does the audit notice, and how small a mistake can it still see?
"""

import matplotlib.pyplot as plt

import dpcore
from dpcore.audit import audit
from dpcore.mechanism.mechanism import Mechanism
from dpcore.sampling import FixedOrderSampler

sampler = FixedOrderSampler(dataset_size=200, batch_size=50)
method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=4.0)

# %%
# The honest mechanism
# --------------------

honest = audit(method, sampler, 8, delta=1e-5)
print(honest)

# %%
# The bug
# -------
# A wrapper around the backend, as a programmer's mistake would be: everything is as planned, but the standard deviation of the noise is multiplied by `factor`.


class LessNoise:
    """A backend whose steps add noise of `factor` times the standard deviation that was asked for."""

    def __init__(self, backend, factor):
        self._backend, self._factor = backend, factor

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def normal(self, *arguments, **more):
        return self._factor * self._backend.normal(*arguments, **more)


def mechanism_with(factor):
    def make(plan, layout, parameters, *, backend, keys):
        return Mechanism(plan, layout, parameters, backend=LessNoise(backend, factor), keys=keys)

    return make


halved = audit(method, sampler, 8, delta=1e-5, make_mechanism=mechanism_with(0.5))
print(halved)
assert halved.flagged

# %%
# Two things gave it away. The canaries were told apart more often than the claim allows; and the direct checks compared the size of the noise on
# coordinates that nobody touches with the plan. The second are far more sensitive, as the next picture shows.
#
# How small a mistake is seen
# ---------------------------

factors = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
results = [audit(method, sampler, 8, delta=1e-5, make_mechanism=mechanism_with(factor)) for factor in factors]

figure, axis = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
axis.axhline(honest.claimed_epsilon, color="gray", linestyle="--", label="the claim")
axis.plot(factors, [each.lower_bound for each in results], "-", color="C0", linewidth=0.8)
for flagged, words, color in ((True, "flagged", "C3"), (False, "nothing found", "C2")):
    chosen = [
        (factor, each.lower_bound) for factor, each in zip(factors, results, strict=True) if each.flagged == flagged
    ]
    if chosen:
        axis.plot(*zip(*chosen, strict=True), "o", color=color, label=f"lower bound, {words}")
axis.set(xlabel="noise that is there, as a share of the planned", ylabel="epsilon at delta = 1e-5", ylim=(0, None))
axis.legend()

for factor, each in zip(factors, results, strict=True):
    print(
        f"{factor:4g} of the noise: epsilon >= {each.lower_bound:.2f}, {'flagged' if each.flagged else 'nothing found'}"
    )

# %%
# What it cannot show
# -------------------
# Where the lower bound stays below the claim, these canaries under this attack found nothing; that proves no privacy. An honest run is flagged once in a hundred audits at
# this confidence. The page on the audit has thirty-two planted bugs, and what finds each.
