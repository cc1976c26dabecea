"""Declarations of packed indexes, and where their files lie; `packed_indexes` says what they are.

A declaration is a line in the configuration of the MemWAL index:
`penstock.packed.{name}` = `{"field_id": …, "kind": …, "options": {…}, "uid": …}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from lance.fragment import FragmentMetadata

from penstock.memwal import names
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.storage.objects import ObjectStore

DIRECTORY = f"{names.PRIVATE}/packed"
DECLARED = "penstock.packed."
_SUFFIX = ".v3"


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """One declared index."""

    name: str
    field_id: int
    kind: str
    """As `build_index` calls it."""
    uid: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """What the declaration says."""
        said = {
            "field_id": self.field_id,
            "kind": self.kind,
            "uid": self.uid,
            "options": dict(self.options),
        }
        return json.dumps(said, sort_keys=True)

    def key(self, data_file: str) -> str:
        """Where the index of one of the base's data files lies, below the table."""
        return f"{DIRECTORY}/{self.uid}/{data_file.removesuffix('.lance')}{_SUFFIX}"

    def generation_key(self, generation: str) -> str:
        """Where the index of a generation lies; `generation` is its directory."""
        return f"{generation}/_packed/{self.uid}{_SUFFIX}"

    def write(self, store: ObjectStore, key: str, column: pa.ChunkedArray) -> int:
        """Index a column and write it; returns how many bytes that took.

        `InvalidInput` if the kind does not take one of the values, such as a text too long for it.
        """
        # Only here, so that tables without packed indexes do not wait for what writes them.
        from penstock.packed import PackedWriter, build_index

        index = build_index(self.kind, column, **self.options)
        with PackedWriter.to_store(store, key) as writer:
            index.write(writer)
            size_bytes: int = writer.finish()
        return size_bytes


def packed_specs(details: MemWalIndexDetails) -> tuple[PackedSpec, ...]:
    """The indexes that a version declares."""
    found = []
    for key, value in details.writer_config_defaults.items():
        if key.startswith(DECLARED):
            said = json.loads(value)
            name = key.removeprefix(DECLARED)
            options = said.get("options", {})
            found.append(PackedSpec(name, said["field_id"], said["kind"], said["uid"], options))
    return tuple(found)


def column_file(fragment: FragmentMetadata, field_id: int) -> str | None:
    """The data file that has a column of a fragment; None if nothing can be said of it."""
    if fragment.overlays:
        return None
    holding = [file.path for file in fragment.files if field_id in file.fields]
    return holding[0] if len(holding) == 1 and "/" not in holding[0] else None


def packed_file(key: str) -> tuple[str, str] | None:
    """The declaration's id and the data file that an index of the base belongs to."""
    parts = key.split("/")
    if len(parts) != 4 or not key.startswith(f"{DIRECTORY}/") or not key.endswith(_SUFFIX):
        return None
    return parts[2], f"data/{parts[3].removesuffix(_SUFFIX)}.lance"
