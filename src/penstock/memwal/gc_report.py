"""What clean-up removes and what it keeps, and why, in a form for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

NO_VERSION_NAMES = "no version names them"
LEFT_BY_A_CRASH = "left by a crash"
NO_MANIFEST_LISTS = "no manifest lists the generation"
NEVER_NAMED = frozenset((NO_VERSION_NAMES, LEFT_BY_A_CRASH, NO_MANIFEST_LISTS))
"""Why something goes that nothing ever named, as what a crash leaves."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Doomed:
    """A file that may go, or a directory with everything below it."""

    key: str
    what: str
    why: str
    size_bytes: int
    files: int = 1
    directory: bool = False


@dataclass(frozen=True, slots=True)
class GcLine:
    """Files of one kind with one fate."""

    what: str
    why: str
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GcReport:
    removed: tuple[GcLine, ...] = ()
    kept: tuple[GcLine, ...] = ()
    """What could be expected to go, and has to stay for now."""
    unknown: tuple[str, ...] = ()
    """What is not Penstock's nor Lance's; it is never removed."""
    dry_run: bool = False

    @property
    def files(self) -> int:
        return sum(line.files for line in self.removed)

    @property
    def size_bytes(self) -> int:
        return sum(line.size_bytes for line in self.removed)

    def __str__(self) -> str:
        done = "would be removed" if self.dry_run else "removed"
        lines = [f"{self.files} files, {_readable(self.size_bytes)}, {done}"]
        for title, found in ((done, self.removed), ("kept", self.kept)):
            lines += [
                f"  {title:<16}  {line.files:>7} files  {_readable(line.size_bytes):>10}  "
                f"{line.what}: {line.why}"
                for line in found
            ]
        lines += [f"  not ours, left    {name}" for name in self.unknown]
        return "\n".join(lines)


def lines_of(found: Iterable[Doomed]) -> tuple[GcLine, ...]:
    """Files and directories, by kind and reason."""
    return added(GcLine(one.what, one.why, one.files, one.size_bytes) for one in found)


def added(lines: Iterable[GcLine]) -> tuple[GcLine, ...]:
    """Lines of the same kind and reason as one."""
    files: Counter[tuple[str, str]] = Counter()
    size_bytes: Counter[tuple[str, str]] = Counter()
    for line in lines:
        files[line.what, line.why] += line.files
        size_bytes[line.what, line.why] += line.size_bytes
    return tuple(GcLine(*kind, files[kind], size_bytes[kind]) for kind in sorted(files))


def _readable(size_bytes: int) -> str:
    size, unit = float(size_bytes), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size /= 1024
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"
