"""Break the mechanism on purpose, in a copy, and name the tests that notice: `make mutations`.

Each mutation replaces one piece of one file. One that no test notices is a failure of the tests, and of this script.
Arguments choose mutations by a part of their name; by default all are made.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["tests/papers", "tests/spec", *(f"tests/unit/test_{name}.py" for name in (
    "clip", "filters_stages", "step", "updates", "mechanism", "minimize", "plan", "accounting_rdp",
    "accounting_gaussian", "torch_training",
))]  # fmt: skip


class Mutation(NamedTuple):
    """What is broken, where, and how."""

    name: str
    path: str
    old: str
    new: str
    tests: str = ""
    """Run these instead of all of `TESTS`: for kernels, and for mutations with a test of their own."""


NUMPY = "backends/dpcore_numpy"
MUTATIONS = [
    Mutation(
        "halve the noise",
        "dpcore/plan/scales.py",
        "return share * sigma * contribution",
        "return 0.5 * share * sigma * contribution",
    ),
    Mutation("drop the clip", "dpcore/mechanism/mechanism.py", "weights[i] = factor", "weights[i] = 0 * factor + 1"),
    Mutation(
        "swap two coefficients of a named filter",
        "dpcore/stages/filters/named.py",
        '"first-order v2": ((3 / 11, -1 / 11)',
        '"first-order v2": ((-1 / 11, 3 / 11)',
        "tests/papers/test_named_filters.py",
    ),
    Mutation(
        "swap the filter's coefficients on their way to the backend",
        "dpcore/stages/filters/low_pass.py",
        "FilterCoefficients(self.b, self.a,",
        "FilterCoefficients(self.b[::-1], self.a,",
    ),
    Mutation(
        "divide by one example less",
        "dpcore/mechanism/mechanism.py",
        "                plan.batch_size,\n",
        "                plan.batch_size - 1,\n",
    ),
    Mutation(
        "draw the same row of noise at every step",
        "dpcore/mechanism/mechanism.py",
        "NoiseRow(self.keys.noise, row, Stream.GRADIENT,",
        "NoiseRow(self.keys.noise, 0, Stream.GRADIENT,",
    ),
    Mutation(
        "sensitivity of the groups' mean instead of their root sum of squares",
        "dpcore/stages/clipping/clip.py",
        "math.sqrt(math.fsum(bound**2 for bound in grouping.bounds))",
        "math.fsum(grouping.bounds) / len(grouping.bounds)",
    ),
    Mutation(
        "account for half of the steps",
        "dpcore/plan/plan.py",
        "event = self.sampler.event(sigma, steps)\n",
        "event = self.sampler.event(sigma, (steps + 1) // 2)\n",
    ),
    Mutation(
        "sum in float32",
        f"{NUMPY}/clip.py",
        "total[columns] += factors @ piece.astype(np.float64)",
        "total[columns] = np.float32(total[columns]) + np.float32(factors) @ np.float32(piece)",
        "tests/unit/test_sums.py",
    ),
    Mutation(
        "clip the points of a query one by one",
        "dpcore/mechanism/loop.py",
        "total = [a + b for a, b in zip(total, weighted, strict=True)] if total else weighted",
        "total = total or weighted",
        "tests/papers/test_disk.py",
    ),
    Mutation(
        "take the dimension of the first tensor for that of all, in the optimal filter",
        "dpcore/mechanism/composed_step.py",
        "power = self.layout.dimension *",
        "power = self.layout.entries[0].size *",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "trust the measured norm",
        f"{NUMPY}/clip.py",
        "lowered = (bound - underflow) * (1 - 2 * float(info.eps))",
        "lowered = bound",
        "tests/unit/stages/test_clip.py",
    ),
    Mutation(
        "accumulate norms in float32",
        f"{NUMPY}/clip.py",
        'squares += np.einsum("ij,ij->i", values, values)',
        "squares += np.square(values, dtype=np.float32).cumsum(axis=1)[:, -1]; squares = np.float32(squares) + 0.0",
        "tests/unit/stages/test_clip.py",
    ),
    Mutation(
        "multiply a NaN row by zero",
        f"{NUMPY}/clip.py",
        "if not used[rows_].all():",
        "if False:",
        "tests/unit/stages/test_clip.py",
    ),
    Mutation(
        "take the clip norm for the normalized rule's sensitivity",
        "dpcore/stages/clipping/clip.py",
        "return Sensitivity(math.sqrt(len(grouping.bounds)))",
        "return Sensitivity(self.max_grad_norm)",
        "tests/papers/test_methods.py",
    ),
    Mutation(
        "forget the bias correction",
        f"{NUMPY}/filter.py",
        "return y if normalizer == 1 else y / normalizer",
        "return y",
        "tests/papers/test_doppler.py",
    ),
    Mutation(
        "start DiSK's average at zero",
        "dpcore/stages/filters/averaging.py",
        "(1.0 if step == 0 else self.kappa,)",
        "(self.kappa,)",
        "tests/papers/test_disk.py",
    ),
    Mutation(
        "invert DiSK's weight",
        "dpcore/stages/queries/two_point.py",
        "(1 - k) / (k * self.gamma)",
        "k / ((1 - k) * self.gamma)",
        "tests/papers/test_disk.py",
    ),
    Mutation(
        "leave the sum to the next step",
        "dpcore/mechanism/state.py",
        "total[...] = 0",
        "pass",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "take a row as spent only after the draw",
        "dpcore/mechanism/mechanism.py",
        "        self.step += 1\n        self._caller_noise |=",
        "        self._caller_noise |=",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "compose one direction of the adjacency only",
        "dpcore/accounting/pld/problem.py",
        '("remove",) if one_sided else ("remove", "add")',
        '("add",)',
        "tests/unit/accounting/test_pld.py",
    ),
    Mutation(
        "leave the mass outside of the window out of an upper bound",
        "dpcore/accounting/pld/compose.py",
        "slack = noise + beyond + outside * math.exp(max(-700.0, -theta * (top - reference)))",
        "slack = noise + beyond",
        "tests/unit/accounting/test_pld_rounding.py",
    ),
    Mutation(
        "leave what wraps into the window in a lower bound",
        "dpcore/accounting/pld/compose.py",
        "slack = noise + 2.0 * outside * math.exp(log_peak) * decay",
        "slack = noise",
        "tests/unit/accounting/test_pld_rounding.py",
    ),
    Mutation(
        "raise losses to the wrong end of a cell",
        "dpcore/accounting/pld/discretize.py",
        "/ -np.expm1(-width)",
        "/ np.expm1(width)",
        "tests/unit/accounting/test_pld.py",
    ),
    Mutation(
        "forget the thickest point in the convolution",
        "dpcore/accounting/pld/compose.py",
        "product *= _power(thick + rfft(folded), times)",
        "product *= _power(rfft(folded), times)",
        "tests/unit/accounting/test_pld.py",
    ),
    Mutation(
        "leave the atom at loss 0 out of subsets",
        "dpcore/accounting/pld/loss.py",
        "atom = (1.0 - rate) * special.erf(0.5 / (np.sqrt(2.0) * sigma))",
        "atom = 0.0 * sigma",
        "tests/unit/accounting/test_pld_oracle.py",
    ),
    Mutation(
        "take the plain rate for a truncated batch",
        "dpcore/accounting/phases.py",
        "inside, outside = q * almost + cut, (1.0 - q) * almost",
        "inside, outside = q * almost, (1.0 - q) * almost",
        "tests/unit/sampling/test_truncated.py",
    ),
    Mutation(
        "calibrate without what was spent",
        "dpcore/accounting/calibrate.py",
        "else Composed((self._spent, event))",
        "else event",
        "tests/unit/accounting/test_calibrate.py",
    ),
    Mutation(
        "let a ledger lie anywhere",
        "dpcore/ledger/places.py",
        "if not kind or kind in KNOWN or kind in accepted:",
        "if True:",
        "tests/unit/ledger/test_files.py",
    ),
    Mutation(
        "turn GaLore's basis while the moments stay",
        "dpcore/stages/updates/galore.py",
        "if previous is not None and previous.any():",
        "if False:",
        "tests/unit/stages/test_galore.py tests/papers/test_doppler.py",
    ),
    Mutation(
        "take Nesterov's step before the momentum",
        "backends/dpcore_numpy/update.py",
        "else g + beta1 * m)",
        "else g + m)",
        "tests/unit/stages/test_updates.py",
    ),
    Mutation(
        "take points that are not kept",
        "dpcore/stages/queries/base.py",
        "if not 0 <= point.lag <= step or needed > query.lags:",
        "if False:",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "take an unstable filter of the callers own",
        "dpcore/stages/filters/base.py",
        "if largest > 1 + _ROUNDING:",
        "if False:",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "give more than the budget to a ledger's filter",
        "dpcore/ledger/privacy_filter.py",
        "return epsilon - np.log1p(-1.0 / orders)",
        "return epsilon - 2.0 * np.log1p(-1.0 / orders)",
        "tests/unit/ledger/test_filter.py",
    ),
    Mutation(
        "believe a stated epsilon that is too small",
        "dpcore/statement/verify/compare.py",
        "if stated < derived or math.isnan(stated):",
        "if False:",
        "tests/unit/statement/test_verify.py",
    ),
    Mutation(
        "count a canary found as one half",
        "dpcore/audit/bounds.py",
        "betaincinv(inside + 1.0,",
        "betaincinv(inside + 0.5,",
        "tests/unit/audit/test_audit.py",
    ),
    Mutation(
        "count a branch of a kept order once, however long",
        "dpcore/sampling/fixed_order.py",
        "max((int((steps >= first).sum()) for steps",
        "max((int((steps >= first).any()) for steps",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "count a fork's rows as rows of the plan",
        "dpcore/ledger/state.py",
        "return releases == mark <= run.planned_steps or within(",
        "return mark <= run.planned_steps or within(",
        "tests/unit/ledger/test_fixed.py",
    ),
    Mutation(
        "add runs chosen later to a plan that keeps the whole budget",
        "dpcore/ledger/fixed.py",
        "return self.limit is not None and self.charge > self.limit",
        "return False",
        "tests/unit/ledger/test_fixed.py",
    ),
    Mutation(
        "draw before the row is reserved",
        "dpcore/mechanism/mechanism.py",
        "            self.account.before_draw(self.step)\n",
        "            pass\n",
        "tests/end_to_end/test_kill.py",
    ),
    Mutation(
        "resume under the same noise",
        "dpcore/mechanism/state.py",
        "self.keys = keys.fork(keep_sampling=keep, forks=self.keys.forks, row=row, number=number)",
        "self.keys = keys",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "forget which rows were released",
        "dpcore/spec/keys.py",
        "if row < _begun.get(self.digest, 0):",
        "if row < 0:",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "leave abandoned steps out of epsilon",
        "dpcore/plan/plan.py",
        "event = self.sampler.event(sigma, steps + number)",
        "event = self.sampler.event(sigma, steps + 0)",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "clip before the scale is applied",
        "dpcore/mechanism/mechanism.py",
        "norms = [self.backend.row_norms([rows[i] for i in members])",
        "bare = [b / s for b, s in zip(rows, self.vectors.scales or [1.0] * len(rows), strict=True)]\n"
        "        norms = [self.backend.row_norms([bare[i] for i in members])",
        "tests/papers/test_adaptive.py",
    ),
    Mutation(
        "leave out the scale",
        "dpcore/mechanism/mechanism.py",
        "rows = [block * scale for block, scale in zip(rows, self.vectors.scales, strict=True)]",
        "pass",
        "tests/papers/test_adaptive.py",
    ),
    Mutation(
        "refresh the scale at every scaled step",
        "dpcore/mechanism/state.py",
        "query.phase(self.step) is not Phase.REFRESHED",
        "query.phase(self.step) is Phase.UNSCALED",
        "tests/papers/test_adaptive.py",
    ),
    Mutation(
        "clip scaled vectors at the norm of unscaled ones",
        "dpcore/plan/step_scales.py",
        "scaled = replace(plain, max_grad_norm=query.max_scaled_norm)",
        "scaled = plain",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "take the unscaled norm for the noise of scaled steps",
        "dpcore/plan/step_scales.py",
        "self.gradient_noise_multiplier, self.sensitivity_at(step, norm).contribution",
        "self.gradient_noise_multiplier, self.sensitivity_at(0 * step, norm).contribution",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "halve the noise of the square",
        "dpcore/plan/scales.py",
        "return math.sqrt(2) * sigma * (2 * max_batch_size - 1)",
        "return 0.5 * math.sqrt(2) * sigma * (2 * max_batch_size - 1)",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "take B for 2 B - 1",
        "dpcore/plan/scales.py",
        "(2 * max_batch_size - 1) * contribution**2",
        "max_batch_size * contribution**2",
        "tests/unit/plan/test_scales.py",
    ),
    Mutation(
        "take the denominator for the largest batch",
        "dpcore/plan/step_scales.py",
        "            self.sampler.max_batch_size,\n        )",
        "            int(self.batch_size),\n        )",
        "tests/papers/test_adaptive.py",
    ),
    Mutation(
        "leave independent moments at sigma each",
        "dpcore/plan/scales.py",
        'share = math.sqrt(2) if update.second_moment == "independent" else 1.0',
        "share = 1.0",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "draw both moments' noise from one stream",
        "dpcore/mechanism/mechanism.py",
        "NoiseRow(self.keys.noise, row, Stream.SECOND_MOMENT,",
        "NoiseRow(self.keys.noise, row, Stream.GRADIENT,",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "allow a larger joint scale",
        "dpcore/plan/scales.py",
        "JOINT_BOUND = 1 / math.sqrt(2)",
        "JOINT_BOUND = 1.01 / math.sqrt(2)",
        "tests/unit/plan/test_scales.py",
    ),
    Mutation(
        "allow a larger joint scale in one dimension",
        "dpcore/plan/scales.py",
        "JOINT_BOUND_1D = 1.665",
        "JOINT_BOUND_1D = 1.666",
        "tests/unit/plan/test_scales.py",
    ),
    Mutation(
        "forget that replacement moves twice as far",
        "dpcore/plan/plan.py",
        "noise_multiplier=event.noise_multiplier / 2,",
        "noise_multiplier=event.noise_multiplier,",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "let independent moments meet Poisson sampling",
        "dpcore/plan/plan.py",
        'if moment == "independent" and not bounded:',
        'if moment == "none" and not bounded:',
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "let joint moments meet batches of two",
        "dpcore/plan/plan.py",
        "single = self.sampler.max_batch_size == 1 and self.batch_size == 1 and",
        "single = True or",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "forget the coins that two branches share",
        "dpcore/sampling/cyclic_poisson.py",
        "return Composed((own, others, Gaussian(noise_multiplier / column_norm, 2 * branches, Adjacency.ZERO_OUT)))",
        "return Composed((own, others))",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "give an epoch the order of the first",
        "dpcore/sampling/shuffled.py",
        "draw.permutation(key, self.dataset_size, epoch)",
        "draw.permutation(key, self.dataset_size, 0)",
        "tests/unit/sampling/test_shuffled.py",
    ),
    Mutation(
        "let more bands than groups be amplified",
        "dpcore/sampling/cyclic_poisson.py",
        "if found > self.groups:",
        "if found > self.groups + 1:",
        "tests/unit/sampling/test_cyclic.py",
    ),
    Mutation(
        "cut a full batch at its first examples",
        "dpcore/sampling/truncated_poisson.py",
        "batch = batch[draw.subset(draw.after(words, self.dataset_size), batch.size, self.max_batch_size)]",
        "batch = batch[: self.max_batch_size]",
        "tests/unit/sampling/test_truncated.py",
    ),
    Mutation(
        "take reshuffled epochs for a fixed order",
        "dpcore/stages/strategies/blocks.py",
        "float(np.abs(products).max())",
        "float(np.abs(np.diagonal(products)).max())",
        "tests/unit/sampling/test_shuffled.py",
    ),
    Mutation(
        "clip the examples of a user one by one",
        "dpcore/mechanism/loop.py",
        "blocks = [unit_sums(block, sizes) for block in blocks]",
        "pass",
        "tests/unit/sampling/test_users.py",
    ),
    Mutation(
        "let correlated noise meet secret batches",
        "dpcore/plan/plan.py",
        "            self.sampler.check_strategy(strategy, self.steps)\n",
        "",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "account for the noiseless second moment as if it had noise",
        "dpcore/plan/plan.py",
        'if moment == "noiseless":',
        'if moment == "none":',
        "tests/papers/test_adaptive.py",
    ),
    Mutation(
        "leave out the abandoned branches of correlated noise",
        "dpcore/plan/plan.py",
        "return math.hypot(*(self._reach(*rows) for rows in left))",
        "return 0.0",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "account for a strategy as for single participation",
        "dpcore/sampling/fixed_order.py",
        "return sensitivity(strategy, self.patterns(steps), steps, first)",
        "return sensitivity(strategy, [p[:1] for p in self.patterns(steps)], steps, first)",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "sum columns with their signs",
        "dpcore/stages/strategies/sensitivity.py",
        "return float(np.abs(block.T @ block).sum())",
        "return float((block.T @ block).sum())",
        "tests/unit/plan/test_plan.py tests/unit/stages/test_strategies_sensitivity.py",
    ),
    Mutation(
        "stream correlated noise with the first row's coefficients",
        "dpcore/mechanism/mechanism.py",
        "strategy.coefficients(row)\n",
        "strategy.coefficients(0)\n",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "draw this step's row for every row of correlated noise",
        "dpcore/mechanism/composed_step.py",
        "total = total + float(weight) * normal(row)",
        "total = total + float(weight) * normal(noise.row)",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "forget the weights of correlated noise's rows",
        "dpcore/mechanism/composed_step.py",
        "total = total + float(weight) * normal(row)",
        "total = total + normal(row)",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "draw earlier rows under this step's key",
        "dpcore/mechanism/composed_step.py",
        "self.keys.noise_of(row), row, noise.stream,",
        "self.keys.noise, row, noise.stream,",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "halve the noise, in the composed step",
        "dpcore/mechanism/composed_step.py",
        "g = noise.scale * self._noise(",
        "g = 0.5 * noise.scale * self._noise(",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "divide by one example less, in the composed step",
        "dpcore/mechanism/composed_step.py",
        "self._cast(g / self.batch_size, slot.parameter)",
        "self._cast(g / (self.batch_size - 1), slot.parameter)",
        "tests/papers/test_noise.py",
    ),
    Mutation(
        "rotate the history of parameters the other way",
        "dpcore/mechanism/vectors.py",
        "past.insert(0, past.pop())\n                past[0]",
        "past.append(past.pop(0))\n                past[0]",
        "tests/papers/test_pmlf.py",
    ),
    Mutation(
        "take the parameters of one step earlier",
        "dpcore/mechanism/mechanism.py",
        "base = [past[point.lag - 1].reshape(shape)",
        "base = [past[min(point.lag, len(past) - 1)].reshape(shape)",
        "tests/papers/test_pmlf.py",
    ),
    Mutation(
        "end an earlier displacement one step later",
        "dpcore/mechanism/mechanism.py",
        "[past[point.lag - 1] - past[point.lag] for past in history]",
        "[past[point.lag] - past[(point.lag + 1) % len(past)] for past in history]",
        "tests/papers/test_combinations.py",
    ),
    Mutation(
        "forget that a ball shortens the displacement",
        "dpcore/mechanism/after_update.py",
        "slot.displacement[...] = slot.displacement + (slot.parameter - earlier)",
        "pass",
        "tests/papers/test_combinations.py",
    ),
    Mutation(
        "shrink the first windows by the whole normalizer",
        "dpcore/stages/queries/parameter_window.py",
        "for j in range(count)) if self.normalized",
        "for j in range(self.window)) if self.normalized",
        "tests/papers/test_pmlf.py",
    ),
    Mutation(
        "subtract the earlier gradient without its weight",
        "dpcore/stages/queries/recursive_difference.py",
        "delayed(self.query.points(step - 1), -c, 1)",
        "delayed(self.query.points(step - 1), -1.0, 1)",
        "tests/papers/test_srg.py",
    ),
    Mutation(
        "shift eta by one",
        "dpcore/stages/queries/recursive_difference.py",
        "Point(-float(step), lag=1)",
        "Point(-float(step + 1), lag=1)",
        "tests/papers/test_srg.py",
    ),
    Mutation(
        "couple with the tau of this step",
        "dpcore/stages/updates/accelerated.py",
        "2.0 / (step + 3)",
        "2.0 / (step + 2)",
        "tests/papers/test_srg.py",
    ),
    Mutation(
        "take the filter's square for the released one",
        "dpcore/mechanism/composed_step.py",
        'if square == "released":\n            return g * g',
        'if square == "released":\n            return None',
        "tests/papers/test_doppler.py",
    ),
    Mutation(
        "take off the seed's variance whatever the strategy",
        "dpcore/mechanism/mechanism.py",
        "noise_variances(filtered, method.noise.strategy, self.plan.steps)",
        "noise_variances(filtered, None, self.plan.steps)",
        "tests/papers/test_adaptive.py",
    ),
    Mutation(
        "count a clean run's noise twice in the optimal filter",
        "dpcore/mechanism/composed_step.py",
        "power = self.layout.dimension * (noise.scale / self.batch_size) ** 2",
        "power = 2 * self.layout.dimension * (noise.scale / self.batch_size) ** 2",
        "tests/papers/test_doppler.py",
    ),
    Mutation(
        "start averages at zero",
        "dpcore/stages/updates/averaging.py",
        "return (1 - self.decay) / (1 - self.decay ** (step + 1))",
        "return 1 - self.decay",
        "tests/unit/stages/test_averaging.py",
    ),
    Mutation(
        "keep GaLore's first projection for ever",
        "dpcore/mechanism/composed_step.py",
        "if noise.row % self.method.galore.every == 0:",
        "if noise.row == 0:",
        "tests/papers/test_doppler.py",
    ),
    Mutation(
        "ignore a scaled query inside a window",
        "dpcore/stages/method.py",
        "if isinstance(inner, Preconditioned):",
        "if False:",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "leave the square's correlated state out of the checkpoint",
        "dpcore/mechanism/vectors.py",
        "for k, v in enumerate(self.square_noise_state[i])}",
        "for k, v in enumerate(self.square_noise_state[i][:0])}",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "draw the noise in the composed step only",
        "dpcore/mechanism/mechanism.py",
        "streamed = strategy is None or (correlation is not None and not square_scale)",
        "streamed = True",
        "tests/papers/test_noise.py tests/papers/test_srg.py",
    ),
    Mutation(
        "drop the normals' tail",
        f"{NUMPY}/noise.py",
        "TAIL_BOUND = 4096",
        "TAIL_BOUND = 0",
        "tests/spec/test_normal.py",
    ),
    Mutation(
        "lose the digits of ln u next to u = 1",
        f"{NUMPY}/noise.py",
        "from_one = np.log1p(v, out=v)",
        "from_one = np.log(1 + v)",
        "tests/spec/test_normal.py",
    ),
    Mutation(
        "change a rotation of ChaCha20",
        f"{NUMPY}/stream.py",
        "(c, d, b, 7))",
        "(c, d, b, 8))",
        "tests/spec/test_stream.py",
    ),
    Mutation(
        "sample at another rate than accounted",
        "dpcore/sampling/poisson.py",
        "threshold = round(self.sample_rate * WORDS)",
        "threshold = round(1.1 * self.sample_rate * WORDS)",
        "tests/unit/sampling/test_samplers.py",
    ),
    Mutation(
        "halve the noise, in the kernel",
        "backends/dpcore_triton/step.py",
        "average += scales[0] * n.to(tl.float64)",
        "average += 0.5 * scales[0] * n.to(tl.float64)",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "swap the sine and the cosine, in the kernel",
        "backends/dpcore_triton/noise.py",
        "return rho * cosine, rho * sine",
        "return rho * sine, rho * cosine",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "drop the clip, in the kernel",
        "backends/dpcore_triton/clip.py",
        "return tl.where(raised <= bound, 1.0, room / raised)",
        "return tl.where(raised <= bound, 1.0, 1.0)",
        tests="tests/agreement/test_ops_clip.py",
    ),
    Mutation(
        "give the square the gradient's scale of noise, in the kernel",
        "backends/dpcore_triton/step.py",
        "h += scales[1] * z.to(tl.float64)",
        "h += scales[0] * z.to(tl.float64)",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "give the square the gradient's own draws, in the kernel",
        "backends/dpcore_triton/step.py",
        "z_square = normals(square_cipher,",
        "z_square = normals((k0, k1, k2, k3, k4, k5, k6, k7, noise_row, noise_stream),",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "leave the noise uncorrelated, in the kernel",
        "backends/dpcore_triton/step.py",
        "n = recurrence_elements(z, noise_state, mask, taps, NOISE_NB)",
        "n = z",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "multiply by the scale instead of dividing, in the kernel",
        "backends/dpcore_triton/step.py",
        "g = tl.div_rn(g, tl.load(scale, mask=mask, other=1.0))",
        "g = g * tl.load(scale, mask=mask, other=1.0)",
        tests="tests/agreement/test_ops_step.py",
    ),
    Mutation(
        "give earlier rows of noise the key of the latest fork",
        "dpcore/spec/keys.py",
        "            if first < min(end, row):",
        "            if end == row and key == self.noise:",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "take both shares of independent moments for one and a bit",
        "dpcore/plan/scales.py",
        "share = math.sqrt(2)",
        "share = math.sqrt(1.9)",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "count half an example less in the sensitivity of the square",
        "dpcore/plan/scales.py",
        "sigma * (2 * max_batch_size - 1) *",
        "sigma * (2 * max_batch_size - 1.5) *",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "allow joint moments a scale too large",
        "dpcore/plan/scales.py",
        "JOINT_BOUND = 1 / math.sqrt(2)",
        "JOINT_BOUND = 0.85",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "let negative products of columns cancel in the sensitivity",
        "dpcore/stages/strategies/sensitivity.py",
        "return float(np.abs(block.T @ block).sum())",
        "return float((block.T @ block).sum())",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "count the first round of fixed batches only",
        "dpcore/sampling/fixed_batches.py",
        "return [pattern[pattern < steps] for",
        "return [pattern[pattern < min(steps, cycle)] for",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "add the noise of the first step's norm to all sums",
        "dpcore/mechanism/mechanism.py",
        "scale, square_scale = plan.noise_standard_deviation(row,",
        "scale, square_scale = plan.noise_standard_deviation(0,",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "release the bits of the adaptive clip without raising the noise on the sum",
        "dpcore/plan/step_scales.py",
        "return scales.raised_multiplier(self.noise_multiplier, self.bit_noise_standard_deviation)",
        "return self.noise_multiplier",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "halve the noise on the bits of the adaptive clip",
        "dpcore/stages/clipping/running.py",
        "self.adaptive.noise_on_bits(self.batch_size) * normal",
        "0.5 * self.adaptive.noise_on_bits(self.batch_size) * normal",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "give an example that contributes nothing a bit",
        "dpcore/stages/clipping/adaptive.py",
        "counted = norms != 0  # true of NaN",
        "counted = norms == norms",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "draw the noise on the bits from the gradient's stream",
        "dpcore/mechanism/mechanism.py",
        "z = reference.normal(self.keys.noise, row, Stream.CLIP_BOUND, 0,",
        "z = reference.normal(self.keys.noise, row, Stream.GRADIENT, 0,",
        "tests/end_to_end/test_measured_sensitivity.py tests/unit/stages/test_adaptive_clip.py",
    ),
    Mutation(
        "add the noise of the first clip norm to all sums",
        "dpcore/mechanism/mechanism.py",
        "plan.noise_standard_deviation(row, self.clip_norm), ",
        "plan.noise_standard_deviation(row, None), ",
        "tests/end_to_end/test_measured_sensitivity.py",
    ),
    Mutation(
        "clip at the first clip norm throughout",
        "dpcore/mechanism/mechanism.py",
        "now = self.step, self.clip_norm",
        "now = self.step, None",
        "tests/end_to_end/test_measured_sensitivity.py tests/unit/stages/test_adaptive_clip.py",
    ),
    Mutation(
        "leave correlated noise torn after an interruption",
        "dpcore/mechanism/mechanism.py",
        "            self._torn = True\n",
        "            self._torn = False\n",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "leave the sum of an interrupted step to the next",
        "dpcore/mechanism/mechanism.py",
        "if self._summed != self.step:",
        "if False:",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "take a strategy's word for its own noise",
        "dpcore/plan/plan.py",
        "            check_streaming(strategy, self.steps)\n",
        "",
        tests="tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "take a killed run of a comparison for a complete one",
        "dpcore/cli/compare/log.py",
        " and not stated.note",
        "",
        "tests/end_to_end/test_cli_compare.py",
    ),
    Mutation(
        "go on with a comparison though a run's folder is gone",
        "dpcore/cli/compare/log.py",
        'if item["status"] in (COMPLETE, STOPPED) and records[-1].statement is None:',
        "if False:",
        "tests/end_to_end/test_cli_compare.py",
    ),
    Mutation(
        "unpack a member of an archive whole, whatever its directory states",
        "dpcore/cli/datasets/archive.py",
        "while chunk := packed.read(_CHUNK):",
        "while chunk := packed.read():",
        "tests/unit/cli/test_npz.py",
    ),
    Mutation(
        "resume a run and forget what it may have released",
        "dpcore/cli/train/training.py",
        "counted = max(steps, self.private.steps_released)",
        "counted = steps",
        "tests/end_to_end/test_cli_resume.py",
    ),
    Mutation(
        "take a damaged checkpoint for a whole one",
        "dpcore/cli/train/checkpoint.py",
        "whole = archive.testzip() is None",
        "whole = True",
        "tests/end_to_end/test_cli_resume.py",
    ),
    Mutation(
        "leave abandoned steps out of what a resumed run states",
        "dpcore/torch/run.py",
        "return self.plan.event_after(steps, self._engine.mechanism.abandoned)",
        "return self.plan.event_after(steps)",
        "tests/end_to_end/test_cli_resume.py",
    ),
    Mutation(
        "give back a row that is on its way out",
        "dpcore/mechanism/account.py",
        "self.run.close(max(self.mechanism.step, self._granted))",
        "self.run.close(self.mechanism.step)",
        "tests/unit/ledger/test_attacks.py",
    ),
    Mutation(
        "forget what the ledger did not know",
        "dpcore/mechanism/account.py",
        'tuple(saved.get("caveats", ()))',
        "()",
        "tests/end_to_end/test_kill.py",
    ),
    Mutation(
        "say that something is left where one plan keeps all",
        "dpcore/ledger/totals.py",
        "kept = state.fixed is not None and state.fixed.alone",
        "kept = False",
        "tests/unit/ledger/test_fixed.py",
    ),
    Mutation(
        "toss coins that land once too often",
        "dpcore/sampling/draw.py",
        ".astype(np.uint64) < np.uint64(threshold)",
        ".astype(np.uint64) <= np.uint64(threshold)",
        "tests/unit/sampling/test_draw.py tests/unit/sampling/test_exact.py",
    ),
    Mutation(
        "let attempts of a draw share words",
        "dpcore/sampling/draw.py",
        "start += 2 * size",
        "start += size",
        "tests/unit/sampling/test_draw.py",
    ),
    Mutation(
        "let adaptive bits be free",
        "dpcore/plan/scales.py",
        "return sigma / math.sqrt(1 - (sigma / (2 * bit_noise)) ** 2)",
        "return sigma",
        "tests/unit/sampling/test_exact.py",
    ),
    Mutation(
        "audit a cut batch at the coins' rate",
        "dpcore/audit/direct_checks.py",
        "    if not isinstance(event, TruncatedPoissonSampledGaussian):\n",
        "    if True:\n",
        "tests/unit/audit/test_audit.py",
    ),
    Mutation(
        "verify a method by what it says of itself",
        "dpcore/statement/verify/compare.py",
        '_field("method", statement.method,',
        '_field("method", derived.method | free,',
        "tests/unit/statement/test_forgery.py",
    ),
    Mutation(
        "verify the noise by what it says of itself",
        "dpcore/statement/verify/compare.py",
        '_field("noise", noise, derived.noise',
        '_field("noise", derived.noise, derived.noise',
        "tests/unit/statement/test_verify.py",
    ),
    Mutation(
        "take what rounds away in a large data set for nothing",
        "dpcore/accounting/binomial.py",
        "float(betainc(k + 1, n - k, p))",
        "0.0",
        "tests/unit/sampling/test_truncated.py",
    ),
    Mutation(
        "verify a replacement at twice its noise",
        "dpcore/statement/verify/parts.py",
        "expected = sigma / 2 if part.adjacency is Adjacency.REPLACE_ONE else sigma",
        "expected = sigma",
        "tests/unit/statement/test_forgery.py tests/unit/statement/test_verify.py",
    ),
    Mutation(
        "let a forger lower a matrix's sensitivity",
        "dpcore/statement/verify/parts.py",
        "least = whole * (1 - SAME) if steps == statement.steps_planned else 0.0",
        "least = 0.0",
        "tests/unit/statement/test_forgery.py tests/unit/statement/test_verify.py",
    ),
    Mutation(
        "let a matrix move less than its columns",
        "dpcore/statement/verify/rebuild.py",
        "if scaled and whole < 1 - SAME:",
        "if False:",
        "tests/unit/statement/test_forgery.py tests/unit/statement/test_verify.py",
    ),
    Mutation(
        "transforms are exact",
        "dpcore/accounting/pld/compose.py",
        "return total * _UNIT",
        "return 0.0",
        "tests/unit/accounting/test_pld_rounding.py",
    ),
    Mutation(
        "grant a row only after it was reserved",
        "dpcore/mechanism/account.py",
        "            self._granted = step + 1  # first: a close at any moment from here on leaves the row\n"
        "            run.reserve(step)\n",
        "            run.reserve(step)\n            self._granted = step + 1\n",
        "tests/unit/ledger/test_attacks.py",
    ),
    Mutation(
        "let two threads add to one sum",
        "dpcore/mechanism/turns.py",
        "if self._adding not in (0, threading.get_ident()):",
        "if False:",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "let a thread step on a batch of an earlier step",
        "dpcore/mechanism/turns.py",
        'if getattr(self._drawn, "step", None) not in (None, step):',
        "if False:",
        "tests/unit/mechanism/test_mechanism.py",
    ),
    Mutation(
        "charge the shared columns of a branch alone",
        "dpcore/stages/strategies/sensitivity.py",
        "block = strategy.columns(pattern[first : first + _CHUNK], steps)[first_row:]",
        "block = strategy.columns(pattern[first : first + _CHUNK], steps)[first_row:, -1:]",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "forget on the way back where a branch was left",
        "dpcore/accounting/branches.py",
        "name, end = self.known[name].parent, self.known[name].first",
        "name, end = self.known[name].parent, self.known[name].mark",
        "tests/unit/plan/test_plan.py",
    ),
    Mutation(
        "count any Gaussian as a part of the plan",
        "dpcore/ledger/fixed.py",
        "return part.mu <= whole.mu",
        "return True",
        "tests/unit/ledger/test_fixed.py",
    ),
    Mutation(
        "save a secret part for everybody",
        "dpcore/torch/state/saving.py",
        "0o600",
        "0o644",
        "tests/unit/torch/test_checkpoint.py",
    ),
    Mutation(
        "let a model write to the batch",
        "dpcore/torch/model/per_example.py",
        "inputs, targets = batches.normalize(batches.tree_map(torch.clone, batch))",
        "inputs, targets = batches.normalize(batch)",
        "tests/unit/torch/test_state_probe.py",
    ),
    Mutation(
        "exchange a module's places once for each of its names",
        "dpcore/torch/model/functional.py",
        "for path, module in model.named_modules():",
        "for path, module in model.named_modules(remove_duplicate=False):",
        "tests/unit/torch/test_per_example.py",
    ),
    Mutation(
        "leave the generators of a data set alone",
        "dpcore/torch/data/data.py",
        "with seeded(self.device, seed, self._generators):",
        "with seeded(self.device, seed):",
        "tests/unit/torch/test_data.py",
    ),
    Mutation(
        "look for state on made-up examples only",
        "dpcore/torch/model/per_example.py",
        "if self._calls & (self._calls - 1):",
        "if True:",
        "tests/unit/torch/test_state_probe.py",
    ),
]


def copy_to(folder: Path) -> None:
    """Copy the working tree as git sees it: tracked files and new ones, without what is ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                archive.add(ROOT / name, arcname=name)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        archive.extractall(folder, filter="data")


