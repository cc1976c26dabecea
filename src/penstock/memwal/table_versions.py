"""The versions of a base table: which there are, and what their manifests say.

Every version has a manifest, named after its number. Its last bytes say where in it the message
is, and the message where the section of indexes is, with the MemWAL index among them. What is asked
again and again, whether a version is still the newest, takes a few requests and no listing.

Invariant: versions are removed in ascending order; where one is kept while the next one goes, that
is written down before (`names.gap_key`).
"""

from __future__ import annotations

import struct
import uuid
from typing import Any

from penstock.errors import Corruption, NotATable, ObjectNotFound
from penstock.memwal import names, wire
from penstock.memwal.index_details import INDEX_NAME, MemWalIndexDetails
from penstock.memwal.row_versions import FIRST_DETACHED
from penstock.storage.objects import ObjectStore

FOOTER = struct.Struct("<QHH4s")
LAST_VERSION = 2**64 - 1
_REVERSED_DIGITS = 20


def read_details(store: ObjectStore, version: int) -> tuple[MemWalIndexDetails, uuid.UUID] | None:
    """The MemWAL index of a version and its uuid, or None if the table has none."""
    where = f"{store.uri} version {version}"
    index = mem_wal_index(parse_manifest(manifest_bytes(store, version), where)[1])
    if index is None:
        return None
    details = MemWalIndexDetails.decode(index.index_details.value, where)
    return details, uuid.UUID(bytes=bytes(index.uuid.uuid))


def last_fragment_id(store: ObjectStore, version: int) -> int:
    """The highest number that a fragment has had up to a version, or -1."""
    manifest, _ = parse_manifest(manifest_bytes(store, version), f"{store.uri} version {version}")
    return int(manifest.max_fragment_id) if manifest.HasField("max_fragment_id") else -1


def parse_manifest(data: bytes, where: str) -> tuple[Any, Any]:
    """A manifest and its section of indexes, which may have none."""
    section = wire.new("IndexSection")
    try:
        at, _, _, magic = FOOTER.unpack(data[-FOOTER.size :])
        if magic != b"LANC":
            raise ValueError(f"its last bytes are {magic!r}")
        manifest = wire.new("TableManifest")
        manifest.ParseFromString(section_at(data, at))
        if manifest.HasField("index_section"):
            section.ParseFromString(section_at(data, manifest.index_section))
    except (ValueError, struct.error, wire.DecodeError) as error:
        raise Corruption(f"the manifest of {where} cannot be read: {error}") from error
    return manifest, section


def mem_wal_index(section: Any) -> Any | None:
    """The MemWAL index of a manifest's section of indexes, as it is stored."""
    return next((index for index in section.indices if index.name == INDEX_NAME), None)


def last_details(store: ObjectStore) -> MemWalIndexDetails | None:
    """The MemWAL index of the newest version that has one."""
    for version in reversed(list_versions(store)):
        found = read_details(store, version)
        if found is not None:
            return found[0]
    return None


def is_latest_version(store: ObjectStore, version: int) -> bool:
    """Whether a version exists and its successor does not.

    Old versions are removed in ascending order, so a version that is still there after its
    successor was found missing is the newest; unless it was kept while its successor went, which
    is written down before and forgotten only when it is gone itself.
    """
    for name, following in zip(manifest_names(version), manifest_names(version + 1), strict=True):
        if store.exists(f"_versions/{following}.manifest"):
            return False
        if store.exists(names.gap_key(version)):
            return False
        if store.exists(f"_versions/{name}.manifest"):
            return True
    return False


def version_exists(store: ObjectStore, version: int) -> bool:
    return 0 < version < FIRST_DETACHED and manifest_key(store, version) is not None


def manifest_key(store: ObjectStore, version: int) -> str | None:
    """Where the manifest of a version is, or None if there is none."""
    keys = (f"_versions/{name}.manifest" for name in manifest_names(version))
    return next((key for key in keys if store.exists(key)), None)


def list_versions(store: ObjectStore) -> list[int]:
    """Every version that has a manifest, ascending."""
    found = (version_of(meta.key) for meta in store.list("_versions"))
    return sorted(version for version in found if version is not None)


def version_of(key: str) -> int | None:
    """The version whose manifest has that key, or None if it is no manifest of a version."""
    name, _, suffix = key.rsplit("/", 1)[-1].rpartition(".")
    if suffix != "manifest" or not name.isdecimal():
        return None
    return LAST_VERSION - int(name) if len(name) == _REVERSED_DIGITS else int(name)


def manifest_bytes(store: ObjectStore, version: int) -> bytes:
    """The manifest of a version, as it is stored."""
    for name in manifest_names(version):
        try:
            return bytes(store.get(f"_versions/{name}.manifest").data)
        except ObjectNotFound:
            continue
    raise NotATable(f"{store.uri} has no manifest of version {version}")


def manifest_names(version: int) -> tuple[str, str]:
    """What Lance calls the manifest of a version, and what it did before 0.17."""
    return f"{LAST_VERSION - version:0{_REVERSED_DIGITS}}", str(version)


def section_at(data: bytes, at: int) -> bytes:
    """A part of a manifest, which begins with its length."""
    if at + 4 > len(data):
        raise ValueError(f"a section at {at} lies past the end")
    (length,) = struct.unpack_from("<I", data, at)
    if at + 4 + length > len(data):
        raise ValueError(f"a section of {length} bytes at {at} runs past the end")
    return data[at + 4 : at + 4 + length]
