"""The papers' image models: their sizes, their standardized kernels, and their gradients, example by example."""

import pytest
import torch
import torch.nn.functional as F

from dpcore.cli.train.settings import MODELS as NAMED
from dpcore.cli.train.settings import PRETRAINED
from dpcore.cli.train.settings import SCALED_MODELS as NAMED_SCALED
from dpcore.errors import ArgumentError
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.model.models import MODELS, SCALED_MODELS, build
from dpcore.torch.model.vision import StandardConv2d

# Of one example of CIFAR-10. WRN-16-4: counted from this code; ResNet: torchvision's numbers,
# 11,689,512 and 25,557,032, less what its first convolution and head of 1,000 classes have more; ViT-small: timm's
# 22,050,664, less its head, larger squares and more places; EfficientNet-B0: torchvision's 5,288,548, less its head.
PARAMETERS = {
    "wrn-16-4": 2_748_890,
    "resnet-18": 11_689_512 - (49 - 9) * 3 * 64 - 513 * 990,
    "resnet-50": 25_557_032 - (49 - 9) * 3 * 64 - 2_049 * 990,
    "vit-small": 22_050_664 - 385 * 990 - (16 * 16 - 4 * 4) * 3 * 384 - (196 - 64) * 384,
    "efficientnet-b0": 5_288_548 - 1_281 * 990,
}


def test_the_command_names_the_models_that_there_are() -> None:
    assert (*MODELS, *SCALED_MODELS, *PRETRAINED) == NAMED
    assert NAMED_SCALED == tuple(SCALED_MODELS) == tuple(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_has_the_parameters_that_it_is_published_with(name: str) -> None:
    with torch.device("meta"):
        found = build(name, (3, 32, 32), 10)
    assert sum(p.numel() for p in found.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_gradients_of_a_batch_are_those_of_single_examples(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, (1, 8, 8), 3, 1 / 8).double()
    inputs, targets = torch.randn(3, 1, 8, 8, dtype=torch.float64), torch.arange(3)
    gradient = PerExampleGradient(model, F.cross_entropy, "pairs")
    parameters = list(model.parameters())
    blocks = gradient([p.detach().clone() for p in gradient.parameters()], (inputs, targets))
    for i in range(3):
        own = torch.autograd.grad(F.cross_entropy(model(inputs[i : i + 1]), targets[i : i + 1]), parameters)
        for block, want in zip(blocks, own, strict=True):
            torch.testing.assert_close(block.rows().reshape(3, *want.shape)[i], want, rtol=1e-7, atol=1e-10)


def test_a_kernel_is_standardized() -> None:
    torch.manual_seed(0)
    layer = StandardConv2d(5, 4, 3).double()
    own = layer.weight.detach().flatten(1)
    wanted = (own - own.mean(1, keepdim=True)) / (own.var(1, correction=0, keepdim=True) * 45 + 1e-4).sqrt()
    inputs = torch.randn(2, 5, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(inputs), F.conv2d(inputs, wanted.view_as(layer.weight), padding=1))


def test_the_start_of_the_papers_cnn_is_torchs_where_it_is_asked_for() -> None:
    torch.manual_seed(0)
    found = build("cnn-5-torch", (3, 32, 32), 10)
    torch.manual_seed(0)
    assert torch.equal(found[1].weight, torch.nn.Conv2d(3, 16, 3).weight)


def test_sides_that_squares_do_not_fill_are_one_sentence() -> None:
    with pytest.raises(ArgumentError, match="both sides must be multiples of 4"):
        build("vit-small", (3, 30, 32), 10)
