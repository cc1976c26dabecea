"""The `penstock` command.

Results go to standard output, as text for people or as JSON with `--json`. What Penstock refuses
or cannot do is one line on standard error, and exit code 1. `doctor` ends with the severity of what
it found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import penstock
from penstock.cli import demo_process, demo_render, demo_report, demo_spark, locate, render, upkeep
from penstock.cli import inspect as inspection
from penstock.cli.demo import MIN_DOCUMENTS
from penstock.cli.demo import Progress as DemoProgress
from penstock.errors import PenstockError
from penstock.memwal.doctor import diagnose
from penstock.memwal.inspect import Inspection
from penstock.memwal.status import TableStatus, table_status

app = typer.Typer(
    name="penstock",
    help="Lake tables that are live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Location = Annotated[str, typer.Argument(help="A table, or a database with tables.")]
Retain = Annotated[
    float, typer.Option(min=0.0, help="Keep what was needed at any time within so many seconds.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="A storage option, key=value; may be repeated."),
]


@contextmanager
def _reported() -> Iterator[None]:
    """Show what Penstock raises on purpose as one line, and end with exit code 1."""
    try:
        yield
    except PenstockError as error:
        message = " ".join(str(error).split())
        print(f"penstock: {message}", file=sys.stderr)
        raise typer.Exit(1) from None


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _console() -> Console:
    # Without a terminal, lines are as long as they need to be, so that other tools can read them.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 1000)


@app.command()
def demo(
    directory: Annotated[
        str, typer.Option("--dir", help="Where the demo's table goes; a local directory.")
    ] = "./demo-lake",
    documents: Annotated[
        int, typer.Option(min=MIN_DOCUMENTS, help="How many docstrings to stream.")
    ] = 6000,
    regions: Annotated[int, typer.Option(min=1, max=16, help="How many regions to use.")] = 4,
    without_spark: Annotated[
        bool, typer.Option("--without-spark", help="Let a plain process stream instead of Spark.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stream documents with Spark, search them, kill the driver half-way, count what was lost."""
    console = _console()
    with _reported():
        if "://" in directory:
            raise penstock.InvalidInput(f"the demo needs a local directory, not {directory}")
        if not without_spark:
            try:
                with _demo_bar(console, documents, as_json, "changes read") as progress:
                    streamed = demo_spark.run_demo(directory, documents, regions, progress)
            except demo_spark.SparkMissing as missing:
                why = " ".join(str(missing).split())
                print(f"penstock: the demo goes on without Spark: {why}", file=sys.stderr)
            else:
                _show_streamed(console, *streamed, as_json)
                return
        with _demo_bar(console, documents, as_json, "acknowledged") as progress:
            account, status = demo_process.run_demo(directory, documents, regions, progress)
        if as_json:
            _print_json({"account": account.to_dict(), "status": status.to_dict()})
        else:
            _show_demo(console, account, status)
    if not account.sound:
        raise typer.Exit(1)


@contextmanager
def _demo_bar(console: Console, total: int, as_json: bool, counted: str) -> Iterator[DemoProgress]:
    """A bar on a terminal; elsewhere a line for each step, and nothing beside JSON."""
    quiet = as_json or not console.is_terminal
    with Progress(
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(counted),
        TimeElapsedColumn(),
        console=console,
        disable=quiet,
    ) as bar:
        task = bar.add_task("starting", total=total)
        step = ""

        def progress(what: str, done: int, total: int | None = None) -> None:
            nonlocal step
            bar.update(task, description=what, completed=done, total=total)
            if what != step and not as_json and quiet:
                console.print(f"{what}, {done:,} {counted}")
            step = what

        yield progress


def _show_streamed(
    console: Console, account: demo_report.Account, status: TableStatus, as_json: bool
) -> None:
    if as_json:
        _print_json({"account": account.to_dict(), "status": status.to_dict()})
    else:
        demo_render.show_account(console, account)
        _show_around(console, status, account.sound)
    if not account.sound:
        raise typer.Exit(1)


def _show_demo(console: Console, account: demo_process.Account, status: TableStatus) -> None:
    console.print()
    console.print(render.account_table(account))
    console.print()
    console.print("[bold]The last document acknowledged before the kill[/]")
    if account.sample is None:
        console.print("[bold red]is gone[/]")
    else:
        row = {**account.sample, "body": account.sample["body"].partition("\n")[0]}
        console.print("  ".join(f"{name}: {value}" for name, value in row.items()), markup=False)
    console.print()
    console.print(str(status), markup=False, soft_wrap=True)
    _show_around(console, status, account.sound)


