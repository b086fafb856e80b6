"""Whether the rows of a run's correlated noise can be looked at before it begins: asked before any is."""

from __future__ import annotations

import math

from dpcore.spec.free_memory import check_room, host_memory

# What is computed of each row of a run before it begins, at once: variances, their roots, coefficients, one to spare.
_BYTES_OF_A_ROW = 32


def check_rows(kind: str, steps: int, dense: bool = False) -> None:
    """Refuse more steps than can be looked at before the run; with `dense`, than a whole matrix can be made of.

    Raises
    ------
    ArgumentError
        Before anything is allocated.
    """
    free, where = host_memory()
    needed = _BYTES_OF_A_ROW * (steps * steps if dense else steps)
    most = math.isqrt((free or 0) // _BYTES_OF_A_ROW) if dense else (free or 0) // _BYTES_OF_A_ROW
    what = f"steps={steps:,}: planning correlated noise ({kind}) looks at every {'entry of C' if dense else 'row'}"
    check_room(needed, what, f"take at most {most:,} steps, or independent noise (no strategy)", free, where)
