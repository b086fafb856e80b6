"""The update stage: the first-order optimizer that moves the parameters (post-processing: it costs no privacy)."""

from dpcore.updates.accelerated import Accelerated
from dpcore.updates.adagrad import AdaGrad
from dpcore.updates.adam import Adam, AdamW
from dpcore.updates.base import SECOND_MOMENTS, Update
from dpcore.updates.second_moment import SecondMoment
from dpcore.updates.sgd import SGD, Momentum

__all__ = ["SECOND_MOMENTS", "SGD", "Accelerated", "AdaGrad", "Adam", "AdamW", "Momentum", "SecondMoment", "Update"]
