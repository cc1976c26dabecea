"""The MemWAL index of a base table: configuration and progress, kept by Lance in its manifest.

The index is one protobuf message in the table manifest's index section; only a snapshot of very
many regions adds a file (`snapshots`). Here is what the message says; `table_versions` reads it
from the manifest of a version, and `table_commit` changes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import Corruption, InvalidInput
from penstock.memwal import wire
from penstock.memwal.region_spec import RegionField, RegionSpec

INDEX_NAME = "__lance_mem_wal"
TYPE_URL = "/lance.table.MemWalIndexDetails"


@dataclass(frozen=True, slots=True)
class MemWalIndexDetails:
    snapshot_ts_millis: int = 0
    num_regions: int = 0
    inline_snapshots: bytes | None = None
    region_specs: tuple[RegionSpec, ...] = ()
    maintained_indexes: tuple[str, ...] = ()
    merged_generations: Mapping[uuid.UUID, int] = field(default_factory=dict)
    index_catchup: Mapping[str, Mapping[uuid.UUID, int]] = field(default_factory=dict)
    writer_config_defaults: Mapping[str, str] = field(default_factory=dict)
    maintain_all_indexes: bool = True
    raw: bytes = field(default=b"", compare=False, repr=False)

    @property
    def current_spec(self) -> RegionSpec | None:
        """The spec new rows are routed by: the one with the highest id."""
        return max(self.region_specs, key=lambda spec: spec.spec_id, default=None)

    def with_spec(self, spec: RegionSpec) -> MemWalIndexDetails:
        """The details with one more spec; ids are never used again."""
        if any(known.spec_id >= spec.spec_id for known in self.region_specs):
            raise InvalidInput(f"region spec id {spec.spec_id} was used before")
        buckets = [field.parameters.get("num_buckets") for field in spec.fields]
        planned = int(buckets[0] or 0) if len(buckets) == 1 else 0
        unsharded = [field.transform for field in spec.fields] == ["unsharded"]
        if self.inline_snapshots is not None:
            planned, unsharded = self.num_regions, False  # as many as the snapshot has
        return replace(
            self,
            region_specs=(*self.region_specs, spec),
            num_regions=1 if unsharded else planned,
        )

    def merged(self, region_id: uuid.UUID) -> int:
        """The last generation of a region that is in the base table; 0 if none is."""
        return self.merged_generations.get(region_id, 0)

    def with_merged(self, generations: Mapping[uuid.UUID, int]) -> MemWalIndexDetails:
        """The details with more progress; it never goes back."""
        together = dict(self.merged_generations)
        for region_id, generation in generations.items():
            together[region_id] = max(generation, together.get(region_id, 0))
        return replace(self, merged_generations=together)

    def with_catchup(
        self, name: str, generations: Mapping[uuid.UUID, int] | None
    ) -> MemWalIndexDetails:
        """The details with what an index has caught up with; None takes its entry out."""
        progress = {known: at for known, at in self.index_catchup.items() if known != name}
        if generations is not None:
            progress[name] = dict(generations)
        return replace(self, index_catchup=progress)

    def encode(self) -> bytes:
        message = wire.new("MemWalIndexDetails")
        if self.raw:
            message.ParseFromString(self.raw)
        message.snapshot_ts_millis = self.snapshot_ts_millis
        message.num_regions = self.num_regions
        message.ClearField("inline_snapshots")
        if self.inline_snapshots is not None:
            message.inline_snapshots = self.inline_snapshots
        del message.region_specs[:]
        for spec in self.region_specs:
            added = message.region_specs.add(spec_id=spec.spec_id)
            for region_field in spec.fields:
                stored = added.fields.add(
                    field_id=region_field.field_id, result_type=region_field.result_type
                )
                stored.source_ids.extend(region_field.source_ids)
                if region_field.transform is not None:
                    stored.transform = region_field.transform
                if region_field.expression is not None:
                    stored.expression = region_field.expression
                stored.parameters.update(region_field.parameters)
        message.maintained_indexes[:] = self.maintained_indexes
        del message.merged_generations[:]
        _put_generations(message.merged_generations, self.merged_generations)
        del message.index_catchup[:]
        for name, progress in sorted(self.index_catchup.items()):
            caught_up = message.index_catchup.add(index_name=name)
            _put_generations(caught_up.caught_up_generations, progress)
        message.writer_config_defaults.clear()
        message.writer_config_defaults.update(self.writer_config_defaults)
        message.maintain_all_indexes = self.maintain_all_indexes
        encoded: bytes = message.SerializeToString(deterministic=True)
        return encoded

    @classmethod
    def decode(cls, data: bytes, where: str) -> MemWalIndexDetails:
        message = wire.new("MemWalIndexDetails")
        try:
            message.ParseFromString(data)
            return cls(
                snapshot_ts_millis=message.snapshot_ts_millis,
                num_regions=message.num_regions,
                inline_snapshots=(
                    message.inline_snapshots if message.HasField("inline_snapshots") else None
                ),
                region_specs=tuple(map(_region_spec, message.region_specs)),
                maintained_indexes=tuple(message.maintained_indexes),
                merged_generations=_generations(message.merged_generations),
                index_catchup={
                    progress.index_name: _generations(progress.caught_up_generations)
                    for progress in message.index_catchup
                },
                writer_config_defaults=dict(message.writer_config_defaults),
                # Tables of before this field existed list what they maintain.
                maintain_all_indexes=(
                    message.maintain_all_indexes
                    if message.HasField("maintain_all_indexes")
                    else False
                ),
                raw=data,
            )
        except (wire.DecodeError, ValueError) as error:
            raise Corruption(f"the MemWAL index of {where} cannot be read: {error}") from error


def _region_spec(message: Any) -> RegionSpec:
    return RegionSpec(
        spec_id=message.spec_id,
        fields=tuple(
            RegionField(
                field_id=stored.field_id,
                source_ids=tuple(stored.source_ids),
                transform=stored.transform if stored.HasField("transform") else None,
                expression=stored.expression if stored.HasField("expression") else None,
                result_type=stored.result_type,
                parameters=dict(stored.parameters),
            )
            for stored in message.fields
        ),
    )


def _generations(messages: Any) -> dict[uuid.UUID, int]:
    return {uuid.UUID(bytes=bytes(m.region_id.uuid)): m.generation for m in messages}


def _put_generations(messages: Any, generations: Mapping[uuid.UUID, int]) -> None:
    for region_id, generation in sorted(generations.items()):
        messages.add(generation=generation).region_id.uuid = region_id.bytes
