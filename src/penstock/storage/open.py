"""From a URI to a store: the one place that knows which schemes there are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from penstock.errors import InvalidInput
from penstock.storage.local import LocalStore
from penstock.storage.objects import ObjectStore

SCHEMES = "a path, file://, memory://, s3://, gs:// or az://"


def open_store(
    uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
) -> ObjectStore:
    """The store rooted at `uri`. `storage_options` is the dict that Lance takes, as it is."""
    location = os.fspath(uri)
    if not location or "\0" in location:
        raise InvalidInput(f"{location!r} is not a location; give {SCHEMES}")
    if "://" not in location:
        return LocalStore(location)
    parts = urlsplit(location)
    if parts.query or parts.fragment or parts.username:
        raise InvalidInput(
            f"{location!r} carries a query, a fragment or credentials; "
            f"give them as storage_options instead"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidInput(
                f"{location!r} names a file on another host; mount it and use a path"
            )
        return LocalStore(unquote(parts.path) or "/")

    # Only here, so that a local table does not wait for the object-store library to load.
    from penstock.storage import remote

    if parts.scheme not in remote.SCHEMES:
        raise InvalidInput(f"{location!r} has a scheme Penstock does not know; give {SCHEMES}")
    if parts.scheme != "memory" and not parts.netloc:
        raise InvalidInput(f"{location!r} does not name a bucket or container")
    return remote.open_remote(
        parts.scheme, parts.netloc, unquote(parts.path).strip("/"), dict(storage_options or {})
    )
