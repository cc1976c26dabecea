"""A readable account of what is stored inside a table: a WAL entry, manifest, region, generation,
a packed file.

`inspect` looks at a location, finds out what it is, and returns plain data: dicts, lists, text and
numbers, so that it prints as a tree and as JSON alike; of a whole table it returns an `Inspection`.
Field names are those of the format, as `docs/formats/memwal.md` has them. Reading is checked as
everywhere: damage is an error.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc

from penstock.cli import locate, packed_file
from penstock.errors import InvalidInput, NotATable, ObjectNotFound
from penstock.index.bloom import BloomFilter
from penstock.index.primary_key import PK_INDEX_DIRECTORY
from penstock.memwal import names, wal
from penstock.memwal.base_table import BaseTable
from penstock.memwal.flush import BLOOM_FILE
from penstock.memwal.inspect import Inspection, inspect_table
from penstock.memwal.manifest import RegionManifest, manifest_chain
from penstock.memwal.region_spec import RegionSpec, arrow_type
from penstock.memwal.transforms import decode_value
from penstock.memwal.wal import Wal
from penstock.storage.open import open_store

Report = dict[str, Any]
TRAILER_MAGIC = b"PSTKWAL1"
_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 200


def inspect(
    location: str,
    options: Mapping[str, str],
    rows: int,
    *,
    verify: bool = False,
    key_file: str | None = None,
) -> Report | Inspection:
    """What is at `location`, with at most `rows` sample rows of a WAL entry or generation.

    Of a packed file every entry is checked if `verify`, with keys from `key_file`.
    """
    above, name = locate.split(location)
    if name.endswith(packed_file.SUFFIX):
        return packed_file.inspect_packed(location, options, verify=verify, key_file=key_file)
    if verify or key_file is not None:
        raise InvalidInput(f"--verify and --key-file are for packed files (….v3), not {location}")
    if name.endswith(".arrow"):
        return _wal_entry(above, name, options, rows)
    if name.endswith(".binpb"):
        return _manifest_file(above, name, options)
    if names.generation_of(name) is not None:
        return _generation(location, options, rows)
    region_id = locate.region_of(location)
    if region_id is not None and name == str(region_id):
        return _region(locate.table_location(location), region_id, options)
    store = open_store(location, options)
    if "_versions" in store.list_dirs(""):
        return inspect_table(locate.base_table(store, options))
    raise InvalidInput(
        f"{location} is nothing that can be inspected; give a WAL entry (wal/….arrow), a region "
        "manifest (manifest/….binpb), a region (_mem_wal/<uuid>), a generation, a packed file "
        "(….v3) or a table"
    )


# --- one file ------------------------------------------------------------------------------


def _wal_entry(above: str, name: str, options: Mapping[str, str], rows: int) -> Report:
    data = memoryview(open_store(above, options).get(name).data)
    position = names.from_bitrev(name.removesuffix(".arrow"))
    entry = wal.decode_entry(data, position or 0, f"{above}/{name}")
    schema = pa.ipc.open_stream(pa.py_buffer(data)).schema
    table = pa.Table.from_batches(entry.batches, schema) if entry.batches else None
    tombstones = 0
    if table is not None and wal.TOMBSTONE in table.column_names:
        tombstones = pc.sum(table.column(wal.TOMBSTONE)).as_py() or 0
    metadata = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
    report: Report = {
        "kind": "WAL entry (fence)" if entry.is_fence else "WAL entry",
        "path": f"{above}/{name}",
        "position": position,
        "size_bytes": entry.size_bytes,
        "metadata": metadata,
        "writer_epoch": entry.writer_epoch,
        "generation": None if entry.is_fence else entry.generation,
        "rows": sum(batch.num_rows for batch in entry.batches),
        "tombstones": tombstones,
        "columns": _columns(schema),
        "messages": _messages(data, entry.batches),
        "trailer": _trailer(data) if entry.write_id is not None else None,
    }
    if table is not None and rows:
        report["first_rows"] = _sample(table, rows)
    return report


def _messages(data: memoryview, batches: Sequence[pa.RecordBatch]) -> list[Report]:
    """The parts of the Arrow stream with their place in the file."""
    messages: list[Report] = []
    rows = iter(batches)
    offset = 0
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data)):
        (length,) = struct.unpack_from("<i", data, offset + 4)
        body_bytes = message.body.size if message.body is not None else 0
        part: Report = {
            "offset": offset,
            "size_bytes": 8 + length + body_bytes,
            "type": message.type,
        }
        if message.type == "schema":
            marked = bytes(data[offset + length : offset + 8 + length]) == TRAILER_MAGIC
            part["announces_trailer"] = marked
        elif message.type == "record batch":
            part["rows"] = next(rows).num_rows
        messages.append(part)
        offset += part["size_bytes"]
    messages.append({"offset": offset, "size_bytes": 8, "type": "end of stream"})
    return messages


def _trailer(data: memoryview) -> Report:
    start = len(data) - 32
    crc, padding = struct.unpack_from("<II", data, start + 24)
    return {
        "offset": start,
        "magic": bytes(data[start : start + 8]).decode(),
        "write_id": bytes(data[start + 8 : start + 24]).hex(),
        "crc32c": f"{crc:08x} (correct)",
        "padding": padding,
    }


def _manifest_file(above: str, name: str, options: Mapping[str, str]) -> Report:
    data = open_store(above, options).get(name).data
    manifest = RegionManifest.decode(data, f"{above}/{name}")
    return {
        "kind": "region manifest",
        "path": f"{above}/{name}",
        "size_bytes": len(data),
        **_manifest(manifest, None),
    }


def _manifest(manifest: RegionManifest, spec: RegionSpec | None) -> Report:
    return {
        "region_id": str(manifest.region_id),
        "version": manifest.version,
        "writer_epoch": manifest.writer_epoch,
        "status": manifest.status.name.lower(),
        "region_spec_id": manifest.region_spec_id,
        "region_field_entries": [
            {"field_id": field_id, "value": _value(field_id, value, spec), "bytes": value.hex()}
            for field_id, value in manifest.region_values
        ],
        "current_generation": manifest.current_generation,
        "replay_after_wal_entry_position": manifest.replay_after_wal_entry_position,
        "wal_entry_position_last_seen": manifest.wal_entry_position_last_seen,
        "flushed_generations": [asdict(flushed) for flushed in manifest.flushed_generations],
    }


def _value(field_id: str, value: bytes, spec: RegionSpec | None) -> Any:
    """A region value in the type its spec gives it; None where the spec is not at hand."""
    for field in spec.fields if spec is not None else ():
        if field.field_id == field_id:
            return _plain(decode_value(value, arrow_type(field.result_type)))
    return None


# --- directories ---------------------------------------------------------------------------


def _generation(location: str, options: Mapping[str, str], rows: int) -> Report:
    try:
        dataset = lance.dataset(location, storage_options=dict(options) or None)
    except (OSError, ValueError) as error:
        raise NotATable(
            f"{location} cannot be opened as a generation: {str(error).splitlines()[0]}"
        ) from error
    store = open_store(location, options)
    fragments = dataset.get_fragments()
    try:
        bloom_bytes = len(BloomFilter.from_bytes(store.get(BLOOM_FILE).data).to_bytes())
    except ObjectNotFound:
        bloom_bytes = 0
    report: Report = {
        "kind": "flushed generation",
        "path": location,
        "generation": names.generation_of(locate.split(location)[1]),
        "version": dataset.version,
        "fragments": len(fragments),
        "physical_rows": sum(fragment.physical_rows for fragment in fragments),
        "superseded_rows": sum(fragment.num_deletions for fragment in fragments),
        "tombstones": dataset.count_rows(f"{wal.TOMBSTONE}"),
        "columns": _columns(dataset.schema, _field_ids(dataset)),
        "indexes": [index.name for index in dataset.describe_indices()],
        "bloom_filter_bytes": bloom_bytes,
        "pk_index_bytes": sum(meta.size_bytes for meta in store.list(PK_INDEX_DIRECTORY)),
    }
    if rows:
        report["first_rows"] = _sample(dataset.to_table(limit=rows), rows)
    return report


def _region(table: str, region_id: uuid.UUID, options: Mapping[str, str]) -> Report:
    base = locate.base_table(open_store(table, options), options)
    manifest = manifest_chain(base.store, region_id, base.seams).latest()
    if manifest is None:
        raise ObjectNotFound(f"{table} has no region {region_id}; `penstock status` lists them")
    snapshot = base.snapshot()
    specs = {spec.spec_id: spec for spec in snapshot.details.region_specs}
    return {
        "kind": "region",
        "table": table,
        "merged_generation": snapshot.details.merged(region_id),
        **_manifest(manifest, specs.get(manifest.region_spec_id)),
        "wal": _wal_tail(base, manifest),
    }


def _wal_tail(base: BaseTable, manifest: RegionManifest) -> Report:
    """What a claim would replay."""
    log = Wal(base.store, manifest.region_id, base.seams)
    covered = manifest.replay_after_wal_entry_position
    entries = rows = size_bytes = 0
    fences: list[int] = []
    position = covered
    for entry in log.tail(covered):
        position = entry.position
        entries += 1
        size_bytes += entry.size_bytes
        if entry.is_fence:
            fences.append(entry.position)
        rows += sum(batch.num_rows for batch in entry.batches)
    return {
        "last_position": position,
        "to_replay_entries": entries,
        "to_replay_rows": rows,
        "to_replay_bytes": size_bytes,
        "fence_positions": fences,
    }


# --- values --------------------------------------------------------------------------------


def _field_ids(dataset: lance.LanceDataset) -> dict[str, int]:
    return {field.name(): field.id() for field in dataset.lance_schema.fields()}


def _columns(schema: pa.Schema, field_ids: Mapping[str, int] | None = None) -> list[Report]:
    columns = []
    for field in schema:
        stored = (field.metadata or {}).get(b"lance:field_id")
        field_id = field_ids.get(field.name) if field_ids else int(stored) if stored else None
        columns.append(
            {
                "name": field.name,
                "type": str(field.type),
                "nullable": field.nullable,
                "field_id": field_id,
            }
        )
    return columns


def _sample(table: pa.Table, rows: int) -> list[Report]:
    return [
        {name: _plain(value) for name, value in row.items()}
        for row in table.slice(0, rows).to_pylist()
    ]


def _plain(value: Any) -> Any:
    """A value as JSON has it, long ones shortened."""
    if isinstance(value, str):
        shown = value[:_SHOWN_CHARACTERS]
        return shown if len(shown) == len(value) else f"{shown}… ({len(value)} characters)"
    if isinstance(value, bytes):
        return _plain(value.hex())
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence):
        shown_items = [_plain(item) for item in value[:_SHOWN_ITEMS]]
        more = len(value) - len(shown_items)
        return [*shown_items, f"… {more} more"] if more else shown_items
    if value is None or isinstance(value, bool | int | float):
        return value
    return str(value)
