"""The command line: ``dpcore train``, ``compare``, ``epsilon``, ``verify``, ``ledger`` and the others."""

import sys
from collections.abc import Sequence

from dpcore.cli.interrupt import Stopped, immediate
from dpcore.cli.output import fitted, remarked_warnings
from dpcore.spec.extras import needs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status. `arguments` are `sys.argv` if not given.

    0 for success; 1 if a check failed or a claim was refuted, and for a defect of dpcore itself; 2 for bad input; 3 if
    a ledger's budget ended a run; 130 and 143 after Ctrl-C and SIGTERM.
    """
    try:
        with immediate():
            from dpcore.cli.app import run

            with remarked_warnings():
                return run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as cause:
        if cause.name not in {"typer", "rich"}:
            raise
        sys.stderr.write(f"dpcore: {needs('the command line', cause.name)}\n")
        return 2
    except Stopped as stop:
        sys.stderr.write(fitted(f"dpcore: {stop}", sys.stderr) + "\n")
        return stop.status
