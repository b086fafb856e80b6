"""What models and data sets draw by torch (dropout masks, augmentation): from the run's secret key, and why.

torch gives the k-th example of a batch the k-th part of its generator's output. Under a seed that anybody may know,
removing one example gives all later ones other masks, and the sums of two neighboring data sets can lie much farther
apart than the clip norm C. The seeds here are secret and new in every step, and then C is the sensitivity all the same:

1. The parts r_1, r_2, ... of a step's output are independent, identically distributed, and independent of the data, of
   the batch and of all that was released before. So the released sum has the law of a mechanism in which every example
   i of the data set has a mask m_i of its own: the sum of clip(g_i(m_i)) over the batch.
2. Take data sets D and D' = D without example j, and give the examples they share the same m_i (a coupling). For each
   value of m = (m_i) the sums are fixed functions of the batch that differ by clip(g_j(m_j)), of norm at most C. So
   each pair of conditional laws is dominated by the sampled Gaussian mechanism at sensitivity C: its hockey-stick
   divergence is no larger, at any order.
3. Both laws are mixtures of these over m, with the same weights. The hockey-stick divergence is jointly convex, so the
   mixtures are dominated as well, step by step given all earlier releases, and therefore in composition.

The argument needs one example's draw to reach that example only, as under vmap here. It is for true randomness; torch's
generators (Mersenne Twister on a CPU, Philox on a GPU) are not cryptographic, and the statement says so.

References
----------
Zhu, Dong and Wang, "Optimal Accounting of Differential Privacy via Characteristic Function", 2022: dominating pairs
and their composition (Theorem 10).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dpcore.spec.keys import RunKeys
from dpcore.spec.stream import derive_key

TRIAL = bytes(32)
"""For trials on synthetic values, which reach no release."""

CAVEAT = (
    "Dropout masks and augmentation that torch draws come from its generator, set from the run's secret key; that "
    "generator is not cryptographic."
)

_WORDS = 624  # of the Mersenne Twister's state


def step_seed(keys: RunKeys, use: str, step: int, place: int = 0) -> bytes:
    """Return the secret seed of one use ("dropout", "augmentation") in one step, counted from 0.

    Each use has a key of its own. `place` is the first example of the micro-batch. After a fork the keys are others,
    and so are all later seeds.
    """
    return derive_key(derive_key(keys.noise, f"dpcore {use}"), f"step {step} example {place}")


@contextmanager
def seeded(device: torch.device, seed: bytes) -> Iterator[Callable[[], bool]]:
    """Run the block with torch's default generators set from `seed`, and put the user's states back afterwards.

    Those of the CPU and, for a CUDA device, of that device: ``torch.manual_seed`` would reseed every GPU of the
    process. The user's own generators tell nothing of the block, not even how many numbers it took.

    Yields
    ------
    callable
        Returns whether anything was drawn so far.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            _set(generator, seed)
        start = [generator.get_state() for generator in generators]
        yield lambda: any(not torch.equal(g.get_state(), s) for g, s in zip(generators, start, strict=True))
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _set(generator: Any, seed: bytes) -> None:
    generator.manual_seed(int.from_bytes(hashlib.sha256(seed).digest()[:8], "little"))
    if generator.device.type == "cpu":
        # A CPU generator keeps 32 bits of its seed, few enough to try them all: fill its whole state instead. The
        # state is three words of 64 bits (seed, position), then one for each 32-bit word of the Mersenne Twister.
        words = np.frombuffer(hashlib.shake_256(seed).digest(4 * _WORDS), "<u4").astype(np.int64)
        state = generator.get_state()
        state.view(torch.int64)[3 : 3 + _WORDS] = torch.from_numpy(words)
        generator.set_state(state)
