"""The update stage: the first-order optimizer that moves the parameters (post-processing: it costs no privacy)."""

from dpcore.stages.updates.accelerated import Accelerated
from dpcore.stages.updates.adam import AdaGrad, Adam, AdamW
from dpcore.stages.updates.base import SECOND_MOMENTS, Update
from dpcore.stages.updates.second_moment import SecondMoment
from dpcore.stages.updates.sgd import SGD, Momentum, Nesterov

__all__ = [
    "SECOND_MOMENTS", "SGD", "Accelerated", "AdaGrad", "Adam", "AdamW", "Momentum", "Nesterov", "SecondMoment",
    "Update",
]  # fmt: skip
