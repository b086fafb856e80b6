"""A fingerprint of a run's data, by which a ledger notices that its runs saw different ones."""

from __future__ import annotations

import hmac

import torch

from dpcore.torch.data.data import Data


def data_fingerprint(data: Data, salt: bytes, data_id: str | None = None) -> str:
    """Return an HMAC of the data, or of the caller's name for them; empty for a dataset that nobody named.

    Keyed by the ledger's salt: the bare digest of private data would let anybody test a guess of them.
    """
    if data_id is not None:
        return hmac.new(salt, f"named {data.length} {data_id}".encode(), "sha256").hexdigest()
    if data.tensors is None:
        return ""
    total = hmac.new(salt, b"tensors", "sha256")
    for tensor in data.tensors:
        total.update(f"\0{tuple(tensor.shape)} {tensor.dtype}\0".encode())
        whole = tensor.detach().contiguous().cpu().reshape(-1)
        total.update(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()
