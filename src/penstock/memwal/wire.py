"""The protobuf messages of MemWAL, as Lance 14 reads and writes them.

The descriptors are built here from one table, so that the field numbers, which are the
contract, stand in one place next to their names; `docs/formats/memwal.md` explains each. The
pool is private: Lance's own descriptors, or another copy of these, never collide with them.
Messages are only used inside codec modules; the rest of the package sees frozen dataclasses.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

__all__ = ["DecodeError", "Message", "new"]

_PACKAGE = "penstock.memwal"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "uint64": _Field.TYPE_UINT64,
    "int64": _Field.TYPE_INT64,
    "uint32": _Field.TYPE_UINT32,
    "int32": _Field.TYPE_INT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}

# message -> (number, name, type); `?` marks an optional scalar, `*` a repeated field,
# `{}` a map<string, string>. An enum travels as the uint32 it is on the wire.
_MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "UUID": ((1, "uuid", "bytes"),),
    "FlushedGeneration": (
        (1, "generation", "uint64"),
        (2, "path", "string"),
        (3, "in_memory_bytes", "?uint64"),
        (4, "physical_rows", "?uint64"),
        (5, "primary_key_bytes", "?uint64"),
    ),
    "RegionFieldEntry": ((1, "field_id", "string"), (2, "value", "bytes")),
    "RegionManifest": (
        (1, "version", "uint64"),
        (2, "writer_epoch", "uint64"),
        (3, "replay_after_wal_entry_position", "uint64"),
        (4, "wal_entry_position_last_seen", "uint64"),
        (6, "current_generation", "uint64"),
        (8, "flushed_generations", "*FlushedGeneration"),
        (10, "region_spec_id", "uint32"),
        (11, "region_id", "UUID"),
        (14, "region_field_entries", "*RegionFieldEntry"),
        (15, "status", "uint32"),
        # Ours alone: Lance reads past it, and forgets it when it writes the next manifest.
        (7001, "transactions", "*RegionTransaction"),
    ),
    "RegionTransaction": ((1, "application", "bytes"), (2, "number", "uint64")),
    "MergedGeneration": ((1, "region_id", "UUID"), (2, "generation", "uint64")),
    "IndexCatchupProgress": (
        (1, "index_name", "string"),
        (2, "caught_up_generations", "*MergedGeneration"),
    ),
    "RegionField": (
        (1, "field_id", "string"),
        (2, "source_ids", "*int32"),
        (3, "transform", "?string"),
        (4, "expression", "?string"),
        (5, "result_type", "string"),
        (6, "parameters", "{}"),
    ),
    "RegionSpec": ((1, "spec_id", "uint32"), (2, "fields", "*RegionField")),
    "MemWalIndexDetails": (
        (1, "snapshot_ts_millis", "int64"),
        (2, "num_regions", "uint32"),
        (3, "inline_snapshots", "?bytes"),
        (7, "region_specs", "*RegionSpec"),
        (8, "maintained_indexes", "*string"),
        (9, "merged_generations", "*MergedGeneration"),
        (10, "index_catchup", "*IndexCatchupProgress"),
        (11, "writer_config_defaults", "{}"),
        (12, "maintain_all_indexes", "?bool"),
    ),
    # The parts of Lance's table manifest that lead to an index's details.
    "Any": ((1, "type_url", "string"), (2, "value", "bytes")),
    "IndexMetadata": (
        (1, "uuid", "UUID"),
        (2, "fields", "*int32"),
        (3, "name", "string"),
        (4, "dataset_version", "uint64"),
        (5, "fragment_bitmap", "bytes"),
        (6, "index_details", "Any"),
    ),
    "IndexSection": ((1, "indices", "*IndexMetadata"),),
    # Fragments stay bytes: most are the same in many versions, and are parsed once.
    "TableManifest": (
        (2, "fragments", "*bytes"),
        (3, "version", "uint64"),
        (6, "index_section", "?uint64"),
        (7, "timestamp", "Timestamp"),
        (11, "max_fragment_id", "?uint32"),
        (12, "transaction_file", "string"),
    ),
    "Timestamp": ((1, "seconds", "int64"), (2, "nanos", "int32")),
    "DataFragment": (
        (1, "id", "uint64"),
        (2, "files", "*DataFile"),
        (3, "deletion_file", "DeletionFile"),
        (6, "external_row_ids", "ExternalFile"),
        (7, "last_updated_at_versions", "?bytes"),
        (8, "external_last_updated_at_versions", "ExternalFile"),
        (9, "created_at_versions", "?bytes"),
        (10, "external_created_at_versions", "ExternalFile"),
        (11, "overlays", "*DataOverlayFile"),
    ),
    "DataFile": ((1, "path", "string"),),
    "DataOverlayFile": ((1, "data_file", "DataFile"),),
    "DeletionFile": (
        (1, "file_type", "uint32"),
        (2, "read_version", "uint64"),
        (3, "id", "uint64"),
    ),
    "ExternalFile": ((1, "path", "string"),),
    # The versions that Lance keeps of rows, as runs of rows with the same version.
    "RowVersions": ((1, "runs", "*RowVersionRun"),),
    "RowVersionRun": ((2, "version", "uint64"),),
    # A column of a Lance schema; what else it says is carried along.
    "SchemaField": ((2, "name", "string"), (3, "id", "int32"), (4, "parent_id", "int32")),
    # Lance's stable row ids of a fragment; each segment has exactly one of its fields.
    "RowIdSequence": ((1, "segments", "*RowIdSegment"),),
    "RowIdSegment": (
        (1, "range", "RowIdRange"),
        (2, "range_with_holes", "RowIdRange"),
        (3, "range_with_bitmap", "RowIdRange"),
        (4, "sorted_array", "RowIdArray"),
        (5, "array", "RowIdArray"),
    ),
    "RowIdRange": ((1, "start", "uint64"), (2, "end", "uint64")),
    "RowIdArray": (
        (1, "u16", "RowIdOffsets"),
        (2, "u32", "RowIdOffsets"),
        (3, "u64", "RowIdOffsets"),
    ),
    "RowIdOffsets": ((1, "base", "uint64"), (2, "offsets", "bytes")),
}


def _build() -> dict[str, type[Message]]:
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock/memwal.proto", package=_PACKAGE, syntax="proto3"
    )
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for number, name, kind in fields:
            field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
            if kind == "{}":
                entry_name = "".join(part.title() for part in name.split("_")) + "Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                for entry_number, entry_field in ((1, "key"), (2, "value")):
                    entry.field.add(
                        name=entry_field,
                        number=entry_number,
                        label=_Field.LABEL_OPTIONAL,
                        type=_Field.TYPE_STRING,
                    )
                field.label = _Field.LABEL_REPEATED
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{message_name}.{entry_name}"
                continue
            if kind.startswith("*"):
                field.label = _Field.LABEL_REPEATED
            elif kind.startswith("?"):
                message.oneof_decl.add(name=f"_{name}")
                field.proto3_optional = True
                field.oneof_index = len(message.oneof_decl) - 1
            base = kind.lstrip("*?")
            if base in _SCALARS:
                field.type = _SCALARS[base]
            else:
                field.type = _Field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _build()


def new(name: str) -> Any:
    """An empty message of that name; `Any`, because its attributes exist only at run time."""
    return _CLASSES[name]()
