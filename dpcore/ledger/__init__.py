"""The privacy ledger: the releases about one data set, each recorded before it is released.

A ledger is one SQLite file for one data set. Every run on that data set reserves its rows (optimizer steps) there
before they may leave the process, so that a crash can over-count and never under-count. All runs together stay within
one budget, even if the settings of later runs were chosen after looking at earlier ones.

>>> from dpcore.ledger import Ledger
>>> import tempfile, pathlib
>>> ledger = Ledger.create(pathlib.Path(tempfile.mkdtemp()) / "patients.ledger", budget=(3.0, 1e-5))
>>> ledger.total().filter
0.0
"""

from dpcore.ledger.allowance import LedgerRun
from dpcore.ledger.checks import Remaining, RunRecord, Total, Verification
from dpcore.ledger.ledger import Ledger
from dpcore.ledger.storage import salvage

__all__ = [
    "Ledger",
    "LedgerRun",
    "Remaining",
    "RunRecord",
    "Total",
    "Verification",
    "salvage",
]
