"""The assumptions and limits of a guarantee: the sentences that a statement must have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dpcore.spec.keys import CALLER, EXACT, Provenance
from dpcore.statement.text import counted

if TYPE_CHECKING:
    from dpcore.plan.plan import Plan

PUBLIC_SIZES = "The number of examples n and the sampling rate are treated as public."
REAL_NUMBERS = "The analysis is of real-valued Gaussian noise; the rounding of floating-point numbers is not covered."
"""The sentence of statements without the number of coordinates, and so without a grid."""
FLOATS = (
    "The guarantee holds for the floating-point numbers that are released: what an example adds is an integer multiple "
    "of one grid's step, no longer than the clip norm, sums of these are exact, and noise is drawn on the same grid. "
    "All draws together are within the law distance stated above of their law, in total variation; (1 + exp(epsilon)) "
    "times that is to be added to delta."
)
SECRET_KEYS = (
    "The keys are assumed secret and never used again, and with them the secret part of every saved state; whoever "
    "knows them can subtract the noise."
)
NO_LEDGER = (
    "No ledger was kept: choosing hyper-parameters, or when to stop, by looking at results on the same data is not "
    "accounted for."
)
UNITS = {
    "example": "The unit of privacy is one example: a person with several examples has less protection than stated.",
    "user": "The unit of privacy is one user with all examples under that name; one person as several users has less.",
}
USERS = (
    "What is said of examples holds for users here, and n is their number; how many examples they have, and which is "
    "whose, is treated as public."
)
PUBLIC_DATA = "The second moment is made of gradients of data that the caller declares public: it has no guarantee."
SECRET_BATCHES = "The batches are secret: how long a step takes, which tells how many examples it had, is not covered."
FILE_SYSTEM = (
    "The ledger lies, or lay, on {}, on its owner's word: it is not known that locks, flushes and files hold there, "
    "and what a lost entry counted is not counted."
)
CALLER_KEY = "The guarantee holds only while the caller's key stays secret."
EXACT_KEY = "It holds only if no other run used that key: two runs with one exact key share all noise."
OWN_SAMPLER = ("The sampler ", " is the caller's: that its batches are what its event says is taken on trust.")
"""Beginning and end of the sentence about a sampler that is not the library's; its name is between them."""
SELECTED = (
    "The run is the best of a secret, random number of runs, whose settings were drawn independently of the data. "
    "Epsilon covers the choice if it was made by what the runs release, or by held-out data that need no protection, "
    "and if nothing of the other runs was seen: whoever knows how long the selection took, or what load it made, may "
    "guess their number."
)
BRIEFLY = {
    NO_LEDGER: "choosing by results",
    UNITS["example"]: "a person's other examples",
    UNITS["user"]: "a person as several users",
    SECRET_BATCHES: "step times",
    REAL_NUMBERS: "rounding",
    PUBLIC_DATA: "the public data",
    SELECTED: "how long the selection took",
}
"""Short forms of sentences for a summary, which counts the others."""


def assumptions(
    plan: Plan, keys: Provenance, abandoned: int, ledger: Mapping[str, Any], *, on_grid: bool
) -> tuple[str, ...]:
    """Return the sentences that belong to these settings, with `abandoned` steps; `ledger` as in `Statement`.

    `on_grid`: the statement has the grid of the releases.
    """
    unit, origin, forks = plan.sampler.unit_of_privacy, keys.origin, keys.forks
    numbers = FLOATS if on_grid else REAL_NUMBERS
    said = [PUBLIC_SIZES, numbers, _search(ledger), UNITS.get(unit, f"The unit of privacy is one {unit}.")]
    said.append(SECRET_KEYS)
    if unit == "user":
        said.append(USERS)
    said += _places(ledger)
    if plan.sampler.describe().get("secret", not plan.sampler.keeps_order):
        said.append(SECRET_BATCHES)
    if plan.method.update.second_moment == "public":
        said.append(PUBLIC_DATA)
    if origin.startswith(CALLER):
        said.append(CALLER_KEY)
    if origin == EXACT:
        said.append(EXACT_KEY)
    if forks:
        known = "are counted as far as the ledger knows of them."
        others = known if ledger else "are further releases, and are not counted here."
        said.append(
            f"The run was resumed {counted(forks, 'time')} from a checkpoint, under fresh noise; steps that another "
            f"process took after such a checkpoint {others}"
        )
    if abandoned:
        were = "was" if abandoned == 1 else "were"
        further = counted(abandoned, "further step")
        said.append(f"Epsilon counts {further}, which {were} released and then abandoned.")
    return tuple(said)


def of_selection(caveats: Iterable[str], ledger: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sentences of a selection that a ledger paid for, from those of the run that won."""
    said = [*caveats, SELECTED, *_places(ledger)]
    return tuple(dict.fromkeys(_search(ledger) if sentence == NO_LEDGER else sentence for sentence in said))


def _places(ledger: Mapping[str, Any]) -> list[str]:
    places = ledger.get("file_systems")
    return [FILE_SYSTEM.format(", ".join(map(str, places)))] if places else []


def _search(ledger: Mapping[str, Any]) -> str:
    if not ledger:
        return NO_LEDGER
    return (
        "Choosing hyper-parameters, or when to stop, by looking at results on the same data is accounted for as far "
        f"as the ledger {ledger.get('ledger', '')} holds those runs, in its total and not in this run's epsilon."
    )
