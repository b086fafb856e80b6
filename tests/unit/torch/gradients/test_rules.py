"""Every rule of the proof, on real numbers: the marks that a rule gives are true of what the operation computes.

A case is an operation with arguments for B examples. Every tensor that has a dimension of B, or of a multiple of it, is
marked in every way that this dimension allows; where the rule accepts, other values for one example must leave the bits of
all other examples' entries, and of values without examples; a sum must be one of the examples' parts; examples in another
order must give the same in that order; and the program for fewer examples must give the rows of those.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from operator import getitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpcore.torch.gradients import axis
from dpcore.torch.gradients.axis import RULES, SUM, Axis, Places, follow, name_of
from dpcore.torch.gradients.errors import NotProved
from dpcore.torch.gradients.proved import Program
from dpcore.torch.gradients.sources import Finder
from tests import depth

A = torch.ops.aten
B = 5
"""No other size of a case is a multiple of it."""
D = "cpu"

Build = Callable[[int], tuple[Any, ...]]


def f(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, device=D) + 0.25


def z(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, device=D)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, device=D)


def c(*shape: int) -> torch.Tensor:
    return torch.complex(z(*shape), z(*shape))


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=D) > 0


def square(*shape: int) -> torch.Tensor:
    """Symmetric, positive definite."""
    x = z(*shape, shape[-1])
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


class Own:
    """The numbers of the examples, as the graph makes them."""

    def __init__(self, count: int) -> None:
        self.count = count


def each(names: str, *builds: Build) -> dict[str, tuple[Build, ...]]:
    return dict.fromkeys(names.split(), builds)


def pool(places: int) -> dict[str, tuple[Build, ...]]:
    """Pooling, padding and resizing of so many dimensions, forward and backward."""
    n, size, half, wide = places, [6] * places, [3] * places, [8] * places
    two, one, none, pads = [2] * n, [1] * n, [0] * n, [1] * (2 * n)
    scales = [None] * n
    found: dict[str, tuple[Build, ...]] = {}

    def add(name: str, forward: Callable[[torch.Tensor], tuple[Any, ...]], backward: Callable[..., Any] | None) -> None:
        shapes = (lambda b: (b, 2), lambda b: (2, b), lambda b: (2 * b, 2))
        found[name] = tuple((lambda b, s=s: forward(z(*s(b), *size))) for s in shapes)  # type: ignore[misc]
        if backward is None:
            return

        def back(b: int, s: Any) -> Any:
            x = z(*s(b), *size)
            result = getattr(A, name).default(*forward(x))
            out = result[0] if isinstance(result, tuple) else result
            return backward(z(*out.shape), x, result[1] if isinstance(result, tuple) else None)

        found[f"{name}_backward"] = tuple(partial(back, s=s) for s in shapes)

    ends = {
        f"reflection_pad{n}d": pads,
        f"replication_pad{n}d": pads,
    }
    for name, given in ends.items():
        add(name, lambda x, given=given: (x, given), lambda e, x, _, given=given: (e, x, given))
    for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
        add(name, lambda x: (x, wide, *scales), lambda e, x, _: (e, wide, list(x.shape), *scales))
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[n]
    for name in [f"upsample_{kind}{n}d" for kind in smooth] + [f"_upsample_{kind}2d_aa" for kind in smooth if n == 2]:
        add(name, lambda x: (x, wide, False, *scales), lambda e, x, _: (e, wide, list(x.shape), False, *scales))
    if n == 1:
        return found
    add(f"avg_pool{n}d", lambda x: (x, two, two), lambda e, x, _: (e, x, two, two, none, False, True, None))
    add(f"max_pool{n}d_with_indices", lambda x: (x, two, two), lambda e, x, at: (e, x, two, two, none, one, False, at))
    add(f"_adaptive_avg_pool{n}d", lambda x: (x, half), lambda e, x, _: (e, x))
    add(f"adaptive_max_pool{n}d", lambda x: (x, half), lambda e, x, at: (e, x, at))
    if n == 2:
        sampled = lambda x: f(*x.shape[:2], 2) - 0.25  # noqa: E731
        add("fractional_max_pool2d", lambda x: (x, two, half, sampled(x)), lambda e, x, at: (e, x, two, half, at))
    return found


def dims(*more: Any) -> tuple[Build, ...]:
    """Arguments of an operation along one dimension, on the examples' and on another one."""
    return (
        lambda b: (z(b, 4, 3), *more, 1),
        lambda b: (z(4, b, 3), *more, -1),
        lambda b: (z(4, b), *more, -1),
        lambda b: (z(2 * b, 3), *more, 0),
        lambda b: (z(2 * b, 3), *more, 1),
    )


def reduced() -> tuple[Build, ...]:
    return (
        lambda b: (z(b, 4, 3), [1]),
        lambda b: (z(3, 4, b), [-2, 0]),
        lambda b: (z(3, 4, b), [0], {"keepdim": True}),
        lambda b: (z(3, 4, b), [-1]),
        lambda b: (z(2, 2 * b, 3), [0, 2]),
    )


def attention(b: int, mask: bool = False, backward: bool = False) -> tuple[Any, ...]:
    q, k, v = (z(b, 2, 4, 8) for _ in range(3))
    more = {"attn_mask": z(b, 2, 4, 4)} if mask else {}
    if not backward:
        return q, k, v, 0.0, not mask, more
    out, lse = A._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, not mask, **more)
    return z(*out.shape), q, k, v, out, lse, 0.0, not mask, more


def recurrence(b: int, backward: bool = False, kind: str = "lstm") -> tuple[Any, ...]:
    gates = {"lstm": 4, "gru": 3}[kind] * 3
    x, hidden, cell, weight, bias = z(4, b, gates), z(1, b, 3), z(1, b, 3), z(3, gates), z(gates)
    if not backward:
        return kind, x, hidden, cell, weight, bias, False
    kept = torch.ops.dpcore.recurrence(kind, x, hidden, cell, weight, bias, False)
    return kind, z(4, b, 3), z(1, b, 3), z(1, b, 3), *kept, hidden, cell, weight, bias, False


def head_rows(b: int, bias: bool = True, others: bool = True) -> tuple[Any, ...]:
    """Rows of a head of 7 classes, with what the loss gives back of each."""
    return z(b, 3), z(7, 3), z(7) if bias else None, z(b), i(7, b), z(b), z(b) if others else None


