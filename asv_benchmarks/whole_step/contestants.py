"""The contestants: each turns a model and its batches into a training step, by its library's documented use."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from .models import Case, loss, losses

MAX_GRAD_NORM, LEARNING_RATE = 1.0, 1e-3
BATCHES = 4  # of the data set; the steps go round them
FASTDP = (
    "not installed; tried on 2026-11-22: pip download fastDP, fastdp, private-transformers: no matching distribution "
    "found; pip download git+https://github.com/awslabs/fast-differential-privacy: could not resolve host"
)


class Refused(Exception):
    """A contestant cannot train this model, or is not installed."""


@dataclass
class Setting:
    """What all contestants of a model share. Inputs and targets are one data set of `BATCHES` batches, on the host.

    `precision` is None or "bf16", which is autocast; `compiler` is the backend of torch.compile.
    """

    case: Case
    seed: int
    noise_multiplier: float = 1.0
    update: str = ""
    learning_rate: float = LEARNING_RATE
    fused: bool = False
    steps: int = 100_000
    device: str = "cpu"
    precision: str | None = None
    compiler: str = "inductor"

    def __post_init__(self) -> None:
        self.update = self.update or self.case.update
        self.inputs, self.targets = self.case.data(BATCHES, self.seed)

    def model(self) -> nn.Module:
        """Return a new model, with the same values every time."""
        torch.manual_seed(self.seed)
        return self.case.build().to(self.device)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return torch's own optimizer of the trained parameters."""
        make = torch.optim.Adam if self.update == "adam" else torch.optim.SGD
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return make(trained, lr=self.learning_rate, fused=self.fused or None)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch of a step."""
        part = slice((first := step % BATCHES * self.case.batch_size), first + self.case.batch_size)
        return self.inputs[part].to(self.device), self.targets[part].to(self.device)


@dataclass
class Contestant:
    """One contestant, built: `draw` returns a batch, `step` trains on it.

    `summed` is when, within the last step, the clipped sum (or the plain gradient) was complete and only noise and
    update were left, by `clock`; None for those whose libraries mix the two.
    """

    model: nn.Module
    step: Callable[[Any], None]
    draw: Callable[[], Any]
    summed: list[float] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter

    def mark(self, *_: Any) -> None:
        """Note that the sum is complete; also a hook of a torch optimizer."""
        self.summed[:] = [self.clock()]


def turns(setting: Setting) -> Callable[[], Any]:
    """Return what gives one batch after the other."""
    state = {"step": 0}

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        state["step"] += 1
        return setting.batch(state["step"] - 1)

    return draw


def non_private(setting: Setting, compiled: bool = False) -> Contestant:
    """Forward, backward and torch's update."""
    model = setting.model()
    if compiled:
        model.compile(backend=setting.compiler)
    optimizer = setting.optimizer(model)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        with setting.autocast():
            found = loss(model(batch[0]), batch[1])
        found.backward()
        optimizer.step()

    built = Contestant(model, step, turns(setting))
    optimizer.register_step_pre_hook(built.mark)
    return built


def dpcore(setting: Setting, method: str = "dp_sgd", compiled: bool = False, **options: Any) -> Contestant:
    """One private step of dpcore; the batches are those of the others, in their order."""
    import dpcore as library
    from dpcore.sampling import FixedOrderSampler
    from dpcore.torch import make_private

    model, size = setting.model(), setting.case.batch_size
    common = {"lr": setting.learning_rate, "base": setting.update, "noise_multiplier": setting.noise_multiplier}
    given = {**common, "batch_size": size, "max_grad_norm": MAX_GRAD_NORM, "clipping": "standard", **options}
    sampler = FixedOrderSampler(dataset_size=len(setting.inputs), batch_size=size, shuffle=False)
    chosen = getattr(library.methods, method)(**given)
    data = (setting.inputs, setting.targets)
    kind = {"compile": compiled, "precision": setting.precision}
    asked = {name: value for name, value in kind.items() if value}  # earlier commits know neither (`history.py`)
    run = make_private(model, data, chosen, steps=setting.steps, sampling=sampler, loss=loss, **asked)

    def batches() -> Any:
        while True:
            yield from run.loader

    endless = batches()
    built = Contestant(model, run.step, lambda: next(endless))
    run.optimizer.register_step_pre_hook(built.mark)
    return built


