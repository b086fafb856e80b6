"""The draws of models and data sets (dropout masks, augmentation): from the run's secret key.

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

The argument needs each draw to reach one example only, or all examples of a step alike. So it covers draws by torch,
NumPy or Python while the data are read, draws by these in a model's code for one example at a time ("one-by-one"), and
draws of a proved graph, which are torch's only. The argument is for true randomness; the generators (Mersenne Twister,
PCG, Philox) are not cryptographic, and the statement says so.

References
----------
Zhu, Dong and Wang, "Optimal Accounting of Differential Privacy via Characteristic Function", 2022: dominating pairs
and their composition (Theorem 10).
"""

# ruff: noqa: TID251 - generators of others are set from the run's key here, and put back
from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dpcore.spec.keys import RunKeys
from dpcore.spec.stream import derive_key

TRIAL, OTHER = bytes(32), b"\1" * 32
"""Seeds for trials on synthetic values, which reach no release. The second gives other draws than the first."""

CAVEAT = (
    "Dropout masks and augmentation come from generators of torch, NumPy and Python, set from the run's secret key; "
    "they are not cryptographic."
)

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_WORDS = 624  # of the Mersenne Twister's state


def step_seed(keys: RunKeys, use: str, step: int, place: int = 0) -> bytes:
    """Return the secret seed of one use ("dropout", "augmentation") in one step, at the micro-batch's first example.

    Each use has its own key. A fork changes the run's keys, and so all later seeds.
    """
    return derive_key(derive_key(keys.noise, f"dpcore {use}"), f"step {step} example {place}")


@contextmanager
def seeded(
    device: torch.device, seed: bytes, generators: Sequence[Any] = (), others: bool = True
) -> Iterator[Callable[[], list[Any]]]:
    """Run the block with generators set from `seed`, and put the user's states back afterwards.

    They are torch's default generators of the CPU and, for a CUDA device, of that device (``torch.manual_seed`` would
    reseed every GPU of the process), NumPy's and Python's global ones if `others` is true, and `generators`. The user's
    own states reveal nothing of the block, not even how many numbers it drew. Yields a function that returns the
    generators used so far.
    """
    every = [torch.default_generator]
    if device.type == "cuda":
        every.append(torch.cuda.default_generators[device.index])
    place = len(every)
    every += [*((np.random.mtrand._rand, random._inst) if others else ()), *generators]
    states = [generator_state(generator) for generator in every]
    try:
        for number, generator in enumerate(every):
            # torch's default generators share one seed, all others have one each, the same with and without a GPU.
            own = seed if number < place else hashlib.sha256(seed + bytes([number - place + 1])).digest()
            _set(generator, own)
        start = [generator_state(generator) for generator in every]
        yield lambda: [g for g, s in zip(every, start, strict=True) if not same_state(generator_state(g), s)]
    finally:
        for generator, state in zip(every, states, strict=True):
            set_generator_state(generator, state)


def generator_state(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`; None for the operating system's, which has no state."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return None if isinstance(generator, random.SystemRandom) else generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state that `generator_state` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        if state is not None:
            generator.setstate(state)
    else:
        generator.set_state(state)


def same_state(left: Any, right: Any) -> bool:
    """Whether two states of one generator are equal."""
    if isinstance(left, dict):
        return all(same_state(left[name], right[name]) for name in left)
    same = left == right
    return bool(same.all() if isinstance(same, (torch.Tensor, np.ndarray)) else same)


def _set(generator: Any, seed: bytes) -> None:
    number = int.from_bytes(hashlib.sha256(seed).digest(), "little")
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    elif isinstance(generator, np.random.RandomState):
        fresh = np.random.RandomState(type(generator._bit_generator)(number))
        generator.set_state(fresh.get_state(legacy=False))
    elif isinstance(generator, random.Random):
        set_generator_state(generator, generator_state(generator) and random.Random(number).getstate())
    else:
        generator.manual_seed(number % 2**64)
        if generator.device.type == "cpu":
            # A CPU generator keeps 32 bits of its seed, few enough to try them all: fill its whole state instead. The
            # state is three words of 64 bits (seed, position), then one for each 32-bit word of the Mersenne Twister.
            words = np.frombuffer(hashlib.shake_256(seed).digest(4 * _WORDS), "<u4").astype(np.int64)
            state = generator.get_state()
            state.view(torch.int64)[3 : 3 + _WORDS] = torch.from_numpy(words)
            generator.set_state(state)
