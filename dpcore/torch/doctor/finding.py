"""Findings of the doctor."""

import re
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "remark", "fault", "not tried"]

STATUSES: tuple[Status, ...] = ("fault", "remark", "not tried", "ok")

_WIDTH = 110
_PRIVATE = "Findings marked * reveal something about the data's values: keep them as secret as the data."


class NotTried(Exception):
    """A check that these objects do not allow: the reason, and the remedy."""

    def __init__(self, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.sentence, self.remedy = sentence, remedy


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    status : {"ok", "remark", "fault", "not tried"}
        A *fault* makes training wrong, impossible, or other than claimed; a *remark* is worth knowing.
    name : str
        Name of the check.
    sentence : str
        The finding.
    remedy : str
        The advice; empty if there is nothing to do.
    private : bool
        Whether the sentence reveals something about the values of the data, which has no guarantee.
    details : dict
        Numbers of the check, as JSON values.
    """

    status: Status
    name: str
    sentence: str
    remedy: str = ""
    private: bool = False
    details: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        """Return the finding in one sentence or two."""
        remedy = f" Remedy: {self.remedy}." if self.remedy else ""
        return f"{self.status:9}  {self.name}{'*' * self.private}: {self.sentence}{remedy}"


def _of(status: Status) -> Callable[..., Finding]:
    def made(sentence: str, remedy: str = "", name: str = "", **more: Any) -> Finding:
        return Finding(status, name, sentence, remedy, **more)

    return made


# The findings that checks yield; one without a name gets that of its check.
fault, remark, not_tried, ok = _of("fault"), _of("remark"), _of("not tried"), _of("ok")


class Findings(list[Finding]):
    """A list of findings, in the order of the checks; ``print`` shows it with the faults first."""

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults."""
        return [finding for finding in self if finding.status == "fault"]

    @property
    def ok(self) -> bool:
        """Whether there is no fault. Checks that were not tried are none."""
        return not self.faults

    def named(self, name: str) -> list[Finding]:
        """Return the findings of one check."""
        return [finding for finding in self if finding.name == name]

    def counts(self) -> dict[str, int]:
        """Return how many findings have each status."""
        return {status: sum(finding.status == status for finding in self) for status in STATUSES}

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {"ok": self.ok, "counts": self.counts(), "findings": [asdict(finding) for finding in self]}

    def __str__(self) -> str:
        """Return the findings in lines: faults first, passed checks last."""
        ordered = sorted(self, key=lambda finding: STATUSES.index(finding.status))
        lines = [textwrap.fill(str(finding), _WIDTH, subsequent_indent=" " * 11) for finding in ordered]
        lines.append(", ".join(f"{count} {status}" for status, count in self.counts().items() if count) + ".")
        return "\n".join([*lines, *([_PRIVATE] if any(finding.private for finding in self) else [])])

    def __repr__(self) -> str:
        """Return the text of ``print``, for interactive sessions."""
        return str(self)


_TELLS = re.compile(
    "(add|assign|call|check|convert|draw|end|free|give|hold|keep|leave|let|make|mend|move|must|pad|pass|put|register|rewrite|"
    "run|say|set|take|train|use) "
)


def of_error(error: BaseException, name: str = "", **more: Any) -> Finding:
    """Return a refusal of ours as a fault.

    Its sentence has the form ``problem: remedy``, with more of both between semicolons: the remedy begins with the
    first part that begins with a verb of advice.
    """
    text = str(error)
    cuts = [match.end() for match in re.finditer("[:;] ", text)]
    place = next((cut for cut in cuts if _TELLS.match(text, cut)), cuts[0] if cuts else len(text))
    cause, remedy = text[:place].rstrip("; "), text[place:]
    return fault(f"{cause.rstrip(':.')}.", remedy.rstrip("."), name, **more)