def opacus(setting: Setting, mode: str) -> Contestant:
    """Opacus by its PrivacyEngine; what its validator refuses is repaired by its own `fix` first (an LSTM, say)."""
    if importlib.util.find_spec("opacus") is None:
        raise Refused("not installed")
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator
    from torch.utils.data import DataLoader, TensorDataset

    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message=".*(non-full backward hook|Full backward hook).*")
    model = setting.model()
    if ModuleValidator.validate(model, strict=False):
        torch.manual_seed(setting.seed)
        model = ModuleValidator.fix(model)
    loader = DataLoader(TensorDataset(setting.inputs, setting.targets), batch_size=setting.case.batch_size)
    found = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=setting.optimizer(model),
        criterion=Criterion(),
        data_loader=loader,
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=MAX_GRAD_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    wrapped, optimizer = found[:2]
    criterion = found[2] if mode == "ghost" else loss

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with setting.autocast():
            value = criterion(wrapped(batch[0]), batch[1])
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # last: rows kept until the next turn would crowd the others' memory

    return Contestant(model, step, turns(setting))


class Criterion(nn.Module):
    """The examples' losses in the form that Opacus's ghost mode takes: it sets `reduction` to "none"."""

    reduction = "mean"

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = losses(output, target)
        return found if self.reduction == "none" else found.mean()


def fastdp(setting: Setting) -> Contestant:
    """FastDP's book-keeping; its first trained parameter is the origin, which spares the other weight gradients."""
    if importlib.util.find_spec("fastDP") is None:
        raise Refused(FASTDP)
    from fastDP import PrivacyEngine

    model = setting.model()
    optimizer = setting.optimizer(model)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    engine = PrivacyEngine(
        model,
        batch_size=setting.case.batch_size,
        sample_size=len(setting.inputs),
        num_steps=setting.steps,
        noise_multiplier=setting.noise_multiplier,
        max_grad_norm=MAX_GRAD_NORM,
        clipping_mode="MixOpt",
        clipping_fn="Abadi",
        clipping_style="all-layer",
        origin_params=[next((name for name in names[:2] if name.endswith("bias")), names[0])],
    )
    engine.attach(optimizer)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with setting.autocast():
            found = loss(model(batch[0]), batch[1])
        found.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Contestant(model, step, turns(setting))


def torch_func(setting: Setting) -> Contestant:
    """DP-SGD in the twenty lines that torch's own tutorial leads to: the whole batch by vmap, then an einsum."""
    model, size = setting.model(), setting.case.batch_size
    optimizer = setting.optimizer(model)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}

    def example_loss(values: dict[str, torch.Tensor], inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(functional_call(model, {**frozen, **values}, (inputs[None],)), target[None])

    rows_of = vmap(grad(example_loss), in_dims=(None, 0, 0), randomness="different")

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batching rule
            rows = rows_of({name: value.detach() for name, value in trained.items()}, *batch)
        norms = torch.stack([row.flatten(1).norm(dim=1) for row in rows.values()]).norm(dim=0)
        factors = (MAX_GRAD_NORM / (norms + 1e-6)).clamp(max=1.0)
        totals = {name: torch.einsum("b,b...->...", factors, row) for name, row in rows.items()}
        built.mark()
        for name, value in trained.items():
            noise = torch.normal(0.0, setting.noise_multiplier * MAX_GRAD_NORM, value.shape)
            value.grad = (totals[name] + noise) / size
        optimizer.step()

    built = Contestant(model, step, turns(setting))
    return built


CONTESTANTS: dict[str, Callable[[Setting], Contestant]] = {
    "non-private": non_private,
    "non-private compiled": partial(non_private, compiled=True),
    "dpcore": dpcore,
    "dpcore compiled": partial(dpcore, compiled=True),
    "dpcore per-layer": partial(dpcore, clipping_groups="per_layer"),
    "dpcore DiSK": partial(dpcore, method="disk"),
    "Opacus hooks": partial(opacus, mode="hooks"),
    "Opacus functorch": partial(opacus, mode="functorch"),
    "Opacus ghost": partial(opacus, mode="ghost"),
    "FastDP": fastdp,
    "torch.func": torch_func,
}
SAME_RULE = ("dpcore", "Opacus hooks", "Opacus functorch", "Opacus ghost", "FastDP", "torch.func")
