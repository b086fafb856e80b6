"""The chunk of training: plain and private steps of whole models, their time and their peak memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import dpcore
from dpcore.sampling import FixedOrderSampler
from dpcore.torch import make_private
from dpcore.torch.model import models

from ..whole_step.models import Case, Transformer, loss, mlp
from .clock import times
from .runner import Part, Setting

BATCHES, LEARNING_RATE, STEPS = 2, 1e-3, 100_000
GPT2: dict[str, Any] = {"vocabulary": 50257, "width": 768, "heads": 12, "layers": 12}
SMALL_GPT2: dict[str, Any] = {"vocabulary": 23, "width": 8, "heads": 2, "layers": 1}


def gpt2(vocabulary: int, width: int, heads: int, layers: int, length: int) -> torch.nn.Module:
    """Return a transformer of GPT-2's shape, its head tied to the tokens: 124,439,808 parameters in full size."""
    model = Transformer(vocabulary, width, heads, layers, length)
    model.head = torch.nn.Linear(width, vocabulary, bias=False)
    model.head.weight = model.tokens.weight
    torch.nn.init.normal_(model.tokens.weight, std=0.02)
    return model


def _text(examples: int, length: int, shape: dict[str, Any]) -> Case:
    words = shape["vocabulary"]
    build = partial(gpt2, length=length, **shape)
    return Case(build, examples, (length,), words, words, sequence=True, update="adam")


def cases(small: bool) -> dict[str, Case]:
    """Return the models by name, the cheap ones first."""
    if small:
        return {
            "cnn-5": Case(lambda: models.build("cnn-5", (8, 8), 10), 2, (8, 8)),
            "mlp": Case(lambda: mlp(8), 2, (784,)),
            "gpt2-small": _text(2, 4, SMALL_GPT2),
        }
    return {
        "cnn-5, 512 images": Case(lambda: models.build("cnn-5", (28, 28), 10), 512, (28, 28)),
        "mlp of 1024, 512 examples": Case(lambda: mlp(1024), 512, (784,)),
        "gpt2-small, 8 x 128 tokens": _text(8, 128, GPT2),
        "gpt2-small, 4 x 1024 tokens": _text(4, 1024, GPT2),
    }


def _model(case: Case, setting: Setting) -> torch.nn.Module:
    torch.manual_seed(0)
    return case.build().to(setting.device)


def plain(setting: Setting, case: Case, compiled: bool) -> dict[str, Any]:
    """Forward, backward and torch's fused optimizer; the batches lie on the device."""
    inputs, targets = (each.to(setting.device) for each in case.data(BATCHES, 0))
    model = _model(case, setting)
    make = torch.optim.Adam if case.update == "adam" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=LEARNING_RATE, fused=True)
    # Inductor makes kernels of the device; in small form only the way through the compiler is tried.
    backend = "eager" if setting.small else "inductor"
    run = torch.compile(model, backend=backend) if compiled else model
    state: dict[str, Any] = {"step": 0}

    def draw() -> None:
        first = state["step"] % BATCHES * case.batch_size
        state["batch"] = inputs[first : first + case.batch_size], targets[first : first + case.batch_size]
        state["step"] += 1

    def step() -> None:
        optimizer.zero_grad()
        loss(run(state["batch"][0]), state["batch"][1]).backward()
        optimizer.step()

    found = _measured(step, draw, model, setting)
    return {**_described(case, model), "compiled_by": backend if compiled else None, **found}


def private(setting: Setting, case: Case, graphs: bool | str = False) -> dict[str, Any]:
    """A whole private step: each example's gradient, clip, sum, noise, update. Compiled models run as written.

    With `graphs` its repeated launches are CUDA graphs, with "model" the model's passes, too. The result includes the
    number of graphs and of replays.
    """
    model, data = _model(case, setting), case.data(BATCHES, 0)
    method = dpcore.methods.dp_sgd(
        lr=LEARNING_RATE, base=case.update, noise_multiplier=1.0, batch_size=case.batch_size, max_grad_norm=1.0
    )
    sampler = FixedOrderSampler(dataset_size=len(data[0]), batch_size=case.batch_size, shuffle=False)
    # On a GPU the library chooses this backend by itself; for a model on the CPU it must be set.
    with dpcore.use_backend("triton") if setting.small else nullcontext():
        # A given micro-batch spares the interpreter the steps by which its size is found.
        size = case.batch_size if setting.small else None
        run = make_private(
            model, data, method, steps=STEPS, sampling=sampler, loss=loss, microbatch_size=size, cuda_graphs=graphs
        )
    batches, state = _endless(run), {}

    def draw() -> None:
        state["batch"] = next(batches)

    found = _measured(lambda: run.step(state["batch"]), draw, model, setting)
    described = {**_described(case, model), "microbatch_size": run.microbatch_size, **found}
    if graphs:
        used: Any = run._engine.mechanism.backend
        described |= {"steps": run.steps_taken, "captured": used.captured, "replayed": used.found}
        if (repeated := run._engine.gradient.repeated) is not None:
            replays = [one.replays for one in repeated.passes.kept.values()]
            described |= {"passes_replayed": replays, "passes_refused": repeated.refused}
    run.close()
    return described


def _endless(run: Any) -> Iterator[Any]:
    while True:
        yield from run.loader


def _measured(
    step: Callable[[], object], draw: Callable[[], None], model: torch.nn.Module, setting: Setting
) -> dict[str, Any]:
    """Time steps, and take the most memory of one; parameters must have moved and be finite."""
    # On the host: a copy on the device would be part of the peak.
    before = [parameter.detach().cpu().clone() for parameter in model.parameters()]
    memory = {} if setting.small else _memory(step, draw)
    found = times(step, timed=not setting.small, draw=draw, most=20, budget_s=15.0)
    pairs = [(old, now.detach().cpu()) for old, now in zip(before, model.parameters(), strict=True)]
    if not all(bool(torch.isfinite(now).all()) and not torch.equal(old, now) for old, now in pairs):
        raise AssertionError("a parameter did not move, or is not finite")
    return {**memory, **found}


def _memory(step: Callable[[], object], draw: Callable[[], None]) -> dict[str, int]:
    """Return the memory before a step and the peak during it. Two earlier steps create the optimizer's state."""
    for _ in range(2):
        draw()
        step()
    draw()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return {"held_bytes": held, "peak_bytes": torch.cuda.max_memory_allocated()}


def _described(case: Case, model: torch.nn.Module) -> dict[str, Any]:
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return {"batch_size": case.batch_size, "shape": case.shape, "parameters": trained, "update": case.update}


def parts(setting: Setting) -> list[Part]:
    """Return five parts for every model; a private step of the largest may take minutes to prepare."""
    found = []
    for name, case in cases(setting.small).items():
        found += [
            Part(f"{name}: plain, eager", partial(plain, case=case, compiled=False), 60),
            Part(f"{name}: private", partial(private, case=case), 200),
            Part(f"{name}: plain, compiled", partial(plain, case=case, compiled=True), 120),
        ]
    graphs = [
        Part(f"{name}: private, {words}", partial(private, case=case, graphs=kind), 200)
        for kind, words in ((True, "CUDA graphs"), ("model", "model in CUDA graphs"))
        for name, case in cases(setting.small).items()
    ]
    return found + graphs  # last: earlier known parts come first
