"""dpcore: train models with differential privacy, at as little loss of accuracy and time as the mathematics permits."""

from dpcore import accounting, methods, sampling
from dpcore.config import available_backends, get_backend, set_backend, use_backend
from dpcore.method import Method
from dpcore.minimize import MinimizeResult, minimize
from dpcore.plan import Plan
from dpcore.version import __version__

__all__ = [
    "Method",
    "MinimizeResult",
    "Plan",
    "__version__",
    "accounting",
    "available_backends",
    "get_backend",
    "methods",
    "minimize",
    "sampling",
    "set_backend",
    "use_backend",
]
