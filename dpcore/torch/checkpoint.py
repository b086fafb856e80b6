"""A run's state: a plain dictionary that ``torch.save`` writes and ``torch.load(weights_only=True)`` reads.

The state has a secret part, so only its owner can read the file. A file is always replaced as a whole.

In a folder, each process writes one file, ``<save>-<rank>.pt``, with its parts of the vectors. The first process's file
also holds everything else. The index names the valid save and is replaced last, so that a crash leaves the earlier save
or the new one. Files pickle only tensors and plain values; `torch.distributed.checkpoint` does not promise that.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch

from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.mechanism.noise_state import described, is_lost
from dpcore.mechanism.parts import Joined, Part
from dpcore.mechanism.peers import Peers, by_the_first
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.spec.stream import check_key
from dpcore.spec.whole_file import whole_file
from dpcore.torch.data import batches
from dpcore.torch.engine import Engine

UPDATE_KIND = ("second_moment", "denominator", "bias_corrected", "joint_scale", "variant")
"""Settings of an update that determine what is released or what the moments mean. Parameter groups carry the others."""


def fingerprint(engine: Engine) -> dict[str, Any]:
    """Return the settings that a state and its run must share. Learning rates and the like may change."""
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

    With `begin`, a run that has an account begins in its ledger, so that the ledger can recognize the state. With
    `own`, each vector is this process's `Part`, and nothing is gathered.
    """
    state = engine.mechanism.state_dict(begin=begin, own=own)
    public, secret = dict(state["public"]), dict(state["secret"])
    public["arrays"] = _tensors(public["arrays"])
    public["wide_parameters"] = {name: value.clone() for name, value in engine.working.copies.items()}
    public["microbatch_size"] = engine.planned_microbatch_size
    public["processes"] = engine.mechanism.peers.world_size
    public["caveats"] = list(engine.caveats)
    public["settings"] = fingerprint(engine)
    kept = engine.recorder
    public["recorded"] = None if kept is None else {"coordinates": kept.coordinates, **_tensors(kept.arrays())}
    secret["arrays"] = _tensors(secret["arrays"])
    secret |= {name: secret[name].hex() for name in KEYS}
    secret["earlier_keys"] = [[row, key.hex()] for row, key in secret["earlier_keys"]]
    secret["cursor"] = public["step"]
    return {"format": state["format"], "public": public, "secret": secret}


class Checked(NamedTuple):
    """A state that this run can continue from, read as a whole: what is left to load cannot fail."""

    plan: Plan
    mechanism: dict[str, Any]
    wide: dict[str, torch.Tensor]
    recorder: Recorder | None
    microbatch_size: int | None  # None: as it is
    caveats: tuple[str, ...]


@contextmanager
def undamaged(*, secret: bool = True) -> Iterator[None]:
    """Turn whatever reading a state of another form raises into one ArgumentError, which quotes nothing if `secret`."""
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as cause:
        if isinstance(cause, (DpcoreError, torch.OutOfMemoryError)):
            raise
        words = type(cause).__name__ if secret else f"{type(cause).__name__}: {cause}"
        raise ArgumentError(
            f"state_dict: is damaged, or of another form ({words}); take an undamaged checkpoint"
        ) from None


def load(engine: Engine, state: Checked) -> None:
    """Load a state. If the ledger refuses (DataError, PrivacyError), nothing was changed."""
    mechanism, before = engine.mechanism, engine.mechanism.plan
    mechanism.plan = state.plan
    try:
        mechanism.load_state_dict(state.mechanism)
    except DpcoreError:
        mechanism.plan = before
        raise
    if state.microbatch_size is not None:
        engine.plan_microbatches(state.microbatch_size)
    for name, value in state.wide.items():
        engine.working.copies[name].copy_(value)
    engine.recorder, engine.caveats = state.recorder, state.caveats


def check_one_state(peers: Peers, state: Mapping[str, Any]) -> None:
    """Refuse processes that load different states: their steps, keys and clip norms would differ."""
    if peers.world_size == 1:
        return
    total = hashlib.sha256()
    _add(total, state)
    part = state.get("dpcore")
    public = part.get("public") if isinstance(part, Mapping) else None
    step = public.get("step") if isinstance(public, Mapping) else None
    peers.check_alike({"step of the saved state": step, "saved state": total.hexdigest()})


