"""What somebody may do to a table who has plain Lance and not Penstock.

Merges are done here the way any merge job may: the oldest generations of a region first, tombstones
and rows in one go, the progress in the commit that brings the rows; and no region of a newer spec
before the older ones are sealed and empty. Clean-up is done without a look at what others need.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable, LsmPointLookupPlanner, LsmScanner, ShardSnapshot
from tests.model.handle import User
from tests.model.questions import Key, Question, Row, agree, by_key
from tests.model.world import World, field_ids

from penstock.memwal import names
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import RegionManifest, RegionStatus
from penstock.memwal.table_commit import commit_details
from penstock.memwal.wal import Wal
from penstock.storage.seams import Seams

# --- merging -----------------------------------------------------------------------------------


def mergeable(world: World) -> list[RegionManifest]:
    """Regions whose generations may be merged now, those with something to merge first."""
    details = world.details()
    every = world.manifests()

    def is_empty(region: RegionManifest) -> bool:
        return details.merged(region.region_id) >= region.current_generation - 1

    open_ranks = [
        region.region_spec_id
        for region in every
        if not is_empty(region) or region.status is not RegionStatus.SEALED
    ]
    oldest = min(open_ranks, default=0)
    ready = [region for region in every if region.region_spec_id <= oldest]
    return sorted(ready, key=lambda region: (is_empty(region), str(region.region_id)))


def merge(world: World, pick: int, generations: int) -> None:
    """Merge the oldest generations of a region into the base table."""
    ready = mergeable(world)
    if ready:
        merge_region(world, ready[pick % len(ready)], generations)


def merge_region(world: World, region: RegionManifest, generations: int) -> None:
    merged = world.details().merged(region.region_id)
    chosen = range(merged + 1, min(merged + 1 + generations, region.current_generation))
    if not chosen:
        return
    newest: dict[Key, Row | None] = {}
    for generation in chosen:
        newest.update(world.flushed(region, generation))
    world.layers.merge(region.region_id, chosen[-1], newest)
    live = [world.columns.shown(row) for row in newest.values() if row is not None]
    gone = [key for key, row in newest.items() if row is None]
    key_columns = world.variant.primary_key
    base = world.base()
    rows = pa.Table.from_pylist(live, base.schema)
    if key_columns is None:
        lance.write_dataset(rows, base, mode="append")
        _mark(world, region.region_id, chosen[-1])
        return
    if gone:
        keys = pa.schema([base.schema.field(name) for name in key_columns])
        deleted = pa.Table.from_pylist(
            [dict(zip(key_columns, key, strict=True)) for key in gone], keys
        )
        base.merge_insert(key_columns).when_matched_delete().execute(deleted)
    if live:
        mark = CompactedSsTable(str(region.region_id), chosen[-1])
        upserts = world.base().merge_insert(key_columns)
        upserts = upserts.when_matched_update_all().when_not_matched_insert_all()
        upserts.mark_sstables_as_compacted([mark]).execute(rows)
    else:
        _mark(world, region.region_id, chosen[-1])


def _mark(world: World, region_id: uuid.UUID, generation: int) -> None:
    def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
        assert current is not None
        merged = {**current.merged_generations, region_id: generation}
        return replace(current, merged_generations=merged)

    commit_details(world.store, None, change, Seams())


def settle(world: World, user: User) -> None:
    """Bring everything into the base."""
    world.flush_all(user)
    for _ in range(len(world.manifests())):
        for region in mergeable(world):
            merge_region(world, region, region.current_generation)
    world.settled()


def edit_base(world: World, rows: Sequence[Row]) -> None:
    """Replace rows, those that nothing in front of the base supersedes."""
    chosen = {world.variant.key_of(row): row for row in rows}
    chosen = {key: row for key, row in chosen.items() if key not in world.in_front}
    if not chosen:
        return
    base = world.base()
    shown = [world.columns.shown(row) for row in chosen.values()]
    data = pa.Table.from_pylist(shown, base.schema)
    if world.variant.primary_key is None:
        lance.write_dataset(data, base, mode="append")
    else:
        edit = base.merge_insert(world.variant.primary_key)
        edit.when_matched_update_all().when_not_matched_insert_all().execute(data)
    world.model.update(chosen)
    world.layers.base.update(chosen)


# --- Lance's own readers -----------------------------------------------------------------------


def ask_lance(world: World, user: User, question: Question) -> None:
    """Lance reads no log of others, knows no order of specs, and columns only by their names.

    So everything is flushed first, and what is of an older spec or has older columns is merged.
    """
    world.flush_all(user)
    world.work(user, "snapshot", (False,), question)
    agree("a snapshot of everything flushed", world.layers.rows, world.model)
    newest = max(spec.spec_id for spec in world.details().region_specs)
    for region in world.manifests():
        if region.region_spec_id < newest or _has_older_columns(world, region):
            merge_region(world, region, region.current_generation)
    base = world.base()
    shards = [_as_lance_sees(world, region) for region in world.manifests()]
    scanned = LsmScanner.from_snapshots(base, shards).to_table().to_pylist()
    agree("Lance's scan", by_key(world.variant, world.columns, scanned), world.model)
    planner = LsmPointLookupPlanner(base, shards)
    for key in question.keys:
        rows = planner.plan_lookup(_as_lance_asks(world, key)).to_table().to_pylist()
        expected = [world.columns.shown(world.model[key])] if key in world.model else []
        agree(f"Lance's lookup of {key}", rows, expected)


def _has_older_columns(world: World, region: RegionManifest) -> bool:
    now = field_ids(world.base())
    merged = world.details().merged(region.region_id)
    for flushed in region.flushed_generations:
        if flushed.generation > merged:
            directory = f"{names.region_dir(region.region_id)}/{flushed.path}"
            then = field_ids(lance.dataset(f"{world.store.uri}/{directory}"))
            if {name: id for name, id in then.items() if name != "_tombstone"} != now:
                return True
    return False


def _as_lance_sees(world: World, region: RegionManifest) -> ShardSnapshot:
    """A region without what is merged, which Lance's readers would take for newer."""
    shard = ShardSnapshot(str(region.region_id)).with_spec_id(region.region_spec_id)
    shard = shard.with_current_generation(region.current_generation)
    merged = world.details().merged(region.region_id)
    for flushed in region.flushed_generations:
        if flushed.generation > merged:
            shard = shard.with_sstable(flushed.generation, flushed.path)
    return shard


