"""Whatever a model or a loss keeps between calls is found before the first step, and named; nothing is left behind."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.torch.gradients.per_example import WAYS
from dpcore.torch.model.state_probe import Snapshot, walk
from tests.refused import refused
from tests.unit.torch.models import Called
from tests.unit.torch_runs import DATA, METHODS, finish, model, sgd, start, values

aten = torch.ops.aten
seen_globally: list[Any] = []
total = 0.0


class Layer(nn.Module):
    """One that keeps something when it is called with gradients enabled, as training does."""

    total = 0

    def __init__(self, keep: Callable[[Layer, torch.Tensor], Any]) -> None:
        super().__init__()
        self.keep = keep
        self.log: list[Any] = []
        self.array = np.zeros(3)
        self.calls = 0
        self.noise = torch.Generator().manual_seed(0)
        self.register_buffer("seen", torch.zeros(()))
        self.held = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.keep(self, x)
        return x


def sets(name: str, value: Callable[[Layer, torch.Tensor], Any]) -> Callable[[Layer, torch.Tensor], None]:
    return lambda layer, x: setattr(layer, name, value(layer, x))


def in_class(layer: Layer, x: torch.Tensor) -> None:
    Layer.total += 1


def first_only(layer: Layer, x: torch.Tensor) -> None:
    if not hasattr(layer, "center"):
        layer.center = x.detach().mean()


def hook_on_a_tensor(layer: Layer, x: torch.Tensor) -> None:
    x.register_hook(lambda gradient: layer.log.append(gradient.detach()))


def where_required(layer: Layer, x: torch.Tensor) -> None:
    if x.requires_grad:
        layer.log.append(1)


MODELS = {
    "the input": (sets("last", lambda layer, x: x), "model.1.last"),
    "a counter": (sets("calls", lambda layer, x: layer.calls + 1), "model.1.calls"),
    "a warm-up counter": (sets("calls", lambda layer, x: min(layer.calls + 1, 2)), "model.1.calls"),
    "a buffer": (sets("seen", lambda layer, x: layer.seen + 1), "'1' (Layer) changes its buffer 'seen'"),
    "a buffer in place": (lambda layer, x: layer.seen.add_(1), "'1' (Layer) changes its buffer 'seen'"),
    "a buffer's data": (lambda layer, x: layer.seen.data.add_(1), "'1' (Layer) changes its buffer 'seen'"),
    "a frozen parameter's data": (
        lambda layer, x: layer.held.data[1:].copy_(x.detach()[0, :2]),
        "'1' (Layer) changes its parameter 'held'",
    ),
    "a frozen parameter's memory": (
        lambda layer, x: np.copyto(layer.held.detach().numpy()[1:], 1 + layer.held.detach().numpy()[1:]),
        "'1' (Layer) changes its parameter 'held'",
    ),
    "a list": (lambda layer, x: layer.log.append(x.detach()), "model.1.log"),
    "an array": (lambda layer, x: np.add(layer.array, 1, out=layer.array), "model.1.array"),
    "its class": (in_class, "Layer.total"),
    "its first input": (first_only, "model.1.center"),
    "a hook on a tensor": (hook_on_a_tensor, "model.1.log"),
    "where gradients are required": (where_required, "model.1.log"),
    "the data of a tensor": (lambda layer, x: setattr(layer.seen, "data", x.detach()), "assigns a tensor's .data"),
    "a generator": (lambda layer, x: torch.rand(1, generator=layer.noise), "model.1.noise"),
    "NumPy's generator": (lambda layer, x: np.random.rand(), "NumPy or Python"),  # noqa: NPY002
}


class Center:
    """A loss around a running center."""

    def __init__(self) -> None:
        self.center = torch.zeros(3)

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.center = 0.9 * self.center + 0.1 * output.detach()[0]
        return F.cross_entropy(output - self.center, target)


class Slotted:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = None


def loss_with(keep: Callable[[torch.Tensor], Any]) -> Callable[..., torch.Tensor]:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        keep(output.detach())
        return F.cross_entropy(output, target)

    return loss


def with_global(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    seen_globally.append(output)
    return F.cross_entropy(output, target)


def with_global_number(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    global total
    total += 1.0
    return F.cross_entropy(output, target)


def with_default(output: torch.Tensor, target: torch.Tensor, log: list[Any] = []) -> torch.Tensor:  # noqa: B006
    log.append(target)
    return F.cross_entropy(output, target)


def with_attribute(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    with_attribute.calls = getattr(with_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return F.cross_entropy(output, target)


def with_variable() -> Callable[..., torch.Tensor]:
    mean = torch.zeros(())

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal mean
        mean = mean + output.detach().mean()
        return F.cross_entropy(output, target)

    return loss


def with_options(output: torch.Tensor, target: torch.Tensor, *, log: dict[str, Any]) -> torch.Tensor:
    log["last"] = output.detach()
    return F.cross_entropy(output, target)


# fmt: off
LOSSES = {
    "a running center": (Center, "loss.center"),
    "a list in a closure": (lambda: loss_with([].append), "loss.keep[0]"),
    "a variable around it": (with_variable, "loss.mean"),
    "a global list": (lambda: with_global, "loss.seen_globally"),
    "a global number": (lambda: with_global_number, "loss.total"),
    "a default": (lambda: with_default, "loss[0]"),
    "an attribute": (lambda: with_attribute, "loss.calls"),
    "a partial": (lambda: functools.partial(with_options, log={}), "loss.log.last"),
    "a method": (lambda: Center().__call__, "loss.center"),
    "lru_cache": (lambda: loss_with(functools.lru_cache(maxsize=4)(lambda output: 1)), "loss.keep"),
    "a deque": (lambda: loss_with(deque(maxlen=2).append), "loss.keep[0]"),
    "a set": (lambda: loss_with(set().add), "loss.keep[0]"),
    "itertools.count": (
        lambda: loss_with(functools.partial(lambda own, _: next(own), itertools.count())),
        "loss.keep[0]"),
    "a generator function": (
        lambda: loss_with(functools.partial(lambda own, _: next(own), (i for i in range(10**6)))),
        "loss.keep[0]"),
    "a slot": (lambda: loss_with(functools.partial(setattr, Slotted(), "last")), "loss.keep[0].last"),
    "a thread's own": (
        lambda: loss_with(functools.partial(setattr, threading.local(), "last")),
        "loss.keep[0].last"),
    "a module": (lambda: loss_with(Layer(sets("last", lambda layer, x: x))), "loss.keep.last"),
    "NumPy's generator": (
        lambda: loss_with(functools.partial(lambda own, _: own.random(), np.random.default_rng(1))),
        "loss.keep[0]")
}
# fmt: on
OTHERWISE = {
    ("model: a frozen parameter's memory", "pairs"): ".numpy() is not supported",
    ("model: a generator", "pairs"): "drawn from a generator of the model's own",
}
ITERATORS = ("loss: itertools.count", "loss: a generator function")  # which nobody can wind back
CASES = {f"model: {name}": (Layer(keep), None, words) for name, (keep, words) in MODELS.items()}
CASES |= {f"loss: {name}": (nn.Tanh(), make, words) for name, (make, words) in LOSSES.items()}


# What a loss keeps is reached by one walk, whatever the way.
@pytest.mark.parametrize(
    ("case", "way"),
    [(case, way) for i, case in enumerate(CASES) for way in (WAYS if i < len(MODELS) else [WAYS[i % 2]])],
)
def test_what_is_kept_is_refused_by_name_and_leaves_everything_as_it_was(case: str, way: str) -> None:
    layer, make, words = CASES[case]
    net = nn.Sequential(nn.Linear(5, 3), layer)
    loss = F.cross_entropy if make is None else make()
    if "NumPy or Python" in words and way == WAYS[-1]:
        words = ""
    words = OTHERWISE.get((case, way), words)
    before = Snapshot({"model": net, "loss": loss, "numpy": np.random.mtrand._rand})
    state = torch.get_rng_state(), random.getstate()
    with suppress(ArgumentError) if not words else pytest.raises(ArgumentError) as caught:
        start(net, loss=loss, gradients=way)
    if words:
        assert words in str(caught.value), case
        assert "\n" not in str(caught.value)
    if not case.startswith(ITERATORS):
        after = Snapshot({"model": net, "loss": loss, "numpy": np.random.mtrand._rand})
        assert before.changed(after) is None
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]


def on_rare_ones(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Keeps what synthetic examples never show."""
    if x.detach().min() > 100:
        m.log.append(x.detach())
    return m.layer(x)


