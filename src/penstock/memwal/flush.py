"""Flush: a frozen MemTable becomes a generation, a Lance dataset of its own.

The dataset has one fragment with the rows in the order of their writing. Rows that a later row of
the same MemTable supersedes are hidden by a deletion vector; tombstones stay. Next to it go the
indexes the table maintains, built with the base table's own centroids, codebook and tokenizer,
the bloom filter of the keys, and `_pk_index/`, which tells exactly which keys are inside.

Everything is written to a directory with a fresh random name and made durable before this module
returns; only the manifest that names the directory makes it count. A failed attempt leaves an
orphan for clean-up and never half a generation.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import lance
import numpy as np
import pyarrow as pa

from penstock.errors import InvalidInput, NotATable
from penstock.index.base import IndexSpec, create_like
from penstock.index.bloom import BloomFilter, pk_hashes
from penstock.index.primary_key import key_array, newest_rows, one_chunk, write_pk_index
from penstock.memwal import names
from penstock.memwal.manifest import FlushedGeneration
from penstock.memwal.memtable import MemTable
from penstock.memwal.packed_specs import PackedSpec
from penstock.memwal.shape import FIELD_ID
from penstock.storage.objects import ObjectStore
from penstock.storage.seams import Seams

BLOOM_FILE = "bloom_filter.bin"
_ONE_FILE_ROWS = 2**31 - 1
_ONE_FILE_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class FlushTarget:
    """Where the generations of a table go and what they must carry."""

    store: ObjectStore
    storage_options: Mapping[str, str] | None
    data_storage_version: str
    index_specs: Sequence[IndexSpec]
    seams: Seams
    packed_specs: Sequence[PackedSpec] = ()


def flush_memtable(
    target: FlushTarget, region_id: uuid.UUID, memtable: MemTable
) -> FlushedGeneration:
    """Write a generation and return what the manifest has to say of it."""
    directory = names.generation_name(target.seams.entropy.hex8(), memtable.generation)
    prefix = f"{names.region_dir(region_id)}/{directory}"
    uri = f"{target.store.uri.rstrip('/')}/{prefix}"
    options = dict(target.storage_options) if target.storage_options else None
    rows = memtable.table()
    dataset = _write_rows(rows, uri, target.data_storage_version, options)
    key_bytes = None
    if memtable.shape.key_columns:
        columns = [one_chunk(rows.column(name)) for name in memtable.shape.key_columns]
        keys = key_array(rows, memtable.shape.key_columns)
        key_bytes = keys.nbytes
        dataset = _hide_superseded(dataset, np.flatnonzero(~newest_rows(keys)))
        write_pk_index(uri, keys, options)
        bloom = BloomFilter.from_hashes(pk_hashes(columns), rows.num_rows)
        target.store.put(f"{prefix}/{BLOOM_FILE}", bloom.to_bytes())
    for spec in target.index_specs:
        create_like(spec, dataset)
    for packed in target.packed_specs:
        name = memtable.shape.columns_by_id.get(packed.field_id)
        if name is not None:
            # Values that the kind does not take are scanned; building the base's will say so.
            with suppress(InvalidInput):
                packed.write(target.store, packed.generation_key(prefix), rows.column(name))
    target.store.sync(prefix)
    return FlushedGeneration(
        generation=memtable.generation,
        path=directory,
        in_memory_bytes=memtable.size_bytes,
        physical_rows=rows.num_rows,
        primary_key_bytes=key_bytes,
    )


def _write_rows(
    rows: pa.Table, uri: str, version: str, options: dict[str, str] | None
) -> lance.LanceDataset:
    """Write the rows as one fragment whose fields have the base table's ids."""
    schema, gaps = _with_field_ids(rows.schema)
    if gaps:
        columns = {name: rows.column(name) for name in rows.column_names}
        arrays = [
            columns[field.name] if field.name in columns else pa.nulls(rows.num_rows, field.type)
            for field in schema
        ]
        rows = pa.Table.from_arrays(arrays, schema=schema)
    else:
        rows = rows.cast(schema)
    dataset = lance.write_dataset(
        _aligned(rows),
        uri,
        mode="create",
        max_rows_per_file=_ONE_FILE_ROWS,
        max_bytes_per_file=_ONE_FILE_BYTES,
        data_storage_version=version,  # type: ignore[arg-type]  # what Lance itself said it is
        storage_options=options,
    )
    if gaps:
        dataset.drop_columns(gaps)
    return dataset


