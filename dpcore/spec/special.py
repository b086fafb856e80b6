"""The functions of `scipy.special`, imported at the first use of one: half of dpcore's import time otherwise.

Ask for them as attributes of this module (``special.ndtr``): ``from dpcore.spec.special import ndtr`` imports at once.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    from scipy import special

    globals()[name] = function = getattr(special, name)
    return function
