"""How reports look on a terminal. Plain data in, Rich renderables out; nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table as RichTable
from rich.tree import Tree

from penstock.cli.demo_process import Account


def account_table(account: Account) -> RenderableType:
    good, bad = "[bold green]", "[bold red]"

    def verdict(count: int) -> str:
        return f"{good if not count else bad}{count:,}[/]"

    table = RichTable(title="The account", title_justify="left", title_style="bold", box=None)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    lines: list[tuple[str, str, str]] = [
        ("documents", f"{account.documents:,}", f"in {account.regions} regions"),
        ("acknowledged", f"{account.acknowledged:,}", "reported after the call returned"),
        ("acknowledged at the kill", f"{account.acknowledged_at_kill:,}", "SIGKILL, half-way"),
        ("lost right after the kill", verdict(account.lost_after_kill), "read before recovery"),
        (
            "unacknowledged but there",
            f"{account.unacknowledged_at_kill:,}",
            "rows of the call under way",
        ),
        (
            "recovered from the WAL",
            f"{account.recovered_from_wal:,}",
            f"rows of {account.recovered_wal_entries:,} entries; the others were flushed",
        ),
        ("lost", verdict(account.lost), "of all acknowledged rows"),
        ("changed", verdict(account.changed), "compared column by column"),
        ("duplicates", verdict(account.duplicates), "unacknowledged rows were sent again"),
        (
            "epochs",
            f"{_numbers(account.epochs_before)} → {_numbers(account.epochs_after)}",
            "each claim raises a region's epoch",
        ),
        ("generations flushed", f"{account.generations:,}", "Lance datasets with their indexes"),
        (
            "durable write, median",
            f"{account.write_p50_ms:.1f} ms",
            f"{account.call_rows} rows a call, live indexes maintained",
        ),
        ("durable write, p99", f"{account.write_p99_ms:.1f} ms", ""),
        ("rows per second", f"{account.rows_per_second:,.0f}", "one thread, one call at a time"),
        ("time to recover", f"{account.recover_ms:.0f} ms", "claim, fence, replay"),
        ("back to writing", f"{account.restart_ms:.0f} ms", "with the start of a new process"),
    ]
    for line in lines:
        table.add_row(*line)
    return table


def _numbers(epochs: tuple[int, ...]) -> str:
    return ",".join(str(epoch) for epoch in epochs)


def tree(report: Mapping[str, Any]) -> RenderableType:
    """A report as a tree: one line a field, tables where rows are alike."""
    root = Tree(f"[bold]{escape(str(report['kind']))}[/]", guide_style="dim")
    for name, value in report.items():
        if name != "kind":
            _grow(root, name, value)
    return root


def _grow(above: Tree, name: str, value: Any) -> None:
    label = f"[cyan]{escape(name)}[/]"
    if isinstance(value, Mapping) and value:
        branch = above.add(label)
        for inner_name, inner in value.items():
            _grow(branch, inner_name, inner)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        branch = above.add(label)
        for item in value:
            if any(isinstance(inner, Mapping | list) and inner for inner in item.values()):
                head, *rest = item.items()
                twig = branch.add(f"{escape(head[0])}: {_text(head[1])}")
                for inner_name, inner in rest:
                    _grow(twig, inner_name, inner)
            else:
                branch.add("  ".join(f"[dim]{escape(k)}[/] {_text(v)}" for k, v in item.items()))
    else:
        above.add(f"{label}: {_text(value)}")


def _text(value: Any) -> str:
    if value is None:
        return "[dim]-[/]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return escape(", ".join(str(item) for item in value)) or "[dim]none[/]"
    if isinstance(value, Mapping):
        return "[dim]none[/]"
    return escape(str(value).replace("\n", " ⏎ "))
