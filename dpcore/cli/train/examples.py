"""The examples of a run. Augmented images: each reading shifts and flips one image by draws of its own.

A step reads each drawn example K times and clips the mean of its K gradients (`dpcore.torch.make_private`). The cost is
that of one gradient for any K:

- The copies of example i are functions of i and of draws m_i = (m_i1, .., m_iK). With every m given, what i adds to the
  sum is one vector, ``clip(1/K sum_k g_i(m_ik))``, of norm at most C. One example more or less moves the sum by that
  vector and nothing else.
- A reading takes three numbers of torch's generator, whatever the image is, and no number reaches two readings. So the
  m_i are independent of the data, of each other and of which examples are drawn. The generator is set from the run's
  secret key before each step. That the bound then holds without m given is derived in `dpcore.torch.randomness`.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from dpcore.cli.datasets.image_folder import Images
from dpcore.errors import ArgumentError

PAD = 4
"""Points that an image is mirrored by at each edge before a part of its size is cut out, as De et al. (2022) do."""


MARGIN = 1.2
"""Images of files are read larger by this factor before that, as in De et al.'s code (jax_privacy)."""


def examples_of(inputs: Any, targets: Any, augmented: bool = False) -> Any:
    """Return examples in the form that `dpcore.torch.make_private` takes, whose readings are `augmented` or not."""
    if augmented:
        return Augmented(inputs, targets)
    if isinstance(inputs, Images):
        return Examples(inputs, targets)
    return torch.tensor(inputs), torch.tensor(targets)


class Examples(Dataset[Any]):
    """Images that are read one by one, with their classes."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        self._inputs, self._targets = inputs, torch.tensor(targets)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image, and its class."""
        return torch.from_numpy(self._inputs[index]), self._targets[index]


class Augmented(Examples):
    """Images (n, channels, rows, columns), each read as a part at a random place, flipped half of the time."""

    def __init__(self, inputs: Any, targets: Any) -> None:
        if len(inputs.shape) != 4:
            raise ArgumentError(
                f"augmentations: shifts and flips images, and an example has the shape {inputs.shape[1:]}; leave it out"
            )
        super().__init__(inputs, targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one augmented copy of an image, and its class."""
        _, _, *sides = self._inputs.shape
        of_file = isinstance(self._inputs, Images)
        image = self._inputs.read(index, int(MARGIN * sides[0])) if of_file else self._inputs[index]
        row, column, flip = torch.rand(3, dtype=torch.float64).tolist()
        rows, columns = (
            _cut(there, side, at) for there, side, at in zip(image.shape[1:], sides, (row, column), strict=True)
        )
        return torch.from_numpy(image[:, rows[:, None], columns[:: -1 if flip < 0.5 else 1]]), self._targets[index]


def _cut(there: int, side: int, draw: float) -> Any:
    """Return the places of a part of `side` points, of `there` points mirrored at both ends; `draw` in [0, 1)."""
    mirrored = np.pad(np.arange(there), PAD, mode="symmetric")
    first = int(draw * (len(mirrored) - side + 1))
    return mirrored[first : first + side]