def layer_norm_backward(b: int) -> tuple[Any, ...]:
    x, w = z(b, 4, 3), z(3)
    _, mean, rstd = A.native_layer_norm(x, [3], w, w, 1e-5)
    return z(b, 4, 3), x, [3], mean, rstd, w, w, [True, True, True]


def group_norm_backward(b: int) -> tuple[Any, ...]:
    x = z(b, 4, 3)
    _, mean, rstd = A.native_group_norm(x, None, None, b, 4, 3, 2, 1e-5)
    return z(b, 4, 3), x, mean, rstd, z(4), b, 4, 3, 2, [True, True, True]


def normed(b: int, trains: bool | None, *more: Any, channels: bool = False) -> tuple[Any, ...]:
    shape, wide = ((3, b, 4), b) if channels else ((b, 3, 4), 3)
    return z(*shape), f(wide), z(wide), z(wide), f(wide), *([trains] if trains is not None else []), *more


def normed_backward(b: int, trains: bool, channels: bool = False, new: bool = False) -> tuple[Any, ...]:
    shape, wide = ((3, b, 4), b) if channels else ((b, 3, 4), 3)
    saved = (z(wide), f(wide)) if trains else (z(0), z(0))
    reserve = (torch.zeros(0, dtype=torch.uint8),) if new else ()
    return z(*shape), z(*shape), f(wide), z(wide), f(wide), *saved, trains, 1e-5, [True, True, True], *reserve


