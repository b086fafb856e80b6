"""dpcore: train models with differential privacy, at as little loss of accuracy and time as the mathematics permits.

A name is imported when it is first used: `import dpcore` and the help of the command line need neither NumPy nor SciPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from dpcore.spec import public_names
from dpcore.spec.version import __version__

if TYPE_CHECKING:
    from dpcore import accounting, methods, sampling
    from dpcore.mechanism.minimize import MinimizeResult, minimize
    from dpcore.plan.plan import Plan
    from dpcore.spec.backends import available_backends, get_backend, set_backend, use_backend
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

# Where the functions and classes are. What is missing here is a module.
_PLACES = {
    "Clip": "dpcore.stages.clipping",
    "GaLore": "dpcore.stages.updates.galore",
    "Method": "dpcore.stages.method",
    "Plan": "dpcore.plan.plan",
    **dict.fromkeys(("MinimizeResult", "minimize"), "dpcore.mechanism.minimize"),
    **dict.fromkeys(("available_backends", "get_backend", "set_backend", "use_backend"), "dpcore.spec.backends"),
}
# Attributes without an import of their own, though their names inside are not promised.
_ROOMS = frozenset({"errors", "mechanism", "plan", "stages", "statement", "theory"})

if not TYPE_CHECKING:  # else a type checker would take any name

    def __getattr__(name: str) -> object:
        if name not in __all__ and name not in _ROOMS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = import_module(_PLACES.get(name, f"{__name__}.{name}"))
        globals()[name] = found = getattr(found, name) if name in _PLACES else found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
