"""Data sets as plain NumPy arrays: built-in digits, IDX files, .npz archives."""

from dpcore.cli.datasets.dataset import Dataset
from dpcore.cli.datasets.load import NAMES, load

__all__ = ["NAMES", "Dataset", "load"]