def check_field_ids(wal_schema: pa.Schema) -> None:
    """Refuse a table whose rows could be logged but never flushed."""
    _with_field_ids(wal_schema)


def _aligned(rows: pa.Table) -> pa.Table:
    """The rows with 16-byte values where Rust expects them.

    Rows of the WAL lie in memory as they do in Arrow's IPC format, at multiples of 8 bytes. Lance
    panics when it is given a decimal at an odd one.
    """
    for ordinal, field in enumerate(rows.schema):
        if _is_wide(field.type):
            column = rows.column(ordinal)
            # Joining is what copies; an empty piece makes it join even a single chunk.
            empty = pa.array([], field.type)
            rows = rows.set_column(ordinal, field, pa.concat_arrays([*column.chunks, empty]))
    return rows


def _is_wide(value_type: pa.DataType) -> bool:
    """Whether a value, or a value inside it, takes 16 bytes or more in one piece."""
    if value_type.num_fields:
        return any(_is_wide(value_type.field(n).type) for n in range(value_type.num_fields))
    if pa.types.is_fixed_size_binary(value_type):
        return False
    view = pa.types.is_string_view(value_type) or pa.types.is_binary_view(value_type)
    return bool(view or pa.types.is_decimal(value_type) or pa.types.is_interval(value_type))


def _with_field_ids(schema: pa.Schema) -> tuple[pa.Schema, list[str]]:
    """A schema whose fields Lance numbers as the base table does.

    Lance numbers fields in order, children after their parent. Where the base table has dropped
    columns its ids have gaps; columns are put into them, to be dropped again after the write.
    """
    fields: list[pa.Field] = []
    gaps: list[str] = []
    next_id = 0
    for field in schema:
        metadata = dict(field.metadata or {})
        stored = metadata.pop(FIELD_ID, None)
        wanted = next_id if stored is None else int(stored)
        if wanted < next_id:
            raise NotATable(
                f"column {field.name!r} has field id {wanted} where at least {next_id} was "
                "expected: the type of a column before it was changed, or a member added to it. "
                "Generations cannot have such ids; rewrite the table with lance.write_dataset"
            )
        while next_id < wanted:
            gaps.append(f"_penstock_gap_{next_id}")
            fields.append(pa.field(gaps[-1], pa.int8()))
            next_id += 1
        fields.append(pa.field(field.name, field.type, field.nullable, metadata or None))
        next_id += _ids_of(field.type)
    return pa.schema(fields), gaps


def _ids_of(value_type: pa.DataType) -> int:
    """How many field ids Lance spends on a column of that type."""
    if pa.types.is_struct(value_type):
        return 1 + sum(_ids_of(value_type.field(i).type) for i in range(value_type.num_fields))
    if pa.types.is_list(value_type) or pa.types.is_large_list(value_type):
        return 1 + _ids_of(value_type.value_type)
    if pa.types.is_map(value_type):
        return 2 + _ids_of(value_type.key_type) + _ids_of(value_type.item_type)
    return 1


def _hide_superseded(
    dataset: lance.LanceDataset, superseded: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> lance.LanceDataset:
    if not len(superseded):
        return dataset
    fragment = dataset.get_fragments()[0].delete_rows(superseded.tolist())
    assert fragment is not None, "the newest row of a key is never superseded"
    operation = lance.LanceOperation.Delete([fragment], [], "superseded within the generation")
    return lance.LanceDataset.commit(
        dataset.uri,
        operation,
        read_version=dataset.version,
        storage_options=dataset._storage_options,
    )
