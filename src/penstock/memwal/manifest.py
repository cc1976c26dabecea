"""Region manifests: the state of one region, and how it travels as protobuf.

A manifest is immutable; each change is the next version. Fields that a newer Lance wrote and we
do not know are kept: a decoded manifest remembers its message, and encoding starts from it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from penstock.errors import Corruption
from penstock.memwal import names, wire
from penstock.storage.epoch import VersionedObject
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams


class RegionStatus(IntEnum):
    ACTIVE = 0
    SEALED = 1


@dataclass(frozen=True, slots=True)
class FlushedGeneration:
    generation: int
    path: str
    in_memory_bytes: int | None = None
    physical_rows: int | None = None
    primary_key_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RegionManifest:
    """The state of a region. Positions count from 1; 0 means that nothing is covered."""

    region_id: uuid.UUID
    version: int = 1
    writer_epoch: int = 0
    replay_after_wal_entry_position: int = 0
    wal_entry_position_last_seen: int = 0
    current_generation: int = 1
    flushed_generations: tuple[FlushedGeneration, ...] = ()
    region_spec_id: int = 0
    region_values: tuple[tuple[str, bytes], ...] = ()
    status: RegionStatus = RegionStatus.ACTIVE
    transactions: Mapping[bytes, int] = field(default_factory=dict)
    """Of each application the last number that is in a generation (`transactions`)."""
    raw: bytes = field(default=b"", compare=False, repr=False)

    def next(self, **changes: Any) -> RegionManifest:
        """The following version, with some fields changed."""
        return replace(self, version=self.version + 1, **changes)

    def generation(self, generation: int) -> FlushedGeneration | None:
        return next((g for g in self.flushed_generations if g.generation == generation), None)

    def encode(self) -> bytes:
        message = wire.new("RegionManifest")
        if self.raw:
            message.ParseFromString(self.raw)
        message.version = self.version
        message.writer_epoch = self.writer_epoch
        message.replay_after_wal_entry_position = self.replay_after_wal_entry_position
        message.wal_entry_position_last_seen = self.wal_entry_position_last_seen
        message.current_generation = self.current_generation
        message.region_spec_id = self.region_spec_id
        message.region_id.uuid = self.region_id.bytes
        message.status = int(self.status)
        del message.flushed_generations[:]
        for flushed in self.flushed_generations:
            entry = message.flushed_generations.add(
                generation=flushed.generation, path=flushed.path
            )
            for name in ("in_memory_bytes", "physical_rows", "primary_key_bytes"):
                value = getattr(flushed, name)
                if value is not None:
                    setattr(entry, name, value)
        del message.region_field_entries[:]
        for field_id, value in self.region_values:
            message.region_field_entries.add(field_id=field_id, value=value)
        del message.transactions[:]
        for application, number in self.transactions.items():
            message.transactions.add(application=application, number=number)
        encoded: bytes = message.SerializeToString(deterministic=True)
        return encoded

    @classmethod
    def decode(cls, data: memoryview | bytes, key: str) -> RegionManifest:
        """Read a manifest; `key` names it in errors and must agree with its version."""
        raw = bytes(data)
        message = wire.new("RegionManifest")
        try:
            message.ParseFromString(raw)
        except wire.DecodeError as error:
            raise Corruption(f"{key} is not a region manifest ({error}); {_REMEDY}") from error
        identity = bytes(message.region_id.uuid)
        if len(identity) != 16:
            raise Corruption(f"{key} has a region id of {len(identity)} bytes; {_REMEDY}")
        owner = key.split("/")[-3:-2]
        if owner and owner != [str(uuid.UUID(bytes=identity))]:
            raise Corruption(f"{key} is of region {uuid.UUID(bytes=identity)}; {_REMEDY}")
        named = names.from_bitrev(key.rsplit("/", 1)[-1].removesuffix(".binpb"))
        if named is not None and named != message.version:
            raise Corruption(f"{key} says it is version {message.version}; {_REMEDY}")
        if message.status not in (0, 1):
            raise Corruption(f"{key} has the unknown status {message.status}; {_REMEDY}")

        def optional(entry: Any, name: str) -> int | None:
            return getattr(entry, name) if entry.HasField(name) else None

        generations = tuple(
            FlushedGeneration(
                generation=entry.generation,
                path=entry.path,
                in_memory_bytes=optional(entry, "in_memory_bytes"),
                physical_rows=optional(entry, "physical_rows"),
                primary_key_bytes=optional(entry, "primary_key_bytes"),
            )
            for entry in message.flushed_generations
        )
        for flushed in generations:
            if "/" in flushed.path or flushed.path in ("", ".", ".."):
                raise Corruption(f"{key} points outside its region: {flushed.path!r}; {_REMEDY}")
        return cls(
            region_id=uuid.UUID(bytes=identity),
            version=message.version,
            writer_epoch=message.writer_epoch,
            replay_after_wal_entry_position=message.replay_after_wal_entry_position,
            wal_entry_position_last_seen=message.wal_entry_position_last_seen,
            current_generation=max(message.current_generation, 1),
            flushed_generations=tuple(sorted(generations, key=lambda g: g.generation)),
            region_spec_id=message.region_spec_id,
            region_values=tuple((e.field_id, e.value) for e in message.region_field_entries),
            status=RegionStatus(message.status),
            transactions={e.application: e.number for e in message.transactions},
            raw=raw,
        )


_REMEDY = "the file is damaged: restore it, or remove it if it is not the region's latest version"


def manifest_chain(
    store: ObjectStore, region_id: uuid.UUID, seams: Seams
) -> VersionedObject[RegionManifest]:
    """The chain of manifest versions of one region."""
    return VersionedObject(
        store,
        name=f"region {region_id} of {store.uri}",
        directory=f"{names.region_dir(region_id)}/manifest",
        file_name=lambda version: f"{names.bitrev(version)}.binpb",
        version_of=lambda file: (
            names.from_bitrev(file.removesuffix(".binpb")) if file.endswith(".binpb") else None
        ),
        encode=RegionManifest.encode,
        decode=RegionManifest.decode,
        seams=seams,
    )
