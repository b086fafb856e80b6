"""The list of mutations that tests/run_mutations.py makes, each with the fewest tests that notice it.

Add one for each new way to be wrong. tests/unit/test_mutations_current.py checks that each still finds its line.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Mutation(NamedTuple):
    """What is broken, where, how, and ids of tests as a shell would split them, which run until one fails."""

    name: str
    path: str
    old: str
    new: str
    tests: str


# By file: name, what stands there once, what replaces it, files or ids of tests below tests/ (for slow files, the test).
# fmt: off
TABLE: dict[str, list[tuple[str, str, str, str]]] = {
    "dpcore/ledger/allowance.py": [
        ("go on with plans that something was released beside", "return in_plan and not beside(state)", "return in_plan",
         "unit/ledger/test_ledger.py::test_a_release_beside_plans_that_keep_the_budget_ends_them"),
    ],
    "dpcore/statement/verify/totals.py": [
        ("take a total below its own run's epsilon", "elif all(figure >= own", "elif any(figure >= own",
         "end_to_end/test_cli_verify_folder.py::test_a_statement_beside_its_ledger"),
    ],
    "dpcore/statement/verify/folder.py": [
        ("take any file for the one that the card lists", "if found.hexdigest() == stated:", "if stated:",
         "end_to_end/test_cli_verify_folder.py"),
        ("take any model for the statement's", "if named == statement.statement_hash:", "if named:",
         "end_to_end/test_cli_verify_folder.py"),
    ],
    "dpcore/cli/compare/budget.py": [
        ("begin runs that are not paid for", "[*to_come, event], rest) == len(to_come) + 1", "[*to_come, event], rest) >= len(to_come)",
         "end_to_end/test_cli_compare.py::test_a_payer_counts_runs_under_way_to_their_end"),
        ("count a run under way as it stands", "rest += self.ledger.filter.charge(whole) - found[0].charge", "rest += 0.0",
         "end_to_end/test_cli_compare.py::test_a_payer_counts_runs_under_way_to_their_end"),
    ],
    "dpcore/cli/train/run_folder.py": [
        ("leave the ledger out of config.json", 'repeated = {**settings, "ledger": None if ledger is None else str(ledger)}', 'repeated = {**settings, "ledger": None}',
         "end_to_end/test_cli_train.py::test_a_repetition_from_config_json_is_paid_for_by_the_same_ledger"),
    ],
    "dpcore/plan/scales.py": [
        ("halve the noise", "return share * sigma * contribution", "return 0.5 * share * sigma * contribution",
         "unit/plan/test_plan.py::test_the_noise_scale_comes_from_the_clip"),
        ("halve the noise of the square", "return math.sqrt(2) * sigma * (2 * max_batch_size - 1)",
         "return 0.5 * math.sqrt(2) * sigma * (2 * max_batch_size - 1)", "papers/test_noise.py"),
        ("take B for 2 B - 1", "(2 * max_batch_size - 1) * contribution**2", "max_batch_size * contribution**2", "unit/plan/test_scales.py"),
        ("leave independent moments at sigma each", 'share = math.sqrt(2) if update.second_moment == "independent" else 1.0', "share = 1.0",
         "papers/test_noise.py"),
        ("allow a larger joint scale", "JOINT_BOUND = 1 / math.sqrt(2)", "JOINT_BOUND = 1.01 / math.sqrt(2)", "unit/plan/test_scales.py"),
        ("allow a larger joint scale in one dimension", "JOINT_BOUND_1D = 1.665", "JOINT_BOUND_1D = 1.666", "unit/plan/test_scales.py"),
        ("take both shares of independent moments for one and a bit", "share = math.sqrt(2)", "share = math.sqrt(1.9)",
         "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[dp_adam independent]'"),
        ("count half an example less in the sensitivity of the square", "sigma * (2 * max_batch_size - 1) *", "sigma * (2 * max_batch_size - 1.5) *",
         "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[dp_adam independent]'"),
        ("allow joint moments a scale too large", "JOINT_BOUND = 1 / math.sqrt(2)", "JOINT_BOUND = 0.85",
         "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[dp_adam joint]'"),
        ("let adaptive bits be free", "return sigma / math.sqrt(1 - (sigma / (2 * bit_noise)) ** 2)", "return sigma", "unit/sampling/test_exact.py"),
    ],
    "dpcore/mechanism/drawing.py": [
        ("read ahead what nobody has paid for", "return None if unpaid or", "return None if", "unit/torch/test_ahead.py"),
        ("draw before the row is reserved", "            self.account.before_draw(self.step)\n", "            pass\n", "end_to_end/test_kill.py"),
        ("draw the whole batch in every process", "            return self.share.indices(self.keys.sampling, self.step)\n",
         "            return self.plan.sampler.indices(self.keys.sampling, self.step)\n", "unit/mechanism/test_peers.py"),
    ],
    "dpcore/stages/clipping/clipped_sum.py": [
        ("drop the clip", "weights[i] = factor", "weights[i] = 0 * factor + 1", "papers/test_methods.py"),
        ("clip before the scale is applied", "norms = norms_of(backend, blocks, grouping.members, scales)",
         "norms = norms_of(backend, blocks, grouping.members, [None] * len(blocks))", "papers/test_adaptive.py"),
    ],
    "backends/dpcore_triton/graphs.py": [
        ("replay a step with the numbers of the one before", "graph.numbers.copy_(numbers, non_blocking=True)",
         "graph.replays or graph.numbers.copy_(numbers, non_blocking=True)", "agreement/test_graphs.py"),
        ("forget the numbers among a recording's arguments", "return repr(value)", "return type(value)",
         "agreement/test_graphs.py"),
        ("replay a step under another key", "graph, device = self._graph(planned.key),", "graph, device = self._graph(planned.launches),",
         "agreement/test_graphs.py"),
    ],
    "backends/dpcore_triton/described.py": [
        ("take tensors of other strides for the recorded ones", "tuple(map(Tensor.size, tensors)), strides",
         "tuple(map(Tensor.numel, tensors))", "agreement/test_graphs.py"),
        ("take tensors with gaps for those without", "tuple(map(Tensor.size, tensors)), strides", "tuple(map(Tensor.size, tensors))",
         "agreement/test_kept_tables.py"),
        ("take tensors of other dtypes for the kept ones", "tuple(map(_DTYPE, tensors)), device", "device", "agreement/test_kept_tables.py"),
    ],
    "backends/dpcore_triton/step.py": [
        ("take tensors elsewhere for those of the step before", "key = (described, groups, shape,", "key = (len(described), groups, shape,",
         "agreement/test_graphs.py"),
        ("forget the settings' groups in a step's key", "key = (described, groups, shape,", "key = (described, shape,",
         "agreement/test_graphs.py"),
    ],
    "backends/dpcore_triton/layers.py": [
        ("give a layer the scale of another", "zip(layers, totals, accumulate(totals), given, strict=True)",
         "zip(layers, totals, accumulate(totals), given[1:] + given[:1], strict=True)",
         "agreement/test_ops_layers.py::test_layers_of_all_forms_have_the_bits_that_they_have_alone"),
        ("read the positions of the layer before", "stop - total, address(scale))", "max(0, stop - total - 1), address(scale))",
         "agreement/test_ops_layers.py::test_layers_of_all_forms_have_the_bits_that_they_have_alone"),
    ],
    "backends/dpcore_triton/linear.py": [
        ("weigh a layer by the factors of another", "for factor, total in zip(factors, out, strict=True)",
         "for factor, total in zip(factors[1:] + factors[:1], out, strict=True)",
         "agreement/test_ops_layers.py::test_layers_of_all_forms_have_the_bits_that_they_have_alone"),
        ("add up the squares of another layer", "Sum(_bound(row, way), exponent, place, own, row.first, row.total)",
         "Sum(_bound(row, way), exponent, 0, own, row.first, row.total)",
         "agreement/test_ops_layers.py::test_layers_of_all_forms_have_the_bits_that_they_have_alone"),
    ],
    "backends/dpcore_triton/passes.py": [
        ("replay a model's passes on the batch before", "torch._foreach_copy_(self._inputs, list(inputs))",
         "self.replays or torch._foreach_copy_(self._inputs, list(inputs))", "agreement/test_passes.py"),
        ("capture what reads a tensor of anybody's", "tensor.untyped_storage()._cdata in self._known for tensor in taken",
         "True for tensor in taken", "agreement/test_passes.py"),
        ("capture what Python was told of values", "self.refused = record.refused or handed.refused", "self.refused = record.refused",
         "agreement/test_passes.py"),
        ("capture what the host waits for", "self.refused = record.refused or handed.refused", "self.refused = handed.refused",
         "agreement/test_passes.py"),
        ("replay on the parameters and buffers of before", "whole = key, forms, where,", "whole = key, forms, len(read),",
         "agreement/test_passes.py"),
        ("replay on examples of another form", "whole = key, forms, where,", "whole = key, where,", "agreement/test_passes.py"),
    ],
    "dpcore/torch/model/repeated.py": [
        ("put two points' gradients in one place", "self.passes.of((key, tuple(made),", "self.passes.of((key[0], tuple(made),", "agreement/test_passes.py"),
        ("replay passes of another mode", "modes.append(module.training)", "pass", "agreement/test_passes.py"),
        ("never compare a replay", "if one.replays & (one.replays - 1):", "if one.replays:", "agreement/test_passes.py"),
        ("read a displaced point where it was", "made = [place for place, value in enumerate(point) if value.data_ptr() not in lasting]",
         "made: list[int] = []", "agreement/test_passes.py"),
        ("go on with a replay that the model contradicts", "if not alike(repeated, result, result) and not alike(repeated, result, anew()):",
         "if False:", "agreement/test_passes.py"),
    ],
    "dpcore/torch/rehearsal.py": [
        ("forget what captured passes keep", "limit.bytes // shares", "limit.bytes", "agreement/test_passes.py"),
    ],
    "backends/dpcore_triton/recording.py": [
        ("repeat what the host waits for", "if reasons:", "if False:", "agreement/test_graphs.py"),
        ("leave the results of a repeated operation as they were", "output.copy_(again)", "pass", "agreement/test_graphs.py"),
    ],
    "dpcore/mechanism/mechanism.py": [
        ("divide by one example less", "                plan.batch_size,\n", "                plan.batch_size - 1,\n",
         "papers/test_methods.py::test_the_average_divides_by_the_expected_batch_size"),
        ("draw the same row of noise at every step", "NoiseRow(self.keys.noise, row, Stream.GRADIENT,",
         "NoiseRow(self.keys.noise, 0, Stream.GRADIENT,", "papers/test_noise.py"),
        ("take a row as spent only after the draw", "            self.step += 1\n            self._caller_noise |=",
         "            self._caller_noise |=", "unit/mechanism/test_mechanism.py"),
        ("leave out the scale", "blocks, scales = scaled(blocks), self.vectors.scales", "pass", "papers/test_adaptive.py"),
        ("draw both moments' noise from one stream", "NoiseRow(self.keys.noise, row, Stream.SECOND_MOMENT,",
         "NoiseRow(self.keys.noise, row, Stream.GRADIENT,",
         "papers/test_noise.py::test_independent_moments_release_two_streams_that_know_nothing_of_each_other"),
        ("stream correlated noise with the first row's coefficients", "strategy.coefficients(row)\n", "strategy.coefficients(0)\n",
         "papers/test_noise.py"),
        ("draw the noise in the composed step only", "streamed = strategy is None or (correlation is not None and not square_scale)",
         "streamed = True", "papers/test_noise.py papers/test_srg.py"),
        ("add the noise of the first step's norm to all sums", "scale, square_scale = plan.noise_standard_deviation(row,",
         "scale, square_scale = plan.noise_standard_deviation(0,",
         "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[dp_adam delayed]'"),
        ("draw the noise on the bits from the gradient's stream", "z = reference.normal(self.keys.noise, row, Stream.CLIP_BOUND, 0,",
         "z = reference.normal(self.keys.noise, row, Stream.GRADIENT, 0,",
         "end_to_end/test_measured_sensitivity.py unit/stages/test_adaptive_clip.py"),
        ("add the noise of the first clip norm to all sums", "plan.noise_standard_deviation(row, self.clip_norm), ",
         "plan.noise_standard_deviation(row, None), ", "end_to_end/test_measured_sensitivity.py"),
        ("clip at the first clip norm throughout", "now = self.step, self.clip_norm", "now = self.step, None",
         "end_to_end/test_measured_sensitivity.py unit/stages/test_adaptive_clip.py"),
        ("lose the row of a sum that does not arrive", "            self._torn = True\n            try:\n                self.keys.begin(row)",
         "            try:\n                self.keys.begin(row)", "unit/mechanism/test_peers.py"),
        ("leave correlated noise torn after an interruption", "            self._torn = True\n            try:\n", "            self._torn = False\n            try:\n",
         "unit/mechanism/test_mechanism.py"),
    ],
    "dpcore/stages/filters/designs.py": [
        ("swap two coefficients of a named filter", '"first-order v2": ((3 / 11, -1 / 11)', '"first-order v2": ((-1 / 11, 3 / 11)',
         "papers/test_named_filters.py"),
    ],
    "dpcore/stages/filters/low_pass.py": [
        ("swap the filter's coefficients on their way to the backend", "FilterCoefficients(self.b, self.a,",
         "FilterCoefficients(self.b[::-1], self.a,", "unit/stages/test_filters_stages.py"),
    ],
    "dpcore/stages/clipping/clip.py": [
        ("sensitivity of the groups' mean instead of their root sum of squares", "math.sqrt(math.fsum(bound**2 for bound in grouping.bounds))",
         "math.fsum(grouping.bounds) / len(grouping.bounds)", "unit/stages/test_clip.py::test_groups_and_what_they_are_worth"),
        ("take the clip norm for the normalized rule's sensitivity", "return Sensitivity(math.sqrt(len(grouping.bounds)))",
         "return Sensitivity(self.max_grad_norm)", "papers/test_methods.py"),
    ],
    "dpcore/plan/plan.py": [
        ("account for half of the steps", "event = self.sampler.event(sigma, steps)\n", "event = self.sampler.event(sigma, (steps + 1) // 2)\n",
         "unit/plan/test_plan.py::test_the_sampler_and_the_event_are_one"),
        ("leave abandoned steps out of epsilon", "event = self.sampler.event(sigma, steps + number)", "event = self.sampler.event(sigma, steps + 0)",
         "unit/mechanism/test_mechanism.py"),
        ("forget that replacement moves twice as far", "noise_multiplier=event.noise_multiplier / 2,", "noise_multiplier=event.noise_multiplier,",
         "unit/plan/test_plan.py::test_joint_moments_are_half_the_noise_relative_to_a_replacement"),
        ("let independent moments meet Poisson sampling", 'if moment == "independent" and not bounded:', 'if moment == "none" and not bounded:',
         "unit/plan/test_plan.py"),
        ("let joint moments meet batches of two", "single = self.sampler.max_batch_size == 1 and self.batch_size == 1 and", "single = True or",
         "unit/plan/test_plan.py::test_what_the_analysis_does_not_cover_is_refused"),
        ("let correlated noise meet secret batches", "            self.sampler.check_strategy(strategy, self.steps)\n", "", "unit/plan/test_plan.py"),
        ("account for the noiseless second moment as if it had noise", 'if moment == "noiseless":', 'if moment == "none":',
         "papers/test_adaptive.py::test_the_noiseless_preconditioner_is_its_loop_and_not_private"),
        ("leave out the abandoned branches of correlated noise", "return math.hypot(*(self._reach(*rows) for rows in left))", "return 0.0",
         "unit/plan/test_plan.py"),
        ("take a strategy's word for its own noise", "            check_streaming(strategy, self.steps)\n", "", "unit/plan/test_plan.py"),
    ],
    "backends/dpcore_numpy/linear.py": [
        ("let terms that cancel share a product", "alike: NDArray[np.bool_] = norms >= 2 * CANCELLATION * terms",
         "alike: NDArray[np.bool_] = norms >= 0 * terms",
         "unit/backends/test_pairs.py::test_examples_that_cancel_do_not_round_the_sum"),
        ("add what is exact in float32", "factors, wide = weights.astype(np.float64), layer.exact or a.double",
         "factors, wide = weights.astype(np.float64), a.double",
         "unit/backends/test_pairs.py::test_a_linear_norm_bounds_what_the_sum_adds"),
        ("take zeros beside infinities for nothing", "np.where(sizes == 0, 0.0, x)",
         "np.where((a.measured[1].sum(axis=1) == 0) | (e.measured[1].sum(axis=1) == 0), 0.0, x)",
         "unit/backends/test_pairs.py::test_what_is_not_finite_has_no_finite_norm_and_no_part_in_a_sum"),
        ("add pairs of weight 0", "used = out.reshape(e.width, a.width), np.flatnonzero(weights)",
         "used = out.reshape(e.width, a.width), np.arange(len(weights))",
         "unit/backends/test_pairs.py::test_what_is_not_finite_has_no_finite_norm_and_no_part_in_a_sum"),
        ("let terms cancel in a product", "norms = np.maximum(norms, CANCELLATION * terms)",
         "pass",
         "unit/backends/test_pairs.py::test_what_cancels_keeps_the_share_that_sums_rely_on"),
    ],
    "backends/dpcore_numpy/joined.py": [
        ("do not raise the norm of a group by its rounding", "return 1 + (count + 8) * 2.0**-53", "return 1.0", "unit/stages/test_blocks.py"),
        ("square the norms of a group as they are", "total = total + (total == 0)", "total = total * 0 + 1", "unit/stages/test_blocks.py"),
    ],
    "backends/dpcore_triton/joined.py": [
        ("join the norms of another group", "start = tl.load(row)\n", "start = tl.load(groups)\n",
         "agreement/test_ops_layers.py::test_joined_norms_are_those_of_the_reference"),
    ],
    "backends/dpcore_numpy/gram.py": [
        ("trust float64 inner products", "np.maximum(square, 0) + error * np.square(terms)",
         "np.maximum(square, 0)",
         "unit/backends/test_pairs.py::test_examples_that_cancel_do_not_round_the_sum"),
        ("trust float32 inner products", "+ g * (1 + g) * off",
         "+ 0 * off",
         "unit/backends/test_pairs.py::test_float32_norms_hold_where_points_cancel"),
    ],
    "backends/dpcore_numpy/pairs.py": [
        ("lose the sign of a single part", "self.unit = float(given[np.abs(given).argmax()])",
         "self.unit = float(np.abs(given).max())",
         "unit/backends/test_pairs.py::test_matrices_of_several_tiles"),
        ("multiply several examples in float32", "out = np.empty((len(blocks[0]), self.time, blocks[0].shape[2]))",
         "out = np.empty((len(blocks[0]), self.time, blocks[0].shape[2]), np.float32)",
         "unit/backends/test_pairs.py::test_a_linear_norm_bounds_what_the_sum_adds"),
    ],
    "backends/dpcore_numpy/embedding.py": [
        ("add tokens of weight 0", "out.reshape(size, e.width), np.flatnonzero(weights)",
         "out.reshape(size, e.width), np.arange(len(weights))",
         "unit/backends/test_pairs.py::test_what_is_not_finite_has_no_finite_norm_and_no_part_in_a_sum"),
        ("take padding's gradients in", "    rows[index < 0] = 0.0\n",
         "",
         "unit/backends/test_pairs.py::test_an_embedding_norm_bounds_what_the_sum_adds"),
    ],
    "backends/dpcore_numpy/tied.py": [
        ("leave out the cross term of tied uses", "2 * (_cross(indices, g, a, e, unit, by.matmul) + error)",
         "2 * error",
         "unit/backends/test_pairs.py::test_the_norm_of_a_tied_matrix_bounds_what_both_sums_add"),
        ("let the terms of a tied matrix cancel", "bound = np.maximum(bound, CANCELLATION * linear.terms)", "pass",
         "unit/backends/test_pairs.py::test_what_cancels_keeps_the_share_that_sums_rely_on"),
        ("let tied uses cancel", "np.maximum(norms, TIED * (",
         "np.maximum(norms, 0 * TIED * (",
         "unit/backends/test_pairs.py::test_what_cancels_keeps_the_share_that_sums_rely_on"),
    ],
    "backends/dpcore_numpy/clip.py": [
        ("sum in float32", "total[columns] += factors @ values",
         "total[columns] = np.float32(total[columns]) + np.float32(factors) @ np.float32(values)", "unit/mechanism/test_sums.py"),
        ("halve the norm that bounds a vector under psac", "factor = lowered / (raised + PSAC_STABILITY",
         "factor = lowered / (raised / 2 + PSAC_STABILITY", "unit/stages/test_clip.py"),
        ("trust the measured norm", "lowered = (bound - underflow) * (1 - 2 * float(info.eps))", "lowered = bound", "unit/stages/test_clip.py"),
        ("accumulate norms in float32", 'squares[part] += np.vecdot(values, values)',
         "squares[part] += np.square(values, dtype=np.float32).cumsum(axis=1)[:, -1]", "unit/stages/test_clip.py"),
        ("multiply a NaN row by zero", "if not used[rows_].all():", "if False:", "unit/stages/test_clip.py"),
    ],
    "dpcore/mechanism/loop.py": [
        ("carry a unit on in memory that the next part is written to", "as_block(block.rows() + 0)", "as_block(block.rows())",
         "agreement/test_passes.py::test_a_training_run_is_that_without_graphs"),
        ("clip each view by itself", "units * self.views, most", "np.repeat(units, self.views), most", "unit/torch/test_augmentations.py"),
        ("add up the views of an example", "float(point.weight) / self.views", "float(point.weight)", "unit/torch/test_augmentations.py"),
        ("clip the examples of a user one by one", "for units in [blocks] if sizes is None else", "for units in [blocks] if sizes is None or not more else",
         "unit/sampling/test_users.py"),
        ("forget the part of a user that an earlier micro-batch held", "units = [joined(both) for both in zip(units, begun, strict=True)]", "pass",
         "unit/mechanism/test_sources.py"),
    ],
    "dpcore/stages/clipping/blocks.py": [
        ("give every point of a query the weight of the last", "backend.combine(*values, (factor, weight))", "backend.combine(*values, (weight, weight))",
         "papers/test_disk.py unit/stages/test_blocks.py"),
        ("give a user the examples of others of its size", "array[which]", "array[np.roll(which, 1)]",
         "unit/stages/test_blocks.py unit/mechanism/test_sources.py"),
    ],
    "dpcore/stages/clipping/together.py": [
        ("leave a tensor out of its group's norm", "[own[i] for i in members if i in own]", "[own[i] for i in members if i in own][bool(rows) :]",
         "unit/stages/test_blocks.py"),
        ("take the norms of layers without their scales", "[scales[i] for i in layers]", "[None for i in layers]", "unit/stages/test_blocks.py"),
    ],
    "dpcore/stages/clipping/pairs.py": [
        ("take float32 products where points are subtracted", "return min(self.point_weights) < 0 < max(self.point_weights)", "return False",
         "unit/stages/test_blocks.py"),
        ("forget the second use of a matrix", "return Linear(self.inputs + other.inputs, self.gradients + other.gradients, weights, gram)", "return self",
         "unit/stages/test_blocks.py"),
    ],
    "dpcore/stages/clipping/tied.py": [
        ("sum a tied matrix by another arithmetic than its norm's", "_replace(exact=self.exact)", "_replace(exact=False)",
         "unit/stages/test_blocks.py"),
        ("forget the table of a tied matrix", "            part.embedding.add_sum(backend, weights[some], out)\n", "", "unit/mechanism/test_sources.py"),
    ],
    "dpcore/mechanism/composed_step.py": [
        ("take the dimension of the first tensor for that of all, in the optimal filter", "power = self.dimension *",
         "power = self.layout.entries[0].size *", "unit/mechanism/test_mechanism.py"),
        ("halve the noise, in the composed step", "g = noise.scale * self._noise(", "g = 0.5 * noise.scale * self._noise(", "papers/test_noise.py"),
        ("divide by one example less, in the composed step", "self._cast(g / self.batch_size, slot.parameter)",
         "self._cast(g / (self.batch_size - 1), slot.parameter)", "papers/test_noise.py"),
        ("take the filter's square for the released one", 'if square == "released":\n            return g * g',
         'if square == "released":\n            return None', "papers/test_doppler.py"),
        ("count a clean run's noise twice in the optimal filter", "power = self.dimension * (noise.scale / self.batch_size) ** 2",
         "power = 2 * self.dimension * (noise.scale / self.batch_size) ** 2", "papers/test_doppler.py"),
        ("keep GaLore's first projection for ever", "if noise.row % self.method.galore.every == 0:", "if noise.row == 0:", "papers/test_doppler.py"),
    ],
    "backends/dpcore_torch/arithmetic.py": [
        ("let torch round products to bfloat16", 'torch.autocast("cpu", enabled=False)', 'torch.autocast("cpu", enabled=torch.is_autocast_enabled("cpu"))',
         "unit/backends/test_pairs.py::test_products_stay_float32_where_torch_is_told_to_be_fast"),
        ("end the arithmetic of another thread", "            if not self._inside:\n                torch._C._set_mkldnn_enabled(self._enabled)",
         "            torch._C._set_mkldnn_enabled(self._enabled)", "unit/backends/test_arithmetic.py"),
        ("read denormals as the caller does", "flushes = denormals_are_zero()", "flushes = False", "unit/backends/test_arithmetic.py"),
        ("ask no worker how it reads denormals", "if _known.asked == asked:", "if True:", "unit/backends/test_arithmetic.py"),
    ],
    "backends/dpcore_numpy/denormals.py": [
        ("measure where denormals read as zero", "    if denormals_are_zero():", "    if False:", "unit/backends/test_arithmetic.py"),
    ],
    "backends/dpcore_torch/clip.py": [
        ("measure by the size of the batch", "measure = _squares if block.shape[1] <= _SHORT", "measure = _squares if block.numel() <= _SHORT",
         "unit/backends/test_alone.py"),
        ("trust norms of float32 runs", "norms.mul_(1 + 2.0**-18)", "pass",
         "agreement/test_ops_clip.py::test_norms_of_large_blocks_are_upper_bounds"),
        ("trust norms beyond float32", "others = ((norms < 2.0**-40)", "others = ((norms < 0)",
         "agreement/test_ops_clip.py::test_norms_of_large_blocks_are_upper_bounds"),
        ("multiply a NaN row by zero in torch", "if len(unused):", "if False:", "agreement/test_ops_clip.py"),
    ],
    "backends/dpcore_torch/linear.py": [
        ("round an example's product by the batch", "for tile, left, right in zip(tiles.unbind(), *sides, strict=True):\n                    torch.mm(left, right, out=tile)",
         "torch.bmm(*map(torch.stack, sides), out=tiles)", "unit/backends/test_alone.py"),
        ("add products of several examples in float32", "out.addmm_(y.mT, x)", "out.add_(y.float().mT @ x.float())",
         "unit/backends/test_pairs.py::test_many_examples"),
        ("trust float32 inner products of torch", "off.numpy(), terms, _COLUMNS)", "0 * off.numpy(), terms, _COLUMNS)",
         "unit/backends/test_pairs.py::test_float32_norms_hold_where_points_cancel"),
        ("lose the powers of two that were taken off", "np.ldexp(weights * e.unit, a.measured[0] + e.measured[0])", "weights * e.unit",
         "unit/backends/test_pairs.py::test_a_linear_norm_bounds_what_the_sum_adds"),
    ],
    "dpcore/torch/parameter_views.py": [
        ("round what nobody changed", "torch.where(own.to(new.dtype) == new, own, new, out=own)", "own.copy_(new)",
         "unit/torch/test_parameter_views.py"),
        ("miss what the user did to 16-bit parameters", "torch.where(own.to(new.dtype) == new, own, new, out=own)", "torch.where(own == own, own, new, out=own)",
         "unit/torch/test_parameter_views.py"),
        ("take zeros for the first values of a copy", 'float("nan"), dtype', "0.0, dtype", "unit/torch/test_parameter_views.py"),
    ],
    "dpcore/spec/memory.py": [
        ("let one element be shared, at the quick look", "return not (starts[1:] < before).any()", "return not (starts[1:] + 8 < before).any()",
         "agreement/test_bad_input.py::test_one_element_in_common_is_too_many"),
        ("look at changed arrays alone, at the quick look", "np.where(is_changed[1:], *(", "np.where(False, *(",
         "unit/spec/test_quick_checks.py"),
        ("let one element be shared", "if start < end:", "if start + 8 < end:", "agreement/test_bad_input.py::test_one_element_in_common_is_too_many"),
        ("look at changed arrays alone", "end, other = (any_end, any_name) if is_changed", "end, other = (changed_end, changed_name) if is_changed",
         "agreement/test_bad_input.py::test_what_is_changed_in_place_shares_no_memory"),
        ("take read-only arrays", "if changed and not flags.writeable and array.nbytes:", "if False:", "agreement/test_bad_input.py::test_what_cannot_be_written_changes_nothing"),
        ("take arrays of two devices", "!= expected:", "!= expected and False:", "agreement/test_bad_input.py::test_arrays_elsewhere_change_nothing"),
    ],
    "backends/dpcore_torch/noise.py": [
        ("lose the sign of the sine", ".bitwise_and_(_SIGN)", ".bitwise_and_(0)", "agreement/test_ops_stream.py"),
        ("leave the tail as it is", "return np.flatnonzero((words < TAIL_BOUND)", "return np.flatnonzero((words < 0)",
         "agreement/test_ops_stream.py"),
    ],
    "backends/dpcore_torch/step.py": [
        ("round before the noise", "n.to(torch.float64, copy=True)", "n.clone()", "agreement/test_ops_step.py"),
    ],
    "backends/dpcore_numpy/filter.py": [
        ("forget the bias correction", "return y if normalizer == 1 else y / normalizer", "return y", "papers/test_doppler.py"),
    ],
    "dpcore/stages/filters/first_order.py": [
        ("start DiSK's average at zero", "(1.0 if step == 0 else self.kappa,)", "(self.kappa,)", "papers/test_disk.py"),
    ],
    "dpcore/stages/queries/two_point.py": [
        ("invert DiSK's weight", "(1 - k) / (k * self.gamma)", "k / ((1 - k) * self.gamma)", "papers/test_disk.py"),
    ],
    "dpcore/spec/layout.py": [
        ("draw the noise of every piece from the tensor's beginning", "(stop - start,), entry.first + start)", "(stop - start,), entry.first)",
         "unit/mechanism/test_peers.py"),
        ("let shards overlap", "for end in (rank, rank + 1))", "for end in (0, rank + 1))",
         "end_to_end/test_processes_sharded.py::test_refusals_and_a_failure"),
    ],
    "dpcore/mechanism/shared_account.py": [
        ("let a process draw what the first has not paid for", "        self._ask(lambda account: account.before_draw(step))", "        pass",
         "end_to_end/test_processes_ledger.py::test_no_process_draws_what_is_not_paid_for"),
    ],
    "dpcore/mechanism/peers.py": [
        ("keep a refusal to the first process", "    if told is not None:\n", "    if False:\n",
         "end_to_end/test_processes_ledger.py::test_all_stop_where_the_budget_does"),
    ],
    "dpcore/torch/processes.py": [
        ("leave the other processes' sums out", "                exchange(found, sent, self._group)",
         "                found.copy_(sent / self.world_size)", "end_to_end/test_processes.py::test_several_processes_are_one_run"),
        ("round what counts in the sensitivity", 'dtype_name(like[0]) == "float32" and message_rounding(terms) <= ROUNDING_COUNTED',
         'dtype_name(like[0]) == "float32"', "end_to_end/test_processes_sums.py"),
        ("round small sums to nothing", "unit = math.ldexp(1.0, max(-1000, min(math.frexp(contribution)[1], 1000)))", "unit = 1.0",
         "end_to_end/test_processes_sums.py"),
        ("add messages in float32", "torch.sum(found, 0, dtype=torch.float64, out=own[start : start + columns])",
         "own[start : start + columns] = torch.sum(found, 0)", "end_to_end/test_processes_sums.py"),
        ("go on where another process failed", "if ranks := flags[0].nonzero()[:, 0].tolist():", "if ranks := []:",
         "end_to_end/test_processes.py::test_failures_end_all_processes_with_a_sentence"),
        ("let learning rates differ", "if others := (row != row[0]).any(1).nonzero()[:, 0].tolist():", "if others := []:",
         "end_to_end/test_processes.py::test_failures_end_all_processes_with_a_sentence"),
        ("let processes differ", "        if told:\n", "        if False:\n",
         "end_to_end/test_processes.py::test_failures_end_all_processes_with_a_sentence"),
    ],
    "dpcore/torch/hosts/arguments.py": [
        ("ignore a training argument that is not known", "        if name not in OF_THE_METHOD:\n", "        if name not in OF_THE_METHOD and name not in REASONS:\n            continue\n        if name not in OF_THE_METHOD:\n",
         "end_to_end/test_hosts_hugging_face.py::test_every_field_is_kept_or_refused_and_none_is_ignored"),
    ],
    "dpcore/torch/hosts/hugging_face.py": [
        ("evaluate the training data", "        if any(overlapping(self.train_dataset, each) for each in named):\n", "        if False:\n",
         "end_to_end/test_hosts_hugging_face.py::test_evaluation_prediction_and_the_card"),
    ],
    "dpcore/torch/hosts/resuming.py": [
        ("let all read the keys", "save_state(Path(folder) / FILE, whole)", "torch.save(whole, Path(folder) / FILE)",
         "end_to_end/test_hosts_hugging_face.py::test_a_checkpoint_goes_on"),
        ("go on from the average", "            value.copy_(saved[\"parameters\"][name])", "            pass",
         "end_to_end/test_hosts_hugging_face.py::test_the_methods_output_is_evaluated_saved_and_left_in_the_model"),
    ],
    "dpcore/torch/shards.py": [
        ("leave the other processes' sums out of a shard", "processes.reduce_scatter(own, whole, self._group)",
         "own.copy_(whole.chunk(self.world_size)[self.rank])", "end_to_end/test_processes_sharded.py::test_shards_are_one_run"),
        ("release what layers gathered in different orders", "if any(not torch.equal(order, every[self.rank, 0]) for", "if any(False for",
         "end_to_end/test_processes_sharded.py::test_refusals_and_a_failure"),
        ("go on midway through a step of a sharded model", "        if self._begun:\n", "        if False:\n", "end_to_end/test_processes_sharded.py::test_refusals_and_a_failure"),
    ],
    "dpcore/torch/model/sharded_gradient.py": [
        ("count made-up examples where a process has none", "            self._by(self.way, point, trial_batch",
         "            return self._by(self.way, point, trial_batch", "end_to_end/test_processes_sharded.py::test_shards_are_one_run"),
    ],
    "dpcore/torch/model/sharded_values.py": [
        ("leave a point's values in the shards", "            _fill(shards, kept)\n", "            pass\n", "end_to_end/test_processes_sharded.py::test_shards_are_one_run"),
        ("let fully_shard add gradients up", "group.reduce_grads = False", "group.reduce_grads = True", "end_to_end/test_processes_sharded.py::test_shards_are_one_run"),
    ],
    "dpcore/sampling/sharding.py": [
        ("begin every share at the first example", "return self._range(self.sampler.indices(key, step).size)[0]", "return 0",
         "unit/mechanism/test_peers.py::test_the_place_of_a_share"),
    ],
    "dpcore/mechanism/state.py": [
        ("release where another process would take another step", "state=repr(now)", 'state=""',
         "end_to_end/test_processes.py::test_processes_that_load_other_states_are_refused"),
        ("leave the sum to the next step", "self.backend.clear(self.vectors.totals)", "pass", "unit/mechanism/test_mechanism.py"),
        ("refresh the scale at every scaled step", "query.phase(self.step) is not Phase.REFRESHED", "query.phase(self.step) is Phase.UNSCALED",
         "papers/test_adaptive.py"),
        ("leave the sum of an interrupted step to the next", "if self._summed != self.step:", "if False:", "unit/mechanism/test_mechanism.py"),
    ],
    "dpcore/accounting/pld/problem.py": [
        ("compose one direction of the adjacency only", '("remove",) if one_sided else ("remove", "add")', '("add",)', "unit/accounting/test_pld.py"),
    ],
    "dpcore/accounting/pld/compose.py": [
        ("leave the mass outside of the window out of an upper bound",
         "slack = noise + beyond + outside * math.exp(max(-700.0, -theta * (top - reference)))", "slack = noise + beyond",
         "unit/accounting/test_pld_rounding.py"),
        ("leave what wraps into the window in a lower bound", "slack = noise + 2.0 * outside * math.exp(log_peak) * decay", "slack = noise",
         "unit/accounting/test_pld_rounding.py::test_a_window_that_is_far_too_small_loosens_the_bounds_and_never_breaks_them"),
        ("forget the thickest point in the convolution", "product *= power(thick + rfft(folded), times)", "product *= _power(rfft(folded), times)",
         "unit/accounting/test_pld.py"),
        ("transforms are exact", "return total * _UNIT", "return 0.0", "unit/accounting/test_pld_rounding.py"),
    ],
    "dpcore/accounting/pld/discretize.py": [
        ("raise losses to the wrong end of a cell", "/ -np.expm1(-width)", "/ np.expm1(width)", "unit/accounting/test_pld.py"),
    ],
    "dpcore/accounting/pld/loss.py": [
        ("leave the atom at loss 0 out of subsets", "atom = (1.0 - rate) * special.erf(0.5 / (np.sqrt(2.0) * sigma))", "atom = 0.0 * sigma",
         "unit/accounting/test_pld_oracle.py"),
    ],
    "dpcore/accounting/opacus.py": [
        ("read the first phase of a history only", "return phases[0] if len(phases) == 1 else Composed(phases)", "return phases[0]", "unit/accounting/test_opacus.py"),
        ("take a rate for a noise multiplier", "noise_multiplier, sample_rate, steps = entry", "sample_rate, noise_multiplier, steps = entry",
         "unit/accounting/test_opacus.py"),
    ],
    "dpcore/torch/opacus.py": [
        ("unpickle a stranger's checkpoint", "weights_only=True)", "weights_only=False)", "unit/accounting/test_opacus.py"),
    ],
    "dpcore/accounting/phases.py": [
        ("take the plain rate for a truncated batch", "inside, outside = q * almost + cut, (1.0 - q) * almost",
         "inside, outside = q * almost, (1.0 - q) * almost", "unit/sampling/test_truncated.py"),
    ],
    "dpcore/accounting/calibrate.py": [
        ("calibrate without what was spent", "else Composed((self._spent, event))", "else event", "unit/accounting/test_calibrate.py"),
    ],
    "dpcore/ledger/places.py": [
        ("let a ledger lie anywhere", "if not kind or kind in KNOWN or kind in accepted:", "if True:", "unit/ledger/test_files.py"),
    ],
    "dpcore/stages/updates/galore.py": [
        ("turn GaLore's basis while the moments stay", "if previous is not None and previous.any():", "if False:",
         "unit/stages/test_galore.py papers/test_doppler.py"),
    ],
    "backends/dpcore_numpy/update.py": [
        ("take Nesterov's step before the momentum", "else g + beta1 * m)", "else g + m)", "unit/stages/test_updates.py"),
    ],
    "dpcore/stages/queries/base.py": [
        ("take points that are not kept", "if not 0 <= lag <= step or needed > query.lags:", "if False:", "unit/plan/test_plan.py"),
    ],
    "dpcore/stages/checked_steps.py": [
        ("ask own stages for the first and the last step only", "(*range(min(steps - 1, CHECKED_STEPS)), steps - 1)", "(0, steps - 1)",
         "unit/plan/test_plan.py"),
    ],
    "dpcore/torch/data/remarks.py": [
        ("say nothing of values that are not finite", "        if not finite:", "        if False:", "unit/torch/test_training_warnings.py"),
    ],
    "dpcore/cli/train/training.py": [
        ("go on with parameters that are no numbers", "if halt and not self._finite():", "if False:", "unit/cli/test_divergence.py"),
    ],
    "dpcore/stages/filters/base.py": [
        ("take an unstable filter of the callers own", "if largest > 1 + _ROUNDING:", "if False:", "unit/plan/test_plan.py"),
    ],
    "dpcore/ledger/privacy_filter.py": [
        ("give more than the budget to a ledger's filter", "return epsilon - np.log1p(-1.0 / orders)",
         "return epsilon - 2.0 * np.log1p(-1.0 / orders)", "unit/ledger/test_filter.py"),
    ],
    "dpcore/statement/verify/compare.py": [
        ("believe a stated epsilon that is too small", "if stated < derived or math.isnan(stated):", "if False:", "unit/statement/test_verify.py"),
        ("verify a method by what it says of itself", '_field("method", statement.method,', '_field("method", derived.method | free,',
         "unit/statement/test_forgery.py"),
        ("verify the noise by what it says of itself", '_field("noise", noise, derived.noise', '_field("noise", derived.noise, derived.noise',
         "unit/statement/test_verify.py"),
    ],
    "dpcore/audit/bounds.py": [
        ("count a canary found as one half", "betaincinv(inside + 1.0,", "betaincinv(inside + 0.5,",
         "unit/audit/test_audit.py::test_clopper_pearson_is_scipys"),
    ],
    "dpcore/audit/betting.py": [
        ("let the wealth grow under the claim", "THETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)",
         "THETAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.9)", "unit/audit/test_betting.py"),
        ("allow half of what a claim allows", "ndtr(ratio * np.array(self._mus) / 2)", "ndtr(ratio * np.array(self._mus) / 4)",
         "unit/audit/test_betting.py::test_the_bound_never_falls_and_nears_what_ran"),
        ("add the bets up instead of their mean", "- math.log(len(THETAS)))", ")",
         "unit/audit/test_betting.py::test_the_wealth_has_expectation_one_under_the_claim"),
    ],
    "dpcore/torch/doctor/canaries.py": [
        ("let canaries be clipped to nothing", "columns[i] *= np.asarray(factor)[:, None]", "columns[i] *= 1.0",
         "unit/torch/test_doctor_audit.py::test_clipped_vectors_are_those_of_the_formula"),
        ("forget that scaled gradients are clipped after the scale", "total = total * scale_of(run) * each", "total = total * each",
         "unit/torch/test_doctor_audit.py::test_what_canaries_are_known_to_add_is_what_the_run_sums"),
        ("know the first step's vectors alone", "if type(run.plan.method.query) is not Plain or", "if",
         "'unit/torch/test_doctor_audit.py::test_the_same_run_with_its_noise_halved_is_refuted_by_the_canaries_alone[disk, far points]'"),
    ],
    "dpcore/torch/doctor/audit_run.py": [
        ("take correlated noise for white", "self.matrix[t, : t + 1] @ self.noise[: t + 1]", "self.matrix[t, t] * self.noise[t]",
         "'unit/torch/test_doctor_audit.py::test_an_honest_run_passes_and_half_of_its_noise_is_refuted[srg_memf]'"),
    ],
    "dpcore/torch/doctor/steps.py": [
        ("audit users of one example each", "np.full(self.users, self.each)", "np.full(self.users * self.each, 1)",
         "'unit/torch/test_doctor_audit.py::test_an_honest_run_passes_and_half_of_its_noise_is_refuted[users]'"),
    ],
    "dpcore/torch/doctor/unchanged.py": [
        ("leave what the doctor changed", "                snapshot.restore()", "                pass",
         "unit/torch/test_doctor.py::test_everything_is_left_as_it_was"),
    ],
    "dpcore/torch/doctor/reading.py": [
        ("take another index's example for an augmentation", "return any(j != k and _same(known, row)", "return any(j == k and _same(known, row)",
         "'unit/torch/test_doctor.py::test_a_planted_fault_is_found_and_named[data_that_go_on]'"),
    ],
    "dpcore/torch/model/trial.py": [
        ("try no model for mixing", "for check in (trial.registered, trial.mixing, trial.state):", "for check in (trial.registered, trial.state):",
         "unit/torch/test_check_module.py"),
    ],
    "dpcore/sampling/fixed_order.py": [
        ("count a branch of a kept order once, however long", "max((int((steps >= first).sum()) for steps",
         "max((int((steps >= first).any()) for steps", "unit/plan/test_plan.py"),
        ("account for a strategy as for single participation", "return sensitivity(strategy, self.patterns(steps), steps, first)",
         "return sensitivity(strategy, [p[:1] for p in self.patterns(steps)], steps, first)", "unit/plan/test_plan.py"),
    ],
    "dpcore/ledger/state.py": [
        ("count a fork's rows as rows of the plan", "return releases == mark <= run.planned_steps or within(",
         "return mark <= run.planned_steps or within(", "unit/ledger/test_fixed.py"),
    ],
    "dpcore/ledger/fixed.py": [
        ("add runs chosen later to a plan that keeps the whole budget", "return self.limit is not None and self.charge > self.limit", "return False",
         "unit/ledger/test_fixed.py"),
        ("count any Gaussian as a part of the plan", "return part.mu <= whole.mu", "return True", "unit/ledger/test_fixed.py"),
    ],
    "dpcore/mechanism/saving.py": [
        ("go on without the correlated noise that a state lacks", "self._torn = lost", "self._torn = False",
         "unit/mechanism/test_streaming.py::test_vectors_that_were_lost_are_made_anew"),
        ("resume under the same noise", "forked = keys.fork(keep_sampling=keep, forks=self.keys.forks, row=row, number=number)",
         "forked = keys", "unit/mechanism/test_mechanism.py"),
    ],
    "dpcore/spec/keys.py": [
        ("forget which rows were released", "if row < _begun.get(self.digest, 0):", "if row < 0:", "unit/mechanism/test_mechanism.py"),
        ("give earlier rows of noise the key of the latest fork", "            if first < min(end, row):",
         "            if end == row and key == self.noise:",
         "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[pmlf]'"),
    ],
    "dpcore/plan/step_scales.py": [
        ("clip scaled vectors at the norm of unscaled ones", "scaled = replace(plain, max_grad_norm=query.max_scaled_norm)", "scaled = plain",
         "unit/plan/test_plan.py"),
        ("take the unscaled norm for the noise of scaled steps", "self.gradient_noise_multiplier, self.sensitivity_at(step, norm).contribution",
         "self.gradient_noise_multiplier, self.sensitivity_at(0 * step, norm).contribution",
         "papers/test_noise.py::test_scaled_steps_have_noise_of_the_norm_in_force_on_the_scaled_sum"),
        ("take the denominator for the largest batch", "            self.sampler.max_batch_size,\n        )",
         "            int(self.batch_size),\n        )", "papers/test_adaptive.py"),
        ("release the bits of the adaptive clip without raising the noise on the sum",
         "return scales.raised_multiplier(self.noise_multiplier, self.bit_noise_standard_deviation)", "return self.noise_multiplier",
         "end_to_end/test_measured_sensitivity.py"),
    ],
    "dpcore/sampling/cyclic_poisson.py": [
        ("forget the coins that two branches share",
         "return Composed((own, others, Gaussian(noise_multiplier / column_norm, 2 * branches, Adjacency.ZERO_OUT)))",
         "return Composed((own, others))", "'end_to_end/test_measured_sensitivity.py::test_branches_of_a_cyclic_run_share_a_coin[389]'"),
        ("let more bands than groups be amplified", "if found > self.groups:", "if found > self.groups + 1:", "unit/sampling/test_cyclic.py"),
    ],
    "dpcore/sampling/shuffled.py": [
        ("give an epoch the order of the first", "draw.permutation(key, self.dataset_size, epoch)", "draw.permutation(key, self.dataset_size, 0)",
         "unit/sampling/test_shuffled.py::test_orders_are_uniform_and_fresh_in_every_epoch"),
    ],
    "dpcore/sampling/truncated_poisson.py": [
        ("cut a full batch at its first examples",
         "batch = batch[draw.subset(draw.after(words, self.dataset_size), batch.size, self.max_batch_size)]", "batch = batch[: self.max_batch_size]",
         "unit/sampling/test_truncated.py"),
    ],
    "backends/dpcore_numpy/ring.py": [
        ("read a ring one place off", "vectors[(place - j) % len(vectors)]", "vectors[(place - j + 1) % len(vectors)]", "unit/backends/test_ring.py"),
        ("write a ring one place off", "vectors[place][...] =", "vectors[place - 1][...] =", "unit/backends/test_ring.py"),
        ("keep the rows of Z in a ring of noise", 'y if keeps == "output" else x', "x", "unit/backends/test_ring.py"),
        ("leave a ring undivided", "y = y / float(normalizer)", "pass", "unit/backends/test_ring.py"),
    ],
    "backends/dpcore_torch/ring.py": [
        ("read a ring one place off, in torch's threads", "vectors[(place - j) % len(vectors)]", "vectors[(place - j + 1) % len(vectors)]",
         "unit/backends/test_ring.py"),
        ("sum a ring in the memory of its input, in torch's threads", "y = x.clone() if weights else x", "y = x", "unit/backends/test_ring.py"),
    ],
    "backends/dpcore_triton/ring.py": [
        ("read a ring one place off, in the kernel", "(place + ORDER - j) % ORDER", "(place + ORDER - j + 1) % ORDER",
         "agreement/test_ops_step.py::test_rings_agree"),
        ("keep the rows of Z in a ring of noise, in the kernel", 'divided if KEEPS == "output" else x', "x",
         "agreement/test_ops_step.py::test_rings_agree"),
        ("take a ring's weight of the step before, in the kernel", "weight = tl.load(taps + j)", "weight = tl.load(taps + j - 1)",
         "agreement/test_ops_step.py::test_rings_agree"),
    ],
    "dpcore/stages/strategies/banded.py": [
        ("turn the sign of a band", "-float(self.bands[j, t - j])", "float(self.bands[j, t - j])", "unit/stages/test_strategies.py"),
        ("stream a column of C for its row", "-float(self.bands[j, t - j])", "-float(self.bands[j, t])", "unit/stages/test_strategies.py"),
        ("move the place of a ring", "step % max(len(weights), 1)", "(step + 1) % max(len(weights) + 1, 1) % max(len(weights), 1)",
         "unit/stages/test_strategies.py"),
    ],
    "dpcore/stages/strategies/in_blocks.py": [
        ("leave out the first row of a block", "range(step + 1) if step == first", "range(step) if step == first", "unit/mechanism/test_streaming.py"),
        ("leave out the first row of all", "range(step + 1) if step == first", "range(1, step + 1) if step == first", "unit/mechanism/test_streaming.py"),
        ("draw a block's rows in descending order", "range(step + 1) if step == first", "range(step, -1, -1) if step == first",
         "unit/mechanism/test_streaming.py::test_the_size_of_a_block_changes_no_bit"),
    ],
    "dpcore/stages/strategies/coefficients.py": [
        ("give the series for its inverse", "return self._inverse[:steps]", "return self.first_column(steps)", "unit/stages/test_strategies.py"),
    ],
    "dpcore/mechanism/noise_state.py": [
        ("draw this step's row for every row of correlated noise", "total = total + float(weight) * normal(earlier)",
         "total = total + float(weight) * normal(row)", "papers/test_noise.py"),
        ("forget the weights of correlated noise's rows", "total = total + float(weight) * normal(earlier)", "total = total + normal(earlier)",
         "papers/test_noise.py"),
        ("begin a block with the sums of the one before", "sums if row == first else ()", "sums if row == 0 else ()", "unit/mechanism/test_streaming.py"),
        ("rebuild a ring of Z from one row too few", "max(steps - strategy.order, 0)", "max(steps - strategy.order + 1, 0)",
         "unit/mechanism/test_streaming.py::test_vectors_that_were_lost_are_made_anew"),
        ("rebuild a ring of noise from its last rows alone", 'and coefficients.keeps == "input":', "and True:",
         "unit/mechanism/test_streaming.py::test_vectors_that_were_lost_are_made_anew"),
        ("draw earlier rows under this step's key", "keys.noise_of(row), row, stream", "keys.noise, row, stream",
         "unit/mechanism/test_streaming.py::test_vectors_that_were_lost_are_made_anew"),
        ("draw a part of a row from its start", "entry.first + start, size", "entry.first, size", "unit/mechanism/test_streaming.py"),
        ("take the vectors of another way of streaming", "return list(saved) != list(told) or (bool(mine) and not arrays)",
         "return bool(mine) and not arrays", "unit/mechanism/test_streaming.py::test_the_size_of_a_block_changes_no_bit"),
        ("go on with the noise of another matrix", "if list(saved[:1]) != list(told[:1]):", "if False:",
         "unit/mechanism/test_streaming.py::test_a_state_of_another_matrix_is_refused"),
    ],
    "dpcore/stages/strategies/blocks.py": [
        ("take reshuffled epochs for a fixed order", "float(np.abs(products).max())", "float(np.abs(np.diagonal(products)).max())",
         "unit/sampling/test_shuffled.py"),
    ],
    "dpcore/stages/strategies/sensitivity.py": [
        ("let participations be one step nearer", "taken = np.append(squares + best[separation:], np.zeros(separation))",
         "taken = np.append(squares + best[separation - 1 : -1], np.zeros(separation))", "unit/stages/test_strategies_sensitivity.py"),
        ("sum columns with their signs", "return float(np.abs(block.T @ block).sum())", "return float((block.T @ block).sum())",
         "unit/plan/test_plan.py unit/stages/test_strategies_sensitivity.py"),
        ("let negative products of columns cancel in the sensitivity", "return float(np.abs(block.T @ block).sum())",
         "return float((block.T @ block).sum())", "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[doppler]'"),
        ("charge the shared columns of a branch alone", "block = strategy.columns(pattern[first : first + _CHUNK], steps)[first_row:]",
         "block = strategy.columns(pattern[first : first + _CHUNK], steps)[first_row:, -1:]", "unit/plan/test_plan.py"),
    ],
    "dpcore/torch/stated.py": [
        ("say nothing of a stop that results decided", "if not run.stopped_by_results or", "if True or",
         "unit/torch/test_held_out.py::test_stops_after_so_many_evaluations_without_a_better_value_and_keeps_the_best_state"),
    ],
    "dpcore/torch/hosts/private_loop.py": [
        ("tell the epsilon of a number of steps that results decided", "spent = {} if private.stopped_by_results else {",
         "spent = {", "end_to_end/test_hosts_hugging_face.py::test_it_stops_early_and_loads_the_best"),
    ],
    "dpcore/stages/strategies/named.py": [
        ("plan more rows than fit into memory", "check_rows(named.name, steps, dense=named.name == TreeOptimal.kind)", "pass",
         "unit/mechanism/test_room.py::test_a_name_of_more_rows_than_memory_holds_is_refused"),
    ],
    "dpcore/statement/assumptions.py": [
        ("forget how sentences were worded", "if found := _ABANDONED.fullmatch(sentence):", "if found := None:",
         "unit/statement/test_forgery.py::test_sentences_of_before_plurals_still_verify"),
    ],
    "dpcore/mechanism/vectors.py": [
        ("allocate what does not fit", "check_vectors(plan, layout, parameters, peers, *host_memory())", "pass",
         "unit/mechanism/test_room.py"),
        ("rotate the history of parameters the other way", "past.insert(0, past.pop())\n                past[0]",
         "past.append(past.pop(0))\n                past[0]", "papers/test_pmlf.py::test_pmlf_is_its_loop"),
        ("take the parameters of one step earlier", "base = [past[point.lag - 1].reshape(shape)",
         "base = [past[min(point.lag, len(past) - 1)].reshape(shape)", "papers/test_pmlf.py::test_pmlf_is_its_loop"),
        ("end an earlier displacement one step later", "[past[point.lag - 1] - past[point.lag] for past in history]",
         "[past[point.lag] - past[(point.lag + 1) % len(past)] for past in history]", "papers/test_combinations.py::test_pmlf_over_disk_points"),
        ("leave the square's correlated state out of the checkpoint", '{"noise": self.noise_state, "square-noise": self.square_noise_state}',
         '{"noise": self.noise_state}', "unit/mechanism/test_mechanism.py"),
    ],
    "dpcore/mechanism/after_update.py": [
        ("forget that a ball shortens the displacement", "slot.displacement[...] = slot.displacement + (slot.parameter - earlier)", "pass",
         "papers/test_combinations.py::test_parameters_stay_in_the_ball_and_displacements_are_of_what_they_became"),
    ],
    "dpcore/stages/queries/parameter_window.py": [
        ("shrink the first windows by the whole normalizer", "for j in range(count)) if self.normalized",
         "for j in range(self.window)) if self.normalized", "papers/test_pmlf.py"),
    ],
    "dpcore/stages/queries/recursive_difference.py": [
        ("subtract the earlier gradient without its weight", "delayed(self.query.points(step - 1), -c, 1)",
         "delayed(self.query.points(step - 1), -1.0, 1)", "papers/test_srg.py"),
        ("shift eta by one", "Point(-float(step), lag=1)", "Point(-float(step + 1), lag=1)", "papers/test_srg.py"),
    ],
    "dpcore/stages/updates/accelerated.py": [
        ("couple with the tau of this step", "2.0 / (step + 3)", "2.0 / (step + 2)", "papers/test_srg.py"),
    ],
    "dpcore/mechanism/preparation.py": [
        ("take off the seed's variance whatever the strategy", "noise_variances(filtered, method.noise.strategy, plan.steps)",
         "noise_variances(filtered, None, plan.steps)", "papers/test_adaptive.py"),
    ],
    "dpcore/stages/updates/averaging.py": [
        ("start averages at zero", "return (1 - self.decay) / (1 - self.decay ** (step + 1))", "return 1 - self.decay",
         "unit/stages/test_averaging.py"),
    ],
    "dpcore/stages/method.py": [
        ("ignore a scaled query inside a window", "if isinstance(inner, Preconditioned):", "if False:", "unit/plan/test_plan.py"),
    ],
    "backends/dpcore_numpy/noise.py": [
        ("take the middle of a cell in the tail, too", "(w_tail[low] + 0.5) * 2.0**-32)", "0.5)", "agreement/test_normal_law.py"),
        ("take the next cell in the tail", "(w0[low] + (w_tail[low] + 0.5)", "(w0[low] + 1 + (w_tail[low] + 0.5)", "agreement/test_normal_law.py"),
        ("drop the normals' tail", "TAIL_BOUND = 4096", "TAIL_BOUND = 0", "spec/test_normal.py"),
        ("lose the digits of ln u next to u = 1", "from_one = np.log1p(v, out=v)", "from_one = np.log(1 + v)", "spec/test_normal.py"),
    ],
    "backends/dpcore_numpy/stream.py": [
        ("change a rotation of ChaCha20", "(c, d, b, 7))", "(c, d, b, 8))", "spec/test_stream.py"),
    ],
    "dpcore/sampling/poisson.py": [
        ("sample at another rate than accounted", "threshold = round(self.sample_rate * WORDS)", "threshold = round(1.1 * self.sample_rate * WORDS)",
         "unit/sampling/test_samplers.py"),
    ],
    "backends/dpcore_triton/step_kernel.py": [
        ("halve the noise, in the kernel", "average += scales[0] * n.to(tl.float64)", "average += 0.5 * scales[0] * n.to(tl.float64)",
         "agreement/test_ops_step.py"),
        ("give the square the gradient's scale of noise, in the kernel", "h += scales[1] * z_square.to(tl.float64)",
         "h += scales[0] * z_square.to(tl.float64)", "agreement/test_ops_step.py"),
        ("give the square the gradient's own draws, in the kernel", "z_square = normals(square_cipher,",
         "z_square = normals((k0, k1, k2, k3, k4, k5, k6, k7, tl.load(numbers), noise_stream, one),", "agreement/test_ops_step.py"),
        ("draw one row at every step, in the kernel", "k7, tl.load(numbers), noise_stream", "k7, 0 * tl.load(numbers), noise_stream",
         "agreement/test_ops_step.py"),
        ("leave out the ring, in the kernel", "    if RING is not None:\n", "    if RING == 1:\n", "agreement/test_ops_step.py"),
        ("leave the noise uncorrelated, in the kernel", "n, kept = found[0], found[1:]", "n, kept = z, kept", "agreement/test_ops_step.py"),
        ("multiply by the scale instead of dividing, in the kernel", "g = tl.div_rn(g, read[1 + STATES])", "g = g * read[1 + STATES]",
         "agreement/test_ops_step.py"),
        ("give each element the state of another of its group, in the kernel", "read[k], len(states), numbers", "read[0], len(states), numbers",
         "agreement/test_ops_step.py"),
    ],
    "backends/dpcore_triton/stream.py": [
        ("take a tile at the end of a tensor for one inside, in the kernel", "return (low <= 0) & (high >= (BLOCKS + LANES - 1) // LANES * TILE)",
         "return (low <= 0) & (high >= TILE // 2)", "agreement/test_ops_step.py agreement/test_ops_stream.py"),
        ("let both halves of a tile take the first one's elements, in the kernel", "block = (start % LANES).to(tl.int32) + tl.arange(0, BLOCKS)",
         "block = tl.arange(0, BLOCKS)", "agreement/test_device_sizes.py"),
        ("take a tile at the beginning of a tensor for one inside, in the kernel", "return (low <= 0) & (high",
         "return (low <= LANES) & (high", "agreement/test_ops_step.py agreement/test_ops_stream.py"),
    ],
    "backends/dpcore_triton/row_norms.py": [
        ("take the tables of other groups", "None if groups is None else tuple(groups), pattern(scale)", "groups is None, pattern(scale)",
         "agreement/test_kept_tables.py"),
        ("keep where copies lie", "if key is not None and not lent:", "if key is not None:", "agreement/test_kept_tables.py"),
        ("add the parts of the group before, in the kernel", "stop = start + tl.load(firsts + group * 2 + 1)",
         "stop = start + tl.load(firsts + 1)", "agreement/test_ops_clip.py::test_norms_agree"),
        ("leave the scale out of the norms, in the kernel", "values *= scale_at(row + 4,", "scale_at(row + 4,",
         "agreement/test_ops_clip.py::test_norms_agree"),
    ],
    "backends/dpcore_triton/noise.py": [
        ("swap the sine and the cosine, in the kernel", "return rho * cosine, rho * sine", "return rho * sine, rho * cosine",
         "agreement/test_ops_step.py"),
    ],
    "backends/dpcore_triton/clip.py": [
        ("take the table of other weights", "len(out), weight_of, pattern(scale)", "len(out), pattern(scale)", "agreement/test_kept_tables.py"),
        ("take the table of another scale", "len(out), weight_of, pattern(scale)", "len(out), weight_of", "agreement/test_kept_tables.py"),
        ("halve the norm that bounds a vector under psac, in the kernel", "return room / (raised + PSAC_STABILITY",
         "return room / (raised / 2 + PSAC_STABILITY", "agreement/test_ops_clip.py"),
        ("drop the clip, in the kernel", "return tl.where(raised <= bound, 1.0, room / raised)", "return tl.where(raised <= bound, 1.0, 1.0)",
         "agreement/test_ops_clip.py"),
    ],
    "dpcore/sampling/fixed_batches.py": [
        ("count the first round of fixed batches only", "return [pattern[pattern < steps] for", "return [pattern[pattern < min(steps, cycle)] for",
         "'end_to_end/test_measured_sensitivity.py::test_no_run_shows_more_than_its_event_claims[pmlf]'"),
    ],
    "dpcore/stages/clipping/running.py": [
        ("halve the noise on the bits of the adaptive clip", "self.adaptive.noise_on_bits(self.batch_size) * normal",
         "0.5 * self.adaptive.noise_on_bits(self.batch_size) * normal", "end_to_end/test_measured_sensitivity.py"),
    ],
    "dpcore/stages/clipping/adaptive.py": [
        ("give an example that contributes nothing a bit", "counted = ~(norms < NO_GRADIENT)", "counted = norms == norms",
         "end_to_end/test_measured_sensitivity.py"),
    ],
    "dpcore/cli/compare/log.py": [
        ("take a killed run of a comparison for a complete one", " and not stated.note", "", "end_to_end/test_cli_compare.py"),
        ("go on with a comparison though a run's folder is gone", 'if item["status"] in (COMPLETE, STOPPED) and records[-1].statement is None:',
         "if False:", "end_to_end/test_cli_compare.py"),
    ],
    "dpcore/spec/whole_file.py": [
        ("leave the draft of a file that could not be written", "    finally:\n        draft.unlink(missing_ok=True)", "    finally:\n        pass",
         "unit/spec/test_whole_file.py"),
        ("name the draft in the error of a file that could not be written", "os.strerror(cause.errno), str(target))", "os.strerror(cause.errno), str(draft))",
         "unit/spec/test_whole_file.py"),
    ],
    "dpcore/ledger/storage.py": [
        ("roll back what SQLite has rolled back on a full disk", "if connection.in_transaction:", "if True:", "end_to_end/test_cli_full_disk.py"),
    ],
    "dpcore/cli/train/run.py": [
        ("load torch before the output folder is looked at", "    check_folder(place, overwrite=overwrite)\n", "", "end_to_end/test_cli_first_checks.py"),
        ("say of a run that wrote its end that its statement counts the whole epoch", "upper = folder.stated.note.startswith(WRITTEN_BEFORE)", "upper = True",
         "end_to_end/test_cli_full_disk.py"),
    ],
    "dpcore/cli/compare/runs.py": [
        ("begin a process for each run of a comparison", "worker = idle.pop() if idle else Worker(stop)", "worker = Worker(stop)",
         "end_to_end/test_cli_compare.py"),
    ],
    "dpcore/cli/datasets/archive.py": [
        ("unpack a member of an archive whole, whatever its directory states", "while chunk := packed.read(_CHUNK):", "while chunk := packed.read():",
         "unit/cli/test_npz.py"),
    ],
    "dpcore/cli/train/checkpoint.py": [
        ("take a damaged checkpoint for a whole one", "whole = archive.testzip() is None", "whole = True", "end_to_end/test_cli_resume.py"),
    ],
    "dpcore/torch/run.py": [
        ("say that results may stop a run for what it spent so far", "self.event_after(self.plan.steps if planned else self.steps_taken)",
         "self.event_after(self.steps_taken)", "unit/torch/test_held_out.py"),
        ("leave abandoned steps out of what a resumed run states", "return self.plan.event_after(steps, self._engine.mechanism.abandoned)",
         "return self.plan.event_after(steps)", "end_to_end/test_cli_resume.py"),
    ],
    "dpcore/mechanism/ledger_account.py": [
        ("give back a row that is on its way out", "self.run.close(max(self.mechanism.step, self._granted))", "self.run.close(self.mechanism.step)",
         "unit/ledger/test_attacks.py"),
        ("forget what the ledger did not know", 'tuple(saved.get("caveats", ()))', "()", "end_to_end/test_kill.py"),
        ("give back a row while it is granted", "            if not self._inside:\n                self._give_back()\n",
         "            self._give_back()\n", "unit/ledger/test_attacks.py"),
        ("forget which row was granted", "self.run.close(max(self.mechanism.step, self._granted))", "self.run.close(self.mechanism.step)",
         "unit/ledger/test_attacks.py"),
    ],
    "dpcore/ledger/view.py": [
        ("say that something is left where one plan keeps all", "kept = state.fixed is not None and state.fixed.alone", "kept = False",
         "unit/ledger/test_fixed.py"),
    ],
    "dpcore/sampling/draw.py": [
        ("toss coins that land once too often", ".astype(np.uint64) < np.uint64(threshold)", ".astype(np.uint64) <= np.uint64(threshold)",
         "unit/sampling/test_draw.py unit/sampling/test_exact.py"),
        ("let attempts of a draw share words", "start += 2 * size", "start += size", "unit/sampling/test_draw.py"),
    ],
    "dpcore/audit/direct_checks.py": [
        ("audit a cut batch at the coins' rate", "    if not isinstance(event, TruncatedPoissonSampledGaussian):\n", "    if True:\n",
         "unit/audit/test_audit.py"),
    ],
    "dpcore/accounting/binomial.py": [
        ("take what rounds away in a large data set for nothing", "float(betainc(k + 1, n - k, p))", "0.0", "unit/sampling/test_truncated.py"),
    ],
    "dpcore/statement/verify/parts.py": [
        ("verify a replacement at twice its noise", "expected = sigma / 2 if part.adjacency is Adjacency.REPLACE_ONE else sigma", "expected = sigma",
         "unit/statement/test_forgery.py unit/statement/test_verify.py"),
        ("let a forger lower a matrix's sensitivity", "least = whole * (1 - SAME) if steps == statement.steps_planned else 0.0", "least = 0.0",
         "unit/statement/test_forgery.py unit/statement/test_verify.py"),
    ],
    "dpcore/statement/verify/rebuild.py": [
        ("let a matrix move less than its columns", "if scaled and whole < 1 - SAME:", "if False:",
         "unit/statement/test_forgery.py unit/statement/test_verify.py"),
    ],
    "dpcore/mechanism/turns.py": [
        ("make new arrays on the current device", "with self._place():", "if True:", "unit/mechanism/test_beside.py"),
        ("let two threads add to one sum", "if self._adding not in (0, threading.get_ident()):", "if False:", "unit/mechanism/test_mechanism.py"),
        ("let a thread step on a batch of an earlier step", 'if getattr(self._drawn, "step", None) not in (None, step):', "if False:",
         "unit/mechanism/test_mechanism.py"),
    ],
    "dpcore/accounting/branches.py": [
        ("forget on the way back where a branch was left", "name, end = self.known[name].parent, self.known[name].first",
         "name, end = self.known[name].parent, self.known[name].mark", "unit/plan/test_plan.py"),
    ],
    "dpcore/torch/state/saving.py": [
        ("save a secret part for everybody", "secret=True", "secret=False", "unit/torch/test_checkpoint.py"),
    ],
    "dpcore/stages/strategies/search/single.py": [
        ("claim a bound that is none", "proved = total**2 / columns.sum() / rows.sum()", "proved = 1.0001 * total**2 / columns.sum() / rows.sum()",
         "unit/stages/test_optimal.py"),
        ("claim a quick bound that is none", "[1] ** 2 / columns.sum()", "[1] ** 2 * 1.001 / columns.sum()", "unit/stages/test_inverses.py"),
        ("hide what rounding may add to eigenvalues", "(1 + ROUNDING / least) ** -0.5", "(1 - 1e6 * ROUNDING / least) ** -0.5", "unit/stages/test_optimal.py"),
        ("move the weights the wrong way", "step = 2 * np.log(", "step = -2 * np.log(", "unit/stages/test_optimal.py"),
    ],
    "dpcore/stages/strategies/search/fixed_order.py": [
        ("let an example's steps share no noise in the bound", "total += weight\n", "total += 0.9 * weight\n", "unit/stages/test_optimal.py"),
        ("let entries between an example's steps be", "slope[apart] = 0.0", "pass", "unit/stages/test_optimal.py"),
        ("forget that X is scaled class by class", "_class_sums(product, period)[place % period] / scale**2", "0.0", "unit/stages/test_optimal.py"),
    ],
    "dpcore/stages/strategies/search/bidiagonal.py": [
        ("take a pivot twice in the diagonal of an inverse", "down + up[::-1] - diagonal", "down + up[::-1]", "unit/stages/test_inverses.py"),
        ("spread the poles of a root unevenly", "(np.arange(_POLES) + 0.5)", "(np.arange(_POLES) + 0.6)", "unit/stages/test_inverses.py"),
    ],
    "dpcore/stages/strategies/search/inverse.py": [
        ("forget one of two inverses in a gradient", "adjoint(adjoint(wanted, p), p)", "adjoint(wanted, p)", "unit/stages/test_inverses.py"),
        ("let products of columns cancel", "float(np.abs(products).sum()), wanted", "float(products.sum()), wanted", "unit/stages/test_inverses.py"),
        ("leave the square root out of a family", "np.append(np.linspace(0, np.log(16 * steps), _TRIED), np.log(2))",
         "np.append(np.linspace(3, np.log(16 * steps), _TRIED), 3.5)", "unit/stages/test_inverses.py"),
        ("keep the worst of the banded inverses", "return min(found, key=", "return max(found, key=", "unit/stages/test_inverses.py"),
    ],
    "dpcore/stages/strategies/search/blt.py": [
        ("go on from fewer steps in the wrong direction", "3 * found[-1] - 3 * found[-2] + found[-3]", "30 * found[-1] - 30 * found[-2] + found[-3]",
         "unit/stages/test_inverses.py"),
        ("lose a derivative by the decays", "scale * (later @ powers[j]) / decay", "scale * (later @ powers[j])", "unit/stages/test_inverses.py"),
    ],
    "dpcore/stages/strategies/search/toeplitz.py": [
        ("stretch a series the wrong way", "np.linspace(0, few - 1, bands)", "np.linspace(0, few / 2, bands)", "unit/stages/test_inverses.py"),
    ],
    "dpcore/stages/strategies/search/kinds.py": [
        ("let a banded inverse have more bands than steps", "        if count > steps:\n", "        if False:\n", "unit/stages/test_inverses.py"),
    ],
    "dpcore/stages/strategies/search/error.py": [
        ("forget that examples take part again", "    elif epochs > 1:\n", "    elif False:\n", "unit/stages/test_optimal.py"),
        ("forget it for positive series", "np.linalg.norm(summed(column, steps, epochs, period))", "np.linalg.norm(column)",
         "unit/stages/test_inverses.py"),
    ],
    "dpcore/torch/check_data.py": [
        ("let processes read other data", '        peers.check_alike({"data (an example, or their order)": told})\n', "        pass\n",
         "end_to_end/test_processes.py::test_failures_end_all_processes_with_a_sentence"),
    ],
    "dpcore/torch/state/checkpoint.py": [
        ("let processes load other states", '    peers.check_alike({"step of the saved state": step, "saved state": total.hexdigest()})\n', "    pass\n",
         "end_to_end/test_processes.py::test_processes_that_load_other_states_are_refused"),
    ],
    "dpcore/torch/state/sharded.py": [
        ("take parts of another save", 'if any(content["save"] != save for content in held):', "if False:", "unit/torch/test_sharded.py"),
        ("save where another process could not", "    if failed:\n", "    if False:\n",
         "end_to_end/test_processes_sharded_state.py::test_no_process_saves_or_loads_alone"),
        ("read damaged parts", "fits = not whole or archive.testzip() is None", "fits = True", "unit/torch/test_sharded.py"),
    ],
    "dpcore/mechanism/parts.py": [
        ("leave holes between parts", "if starts != [0, *ends[:-1]] or ends[-1:] != [parts[0].size]:", "if False:", "unit/torch/test_sharded.py"),
    ],
    "dpcore/torch/model/per_example.py": [
        ("let a model write to the batch", "given = batches.tree_map(torch.clone, batch)", "given = batch",
         "unit/torch/test_state_probe.py"),
        ("take a batch that leads elsewhere by what was learned", 'if synthetic or self.way != "pairs" or not self.free:', "if True:", "unit/torch/test_per_example.py"),
        ("look for state on made-up examples only", "if synthetic or self._calls & (self._calls - 1):", "if True:", "unit/torch/test_state_probe.py"),
    ],
    "dpcore/torch/model/compare.py": [
        ("believe the rules", "if not apart <= tolerance *", "if False and not apart <= tolerance *", "unit/torch/sources/test_checks.py"),
        ("compare with other values only", "(poisoned(unlike), True)", "", "unit/torch/sources/test_checks.py"),
        ("leave integers without NaN", "if indices.dim() > 1 and", "if False and", "unit/torch/sources/test_checks.py"),
    ],
    "dpcore/torch/sources/choices.py": [
        ("follow rows that masks chose", "or not all(bool(", "or False and not all(bool(", "unit/torch/sources/test_choices.py"),
        ("follow rows in an order of their values", "dim % len(site.one[0]) == layout.dim", "False", "unit/torch/sources/test_choices.py"),
    ],
    "dpcore/torch/sources/tracer.py": [
        ("forget the use of a parameter that torch does not show", "if leaf.tensor.grad is not None:", "if False:", "unit/torch/sources/test_checks.py"),
    ],
    "dpcore/torch/model/functional.py": [
        ("exchange a module's places once for each of its names", "for path, module in model.named_modules():",
         "for path, module in model.named_modules(remove_duplicate=False):", "unit/torch/test_per_example.py"),
    ],
    "dpcore/torch/data/ahead.py": [
        ("use what was read for other keys", "request = seed, tuple(places)", 'request = b"", tuple(places)', "unit/torch/test_ahead.py"),
        ("take another request's batch", "if self._answered == number:", "if True:", "unit/torch/test_ahead.py"),
    ],
    "dpcore/torch/data/batches.py": [
        ("try the same public example twice", "return synthetic(batch, examples, seed=1)", "return synthetic(batch, examples)",
         "unit/torch/test_example_batch.py"),
        ("mask whole rows of made-up values", 'return not (named and "pad" in name.lower())', "return False", "unit/torch/test_example_batch.py"),
    ],
    "dpcore/torch/data/sampler.py": [
        ("step on whatever examples a host's loader brings", "or drawn.places.tolist() != wanted:", "or not drawn.places.tolist():",
         "unit/torch/test_sampler.py"),
        ("take a batch that lost its rows", "        if batches.size(batches.tree_map(lambda tensor: tensor, drawn.batch)) != len(wanted):\n", "        if False:\n",
         "unit/torch/test_sampler.py"),
        ("give indices that nobody has paid for", "if step == present else self._mechanism.ahead(step)",
         "if step == present else self._mechanism.share.indices(self._mechanism.keys.sampling, step)",
         "unit/torch/test_sampler.py"),
    ],
    "dpcore/torch/data/overlap.py": [
        ("evaluate on the last example that is trained on", "(b >= len(tables[0]))", "(b > len(tables[0]))",
         "unit/torch/test_held_out.py"),
        ("count one example as several people", "    if len(first):\n        raise", "    if False:\n        raise",
         "unit/torch/test_data.py"),
    ],
    "dpcore/torch/held_out.py": [
        ("evaluate with dropout", "        model.eval()\n        yield", "        yield", "unit/torch/test_held_out.py"),
        ("stop a whole evaluation late", "self._waited >= self._patience)", "self._waited > self._patience)", "unit/torch/test_held_out.py"),
    ],
    "dpcore/torch/data/loader.py": [
        ("step on a batch that was kept", "if count and not batches.memory(batch) &", "if False and not batches.memory(batch) &",
         "unit/torch/test_data.py"),
    ],
    "dpcore/torch/data/reading.py": [
        ("let collate_fn see several examples", "rows = [collate([example]) for example in examples]",
         "whole = collate(examples)\n        rows = [batches.tree_map(lambda t: t[k : k + 1], whole) for k in range(len(examples))]",
         "unit/torch/test_data.py"),
        ("leave the generators of a data set alone", "with seeded(self.device, seed, self.generators):", "with seeded(self.device, seed):",
         "unit/torch/test_data.py"),
    ],
    "dpcore/cli/train/resume.py": [
        ("say that resuming costs nothing", 'lost = now.steps_abandoned - count(Branches(state["branch"], known).abandoned)', "lost = 0",
         "end_to_end/test_cli_resume.py"),
    ],
    "dpcore/accounting/pld/lognormal.py": [
        ("split cells of X without keeping their mean", "right = np.clip((p - at[:-1] * q) / g, 0.0, q)",
         "right = 0.45 * q", "unit/accounting/test_random_allocation.py"),
        ("merge bins of X at points above their mean", "ends = np.clip(edges, low, high)",
         "ends = np.clip(edges - 0.4 * (at[1] - at[0]), low, high)", "unit/accounting/test_random_allocation.py"),
        ("let the lower bound of add fall instead of rise", "moved = np.where(~usable & ((excess > 0.0) if rising else (excess < 0.0)), mass, 0.0)",
         "moved = np.where(~usable & (excess < 0.0), mass, 0.0)", "unit/accounting/test_random_allocation.py"),
    ],
    "dpcore/accounting/pld/lognormal_sum.py": [
        ("forget the range of rare large X", "    if first >= last:\n", "    if True:\n", "unit/accounting/test_random_allocation.py"),
        ("take the transform of an epoch as exact", "    return summed, 1.04 * (error + (growth + 4.0 * _UNIT * count) * norm)",
         "    return summed, 0.0", "unit/accounting/test_random_allocation.py"),
        ("count one X less in an epoch", "    for digit in bin(count)[2:]:", "    for digit in bin(count - 1)[2:]:", "unit/accounting/test_random_allocation.py"),
    ],
    "dpcore/accounting/pld/allocation.py": [
        ("forget what lies above the cap", "lost += float(in_p[0] + (t - 1) * in_q[0])", "lost += 0.0", "unit/accounting/test_random_allocation.py"),
        ("take the Q-mass of remove for its P-mass", "    p = ratio * q\n", "    p = q\n", "unit/accounting/test_random_allocation.py"),
    ],
    "dpcore/accounting/renyi/allocation.py": [
        ("leave the add direction out of the moments", "np.maximum(_remove(batches, sigma), _add(batches, sigma))", "_add(batches, sigma)",
         "unit/accounting/test_random_allocation.py::test_moments_are_those_of_quadrature"),
    ],
    "dpcore/sampling/random_allocation.py": [
        ("draw every epoch alike", "words, limit = draw.row_words(key, epoch)", "words, limit = draw.row_words(key, 0)", "unit/sampling/test_random_allocation.py"),
        ("keep words beyond the largest multiple", "kept = drawn < limit", "kept = drawn < 2 * limit", "unit/sampling/test_random_allocation.py"),
        ("count whole epochs only", "epochs = -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)",
         "epochs = validate.integer(steps=steps, minimum=0) // self.steps_per_epoch", "unit/sampling/test_random_allocation.py"),
        ("release again for nothing", "return -(-stop // epoch) - first // epoch if first < stop else 0", "return 0", "unit/sampling/test_random_allocation.py"),
        ("call allocation a draw of every step", '"""True: the batches of an epoch are one arrangement."""\n        return True',
         '"""True: the batches of an epoch are one arrangement."""\n        return False', "unit/sampling/test_random_allocation.py"),
    ],
    "dpcore/stages/strategies/recommended.py": [
        ("recommend what amplification does not cover", "most = period if bands is None else min(period, validate.integer(1, bands=bands))",
         "most = period", "unit/stages/test_recommended.py"),
        ("recommend for one epoch", "epochs = 1 if period is None else -(-steps // min(period, steps))", "epochs = 1", "unit/stages/test_recommended.py"),
    ],
}
# fmt: on


def below_tests(names: str) -> str:
    """Ids of tests as pytest takes them at the root of the repository."""
    return shlex.join(f"tests/{name}" for name in shlex.split(names))


MUTATIONS = [
    Mutation(name, path, old, new, below_tests(tests))
    for path, entries in TABLE.items()
    for name, old, new, tests in entries
]
