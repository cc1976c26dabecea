"""Every error Penstock raises, in one hierarchy.

Each message says what happened, to which object, and what to do next. Callers catch
`PenstockError` for all of them, or a subclass where they can act on it. Bad input is also a
`ValueError`, so that code which knows nothing of Penstock treats it as such.
"""

from __future__ import annotations


class PenstockError(Exception):
    """The root of everything Penstock raises on purpose."""


class InvalidInput(PenstockError, ValueError):
    """The caller's data or arguments are wrong; nothing was changed."""


class TableNotFound(PenstockError):
    """No table of that name in the database."""


class TableExists(PenstockError):
    """A table of that name is there already."""


class NotATable(PenstockError):
    """The location holds something, but not a table Penstock can use."""


class VersionNotFound(PenstockError):
    """The table has no such version, or part of what it consists of was cleaned up."""


class Corruption(PenstockError):
    """Stored bytes do not mean what they must: a failed checksum, an unreadable manifest."""


class CommitConflict(PenstockError):
    """A commit kept losing to others until the retry limit; nothing was committed."""


# --- storage -------------------------------------------------------------------------------


class StorageError(PenstockError):
    """The object store failed; the outcome of the call is unknown unless a subclass says so."""


class ObjectNotFound(StorageError):
    """No object under that key."""


class ObjectExists(StorageError):
    """put_if_absent found an object under the key and wrote nothing."""


class PreconditionFailed(StorageError):
    """put_if_match found another version of the object and wrote nothing."""


class StoreUnsupported(StorageError):
    """The store cannot give what Penstock's safety rests on, such as conditional puts."""


# --- fencing -------------------------------------------------------------------------------


class Fenced(PenstockError):
    """Another writer claimed the region with a higher epoch; this writer must stop."""

    entry: tuple[int, bytes] | None = None
    """Position and write id of the WAL entry whose fate is unknown, if there was one."""


class RegionSealed(PenstockError):
    """The region's manifest is sealed; it takes no more writers."""


class ClaimContention(PenstockError):
    """Claiming a region kept losing to other claimants until the retry limit."""


class LeaseHeld(PenstockError):
    """Somebody else holds the lease and it has not expired."""


class LeaseLost(PenstockError):
    """The lease expired or was taken over while work was under way."""


# --- writers -------------------------------------------------------------------------------


class WriterClosed(PenstockError):
    """The writer was closed; open a new one."""


class WriterPoisoned(PenstockError):
    """An earlier failure left the writer unable to promise anything; open a new one."""

    entry: tuple[int, bytes] | None = None
    """Position and write id of the WAL entry whose fate is unknown, if there was one."""


class BackPressure(PenstockError):
    """Flushing could not keep up within the time limit; the write was not accepted."""


class AmbiguousWrite(PenstockError):
    """A write may or may not have happened, and repeating it could duplicate rows."""
