"""Findings, which are the results of checks, and functions that show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

from rich.console import Console
from rich.text import Text

from kerasdist.cli.formatting import table
from kerasdist.core.user_warnings import plural

Verdict = Literal["ok", "warning", "problem"]

_STYLES: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@final
@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: What was checked.
        verdict: ``"ok"``; ``"warning"``, if a job may be slow, or may fail in some cases; or
            ``"problem"``, if a job will fail or give wrong results.
        found: What the check has found.
        meaning: What this means for a job, and what to do.
        where: The hosts that were checked; empty without ``--hosts``, and in ``kerasdist test``.
    """

    check: str
    verdict: Verdict
    found: str
    meaning: str
    where: str = ""


def judge(
    check: str, found: str, ok: str, *, warning: str = "", problem: str = "", where: str = ""
) -> Finding:
    """Returns a finding, with one of the texts `problem`, `warning` and `ok` as its `meaning`.

    This is the first of the three texts that is not empty. The argument's name is the verdict.
    """
    verdict: Verdict = "problem" if problem else "warning" if warning else "ok"
    return Finding(check, verdict, found, problem or warning or ok, where)


def is_failed(findings: Iterable[Finding]) -> bool:
    """Returns whether one of the findings is a problem."""
    return any(finding.verdict == "problem" for finding in findings)


def as_dicts(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Returns the findings as dicts, for JSON."""
    return [asdict(finding) for finding in findings]


def of_dicts(given: Iterable[dict[str, Any]], where: str) -> list[Finding]:
    """Returns the findings that another process has sent as dicts, and sets their `where`."""
    return [Finding(**{**one, "where": where}) for one in given]


def show(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Prints a table for human readers, and the number of problems and warnings."""
    several = any(finding.where for finding in findings)
    headings = (*(("where",) if several else ()), "check", "", "found", "what it means for a job")
    shown = table(title, headings, left=len(headings))
    for one in findings:
        where = (one.where,) if several else ()
        verdict = Text(one.verdict, _STYLES[one.verdict])
        shown.add_row(*where, one.check, verdict, one.found, one.meaning)
    console.print(shown)
    counts = {kind: sum(one.verdict == kind for one in findings) for kind in _STYLES}
    kind: Verdict = "problem" if counts["problem"] else "warning" if counts["warning"] else "ok"
    console.print(
        f"{counts['ok']} ok, {plural(counts['warning'], 'warning')}, "
        f"{plural(counts['problem'], 'problem')}",
        style=_STYLES[kind],
    )
