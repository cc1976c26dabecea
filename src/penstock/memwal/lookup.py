"""Looking rows up by key: newest source first, and no further than needed.

Each key is asked of the MemTables, then of the generations whose bloom filter does not rule it
out, newest first, and last of the base. A key that was found, alive or deleted, is not asked for
again. Many keys are looked up together, source by source.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.index.key_index import NOT_FOUND
from penstock.index.primary_key import key_array
from penstock.memwal.freshness import Mask
from penstock.memwal.region_spec import arrow_type
from penstock.memwal.sources import ROW_ID, MemTableSource, tombstone_free
from penstock.memwal.transforms import encode_value, group
from penstock.memwal.view import View


def get_many(
    view: View, keys: dict[str, pa.Array], columns: Sequence[str] | None = None
) -> pa.Table:
    """The live rows with these keys, each once, in no particular order."""
    shape = view.shape
    chosen = list(columns) if columns is not None else list(shape.schema.names)
    schema = pa.schema([shape.schema.field(name) for name in chosen])
    asked = pa.table(keys)
    wanted = key_array(asked, shape.key_columns)
    if len(wanted) > 1:
        wanted = pc.unique(wanted)
    found: list[pa.Table] = []
    everywhere = np.ones(len(wanted), dtype=np.bool_)
    missing = everywhere.copy()
    here_by_region = _keys_by_region(view, asked if len(wanted) == len(asked) else None)
    for region in reversed(view.regions):
        belongs = here_by_region.get(region.manifest.region_id, everywhere)
        for source in reversed(region.sources):
            places = np.flatnonzero(missing & belongs)
            if not len(places):
                break
            keys_here = wanted if len(places) == len(wanted) else wanted.take(pa.array(places))
            if isinstance(source, MemTableSource):
                batches, hit = source.find_batches(keys_here)
                if batches:
                    rows = pa.Table.from_batches([shape.align(batch) for batch in batches])
                    found.append(tombstone_free(rows).select(chosen))
            else:
                numbers = source.find(keys_here)
                hit = numbers >= 0
                if hit.any():
                    found.append(tombstone_free(source.take(numbers[hit], shape, chosen)))
            missing[places[hit]] = False
    if not missing.all():
        wanted = wanted.filter(pa.array(missing))
    if len(wanted):
        found.append(_from_base(view, wanted, chosen))
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in found)])


def _keys_by_region(view: View, keys: pa.Table | None) -> dict[uuid.UUID, Mask]:
    """Of each region which of the keys can be in it; a region left out may have any.

    A region says which values it stands for, and the values of a key follow from the spec it was
    written under. Without the keys' own columns, or for regions that record nothing, all may be.
    """
    result: dict[uuid.UUID, Mask] = {}
    if keys is None or len(view.regions) < 2:
        return result
    for spec in view.base.details.region_specs:
        regions = [r.manifest for r in view.regions if r.manifest.region_spec_id == spec.spec_id]
        if not any(manifest.region_values for manifest in regions):
            continue
        types = [arrow_type(field.result_type) for field in spec.fields]
        members: dict[tuple[tuple[str, bytes], ...], Mask] = {}
        for values, rows in group(spec, keys, view.shape.columns_by_id):
            encoded = [
                (field.field_id, raw)
                for field, kind, value in zip(spec.fields, types, values, strict=True)
                if (raw := encode_value(value, kind)) is not None
            ]
            mask = np.zeros(keys.num_rows, dtype=np.bool_)
            mask[slice(None) if rows is None else rows] = True
            members[tuple(encoded)] = mask
        nothing = np.zeros(keys.num_rows, dtype=np.bool_)
        for manifest in regions:
            if manifest.region_values:
                result[manifest.region_id] = members.get(manifest.region_values, nothing)
    return result


def _from_base(view: View, wanted: pa.Array, columns: list[str]) -> pa.Table:
    dataset = view.base.dataset
    index = view.key_index
    if index is not None:
        row_ids = index.find(wanted)
        row_ids = row_ids[row_ids != NOT_FOUND]
    else:
        parts = [np.empty(0, dtype=np.uint64)]
        scanner = dataset.scanner(columns=list(view.shape.key_columns), with_row_id=True)
        for batch in scanner.to_batches():
            here = pc.is_in(key_array(batch, view.shape.key_columns), value_set=wanted)
            parts.append(batch.column(ROW_ID).filter(here).to_numpy())
        row_ids = np.concatenate(parts)
    if not len(row_ids):
        return view.shape.schema.empty_table().select(columns)
    return dataset._take_rows(row_ids.tolist(), columns=columns)
