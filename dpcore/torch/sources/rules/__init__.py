"""What each operation on a parameter makes of its inputs and of its output's gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dpcore.torch.sources.rules import elementwise as each
from dpcore.torch.sources.rules.convolution import convolve
from dpcore.torch.sources.rules.einsum import einsum
from dpcore.torch.sources.rules.embedding import embedding, embedding_bag
from dpcore.torch.sources.rules.general import general
from dpcore.torch.sources.rules.linear import addmm, linear, matmul
from dpcore.torch.sources.rules.normalization import normalization
from dpcore.torch.sources.rules.recurrent import cell, gru, lstm, plain, recurrent
from dpcore.torch.sources.tracer import Rule

_STEPS = {"lstm": lstm, "gru": gru, "rnn_tanh": plain(torch.tanh), "rnn_relu": plain(torch.relu)}

# fmt: off
RULES: dict[Any, Rule] = {
    F.linear: linear,
    **dict.fromkeys((torch.addmm, torch.Tensor.addmm), addmm),
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.mm, torch.Tensor.mm, torch.Tensor.__matmul__), matmul),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolve(transposed=False)),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), convolve(transposed=True)),
    torch.einsum: einsum,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    **dict.fromkeys((torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to), each.expanded),
    torch.Tensor.repeat: each.repeated,
    **dict.fromkeys((torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__), each.added),
    **dict.fromkeys((torch.Tensor.add_, torch.Tensor.__iadd__), each.added_in_place),
    **dict.fromkeys((torch.sub, torch.Tensor.sub, torch.Tensor.__sub__), each.subtracted),
    **dict.fromkeys((torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__), each.multiplied),
    **dict.fromkeys((torch.div, torch.Tensor.div, torch.Tensor.__truediv__), each.divided),
    F.layer_norm: normalization("input normalized_shape weight bias eps", channels=False),
    F.rms_norm: normalization("input normalized_shape weight eps", channels=False),
    F.group_norm: normalization("input num_groups weight bias eps", channels=True),
    F.batch_norm: normalization("input running_mean running_var weight bias training momentum eps", channels=True),
    F.instance_norm: normalization(
        "input running_mean running_var weight bias use_input_stats momentum eps", channels=True
    ),
    **{getattr(torch._VF, name): recurrent(step) for name, step in _STEPS.items()},
    **{getattr(torch._VF, f"{name}_cell"): cell(step) for name, step in _STEPS.items()},
}
# fmt: on


def rule_of(function: Any) -> Rule:
    """Return the rule of an operation: its own, or the one for all others."""
    return RULES.get(function, general)
