"""User-level privacy: a sampler draws users, and each user's examples make one vector."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling import draw
from dpcore.sampling.base import Sampler, check_sampler
from dpcore.sampling.draw import Indices
from dpcore.spec import validate
from dpcore.spec.stream import derive_key


def _of_users(name: str, words: str) -> Any:
    return property(attrgetter(f"sampler.{name}"), doc=words)


@dataclass(frozen=True, init=False)
class UserSampler(Sampler):
    """Draws users by any sampler, and gives the examples of those drawn, each user's in a row.

    The sums of a run are then over users: the vectors of a user's examples are added up **before** the clip, so that
    one user moves a sum by at most C, whatever the number of examples (clipping each example instead would allow m C).
    All statements on examples elsewhere hold for users: sizes, the denominator of averages and the event count them.
    A user with any example whose vector is not finite contributes exactly 0.

    Parameters
    ----------
    sampler : Sampler
        Over users: its `dataset_size` is the number of users U.
    user_of_example : (n,) integer array
        The user, 0 to U - 1, of each example. Every user must have an example. Taken as public; copied.
    max_examples_per_user : int
        m, 1 or more: if a user has more examples, m of them take part, drawn once for the run, in secret and
        uniformly. A branch under fresh sampling keys draws them again, which costs nothing: the guarantee does not
        depend on the content of a user's vector.

    Attributes
    ----------
    sha256 : str
        Digest of `user_of_example`.
    """

    sampler: Sampler
    user_of_example: npt.NDArray[np.int64] = field(compare=False, repr=False)
    max_examples_per_user: int
    sha256: str

    def __init__(self, sampler: Sampler, user_of_example: npt.ArrayLike, max_examples_per_user: int) -> None:
        if check_sampler(sampler=sampler).unit_of_privacy != "example":
            raise ArgumentTypeError("sampler=UserSampler: must draw the users themselves, as PoissonSampler does")
        users = _users(user_of_example, sampler.dataset_size)
        object.__setattr__(self, "sampler", sampler)
        object.__setattr__(self, "user_of_example", users)
        object.__setattr__(
            self, "max_examples_per_user", validate.integer(max_examples_per_user=max_examples_per_user, minimum=1)
        )
        object.__setattr__(self, "sha256", hashlib.sha256(users.astype("<i8").tobytes()).hexdigest())

    @classmethod
    def of_digest(cls, sampler: Sampler, described: Mapping[str, Any]) -> "UserSampler":
        """Return the sampler of a description, equal to the one described; it has no users, and cannot draw."""
        made = object.__new__(cls)
        vars(made).update(
            sampler=sampler,
            max_examples_per_user=described["max_examples_per_user"],
            sha256=described["users_sha256"],
            example_count=described["examples"],
        )
        return made

    unit_of_privacy = "user"
    # As the sampler of the users.
    dataset_size = _of_users("dataset_size", "The number of users.")
    expected_batch_size = _of_users("expected_batch_size", "Expected **users** a step.")
    steps_per_epoch = _of_users("steps_per_epoch", "Steps after which every user has been used once, or so expected.")
    max_batch_size = _of_users("max_batch_size", "The most users that any step can have.")
    likely_batch_size = _of_users("likely_batch_size", "The most users of a step, but with probability < 1e-30.")
    keeps_order = _of_users("keeps_order", "Whether the batches of all steps are one arrangement.")
    adjacency = _of_users("adjacency", 'That of the sampler, with "user" for "example".')
    amplified_bands = _of_users("amplified_bands", "The most bands of correlated noise that sampling amplifies.")
    meetings = _of_users("meetings", "How often one user takes part in a range of steps, at most.")
    check_strategy = _of_users("check_strategy", "Refuses strategies that the sampler of the users refuses.")
    moved = _of_users("moved", "How far one user moves rows [first, steps) of C times the sums.")
    event = _of_users("event", "The event of the sampler of the users.")
    banded_event = _of_users("banded_event", "Likewise, under banded noise.")

    @cached_property
    def example_count(self) -> int:
        """The number of examples; indices are in [0, example_count)."""
        return int(self.user_of_example.size)

    def unit_of(self, examples: Indices) -> Indices:
        """Return their users."""
        return self.user_of_example[examples]

    def indices(self, key: bytes, step: int) -> Indices:
        """Return the examples of the users of a step, (m,) int64: user by user, ascending within each."""
        return self._of(key, self.sampler.indices(key, step))[0]

    def units(self, key: bytes, step: int) -> npt.NDArray[np.int64]:
        """Return how many of `indices` belong to each user of the step, in their order: (users,) int64, 1 or more."""
        return self._of(key, self.sampler.indices(key, step))[1]

    def _of(self, key: bytes, users: Indices) -> tuple[Indices, npt.NDArray[np.int64]]:
        examples, first = _kept(key, self)
        sizes = first[users + 1] - first[users]
        # The offset of each place of the result from the beginning of its own user.
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return examples[np.repeat(first[users], sizes) + within], sizes

    @cached_property
    def _by_user(self) -> tuple[Indices, npt.NDArray[np.int64]]:
        """All examples, user by user, and how many each user has."""
        counts = np.bincount(self.user_of_example, minlength=self.dataset_size).astype(np.int64)
        return np.argsort(self.user_of_example, kind="stable").astype(np.int64), counts

    def describe(self) -> dict[str, Any]:
        """Return the public settings: those of the sampler of users, and the definition of a user."""
        return {
            **self.sampler.describe(),
            "unit": self.unit_of_privacy,
            "examples": self.example_count,
            "max_examples_per_user": self.max_examples_per_user,
            "users_sha256": self.sha256,
        }


def _users(user_of_example: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    if np.ma.isMaskedArray(user_of_example):
        raise ArgumentTypeError("user_of_example: must name the user of every example; a masked array hides some")
    try:
        array = np.asarray(user_of_example)
    except ValueError:  # sequences of different lengths
        raise ArgumentError("user_of_example: must be (n,), one user for each example, not lists of them") from None
    if array.ndim != 1 or array.size == 0:
        raise ArgumentError(
            f"user_of_example.shape={array.shape}: must be (n,), the user of each example, at least one"
        )
    if array.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"user_of_example.dtype={array.dtype}: must be integers, users numbered from 0; "
            "numpy.unique(names, return_inverse=True)[1] numbers names"
        )
    users: npt.NDArray[np.int64] = np.array(array, dtype=np.int64)
    if users.min() < 0 or users.max() >= count:
        bad = int(users.min() if users.min() < 0 else users.max())
        raise ArgumentError(
            f"user_of_example: has the user {bad}; must be 0 to {count - 1}, since the sampler has "
            f"dataset_size={count} users"
        )
    missing = np.flatnonzero(np.bincount(users, minlength=count) == 0)
    if missing.size:
        raise ArgumentError(
            f"user_of_example: user {missing[0]} of the sampler's {count} has no example; number the users that have "
            "some from 0 on, and give the sampler their number as dataset_size"
        )
    users.flags.writeable = False
    return users


@lru_cache(maxsize=2)
def _kept(key: bytes, sampler: UserSampler) -> tuple[Indices, npt.NDArray[np.int64]]:
    """Return the examples that take part, user by user, and the beginnings of each user's: (K,) and (U + 1,).

    The m smallest of a user's sort keys are kept, by words of a key of their own (the samplers of users use up the rows
    of the sampling key). Equal sort keys of one user leave the choice open: then all are drawn again, see
    `dpcore.sampling.draw`. Cached, with the care that `draw.permutation` explains.
    """
    examples, counts = sampler._by_user
    most = sampler.max_examples_per_user
    if counts.max() > most:
        words = draw.row_words(derive_key(key, "dpcore sampling examples of users"), draw.SHUFFLE_ROW)
        examples = next(found for keys in draw.sort_keys(words, examples.size)
                        if (found := _chosen(keys, examples, counts, most)) is not None)  # fmt: skip
        counts = np.minimum(counts, most)
    first = np.concatenate([[0], np.cumsum(counts)])
    examples.flags.writeable = first.flags.writeable = False
    return examples, first


def _chosen(keys: draw.SortKeys, examples: Indices, counts: npt.NDArray[np.int64], most: int) -> Indices | None:
    """Return the `most` examples with the smallest keys of each user, in the given order; None if two keys collide."""
    user = np.repeat(np.arange(counts.size), counts)
    by_key = np.lexsort((keys, user))
    same_user = user[1:] == user[:-1]  # the lexicographic order does not move users
    if np.any(same_user & (keys[by_key][1:] == keys[by_key][:-1])):
        return None
    rank = np.arange(user.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return examples[np.sort(by_key[rank < most])]


def portions(units: npt.NDArray[np.int64], most: int) -> Iterator[tuple[int, int, list[int], bool]]:
    """Split the rows of whole units into portions of at most `most` rows.

    A unit is split only if it is larger than a portion, and then its portions have nothing else. Yields the rows of the
    portion, start and stop, how many of them belong to each of its units, and whether its one unit continues in the
    next portion, so that the sums are not complete.
    """
    start, sizes = 0, list[int]()
    for unit in units.tolist():
        if sizes and sum(sizes) + unit > most:
            yield start, start + sum(sizes), sizes, False
            start, sizes = start + sum(sizes), []
        rest = unit
        while rest > most:
            yield start, start + most, [most], True
            start, rest = start + most, rest - most
        sizes.append(rest)
        if rest < unit:
            yield start, start + rest, sizes, False
            start, sizes = start + rest, []
    if sizes:
        yield start, start + sum(sizes), sizes, False
