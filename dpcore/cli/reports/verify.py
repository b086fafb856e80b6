"""``dpcore verify``: whether a statement follows from its own settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpcore.cli.options import Json
from dpcore.cli.output import results, write_json, write_line
from dpcore.cli.stored import overview, stored_in
from dpcore.cli.waiting import tells_if_slow
from dpcore.statement.text import counted

if TYPE_CHECKING:
    from dpcore.statement.verify import Finding


@tells_if_slow(lambda _given: "every epsilon of the statement, anew")
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run folder, an export, or a statement.json.")],
    ledger: Annotated[Path | None, typer.Option("--ledger", metavar="FILE",
        help="Also compare run, event and steps with the ledger that paid.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Derive a statement again from its settings, and compare the files beside it. Status 1 where a check fails."""
    from dpcore.statement.text import visible
    from dpcore.statement.verify import holds

    found = _findings(path, ledger)
    good = all(holds(findings) for findings in found.values())
    if as_json:
        checks = {name: [asdict(finding) for finding in findings] for name, findings in found.items()}
        write_json({"holds": good, "path": str(path), "checks": checks.get("", checks)})
    else:
        for name, findings in found.items():
            if name:
                write_line(f"\n{visible(name)}")
            _table(findings)
        write_line(_verdict(found.values()))
    if not good:
        raise typer.Exit(1)


def _findings(path: Path, ledger: Path | None) -> dict[str, list[Finding]]:
    """Return what is found of each statement, and where `path` is a folder, of the files beside it."""
    from dpcore.cli.reports.folder import comparison_findings, folder_findings
    from dpcore.cli.reports.ledger_check import ledger_findings
    from dpcore.statement.verify import verify as check

    statements, whole = stored_in(path), overview(path)
    found = {}
    for name, (folder, content) in statements.items():
        found[name] = [*check(content), *(folder_findings(folder, content) if path.is_dir() else ())]
        if ledger is not None:
            found[name] += ledger_findings(content, ledger)
    if whole is not None:
        runs = {name: content for name, (_, content) in statements.items()}
        found["The comparison's own files"] = comparison_findings(path, whole, runs)
    return found


def _table(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    from dpcore.statement.text import visible

    styles = {"ok": "green", "failed": "bold red", "remark": "yellow", "trusted": "dim"}
    # Folded, never cut off: the end of a long word may be the figure.
    table = Table("check", "", Column("found", overflow="fold"), box=None, pad_edge=False, header_style="bold")
    for finding in findings:
        row = asdict(finding)
        style = styles[row["status"]]
        table.add_row(escape(row["check"]), f"[{style}]{row['status']}[/]", escape(visible(row["words"])))
    results().print(table)


def _verdict(found: Collection[list[Finding]]) -> str:
    counts = Counter(finding.status for findings in found for finding in findings)
    hold, are = ("holds" if counts["ok"] == 1 else "hold"), ("is" if counts["trusted"] == 1 else "are")
    beside = f"{counted(counts['ok'], 'check')} {hold}, {counted(counts['trusted'], 'point')} {are} taken on trust"
    if counts["remark"]:
        beside += f", {counted(counts['remark'], 'remark')}"
    if counts["failed"]:
        return f"\nDOES NOT HOLD: {counts['failed']} of the checks failed. {beside}."
    events = [finding for findings in found for finding in findings if finding.check in ("event", "event planned")]
    if any(finding.status == "trusted" for finding in events):
        return f"\nNothing contradicts the statement, but its epsilon rests on an event taken on trust: {beside}."
    return f"\nThe statement follows from its settings: {beside}."
