"""
Reading a statement
===================

Every run ends in a statement: what is guaranteed, for whom, and under which assumptions. This page reads one, derives its numbers again, changes one of them to see that noticed, and
draws what epsilon means for an attacker.
"""

import json

import matplotlib.pyplot as plt
import numpy as np
from dpcore.verify import holds, verify

import dpcore
from dpcore import accounting
from dpcore.accounting import Event
from dpcore.statement import Statement

rng = np.random.default_rng(0)
values = rng.normal([1.0, 2.0, 3.0], 1.0, (5000, 3))
method = dpcore.methods.disk(lr=0.3, max_grad_norm=1.0, noise_multiplier=1.5)
sampler = dpcore.sampling.PoissonSampler(dataset_size=5000, batch_size=250)
result = dpcore.minimize(lambda x, indices: x - values[indices], np.zeros(3), sampler, method, steps=100)

# %%
# The statement
# -------------
# In ten lines, whole as text for a person, and as JSON for a machine. The second paragraph of the whole says what the guarantee means for one example; the list at its end says what it rests on.

statement = result.statement(delta=1e-6)
print(statement.summary())
print(statement.summary(full=True))

# %%
# From both sides
# ---------------
# Epsilon is an upper bound. How far can it be from the truth? The accountant certifies a lower end, too:

event = Event.from_dict(statement.event)
interval = accounting.epsilon_interval(event, delta=1e-6)
print(f"epsilon lies between {interval.lower:.4f} and {interval.upper:.4f}")
for name, bound in accounting.epsilons(event, delta=1e-6).items():
    print(f"{name:10} {bound:.4f}")

# %%
# Checked again
# -------------
# ``verify`` builds the plan again from the settings that the statement lists, states it again and compares. It is what ``dpcore verify`` runs.

text = statement.to_json()
findings = verify(text)
for finding in findings:
    print(f"{finding.status:8} {finding.check}: {finding.words}")
assert holds(findings)

# %%
# Somebody lowers the number
# --------------------------
# The statement is JSON, so anybody can edit it, and can even renew its hashes. The numbers still have to follow from the settings.

edited = json.loads(text)
edited["event"]["noise_multiplier"] = 3.0
edited["statement_hash"] = Statement.unchecked(edited).statement_hash
findings = verify(edited)
for finding in findings:
    if finding.status == "failed":
        print(f"{finding.status:8} {finding.check}: {finding.words}")
assert not holds(findings)

# %%
# What it means for an attacker
# -----------------------------
# Somebody who knows all examples but one, and all that was released, guesses whether that one took part. The curve bounds the share of right "yes" answers by the share of wrong ones;
# no attack can lie above it, however clever.

rates = np.linspace(0.005, 0.995, 60)
curve = accounting.trade_off(event, rates)
figure, axis = plt.subplots(figsize=(5, 4.4), layout="constrained")
axis.fill_between(curve.false_positive_rates, curve.upper, 1, color="C3", alpha=0.15, label="no attack can do this")
axis.plot(curve.false_positive_rates, curve.upper, color="C3", label="best attack, upper bound")
axis.plot(
    curve.false_positive_rates,
    np.minimum(1, np.exp(interval.upper) * rates + 1e-6),
    ":",
    color="gray",
    label="what (epsilon, delta) alone says",
)
axis.plot([0, 1], [0, 1], color="gray", linewidth=0.8, label="guessing")
axis.set(xlabel="false-positive rate", ylabel="true-positive rate", xlim=(0, 1), ylim=(0, 1))
axis.legend(fontsize=8)
print(f"the largest advantage over guessing: {curve.advantage.upper:.3f}")
