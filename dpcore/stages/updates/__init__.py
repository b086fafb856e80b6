"""The update stage: the first-order optimizer that moves the parameters (post-processing: it costs no privacy)."""

from dpcore.stages.updates.rules import (
    SECOND_MOMENTS,
    SGD,
    Accelerated,
    AdaGrad,
    Adam,
    AdamW,
    Momentum,
    Nesterov,
    SecondMoment,
    Update,
)

__all__ = [
    "SECOND_MOMENTS", "SGD", "Accelerated", "AdaGrad", "Adam", "AdamW", "Momentum", "Nesterov", "SecondMoment",
    "Update",
]  # fmt: skip
