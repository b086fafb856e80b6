"""dpcore: train models with differential privacy, at as little loss of accuracy and time as the mathematics permits."""

from dpcore import accounting, averaging, filters, methods, noise, queries, sampling, schedules, strategies, updates
from dpcore.clipping import Clip
from dpcore.config import available_backends, get_backend, set_backend, use_backend
from dpcore.galore import GaLore
from dpcore.method import Method
from dpcore.minimize import MinimizeResult, minimize
from dpcore.plan import Plan
from dpcore.version import __version__

__all__ = [
    "Clip",
    "GaLore",
    "Method",
    "MinimizeResult",
    "Plan",
    "__version__",
    "accounting",
    "available_backends",
    "averaging",
    "filters",
    "get_backend",
    "methods",
    "minimize",
    "noise",
    "queries",
    "sampling",
    "schedules",
    "set_backend",
    "strategies",
    "updates",
    "use_backend",
]
