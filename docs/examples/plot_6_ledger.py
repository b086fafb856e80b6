"""
A ledger over a sweep
=====================

Four learning rates are tried on the same patients, each run at epsilon = 1, and the best one is kept. What did that cost? Not 1: each run saw the data, and whoever looked at one
result before choosing the next spent more again. A ledger knows all of them and stops before the budget is crossed.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import dpcore
from dpcore.cli.datasets import load
from dpcore.errors import BudgetError
from dpcore.ledger import Ledger
from dpcore.torch import make_private

digits = load("digits")
data = torch.tensor(digits.train_inputs), torch.tensor(digits.train_targets)
held_out, truth = torch.tensor(digits.test_inputs), torch.tensor(digits.test_targets)

folder = Path(tempfile.mkdtemp())
ledger = Ledger.create(folder / "patients.ledger", budget=(4.0, 1e-5), name="digits, as if they were patients")

# %%
# The sweep
# ---------
# Every run gets the ledger. Each step is written down before its batch is drawn, so a run that is killed is counted, too.


def run(rate):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    method = dpcore.methods.dp_sgd(lr=rate, batch_size=96, clipping="automatic")
    private = make_private(
        model, data, method, target_epsilon=1, target_delta=1e-5, epochs=6, ledger=ledger, run_name=f"lr {rate:g}"
    )
    try:
        for _ in range(6):
            for batch in private.loader:
                private.step(batch)
    finally:
        private.close()
    with torch.no_grad():
        return 100 * (model(held_out).argmax(1) == truth).double().mean().item(), private


history = []
for rate in (0.25, 0.5, 1.0, 2.0):
    accuracy, private = run(rate)
    total = ledger.total()
    history.append((rate, accuracy, private.epsilon(), total.fixed, total.odometer))
    print(
        f"lr {rate:4g}: {accuracy:.1f} %, this run epsilon = {private.epsilon():.3f}; so far {total.fixed:.3f} if all was fixed "
        f"beforehand, {total.odometer:.3f} however the runs were chosen"
    )

# %%
# Two answers, and both are right. If the four rates had been written down before the first run, the tightest accountant composes them: ``fixed``. If each rate was
# chosen after looking at the last result, only the odometer speaks. The budget holds in either case.

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
runs = range(1, len(history) + 1)
rates, accuracies, alone, fixed, odometer = zip(*history, strict=True)
left.bar(runs, accuracies, tick_label=[f"{rate:g}" for rate in rates])
left.set(xlabel="learning rate", ylabel="held-out accuracy, %")
right.plot(runs, alone, "o-", label="what each statement says of its run")
right.plot(runs, fixed, "o-", label="together, fixed beforehand")
right.plot(runs, odometer, "o-", label="together, however chosen")
right.axhline(4, color="gray", linestyle=":", label="budget")
right.set(xlabel="runs", ylabel="epsilon at delta = 1e-5", xticks=list(runs), ylim=(0, None))
right.legend(fontsize=8)

# %%
# The end of the budget
# ---------------------
# What is left can be asked, for any unknown, and the step that would cross the budget is refused before anything is drawn for it.

left_over = ledger.remaining()
sigma = left_over.noise_multiplier(lambda s: dpcore.accounting.PoissonSampledGaussian(96 / len(data[0]), s, steps=90))
print(f"another run of 90 steps needs a noise multiplier of {sigma:.2f}")

refused = None
for _ in range(20):
    try:
        run(0.5)
    except BudgetError as error:
        refused = error
        break
print(f"after {len(ledger.runs()) - len(history) - 1} more whole runs: {refused}")
assert refused is not None
assert ledger.total().budget <= 4.0 + 1e-9

# %%
# The book
# --------
# Every entry carries the seal of the one before it; ``verify`` checks all of them again.

for each in ledger.runs():
    print(f"{each.name:8} {each.releases:4d} of {each.steps} steps, epsilon alone {each.epsilon(1e-5):.3f}")
print(ledger.verify())
assert ledger.verify().valid