def _show_around(console: Console, status: TableStatus, is_sound: bool) -> None:
    console.print()
    console.print(f"Look around: penstock status {status.uri}", soft_wrap=True)
    region = f"{status.uri}/_mem_wal/{status.regions[0].region_id}"
    console.print(f"             penstock inspect {region}", soft_wrap=True)
    if not is_sound:
        console.print("[bold red]The account does not add up: this is a bug.[/]")


@app.command()
def status(
    uri: Location,
    option: Options = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
) -> None:
    """Show how far each layer of a table lags: regions, log, indexes, fragments."""
    with _reported():
        tables = locate.tables_at(uri, locate.storage_options(option or []))
        shown = 0
        with suppress(KeyboardInterrupt):
            for _ in upkeep.rounds(every if watch else None):
                statuses = [table_status(table) for table in tables]
                if as_json:
                    _print_json([one.to_dict() for one in statuses])
                else:
                    if shown and sys.stdout.isatty():
                        print("\x1b[2J\x1b[H", end="")
                    print("\n\n".join(map(str, statuses)), flush=True)
                shown += 1


@app.command()
def inspect(
    path: Annotated[
        str,
        typer.Argument(
            help="A WAL entry, region manifest, region, generation, packed file or table."
        ),
    ],
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Sample rows to show.")] = 3,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read and check every entry of a packed file.")
    ] = False,
    key_file: Annotated[
        str | None, typer.Option("--key-file", help="Keys for a packed file that is encrypted.")
    ] = None,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Explain what is stored at a path, field by field."""
    with _reported():
        report = inspection.inspect(
            path,
            locate.storage_options(option or []),
            rows,
            verify=verify,
            key_file=key_file,
        )
        if isinstance(report, Inspection):
            print(report.to_json() if as_json else report)
        elif as_json:
            _print_json(report)
        else:
            _console().print(render.tree(report))


@app.command()
def doctor(
    uri: Location,
    deep: Annotated[bool, typer.Option("--deep", help="Read every key, too.")] = False,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Say what is wrong with a table and what cures it.

    Exit code 0: healthy, 1: something wants attention, 2: something is sick.
    """
    with _reported():
        tables = locate.tables_at(uri, locate.storage_options(option or []))
        found = [diagnose(table, deep=deep) for table in tables]
        if as_json:
            _print_json([one.to_dict() for one in found])
        else:
            print("\n\n".join(map(str, found)))
    raise typer.Exit(max(int(one.severity) for one in found))


@app.command()
def maintain(
    uri: Location,
    every: Annotated[
        float | None, typer.Option(min=0.1, help="Go on, with so many seconds between rounds.")
    ] = None,
    budget_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Start nothing new after so long, each round.")
    ] = None,
    retain_seconds: Retain = 3600.0,
    recover: Annotated[
        bool,
        typer.Option("--recover", help="Flush what writers left that are gone; claims regions."),
    ] = False,
    option: Options = None,
) -> None:
    """Do what is due: merge, catch up indexes, compact, snapshot, clean up."""
    with _reported(), suppress(KeyboardInterrupt):
        tables = locate.live_tables(uri, locate.storage_options(option or []))
        console = _console()
        if every is not None:
            upkeep.give_way()
        for _ in upkeep.rounds(every):
            for table in tables:
                report = upkeep.maintain(
                    table,
                    console,
                    budget_seconds=budget_seconds,
                    retain_seconds=retain_seconds,
                    recover=recover,
                )
                print(f"{table.uri}\n{report}", flush=True)


@app.command()
def gc(
    uri: Location,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    retain_seconds: Retain = 3600.0,
    option: Options = None,
) -> None:
    """Remove what nothing needs any more, and say what and why."""
    with _reported():
        for table in locate.live_tables(uri, locate.storage_options(option or [])):
            report = table.gc(dry_run=dry_run, retain_seconds=retain_seconds)
            print(f"{table.uri}\n{report}")


@app.command()
def version() -> None:
    """Print the version of Penstock and of the libraries that decide its formats."""
    import lance
    import pyarrow as pa

    print(
        f"penstock {penstock.__version__} (pylance {lance.__version__}, pyarrow {pa.__version__})"
    )


if __name__ == "__main__":
    app()
