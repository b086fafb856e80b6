"""Models and data sets that the tests build of functions, so that each says in one line what is special about it."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from tests.unit.torch_runs import DATA


class Called(nn.Module):
    """Calls a function with itself and its inputs; `parts` are what the function finds there: layers and all else."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


class Rows(Dataset[Any]):
    """The small problem's examples by index; `read` makes something else of an example."""

    def __init__(self, read: Callable[[int, Any, int], Any] = lambda index, x, y: (x, y)) -> None:
        self.read = read

    def __len__(self) -> int:
        return len(DATA[1])

    def __getitem__(self, index: int) -> Any:
        return self.read(index, DATA[0][index], int(DATA[1][index]))
