"""A run of Opacus as the subject of ``dpcore epsilon`` and ``dpcore delta``: its history in a plan's place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, ClassVar

from dpcore.accounting import OPACUS_ASSUMPTIONS, Event, from_opacus
from dpcore.accounting.opacus import accountant_state
from dpcore.accounting.phases import demand_phases
from dpcore.cli.accounting.event_options import EventOptions
from dpcore.cli.options import option
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.spec.canonical import read_json_file
from dpcore.spec.extras import needs

Opacus = Annotated[
    Path | None,
    option(
        Path,
        "FILE",
        "What a run of Opacus cost: its checkpoint, or its accountant's state_dict() as JSON; no plan then.",
    ),
]


@dataclass(frozen=True)
class OpacusHistory:
    """What the file holds; in an answer it stands where `EventOptions` does."""

    mechanism: str
    recorded: Event
    assumptions: ClassVar[tuple[str, ...]] = OPACUS_ASSUMPTIONS
    noise_multiplier: ClassVar[None] = None  # the phases have theirs
    dataset_size: ClassVar[None] = None

    def event(self) -> Event:
        """Return what was released."""
        return self.recorded

    @property
    def words(self) -> str:
        """The same for a person."""
        counts = [getattr(part, "steps", 0) for part in getattr(self.recorded, "events", (self.recorded,))]
        if len(counts) > 1:
            return f"Poisson sampling, {sum(counts):,} steps in {len(counts):,} phases, recorded by Opacus"
        rate, noise = (getattr(self.recorded, name, 0.0) for name in ("sample_rate", "noise_multiplier"))
        return (
            f"Poisson sampling at rate {rate:.6g}, {counts[0]:,} steps, noise multiplier {noise:g}, recorded by Opacus"
        )

    def described(self) -> dict[str, Any]:
        """Return the same for a program."""
        return {"mechanism": self.mechanism, "holds_if": list(self.assumptions)}

    def lines(self) -> list[str]:
        """Return what the answer rests on, for a person."""
        gdp = ["Opacus's own gdp accountant approximates, and may report less."] if self.mechanism == "gdp" else []
        rests = [wrap(one, 80, initial_indent="  - ", subsequent_indent="    ") for one in self.assumptions]
        return [*gdp, "It holds if:", *chain.from_iterable(rests)]


def asked(file: Path | None, given: Mapping[str, Any]) -> EventOptions | OpacusHistory:
    """Return the run in the file, or without one the plan that the options describe."""
    if file is None:
        return EventOptions(**given)
    extra = [item.name for item in fields(EventOptions) if given[item.name] != item.default]
    if extra:
        raise ArgumentError(f"opacus: the file says what was run; leave out --{extra[0].replace('_', '-')}")
    return history(file)


def history(file: Path) -> OpacusHistory:
    """Return the run in a file."""
    try:
        state = _read(file)
        event = from_opacus(state)
        demand_phases(event)  # counts that add up beyond float64 are refused here, with the file's name
        return OpacusHistory(str(state.get("mechanism")), event)
    except (ArgumentError, ArgumentTypeError) as cause:
        raise DataError(f"{file}: {str(cause).removeprefix('state: ')}") from cause


def _read(file: Path) -> Mapping[str, Any]:
    """Return the accountant's state; PyTorch is needed where the file is not JSON."""
    with file.open("rb") as opened:
        is_json = opened.read(1) in (b"{", b"[", b" ", b"\n", b"\t", b"\r")
    if is_json:
        try:
            return accountant_state(read_json_file(file))
        except ValueError as cause:
            if isinstance(cause, ArgumentError):
                raise
            raise DataError(f"{file}: is not JSON ({cause})") from cause
    try:
        from dpcore.torch.opacus import read_opacus_checkpoint
    except ImportError as cause:
        raise DataError(
            f"{file}: {needs('reading a checkpoint', 'torch')}; a JSON file with the accountant's state_dict() is read "
            "without"
        ) from cause
    return read_opacus_checkpoint(file)