def _as_lance_asks(world: World, key: Key) -> pa.Array:
    columns = world.variant.key_fields
    arrays = [pa.array([value], c.type) for value, c in zip(key, columns, strict=True)]
    if len(arrays) == 1:
        return arrays[0]
    return pa.StructArray.from_arrays(arrays, names=[column.name for column in columns])


# --- clean-up ----------------------------------------------------------------------------------


def clean_up(world: World, user: User, question: Question, *, spare: bool) -> None:
    """Remove merged generations, and log entries that are in generations.

    Spares those that remembered versions stand on, or else has such a version read once more.
    """
    details = world.details()
    spared = world.layers.spared() if spare else set()
    removed = set()
    for region in world.manifests():
        directory = names.region_dir(region.region_id)
        for flushed in region.flushed_generations:
            generation = (region.region_id, flushed.generation)
            if generation[1] <= details.merged(region.region_id) and generation not in spared:
                world.store.delete_prefix(f"{directory}/{flushed.path}")
                removed.add(generation)
        wal = Wal(world.store, region.region_id, Seams())
        for position in range(1, region.replay_after_wal_entry_position + 1):
            entry = wal.read(position)
            # A former owner that sleeps must still collide with the fence when it wakes up.
            if entry is not None and not entry.is_fence:
                world.store.delete(names.wal_key(region.region_id, position))
    world.lose(user, question, lambda known: bool(known.needs & removed))
