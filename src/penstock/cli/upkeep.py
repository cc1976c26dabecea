"""The commands that keep tables healthy, as far as they are more than one call.

A round of maintenance shows a bar for each job on a terminal, and nothing but its summary
elsewhere. Rounds go on until they are interrupted, which ends them between two jobs' steps at
worst: every step is one commit or nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from penstock.memwal.maintain import MaintainReport
from penstock.storage.clock import SystemClock
from penstock.table import Table

_NICE = 19


def give_way() -> None:
    """Let whatever else the machine has to do go first, from now on.

    To be called before threads are started, which take it over.
    """
    os.nice(_NICE)
    if hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # where it is not allowed, the lowest priority has to do
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def rounds(every_seconds: float | None) -> Iterator[int]:
    """The numbers of rounds, with a pause between them; a single one without an interval."""
    clock = SystemClock()
    number = 0
    yield number
    while every_seconds is not None:
        clock.sleep_ms(every_seconds * 1000)
        number += 1
        yield number


def maintain(
    table: Table,
    console: Console,
    *,
    budget_seconds: float | None,
    retain_seconds: float,
    recover: bool,
) -> MaintainReport:
    """One round, after which the table's regions are anybody's again."""
    with Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        try:
            return table.maintain(
                budget_seconds=budget_seconds,
                retain_seconds=retain_seconds,
                recover=recover,
                on_progress=progress,
            )
        finally:
            table.close()
