"""What a run says about itself: the privacy statement, as data and as text, and pictures of released quantities."""

from dpcore.report.statement import Statement

__all__ = ["Statement"]