def _add(total: Any, value: Any) -> None:
    """Add all of a state to a digest, except vectors stored in parts: the name of their save identifies them."""
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


def public_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a private optimizer's state_dict without its secret part: safe to publish, not to resume from.

    Parameters
    ----------
    state_dict : mapping
        From ``private.optimizer.state_dict()``.
    """
    if not isinstance(state_dict.get("dpcore"), Mapping):
        raise ArgumentError(
            "state_dict: must be the result of private.optimizer.state_dict(), with its part 'dpcore'; if a checkpoint "
            "contains it, give that entry"
        )
    result = {key: value for key, value in state_dict.items() if key != "dpcore"}
    # List the parts to keep, not those to leave out: a part that another version adds does not slip through.
    part = {key: state_dict["dpcore"][key] for key in ("format", "public")}
    return copy.deepcopy({**result, "dpcore": part})


def save_state(path: str | os.PathLike[str], state: Any) -> None:
    """Write what `torch.save` writes, readable by its owner only (mode 0600), whatever the umask.

    A private optimizer's `state_dict` contains the run's keys: whoever can read it can subtract the noise. A crash
    leaves the earlier file or the new one, never a part.

    Parameters
    ----------
    path : path
    state : object
        Whatever `torch.save` accepts. Read it by ``torch.load(path, weights_only=True)``.

    Raises
    ------
    DataError
        If the file cannot be written.
    """
    _replace(path, lambda file: torch.save(state, file))


def _replace(path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any]) -> None:
    target = Path(path)
    try:
        with whole_file(target, secret=True) as file:
            write(file)
    except (OSError, RuntimeError) as cause:  # torch raises RuntimeError if the disk is full
        reason = cause.strerror if isinstance(cause, OSError) else "the disk may be full"
        raise DataError(f"checkpoint {target}: cannot be written ({reason})") from cause


def _tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    given = torch.from_numpy
    return {name: array.map(given) if isinstance(array, Part) else given(array) for name, array in arrays.items()}


def _arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, Joined) else value.cpu().numpy() for name, value in tensors.items()}


KEYS = ("noise_key", "sampling_key")

_MAY_BE_NONE = ("ledger", "recorded")
_SAME_NOISE = 1e-6
"""Largest relative difference of noise multipliers that two machines, or two versions of SciPy, calibrate."""


def checked(engine: Engine, state: Mapping[str, Any], present: Mapping[str, Any]) -> Checked:
    """Read a state; refuse one from which this run cannot continue, before anything is changed.

    `present` is this run's own state, by `save`: the form that a valid state has. The error names the first setting
    that differs (the saved steps were released under the saved settings, but the plan would account for them under its
    own), or the entry that is missing or of another form. It never quotes the secret part.
    """
    if "secret" not in state or "public" not in state:
        raise ArgumentError(
            "state_dict['dpcore']: must have a public and a secret part; a public state cannot be resumed, since fresh "
            "keys would not be those of the statement"
        )
    if state.get("format") != present["format"]:
        reason = f"its format is {state.get('format')!r}, this version reads {present['format']}"
        raise ArgumentError(f"state_dict['dpcore']: {reason}")
    for part in ("public", "secret"):
        for name, own in present[part].items():
            if name not in state[part]:
                raise ArgumentError(f"state_dict['dpcore'][{part!r}]: lacks {name!r}; take an undamaged checkpoint")
            if not isinstance(state[part][name], dict | None if name in _MAY_BE_NONE else type(own)):
                words = "a dict or None" if name in _MAY_BE_NONE else f"a {type(own).__name__}"
                raise ArgumentError(f"state_dict['dpcore'][{part!r}]: its {name} must be {words}")
    saved, own = state["public"]["settings"], present["public"]["settings"]
    if saved.get("steps") != own["steps"]:
        raise ArgumentError(
            f"state_dict: its run was planned for {saved.get('steps')} steps, this one for {own['steps']}: a run "
            "cannot be made longer, since its noise was made for the planned steps; resume with the same data, batch "
            "size and epochs, or begin another run, in one ledger"
        )
    if difference := _difference("", saved, own):
        calibrated = difference.startswith("its noise_multiplier")
        also = ", and target_epsilon and target_delta determine the noise" if calibrated else ""
        raise ArgumentError(f"state_dict: {difference}; make_private must get the settings of the run it resumes{also}")
    noise = described(engine.mechanism.plan.method.noise.strategy)
    for complaint in chain(
        _of_public(engine, state["public"], present["public"]),
        _of_secret(state["secret"], present["secret"], state["public"], noise),
    ):
        raise ArgumentError(f"state_dict['dpcore']{complaint}")
    return _read_checked(engine, state)


def _read_checked(engine: Engine, state: Mapping[str, Any]) -> Checked:
    public, secret, mechanism = dict(state["public"]), dict(state["secret"]), engine.mechanism
    # The steps so far were released under the saved noise multiplier, which may differ from this plan's in its last
    # digits. The plan adopts the saved one, so that the event describes past and future releases exactly. With this
    # plan's own, the event could claim more noise than earlier steps had. The price: a target epsilon is missed by
    # about that last digit, as epsilon() reports.
    method = mechanism.plan.method.with_noise_multiplier(public["settings"]["noise_multiplier"])
    public["arrays"] = _arrays(public["arrays"])
    secret["arrays"] = _arrays(secret["arrays"])
    secret |= {name: as_key(secret[name], name) for name in KEYS}
    secret["earlier_keys"] = [(row, as_key(text, "earlier_keys")) for row, text in secret["earlier_keys"]]
    recorder = engine.recorder
    if public["recorded"] is not None and mechanism.peers.world_size == 1:  # several processes record nothing
        recorder = Recorder.of(mechanism.layout, public["recorded"])
    elif recorder is not None:  # it has steps that the run undoes
        recorder = Recorder(mechanism.layout, recorder.coordinates)
    # A size that was given, or that fits the memory of this number of processes, stays.
    kept = engine.microbatch_given or public["processes"] != mechanism.peers.world_size
    return Checked(
        plan=replace(mechanism.plan, method=method),
        mechanism={"format": state["format"], "public": public, "secret": secret},
        wide={name: value for name, value in public["wide_parameters"].items() if name in engine.working.copies},
        recorder=recorder,
        microbatch_size=None if kept else public["microbatch_size"],
        # Earlier steps were released under the saved sentences, later ones under this run's.
        caveats=tuple(dict.fromkeys((*public["caveats"], *engine.caveats))),
    )


def _of_public(engine: Engine, public: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[str]:
    """Yield complaints about the public part. Each check relies on those before it."""
    for name in ("layout", "rng", "arrays"):
        saved, own = (_forms(each[name]) if name == "arrays" else each[name] for each in (public, mine))
        if saved != own:
            yield f": its {name} must be those of this run's model and method"
    for name in ("statistics", "corrections"):
        if not _are_numbers(public[name]) or len(public[name]) != len(mine[name]):
            yield f": its {name} must be {len(mine[name])} finite numbers"
    for name in public["wide_parameters"].keys() & mine["wide_parameters"].keys():
        copies = [each["wide_parameters"][name] for each in (public, mine)]
        if not isinstance(copies[0], torch.Tensor) or copies[0].shape != copies[1].shape:
            yield f": its copy of parameter {name!r} must be a tensor of its shape"
    if not _is_count(public["step"]) or public["step"] > engine.mechanism.plan.steps:
        yield f": its step {public['step']!r} is not in the plan"
    if engine.mechanism.clip_norms is not None:
        norms, (least, most) = public["clip_norms"], engine.mechanism.plan.clip_limits
        if not _are_numbers(norms) or len(norms) != public["step"] + 1 or not least <= min(norms) <= max(norms) <= most:
            yield f": its clip_norms must be a number for each step and the next one, all from {least:g} to {most:g}"
    if not _are_branches(public["branches"], public["branch"], public["step"]):
        yield ": its branches must be [parent, first, mark] by name"
    for name in ("microbatch_size", "processes"):
        if not _is_count(public[name]) or public[name] < 1:
            yield f": its {name} {public[name]!r} must be positive"
    for name, ledger in (("", public), ("ledger's ", public["ledger"])):
        if ledger is not None and not _are_texts(ledger["caveats"]):
            yield f": its {name}caveats must be sentences"
    if public["ledger"] is not None and not _are_texts([public["ledger"][key] for key in ("ledger", "run", "branch")]):
        yield ": its ledger must have the names of ledger, run and branch"
    if public["recorded"] is not None and not _are_recorded(public["recorded"], engine.mechanism.layout.dimension):
        yield ": its recorded gradients do not fit each other or this run"


def _are_branches(known: Any, present: Any, step: Any) -> bool:
    """Whether the branches determine which rows were released: the present branch's rows end at the state's step."""
    fits = isinstance(known, Mapping) and present in known
    for item in known.values() if fits else ():
        parts: Any = item if isinstance(item, (list, tuple)) and len(item) == 3 else (None, None, None)
        parent, first, mark = parts
        fits = fits and isinstance(parent, str) and _is_count(first) and _is_count(mark) and first <= mark
        fits = fits and (parent in known if parent else True)
    return fits and known[present][1] <= step == known[present][2]


def _are_recorded(recorded: Any, dimension: int) -> bool:
    try:
        width, steps = recorded["coordinates"], len(recorded["negative_share"])
        shapes = [recorded[name].shape for name in ("released", "filtered")]
        return 1 <= width <= dimension and shapes == [(steps, width)] * 2
    except (TypeError, KeyError, AttributeError):
        return False


def _of_secret(
    secret: Mapping[str, Any], mine: Mapping[str, Any], public: Mapping[str, Any], noise: list[str]
) -> Iterator[str]:
    """Yield complaints about the secret part, quoting none of it."""
    for name in KEYS:
        as_key(secret[name], name)
    if not isinstance(public["noise"], (list, tuple)):
        yield ": its noise must be a state's description of a strategy"
    step, forms = public["step"], _forms(secret["arrays"])
    lost = forms is not None and is_lost(public["noise"], forms, noise, mine["arrays"])
    if not lost and forms != _forms(mine["arrays"]):
        yield "['secret']: its arrays must be those of this run's model and strategy"
    earlier = secret["earlier_keys"]
    pairs = isinstance(earlier, Sequence) and all(isinstance(i, Sequence) and len(i) == 2 for i in earlier)
    rows = [item[0] for item in earlier] if pairs else [-1]
    if not all(_is_count(row) for row in rows) or rows != sorted({*rows}) or any(not 0 < row <= step for row in rows):
        yield "['secret']['earlier_keys']: must be pairs of a row and a key, rows ascending up to the step"
    for _, text in earlier:
        as_key(text, "earlier_keys")
    if not isinstance(secret["origin"], str) or not _is_count(secret["forks"]) or secret["cursor"] != step:
        yield "['secret']: its origin, forks or cursor is damaged"


def as_key(text: Any, name: str) -> bytes:
    """Return the key that a state stores as 64 hexadecimal digits."""
    try:
        key = bytes.fromhex(text)
        check_key(key)
    except (TypeError, ValueError):
        # `from None`: the damaged text may still be most of a key, which no traceback may show.
        raise ArgumentError(f"state_dict['dpcore']['secret'][{name!r}]: must be 64 hexadecimal digits") from None
    return key


def _forms(arrays: Any) -> dict[str, Any] | None:
    """Return shapes and dtypes of the whole vectors, by name; None if a value is not a tensor."""
    known = torch.Tensor | Part | Joined
    if not isinstance(arrays, Mapping) or not all(isinstance(value, known) for value in arrays.values()):
        return None
    return {name: (tuple(a.shape), str(a.dtype).removeprefix("torch.")) for name, a in arrays.items()}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) and value for value in values)


def _are_numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(v, float) and math.isfinite(v) for v in values)


def _difference(path: str, saved: Any, present: Any) -> str | None:
    if isinstance(saved, Mapping) and isinstance(present, Mapping):
        for key in dict.fromkeys((*saved, *present)):
            difference = _difference(f"{path}.{key}" if path else str(key), saved.get(key), present.get(key))
            if difference:
                return difference
        return None
    if path == "noise_multiplier" and math.isclose(saved or 0.0, present, rel_tol=_SAME_NOISE):
        return None
    return None if saved == present else f"its {path} is {saved!r}, this run's is {present!r}"


T = TypeVar("T")

FORMAT = 1
INDEX = "index.json"
_PARTS = ("public", "secret")


def write_parts(folder: Path, state: Mapping[str, Any], peers: Peers) -> None:
    """Write a state whose vectors are `Part`. All processes must call it."""
    save: str = peers.same(os.urandom(8).hex())
    by_the_first(peers, lambda: _make(folder), sent=False)
    vectors: dict[str, list[list[Any]]] = {part: [] for part in _PARTS}
    rest = {**state, "dpcore": {**state["dpcore"]}}
    for part, kept in vectors.items():
        arrays = state["dpcore"][part]["arrays"]
        own = {name: array for name, array in arrays.items() if isinstance(array, Part)}
        kept += [[n, array.here, array.start, array.size, array.dtype] for n, array in own.items()]
        others = {name: array for name, array in arrays.items() if name not in own}
        rest["dpcore"][part] = {**state["dpcore"][part], "arrays": others}
    content = {"save": save, "vectors": vectors, "state": rest if peers.rank == 0 else None}
    _together(peers, lambda: save_state(folder / f"{save}-{peers.rank}.pt", content))
    by_the_first(peers, lambda: _publish(folder, save, peers.world_size), sent=False)


def read_parts(folder: Path, peers: Peers) -> dict[str, Any]:
    """Return a state whose vectors are `Joined`, which are read on request. All processes must call it."""
    index = by_the_first(peers, lambda: _index(folder))
    assert index is not None
    return _together(peers, lambda: _read(folder, index["save"], index["files"], peers))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as cause:
        raise DataError(f"checkpoint {folder}: cannot be made ({cause.strerror})") from cause


def _publish(folder: Path, save: str, files: int) -> None:
    """Make the index name this save. Remove the files of the save that it named before, and no others."""
    try:
        earlier = _index(folder)["save"]
    except DataError:
        earlier = None
    if not all((folder / f"{save}-{rank}.pt").exists() for rank in range(files)):
        raise DataError(
            f"checkpoint {folder}: not all processes see it, or another run writes there; give each run its own"
        )
    index = {"format": FORMAT, "save": save, "files": files}
    _replace(folder / INDEX, lambda file: file.write(json.dumps(index).encode()))
    for path in folder.glob(f"{earlier}-*.pt") if earlier is not None else ():
        path.unlink(missing_ok=True)


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_bytes()[:1000])
        fits = index["format"] == FORMAT and isinstance(index["files"], int) and 0 < index["files"] <= 1 << 20
        fits = fits and re.fullmatch("[0-9a-f]{16}", index["save"]) is not None
    except OSError as cause:
        raise DataError(
            f"checkpoint {folder}: has no {INDEX}; must be a folder that save_sharded wrote ({cause.strerror})"
        ) from cause
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise DataError(f"checkpoint {path}: is damaged, or of another version; take an undamaged copy")
    return dict(index)


def _read(folder: Path, save: str, files: int, peers: Peers) -> dict[str, Any]:
    # Mapped into memory, and each file checked by one process.
    contents = [
        read_state(folder / f"{save}-{rank}.pt", whole=rank % peers.world_size == peers.rank, mmap=True)
        for rank in range(files)
    ]
    damaged = DataError(f"checkpoint {folder}: its files do not fit each other; take an undamaged copy")
    try:
        state = contents[0]["state"]
        if any(content["save"] != save for content in contents):
            raise damaged
        for part in _PARTS:
            of: dict[str, list[Part]] = {}
            for content in contents:
                for name, here, start, size, dtype in content["vectors"][part]:
                    of.setdefault(name, []).append(Part(here, start, size, dtype))
            state["dpcore"][part]["arrays"] |= {name: Joined(parts) for name, parts in of.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise damaged from cause
    return dict(state)


def read_state(path: Path, *, whole: bool = True, mmap: bool = False) -> Any:
    """Read what `save_state` wrote; with `whole`, check all its bytes, or raise DataError.

    torch.load does not look at the checksums: a flipped bit of a key would be read as another key.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            fits = not whole or archive.testzip() is None
        if fits:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as cause:
        raise DataError(f"checkpoint {path}: cannot be read ({cause.strerror})") from cause
    except Exception as cause:  # torch raises many kinds
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy") from cause
    raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy")


def _together(peers: Peers, work: Callable[[], T]) -> T:
    """Do the work in all processes. If it fails in one, all raise."""
    failure: BaseException | None = None
    result: Any = None
    try:
        result = work()
    except BaseException as cause:  # noqa: BLE001 - interruptions, too, since the others wait
        failure = cause
    failed = peers.added([float(failure is not None)])[0]
    if failure is not None:
        raise failure
    if failed:
        raise DataError(f"checkpoint: {failed:.0f} of {peers.world_size} processes could not read or write their part")
    done: T = result
    return done
