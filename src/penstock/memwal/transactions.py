"""Writes that count once, however often they are sent.

An application numbers its writes: a stream its micro-batches, a job its runs. Each region keeps
the last number of every application that it has taken rows of, and a write with that number or a
lower one changes nothing. Number and rows become durable together: in one WAL entry, whose write
id is then the application and the number, or in one manifest, when the rows come as generations.

    WAL entry --replayed at a claim--> writer --with the generation, at a flush--> manifest

So whoever claims a region knows what was written to it, and a write that is sent again by a
process that took another one for dead is refused by epochs like any other.

Only our manifests have these numbers. If a writer of Lance takes a region over, its next manifest
forgets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from penstock.errors import InvalidInput

APPLICATION_BYTES = 8
MAX_NUMBER = 2**63 - 1
MAX_APPLICATIONS = 1_000
"""A region forgets the applications that have not written to it for the longest time."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """One write of an application to a region."""

    application: bytes
    """A hash of its name."""
    number: int

    @classmethod
    def named(cls, name: str, number: int) -> Transaction:
        if not isinstance(name, str) or not name:
            raise InvalidInput(f"a transaction needs the name of an application, not {name!r}")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_NUMBER:
            raise InvalidInput(
                f"the number of a transaction of {name!r} must be a whole number from 0 to "
                f"2^63 - 1, not {number!r}"
            )
        return cls(xxhash.xxh3_64_digest(name.encode()), number)

    @classmethod
    def of_write_id(cls, write_id: bytes) -> Transaction:
        number = int.from_bytes(write_id[APPLICATION_BYTES:], "big")
        return cls(write_id[:APPLICATION_BYTES], number)

    @property
    def write_id(self) -> bytes:
        return self.application + self.number.to_bytes(8, "big")

    @property
    def done(self) -> dict[bytes, int]:
        return {self.application: self.number}

    def is_in(self, done: Mapping[bytes, int]) -> bool:
        """Whether it, or a later one of its application, was written already."""
        return done.get(self.application, -1) >= self.number


def joined(*several: Mapping[bytes, int]) -> dict[bytes, int]:
    """The last number of each application, that which wrote last at the end; later ones count."""
    last: dict[bytes, int] = {}
    for done in several:
        for application, number in done.items():
            last[application] = max(number, last.pop(application, -1))
    return dict(list(last.items())[-MAX_APPLICATIONS:])
