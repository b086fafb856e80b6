"""Whether several processes read the same examples in the same order, and whether labels are classes of the model."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator

import numpy as np
import torch

from dpcore.errors import ArgumentError
from dpcore.mechanism.peers import Peers
from dpcore.spec.keys import RunKeys
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data
from dpcore.torch.randomness import step_seed

_COMPARED = 64
_PIECE = 1 << 22


def check_same_data(peers: Peers, data: Data, keys: RunKeys) -> None:
    """Refuse processes whose data differ: in an example, or in their order.

    Notes
    -----
    Shares are disjoint sets of *indices*. Where an index is another example elsewhere, one example may be in two shares
    of a step, and moves the sum by twice the clip norm. Tensors are compared whole. Of a dataset, 64 examples are read
    that the run's key draws: two orders that differ in a share s of the places pass with probability (1 - s)^64, so
    that any shuffled, sorted or shifted order is found, and two examples that changed places mostly are not. An example
    that reads differently at a second reading in one process cannot be compared.

    Digests are keyed by the run's key: the bare ones of private data would let anybody who sees the messages test a
    guess of them.
    """
    if peers.world_size == 1:
        return
    secret = step_seed(keys, "comparison of data", 0)
    failure: Exception | None = None
    found = dict[str, str]()
    try:
        found |= {name: _digest(secret, tree) for name, tree in _examples(data, secret)}
    except Exception as cause:  # noqa: BLE001 - all must be told before this one raises
        failure = cause
    told = hashlib.sha256(repr([*found.items(), failure is not None]).encode()).hexdigest()
    try:
        peers.check_alike({"data (an example, or their order)": told})
    finally:
        if failure is not None:
            raise failure


def check_labels(labels: torch.Tensor, classes: int, ignore_index: int = -100) -> None:
    """Refuse labels of classes that the model does not have.

    Parameters
    ----------
    labels : torch.Tensor
        Of integers, of any shape; others are passed over.
    classes : int
        Of the model's output.
    ignore_index : int
        The label that `torch.nn.functional.cross_entropy` leaves out.

    Raises
    ------
    ArgumentError
        If a label is neither in [0, classes) nor `ignore_index`.

    Notes
    -----
    Whether it raises depends on the data: one example can decide whether there is a run. The error is for the one who
    starts the run, and holds the data; it names no value, place or number of labels. It is not private: keep it with
    the data, and start no run by itself where it failed once.
    """
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        return
    for piece in torch.split(labels.detach().reshape(-1), _PIECE):
        if bool((((piece < 0) | (piece >= classes)) & (piece != ignore_index)).any()):
            raise ArgumentError(
                f"labels: must lie in [0, {classes}), one for each of the model's {classes} outputs, or be "
                f"ignore_index={ignore_index}; some do not (none is shown, as labels are private)"
            )


def _examples(data: Data, secret: bytes) -> Iterator[tuple[str, Tree]]:
    if data.tensors is not None:
        yield "all", data.tensors
        return
    for number in range(min(_COMPARED, data.length)):
        draw = hmac.digest(secret, b"place %d" % number, "sha256")
        place = np.array([int.from_bytes(draw[:8], "big") % data.length])
        first, second = (data.batch(place, secret) for _ in range(2))
        if _digest(secret, first) == _digest(secret, second):
            yield str(number), first


def _digest(secret: bytes, tree: Tree) -> str:
    total = hmac.new(secret, digestmod="sha256")
    for tensor in batches.leaves(tree):
        whole = tensor.detach().contiguous().cpu()
        total.update(f"{tuple(whole.shape)} {whole.dtype}".encode())
        total.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()
