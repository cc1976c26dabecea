"""Data files of generations that become data files of the base table as they are.

A generation is a Lance table with the base table's columns and `_tombstone`. Its data file gets a
second name among those of the base table, and a fragment names of it the columns that the base
table has. Nothing is decoded, encoded or moved: on a disk both names are of one file, an object
store copies it by itself. Rows that the base table must not have (older ones of a key, tombstones)
stay in the file and are deleted from the fragment.

A file can be adopted only if Lance reads it the same way in both places: written by the same
version of the file format, each column there under the same field id, name and type. And it should
be worth keeping: few of its rows dead, and so many live that a fragment of them is no burden.
Compaction rewrites adopted fragments in time, like others that are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.fragment import DataFile, FragmentMetadata

from penstock.errors import ObjectNotFound, StorageError
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.freshness import Mask
from penstock.memwal.packed_indexes import carry_over
from penstock.memwal.sources import GenerationSource, StaleView

ADOPTED_ROWS = 10_000
"""A generation with fewer live rows is rewritten together with others."""
DEAD_SHARE = 0.2
"""One with a larger share of dead rows is rewritten without them."""
_MAX_BYTES = 4 << 30
"""Object stores copy files of up to 5 GB in one request."""

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Adopted:
    """A generation's data file as a fragment of the base table that no version names yet."""

    fragment: FragmentMetadata
    dead: Offsets
    """The rows of the file that the base table must not have."""
    tombstones: int
    """How many of the newest rows were deletes."""

    @property
    def path(self) -> str:
        path: str = self.fragment.files[0].path
        return path

    @property
    def rows(self) -> int:
        return int(self.fragment.physical_rows) - len(self.dead)


def adopt(
    table: BaseTable, base: BaseSnapshot, source: GenerationSource, mask: Mask | None
) -> Adopted | None:
    """Give a generation's data file a place among those of the base table, if that is worth it.

    `mask` says which of its rows are the newest of their key; all, if there is none.
    """
    if source.rows < ADOPTED_ROWS:
        return None
    shape = base.shape
    fragments = source.guarded(lambda: source.dataset.get_fragments())
    if len(fragments) != 1 or not source.is_current(shape):
        return None
    fragment = fragments[0].metadata
    if len(fragment.files) != 1 or fragment.overlays:
        return None
    file = fragment.files[0]
    columns = _columns(base.dataset, source.dataset)
    version = f"{file.file_major_version}.{file.file_minor_version}"
    if columns is None or version != base.dataset.data_storage_version:
        return None
    if (file.file_size_bytes or 0) > _MAX_BYTES:
        return None
    values = [field for field in shape.schema if field.name not in shape.key_columns]
    nullable = all(map(_may_be_null, values))
    live = np.zeros(fragment.physical_rows, dtype=np.bool_)
    tombstones = 0
    for _, numbers, dead in source.scan(shape, [], None):
        assert numbers is not None
        assert dead is not None
        newest = np.ones(len(numbers), dtype=np.bool_) if mask is None else mask[numbers]
        tombstones += int(np.count_nonzero(newest & dead))
        live[numbers[newest & ~dead]] = True
        if dead.any() and not nullable:
            return None  # Lance refuses to read their nulls, even where it has to skip them
    dead_rows = np.flatnonzero(~live)
    if len(dead_rows) > DEAD_SHARE * len(live) or len(live) - len(dead_rows) < ADOPTED_ROWS:
        return None
    path = _second_name(table, source, f"data/{file.path}")
    carry_over(table, base, source.key, path)
    pairs = zip(file.fields, file.column_indices, strict=True)
    named = [(field, column) for field, column in pairs if field in columns]
    adopted = DataFile(
        path,
        [field for field, _ in named],
        [column for _, column in named],
        file.file_major_version,
        file.file_minor_version,
        file.file_size_bytes,
    )
    return Adopted(
        FragmentMetadata(id=0, files=[adopted], physical_rows=fragment.physical_rows),
        dead_rows,
        tombstones,
    )


def _second_name(table: BaseTable, source: GenerationSource, file: str) -> str:
    last: StorageError | None = None
    for _ in table.seams.attempts():
        # Another one each time: an answer that was lost may have left a file.
        path = f"{table.seams.entropy.uuid4().hex}.lance"
        try:
            table.store.copy(f"{source.key}/{file}", f"data/{path}")
        except ObjectNotFound as error:
            raise StaleView(f"generation {source.path} is gone: {error}") from error
        except StorageError as error:
            last = error
            continue
        return path
    assert last is not None
    raise last


def _columns(base: lance.LanceDataset, generation: lance.LanceDataset) -> set[int] | None:
    """The field ids of all columns, nested ones too; None if they are other ones there."""
    there = {field.name(): field for field in generation.lance_schema.fields()}
    ids: set[int] = set()
    for field in base.lance_schema.fields():
        found = there.get(field.name())
        if found is None or _tree(field) != _tree(found):
            return None
        ids |= _ids(field)
    return ids


def _tree(field: Any) -> tuple[Any, ...]:
    return field.name(), field.id(), tuple(_tree(child) for child in field.children())


def _ids(field: Any) -> set[int]:
    return {field.id()}.union(*(_ids(child) for child in field.children()))


def _may_be_null(field: pa.Field) -> bool:
    """Whether a column, and all that is nested in it, may have nulls."""
    kind = field.type
    nested = [kind.field(n) for n in range(kind.num_fields)]
    return bool(field.nullable) and all(map(_may_be_null, nested))
