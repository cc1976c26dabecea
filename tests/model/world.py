"""A table, its users, and the plain dict that says what it must hold.

Users write one after the other, so the dict is always exact. Only a write that was refused leaves
a choice: it is atomic per region, so each region's part of it is there whole or not at all, and
the table is asked which.

Merges are done here by plain Lance, the way any merge job may: the oldest generations of a region
first, tombstones and rows in one go, the progress in the commit that brings the rows; and no region
of a newer spec before the older ones are sealed and empty.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.dataset import LanceDataset
from lance.mem_wal import CompactedSsTable, LsmPointLookupPlanner, LsmScanner, ShardSnapshot
from tests.model.handle import Handle, How, User
from tests.model.layers import Generation, Layers, after
from tests.model.questions import (
    EVERY,
    HALVES,
    NUMBERS,
    TEXTS,
    Answer,
    Key,
    Question,
    Reads,
    Row,
    Variant,
    agree,
    by_key,
    check,
)

import penstock
from penstock.memwal import names, transforms
from penstock.memwal.index_details import MemWalIndexDetails, commit_details, read_details
from penstock.memwal.manifest import RegionManifest, RegionStatus
from penstock.memwal.regions import load_manifests
from penstock.memwal.wal import Wal
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

_FLUSH_ATTEMPTS = 4
_SNAPSHOT_ATTEMPTS = 8
STRONG: How = {}
EVENTUAL: How = {"consistency": "eventual"}


class World:
    def __init__(self, variant: Variant, lake: Path, regions: int) -> None:
        self.variant = variant
        self.uri = str(lake)
        self.name = f"t{uuid.uuid4().hex}"
        self.schema = variant.schema
        function, arguments = variant.regions[regions % len(variant.regions)]
        created = penstock.connect(self.uri).create_table(
            self.name,
            self.schema,
            primary_key=variant.primary_key,
            regions=getattr(penstock, function)(*arguments),
        )
        self.schema = created.schema
        self.store = open_store(created.uri)
        self.model: dict[Key, Row] = {}
        self.in_front: set[Key] = set()
        """Keys that may be in a generation or a log that is not merged."""
        self.layers = Layers()
        self.users: list[User] = [self.enter(), self.enter()]
        self._stamp = 0

    def enter(self) -> Handle:
        return Handle(self.uri, self.name)

    def leave(self) -> None:
        for user in self.users:
            user.leave()
        self.store.delete_prefix("")

    # --- writing -------------------------------------------------------------------------------

    def rows(self, drawn: Iterable[tuple[int, int]]) -> list[Row]:
        """Rows from a number for the key and one for the rest; each has a stamp of its own."""
        made = []
        for key, rest in drawn:
            self._stamp += 1
            columns = [column.name for column in self.variant.key_fields]
            row = dict(zip(columns, self.variant.keys[key % len(self.variant.keys)], strict=True))
            row["n"] = NUMBERS[rest % len(NUMBERS)]
            row["s"] = TEXTS[rest // len(NUMBERS) % len(TEXTS)]
            row["stamp"] = self._stamp
            made.append(row)
        return made

    def upsert(self, user: User, rows: Sequence[Row], question: Question, *, own: bool) -> None:
        changed: dict[Key, Row | None] = {self.variant.key_of(row): row for row in rows}
        done = user.upsert(rows, own)
        self._written(user, changed, rows, question, done=done, own=own)

    def delete(self, user: User, keys: Sequence[Key], question: Question, *, own: bool) -> None:
        columns = [column.name for column in self.variant.key_fields]
        routed = [dict(zip(columns, key, strict=True)) for key in keys]
        done = user.delete(keys, own)
        self._written(user, dict.fromkeys(keys), routed, question, done=done, own=own)

    def _written(
        self,
        user: User,
        changed: dict[Key, Row | None],
        routed: Sequence[Row],
        question: Question,
        *,
        done: bool,
        own: bool,
    ) -> None:
        self.in_front.update(changed)
        seen = None
        if done and own:
            # What is not in the log yet is seen by its writer, unless that was fenced meanwhile.
            seen = user.answer(question.wire, HALVES[0], STRONG)
            done = user.drain()
        if done:
            self.model = after(self.model, changed)
            if seen is not None:
                self.check(question, seen)
            return
        found = by_key(self.variant, self.enter().table.to_arrow().to_pylist())
        landed: dict[Key, Row | None] = {}
        for group in self._groups(routed, list(changed)):
            if any(found.get(key) == changed[key] != self.model.get(key) for key in group):
                landed.update({key: changed[key] for key in group})
        self.model = after(self.model, landed)

    def _groups(self, rows: Sequence[Row], keys: Sequence[Key]) -> Iterator[set[Key]]:
        """The keys of a write by region, of every spec that its writer may have gone by."""
        fields = [self.schema.field(name) for name in rows[0]]
        batch = pa.RecordBatch.from_pylist(list(rows), pa.schema(fields))
        columns = {f.id(): f.name() for f in self.base().lance_schema.fields()}
        labels: list[list[Any]] = [[] for _ in rows]
        for spec in self.details().region_specs:
            for values, indices in transforms.group(spec, batch, columns):
                for number in range(len(rows)) if indices is None else indices:
                    labels[int(number)].append(values)
        known = set(keys)
        groups: dict[str, set[Key]] = {}
        for row, label in zip(rows, labels, strict=True):
            key = self.variant.key_of(row)
            assert key in known
            groups.setdefault(repr(label), set()).add(key)
        yield from groups.values()

    # --- reading -------------------------------------------------------------------------------

    def ask(self, user: User, question: Question, reads: Reads) -> None:
        self.check(question, user.answer(question.wire, reads, STRONG))

    def ask_eventually(self, user: User, question: Question, reads: Reads) -> None:
        answer = user.answer(question.wire, reads, EVENTUAL)
        check(self.variant, self.layers.rows, question, answer)

    def ask_of_the_past(self, user: User, question: Question, reads: Reads, pick: int) -> None:
        """Ask for a version that is remembered."""
        if self.layers.remembered:
            version = self.layers.remembered[pick % len(self.layers.remembered)]
            answer = user.answer(question.wire, reads, {"version": version.version})
            check(self.variant, version.rows, question, answer)

    def check(self, question: Question, answer: Answer) -> None:
        check(self.variant, self.model, question, answer)

    # --- merging -------------------------------------------------------------------------------

    def base(self) -> LanceDataset:
        return lance.dataset(self.store.uri)

    def details(self) -> MemWalIndexDetails:
        found = read_details(self.store, self.base().version)
        assert found is not None
        return found[0]

    def regions(self) -> list[RegionManifest]:
        """Regions whose generations may be merged now, those with something to merge first."""
        details = self.details()
        every = load_manifests(self.store, Seams())

        def is_empty(region: RegionManifest) -> bool:
            flushed = region.current_generation - 1
            return details.merged(region.region_id) >= flushed

        open_ranks = [
            region.region_spec_id
            for region in every
            if not is_empty(region) or region.status is not RegionStatus.SEALED
        ]
        oldest = min(open_ranks, default=0)
        ready = [region for region in every if region.region_spec_id <= oldest]
        return sorted(ready, key=lambda region: (is_empty(region), str(region.region_id)))

    def merge(self, pick: int, generations: int) -> None:
        """Merge the oldest generations of a region into the base table."""
        ready = self.regions()
        if ready:
            self._merge(ready[pick % len(ready)], generations)

    def _merge(self, region: RegionManifest, generations: int) -> None:
        merged = self.details().merged(region.region_id)
        chosen = range(merged + 1, min(merged + 1 + generations, region.current_generation))
        if not chosen:
            return
        newest: dict[Key, Row] = {}
        for generation in chosen:
            newest.update(self._flushed(region, generation))
        self.layers.merge(region.region_id, chosen[-1], _changes(newest))
        gone = [row for row in newest.values() if row["_tombstone"]]
        live = [row for row in newest.values() if not row["_tombstone"]]
        base = self.base()
        rows = pa.Table.from_pylist(live, base.schema)
        if self.variant.primary_key is None:
            lance.write_dataset(rows, base, mode="append")
            self._mark(region.region_id, chosen[-1])
            return
        if gone:
            keys = pa.schema([base.schema.field(name) for name in self.variant.primary_key])
            deleted = pa.Table.from_pylist(gone, keys)
            base.merge_insert(self.variant.primary_key).when_matched_delete().execute(deleted)
        if live:
            mark = CompactedSsTable(str(region.region_id), chosen[-1])
            upserts = self.base().merge_insert(self.variant.primary_key)
            upserts = upserts.when_matched_update_all().when_not_matched_insert_all()
            upserts.mark_sstables_as_compacted([mark]).execute(rows)
        else:
            self._mark(region.region_id, chosen[-1])

    def _flushed(self, region: RegionManifest, generation: int) -> dict[Key, Row]:
        """The newest row of each key in a generation, tombstones included, read by plain Lance."""
        flushed = region.generation(generation)
        assert flushed is not None
        path = f"{names.region_dir(region.region_id)}/{flushed.path}"
        rows = lance.dataset(f"{self.store.uri}/{path}").to_table().to_pylist()
        return {self.variant.key_of(row): row for row in rows}

    def _mark(self, region_id: uuid.UUID, generation: int) -> None:
        def change(current: MemWalIndexDetails | None) -> MemWalIndexDetails:
            assert current is not None
            merged = {**current.merged_generations, region_id: generation}
            return replace(current, merged_generations=merged)

        commit_details(self.store, None, change, Seams())

    def flush_all(self, user: User) -> None:
        """Bring every row, whoever wrote it, into generations."""
        for _ in range(_FLUSH_ATTEMPTS):
            if user.flush(True):
                return
        raise AssertionError("flush is refused again and again")

    def settle(self, user: User) -> None:
        """Bring everything into the base."""
        self.flush_all(user)
        for _ in range(len(load_manifests(self.store, Seams()))):
            for region in self.regions():
                self._merge(region, region.current_generation)
        self.in_front.clear()
        agree("the base, with everything merged,", self.layers.base, self.model)

    def edit_base(self, rows: Sequence[Row]) -> None:
        """Replace rows by plain Lance, those that nothing in front of the base supersedes."""
        chosen = {self.variant.key_of(row): row for row in rows}
        chosen = {key: row for key, row in chosen.items() if key not in self.in_front}
        if not chosen:
            return
        base = self.base()
        data = pa.Table.from_pylist(list(chosen.values()), base.schema)
        if self.variant.primary_key is None:
            lance.write_dataset(data, base, mode="append")
        else:
            edit = base.merge_insert(self.variant.primary_key)
            edit.when_matched_update_all().when_not_matched_insert_all().execute(data)
        self.model.update(chosen)
        self.layers.base.update(chosen)

    # --- snapshots -----------------------------------------------------------------------------

    def snapshot(self, user: User) -> None:
        """Have the generations that there are named; a flush may be under way, then once more."""
        for _ in range(_SNAPSHOT_ATTEMPTS):
            before = self._generations()
            version = user.snapshot()
            if self._generations() == before:
                break
        else:
            raise AssertionError("generations keep coming")
        known = {generation.id: generation for generation in self.layers.named}
        self.layers.named = [
            known.get((region.region_id, number))
            or Generation(
                region.region_id,
                region.region_spec_id,
                number,
                _changes(self._flushed(region, number)),
            )
            for region in load_manifests(self.store, Seams())
            for number in before[region.region_id]
            if number > self.layers.merged.get(region.region_id, 0)
        ]
        assert version == self.base().version
        self.layers.remember(version)

    def _generations(self) -> dict[uuid.UUID, list[int]]:
        return {
            region.region_id: [flushed.generation for flushed in region.flushed_generations]
            for region in load_manifests(self.store, Seams())
        }

    # --- Lance's own readers -------------------------------------------------------------------

    def ask_lance(self, user: User, keys: Sequence[Key]) -> None:
        """Lance reads no log of others and knows no order of specs: flush, and merge old specs."""
        self.flush_all(user)
        self.snapshot(user)
        agree("a snapshot of everything flushed", self.layers.rows, self.model)
        newest = max(spec.spec_id for spec in self.details().region_specs)
        for region in sorted(load_manifests(self.store, Seams()), key=lambda r: r.region_spec_id):
            if region.region_spec_id < newest:
                self._merge(region, region.current_generation)
        base = self.base()
        shards = [self._as_lance_sees(region) for region in load_manifests(self.store, Seams())]
        scanned = LsmScanner.from_snapshots(base, shards).to_table().to_pylist()
        agree("Lance's scan", by_key(self.variant, scanned), self.model)
        planner = LsmPointLookupPlanner(base, shards)
        for key in keys:
            rows = planner.plan_lookup(self._as_lance_asks(key)).to_table().to_pylist()
            expected = [self.model[key]] if key in self.model else []
            agree(f"Lance's lookup of {key}", rows, expected)

    def _as_lance_sees(self, region: RegionManifest) -> ShardSnapshot:
        """A region without what is merged, which Lance's readers would take for newer."""
        shard = ShardSnapshot(str(region.region_id)).with_spec_id(region.region_spec_id)
        shard = shard.with_current_generation(region.current_generation)
        merged = self.details().merged(region.region_id)
        for flushed in region.flushed_generations:
            if flushed.generation > merged:
                shard = shard.with_sstable(flushed.generation, flushed.path)
        return shard

    def _as_lance_asks(self, key: Key) -> pa.Array:
        columns = self.variant.key_fields
        arrays = [pa.array([value], c.type) for value, c in zip(key, columns, strict=True)]
        if len(arrays) == 1:
            return arrays[0]
        return pa.StructArray.from_arrays(arrays, names=[column.name for column in columns])

    # --- clean-up ------------------------------------------------------------------------------

    def clean_up(self, user: User, question: Question, *, spare: bool) -> None:
        """Remove merged generations, and log entries that are in generations.

        Spares those that remembered versions stand on, or else has such a version read once more:
        it answers in full or not at all.
        """
        details = self.details()
        spared = self.layers.spared() if spare else set()
        removed = set()
        for region in load_manifests(self.store, Seams()):
            directory = names.region_dir(region.region_id)
            for flushed in region.flushed_generations:
                generation = (region.region_id, flushed.generation)
                if generation[1] <= details.merged(region.region_id) and generation not in spared:
                    self.store.delete_prefix(f"{directory}/{flushed.path}")
                    removed.add(generation)
            wal = Wal(self.store, region.region_id, Seams())
            for position in range(1, region.replay_after_wal_entry_position + 1):
                entry = wal.read(position)
                # A former owner that sleeps must still collide with the fence when it wakes up.
                if entry is not None and not entry.is_fence:
                    self.store.delete(names.wal_key(region.region_id, position))
        for lost in self.layers.forget(removed):
            how = {"version": lost.version}
            answer = user.answer_or_refuse(question.wire, EVERY, how)
            if answer is not None:
                check(self.variant, lost.rows, question, answer)


def _changes(newest: dict[Key, Row]) -> dict[Key, Row | None]:
    """Rows of a generation as changes to a table."""
    return {
        key: None
        if row["_tombstone"]
        else {name: value for name, value in row.items() if name != "_tombstone"}
        for key, row in newest.items()
    }
