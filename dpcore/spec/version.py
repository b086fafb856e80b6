"""The version, in the one place that code and packaging read."""

__version__ = "0.1.0"
