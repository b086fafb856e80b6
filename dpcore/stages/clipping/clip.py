"""The clip's settings, the tensors that are clipped together, and the sensitivity that follows."""

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.spec.ops import CLIP_RULES
from dpcore.spec.validate import choice, norm, plain
from dpcore.stages.clipping.adaptive import AdaptiveClip


@dataclass(frozen=True)
class Grouping:
    """A partition of a run's tensors, in a fixed order.

    Attributes
    ----------
    names : tuple of str
        Name of each group.
    members : tuple of tuples of int
        Indices of the tensors of each group.
    bounds : tuple of float
        Clip norm C_l of each group.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    bounds: tuple[float, ...]

    @classmethod
    def of(cls, groups: str | Mapping[str, float], max_grad_norm: float, tensors: Sequence[str]) -> "Grouping":
        """Partition `tensors` (their names, such as "conv1.weight").

        "flat" is one group; "per_layer" one group for each module that directly owns parameters; "per_tensor" one for
        each tensor; these share ``C_l = max_grad_norm / sqrt(L)``. A mapping gives each name pattern its own norm.
        Refused if a tensor matches no pattern, or a pattern no tensor.
        """
        if isinstance(groups, Mapping):
            labels = [_matching_pattern(tensor, groups) for tensor in tensors]
            unused = [pattern for pattern in groups if pattern not in labels]
            if unused:
                raise ArgumentError(
                    f"clipping_groups={unused[0]!r}: matches no tensor that the patterns before it leave, of "
                    f"{', '.join(tensors)}"
                )
        elif groups == "flat":
            labels = ["all"] * len(tensors)
        elif groups == "per_layer":
            labels = [tensor.rpartition(".")[0] for tensor in tensors]
        else:
            labels = list(tensors)
        names = tuple(dict.fromkeys(labels))
        members = tuple(tuple(i for i, label in enumerate(labels) if label == name) for name in names)
        if isinstance(groups, Mapping):
            return cls(names, members, tuple(float(groups[name]) for name in names))
        return cls(names, members, (max_grad_norm / math.sqrt(max(len(names), 1)),) * len(names))


def _matching_pattern(tensor: str, groups: Mapping[str, float]) -> str:
    for pattern in groups:
        if fnmatch.fnmatchcase(tensor, pattern):
            return pattern
    raise ArgumentError(
        f"clipping_groups={list(groups)}: no pattern matches the tensor {tensor!r}; add one, or '*' for all the rest"
    )


@dataclass(frozen=True)
class Sensitivity:
    """An L2 bound on one example's contribution to the sum, C_eff in the docs.

    Attributes
    ----------
    contribution : float
        No example adds a vector of larger L2 norm to the sum.

    Notes
    -----
    Adding or removing an example, or replacing it by one with zero gradient (zero-out), moves the sum by at most
    `contribution`; replacing it by any other example, by at most twice that. The noise multiplier of every event is
    relative to `contribution`, and the event has its own adjacency.
    """

    contribution: float


@dataclass(frozen=True)
class Clip:
    """How each example's vector is bounded before it enters the sum.

    Parameters
    ----------
    max_grad_norm : float
        The L2 bound C. With a mapping of groups it is not used.
    rule : {"standard", "automatic", "automatic_v", "normalized", "psac"}
        ``v min(1, C/||v||)``, ``v C/(||v|| + 0.01)`` (AUTO-S), ``v C/||v||`` (AUTO-V), ``(v/C) min(1, C/||v||)``,
        ``v C/(||v|| + r/(||v|| + r))`` with r = 0.1 (per-sample adaptive clipping).
    groups : {"flat", "per_layer", "per_tensor"} or mapping of str to float
        The coordinates that are clipped together: see `Grouping.of`.
    adaptive : AdaptiveClip or None
        Lets C follow a private quantile of the norms, from `max_grad_norm` on; for one flat group under "standard" or
        "normalized".

    Notes
    -----
    A vector with a non-finite entry contributes exactly zero. The factors are certified: the vector that enters the
    sum has a *true* norm of at most C, rounding included (`dpcore.spec.ops.Backend.clip_factors`).
    """

    max_grad_norm: float = 1.0
    rule: str = "standard"
    groups: str | Mapping[str, float] = field(default="flat")
    adaptive: AdaptiveClip | None = field(default=None, metadata={"described": "if set"})

    def __post_init__(self) -> None:
        plain(self)
        norm(max_grad_norm=self.max_grad_norm)
        choice(CLIP_RULES, clipping=self.rule)
        if isinstance(self.groups, Mapping):
            if not self.groups:
                raise ArgumentError("clipping_groups={}: must map at least one name pattern to its clip norm")
            for pattern, bound in self.groups.items():
                if not isinstance(pattern, str):
                    raise ArgumentTypeError(
                        f"clipping_groups: its pattern {pattern!r} must be a text, such as 'head.*'"
                    )
                norm(**{f"clipping_groups[{pattern!r}]": bound})
        else:
            choice(("flat", "per_layer", "per_tensor"), clipping_groups=self.groups)
        if self.adaptive is not None:
            if not isinstance(self.adaptive, AdaptiveClip):
                raise ArgumentTypeError(
                    f"adaptive_clip={self.adaptive!r}: must be None or a dpcore.clipping.AdaptiveClip, such as "
                    "AdaptiveClip(target_quantile=0.5)"
                )
            if self.rule not in ("standard", "normalized"):
                raise ArgumentError(
                    f"clipping={self.rule!r}: must be 'standard' or 'normalized' with adaptive_clip; the other "
                    "rules change every vector, and their norm only rescales the sum"
                )
            if self.groups != "flat":
                raise ArgumentError(
                    f"clipping_groups={self.groups!r}: must be 'flat' with adaptive_clip={self.adaptive!r}, which "
                    "follows a quantile of the norm of the whole vector"
                )

    def grouping(self, tensors: tuple[str, ...]) -> Grouping:
        """Partition the named tensors."""
        return Grouping.of(self.groups, self.max_grad_norm, tensors)

    def sensitivity(self, grouping: Grouping) -> Sensitivity:
        """Return the bound on one example's contribution over all groups together: `longest`."""
        return Sensitivity(longest(self.rule, grouping))


def longest(rule: str, grouping: Grouping) -> float:
    """Return the norm of the longest vector that a rule leaves in all groups together.

    The groups are orthogonal, so their bounds add in squares: ``sqrt(sum C_l^2)``, and ``sqrt(L)`` under "normalized",
    whose clipped vectors have norm 1 in each group. Each other rule leaves a norm of at most C_l: with N the norm,
    ``min(N, C_l)``, or C_l times N over the sum of N and a number that is not negative.
    """
    if rule == "normalized":
        return math.sqrt(len(grouping.bounds))
    return math.sqrt(math.fsum(bound**2 for bound in grouping.bounds))


def checked_sensitivity(clip: Clip, grouping: Grouping) -> Sensitivity:
    """Return a clip's sensitivity; refuse one of the caller's own that is less than what its rule leaves."""
    said, rule = clip.sensitivity(grouping), clip.rule
    least = longest(rule, grouping) if rule in CLIP_RULES else 0.0
    if not said.contribution >= least * (1 - 1e-12):
        raise PrivacyError(
            f"clip={type(clip).__name__}: says that an example moves the sum by at most {said.contribution:.6g}, and "
            f"its rule {rule!r} leaves vectors of norm {least:.6g}; sensitivity() must be at least that"
        )
    return said
