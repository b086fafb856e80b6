"""Functions of torch that are Python code of several operations: the operations are watched, not the function."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F


def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``F.multi_head_attention_forward``: torch's own code, whose operations show themselves one by one.

    Notes
    -----
    That code hands itself over to whoever watches, as a whole, unless it is told that nobody does. It multiplies by the
    last weight rows that lie flat, the examples of one time after those of another; they are given their two
    dimensions back here, without which nobody could tell which row belongs to which example.
    """
    examples = query.shape[1] if query.dim() == 3 else 1

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(rows.reshape(-1, examples, rows.shape[-1]), weight, bias).flatten(0, 1)

    code = F.multi_head_attention_forward
    mine = code.__globals__ | {"has_torch_function": lambda _: False, "linear": linear}
    return FunctionType(code.__code__, mine, code.__name__, code.__defaults__)(query, *args, **kwargs)


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: attention}
