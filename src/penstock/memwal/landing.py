"""Whether a WAL entry whose writer was shut out is in the log that its successor replayed."""

from __future__ import annotations

from penstock.errors import AmbiguousWrite
from penstock.memwal.base_table import BaseTable
from penstock.memwal.claim import RegionIdentity
from penstock.memwal.manifest import manifest_chain
from penstock.memwal.wal import Wal


def has_landed(table: BaseTable, identity: RegionIdentity, position: int, write_id: bytes) -> bool:
    """False too where rows can be sent again without harm, because the table has a key."""
    manifest = manifest_chain(table.store, identity.region_id, table.seams).latest()
    entry = Wal(table.store, identity.region_id, table.seams).read(position)
    covered = manifest.replay_after_wal_entry_position if manifest is not None else 0
    if entry is not None and entry.write_id != write_id:
        return False
    if position > covered:
        return entry is not None
    if table.snapshot().shape.key_columns:
        return False  # with a key, rows that are written twice are still there once
    raise AmbiguousWrite(
        f"region {identity.region_id}: WAL entry {position} was fenced and cleaned up before its "
        "fate could be seen; the table has no key, so look whether the rows are there before you "
        "send them again"
    )
