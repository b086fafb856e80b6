"""dpcore: train models with differential privacy, at as little loss of accuracy and time as the mathematics permits."""

from dpcore import accounting, methods, sampling
from dpcore.mechanism.minimize import MinimizeResult, minimize
from dpcore.plan.plan import Plan
from dpcore.spec import public_names
from dpcore.spec.backends import available_backends, get_backend, set_backend, use_backend
from dpcore.spec.version import __version__
from dpcore.stages import clipping, filters, noise, queries, strategies, updates
from dpcore.stages.clipping import Clip
from dpcore.stages.method import Method
from dpcore.stages.updates import averaging, schedules
from dpcore.stages.updates.galore import GaLore

public_names.install()

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
    "clipping",
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
