"""Images in a folder for each class, as ImageNet-1k is unpacked: train/CLASS/*.JPEG and val/CLASS/*.JPEG.

Only names are read at first. An image is read when its example is drawn, and is not kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, DataError
from dpcore.spec.extras import needs

SIZE = 224
ENDINGS = (".jpeg", ".jpg", ".png", ".webp", ".bmp")
_PARTS = ("train", "val")


@dataclass(frozen=True, eq=False)
class Images:
    """The images of some files: the middle square of each, resized to `size` points, float32 (3, size, size) in [0, 1].

    It is indexed as an array of all of them would be: a place reads a file, places or a slice read none.
    """

    paths: Sequence[str]
    size: int = SIZE
    dtype: ClassVar[np.dtype[np.float32]] = np.dtype(np.float32)
    ndim: ClassVar[int] = 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the array of all images."""
        return (len(self.paths), 3, self.size, self.size)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def __getitem__(self, index: Any) -> Any:
        """Return an image, or the images of several places."""
        if isinstance(index, slice):
            return Images(self.paths[index], self.size)
        if isinstance(index, np.ndarray):
            return Images([self.paths[place] for place in index], self.size)
        return self.read(index, self.size)

    def read(self, index: int, size: int) -> npt.NDArray[np.float32]:
        """Read an image at another size."""
        image_of = pillow()
        with image_of.open(self.paths[index]) as file:
            image = file.convert("RGB")
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        # Cut first: resize(box=) would weigh in what lies around the square.
        square = image.crop((left, top, left + side, top + side)).resize((size, size), image_of.Resampling.BICUBIC)
        return np.ascontiguousarray(np.moveaxis(np.asarray(square), 2, 0), np.float32) / np.float32(255)


def read(folder: Path) -> tuple[tuple[Images, npt.NDArray[np.int64]], tuple[Images, npt.NDArray[np.int64]], int]:
    """Return images and classes of both parts, and the number of classes: the places of val's folders in their order.

    Val's, since which classes the training images have is private: a class may have none there. DataError if a part is
    missing, a class is empty in val or is in train alone, or for a file that is no image by its name.
    """
    pillow()  # which is missed here, and not at the first image
    for part in _PARTS:
        if not (folder / part).is_dir():
            raise DataError(f"data_dir={str(folder)!r}: has no folder {part}; must have train/CLASS and val/CLASS")
    train, val = ({path.name: path for path in _entries(folder / part)} for part in _PARTS)
    for name, path in (*train.items(), *val.items()):
        if not path.is_dir():
            raise DataError(f"{path}: is no folder of a class; put each image into the folder of its class")
        if name not in val:
            raise DataError(f"data_dir={str(folder)!r}: has the class {name} in train and not in val")
    made: list[Any] = []
    for classes in (train, val):
        found = [_images(classes[name]) if name in classes else [] for name in val]
        if classes is val and [] in found:
            raise DataError(f"{val[[*val][found.index([])]]}: is empty; must have the images of its class")
        numbers = np.repeat(np.arange(len(val)), [len(paths) for paths in found])
        made.append((Images([path for paths in found for path in paths]), numbers))
    return made[0], made[1], len(val)


def pillow() -> Any:
    """Return Pillow's module for images; ArgumentError if it is not installed."""
    try:
        from PIL import Image
    except ImportError as cause:
        raise ArgumentError(needs("data='image-folder'", "pillow")) from cause
    return Image


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what is in a folder by its name, without hidden files."""
    with os.scandir(folder) as found:
        names = sorted(entry.name for entry in found if not entry.name.startswith("."))
    yield from (folder / name for name in names)


def _images(folder: Path) -> list[str]:
    paths = list(_entries(folder))
    for path in paths:
        if path.suffix.lower() not in ENDINGS:
            raise DataError(f"{path}: is no image by its name; a class has {', '.join(ENDINGS)} and nothing else")
    return [str(path) for path in paths]
