"""All commands of ``dpcore strategy``."""

from __future__ import annotations

from dpcore.cli.accounting import strategy_growth, strategy_recommend
from dpcore.cli.accounting.strategy import strategy

__all__ = ["strategy", "strategy_growth", "strategy_recommend"]
