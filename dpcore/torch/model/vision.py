"""Models of the papers' image experiments: residual networks and a vision transformer.

All normalize within one example: groups of channels in place of batches, and the weights themselves.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError

GROUPS = 16
HEADS = 6
# Images up to this size are those of CIFAR and MNIST: a residual network then begins without its first two halvings.
SMALL = 64


class StandardConv2d(nn.Conv2d):
    """A convolution whose kernels have mean 0 and, summed over their inputs, variance 1 (weight standardization).

    As in De et al. (2022), https://arxiv.org/abs/2204.13650, and Qiao et al. (2019), https://arxiv.org/abs/1903.10520;
    the group normalization that follows has the scale, so there is no bias and no gain.
    """

    def __init__(self, incoming: int, outgoing: int, size: int, stride: int = 1) -> None:
        super().__init__(incoming, outgoing, size, stride, padding=size // 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the convolved images."""
        fan_in = math.prod(self.weight.shape[1:])
        centered = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        scale = (centered.square().mean((1, 2, 3), keepdim=True) * fan_in + 1e-4).rsqrt()
        return F.conv2d(inputs, centered * scale, None, self.stride, self.padding)


def normalization(channels: int) -> nn.GroupNorm:
    """Return the normalization of an image's channels, in groups of which there are at most `GROUPS`."""
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class WideBlock(nn.Module):
    """Two convolutions of 3x3, each after normalization and ReLU, and a shortcut around both."""

    def __init__(self, incoming: int, outgoing: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = normalization(incoming), StandardConv2d(incoming, outgoing, 3, stride)
        self.norm2, self.conv2 = normalization(outgoing), StandardConv2d(outgoing, outgoing, 3)
        self.shortcut = StandardConv2d(incoming, outgoing, 1, stride) if incoming != outgoing or stride > 1 else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        active = F.relu(self.norm1(inputs))
        kept = inputs if self.shortcut is None else self.shortcut(active)
        return self.conv2(F.relu(self.norm2(self.conv1(active)))) + kept  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """The block of ResNet-18 (two convolutions of 3x3) or of ResNet-50 (1x1, 3x3 with the stride, 1x1)."""

    def __init__(self, incoming: int, width: int, outgoing: int, stride: int) -> None:
        super().__init__()
        if outgoing == width:
            shapes = [(incoming, width, 3, stride), (width, width, 3, 1)]
        else:
            shapes = [(incoming, width, 1, 1), (width, width, 3, stride), (width, outgoing, 1, 1)]
        layers: list[nn.Module] = []
        for before, after, size, step in shapes:
            layers += [StandardConv2d(before, after, size, step), normalization(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        plain = incoming == outgoing and stride == 1
        self.shortcut = (
            None if plain else nn.Sequential(StandardConv2d(incoming, outgoing, 1, stride), normalization(outgoing))
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        kept = inputs if self.shortcut is None else self.shortcut(inputs)
        return F.relu(self.layers(inputs) + kept)


class Mean(nn.Module):
    """The mean of an image's points, for each channel."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the means, (batch, channels)."""
        return inputs.mean((2, 3))


def wide_resnet(shape: tuple[int, int, int], classes: int, scale: float = 1) -> nn.Sequential:
    """Return WRN-16-4 (Zagoruyko and Komodakis, 2016), https://arxiv.org/abs/1605.07146.

    Groups of 16 channels or fewer stand in for batches, and weights are standardized, as De et al. (2022) have it.
    """
    incoming = scaled(16, scale)
    layers: list[nn.Module] = [StandardConv2d(shape[0], incoming, 3)]
    for channels, stride in ((64, 1), (128, 2), (256, 2)):
        outgoing = scaled(channels, scale)
        layers += [WideBlock(incoming, outgoing, stride)]
        layers += [WideBlock(outgoing, outgoing, 1) for _ in range(scaled(2, scale) - 1)]
        incoming = outgoing
    return nn.Sequential(*layers, normalization(incoming), nn.ReLU(), Mean(), nn.Linear(incoming, classes))


def resnet(
    shape: tuple[int, int, int], classes: int, blocks: Sequence[int], expansion: int, scale: float = 1
) -> nn.Sequential:
    """Return a residual network of He et al. (2016), https://arxiv.org/abs/1512.03385, with `blocks` a stage.

    Groups stand in for batches, and weights are standardized. Images of at most `SMALL` points a side begin with a
    convolution of 3x3 and stride 1, as He et al. begin for CIFAR; larger ones with 7x7, stride 2 and max-pooling.
    """
    incoming = scaled(64, scale)
    small = max(shape[1:]) <= SMALL
    layers: list[nn.Module] = [
        StandardConv2d(shape[0], incoming, *((3, 1) if small else (7, 2))),
        normalization(incoming),
    ]
    layers += [nn.ReLU(), *([] if small else [nn.MaxPool2d(3, 2, padding=1)])]
    for stage, count in enumerate(blocks):
        channels = scaled(64 << stage, scale)
        for place in range(scaled(count, scale)):
            stride = 2 if stage and not place else 1
            layers.append(Bottleneck(incoming, channels, channels * expansion, stride))
            incoming = channels * expansion
    return nn.Sequential(*layers, Mean(), nn.Linear(incoming, classes))


class Attention(nn.Module):
    """Self-attention of all tokens of an image."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the tokens after attention."""
        batch, tokens, features = inputs.shape
        query, key, value = self.qkv(inputs).reshape(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, features))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One layer of the transformer, normalized before attention and before its two linear layers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(features, eps=1e-6), Attention(features)
        self.norm2 = nn.LayerNorm(features, eps=1e-6)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", nn.Linear(features, 4 * features))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", nn.Linear(4 * features, features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the tokens after the layer."""
        seen = inputs + self.attn(self.norm1(inputs))
        return seen + self.mlp(self.norm2(seen))  # type: ignore[no-any-return]


class Patches(nn.Module):
    """Squares of an image, each as one token."""

    def __init__(self, channels: int, features: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, features, size, size)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the tokens, (batch, patches, features)."""
        return self.proj(inputs).flatten(2).transpose(1, 2)  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """ViT-small: 12 layers of 384 features and 6 heads (Dosovitskiy et al., 2020, https://arxiv.org/abs/2010.11929).

    Parameters have timm's names. A patch has 16x16 points, or 4x4 in an image of at most `SMALL` points a side.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, scale: float = 1) -> None:
        super().__init__()
        features = HEADS * scaled(64, scale)
        channels, rows, columns = shape
        patch = 4 if max(rows, columns) <= SMALL else 16
        if rows % patch or columns % patch:
            raise ArgumentError(
                f"input_shape={shape}: vit-small cuts images into squares of {patch}x{patch}; both sides must be "
                f"multiples of {patch}"
            )
        self.patch_embed = Patches(channels, features, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, features))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + rows // patch * (columns // patch), features))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        self.blocks = nn.Sequential(*(Layer(features) for _ in range(scaled(12, scale))))
        self.norm, self.head = nn.LayerNorm(features, eps=1e-6), nn.Linear(features, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the logits, (batch, classes)."""
        patches = self.patch_embed(inputs)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(tokens))[:, 0])  # type: ignore[no-any-return]


def scaled(number: int, scale: float) -> int:
    """Return a number of channels or blocks of a scaled model."""
    return max(1, round(number * scale))