@pytest.mark.filterwarnings("ignore:.*far from 1 in size:dpcore.errors.TrainingWarning")
def test_what_only_real_examples_provoke_is_refused_before_anything_is_released() -> None:
    net = Called(on_rare_ones, layer=nn.Linear(5, 3), log=[])
    with pytest.warns(SpeedWarning, match="takes 'one-by-one'"):
        run = start(net, data=(DATA[0] + 1000, DATA[1]))
    before = values(net).clone()
    with pytest.raises(ArgumentError, match=r"^model\.log changes while gradients are taken"):
        finish(run)
    assert run.steps_taken == 0
    assert torch.equal(values(net), before)
    assert net.log == []


def by_value(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Keeps a count under what it saw, where made-up examples leave no trace."""
    if (value := int(x.detach().max())) > 100:
        m.log[value] = value
    return m.layer(x)


@pytest.mark.filterwarnings("ignore:.*far from 1 in size:dpcore.errors.TrainingWarning")
def test_a_refusal_names_no_key_that_may_be_a_value_of_an_example() -> None:
    net = Called(by_value, layer=nn.Linear(5, 3), log={})
    with pytest.warns(SpeedWarning, match="takes 'one-by-one'"):
        run = start(net, data=(DATA[0] + 2459, DATA[1]))
    with pytest.raises(ArgumentError, match=r"^model\.log changes while gradients are taken") as caught:
        finish(run)
    assert "24" not in str(caught.value)


WRITES = {
    "memory": lambda to, what: np.copyto(to.detach().numpy(), what.detach().numpy()),
    "memory, then an error": lambda to, what: (np.copyto(to.detach().numpy(), what.detach().numpy()), what[5]),
    "a sign of zero": lambda to, what: np.copyto(to.detach().numpy(), -np.zeros(5, np.float32)),
}


@pytest.mark.filterwarnings("ignore:.*far from 1 in size:dpcore.errors.TrainingWarning")
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_what_a_real_example_writes_to_a_parameter_is_taken_back(name: str, trained: bool) -> None:
    """The third step alone has such an example: no check of the first calls sees it."""

    def writes(m: Any, x: torch.Tensor) -> torch.Tensor:
        if x.detach().min() > 100:
            WRITES[name](m.center, x[0])
        return m.layer(x + m.center)

    net = Called(writes, layer=nn.Linear(5, 3), center=nn.Parameter(torch.zeros(5), requires_grad=trained))
    data = DATA[0].clone()
    data[9] = 1000.0
    run = start(net, data=(data, DATA[1]), sampling="fixed-order", steps=4, epochs=None, gradients="one-by-one")
    held = []

    def steps() -> None:
        for batch in run.loader:
            held.append(net.center.detach().clone())
            run.step(batch)

    refused(ArgumentError, r"changes its parameter 'center'|failed on a drawn batch", steps)
    assert len(held) == run.steps_taken + 1 > 1
    assert torch.equal(net.center.view(torch.int32), held[-1].view(torch.int32))


def tells_the_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    scale, m.scale = m.scale, 1.0
    return m.layer(x) * scale


def test_the_first_example_must_be_treated_like_later_ones() -> None:
    with pytest.raises(ArgumentError, match="depends on whether others came before it"):
        start(Called(tells_the_first, layer=nn.Linear(5, 3), scale=0.0))


class Harmless(nn.Module):
    """Writes to what it is given, and keeps what follows from shapes and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.weight_norm(nn.Linear(5, 3))  # an attribute, computed anew in every call
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0).relu_()
        self.cache.setdefault(x.shape[-1], torch.arange(float(x.shape[-1])))
        return self.layer(x + self.cache[x.shape[-1]])


