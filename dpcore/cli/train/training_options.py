"""The options of a training run: one table, from which commands, files, config.json and messages come.

A field's annotation has the option's parser, placeholder, help and panel; its name is the option's, the file's key and
that of the setting. Which method takes which is not said here: it follows from the signatures of `dpcore.methods`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from dpcore.cli.options import SAMPLINGS, flag, option
from dpcore.cli.values import count, group_norms, multiplier, name_or_file, one_of, real, reals, whole
from dpcore.methods import BASES, METHODS, VARIANTS
from dpcore.spec.backends import available_backends, chosen_backend
from dpcore.stages.filters import NAMED_FILTERS
from dpcore.stages.strategies import NAMES
from dpcore.stages.strategies.saved import ENDINGS
from dpcore.stages.updates.accelerated import COUPLINGS

MODELS = ("logistic", "mlp", "cnn-5")
CLIPPING = ("standard", "automatic", "automatic_v", "normalized", "psac")
DATA, METHOD, PRIVACY, RUN = "Data and model", "Method", "Privacy", "Run"
UPDATE, CORRELATED, SCALED = "Update", "Correlated noise", "Scaled gradients (dp_adam, dp_adagrad)"

_Real: TypeAlias = float | None
_Reals: TypeAlias = tuple[float, ...] | None
_Count: TypeAlias = int | None
_Text: TypeAlias = str | None
_Flag: TypeAlias = bool | None


@dataclass(frozen=True)
class TrainingOptions:
    """One training run, as the options give it. None means: not given."""

    # fmt: off
    data: Annotated[str, option(str, "NAME", "digits (built in), mnist, fashion-mnist, kmnist, idx, npz.",
        DATA)] = "digits"
    data_dir: Annotated[_Text, option(str, "FOLDER", "Where the data's files are.", DATA)] = None
    model: Annotated[str, option(one_of(MODELS), "NAME", "logistic, mlp or cnn-5.", DATA)] = "logistic"
    seed: Annotated[int, option(whole, "N", "Of the initial weights; never of the noise.", DATA)] = 0
    epsilon: Annotated[_Real, option(real, "EPSILON", "Target; the noise is calibrated to it.", PRIVACY)] = None
    delta: Annotated[float, option(real, "DELTA", "Well below 1/n.", PRIVACY)] = 1e-5
    noise_multiplier: Annotated[_Real, option(multiplier, "SIGMA", "Instead of --epsilon.", PRIVACY)] = None
    max_grad_norm: Annotated[float, option(real, "C", "Clip norm.", PRIVACY)] = 1.0
    clipping: Annotated[_Text, option(one_of(CLIPPING), "RULE",
        f"{', '.join(CLIPPING)}; if not given: the method's own.", PRIVACY)] = None
    clipping_groups: Annotated[str | dict[str, float], option(group_norms, "GROUPS",
        "flat, per_layer, per_tensor, or norms by pattern: '0.*=0.5,2.*=1'.", PRIVACY)] = "flat"
    clip_quantile: Annotated[_Real, option(real, "Q",
        "Let the clip norm follow this quantile of the norms; --max-grad-norm comes first.", PRIVACY)] = None
    clip_lr: Annotated[_Real, option(real, "RATE", "For --clip-quantile: how fast; 0.2 if not given.", PRIVACY)] = None
    bit_noise: Annotated[_Real, option(real, "STD",
        "For --clip-quantile: noise on the count; batch size / 20 if not given.", PRIVACY)] = None
    sampling: Annotated[_Text, option(one_of(SAMPLINGS), "NAME",
        f"{', '.join(SAMPLINGS)}; if not given: fixed-order where the method needs it, else poisson.", PRIVACY)] = None
    max_batch_size: Annotated[_Count, option(count, "N",
        "Of truncated-poisson; by default passed less than once in a million steps.", PRIVACY)] = None
    groups: Annotated[_Count, option(count, "N", "Of cyclic-poisson: groups that take turns.", PRIVACY)] = None
    allow_nonprivate: Annotated[_Flag, flag("--allow-nonprivate",
        "For the variant noiseless_preconditioner, which guarantees nothing.", PRIVACY)] = None
    method: Annotated[str, option(one_of(METHODS), "NAME",
        f"{', '.join(METHODS)}; dpcore methods names their papers.", METHOD)] = "dp_sgd"
    epochs: Annotated[int, option(count, "N", "Passes over the data.", METHOD)] = 10
    batch_size: Annotated[_Count, option(count, "N", "Expected; if not given, the power of two nearest to 2 sqrt(n).",
        METHOD)] = None
    lr: Annotated[_Real, option(real, "RATE", "Learning rate.", METHOD)] = None
    kappa: Annotated[_Real, option(real, "K", "disk: weight of the new gradient.", METHOD)] = None
    gamma: Annotated[_Real, option(real, "G", "disk: how far along the last step to look.", METHOD)] = None
    filter: Annotated[_Text, option(one_of(NAMED_FILTERS), "NAME", "doppler, pmlf, disk: such as 'first-order v1'.",
        METHOD)] = None
    filter_b: Annotated[_Reals, option(reals, "B0,B1,...", "doppler, pmlf: own coefficients.", METHOD)] = None
    filter_a: Annotated[_Reals, option(reals, "A1,A2,...", "doppler, pmlf: own coefficients.", METHOD)] = None
    bias_corrected: Annotated[_Flag, flag("--bias-corrected",
        "doppler over adam: take the noise's share off the second moment.", METHOD)] = None
    window: Annotated[_Count, option(count, "N", "pmlf, inner_outer: how many parameter points.", METHOD)] = None
    beta: Annotated[_Real, option(real, "B", "pmlf, inner_outer: decay of the points' weights.", METHOD)] = None
    outer_momentum: Annotated[_Real, option(real, "M", "inner_outer: momentum.", METHOD)] = None
    variant: Annotated[_Text, option(one_of((*VARIANTS, *COUPLINGS)), "NAME",
        "dp_adam, dp_adagrad: such as scale_then_privatize; accelerated_srgd: such as unaccelerated.", METHOD)] = None
    base: Annotated[_Text, option(one_of(BASES), "NAME", f"Update beneath the method: {', '.join(BASES)}.",
        UPDATE)] = None
    momentum: Annotated[_Real, option(real, "M", "For --base momentum.", UPDATE)] = None
    betas: Annotated[_Reals, option(reals, "B1,B2", "For adam and adamw, such as 0.9,0.999.", UPDATE)] = None
    eps: Annotated[_Real, option(real, "E", "Of the denominator of adam, adamw, adagrad.", UPDATE)] = None
    weight_decay: Annotated[_Real, option(real, "W", "Weight decay.", UPDATE)] = None
    radius: Annotated[_Real, option(real, "R", "Keep the parameters in this ball around 0.", UPDATE)] = None
    schedule: Annotated[_Text, option(one_of(("cosine",)), "NAME",
        "Of the learning rate: cosine, down to 0 at the last step.", UPDATE)] = None
    warmup_steps: Annotated[_Count, option(count, "N", "For --schedule: steps of linear warm-up.", UPDATE)] = None
    ema: Annotated[_Real, option(real, "DECAY", "Average of the parameters over time; it is evaluated and kept.",
        UPDATE)] = None
    strategy: Annotated[_Text, option(name_or_file(NAMES, ENDINGS), "NAME",
        f"{', '.join(NAMES)}, or a file of dpcore strategy optimize or with a matrix ({', '.join(ENDINGS)}); needs "
        "--sampling fixed-order or shuffled.", CORRELATED)] = None
    bands: Annotated[_Count, option(count, "N", "Of the banded strategy.", CORRELATED)] = None
    decay: Annotated[_Real, option(real, "C", "srg_memf: decay of the earlier gradient.", CORRELATED)] = None
    scale_eps: Annotated[_Real, option(real, "E", "Added to the root of the second moment.", SCALED)] = None
    max_scaled_norm: Annotated[_Real, option(real, "C", "Clip norm of scaled gradients.", SCALED)] = None
    unscaled_steps: Annotated[_Count, option(count, "N", "delayed_preconditioner: steps without scale in a cycle.",
        SCALED)] = None
    scaled_steps: Annotated[_Count, option(count, "N", "delayed_preconditioner: steps with a frozen scale.",
        SCALED)] = None
    joint_scale: Annotated[_Real, option(real, "K", "joint_moments: scale of the square.", SCALED)] = None
    backend: Annotated[str, option(one_of(available_backends), "NAME",
        "torch (CPU), triton (CUDA) or numpy (the reference).",
        RUN)] = field(default_factory=lambda: chosen_backend() or "torch")
    tensorboard: Annotated[bool, flag("--tensorboard", "Also write TensorBoard events.", RUN)] = False
    record_gradients: Annotated[_Count, option(count, "N",
        "Keep N coordinates of each released gradient, for dpcore inspect gradients.", RUN)] = None
    # fmt: on
