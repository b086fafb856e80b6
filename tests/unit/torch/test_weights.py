"""Weights out of a file: timm's names, another last layer, and one sentence for what does not fit."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dpcore.errors import ArgumentError, DataError
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.model.models import build
from dpcore.torch.model.weights import load_weights


def vit(seed: int, classes: int = 3, **more: object) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build("vit-small", (3, 8, 8), classes, 1 / 8, **more)


@pytest.mark.parametrize(
    ("kind", "classes"), [("timm", 5), ("run folder", None), ("torch", 3), ("wrapped", 5), ("run folder", 5)]
)
def test_weights_arrive_and_a_last_layer_for_other_classes_stays(
    tmp_path: Path, kind: str, classes: int | None
) -> None:
    first = vit(0, classes or 3).state_dict()
    state = {name: value for name, value in first.items() if classes or "head" not in name}
    if kind != "run folder":
        state = {name.removeprefix("1."): value for name, value in state.items()}
    if kind in ("timm", "run folder"):
        save_file(state, tmp_path / "model.safetensors")
        place = tmp_path
    else:
        place = tmp_path / "some.pth"
        torch.save({"model": state} if kind == "wrapped" else state, place)
    model, plain = vit(1), vit(1).state_dict()
    kept = load_weights(model, place)
    assert kept == (() if classes == 3 else ("1.head.weight", "1.head.bias"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain[name] if name in kept else first[name])


def test_names_are_timms() -> None:
    """As in timm 1.0's vit_small_patch16_224, of its first layer and outside of layers."""
    names = {name.removeprefix("1.") for name in vit(0).state_dict()}
    first = {name for name in names if not name.startswith("blocks.") or name.startswith("blocks.0.")}
    assert first == {
        "cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight", "norm.bias",
        "head.weight", "head.bias", *(f"blocks.0.{part}.{kind}" for kind in ("weight", "bias") for part in (
            "norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")),
    }  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda state: state.pop("norm.weight"), "it lacks 1.norm.weight"),
    (lambda state: state.update(more=torch.zeros(1)), "it has 1.more, which the model has not"),
    (lambda state: state.update(pos_embed=torch.zeros(1, 9, 48)), r"1.pos_embed of shape \(1, 9, 48\) for \(1, 5,"),
    (lambda state: state.clear(), r"lacks 1.cls_token, lacks 1.pos_embed, .* \(and \d+ more\)"),
])  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, change: object, sentence: str) -> None:
    state = {name.removeprefix("1."): value for name, value in vit(0).state_dict().items()}
    change(state)  # type: ignore[operator]
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(DataError, match=sentence):
        load_weights(vit(1), tmp_path / "w.pt")


def test_other_files_are_one_sentence(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "code.pt").write_bytes(pickle.dumps(Path("x")))
    (tmp_path / "cut.safetensors").write_bytes(b"12345678")
    said = {"": "has none of model.safetensors", "gone.pt": "no such file", "list.pt": "is no state dict",
        "code.pt": "more than tensors", "cut.safetensors": "is damaged"}  # fmt: skip
    for name, words in said.items():
        with pytest.raises(DataError, match=words):
            load_weights(vit(0), tmp_path / name)


def test_images_are_resized_and_normalized_example_by_example() -> None:
    more = {"image_size": 12, "pixel_mean": (0.5,), "pixel_std": (0.1, 0.2, 0.4)}
    torch.manual_seed(0)
    model = build("mlp", (3, 8, 8), 3, **more).double()
    inputs, targets = torch.rand(3, 3, 8, 8, dtype=torch.float64), torch.arange(3)
    large = F.interpolate(inputs, (12, 12), mode="bicubic", align_corners=False)
    wanted = (large - 0.5) / torch.tensor([0.1, 0.2, 0.4], dtype=torch.float64).view(3, 1, 1)
    torch.manual_seed(0)
    inner = build("mlp", (3, 12, 12), 3).double()
    assert inner.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(model(inputs), inner(wanted))
    gradient = PerExampleGradient(model, F.cross_entropy, "pairs")
    blocks = gradient([p.detach().clone() for p in gradient.parameters()], (inputs, targets))
    for i in range(3):
        own = torch.autograd.grad(F.cross_entropy(inner(wanted[i : i + 1]), targets[i : i + 1]), [*inner.parameters()])
        for block, want in zip(blocks, own, strict=True):
            torch.testing.assert_close(block.rows().reshape(3, *want.shape)[i], want, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(("more", "words"), [
    ({"pixel_mean": (0.5,)}, "must be given together"),
    ({"pixel_mean": (0.5, 0.5), "pixel_std": (1.0,)}, r"pixel_mean=\(0.5, 0.5\): must be one number, or one for each"),
    ({"pixel_mean": (0.5,), "pixel_std": (0.0,)}, "one number above 0"),
    ({"image_size": 0}, "image_size=0"),
    ({"image_size": 10}, "must be multiples of 4"),
])  # fmt: skip
def test_sizes_and_constants_that_cannot_be(more: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        vit(0, **more)
