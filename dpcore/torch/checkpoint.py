"""The run's state as a plain dictionary that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.torch.engine import Engine

_KEYS = ("noise_key", "sampling_key")


def fingerprint(engine: Engine) -> dict[str, Any]:
    """Return the settings that a state belongs to. Learning rates and the like are not among them: they may change."""
    plan = engine.mechanism.plan
    method = plan.method.describe()
    update = {"kind": method.pop("update")["kind"]}
    method.pop("name")
    return {"method": method, "update": update, "sampler": plan.sampler.describe(), "steps": plan.steps}


def save(engine: Engine) -> dict[str, Any]:
    """Return the state, in a public and a secret part."""
    state = engine.mechanism.state_dict()
    public, secret = dict(state["public"]), dict(state["secret"])
    public["arrays"] = {name: torch.from_numpy(array) for name, array in public["arrays"].items()}
    public["wide_parameters"] = {name: value.clone() for name, value in engine.working.copies.items()}
    public["microbatch_size"] = engine.microbatch_size
    public["settings"] = fingerprint(engine)
    secret |= {name: secret[name].hex() for name in _KEYS}
    secret["cursor"] = engine.mechanism.step
    return {"format": state["format"], "public": public, "secret": secret}


def check(engine: Engine, state: Mapping[str, Any], *, fork: bool) -> None:
    """Refuse a state that this run cannot go on from, before anything is changed.

    Raises
    ------
    ArgumentError
        Names the first setting that differs. The steps already taken were released under the saved settings, and the
        plan would account for them under its own.
    PrivacyError
        If fork is False and this run went on past the state: the same noise would be added to other sums.
    """
    if "secret" not in state or "public" not in state:
        raise ArgumentError(
            "state_dict['dpcore']: must hold a public and a secret part; a public state cannot be resumed, since fresh "
            "keys would not be the ones the statement speaks of"
        )
    difference = _difference("", state["public"]["settings"], fingerprint(engine))
    if difference:
        raise ArgumentError(f"state_dict: {difference}; make_private must get the settings of the run it resumes")
    mechanism = engine.mechanism
    same_noise = mechanism.keys.noise.hex() == state["secret"]["noise_key"]
    if not fork and same_noise and mechanism.step > state["public"]["step"]:
        raise PrivacyError(
            f"fork=False: this run already released steps {state['public']['step'] + 1} to {mechanism.step} with this "
            "key, and the same noise must not be added to other sums; load with fork=True"
        )


def load(engine: Engine, state: Mapping[str, Any], *, fork: bool) -> None:
    """Take over a state that `check` accepted."""
    public, secret = dict(state["public"]), dict(state["secret"])
    public["arrays"] = {name: tensor.cpu().numpy() for name, tensor in public["arrays"].items()}
    secret |= {name: bytes.fromhex(secret[name]) for name in _KEYS}
    engine.mechanism.load_state_dict({"format": state["format"], "public": public, "secret": secret}, fork=fork)
    for name, value in public["wide_parameters"].items():
        if name in engine.working.copies:
            engine.working.copies[name].copy_(value)
    engine.microbatch_size = int(public["microbatch_size"])


def public_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a private optimizer's state_dict without its secret part: safe to publish, not to resume from.

    Parameters
    ----------
    state_dict : mapping
        From ``private.optimizer.state_dict()``.
    """
    result = {key: value for key, value in state_dict.items() if key != "dpcore"}
    part = {key: value for key, value in state_dict["dpcore"].items() if key != "secret"}
    return copy.deepcopy({**result, "dpcore": part})


def _difference(path: str, saved: Any, present: Any) -> str | None:
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys((*saved, *present)):
            found = _difference(f"{path}.{key}" if path else str(key), saved.get(key), present.get(key))
            if found:
                return found
        return None
    return None if saved == present else f"its {path} is {saved!r}, this run's is {present!r}"