def writing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.neg_().add_(2)
    return F.cross_entropy(output, target)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(("name", "way"), [("disk", WAYS[0]), ("disk", WAYS[1]), ("pmlf", WAYS[1])])
def test_every_point_sees_the_batch_as_it_was(name: str, way: str) -> None:
    class OutOfPlace(Harmless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer((x * 2.0).relu() + torch.arange(5.0))

    ends = []
    for kind, loss in ((Harmless, writing_loss), (OutOfPlace, lambda out, y: F.cross_entropy(out, 2 - y))):
        torch.manual_seed(0)
        net = kind()
        data = (DATA[0] - 0.5, DATA[1].clone())
        run = start(net, METHODS[name](8), data=data, loss=loss, gradients=way, sampling="fixed_order")
        batch = next(iter(run.loader))
        kept = [tensor.clone() for tensor in batch]
        run.step(batch)
        assert all(torch.equal(a, b) for a, b in zip(batch, kept, strict=True))
        ends.append(finish(run, stop=3))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.NLLLoss(WEIGHTS),
        functools.partial(F.cross_entropy, weight=WEIGHTS),
        lambda output, target: F.cross_entropy(output, target, WEIGHTS),
    ],
)
def test_class_weights_that_cancel_are_refused_with_the_remedy(loss: Any) -> None:
    with pytest.raises(ArgumentError, match=r"weight=.*reduction='sum'"):
        start(model(), loss=loss)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_class_weights_count_without_the_mean(reduction: str) -> None:
    gradient = start(model(), loss=nn.CrossEntropyLoss(WEIGHTS, reduction=reduction))._engine.gradient
    plain = start(model())._engine.gradient
    rows = gradient(gradient.parameters(), DATA)
    for weighted, row in zip(rows, plain(plain.parameters(), DATA), strict=True):
        torch.testing.assert_close(weighted.rows(), row.rows() * WEIGHTS[DATA[1]][:, None])


