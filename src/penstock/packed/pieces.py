"""How an entry is cut for reading: what is fetched at once, and where its plaintext belongs."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.packed.layout import MAGIC_BYTES, Encryption, EntryInfo, plain_slice_bytes

RANGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read at once: a range of a plain entry, slices in a row of an encrypted one."""

    start: int
    """Its first byte in the file."""
    stored_bytes: int
    at: int
    """Its first byte in the plaintext."""
    size: int
    slices: range
    """Numbers of its slices, if the entry is encrypted."""

    @property
    def end(self) -> int:
        return self.start + self.stored_bytes


def pieces_of(entry: EntryInfo, encryption: Encryption | None) -> list[Piece]:
    """Ranges of a plain entry, or groups of adjacent slices, of about 16 MiB each.

    An empty entry has none, and a slice that is larger than a range is a piece of its own.
    """
    if encryption is None:
        start = MAGIC_BYTES + entry.slices[0].offset
        return [
            Piece(start + at, size, at, size, range(0))
            for at in range(0, entry.size, RANGE_BYTES)
            for size in [min(RANGE_BYTES, entry.size - at)]
        ]
    step = encryption.slice_size
    pieces: list[Piece] = []
    for number, stored in enumerate(entry.slices):
        size = plain_slice_bytes(entry, number, step)
        start = MAGIC_BYTES + stored.offset
        last = pieces[-1] if pieces else None
        if last and last.end == start and last.size + size <= RANGE_BYTES:
            pieces[-1] = Piece(
                last.start,
                last.stored_bytes + stored.size,
                last.at,
                last.size + size,
                range(last.slices.start, number + 1),
            )
        else:
            pieces.append(Piece(start, stored.size, number * step, size, range(number, number + 1)))
    return pieces
