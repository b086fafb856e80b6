"""The privacy statement of a run, as data and as text."""

from dpcore.statement.statement import Statement

__all__ = ["Statement"]