def red(folder: Path, arguments: list[str]) -> list[str]:
    """Run the tests and return those that fail."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile=mutation",
            "-n",
            "2",
            *arguments,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[| |$)", done.stdout, flags=re.MULTILINE)))


def main() -> int:
    """Run every mutation; the exit status is the number of those that nothing noticed."""
    chosen = [one for one in MUTATIONS if any(part in one.name for part in sys.argv[1:] or [""])]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copy_to(folder)
        before = red(folder, sorted({name for one in chosen for name in one.tests.split() or TESTS}))
        if before:
            raise SystemExit(f"these tests fail without any mutation: {', '.join(before)}")
        for mutation in chosen:
            path = folder / mutation.path
            text = path.read_text()
            if text.count(mutation.old) != 1:
                raise SystemExit(
                    f"{mutation.path}: {mutation.old!r} must stand there once; the mutation is out of date"
                )
            path.write_text(text.replace(mutation.old, mutation.new))
            noticed = red(folder, mutation.tests.split() or TESTS)
            path.write_text(text)
            unnoticed += not noticed
            print(f"\n{mutation.name} ({mutation.path}): {len(noticed) or 'NO'} tests notice")
            print("\n".join(f"  {name}" for name in noticed), flush=True)
    return unnoticed


if __name__ == "__main__":
    sys.exit(main())
