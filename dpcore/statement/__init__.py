"""What a run says about itself: the privacy statement, as data and as text, and pictures of released quantities."""

from dpcore.statement.statement import Statement

__all__ = ["Statement"]
