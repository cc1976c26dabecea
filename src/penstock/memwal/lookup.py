"""Looking rows up by key: newest source first, and no further than needed.

Each key is asked of the MemTables, then of the generations whose bloom filter does not rule it
out, newest first, and last of the base. A key that was found, alive or deleted, is not asked for
again. Many keys are looked up together, source by source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.index.key_index import NOT_FOUND
from penstock.index.primary_key import key_array
from penstock.memwal.sources import ROW_ID, MemTableSource, tombstone_free
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
    for source in reversed(view.sources):
        if not len(wanted):
            break
        if isinstance(source, MemTableSource):
            batches, hit = source.find_batches(wanted)
            if batches:
                rows = pa.Table.from_batches([shape.align(batch) for batch in batches])
                found.append(tombstone_free(rows).select(chosen))
        else:
            places = source.find(wanted)
            hit = places >= 0
            if hit.any():
                found.append(tombstone_free(source.take(places[hit], shape, chosen)))
        if hit.any():
            wanted = wanted.filter(pa.array(~hit))
    if len(wanted):
        found.append(_from_base(view, wanted, chosen))
    return pa.concat_tables([schema.empty_table(), *(table.cast(schema) for table in found)])


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
