"""Paths that files can have, and files that wait beside the one whose name they will take."""

from __future__ import annotations

import itertools
import os

from penstock.errors import InvalidInput, StorageError

DRAFT_ATTEMPTS = 100

_SERIALS = itertools.count()


def absolute(path: str | os.PathLike[str]) -> str:
    """The whole path, if a file can have it."""
    try:
        location = os.path.abspath(os.fsdecode(path))
        if b"\0" not in os.fsencode(location):
            return location
        reason = "there is a null in it"
    except (TypeError, UnicodeError) as error:
        reason = str(error)
    raise InvalidInput(f"{path!r} is no path of a file: {reason}")


def new_draft(path: str, size_bytes: int) -> str:
    """A file beside the one that is to be, so that it can take its name; nobody else uses it."""
    for serial in itertools.islice(_SERIALS, DRAFT_ATTEMPTS):
        draft = os.path.join(os.path.dirname(path), f".{os.getpid()}-{serial}.part")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            # Of a process that died and had the same number.
            continue
        try:
            os.ftruncate(file, size_bytes)
        except BaseException:
            os.unlink(draft)
            raise
        finally:
            os.close(file)
        return draft
    raise StorageError(f"{os.path.dirname(path)} is full of files named .*.part; remove them")
