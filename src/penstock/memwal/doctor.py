"""What is wrong with a table, how bad it is, and which command cures it.

    table --diagnose--> checks, each a function of the ward --> findings --> Diagnosis

A check that finds nothing says in one line what it looked at. Something that cannot be read is a
finding of the check that met it, and the others go on. Nothing is ever changed.

The table may change while it is looked at: a generation that was merged and removed in between
seems to be missing. So whatever looks sick is looked at a second time, and only what is found both
times is told.
"""

from __future__ import annotations

import shlex
import textwrap
import uuid
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from penstock.errors import NotATable, PenstockError
from penstock.memwal import doctor_checks as checks
from penstock.memwal import tabular
from penstock.memwal.base_table import BaseTable
from penstock.memwal.doctor_checks import Limits, Trouble, Ward

_INDENT = " " * 13


class Severity(IntEnum):
    OK = 0
    ATTENTION = 1
    """Reads are right, but slower or dearer than they need to be, or will be."""
    SICK = 2
    """Rows cannot be read, or are in danger."""


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    check: str
    where: str
    what: str
    cure: str | None = None
    """Python that cures it, given the `table`; None where no command can."""
    command: str | None = None
    """The same on the command line."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    uri: str
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        return max((finding.severity for finding in self.findings), default=Severity.OK)

    @property
    def healthy(self) -> bool:
        return self.severity is Severity.OK

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that are not fine, the worst first."""
        found = [finding for finding in self.findings if finding.severity is not Severity.OK]
        return tuple(sorted(found, key=lambda finding: -finding.severity))

    def to_dict(self) -> dict[str, Any]:
        findings = [
            asdict(finding) | {"severity": finding.severity.name.lower()}
            for finding in self.findings
        ]
        return {
            "uri": self.uri,
            "healthy": self.healthy,
            "severity": self.severity.name.lower(),
            "findings": findings,
        }

    def __str__(self) -> str:
        said = "healthy" if self.healthy else self.severity.name.lower()
        fine = [finding for finding in self.findings if finding.severity is Severity.OK]
        lines = [f"{self.uri}: {said}"]
        for finding in self.problems:
            lines.append(f"  {finding.severity.name.lower():9}  {finding.check}: {finding.where}")
            lines += textwrap.wrap(
                finding.what,
                tabular.WIDTH,
                initial_indent=_INDENT,
                subsequent_indent=_INDENT,
                break_long_words=False,
                break_on_hyphens=False,
            )
            cures = [cure for cure in (finding.cure, finding.command) if cure is not None]
            lines += [
                f"{_INDENT}{'cure' if at == 0 else '  or'}: {c}" for at, c in enumerate(cures)
            ]
        lines += [f"  {'ok':9}  {finding.check}: {finding.what}" for finding in fine]
        return "\n".join(lines)


def diagnose(
    table: BaseTable,
    *,
    deep: bool = False,
    held: Collection[uuid.UUID] = (),
    limits: Limits | None = None,
) -> Diagnosis:
    """Examine a table; `deep` also reads every key of the base table.

    `held` are regions that a writer of this process owns, whose logs are nobody else's business.
    """
    look = partial(_examine, table, deep, frozenset(held), limits or Limits())
    findings = look()
    if any(finding.severity is Severity.SICK for finding in findings):
        again = {(finding.check, finding.where) for finding in look()}
        findings = [
            finding
            for finding in findings
            if finding.severity is not Severity.SICK or (finding.check, finding.where) in again
        ]
    return Diagnosis(table.uri, tuple(findings))


_CHECKS: tuple[tuple[str, Callable[[Ward], Iterable[Trouble | str]]], ...] = (
    ("files", checks.base_files),
    ("regions", checks.region_manifests),
    ("log", checks.logs),
    ("generations", checks.generations),
    ("merge", checks.merge_lag),
    ("region specs", checks.region_specs),
    ("indexes", checks.index_lag),
    ("fragments", checks.fragments),
    ("deletions", checks.deletions),
    ("snapshot", checks.snapshot),
    ("versions", checks.versions),
    ("orphans", checks.orphans),
)


def _examine(
    table: BaseTable, deep: bool, held: frozenset[uuid.UUID], limits: Limits
) -> list[Finding]:
    try:
        ward = checks.admit(table, held, limits)
    except NotATable as error:
        missing = "MemWAL index" in str(error)
        cure = "db.open_table(table.name, adopt=True)" if missing else None
        return [Finding(Severity.SICK, "base table", table.uri, _line(error), cure)]
    except (PenstockError, OSError, ValueError) as error:
        return [Finding(Severity.SICK, "base table", table.uri, _line(error))]
    findings: list[Finding] = []
    chosen = [*_CHECKS, ("keys", checks.duplicate_keys)] if deep else _CHECKS
    for name, check in chosen:
        findings += _run(name, check, ward)
    return findings


def _run(name: str, check: Callable[[Ward], Iterable[Trouble | str]], ward: Ward) -> list[Finding]:
    found: list[Finding] = []
    try:
        for said in check(ward):
            if isinstance(said, str):
                found.append(Finding(Severity.OK, name, ward.table.uri, said))
            else:
                found.append(_finding(name, said, ward.table.uri))
    except (PenstockError, OSError, ValueError) as error:
        found.append(Finding(Severity.SICK, name, ward.table.uri, _line(error)))
    return found


def _finding(check: str, trouble: Trouble, uri: str) -> Finding:
    severity = Severity.SICK if trouble.sick else Severity.ATTENTION
    command = trouble.command
    if command is not None:
        program, _, options = command.partition(" ")
        command = " ".join(filter(None, ["penstock", program, shlex.quote(uri), options]))
    return Finding(severity, check, trouble.where, trouble.what, trouble.cure, command)


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
