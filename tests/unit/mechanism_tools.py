"""What the tests of a mechanism share: runs from 0, and a backend with operations of the test's own."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import dpcore_numpy
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout


def started(
    plan: Plan, shapes: Sequence[tuple[str, tuple[int, ...]]], dtype: Any = np.float32, *, kind: Any = Mechanism,
    **options: Any,
) -> tuple[Any, list[np.ndarray]]:  # fmt: skip
    """Return a run under a fresh key in NumPy, unless `options` has others, and its parameters."""
    x = [np.zeros(shape, dtype) for _, shape in shapes]
    return kind(plan, Layout.of(shapes), x, **{"backend": dpcore_numpy, "keys": RunKeys.new(), **options}), x


class NumPyBut:
    """The NumPy backend, with some operations replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(dpcore_numpy, name)


def interrupted(*_: Any, **__: Any) -> None:
    """As if Ctrl-C came in this call."""
    raise KeyboardInterrupt
