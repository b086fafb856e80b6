"""The chunk of models: plain steps, private steps and those of other libraries, in bfloat16, beside the prediction."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

import dpcore

from ..whole_step.contestants import CONTESTANTS, Refused
from ..whole_step.contestants import Setting as Shared
from ..whole_step.models import Case, Transformer, TransformerLayer, mlp, resnet_18
from .runner import Part, Setting
from .training import _described, _measured

PLAIN = ("non-private", "non-private compiled")
PRIVATE = ("dpcore", "dpcore compiled", "Opacus hooks", "Opacus ghost", "FastDP")


class Mean(nn.Module):
    """The mean over an image's patches."""

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return patches.mean(1)


def vit(patch: int, width: int, heads: int, layers: int) -> nn.Module:
    """Return a transformer on patches, of a ViT's layers; without positions, which cost nothing."""
    inside = (TransformerLayer(width, heads, causal=False) for _ in range(layers))
    return nn.Sequential(nn.Linear(patch, width), *inside, Mean(), nn.Linear(width, 1000))


def cases(small: bool) -> dict[str, Case]:
    """Return the models that `asv_benchmarks.predicted` knows, by its names, and two more; one of them small."""
    adam: dict[str, Any] = {"update": "adam"}
    if small:
        return {"MLP of 1024, B=512": Case(lambda: mlp(8), 2, (784,))}
    words = 50257
    gpt2 = partial(Transformer, words, 768, 12, 12, 1024, tied=True)
    return {
        "BERT-base, T=128, B=32": Case(lambda: Transformer(30522, 768, 12, 12, 128, 2), 32, (128,), 30522, 2, **adam),
        "ViT-S, T=197, B=64": Case(lambda: vit(768, 384, 6, 12), 64, (197, 768), classes=1000, **adam),
        "GPT-2 small, T=1024, B=8": Case(gpt2, 8, (1024,), words, words, sequence=True, **adam),
        "MLP of 1024, B=512": Case(lambda: mlp(1024), 512, (784,)),
        "ResNet-18 on 32x32, B=256": Case(lambda: resnet_18(64), 256, (3, 32, 32)),
    }


def contestant(setting: Setting, case: Case, name: str) -> dict[str, Any]:
    """Time a contestant's steps; one that cannot train the model, or is not installed, says why."""
    small = setting.small
    # Inductor would make kernels of the host; the small form tries only the way through the compiler.
    chosen = {"device": setting.device, "precision": "bf16", "compiler": "eager" if small else "inductor"}
    # On a GPU the library chooses this backend by itself; for a model on the CPU it must be set.
    with dpcore.use_backend("triton") if small else nullcontext():
        try:
            built = CONTESTANTS[name](Shared(case, seed=0, fused=True, **chosen))
        except (Refused, NotImplementedError) as reason:
            return {"refused": str(reason)}
        state: dict[str, Any] = {}

        def draw() -> None:
            state["batch"] = built.draw()

        found = _measured(lambda: built.step(state["batch"]), draw, built.model, setting)
    return {**_described(case, built.model), "precision": "bf16", **found}


def parts(setting: Setting) -> list[Part]:
    """Return the parts, model by model."""
    # Compiling dpcore's graph for the host takes a minute, and no kernel of ours would be in it.
    names = [name for name in (*PLAIN, *PRIVATE) if not (setting.small and name == "dpcore compiled")]
    return [
        Part(f"{model}: {name}", partial(contestant, case=case, name=name), 200)
        for model, case in cases(setting.small).items()
        for name in names
    ]
