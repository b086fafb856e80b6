"""Data sets as plain NumPy arrays: built-in digits, IDX files, .npz archives."""

from dpcore.cli.datasets.load import NAMES, Dataset, load

__all__ = ["NAMES", "Dataset", "load"]
