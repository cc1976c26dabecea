"""How reports about a table look as text: aligned columns, numbers and times that people read.

Everything fits 100 columns, so that it can be pasted anywhere. Plain values in, text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 100
_GAP = "  "
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def grid(headers: Sequence[str], rows: Sequence[Sequence[object]], indent: int = 2) -> str:
    """Rows under headers. Columns of numbers go to the right; the last one is cut to fit."""
    cells = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    right = [
        bool(rows) and all(row[at] is None or _is_number(row[at]) for row in rows)
        for at in range(len(headers))
    ]

    def line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if to_right else value.ljust(width)
            for value, width, to_right in zip(values, widths, right, strict=True)
        ]
        return cut(" " * indent + _GAP.join(padded).rstrip())

    return "\n".join([line(headers), *map(line, cells)])


def cell(value: object) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)


def cut(text: str, width: int = WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def size(size_bytes: int | None) -> str:
    """So many bytes, in the unit that leaves one to four digits."""
    if size_bytes is None:
        return "-"
    amount, unit = float(size_bytes), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{size_bytes:,} B" if unit == 0 else f"{amount:.1f} {_UNITS[unit]}"


def age(seconds: float | None) -> str:
    """How long ago, in one or two units: `40 s`, `12 min`, `3 h 20 min`, `5 d`."""
    if seconds is None:
        return "-"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if minutes < 120:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "0%"


def counted(number: int, thing: str) -> str:
    """`1 region`, `2 regions`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {_plural(thing)}"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: `0-3,5`; `none` where there are none."""
    return spans(runs(numbers)) or "none"


def spans(pairs: Iterable[tuple[int, int]]) -> str:
    """First and last numbers as text."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """The runs of consecutive numbers, each with its first and last."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def _plural(thing: str) -> str:
    if thing.endswith("x"):
        return f"{thing}es"
    return f"{thing[:-1]}ies" if thing.endswith(("ry", "ty")) else f"{thing}s"


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (
        isinstance(value, str) and value.split(" ")[0].replace(".", "").replace(",", "").isdecimal()
    )
