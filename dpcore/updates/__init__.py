"""The update stage: the first-order optimizer that moves the parameters (post-processing: it costs no privacy)."""

from dpcore.updates.adam import Adam, AdamW
from dpcore.updates.base import Update
from dpcore.updates.sgd import SGD, Momentum

__all__ = ["SGD", "Adam", "AdamW", "Momentum", "Update"]
