"""Does the store really honour conditional puts? Asked once, before anything relies on it.

Every guarantee of Penstock (one winner per WAL position, per manifest version, per lease token)
is a conditional put. Some stores and proxies accept the header and ignore it, which loses data
silently, so a store is refused unless it passes:

- of eight threads that create one key at once exactly one succeeds, and its bytes stay;
- creating an existing key is refused;
- a replacement with the current etag succeeds, and one with the etag before it is refused.

It costs about fourteen small requests on one key below `_penstock/`, which it removes again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from penstock.errors import ObjectExists, PreconditionFailed, StoreUnsupported
from penstock.storage.entropy import Entropy, SystemEntropy
from penstock.storage.objects import ObjectStore

RACERS = 8
ATTEMPTS = 3

_REMEDY = (
    "Penstock would lose data on it; use a store with conditional puts (S3, GCS, Azure, R2, a "
    "recent MinIO or Ceph, a local disk), and check that no proxy strips If-Match and If-None-Match"
)


def probe_conditional_puts(store: ObjectStore, entropy: Entropy | None = None) -> None:
    """Return if the store is safe to use, else raise `StoreUnsupported`."""
    draw = entropy or SystemEntropy()
    for _ in range(ATTEMPTS):
        key = f"_penstock/probe-{draw.token_bytes(8).hex()}"
        try:
            if _passes(store, key):
                return
        finally:
            store.delete(key)
    raise _refusal(store, "no one of several threads that create an object at once succeeds")


def _passes(store: ObjectStore, key: str) -> bool:
    """False if nobody won the race, which a transport that repeats requests can bring about."""
    bodies = [f"probe {racer}".encode() for racer in range(RACERS)]
    with ThreadPoolExecutor(RACERS, "penstock-probe") as pool:
        won = list(pool.map(lambda body: _created(store, key, body), bodies))
    winners = [body for body, mine in zip(bodies, won, strict=True) if mine]
    if not winners:
        return False
    if len(winners) > 1:
        raise _refusal(store, f"{len(winners)} threads at once created the same object")
    found = store.get(key)
    if bytes(found.data) != winners[0]:
        raise _refusal(store, "an object created only if absent was overwritten")
    if _created(store, key, b"second"):
        raise _refusal(store, "an existing object was created again")
    if not _replaced(store, key, b"replaced", found.etag):
        # The echo of a repeated request looks the same; only if nothing changed is it a refusal.
        if bytes(store.get(key).data) != b"replaced":
            raise _refusal(store, "a replacement with the current etag was refused")
        return False
    if _replaced(store, key, b"stale", found.etag):
        raise _refusal(store, "a replacement with an outdated etag was accepted")
    if bytes(store.get(key).data) != b"replaced":
        raise _refusal(store, "a refused replacement changed the object")
    return True


def _created(store: ObjectStore, key: str, body: bytes) -> bool:
    try:
        store.put_if_absent(key, body)
    except ObjectExists:
        return False
    return True


def _replaced(store: ObjectStore, key: str, body: bytes, etag: str) -> bool:
    try:
        store.put_if_match(key, body, etag)
    except PreconditionFailed:
        return False
    return True


def _refusal(store: ObjectStore, what: str) -> StoreUnsupported:
    return StoreUnsupported(f"{store.uri} does not honour conditional puts: {what}. {_REMEDY}")
