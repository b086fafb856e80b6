"""The settings of a training run: public values, written to config.json unchanged.

Commands, files, config.json and messages come from this one table. A field's annotation has the option's parser,
placeholder, help and panel; its name is the name of the option, of the file's key and of the setting. The signatures of
`dpcore.methods` determine which method takes which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, TypeAlias

from dpcore import sampling
from dpcore.cli.datasets import MAX_LENGTH, NAMES, text
from dpcore.cli.options import (
    count,
    flag,
    group_norms,
    name_or_design,
    name_or_file,
    one_of,
    option,
    parsers,
    real,
    reals,
    whole,
)
from dpcore.errors import ArgumentError
from dpcore.methods import BASES, METHODS, VARIANTS, keywords
from dpcore.plan.plan import Plan
from dpcore.sampling import NAMES as SAMPLINGS
from dpcore.spec.backends import available_backends, chosen_backend
from dpcore.spec.ops import CLIP_RULES
from dpcore.spec.validate import choice, decay, integer, positive
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.filters import NAMED_FILTERS
from dpcore.stages.filters.designs import DESIGNS
from dpcore.stages.method import Method
from dpcore.stages.strategies import NAMES as STRATEGIES
from dpcore.stages.strategies.saved import ENDINGS, named_or_saved
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.rules import COUPLINGS
from dpcore.stages.updates.schedules import FIRST_LR, Doubling, WarmupCosine

SCALED_MODELS = ("wrn-16-4", "resnet-18", "resnet-50", "vit-small", "efficientnet-b0")
# What config.json in the folder of a model of transformers must say: kind, width, layers; "pretrained" is any of them.
PRETRAINED: dict[str, tuple[str, int, int] | None] = {
    "roberta-base": ("roberta", 768, 12), "roberta-large": ("roberta", 1024, 24), "gpt2": ("gpt2", 768, 12),
    "bert-tiny": ("bert", 128, 2), "pretrained": None,
}  # fmt: skip
MODELS = ("logistic", "mlp", "cnn-5", "cnn-5-torch", *SCALED_MODELS, *PRETRAINED)
PRECISIONS = ("float32", "bf16")
DATA, METHOD, PRIVACY, RUN = "Data and model", "Method", "Privacy", "Run"
UPDATE, CORRELATED, SCALED = "Update", "Correlated noise", "Scaled gradients (dp_adam, dp_adagrad)"

_Real: TypeAlias = float | None
_Reals: TypeAlias = tuple[float, ...] | None
_Count: TypeAlias = int | None
_Text: TypeAlias = str | None
_Flag: TypeAlias = bool | None

# Default learning rates by update rule: public constants, the reasons in docs/command-line.md. Those of adagrad and
# accelerated are reasoned, not searched.
DEFAULT_LR = {"sgd": 0.5, "momentum": 0.05, "nesterov": 0.05, "adam": 0.005, "adamw": 0.005, "adagrad": 0.05,
    "accelerated": 0.1}  # fmt: skip
# Methods have other names for these.
_CALLED = {"filter_b": "b", "filter_a": "a"}
_ONLY_BESIDE = {"clip_lr": "clip-quantile", "bit_noise": "clip-quantile", "warmup_steps": "schedule cosine",
    "bands": "strategy banded-inverse-square-root", "galore_every": "galore-rank"}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """One training run: public values only, written to config.json as they are, and checked against each other.

    None means: not given.
    """

    # fmt: off
    data: Annotated[str, option(str, "NAME",
        f"digits (built in), {', '.join(NAMES[1:])}.", DATA)] = "digits"
    data_dir: Annotated[_Text, option(str, "FOLDER", "Folder of the data's files.", DATA)] = None
    model: Annotated[str, option(one_of(MODELS), "NAME", f"{', '.join(MODELS)}.", DATA)] = "logistic"
    model_scale: Annotated[_Real, option(real, "S",
        f"Multiplies the channels and the number of blocks of {', '.join(SCALED_MODELS)}.", DATA)] = None
    weights: Annotated[_Text, option(str, "FILE",
        "Public weights to begin from: safetensors or torch's state dict, or a folder with one.", DATA)] = None
    image_size: Annotated[_Count, option(count, "S", "Side, in points, to which images are resized; of "
        "image-folder 224 if not given.", DATA)] = None
    pixel_mean: Annotated[_Reals, option(reals, "M,...", "Public constants, one or one a channel: pixels become "
        "(x - M) / S.", DATA)] = None
    pixel_std: Annotated[_Reals, option(reals, "S,...", "For --pixel-mean.", DATA)] = None
    augmentations: Annotated[_Count, option(count, "K",
        "Copies of an image, shifted and flipped at random; the mean of their gradients is clipped.", DATA)] = None
    model_dir: Annotated[_Text, option(str, "FOLDER",
        f"Folder of {', '.join(PRETRAINED)}, with its tokenizer, as transformers saves them; for texts.", DATA)] = None
    max_length: Annotated[_Count, option(count, "N",
        f"Tokens of a text, longer ones are cut; {MAX_LENGTH} if not given.", DATA)] = None
    lora: Annotated[_Count, option(count, "RANK",
        "Train adapters of this rank and a new head, not the whole model of --model-dir (needs peft).", DATA)] = None
    seed: Annotated[int, option(whole, "N", "Seed of the initial weights. The noise is never seeded.", DATA)] = 0
    epsilon: Annotated[_Real, option(real, "EPSILON", "Target epsilon; the noise is calibrated to it.", PRIVACY)] = None
    delta: Annotated[float, option(real, "DELTA", "Delta, well below 1/n.", PRIVACY)] = 1e-5
    noise_multiplier: Annotated[_Real, option(real, "SIGMA", "Noise, instead of --epsilon.", PRIVACY)] = None
    max_grad_norm: Annotated[float, option(real, "C", "Clip norm.", PRIVACY)] = 1.0
    clipping: Annotated[_Text, option(one_of(CLIP_RULES), "RULE",
        f"{', '.join(CLIP_RULES)}; if not given: the method's own.", PRIVACY)] = None
    clipping_groups: Annotated[str | dict[str, float], option(group_norms, "GROUPS",
        "flat, per_layer, per_tensor, or norms by pattern: '0.*=0.5,2.*=1'.", PRIVACY)] = "flat"
    clip_quantile: Annotated[_Real, option(real, "Q",
        "Adapt the clip norm to this quantile of the norms, beginning at --max-grad-norm.", PRIVACY)] = None
    clip_lr: Annotated[_Real, option(real, "RATE", "For --clip-quantile: its rate; 0.2 if not given.", PRIVACY)] = None
    bit_noise: Annotated[_Real, option(real, "STD",
        "For --clip-quantile: standard deviation of the noise on the count of clipped norms; batch size / 20 if not "
        "given.", PRIVACY)] = None
    sampling: Annotated[_Text, option(one_of(SAMPLINGS), "NAME",
        f"{', '.join(SAMPLINGS)}; if not given: fixed-order if the method needs it, else poisson.", PRIVACY)] = None
    max_batch_size: Annotated[_Count, option(count, "N",
        "Limit of truncated-poisson; by default exceeded less than once in a million steps.", PRIVACY)] = None
    groups: Annotated[_Count, option(count, "N", "For cyclic-poisson: groups that take turns.", PRIVACY)] = None
    allow_nonprivate: Annotated[_Flag, flag("--allow-nonprivate",
        "Allow the noiseless variants, which guarantee nothing.", PRIVACY)] = None
    method: Annotated[str, option(one_of(METHODS), "NAME",
        f"{', '.join(METHODS)}; dpcore methods names their papers.", METHOD)] = "dp_sgd"
    epochs: Annotated[int, option(count, "N", "Passes over the data.", METHOD)] = 10
    batch_size: Annotated[_Count, option(count, "N", "Expected size; by default the power of two nearest to 2 sqrt(n).",
        METHOD)] = None
    lr: Annotated[_Real, option(real, "RATE", "Learning rate.", METHOD)] = None
    kappa: Annotated[_Real, option(real, "K", "disk: weight of the new gradient.", METHOD)] = None
    gamma: Annotated[_Real, option(real, "G", "disk: how far to look ahead along the last step.", METHOD)] = None
    filter: Annotated[_Text, option(name_or_design(NAMED_FILTERS, DESIGNS), "NAME",
        "doppler, pmlf, disk: such as 'first-order v1'; or a design: "
        f"{', '.join(f'{name} {numbers}' for name, (_, numbers) in DESIGNS.items())}.", METHOD)] = None
    filter_b: Annotated[_Reals, option(reals, "B0,B1,...", "doppler, pmlf: own coefficients.", METHOD)] = None
    filter_a: Annotated[_Reals, option(reals, "A1,A2,...", "doppler, pmlf: own coefficients.", METHOD)] = None
    bias_corrected: Annotated[_Flag, flag("--bias-corrected",
        "doppler over adam: subtract the noise's share of the second moment.", METHOD)] = None
    window: Annotated[_Count, option(count, "N", "pmlf, inner_outer: number of parameter points.", METHOD)] = None
    beta: Annotated[_Real, option(real, "B", "pmlf, inner_outer: decay of the points' weights.", METHOD)] = None
    outer_momentum: Annotated[_Real, option(real, "M", "inner_outer: momentum.", METHOD)] = None
    variant: Annotated[_Text, option(one_of((*VARIANTS, *COUPLINGS)), "NAME",
        "dp_adam, dp_adagrad: such as scale_then_privatize; accelerated_srgd: such as unaccelerated.", METHOD)] = None
    base: Annotated[_Text, option(one_of(BASES), "NAME", f"Update beneath the method: {', '.join(BASES)}.",
        UPDATE)] = None
    momentum: Annotated[_Real, option(real, "M", "For --base momentum.", UPDATE)] = None
    betas: Annotated[_Reals, option(reals, "B1,B2", "For adam and adamw, such as 0.9,0.999.", UPDATE)] = None
    eps: Annotated[_Real, option(real, "E", "Constant in the denominator of adam, adamw, adagrad.", UPDATE)] = None
    weight_decay: Annotated[_Real, option(real, "W", "Weight decay.", UPDATE)] = None
    radius: Annotated[_Real, option(real, "R", "Keep the parameters in this ball around 0.", UPDATE)] = None
    schedule: Annotated[_Text, option(one_of(("cosine", "doubling")), "NAME",
        "cosine: the learning rate falls to 0 at the last step; doubling: it is found from released gradients (SGD).",
        UPDATE)] = None
    warmup_steps: Annotated[_Count, option(count, "N", "For --schedule cosine: steps of linear warm-up.",
        UPDATE)] = None
    ema: Annotated[_Real, option(real, "DECAY", "Decay of an average of the parameters, which is evaluated and saved.",
        UPDATE)] = None
    galore_rank: Annotated[_Count, option(count, "R",
        "GaLore: filter and update matrices in R singular directions of their released gradients.", UPDATE)] = None
    galore_every: Annotated[_Count, option(count, "N", "For --galore-rank: steps between its singular directions; 200 "
        "if not given.", UPDATE)] = None
    strategy: Annotated[_Text, option(name_or_file(STRATEGIES, ENDINGS), "NAME",
        f"{', '.join(STRATEGIES)}, or a file of dpcore strategy optimize or with a matrix ({', '.join(ENDINGS)}); "
        "needs --sampling fixed-order, shuffled or random-allocation; banded ones also cyclic-poisson.",
        CORRELATED)] = None
    bands: Annotated[_Count, option(count, "N", "Bands of --strategy banded-inverse-square-root, which needs it.",
        CORRELATED)] = None
    decay: Annotated[_Real, option(real, "C", "srg_memf: decay of the earlier gradient.", CORRELATED)] = None
    scale_eps: Annotated[_Real, option(real, "E", "Added to the root of the second moment.", SCALED)] = None
    max_scaled_norm: Annotated[_Real, option(real, "C", "Clip norm of scaled gradients.", SCALED)] = None
    unscaled_steps: Annotated[_Count, option(count, "N", "delayed_preconditioner: steps without scale in a cycle.",
        SCALED)] = None
    scaled_steps: Annotated[_Count, option(count, "N", "delayed_preconditioner: steps with a frozen scale.",
        SCALED)] = None
    unscaled_lr_factor: Annotated[_Real, option(real, "F", "delayed_preconditioner: times the rate in unscaled steps.",
        SCALED)] = None
    max_update_norm: Annotated[_Real, option(real, "U", "dp_adam, dp_adagrad: largest move over the learning rate.",
        UPDATE)] = None
    joint_scale: Annotated[_Real, option(real, "K", "joint_moments: c of the released (g, c g^2).", SCALED)] = None
    backend: Annotated[str, option(one_of(available_backends), "NAME",
        "torch (CPU), triton (CUDA) or numpy (the reference).",
        RUN)] = field(default_factory=lambda: chosen_backend() or "torch")
    precision: Annotated[str, option(one_of(PRECISIONS), "NAME",
        "float32, or bf16: forward passes and losses in bfloat16; the parameters stay in float32.", RUN)] = "float32"
    num_workers: Annotated[_Count, option(count, "N",
        "Processes that read image-folder and augmented images ahead.", RUN)] = None
    record_gradients: Annotated[_Count, option(count, "N",
        "Keep N coordinates of each released gradient, for dpcore inspect gradients.", RUN)] = None
    # fmt: on

    def __post_init__(self) -> None:
        choice(METHODS, method=self.method)
        choice(PRECISIONS, precision=self.precision)
        if self.epsilon is None and self.noise_multiplier is None:
            raise ArgumentError("epsilon=None: give --epsilon (the noise is calibrated to it) or --noise-multiplier")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ArgumentError(
                f"noise_multiplier={self.noise_multiplier!r}: must not be given with --epsilon, which decides it"
            )
        if self.epsilon is not None:
            positive(epsilon=self.epsilon)
        for name in KEYWORDS:
            if getattr(self, name) is not None:
                self._check_taken(name)
        for name, other in _ONLY_BESIDE.items():
            given = getattr(self, other.split()[0].replace("-", "_"))
            if getattr(self, name) is not None and given in (None, "doubling"):
                raise ArgumentError(f"{name}={getattr(self, name)!r}: is only for --{other}")
        if self.ema is not None:
            decay(ema=self.ema)
        if self.model_scale is not None:
            positive(model_scale=self.model_scale)
            if self.model not in SCALED_MODELS:
                raise ArgumentError(
                    f"model_scale={self.model_scale!r}: is only for the models {_listed(list(SCALED_MODELS))}"
                )
        if (self.data in text.TASKS) != (self.model in PRETRAINED):
            fit = [name for name in MODELS if (name in PRETRAINED) == (self.data in text.TASKS)]
            raise ArgumentError(f"model={self.model!r}: must be {_listed(fit)} for data={self.data!r}")
        for name, least in (("model_dir", None), ("max_length", 2), ("lora", 1)):
            if (given := getattr(self, name)) is not None:
                if self.model not in PRETRAINED:
                    raise ArgumentError(f"{name}={given!r}: is only for the models {_listed(list(PRETRAINED))}")
                if least:
                    integer(least, **{name: given})
        for name in ("epochs", "record_gradients", "augmentations", "image_size"):
            if getattr(self, name) is not None:
                integer(1, **{name: getattr(self, name)})
        if self.data in text.TASKS:
            for name in ("weights", "image_size", "pixel_mean", "pixel_std", "augmentations"):
                if (given := getattr(self, name)) is not None:
                    raise ArgumentError(f"{name}={given!r}: is only for images, not for data={self.data!r}")
        if self.variant == "side_information":
            raise ArgumentError(
                "variant='side_information': takes the second moment of public gradients, which the command line has "
                "no option for; use dpcore.torch.make_private"
            )
        if (self.variant or "").startswith("noiseless") and self.epsilon is not None:
            raise ArgumentError(
                f"epsilon={self.epsilon!r}: cannot be met by variant={self.variant!r}, which guarantees "
                "nothing; use --noise-multiplier and --allow-nonprivate, or another variant"
            )
        method = self.build_method()
        if self.sampling is None:
            # Correlated noise and second moments of their own need a fixed order; the plan refuses other sampling.
            fixed = method.noise.strategy is not None or method.update.second_moment in ("independent", "joint")
            object.__setattr__(self, "sampling", "fixed-order" if fixed else "poisson")

    def _check_taken(self, name: str) -> None:
        """Refuse a setting that neither the method nor its update takes."""
        keyword = _CALLED.get(name, name)
        taken = keywords(self.method)
        if keyword in (keywords(self.method, self.update) if "base" in taken else taken):
            return
        start = f"{name}={getattr(self, name)!r}: is only for"
        if keyword in taken:
            bases = [base for base in BASES if keyword in keywords(self.method, base)]
            raise ArgumentError(f"{start} --base {_listed(bases)}, not for {self.update}")
        methods = [method for method in METHODS if keyword in keywords(method)]
        raise ArgumentError(f"{start} the method {_listed(methods)}, not for {self.method}")

    @property
    def update(self) -> str:
        """The update rule."""
        return self.base or type(METHODS[self.method](lr=1.0).update).__name__.lower()

    @property
    def learning_rate(self) -> float:
        """The learning rate given, or the default of the update rule."""
        default = FIRST_LR if self.schedule == "doubling" else DEFAULT_LR[self.update]
        return default if self.lr is None else self.lr

    def batch_size_for(self, examples: int) -> int:
        """The batch size given, or the power of two nearest to twice the square root of the number of examples."""
        if self.batch_size is not None:
            return self.batch_size
        return min(examples, 1 << round(math.log2(2 * math.sqrt(examples))))

    def resolved(self, examples: int) -> Settings:
        """Return the same settings with the batch size and the learning rate filled in."""
        return replace(self, batch_size=self.batch_size_for(examples), lr=self.learning_rate)

    @property
    def source(self) -> tuple[str, str | None, str | None, int | None]:
        """What `dpcore.cli.datasets.load` takes."""
        return self.data, self.data_dir, self.model_dir, self.max_length

    def build_method(self, examples: int | None = None) -> Method:
        """Return the method.

        A batch size that was not given follows from `examples`, a public number; without that it stays open.
        """
        given: dict[str, Any] = {_CALLED.get(name, name): getattr(self, name) for name in KEYWORDS}
        given |= {"lr": self.learning_rate}
        given |= {"batch_size": self.batch_size if examples is None else self.batch_size_for(examples)}
        if self.clip_quantile is not None:
            rate = 0.2 if self.clip_lr is None else self.clip_lr
            given["adaptive_clip"] = AdaptiveClip(self.clip_quantile, rate, self.bit_noise)
        if self.strategy is not None:
            given["strategy"] = named_or_saved(self.strategy, self.bands)
        if self.schedule is not None:
            given["schedule"] = Doubling() if self.schedule == "doubling" else WarmupCosine(self.warmup_steps or 0)
        if self.galore_rank is not None:
            given["galore"] = GaLore(self.galore_rank, *(() if self.galore_every is None else (self.galore_every,)))
        if self.ema is not None:
            given["averaging"] = ExponentialAverage(self.ema)
        return METHODS[self.method](**{name: value for name, value in given.items() if value is not None})

    def plan(self, examples: int) -> Plan:
        """Return the plan of a run on `examples` examples, in which the noise multiplier may still be open."""
        method = self.build_method(examples)
        sampler = sampling.sampler(
            str(self.sampling),
            dataset_size=examples,
            batch_size=method.batch_size,
            max_batch_size=self.max_batch_size,
            groups=self.groups,
        )
        return Plan(method, sampler, self.epochs * sampler.steps_per_epoch)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def settings_from(given: dict[str, Any]) -> Settings:
    """Return the settings of the options that were given: those that are not None."""
    return Settings(**{name: value for name, value in given.items() if value is not None})


def stored_settings(content: Mapping[str, Any]) -> Settings:
    """Return the settings of a config.json, read as options are; what else stands there is left out."""
    read = parsers(Settings)
    return settings_from({name: read[name](content[name]) for name in read if content.get(name) is not None})


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


SETTINGS = tuple(item.name for item in fields(Settings))
# The settings that are keywords of methods.
KEYWORDS = tuple(name for name in SETTINGS if any(_CALLED.get(name, name) in keywords(method) for method in METHODS))
