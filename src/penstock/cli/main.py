"""The `penstock` command.

Results go to standard output, as text for people or as JSON with `--json`. What Penstock refuses
or cannot do is one line on standard error, and exit code 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import penstock
from penstock.cli import demo as demonstration
from penstock.cli import inspect as inspection
from penstock.cli import locate, render
from penstock.errors import PenstockError
from penstock.memwal.status import table_status

app = typer.Typer(
    name="penstock",
    help="Lake tables that are live.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
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
        int,
        typer.Option(min=demonstration.MIN_DOCUMENTS, help="How many docstrings to stream."),
    ] = 6000,
    regions: Annotated[int, typer.Option(min=1, max=16, help="How many regions to use.")] = 4,
    as_json: Json = False,
) -> None:
    """Stream documents in, kill the writer half-way, recover, count what was lost."""
    console = _console()
    with _reported():
        if "://" in directory:
            raise penstock.InvalidInput(f"the demo needs a local directory, not {directory}")
        quiet = as_json or not console.is_terminal
        with Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("acknowledged"),
            TimeElapsedColumn(),
            console=console,
            disable=quiet,
        ) as bar:
            task = bar.add_task("starting", total=documents)
            step = ""

            def progress(what: str, acknowledged: int) -> None:
                nonlocal step
                bar.update(task, description=what, completed=acknowledged)
                if what != step and not as_json and quiet:
                    console.print(f"{what}, {acknowledged:,} acknowledged")
                step = what

            account, status = demonstration.run_demo(directory, documents, regions, progress)
        if as_json:
            _print_json({"account": account.to_dict(), "status": status.to_dict()})
        else:
            _show_demo(console, account, status)
    if not account.sound:
        raise typer.Exit(1)


def _show_demo(console: Console, account: demonstration.Account, status: Any) -> None:
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
    console.print(render.status_table(status))
    console.print()
    console.print(f"Look around: penstock status {status.uri}", soft_wrap=True)
    region = f"{status.uri}/_mem_wal/{status.regions[0].region_id}"
    console.print(f"             penstock inspect {region}", soft_wrap=True)
    if not account.sound:
        console.print("[bold red]The account does not add up: this is a bug.[/]")


@app.command()
def status(
    uri: Annotated[str, typer.Argument(help="A table, or a database with tables.")],
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Show a table's regions: epochs, generations, how far each layer lags."""
    with _reported():
        options = locate.storage_options(option or [])
        statuses = [table_status(table) for table in locate.tables_at(uri, options)]
        if as_json:
            _print_json([one.to_dict() for one in statuses])
            return
        console = _console()
        for number, one in enumerate(statuses):
            if number:
                console.print()
            console.print(render.status_table(one), soft_wrap=True)


@app.command()
def inspect(
    path: Annotated[
        str, typer.Argument(help="A WAL entry, region manifest, region, generation or table.")
    ],
    rows: Annotated[int, typer.Option(min=0, max=1000, help="Sample rows to show.")] = 3,
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Explain what is stored at a path, field by field."""
    with _reported():
        report = inspection.inspect(path, locate.storage_options(option or []), rows)
        if as_json:
            _print_json(report)
        else:
            _console().print(render.tree(report))


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