def test_an_example_without_a_label_to_learn_from_contributes_exactly_nothing() -> None:
    ends = []
    for labels in (torch.full((30,), -100), torch.zeros(30, dtype=torch.int64)):
        method = sgd(noise_multiplier=1.0, max_grad_norm=1.0)
        loss = F.cross_entropy if (labels < 0).any() else (lambda output, target: (target[:, None] * output).sum())
        ends.append(finish(start(model(), method, data=(DATA[0], labels), loss=loss)))
    assert torch.equal(*ends)
    assert torch.isfinite(ends[0]).all()


@pytest.mark.parametrize(
    ("net", "data", "words"),
    [
        (model(), DATA[:1], r"loss=cross_entropy \(the default\).*give loss="),
        (model(), (DATA[0], DATA[0][:, :2]), "loss=cross_entropy with labels of dtype torch.float32.*give loss="),
        (model(), (DATA[0], DATA[1].float()), "must be numbers of classes, labels.long()"),
        (model(), (DATA[0], DATA[1].int()), r"labels of dtype torch.int32: must be of int64, labels.long\(\)"),
        (model(), (DATA[0], DATA[1][:, None]), r"labels of shape \(n, 1\): must be \(n,\).*labels.squeeze\(1\)"),
        (nn.Linear(5, 1), (DATA[0], DATA[1].float()), "one output, for which it is constant: give loss="),
        (nn.Linear(5, 1), (DATA[0], DATA[0][:, :1]), "one output, for which it is constant: give loss="),
    ],
)
def test_a_forgotten_loss_is_said_to_be_missing(net: nn.Module, data: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        start(net, data=data)


def test_sizes_that_do_not_fit_are_one_sentence_and_no_log_of_torchs() -> None:
    logged: list[logging.LogRecord] = []
    handler, log = logging.Handler(), logging.getLogger("torch._subclasses.fake_tensor")
    handler.emit = logged.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(ArgumentError, match="shapes cannot be multiplied"):
            start(nn.Linear(6, 3))
        assert not logged
        log.error("heard otherwise")
        assert logged
    finally:
        log.removeHandler(handler)


def test_a_loss_on_a_parameter_that_is_not_the_models_is_refused() -> None:
    scale = nn.Parameter(torch.ones(()))
    with pytest.raises(ArgumentError, match=r"depends on a tensor of shape \(\) that requires gradients"):
        start(model(), loss=lambda output, target: F.cross_entropy(output * scale, target))


def test_a_global_that_is_torchs_own_is_not_searched() -> None:
    """All of torch's operations are attributes of one object, which belongs to no module of `sys.modules`."""
    assert sum(1 for _ in walk({"function": lambda x: aten.mul(x, 2)})) < 100
