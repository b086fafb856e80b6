"""Training loops of other libraries, driven by a private run. A host's library is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpcore.torch.hosts.hugging_face import PrivateTrainer

__all__ = ["PrivateTrainer"]


def __getattr__(name: str) -> Any:
    """Import a host's class, and with it the host."""
    if name == "PrivateTrainer":
        from dpcore.torch.hosts.hugging_face import PrivateTrainer

        return PrivateTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
