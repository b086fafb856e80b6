"""The run's state as a plain dictionary that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.spec.stream import check_key
from dpcore.torch.engine import Engine

_KEYS = ("noise_key", "sampling_key")

_SAME_NOISE = 1e-6
"""Relative: how far a noise multiplier that was calibrated on another machine, or by another SciPy, may be off."""


def fingerprint(engine: Engine) -> dict[str, Any]:
    """Return the settings that a state belongs to. Learning rates and the like are not among them: they may change."""
    plan = engine.mechanism.plan
    method = plan.method.describe()
    update = {"kind": method.pop("update")["kind"]}
    method.pop("name")
    method["noise"].pop("noise_multiplier", None)
    return {
        "method": method,
        "update": update,
        "noise_multiplier": plan.noise_multiplier,
        "sampler": plan.sampler.describe(),
        "steps": plan.steps,
    }


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
    """Refuse a state that this run cannot go on from, before anything is changed: what passes here can be loaded.

    Raises
    ------
    ArgumentError
        Names the first setting that differs (the steps already taken were released under the saved settings, and the
        plan would account for them under its own), or what is missing or of another form.
    PrivacyError
        If fork is False and this run went on past the state: the same noise would be added to other sums. For other
        runs of this process the first step refuses it (`RunKeys.begin`).
    """
    if "secret" not in state or "public" not in state:
        raise ArgumentError(
            "state_dict['dpcore']: must hold a public and a secret part; a public state cannot be resumed, since fresh "
            "keys would not be the ones the statement speaks of"
        )
    present = save(engine)
    if state.get("format") != present["format"]:
        raise ArgumentError(
            f"state_dict['dpcore']: its format is {state.get('format')!r}, this version reads {present['format']}"
        )
    for part in ("public", "secret"):
        for name in present[part]:
            if name not in state[part]:
                raise ArgumentError(f"state_dict['dpcore'][{part!r}]: lacks {name!r}; take an undamaged checkpoint")
    public, mine = state["public"], present["public"]
    difference = _difference("", public["settings"], mine["settings"])
    if difference:
        raise ArgumentError(f"state_dict: {difference}; make_private must get the settings of the run it resumes")
    for name, saved, own in (
        ("layout", public["layout"], mine["layout"]),
        ("rng", public["rng"], mine["rng"]),
        ("arrays", _forms(public["arrays"]), _forms(mine["arrays"])),
    ):
        if saved != own:
            raise ArgumentError(f"state_dict['dpcore']: its {name} must be those of this run's model and method")
    for name in set(public["wide_parameters"]) & set(mine["wide_parameters"]):
        if public["wide_parameters"][name].shape != mine["wide_parameters"][name].shape:
            raise ArgumentError(f"state_dict['dpcore']: its copy of parameter {name!r} has another shape")
    mechanism = engine.mechanism
    if not 0 <= public["step"] <= mechanism.plan.steps:
        raise ArgumentError(f"state_dict['dpcore']: its step {public['step']!r} lies outside of the plan")
    noise, _ = (_key(state["secret"][name], name) for name in _KEYS)
    if not fork and mechanism.keys.noise == noise and mechanism.step > public["step"]:
        raise PrivacyError(
            f"fork=False: this run already released steps {public['step'] + 1} to {mechanism.step} with this key, and "
            "the same noise must not be added to other sums; load with fork=True"
        )


def load(engine: Engine, state: Mapping[str, Any], *, fork: bool) -> None:
    """Take over a state that `check` accepted."""
    public, secret = dict(state["public"]), dict(state["secret"])
    # The steps so far were released under the saved noise multiplier, which may differ from this plan's in its last
    # digits. The plan takes it over, so that the event is that of what was released and of what will be, exactly, and
    # a run that goes on adds the very noise it would have added. The other way round the event could claim more noise
    # than earlier steps had. The price: a target epsilon is missed by about that last digit, as epsilon() says.
    plan = engine.mechanism.plan
    method = plan.method.with_noise_multiplier(public["settings"]["noise_multiplier"])
    engine.mechanism.plan = replace(plan, method=method)
    public["arrays"] = {name: tensor.cpu().numpy() for name, tensor in public["arrays"].items()}
    secret |= {name: _key(secret[name], name) for name in _KEYS}
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


def _key(text: Any, name: str) -> bytes:
    try:
        key = bytes.fromhex(text)
        check_key(key)
    except (TypeError, ValueError):
        # `from None`: what is damaged may still be most of a key, which no traceback shall show.
        raise ArgumentError(f"state_dict['dpcore']['secret'][{name!r}]: must be 64 hexadecimal digits") from None
    return key


def _forms(arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in arrays.items()}


def _difference(path: str, saved: Any, present: Any) -> str | None:
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys((*saved, *present)):
            found = _difference(f"{path}.{key}" if path else str(key), saved.get(key), present.get(key))
            if found:
                return found
        return None
    if path == "noise_multiplier" and math.isclose(saved or 0.0, present, rel_tol=_SAME_NOISE):
        return None
    return None if saved == present else f"its {path} is {saved!r}, this run's is {present!r}"
