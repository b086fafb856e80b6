"""The clip of each step of a plan, and the standard deviations of the noise that follow from its sensitivity."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from dpcore.errors import PrivacyError
from dpcore.plan import scales
from dpcore.sampling import Sampler
from dpcore.stages.clipping import AdaptiveClip, Clip, Grouping, Sensitivity
from dpcore.stages.clipping.adaptive import limits
from dpcore.stages.method import Method
from dpcore.stages.queries import Phase


class StepScales:
    """What `dpcore.Plan` says of the clip and the noise of a step; `dpcore.plan.scales` says why they are enough."""

    method: Method
    sampler: Sampler
    tensors: tuple[str, ...]

    @property
    def batch_size(self) -> float:
        """The expected batch size B, the denominator of every average."""
        assert self.method.batch_size is not None
        return self.method.batch_size

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier sigma."""
        sigma = self.method.noise.noise_multiplier
        if sigma is None:
            raise PrivacyError(
                "noise_multiplier=None: must be given, or calibrated for a target_epsilon and target_delta"
            )
        return sigma

    def scaled(self, step: int) -> bool:
        """Whether the vectors of step `step` are scaled before they are clipped."""
        query = self.method.preconditioning
        return query is not None and query.phase(step) is not Phase.UNSCALED

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """How the clip norm is adapted; None where it is fixed."""
        return getattr(self.method.clip, "adaptive", None)

    @property
    def clip_limits(self) -> tuple[float, ...]:
        """The least and the greatest norm that an adaptive clip may come to; empty where the norm is fixed."""
        return () if self.adaptive_clip is None else limits(self.method.clip.max_grad_norm)

    def clip_at(self, step: int = 0, norm: float | None = None) -> Clip:
        """The clip of step `step`: of scaled vectors, with their own norm, where they are scaled.

        An adaptive clip's norm is a release, which the plan cannot know: here and below, `norm` is the one in force at
        the step, known to the mechanism, or None for that of the first step.
        """
        return self._clip(step, norm)[0]

    def grouping_at(self, step: int = 0, norm: float | None = None) -> Grouping:
        """The clipping groups of this plan's tensors at step `step`."""
        return self._clip(step, norm)[1]

    def sensitivity_at(self, step: int = 0, norm: float | None = None) -> Sensitivity:
        """The bound on one example's contribution to the sum of step `step`."""
        return self._clip(step, norm)[2]

    def _clip(self, step: int, norm: float | None) -> tuple[Clip, Grouping, Sensitivity]:
        if norm is None:
            return self._clips[self.scaled(step)]
        clip = replace(self.method.clip, max_grad_norm=norm)
        grouping = clip.grouping(self.tensors)
        return clip, grouping, clip.sensitivity(grouping).of_sums(self.sampler.likely_batch_size)

    @cached_property
    def _clips(self) -> dict[bool, tuple[Clip, Grouping, Sensitivity]]:
        plain, query = self.method.clip, self.method.preconditioning
        scaled = plain
        if query is not None and query.max_scaled_norm is not None:
            scaled = replace(plain, max_grad_norm=query.max_scaled_norm)
        found = {}
        for key, clip in ((False, plain), (True, scaled)):
            grouping = clip.grouping(self.tensors)
            found[key] = clip, grouping, clip.sensitivity(grouping).of_sums(self.sampler.likely_batch_size)
        return found

    @property
    def bit_noise_standard_deviation(self) -> float:
        """Standard deviation of the noise on the sum of an adaptive clip's bits; 0 where the norm is fixed."""
        return 0.0 if self.adaptive_clip is None else self.adaptive_clip.noise_on_bits(self.batch_size)

    @property
    def gradient_noise_multiplier(self) -> float:
        """sigma, raised where the bits of an adaptive clip are released beside the sum: `scales.raised_multiplier`."""
        if self.adaptive_clip is None:
            return self.noise_multiplier
        return scales.raised_multiplier(self.noise_multiplier, self.bit_noise_standard_deviation)

    def noise_standard_deviation(self, step: int = 0, norm: float | None = None) -> float:
        """Standard deviation of the seed noise on each coordinate of the *sum* of a step (before division by B)."""
        return scales.gradient_noise(
            self.method.update, self.gradient_noise_multiplier, self.sensitivity_at(step, norm).contribution
        )

    def square_noise_standard_deviation(self, step: int = 0) -> float:
        """Standard deviation of the noise on each coordinate of the squared average; 0 where none is released."""
        return scales.square_noise(
            self.method.update,
            self.noise_multiplier,
            self.sensitivity_at(step).contribution,
            self.batch_size,
            self.sampler.max_batch_size,
        )
