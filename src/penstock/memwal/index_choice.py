"""Which of several indexes on a column readers use, and taking indexes away.

To change the model of a vector index, or the tokenizer of a text index, a second index is created
on the same column. MemTables and generations maintain both from then on. Readers use one of them,
all the same one: the choice is kept with the MemWAL index, so it belongs to a version of the table
like everything else. `use_index` changes it, and `drop_index` takes away the one that is left over.

Invariant: an index that answered before another was created answers until it is told otherwise or
dropped. Columns are named by field id here, because they can be renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import lance

from penstock.errors import CommitConflict, InvalidInput
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.index_segments import BaseIndexes, is_searched, to_remove
from penstock.memwal.packed_indexes import withdraw
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.table_commit import commit_details, commit_next

_CHOICE = "penstock.index."


def chosen_index(details: MemWalIndexDetails, field_id: int, names: Sequence[str]) -> str:
    """The index that readers use, of those with these names on a column."""
    chosen = details.writer_config_defaults.get(f"{_CHOICE}{field_id}")
    return chosen if chosen is not None and chosen in names else min(names)


def keep_serving(table: BaseTable, column: str) -> None:
    """Let the index that a column is searched by now stay that one, whatever is created next."""
    base = table.snapshot()
    field_id = base.shape.field_ids[column]
    names = _searched(base, field_id)
    if names:
        _choose(table, field_id, chosen_index(base.details, field_id, names))


def use_index(table: BaseTable, name: str) -> None:
    """Let readers use this index, of those on its column."""
    base = table.snapshot()
    indexes = BaseIndexes.of(base.dataset)
    found = indexes.by_name.get(name)
    if found is None and name not in (spec.name for spec in packed_specs(base.details)):
        raise _unknown(table, base, name, indexes)
    if found is None:
        raise _for_filters(table, name)
    (field_id,) = found.fields
    if name not in _searched(base, field_id):
        raise _for_filters(table, name)
    _choose(table, field_id, name)


def drop_index(table: BaseTable, name: str) -> int:
    """Take an index away; returns the version without it. Its files are left to clean-up."""
    withdrawn = withdraw(table, name)
    if withdrawn is not None:
        return withdrawn
    for _ in table.seams.races():
        base = table.snapshot()
        indexes = BaseIndexes.of(base.dataset)
        found = indexes.by_name.get(name)
        if found is None:
            raise _unknown(table, base, name, indexes)
        removed = [to_remove(name, segment.uuid) for segment in found.segments]
        defaults = base.details.writer_config_defaults
        kept = {
            key: value
            for key, value in defaults.items()
            if value != name or not key.startswith(_CHOICE)
        }
        if commit_next(
            table.store,
            table.storage_options,
            base.dataset,
            lance.LanceOperation.CreateIndex([], removed),
            table.seams,
            details=replace(base.details.with_catchup(name, None), writer_config_defaults=kept),
        ):
            return base.version + 1
    raise CommitConflict(
        f"index {name!r} of {table.uri} could not be dropped: other commits won "
        f"{table.seams.backoff.races} times; try again later"
    )


def _for_filters(table: BaseTable, name: str) -> InvalidInput:
    return InvalidInput(
        f"index {name!r} of {table.uri} is for filters, which use any index there is; "
        "only vector and full-text indexes are chosen"
    )


def _unknown(table: BaseTable, base: BaseSnapshot, name: str, indexes: BaseIndexes) -> InvalidInput:
    packed = [spec.name for spec in packed_specs(base.details)]
    there = ", ".join([*indexes.by_name, *packed]) or "none"
    return InvalidInput(f"{table.uri} has no index {name!r}; there are: {there}")


def _searched(base: BaseSnapshot, field_id: int) -> list[str]:
    return [
        index.name
        for index in base.dataset.describe_indices()
        if list(index.fields) == [field_id] and is_searched(index)
    ]


def _choose(table: BaseTable, field_id: int, name: str) -> None:
    key = f"{_CHOICE}{field_id}"

    def change(details: MemWalIndexDetails | None) -> MemWalIndexDetails | None:
        assert details is not None
        if details.writer_config_defaults.get(key) == name:
            return None
        defaults = {**details.writer_config_defaults, key: name}
        return replace(details, writer_config_defaults=defaults)

    commit_details(table.store, table.storage_options, change, table.seams)
