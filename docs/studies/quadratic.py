"""A badly scaled quadratic, and Adam's second moment from what a run released: shared by two studies."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from study import generator

import dpcore
from dpcore.sampling import FixedOrderSampler

Floats = NDArray[np.float64]

BETAS = (0.9, 0.99)


def excess_left(
    ratio: float, sigma: float, seed: int, *, dimension: int, batch_size: int, steps: int, **adam: Any
) -> tuple[float, float]:
    """Return the share of the starting excess loss that is left in the steep and in the flat half of the coordinates.

    The loss is sum c_i (x_i - a_i)^2 / 2 with a ~ N(1, I) and c = 1 in one half, 1 / ratio in the other; x starts at 0.
    The clip norm is the root mean square norm of a gradient at the start.
    """
    half = dimension // 2
    c = np.repeat([1.0, 1 / ratio], half)
    a = 1 + generator(4, seed).standard_normal((steps * batch_size, dimension))
    method = dpcore.methods.dp_adam(
        betas=BETAS, max_grad_norm=float(np.sqrt(2 * c @ c)), noise_multiplier=sigma, **adam
    )
    releases = 2 if adam["variant"] == "independent_moments" else 1
    noise = generator(5, seed).standard_normal((steps, releases, dimension))
    result = dpcore.minimize(
        lambda x, indices: c * (x - a[indices]),
        np.zeros(dimension),
        FixedOrderSampler(dataset_size=len(a), batch_size=batch_size, shuffle=False),
        method,
        steps=steps,
        noise=noise if releases == 2 else noise[:, 0],
    )
    left = (result.x - 1) ** 2
    return float(left[:half].mean()), float(left[half:].mean())


def second_moment(released: Floats, beta2: float) -> Floats:
    """Return nu / (1 - beta2^t) of the released gradients, (steps, d)."""
    nu, path = np.zeros(released.shape[1]), []
    for t, g in enumerate(released, 1):
        nu = beta2 * nu + (1 - beta2) * g**2
        path.append(nu / (1 - beta2**t))
    return np.array(path)
