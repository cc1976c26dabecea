"""How the streaming demo's account looks on a terminal; nothing is computed here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from penstock.cli.demo_report import Account, Files, Latency

_Line = tuple[str, str, str]


def show_account(console: Console, account: Account) -> None:
    for title, lines in (
        ("The stream", _stream(account)),
        ("The kill", _kill(account)),
    ):
        console.print()
        console.print(_lines(title, lines))
    console.print()
    console.print(_reads(account))
    console.print()
    console.print(_files(account))
    console.print()
    console.print(_lines("The account", _account(account)))


def _stream(account: Account) -> list[_Line]:
    changes = account.upserts + account.deletes
    steady = account.batches
    burst = account.burst_batches
    return [
        (
            "changes",
            f"{changes:,}",
            f"{account.upserts:,} upserts, {account.deletes:,} deletes; "
            f"{account.loaded:,} rows before it",
        ),
        (
            "steady",
            f"{account.steady_rows_per_second:,.0f} rows/s",
            f"as offered, a file every {account.interval_ms:.0f} ms, the kill included",
        ),
        (
            "burst",
            f"{account.burst_rows_per_second:,.0f} rows/s",
            f"{account.burst_rows:,} changes in {account.burst_files} files at once, until all "
            "are read",
        ),
        (
            "micro-batch, steady",
            _pair(steady),
            "median / p99; the time of a trigger, as Spark says",
        ),
        ("micro-batch, burst", _pair(burst), "median / p99"),
        (
            "freshness",
            _pair(account.freshness),
            "median / p99; from the source until it is read elsewhere",
        ),
        (
            "rounds of the pipeline",
            f"{account.pipeline_rounds:,}",
            "merge, index, compact, clean up; of the second driver",
        ),
    ]


def _kill(account: Account) -> list[_Line]:
    again = account.replayed_batches
    return [
        (
            "files at the kill",
            f"{account.seen_at_kill} of {account.written_at_kill}",
            "read, of those in the source; SIGKILL to driver and Java",
        ),
        ("batches run again", f"{again}", "begun and not recorded as done by Spark"),
        (
            "lost right after the kill",
            _verdict(account.lost_after_kill),
            "every key, read before another driver writes",
        ),
        (
            "back to streaming",
            f"{account.restart_ms / 1000:.1f} s",
            "until the next rows are read, with Spark's start",
        ),
        (
            "longest wait of a file",
            f"{account.freshness_across_kill_ms / 1000:.1f} s",
            f"across the kill; the first start took {account.start_ms / 1000:.1f} s",
        ),
    ]


def _account(account: Account) -> list[_Line]:
    lines = [
        ("rows", f"{account.rows:,}", f"in {account.regions} regions"),
        ("lost", _verdict(account.lost), "row by row, of the live table and of plain Lance"),
        ("changed", _verdict(account.changed), "column by column"),
        ("twice", _verdict(account.duplicates), "though a driver died in the middle"),
        ("deleted and back again", _verdict(account.came_back), "of all rows that should be gone"),
        ("reads that failed", _verdict(account.failed_reads), "while everything went on"),
        (
            "reads that were wrong",
            _verdict(account.wrong_reads),
            "older than what was read before, or deleted by then",
        ),
        (
            "plain Lance sees",
            "[bold green]the table[/]" if not _differences(account) else "[bold red]another one[/]",
            "lance.dataset(…) after maintenance",
        ),
    ]
    if account.first_failure:
        lines.append(("the first of these", "", account.first_failure))
    return lines


def _differences(account: Account) -> int:
    plain = account.plain
    return plain.lost + plain.changed + plain.duplicates + plain.extra


def _reads(account: Account) -> RichTable:
    table = _table("Reads while it streamed")
    for head in ("", "reads", "median", "p99", "longest"):
        table.add_column(head, justify="right" if head else "left", style=None if head else "dim")
    for kind, times in account.reads.items():
        figures = (times.p50_ms, times.p99_ms, times.max_ms)
        table.add_row(kind, f"{times.count:,}", *(f"{ms:.1f} ms" for ms in figures))
    return table


def _files(account: Account) -> RichTable:
    table = _table("Files")
    for head in ("", "at the kill", "end of stream", "after maintenance"):
        table.add_column(head, justify="right" if head else "left", style=None if head else "dim")
    moments = (account.at_kill, account.before, account.after)
    for name, what in (
        ("log entries not flushed", "log_entries"),
        ("generations so far", "generations"),
        ("not merged of them", "unmerged_generations"),
        ("fragments", "fragments"),
        ("under 100,000 rows", "small_fragments"),
        ("deleted rows in them", "deleted_rows"),
        ("rows the index lacks", "uncovered_rows"),
        ("versions", "versions"),
        ("files in all", "files"),
    ):
        table.add_row(name, *(_number(moment, what) for moment in moments))
    table.add_row("megabytes", *(f"{moment.megabytes:.1f}" for moment in moments))
    table.add_row("recall@10", "", f"{account.recall_before:.3f}", f"{account.recall_after:.3f}")
    return table


def _number(files: Files, what: str) -> str:
    return f"{getattr(files, what):,}"


def _lines(title: str, lines: list[_Line]) -> RichTable:
    table = _table(title)
    table.show_header = False
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for line in lines:
        table.add_row(*line)
    return table


def _table(title: str) -> RichTable:
    return RichTable(
        title=title, title_justify="left", title_style="bold", box=None, header_style="dim"
    )


def _pair(times: Latency) -> str:
    return f"{times.p50_ms:,.0f} / {times.p99_ms:,.0f} ms"


def _verdict(count: int) -> str:
    return f"{'[bold green]' if not count else '[bold red]'}{count:,}[/]"
