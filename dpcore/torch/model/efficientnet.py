"""EfficientNet-B0 (Tan and Le, 2019), https://arxiv.org/abs/1905.11946, normalized by groups of channels.

Not torchvision's: its wheels load only beside the build of torch that they were made for. Dropout and stochastic depth
are left out; sizes are torchvision's.
"""

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.torch.model.vision import Mean, normalization, scaled

# Of each stage: factor of the widening, side of the kernel, stride, channels, blocks (their table 1).
_STAGES = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1))  # fmt: skip


def _convolution(incoming: int, outgoing: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    layer = nn.Conv2d(incoming, outgoing, size, stride, padding=size // 2, groups=groups, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    return [layer, normalization(outgoing)]


class Squeeze(nn.Module):
    """Channels weighed by two layers of their means (squeeze and excitation)."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the weighed images."""
        return inputs * torch.sigmoid(self.up(F.silu(self.down(inputs.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Widened channels, a convolution of each by itself, squeeze and excitation, and fewer channels again."""

    def __init__(self, incoming: int, outgoing: int, widening: int, size: int, stride: int) -> None:
        super().__init__()
        wide = incoming * widening
        layers = [*_convolution(incoming, wide, 1), nn.SiLU()] if widening > 1 else []
        layers += [*_convolution(wide, wide, size, stride, groups=wide), nn.SiLU()]
        layers += [Squeeze(wide, max(1, incoming // 4)), *_convolution(wide, outgoing, 1)]
        self.layers, self.plain = nn.Sequential(*layers), stride == 1 and incoming == outgoing

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        made: torch.Tensor = self.layers(inputs)
        return made + inputs if self.plain else made


def efficientnet(shape: tuple[int, int, int], classes: int, scale: float = 1) -> nn.Sequential:
    """Return EfficientNet-B0."""
    incoming = scaled(32, scale)
    layers: list[nn.Module] = [*_convolution(shape[0], incoming, 3, 2), nn.SiLU()]
    for widening, size, stride, channels, blocks in _STAGES:
        for place in range(scaled(blocks, scale)):
            layers.append(Inverted(incoming, scaled(channels, scale), widening, size, 1 if place else stride))
            incoming = scaled(channels, scale)
    last = scaled(1280, scale)
    return nn.Sequential(*layers, *_convolution(incoming, last, 1), nn.SiLU(), Mean(), nn.Linear(last, classes))
