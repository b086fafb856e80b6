"""The models of the command line and the demos, without layers that mix examples."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.torch.model.efficientnet import efficientnet
from dpcore.torch.model.vision import VisionTransformer, resnet, wide_resnet

CNN_CHANNELS = (16, 32, 32, 64, 64)
MLP_WIDTH = 128


def build(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    scale: float = 1,
    *,
    image_size: int | None = None,
    pixel_mean: Sequence[float] = (),
    pixel_std: Sequence[float] = (),
) -> nn.Module:
    """Return a fresh model by name, for one example's shape: (height, width), (channels, height, width) or (features,).

    It takes (batch, *input_shape) and returns logits (batch, classes). torch's global generator initializes it, so
    ``torch.manual_seed`` fixes it. `scale` multiplies the channels or features of a residual network or a transformer,
    and its blocks or layers (one at least). `Prepared` resizes and normalizes images first if it is asked to; the
    parameters' names are the same.
    """
    validate.choice({**MODELS, **SCALED_MODELS}, model=name)
    validate.integer(minimum=2, classes=classes)
    shape = tuple(validate.integer(minimum=1, input_shape=size) for size in input_shape)
    if not shape:
        raise ArgumentError("input_shape=(): must have at least one dimension")
    if image_size is not None or pixel_mean or pixel_std:
        channels, rows, columns = _image(shape, name)
        side = None if image_size is None else validate.integer(minimum=1, image_size=image_size)
        first = Prepared((channels, rows, columns), side, pixel_mean, pixel_std)
        model = build(name, (channels, side or rows, side or columns), classes, scale)
        assert isinstance(model, nn.Sequential)
        model[0] = nn.Sequential(first, model[0])
        return model
    if name not in SCALED_MODELS:
        return MODELS[name](shape, classes)
    image = _image(shape, name)
    as_images = nn.Sequential(nn.Flatten(), nn.Unflatten(1, image))
    return nn.Sequential(as_images, SCALED_MODELS[name](image, classes, scale=scale))


class Prepared(nn.Module):
    """Images (channels, rows, columns) resized to squares of `size`, unless it is None, then ``(x - mean) / std``.

    `mean` and `std` have one number, or one a channel, and are constants that are known without the data: estimates
    from private images would be releases that nobody accounted for.
    """

    def __init__(
        self, image: tuple[int, int, int], size: int | None, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        super().__init__()
        if bool(mean) != bool(std):
            raise ArgumentError(f"pixel_mean={tuple(mean)}, pixel_std={tuple(std)}: must be given together")
        for key, values in (("pixel_mean", mean), ("pixel_std", std)):
            if len(values) not in (0, 1, image[0]) or (key == "pixel_std" and any(value <= 0 for value in values)):
                kind = "number" if key == "pixel_mean" else "number above 0"
                raise ArgumentError(
                    f"{key}={tuple(values)}: must be one {kind}, or one for each of {image[0]} channels"
                )
        self.image, self.size, self.mean, self.std = image, size, tuple(mean), tuple(std)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the images, (batch, channels, rows, columns)."""
        images = inputs.reshape(-1, *self.image)
        if self.size is not None and self.image[1:] != (self.size, self.size):
            images = F.interpolate(images, (self.size, self.size), mode="bicubic", align_corners=False)
        if not self.mean:
            return images
        # By numbers: a tensor of them would be a constant of the graph, which no equal model could share.
        pairs = zip(self._of_channels(self.mean), self._of_channels(self.std), strict=True)
        return torch.cat([(images[:, at : at + 1] - mean) / std for at, (mean, std) in enumerate(pairs)], 1)

    def _of_channels(self, values: tuple[float, ...]) -> tuple[float, ...]:
        return values if len(values) > 1 else values * self.image[0]


def logistic(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Return multinomial logistic regression: flatten, one linear layer, zeros to start with (the loss is convex)."""
    linear = nn.Linear(math.prod(input_shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.Flatten(), linear)


def mlp(input_shape: Sequence[int], classes: int) -> nn.Module:
    """Return flatten, linear to 128, tanh, linear to `classes`."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(input_shape), MLP_WIDTH), nn.Tanh(), nn.Linear(MLP_WIDTH, classes)
    )


def cnn_5(input_shape: Sequence[int], classes: int, own_start: bool = True) -> nn.Module:
    """Return the CNN of the papers: five convolutional layers, each followed by tanh and max-pooling, and one linear.

    Every convolution is 3x3, stride 1, padding 1, with bias; every pooling 2x2, stride 2, rounding sizes up, so that
    small images end at 1x1 and stay there. Pooling comes before tanh in the code: tanh is increasing, so the two
    commute, and it then sees a quarter of the values.

    For one channel, 28x28 or 8x8, and 10 classes it has 70,122 parameters. With `own_start`, weights start uniform with
    Glorot's bound times tanh's gain 5/3, biases at zero; torch's default shrinks the signal about threefold in each of
    the five layers.
    """
    channels, height, width = _image(input_shape, "cnn-5")
    layers: list[nn.Module] = [nn.Sequential(nn.Flatten(), nn.Unflatten(1, (channels, height, width)))]
    incoming = channels
    for outgoing in CNN_CHANNELS:
        convolution = nn.Conv2d(incoming, outgoing, kernel_size=3, padding=1)
        if own_start:
            nn.init.xavier_uniform_(convolution.weight, gain=nn.init.calculate_gain("tanh"))
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
        layers += [convolution, Halve(), nn.Tanh()]
        incoming = outgoing
        height, width = -(-height // 2), -(-width // 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(incoming * height * width, classes))


class Halve(nn.Module):
    """Max-pooling of 2x2 with stride 2, sizes rounded up.

    Through memory with the channels innermost: torch's CPU kernel is vectorized over channels only there.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the pooled images."""
        return F.max_pool2d(inputs.movedim(1, -1).contiguous().movedim(-1, 1), 2, ceil_mode=True)


def _image(shape: Sequence[int], name: str) -> tuple[int, int, int]:
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    side = math.isqrt(shape[0]) if len(shape) == 1 else 0
    if side > 1 and side * side == shape[0]:
        return 1, side, side
    raise ArgumentError(
        f"input_shape={tuple(shape)}: {name} takes (height, width), (channels, height, width) or a square number of "
        "features"
    )


MODELS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "logistic": logistic, "mlp": mlp, "cnn-5": cnn_5, "cnn-5-torch": partial(cnn_5, own_start=False),
}  # fmt: skip
SCALED_MODELS: dict[str, Callable[..., nn.Module]] = {
    "wrn-16-4": wide_resnet,
    "resnet-18": partial(resnet, blocks=(2, 2, 2, 2), expansion=1),
    "resnet-50": partial(resnet, blocks=(3, 4, 6, 3), expansion=4),
    "vit-small": VisionTransformer,
    "efficientnet-b0": efficientnet,
}