def convolution(b: int, transposed: bool = False, groups: int = 1) -> tuple[Any, ...]:
    weight = z(4, 6 // groups, 3) if transposed else z(6, 4 // groups, 3)
    return z(b, 4, 8), weight, z(6), [1], [1], [1], transposed, [0], groups


def convolution_backward(b: int, transposed: bool = False, groups: int = 1) -> tuple[Any, ...]:
    x, weight, _, *form = convolution(b, transposed, groups)
    return z(b, 6, 8), x, weight, [6], *form, [True, True, True]


two = lambda b: (z(b, 4), z(b, 4))  # noqa: E731
three = lambda b: (f(b, 4), f(b, 4), f(b, 4))  # noqa: E731

TABLE = (
    each("copy hardswish_backward", two),
    each(
        "_to_copy detach alias lift_fresh lift_fresh_copy hardswish nan_to_num _neg_view zeros_like ones_like empty_like "
        "rand_like randn_like random exponential uniform cauchy log_normal log_sigmoid_forward poisson "
        "_standard_gamma",
        lambda b: (f(b, 4),),
        lambda b: (f(3, 2 * b),),
    ),
    each("bernoulli", lambda b: (f(b, 4) / 2,)),
    each("fill", lambda b: (z(b, 4), 2.0)),
    each("full_like randint_like", lambda b: (z(b, 4), 3)),
    each("geometric", lambda b: (z(b, 4), 0.5)),
    # Of equal places torch's threads decide which value stays.
    each("max_unpool2d", lambda b: (z(b, 3, 2, 2), torch.randperm(4).view(2, 2).expand(b, 3, 2, 2), [4, 4]),
           lambda b: (z(3, b, 2), i(4, 3, b, 2), [2 * b, 4])),
    each("max_unpool3d", lambda b: (z(b, 3, 1, 1, 2), torch.randperm(9)[:2].expand(b, 3, 1, 1, 2), [2, 2, 4], [2, 2, 2], [0, 0, 0])),
    each("fill.Tensor", lambda b: (z(b, 4), z())),
    each("hardsigmoid_backward", two),
    each("_conj", lambda b: (c(b, 4),)),
    each("hardtanh_backward", lambda b: (z(b, 4), z(b, 4), -1.0, 1.0)),
    each("elu_backward", lambda b: (z(b, 4), 1.0, 1.0, 1.0, False, z(b, 4))),
    each("softplus_backward", lambda b: (z(b, 4), z(b, 4), 1.0, 20.0)),
    each("softshrink_backward hardshrink_backward", lambda b: (z(b, 4), z(b, 4), 0.5)),
    each("leaky_relu_backward", lambda b: (z(b, 4), z(b, 4), 0.1, False)),
    each("log_sigmoid_backward", three),
    each("complex polar", two, lambda b: (z(b, 4), z(1, 4))),
    each("erfinv", lambda b: (f(b, 4) - 0.5,)),
    each("masked_fill", lambda b: (z(b, 4), t(b, 4), 2.0), lambda b: (z(b, 4), t(b, 1), 2.0)),
    each("_prelu_kernel", lambda b: (z(b, 4), z(1, 4)), two),
    each("_prelu_kernel_backward", lambda b: (z(b, 4), z(b, 4), z(1, 4)), three),
    each("rrelu_with_noise_backward", lambda b: (z(b, 4), z(b, 4), f(b, 4), 0.1, 0.3, True, False)),
    each("rrelu_with_noise_functional", lambda b: (z(b, 4), f(b, 4), 0.1, 0.3, True)),
    each("native_dropout", lambda b: (z(b, 4), 0.5, True)),
    each("bucketize", lambda b: (f(b, 4), f(3).sort()[0]), lambda b: (f(b), f(b).sort()[0]),
           lambda b: (f(b, b - 1), f(3).sort()[0])),
    each("isin", lambda b: (i(9, b, 4), i(9, 3)), lambda b: (i(9, b), i(9, b)), lambda b: (i(9, b, 4), i(9, b, 4))),
    each("searchsorted.Tensor", lambda b: (f(3).sort()[0], f(b, 4)), lambda b: (f(b, 3).sort()[0], f(b, 4)),
           lambda b: (f(b).sort()[0], f(b)), lambda b: (f(3), f(b, 4), {"sorter": torch.randperm(3)})),
    each("multinomial", lambda b: (f(b, 4), 2), lambda b: (f(4, b), 2), lambda b: (f(b), 2), lambda b: (f(b, 4), 3, True)),
    each("normal_functional", lambda b: (z(b, 4),)),
    each("normal.Tensor_Tensor", lambda b: (z(b, 4), f(b, 4)), lambda b: (z(b, 4), f(1, 4))),
    each("binomial", lambda b: (torch.floor(9 * f(b, 4)), f(b, 4) / 2)),
    each("_sample_dirichlet", lambda b: (f(b, 4),), lambda b: (f(4, b),)),
    each("_dirichlet_grad", lambda b: (f(b, 4) / 6, f(b, 4), 4 * f(b, 4)), lambda b: (f(4, b) / 6, f(4, b), 4 * f(4, b))),
    each("zeros ones empty rand randn", lambda b: ([b, 4],), lambda b: ([3, 2 * b],), lambda b: ([b, b],)),
    each("full", lambda b: ([b, 4], 2.0), lambda b: ([4], float(b)), lambda b: ([4], b)),
    each("randint", lambda b: (b, [b, 4]), lambda b: (9, [b, 4])),
    each("new_zeros new_ones new_empty", lambda b: (z(b, 4), [b, 3]), lambda b: (z(b, 4), [3])),
    each("new_full", lambda b: (z(b, 4), [b, 3], 2.0)),
    each("empty_strided", lambda b: ([b, 4], [4, 1]), lambda b: ([4, b], [b, 1])),
    each("new_empty_strided", lambda b: (z(b, 4), [4, b], [b, 1])),
    each("mse_loss soft_margin_loss", lambda b: (z(b, 4), z(b, 4), 0), lambda b: (z(b, 4), z(b, 4), 1)),
    each("smooth_l1_loss huber_loss", lambda b: (z(b, 4), z(b, 4), 0, 1.0), lambda b: (z(b, 4), z(b, 4), 2, 1.0)),
    each("binary_cross_entropy", lambda b: (f(b, 4) / 2, f(b, 4) / 2, z(4), 0), lambda b: (f(b) / 2, f(b) / 2, z(b), 2)),
    each("mse_loss_backward soft_margin_loss_backward", lambda b: (*three(b), 0), lambda b: (*three(b), 1)),
    each("smooth_l1_loss_backward huber_loss_backward", lambda b: (*three(b), 0, 1.0), lambda b: (*three(b), 1, 1.0)),
    each("binary_cross_entropy_backward", lambda b: (z(b, 4), f(b, 4) / 2, f(b, 4) / 2, None, 0),
           lambda b: (z(), f(b, 4) / 2, f(b, 4) / 2, None, 1)),
    each("nll_loss_forward", lambda b: (z(b, 4), i(4, b), f(4), 0, 2), lambda b: (z(b, 4), i(4, b), None, 1, 2)),
    each("nll_loss2d_forward", lambda b: (z(b, 4, 2, 3), i(4, b, 2, 3), f(4), 0, 2)),
    each("nll_loss_backward", lambda b: (z(b), z(b, 4), i(4, b), f(4), 0, 2, f())),
    each("nll_loss2d_backward", lambda b: (z(b, 2, 3), z(b, 4, 2, 3), i(4, b, 2, 3), f(4), 0, 2, f())),
    each(
        "view _unsafe_view",
        lambda b: (z(b, 4, 3), [b, 12]), lambda b: (z(b, 4, 3), [4 * b, 3]), lambda b: (z(4, b, 3), [4 * b, 3]),
        lambda b: (z(4 * b, 3), [4, b, 3]), lambda b: (z(4 * b, 3), [b, 12]), lambda b: (z(4 * b, 3), [b, 4, 3]),
        lambda b: (z(b, 4), [4, b]), lambda b: (z(2 * b, 2, 3), [2, 2 * b, 3]), lambda b: (z(2, 2 * b, 3), [4 * b, 3]),
        lambda b: (z(4, 3 * b), [2, 6 * b]), lambda b: (z(4, 3 * b), [2, 2, b, 3]), lambda b: (z(4, 3 * b), [3 * b, 4]),
        lambda b: (z(b, 4), [-1]), lambda b: (z(6 * b), [3, 2 * b]), lambda b: (z(6 * b), [3 * b, 2]),
    ),
    each("t", lambda b: (z(b, 4),), lambda b: (z(4, 2 * b),), lambda b: (z(b),)),
    each("transpose", lambda b: (z(b, 4, 3), 0, -1), lambda b: (z(4, 2 * b, 3), 0, 2), lambda b: (z(4, b, 3), -3, -2)),
    each("permute", lambda b: (z(b, 4, 3), [1, -1, 0]), lambda b: (z(4, 2 * b, 3), [2, 0, 1])),
    each("unsqueeze", *(lambda b, d=d: (z(2, b), d) for d in (0, 1, 2, -1, -2))),
    each("squeeze", lambda b: (z(1, b, 1, 4),), lambda b: (z(2 * b, 1),), lambda b: (z(b, 4),)),
    each("squeeze.dim", lambda b: (z(1, b, 4), 0), lambda b: (z(1, b, 4), 1), lambda b: (z(b, 1), -1)),
    each("squeeze.dims", lambda b: (z(1, b, 1), [0, 1, -1]), lambda b: (z(b, 4), [0])),
    each("expand", lambda b: (z(1, 4), [b, 4]), lambda b: (z(4), [b, 4]), lambda b: (z(b, 1), [2, -1, 4]),
           lambda b: (z(b, 1), [b, b]), lambda b: (z(1, 4), [2 * b, 4])),
    each("repeat", lambda b: (z(4), [b, 2]), lambda b: (z(b, 4), [3, 2]), lambda b: (z(2 * b, 4), [2, 2, 1]),
           lambda b: (z(2, 4), [b, 1]), lambda b: (z(b, 4), [b, 1]), lambda b: (z(b, 4), [1, b])),
    each("select", lambda b: (z(b, 4, 3), 1, 2), lambda b: (z(4, b), 0, -1), lambda b: (z(b, 4), 0, 0)),
    each("slice slice_copy", lambda b: (z(b, 4), 1, 1, 3), lambda b: (z(b, 4), 0, 0, b), lambda b: (z(b, 4), 0, 1, b),
           lambda b: (z(b, 4), 0, 0, 2**63 - 1), lambda b: (z(b, 4), 0, 0, 9), lambda b: (z(b, 4), 0, -9, b),
           lambda b: (z(b, 4), 1, 0, b), lambda b: (z(b, 4), 0, 0, b, 2), lambda b: (z(4), 0, 0, b)),
    each("select_backward", lambda b: (z(b, 3), [b, 4, 3], 1, 2), lambda b: (z(b), [4, b], 0, -1)),
    each("slice_backward", lambda b: (z(b, 2), [b, 4], 1, 1, 3, 1), lambda b: (z(b, 4), [b, 4], 0, 0, 2**63 - 1, 1),
           lambda b: (z(b - 1, 4), [b, 4], 0, 1, b, 1)),
    each("slice_scatter", lambda b: (z(b, 4), z(b, 2), 1, 1, 3), lambda b: (z(b, 4), z(b, 4), 0, 0, b),
           lambda b: (z(b, 4), z(1, 4), 0, 1, 2), lambda b: (z(b, 4), z(b, 4), 0, 0, 9)),
    each("select_scatter", lambda b: (z(b, 4), z(b), 1, 2), lambda b: (z(b, 4), z(4), 0, 2)),
    each("cat", lambda b: ([z(b, 4), z(b, 3)], 1), lambda b: ([z(b, 4), z(b, 4)], 0), lambda b: ([z(3, b), z(1, b)],)),
    each("stack", lambda b: ([z(b, 4), z(b, 4)], 1), lambda b: ([z(b, 4), z(b, 4)],), lambda b: ([z(b), z(b)], -1)),
    each("split.Tensor split_copy unsafe_split", lambda b: (z(b, 4), 2, 1), lambda b: (z(b, 4), 9), lambda b: (z(b, 4), b),
           lambda b: (z(b, 4), b, 1), lambda b: (z(2 * b, 4), b)),
    each("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy", lambda b: (z(b, 4), [1, 3], 1),
           lambda b: (z(b, 4), [b]), lambda b: (z(b, 4), [1, b - 1])),
    each("unbind", lambda b: (z(b, 4), 1), lambda b: (z(3, b),), lambda b: (z(b, 4),)),
    each("flip", lambda b: (z(b, 4), [1]), lambda b: (z(b, 4), [0]), lambda b: (z(3, b, 2), [-1, 0])),
    each("roll", lambda b: (z(b, 4), [1], [1]), lambda b: (z(b, 4), [1]), lambda b: (z(b, 4), [1], [0])),
    each("unfold", lambda b: (z(b, 4), 1, 2, 1), lambda b: (z(b, 4), 0, 2, 1), lambda b: (z(4, b), 0, 2, 2)),
    each("unfold_backward", lambda b: (z(b, 3, 2), [b, 4], 1, 2, 1), lambda b: (z(b - 1, 4, 2), [b, 4], 0, 2, 1),
           lambda b: (z(3, b, 2), [4, b], 0, 2, 1)),
    each("diagonal diagonal_copy", lambda b: (z(b, 3, 4), 1, 1, 2), lambda b: (z(3, b, 3), 0, 0, -1),
           lambda b: (z(b, 3, 4),), lambda b: (z(3, 4, 2 * b),)),
    each("diagonal_backward", lambda b: (z(b, 3), [b, 3, 3], 0, 1, 2), lambda b: (z(b, 3), [3, b, 3], 0, 0, -1)),
    each("constant_pad_nd", lambda b: (z(b, 4), [1, 2]), lambda b: (z(b, 4), [0, 0, 1, 1]), lambda b: (z(3, b, 2), [1, 1, 0, 0, 2, 0])),
    each("view_as_real", lambda b: (c(b, 4),), lambda b: (c(2, b),)),
    each("view_as_complex", lambda b: (z(b, 4, 2),), lambda b: (z(2, b, 2),)),
    each("sum.dim_IntList", *reduced(), lambda b: (z(2, 2 * b), [0], True), lambda b: (z(2, b), []), lambda b: (z(2, 2 * b), None)),
    each("sum prod any all argmax argmin max min median nanmedian mean count_nonzero",
           lambda b: (z(b, 4),)),
    each("nansum mean.dim amax amin var.correction std.correction var_mean.correction std_mean.correction logsumexp",
           *reduced()),
    each("any.dims all.dims", *reduced()),
    each("linalg_vector_norm", lambda b: (z(b, 4), 2, [1]), lambda b: (z(b, 4), 2), lambda b: (z(3, 2 * b), 3, [0], True),
           lambda b: (z(3, b), 2, [1])),
    each("norm.ScalarOpt_dim", lambda b: (z(b, 4), 2, [1]), lambda b: (z(b, 4), 2, [0]), lambda b: (z(3, b, 2), 2, [0, 2], True)),
    each("aminmax", lambda b: (z(b, 4), {"dim": 1}), lambda b: (z(b, 4), {"dim": 0}), lambda b: (z(b, 4),)),
    each("prod.dim_int argmax argmin mode median.dim nanmedian.dim max.dim min.dim any.dim all.dim", *dims()),
    each("max.other min.other", two),
    each("count_nonzero.dim_IntList", lambda b: (t(b, 4), [1]), lambda b: (t(b, 4), [0])),
    each("kthvalue topk", *dims(2)),
    each("_softmax _log_softmax", *(lambda b, g=g: (*g(b), False) for g in dims())),
    each("_safe_softmax cumsum cumprod logcumsumexp cummax cummin sort", *dims()),
    each("sort.stable", lambda b: (z(b, 4), {"stable": True, "dim": 1}), lambda b: (z(b, 4), {"stable": True, "dim": 0})),
    each("glu", lambda b: (z(b, 4), 1), lambda b: (z(2 * b, 4), 0), lambda b: (z(4, 2 * b), 0)),
    each("_softmax_backward_data _log_softmax_backward_data",
           *(lambda b, d=d: (z(3, b, 4), z(3, b, 4), d, torch.float64) for d in (0, 1, 2, -1))),
    each("glu_backward", lambda b: (z(b, 2), z(b, 4), 1), lambda b: (z(b, 4), z(2 * b, 4), 0), lambda b: (z(2, b), z(4, b), 0)),
    each("tril triu", lambda b: (z(b, 4, 3),), lambda b: (z(2 * b, 3), 1), lambda b: (z(4, 2, b, 3, 3), 1)),
    each("_linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex linalg_matrix_exp",
           lambda b: (square(b, 3),), lambda b: (square(2, 2 * b, 3),), lambda b: (square(b),)),
    each("_cdist_forward", lambda b: (z(b, 4, 3), z(b, 6, 3), 2.0, None), lambda b: (z(b, 3), z(b, 3), 2.0, None),
           lambda b: (z(b, 3), z(4, 3), 2.0, None), lambda b: (z(b, 4, 3), z(1, 6, 3), 1.0, None)),
    each("_cdist_backward", lambda b: (z(b, 4, 6), z(b, 4, 3), z(b, 6, 3), 2.0, f(b, 4, 6)),
           lambda b: (z(b, 6), z(b, 3), z(6, 3), 2.0, f(b, 6)), lambda b: (z(2, b, 4, 6), z(2, b, 4, 3), z(2, b, 6, 3), 1.0, f(2, b, 4, 6))),
    each("linalg_solve_triangular", lambda b: (square(b, 3), z(b, 3, 2), {"upper": True}),
           lambda b: (square(3), z(3, b), {"upper": True})),
    each("_fft_r2c", lambda b: (z(b, 4), [1], 0, True), lambda b: (z(b, 4), [0], 0, True), lambda b: (z(3, b, 4), [0, 2], 0, False)),
    each("_fft_c2c", lambda b: (c(b, 4), [1], 0, True), lambda b: (c(b, 4), [0], 0, True)),
    each("_fft_c2r", lambda b: (c(b, 3), [1], 0, 4), lambda b: (c(b, 3), [0], 0, b)),
    each("mm", lambda b: (z(b, 4), z(4, 3)), lambda b: (z(3, 4), z(4, 2 * b)), lambda b: (z(3, b), z(b, 4)),
           lambda b: (z(3, 4 * b), z(4 * b, 2)), lambda b: (z(b, 4), z(4, b))),
    each("addmm", lambda b: (z(3), z(b, 4), z(4, 3)), lambda b: (z(b, 3), z(b, 4), z(4, 3)),
           lambda b: (z(3, 1), z(3, 4), z(4, b)), lambda b: (z(b), z(3, 4), z(4, b)),
           lambda b: (torch.zeros(2, dtype=torch.float64), z(3, b), z(b, 2))),
    each("bmm", lambda b: (z(b, 4, 3), z(b, 3, 2)), lambda b: (z(2, b, 3), z(2, 3, 4)), lambda b: (z(2, 3, 4), z(2, 4, 2 * b)),
           lambda b: (z(2, 3, 2 * b), z(2, 2 * b, 4)), lambda b: (z(2, b, 3), z(2, 3, b)), lambda b: (z(2 * b, 4, 3), z(2 * b, 3, 2))),
    each("baddbmm", lambda b: (z(b, 4, 2), z(b, 4, 3), z(b, 3, 2)), lambda b: (z(1, 4, 2), z(b, 4, 3), z(b, 3, 2)),
           lambda b: (z(2, 1, 4), z(2, b, 3), z(2, 3, 4)), lambda b: (z(b, 4), z(2, b, 3), z(2, 3, 4))),
    each("mv", lambda b: (z(b, 4), z(4)), lambda b: (z(3, 2 * b), z(2 * b)), lambda b: (z(4, b), z(b))),
    each("dot vdot", lambda b: (z(b), z(b)), lambda b: (z(2 * b), z(2 * b))),
    each("addmv", lambda b: (z(), z(b, 4), z(4)), lambda b: (z(b), z(b, 4), z(4))),
    each("convolution", convolution, partial(convolution, transposed=True), lambda b: convolution(2 * b, groups=2),
           lambda b: (z(2, b, 8), z(6, b, 3), None, [1], [0], [1], False, [0], 1)),
    each("_convolution", lambda b: (*convolution(b), False, False, False, False)),
    each("convolution_backward", convolution_backward, partial(convolution_backward, transposed=True),
           lambda b: convolution_backward(3 * b), lambda b: convolution_backward(2 * b, groups=2)),
    each("native_layer_norm", lambda b: (z(b, 4, 3), [4, 3], z(4, 3), z(4, 3), 1e-5), lambda b: (z(2, 2 * b, 3), [3], z(3), None, 1e-5),
           lambda b: (z(4, b), [b], None, None, 1e-5)),
    each("_fused_rms_norm", lambda b: (z(b, 4, 3), [3], z(3), 1e-5), lambda b: (z(4, b, 3), [b, 3], None, 1e-5)),
    each("native_layer_norm_backward", layer_norm_backward, lambda b: layer_norm_backward(2 * b)),
    each("native_group_norm", lambda b: (z(b, 4, 3), z(4), z(4), b, 4, 3, 2, 1e-5),
           lambda b: (z(4, 2 * b, 3), None, None, 4, 2 * b, 3, 2, 1e-5)),
    each("native_group_norm_backward", group_norm_backward, lambda b: group_norm_backward(2 * b)),
    each("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional",
           lambda b: normed(b, False, 0.1, 1e-5), lambda b: normed(b, True, 0.1, 1e-5),
           lambda b: normed(b, True, 0.1, 1e-5, channels=True)),
    each("_native_batch_norm_legit.no_stats", lambda b: (z(b, 3, 4), None, None, True, 0.1, 1e-5),
           lambda b: (z(3, 2 * b, 4), None, None, True, 0.1, 1e-5)),
    each("_native_batch_norm_legit_no_training _batch_norm_no_update", lambda b: normed(b, None, 0.1, 1e-5),
           lambda b: normed(b, None, 0.1, 1e-5, channels=True)),
    each("_batch_norm_with_update _batch_norm_with_update_functional", lambda b: normed(b, None, 0.1, 1e-5),
           lambda b: normed(b, None, 0.1, 1e-5, channels=True)),
    each("native_batch_norm_backward", lambda b: normed_backward(b, False), lambda b: normed_backward(b, True),
           lambda b: normed_backward(b, True, True), lambda b: normed_backward(2 * b, False)),
    each("batch_norm_backward", lambda b: normed_backward(b, False, new=True), lambda b: normed_backward(b, True, new=True),
           lambda b: normed_backward(b, True, True, new=True)),
    pool(1), pool(2), pool(3),
    each("im2col", lambda b: (z(b, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]), lambda b: (z(2, b, 4, 4), [1, 1], [1, 1], [0, 0], [1, 1])),
    each("col2im", lambda b: (z(b, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
           lambda b: (z(2, b, 16), [4, 4], [1, 1], [1, 1], [0, 0], [1, 1])),
    each("pixel_shuffle", lambda b: (z(b, 8, 3, 3), 2), lambda b: (z(2, 4 * b, 3, 3), 2), lambda b: (z(3, b, 8, 2, 2), 2)),
    each("pixel_unshuffle", lambda b: (z(b, 2, 4, 4), 2), lambda b: (z(2, b, 4, 4), 2)),
    each("channel_shuffle", lambda b: (z(b, 4, 3, 3), 2), lambda b: (z(2, 2 * b, 3, 3), 2), lambda b: (z(2, 2 * b, 2, 1, 1), 2)),
    each("grid_sampler_2d", lambda b: (z(b, 2, 4, 4), z(b, 3, 3, 2), 0, 0, False), lambda b: (z(2, b, 4, 4), z(2, 3, 3, 2), 0, 0, False)),
    each("grid_sampler_3d", lambda b: (z(b, 2, 4, 4, 3), z(b, 3, 3, 2, 3), 0, 0, False)),
    each("grid_sampler_2d_backward", lambda b: (z(b, 2, 3, 3), z(b, 2, 4, 4), z(b, 3, 3, 2), 0, 0, False, [True, True])),
    each("grid_sampler_3d_backward",
           lambda b: (z(b, 2, 3, 3, 2), z(b, 2, 4, 4, 3), z(b, 3, 3, 2, 3), 0, 0, False, [True, True])),
    each("_scaled_dot_product_flash_attention_for_cpu", attention, partial(attention, mask=True),
           lambda b: (z(2, b, 4, 8), z(2, b, 4, 8), z(2, b, 4, 8))),
    each("_scaled_dot_product_flash_attention_for_cpu_backward", partial(attention, backward=True),
           partial(attention, mask=True, backward=True), lambda b: attention(2 * b, backward=True)),
    each("dpcore::recurrence", recurrence, lambda b: recurrence(2 * b, kind="gru")),
    each("dpcore::recurrence_backward", partial(recurrence, backward=True), lambda b: recurrence(b, True, "gru")),
    each("dpcore::head", lambda b: head_rows(b)[:3], lambda b: head_rows(2 * b, bias=False)[:3]),
    each("dpcore::head_inputs", lambda b: (*head_rows(b)[:2], *head_rows(b)[4:]), lambda b: (*head_rows(2 * b)[:2], i(7, 2 * b), z(2 * b), None)),
    each("dpcore::head_weight dpcore::head_bias", head_rows, lambda b: head_rows(2 * b, bias=False), lambda b: head_rows(b, others=False)),
    each("embedding", lambda b: (z(7, 3), i(7, b, 4)), lambda b: (z(7, 3), i(7, 4, 2 * b)), lambda b: (z(b, 3), i(b - 1, 4))),
    each("embedding_dense_backward", lambda b: (z(b, 4, 3), i(7, b, 4), 7, 2, False), lambda b: (z(b, 4, 3), i(7, b, 4), 7, -1, True),
           lambda b: (z(4, 2 * b, 3), i(7, 4, 2 * b), 7, 2, False)),
    each("gather", lambda b: (z(b, 4), 1, i(4, b, 3)), lambda b: (z(b, 4), 0, i(b, b, 4)), lambda b: (z(3, b, 2), 0, i(3, 2, b, 2)),
           lambda b: (z(1, 4), 1, i(4, 1, 3))),
    each("scatter.value", lambda b: (z(b, 4), 1, i(4, b, 3), 2.0), lambda b: (z(b, 4), 0, i(b, b, 3), 2.0)),
    each("scatter.src scatter_add", lambda b: (z(b, 4), 1, i(4, b, 3), z(b, 3)), lambda b: (z(b, 4), 0, i(b, b, 3), z(b, 3)),
           lambda b: (z(9, 4), 0, i(9, b, 3), z(b, 3))),
    each("scatter_reduce", lambda b: (z(b, 4), 1, i(4, b, 3), z(b, 3), "amax"), lambda b: (z(b, 4), 0, i(b, b, 3), z(b, 3), "sum")),
    each("index_select", lambda b: (z(b, 4), 1, i(4, 3)), lambda b: (z(b, 4), 0, i(b, 3)), lambda b: (z(3, 4), 1, i(4, 2 * b))),
    each("index_add", lambda b: (torch.zeros(7, 3, dtype=torch.float64), 0, i(7, b), z(b, 3)), lambda b: (z(b, 4), 1, i(4, 3), z(b, 3)),
           lambda b: (z(b, 4), 0, i(b, 3), z(3, 4)), lambda b: (torch.zeros(2, 7, dtype=torch.float64), 1, i(7, 2 * b), z(2, 2 * b))),
    each("index _unsafe_index", lambda b: (z(b, 4), [None, i(4, 3)]), lambda b: (z(7, 3), [i(7, b, 2)]), lambda b: (z(b, 4), [i(b, 3)]),
           lambda b: (z(b, 4), [Own(b), i(4, b)]), lambda b: (z(3, b, 4), [None, Own(b), i(4, 2, b)]), lambda b: (z(2, b, 3, 4), [i(2, 6), None, None, i(4, 6)]),
           lambda b: (z(3, 4, 6), [i(3, 2 * b), None, i(6, 2, 1)]), lambda b: (z(b, 4), [Own(b)]), lambda b: (z(b, b), [i(b, b), Own(b)]),
           lambda b: (z(2, b, 4, 3), [i(2, 2), None, i(4, 2)]), lambda b: (z(b, 4), [i(b, b), i(4, b)])),
    each("index_put _unsafe_index_put",
           lambda b: (z(b, 4), [None, torch.arange(3)], z(b, 3)), lambda b: (z(b, 4), [None, i(4, 3)], z(b, 3), True),
           lambda b: (torch.zeros(7, 3, dtype=torch.float64), [i(7, b)], z(b, 3), True), lambda b: (z(7, 3), [i(7, b)], z(b, 3)),
           lambda b: (z(b, 4), [t(b, 4)], z()), lambda b: (z(b, 4, 3), [t(b)], z(1)), lambda b: (z(4, b), [t(4)], z()),
           lambda b: (z(b, 4), [Own(b), i(4, b)], z(b)), lambda b: (z(b, 4), [Own(b), i(4, b)], z(1), True),
           lambda b: (torch.zeros(4, 7, dtype=torch.float64), [None, i(7, 2 * b)], z(4, 2 * b), True)),
    each("arange", lambda b: (b,)),
    each("arange.start", lambda b: (1, b)),
    each("arange.start_step", lambda b: (0, b, 2)),
)  # fmt: skip

CASES: dict[str, list[Build]] = {}
for _part in TABLE:
    for _name, _builds in _part.items():
        CASES.setdefault(_name, []).extend(_builds)


def operation(key: str) -> Any:
    space, _, name = key.rpartition("::")
    name, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, space) if space else A, name)
    return getattr(packet, overload or ("default" if "default" in packet.overloads() else packet.overloads()[0]))


def arguments(leaves: list[Any], form: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tree = tree_unflatten(leaves, form)
    return (tree[:-1], tree[-1]) if isinstance(tree[-1], dict) else (tree, {})


def seed(number: int) -> None:
    """As torch.manual_seed, which writes down the stack for each kind of device."""
    torch.default_generator.manual_seed(number)


def run(target: Any, leaves: list[Any], form: Any) -> list[Any]:
    seed(0)
    own = [torch.arange(x.count) if isinstance(x, Own) else x for x in leaves]
    args, kwargs = arguments([x.clone() if isinstance(x, torch.Tensor) else x for x in own], form)
    found = target(*args, **kwargs)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def graph_of(target: Any, leaves: list[Any], form: Any) -> tuple[Graph, dict[int, Node], list[Node]]:
    """Return the graph of one operation, its placeholders by the places of their leaves, and its results."""
    graph, nodes, places = Graph(), list(leaves), {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            nodes[place] = places[place] = graph.placeholder(f"x{place}")
            nodes[place].meta["val"] = leaf
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Own):
            nodes[place] = graph.call_function(A.arange.default, (leaf.count,))
            nodes[place].meta["val"] = torch.arange(leaf.count)
    values = run(target, leaves, form)
    node = graph.call_function(target, *arguments(nodes, form))
    several = len(target._schema.returns) > 1 or "[]" in str(target._schema.returns[0].type) or len(values) > 1
    several = several or str(target._schema.returns[0].type).startswith("List")
    node.meta["val"] = values if several else values[0]
    results = [node]
    if several:
        results = [graph.call_function(getitem, (node, place)) for place in range(len(values))]
        for result, value in zip(results, values, strict=True):
            result.meta["val"] = value
    return graph, places, results


def ways(x: torch.Tensor) -> list[Axis | None]:
    """Return the marks that a tensor may have."""
    known = [d for d, size in enumerate(x.shape) if size and size % B == 0]
    if not known:
        return [None]
    if len(known) > 1:
        return []
    times = x.shape[known[0]] // B
    return [Axis(known[0], outer, times // outer) for outer in range(1, times + 1) if times % outer == 0]


def apart(x: torch.Tensor, mark: Axis) -> torch.Tensor:
    """Return (examples, outer, inner, ...)."""
    moved = x.movedim(mark.dim, 0)
    count = len(moved) // (mark.outer * mark.inner)
    return moved.reshape(mark.outer, count, mark.inner, *moved.shape[1:]).movedim(1, 0)


def together(x: torch.Tensor, mark: Axis) -> torch.Tensor:
    return x.movedim(0, 1).flatten(0, 2).movedim(0, mark.dim)


def chosen(x: torch.Tensor, mark: Axis | None, which: Any) -> torch.Tensor:
    return x if mark is None else together(apart(x, mark)[which], mark).contiguous()


def replaced(x: torch.Tensor, other: torch.Tensor, mark: Axis | None, example: int) -> torch.Tensor:
    if mark is None:
        return x
    parts = apart(x, mark).clone()
    parts[example] = apart(other, mark)[example]
    return together(parts, mark).contiguous()


def bits(x: torch.Tensor) -> torch.Tensor:
    x = x.resolve_conj().resolve_neg().reshape(-1).contiguous()
    return (torch.view_as_real(x) if x.is_complex() else x).view(torch.uint8)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(two))


REJECTING = {"rrelu_with_noise_functional", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"}
"""How many random numbers these draw depends on values: other rows get others, of the same law."""


def accepted(key: str, build: Build, only: Axis | None = None) -> Iterator[Any]:
    """Yield the marks of leaves and of results for which the rule accepts a case."""
    seed(1)
    target = operation(key)
    leaves, form = tree_flatten(build(B))
    try:
        graph, places, results = graph_of(target, leaves, form)
    except (RuntimeError, IndexError) as cause:
        raise AssertionError(f"{key}: {cause}") from cause
    for given in product(*(ways(leaves[place]) for place in places)):
        marks = dict(zip(places, given, strict=True))
        try:
            found, ends = follow(graph, {places[p]: m for p, m in marks.items()}, B)
        except NotProved:
            continue
        yield (
            target,
            leaves,
            form,
            marks,
            [found[node] for node in results],
            results,
            Finder(found, ends, B),
            graph,
            found,
        )


def check(key: str, build: Build) -> int:
    """Check all that the rule of an operation says of a case; return how often it gave a mark."""
    count = 0
    for target, leaves, form, marks, found, results, finder, graph, known in accepted(key, build):
        count += any(mark is not None for mark in found)
        name, steady = name_of(target), torch.Tag.nondeterministic_seeded not in target.tags
        if "empty" in name or name in REJECTING:
            continue
        before = run(target, leaves, form)
        seed(2)
        others = tree_flatten(build(B))[0]
        spoiled = [x * torch.nan if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]

        def mixed(other: list[Any], example: int, leaves: Any = leaves, marks: Any = marks) -> list[Any]:
            return [replaced(x, other[p], marks[p], example) if p in marks else x for p, x in enumerate(leaves)]

        for example in range(B):
            other = spoiled if example % 2 else others
            if not any(marks.values()) or (other is spoiled and SUM in found):
                continue
            try:
                after = run(target, mixed(other, example), form)
            except RuntimeError:  # NaN is no probability, and has no eigenvalues
                assert other is spoiled
                continue
            kept = [k for k in range(B) if k != example]
            for mark, one, two in zip(found, before, after, strict=True):
                if isinstance(mark, Axis):
                    assert same(apart(one, mark)[kept], apart(two, mark)[kept]), "another example's entries change"
                elif mark is None and one is not None:
                    assert same(one, two), "a value without examples changes"
        for node, mark, one in zip(results, found, before, strict=True):
            if mark is SUM and one is not None:
                check_sum(finder, node, one, marks, leaves, others, graph)
        if steady:
            check_order(target, leaves, form, marks, found, before)
            check_fewer(graph, leaves, marks, found, results, before, known)
    return count


def check_sum(
    finder: Finder, node: Node, total: torch.Tensor, marks: Any, leaves: Any, others: Any, graph: Graph
) -> None:
    """A sum is that of the parts which its source finds, each a function of one example."""
    source = finder._made(node)
    held = dict(zip((n for n in graph.nodes if n.op == "placeholder"), marks, strict=True))

    def rows(example: int | None) -> torch.Tensor:
        values = [leaves[held[n]] for n in source.values]
        if example is not None:
            at = [held[n] for n in source.values]
            values = [replaced(x, others[p], marks[p], example) for x, p in zip(values, at, strict=True)]
        return source.block(values, B).rows()

    before = rows(None)
    torch.testing.assert_close(before.sum(0), total.flatten(), rtol=1e-9, atol=1e-9)
    for example in range(B):
        kept = [k for k in range(B) if k != example]
        after = rows(example)
        assert same(before[kept], after[kept]), "another example's part of a sum changes"
        assert not same(before[example], after[example])


def assert_near(one: torch.Tensor, two: torch.Tensor) -> None:
    """A processor's kernels may treat the last entries of a row of memory otherwise than the first ones."""
    limit = 1e-9 if one.dtype in (torch.float64, torch.complex128) else 1e-6
    torch.testing.assert_close(one, two, rtol=limit, atol=limit, equal_nan=True)


def check_order(target: Any, leaves: Any, form: Any, marks: Any, found: Any, before: Any) -> None:
    """Examples in another order give the same in that order: no place in the batch is told from another one."""
    order = [3, 0, 4, 1, 2]
    if not any(marks.values()):
        return
    after = run(target, [chosen(x, marks.get(p), order) for p, x in enumerate(leaves)], form)
    for mark, one, two in zip(found, before, after, strict=True):
        if one is not None:
            wanted = chosen(one, mark, order) if isinstance(mark, Axis) else one
            assert_near(two, wanted)


def check_fewer(graph: Graph, leaves: Any, marks: Any, found: Any, results: Any, before: Any, known: Any) -> None:
    """The program for fewer examples gives their rows."""
    operands = [n for n, m in zip(results, found, strict=True) if m is not SUM and n.meta["val"] is not None]
    captured: Any = SimpleNamespace(graph=graph, constants=torch.nn.Module(), places=[], batch=0)
    rewritten = Program._rewritten(SimpleNamespace(count=B), captured, operands, known)  # type: ignore[arg-type]
    for n in (1, 3):
        given = [chosen(leaves[p], m, range(n)).clone() for p, m in marks.items()]
        few = rewritten.forward(n, *given)
        for node, two in zip(operands, few, strict=True):
            mark, one = known[node], node.meta["val"]
            if isinstance(mark, Places):
                assert torch.equal(two, torch.arange(n))
                continue
            wanted = chosen(one, mark, range(n)) if isinstance(mark, Axis) else one
            assert_near(two, wanted)


@pytest.mark.parametrize("name", sorted({key.partition(".")[0] for key in CASES}))
def test_a_rule_says_what_is_true(name: str) -> None:
    keys = [key for key in CASES if key.partition(".")[0] == name]
    assert sum(check(key, build) for key in keys for build in CASES[key]), "the rule refuses all cases"


def _turned(op: axis.Op) -> axis.Marks:
    mark = RULES["view"](op)
    return mark._replace(outer=mark.inner, inner=mark.outer)


def _first_of(op: axis.Op) -> axis.Marks:
    marks = [op.of(node) for node in op.node.all_input_nodes]  # a rule must look at all of them
    return next(mark for mark in marks if mark is not None)


def _always(mark: axis.Mark) -> axis.Rule:
    """Return a rule that says the same of all arguments."""
    return lambda op: (_first_of(op), mark)[1]


WRONG: dict[str, axis.Rule] = {
    **dict.fromkeys(
        ("flip", "_softmax", "cumsum", "sort", "logcumsumexp", "roll", "bucketize", "isin"),
        axis._pointwise,
    ),
    **dict.fromkeys(("index", "gather", "bmm"), _first_of),
    **dict.fromkeys(("mean", "amax", "mm", "embedding_dense_backward", "dpcore::head_weight"), _always(None)),
    **dict.fromkeys(("mean.dim", "mv", "prod"), _always(SUM)),
    "_unsafe_view": _turned,
    "slice": lambda op: op.mark("self"),
}


@pytest.mark.parametrize("key", WRONG)
def test_a_wrong_rule_is_noticed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = key.partition(".")[0]
    monkeypatch.setitem(RULES, name, WRONG[key])
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test_a_rule_says_what_is_true(name)


CUDA = {
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "cudnn_batch_norm", "cudnn_batch_norm_backward", "_fused_rms_norm_backward",
}  # fmt: skip
"""Operations that no CPU runs."""


def test_every_rule_has_a_case() -> None:
    assert set(RULES) - {key.partition(".")[0] for key in CASES} == CUDA


# ------------------------------------------------------------------------------------------------ no rule of their own


def pointwise() -> list[str]:
    """Return the operations, with overload, that are followed because torch calls them pointwise."""
    found = []
    for name in sorted(set(dir(A)) - set(RULES)):
        packet = getattr(A, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            target = getattr(packet, overload)
            if torch.Tag.pointwise in target.tags and not target._schema.is_mutable and not overload.endswith("out"):
                found.append(f"{name}.{overload}")
    return found


def guessed(schema: Any, make: Callable[..., torch.Tensor], last: int, b: int) -> tuple[Any, ...]:
    """Return arguments of an operation: tensors of one row for each example; later ones may be broadcast."""
    args: list[Any] = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only:
            break
        if kind in ("Tensor", "Optional[Tensor]"):
            args.append(make(b, last if args else 4))
        else:
            number = {"number": 2, "Optional[number]": 2, "int": 1, "float": 0.5}.get(kind)
            args.append(argument.default_value if number is None else number)
    more = {"rounding_mode": "floor", "decimals": 1}
    return *args, {a.name: more[a.name] for a in schema.arguments if a.name in more}


MAKES: list[Callable[..., torch.Tensor]] = [
    lambda *s: f(*s) / 1.3,
    lambda *s: i(3, *s) + 1,
    t,
    c,
]


@pytest.mark.parametrize("key", depth.chosen(pointwise()[::6], pointwise()))
def test_an_operation_that_torch_calls_pointwise_is(key: str) -> None:
    target, count = operation(key), 0
    for make, last in [*product(MAKES, [4]), (MAKES[0], 1)]:
        build = partial(guessed, target._schema, make, last)
        try:
            run(target, *tree_flatten(build(B)))
        except (RuntimeError, NotImplementedError, TypeError, KeyError):
            continue
        count += check(key, build)
    of_tensors = any("Tensor" in str(each.type) for each in target._schema.arguments)
    assert count or not of_tensors or key == "equal.default", "no case runs"  # which gives Python a value
