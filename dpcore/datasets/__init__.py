"""Data sets as plain NumPy arrays: built-in digits, IDX files, .npz archives."""

from dpcore.datasets.dataset import Dataset
from dpcore.datasets.load import NAMES, load

__all__ = ["NAMES", "Dataset", "load"]
