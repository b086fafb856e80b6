"""The run's state as a plain dictionary that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.

It has a secret part: a file of it is replaced whole, and its owner alone can read it.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.mechanism.parts import Joined, Part
from dpcore.mechanism.peers import Peers
from dpcore.mechanism.recorder import Recorder
from dpcore.spec.whole_file import whole_file
from dpcore.torch.data import batches
from dpcore.torch.engine import Engine
from dpcore.torch.state.check_state import KEYS, as_key

UPDATE_KIND = ("second_moment", "denominator", "bias_corrected", "joint_scale", "variant")
"""Settings of an update that say what is released, or what the moments mean; its other settings are numbers that groups
carry."""


def fingerprint(engine: Engine) -> dict[str, Any]:
    """Return the settings that a state belongs to. Learning rates and the like are not among them: they may change."""
    plan = engine.mechanism.plan
    method = plan.method.describe()
    update = method.pop("update")
    method.pop("name")
    method["noise"].pop("noise_multiplier", None)
    return {
        "method": method,
        "update": {name: update[name] for name in ("kind", *UPDATE_KIND) if name in update},
        "sampler": plan.sampler.describe(),
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
    }


def save(engine: Engine, *, begin: bool = True, own: bool = False) -> dict[str, Any]:
    """Return the state, in a public and a secret part.

    With `begin`, a run that has an account begins in its ledger, so that the ledger will know the state. With `own`
    vectors are this process's `Part`, and nothing is gathered.
    """
    state = engine.mechanism.state_dict(begin=begin, own=own)
    public, secret = dict(state["public"]), dict(state["secret"])
    public["arrays"] = _tensors(public["arrays"])
    public["wide_parameters"] = {name: value.clone() for name, value in engine.working.copies.items()}
    public["microbatch_size"] = engine.planned_microbatch_size
    public["settings"] = fingerprint(engine)
    kept = engine.recorder
    public["recorded"] = None if kept is None else {"coordinates": kept.coordinates, **_tensors(kept.arrays())}
    secret["arrays"] = _tensors(secret["arrays"])
    secret |= {name: secret[name].hex() for name in KEYS}
    secret["earlier_keys"] = [[row, key.hex()] for row, key in secret["earlier_keys"]]
    secret["cursor"] = public["step"]
    secret["diagnostics"] = None if engine.diagnostics is None else list(engine.diagnostics)
    return {"format": state["format"], "public": public, "secret": secret}


def load(engine: Engine, state: Mapping[str, Any]) -> None:
    """Take over a state that `dpcore.torch.state.check_state.check` accepted.

    Where a ledger does not allow it (DataError, PrivacyError), nothing was changed.
    """
    public, secret = dict(state["public"]), dict(state["secret"])
    mechanism, before = engine.mechanism, engine.mechanism.plan
    # The steps so far were released under the saved noise multiplier, which may differ from this plan's in its last
    # digits. The plan takes it over, so that the event is that of what was released and of what will be, exactly. The
    # other way round the event could claim more noise than earlier steps had. The price: a target epsilon is missed by
    # about that last digit, as epsilon() says.
    method = mechanism.plan.method.with_noise_multiplier(public["settings"]["noise_multiplier"])
    public["arrays"] = _arrays(public["arrays"])
    secret["arrays"] = _arrays(secret["arrays"])
    secret |= {name: as_key(secret[name], name) for name in KEYS}
    secret["earlier_keys"] = [(row, as_key(text, "earlier_keys")) for row, text in secret["earlier_keys"]]
    mechanism.plan = replace(before, method=method)
    try:
        mechanism.load_state_dict({"format": state["format"], "public": public, "secret": secret})
    except DpcoreError:
        mechanism.plan = before
        raise
    engine.plan_microbatches(int(public["microbatch_size"]))
    for name, value in public["wide_parameters"].items():
        if name in engine.working.copies:
            engine.working.copies[name].copy_(value)
    _take_over_records(engine, public["recorded"], secret["diagnostics"])


def check_one_state(peers: Peers, state: Mapping[str, Any]) -> None:
    """Refuse processes that load different states: each would go on from a step, keys and clip norms of its own."""
    if peers.world_size == 1:
        return
    total = hashlib.sha256()
    _add(total, state)
    part = state.get("dpcore")
    public = part.get("public") if isinstance(part, Mapping) else None
    step = public.get("step") if isinstance(public, Mapping) else None
    peers.check_alike({"step of the saved state": step, "saved state": total.hexdigest()})


def _add(total: Any, value: Any) -> None:
    """Add all that a state holds to a digest, but for vectors that lie in parts: their save has one name."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            total.update(repr(name).encode())
            _add(total, item)
    elif isinstance(value, (list, tuple)):
        total.update(b"[%d" % len(value))
        for item in value:
            _add(total, item)
    elif isinstance(value, torch.Tensor):
        total.update(f"{tuple(value.shape)} {value.dtype}".encode() + batches.content(value))
    elif not isinstance(value, Joined):
        total.update(repr(value).encode())


def _take_over_records(engine: Engine, recorded: Mapping[str, Any] | None, diagnostics: list[float] | None) -> None:
    """Go on with what the saved run kept of its steps; what this run kept belongs to steps that it goes back behind."""
    if recorded is not None:
        engine.recorder = Recorder.of(engine.mechanism.layout, recorded)
    elif engine.recorder is not None:
        engine.recorder = Recorder(engine.mechanism.layout, engine.recorder.coordinates)
    if diagnostics is not None:
        engine.diagnostics = list(diagnostics)
    elif engine.diagnostics is not None:
        engine.diagnostics = [float("nan")] * engine.mechanism.step


def public_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a private optimizer's state_dict without its secret part: safe to publish, not to resume from.

    Parameters
    ----------
    state_dict : mapping
        From ``private.optimizer.state_dict()``.
    """
    if not isinstance(state_dict.get("dpcore"), Mapping):
        raise ArgumentError(
            "state_dict: must be what private.optimizer.state_dict() returned, with its part 'dpcore'; of a checkpoint "
            "that holds it, give that entry"
        )
    result = {key: value for key, value in state_dict.items() if key != "dpcore"}
    # By what is kept, not by what is left out: a part that some other version adds does not slip through.
    part = {key: state_dict["dpcore"][key] for key in ("format", "public")}
    return copy.deepcopy({**result, "dpcore": part})


def save_state(path: str | os.PathLike[str], state: Any) -> None:
    """Write what `torch.save` writes, readable by its owner only (mode 0600), whatever the umask.

    A private optimizer's `state_dict` holds the run's keys: whoever can read it can subtract the noise. A crash leaves
    the file that was there or the new one, never a part.

    Parameters
    ----------
    path : path
    state : object
        Whatever `torch.save` takes; read again by ``torch.load(path, weights_only=True)``.

    Raises
    ------
    DataError
        Where the file cannot be written.
    """
    _replace(path, lambda file: torch.save(state, file))


def save_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file as `save_state` does."""
    _replace(path, lambda file: file.write(content))


def _replace(path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any]) -> None:
    target = Path(path)
    try:
        with whole_file(target, secret=True) as file:
            write(file)
    except (OSError, RuntimeError) as cause:  # torch says RuntimeError where the disk is full
        reason = cause.strerror if isinstance(cause, OSError) else "the disk may be full"
        raise DataError(f"checkpoint {target}: cannot be written ({reason})") from cause


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    given = torch.from_numpy
    return {name: array.map(given) if isinstance(array, Part) else given(array) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, Joined) else value.cpu().numpy() for name, value in tensors.items()}
