"""A table, its users, and the plain dict that says what it must hold.

Users write one after the other, so the dict is always exact. Only a write that was refused leaves
a choice: it is atomic per region, so each region's part of it is there whole or not at all, and
the table is asked which. A job that was cut short leaves one for each row that it changes.

What a job has done behind the scenes is read from the table itself, by plain Lance: which
generations are merged, which the snapshot names, what is in the base. Each of that has to be what
it was before or what the job makes of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.dataset import LanceDataset
from tests.model.handle import Handle, How, Piece, User
from tests.model.jobs import Scene, plan
from tests.model.layers import Changes, Generation, GenerationId, Layers, after, reshaped
from tests.model.mortal import Death
from tests.model.questions import (
    EVERY,
    EXTRA,
    HALVES,
    NUMBERS,
    TEXTS,
    Answer,
    Columns,
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
from penstock.memwal.index_details import MemWalIndexDetails
from penstock.memwal.manifest import RegionManifest
from penstock.memwal.regions import load_manifests
from penstock.memwal.snapshots import read_snapshot
from penstock.memwal.table_versions import read_details
from penstock.storage.open import open_store
from penstock.storage.seams import Seams

_FLUSH_ATTEMPTS = 4
STRONG: How = {}
EVENTUAL: How = {"consistency": "eventual"}
INDEXES = ((("n", "btree"), ("s", "fts")), (("n", "btree"),), ())


_FLUSH = ("flush", (True,))
_MERGE = ("merge", (1_000_000,))
_BEFORE: dict[str, Sequence[tuple[str, tuple[Any, ...]]]] = {
    "merge": (_FLUSH,),
    "snapshot": (_FLUSH,),
    "compact": (_FLUSH, _MERGE),
    "build_indexes": (_FLUSH, _MERGE),
    "complete": (_FLUSH,),
}
"""What makes work for a job."""


class World:
    def __init__(self, variant: Variant, lake: Path, regions: int, indexes: int) -> None:
        self.variant = variant
        self.uri = str(lake)
        self.name = f"t{uuid.uuid4().hex}"
        self.columns = variant.columns
        function, arguments = variant.regions[regions % len(variant.regions)]
        created = penstock.connect(self.uri).create_table(
            self.name,
            variant.schema,
            primary_key=variant.primary_key,
            regions=getattr(penstock, function)(*arguments),
        )
        for column, kind in INDEXES[indexes % len(INDEXES)]:
            created.create_index(column, kind)
        self.store = open_store(created.uri)
        self.model: dict[Key, Row] = {}
        self.in_front: set[Key] = set()
        """Keys that may be in a generation or a log that is not merged."""
        self.layers = Layers()
        self._pieces: list[Piece] = []
        self._contents: dict[GenerationId, Changes] = {}
        self._named_to: dict[uuid.UUID, int] = {}
        """Of each region that the last snapshot has, the generation it was at."""
        self.users: list[User] = [self.enter(), self.enter()]
        self._stamp = 0

    def enter(self) -> Handle:
        return Handle(self.uri, self.name)

    def leave(self) -> None:
        for user in self.users:
            running = user.leave()
            assert not running, f"still running when the walk is over: {running}"
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
            if EXTRA in self.columns.by_role:
                row[EXTRA] = NUMBERS[(key + rest) % len(NUMBERS)]
            made.append(row)
        return made

    def upsert(self, user: User, rows: Sequence[Row], question: Question, *, own: bool) -> None:
        changed: dict[Key, Row | None] = {self.variant.key_of(row): row for row in rows}
        done = user.upsert([self.columns.shown(row) for row in rows], own)
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
            seen = user.answer(question.wire(self.columns), HALVES[0], STRONG)
            done = user.drain()
        if done:
            self.model = after(self.model, changed)
            if seen is not None:
                self.check(question, seen)
            return
        found = self.seen_anew()
        landed: dict[Key, Row | None] = {}
        for group in self._groups(routed):
            if any(found.get(key) == changed[key] != self.model.get(key) for key in group):
                landed.update({key: changed[key] for key in group})
        self.model = after(self.model, landed)

    def _groups(self, rows: Sequence[Row]) -> Iterator[set[Key]]:
        """The keys of a write by region, of every spec that its writer may have gone by."""
        fields = list(self.variant.key_fields)
        sources = [{field.name: row[field.name] for field in fields} for row in rows]
        batch = pa.RecordBatch.from_pylist(sources, pa.schema(fields))
        columns = {f.id(): f.name() for f in self.base().lance_schema.fields()}
        labels: list[list[Any]] = [[] for _ in rows]
        for spec in self.details().region_specs:
            for values, indices in transforms.group(spec, batch, columns):
                for number in range(len(rows)) if indices is None else indices:
                    labels[int(number)].append(values)
        groups: dict[str, set[Key]] = {}
        for row, label in zip(rows, labels, strict=True):
            groups.setdefault(repr(label), set()).add(self.variant.key_of(row))
        yield from groups.values()

    # --- reading -------------------------------------------------------------------------------

    def ask(self, user: User, question: Question, reads: Reads) -> None:
        self.check(question, user.answer(question.wire(self.columns), reads, STRONG))

    def ask_eventually(self, user: User, question: Question, reads: Reads) -> None:
        answer = user.answer(question.wire(self.columns), reads, EVENTUAL)
        check(self.variant, self.columns, self.layers.rows, question, answer)

    def ask_of_the_past(self, user: User, question: Question, reads: Reads, pick: int) -> None:
        """Ask for a version that is remembered."""
        if self.layers.remembered:
            version = self.layers.remembered[pick % len(self.layers.remembered)]
            how = {"version": version.version}
            answer = user.answer(question.wire(version.columns), reads, how)
            check(self.variant, version.columns, version.rows, question, answer)

    def check(self, question: Question, answer: Answer) -> None:
        check(self.variant, self.columns, self.model, question, answer)

    def seen_anew(self) -> dict[Key, Row]:
        """What somebody sees who has just come."""
        visitor = self.enter()
        found = by_key(self.variant, self.columns, visitor.table.to_arrow().to_pylist())
        visitor.leave()
        return found

    # --- what lies behind ----------------------------------------------------------------------

    def base(self) -> LanceDataset:
        return lance.dataset(self.store.uri)

    def base_rows(self) -> dict[Key, Row]:
        """What a Lance user sees who knows nothing of regions."""
        return by_key(self.variant, self.columns, self.base().to_table().to_pylist())

    def details(self) -> MemWalIndexDetails:
        found = read_details(self.store, self.base().version)
        assert found is not None
        return found[0]

    def manifests(self) -> list[RegionManifest]:
        found = load_manifests(self.store, Seams())
        return sorted(found, key=lambda region: (region.region_spec_id, region.region_id))

    def flushed(self, region: RegionManifest, number: int) -> Changes:
        """The newest row of each key in a generation, None for a tombstone; by plain Lance.

        It has the columns of its time. They are known by their ids, whatever they were called.
        """
        known = self._contents.get((region.region_id, number))
        if known is not None:
            return known
        listed = region.generation(number)
        assert listed is not None, f"{region.region_id} does not list generation {number}"
        directory = f"{names.region_dir(region.region_id)}/{listed.path}"
        dataset = lance.dataset(f"{self.store.uri}/{directory}")
        ids = field_ids(dataset)
        roles = {name: role for role, name in self.columns.named}
        stored = {roles[name]: id for name, id in field_ids(self.base()).items()}
        names_then = {id: name for name, id in ids.items() if name != "_tombstone"}
        found: dict[Key, Row | None] = {}
        for row in dataset.to_table().to_pylist():
            now = {role: row.get(names_then.get(id, "")) for role, id in stored.items()}
            found[self.variant.key_of(now)] = None if row["_tombstone"] else now
        self._contents[region.region_id, number] = found
        return found

    # --- jobs ----------------------------------------------------------------------------------

    def work(
        self,
        user: User,
        name: str,
        drawn: tuple[Any, ...],
        question: Question,
        death: Death | None = None,
    ) -> None:
        """Have a user do a job, or die of it, and hold the table against what it must come to."""
        scene = Scene(self.variant, self.columns, self.model, self.rows, self._pieces)
        job = plan(name, drawn, scene)
        if job.alone:
            self._pieces = []
            for somebody in self.users:
                somebody.rest()
        if job.method == "maintain" and job.forgets:
            # It cleans up what it has merged, and nobody could tell what was in that.
            self.flush_all(user)
        manifests = self.manifests()
        for region in manifests:
            for number in self._unmerged(region):
                self.flushed(region, number)
        done = user.work(job.method, job.arguments, death)
        assert done or death is not None or job.flushes, f"{job.method} was refused"
        if job.columns is not None:
            self._follow_columns(job.columns, done=done)
        self._follow_merges()
        if job.snapshots or job.method == "maintain":
            self._follow_snapshot(manifests, must=done and job.snapshots)
        self._follow_rows(job.changes, done=done)
        if job.forgets:
            newest = self.base().version
            self.lose(user, question, lambda known: known.tag is None and known.version != newest)
        if job.settles and done:
            self.settled()
        if job.snapshots and done:
            self.remember(pin=False)
        if job.method == "complete" and done:
            self._pieces = []

    def start(self, user: User, job: str) -> None:
        """Have a job worked out, to be committed by anybody when the table is another."""
        self._pieces += user.start(job)

    def give_work(self, user: User, name: str, question: Question) -> None:
        """See to it that a job has something to do."""
        if name in _BEFORE:
            cells = [(self._stamp, self._stamp), (self._stamp + 5, self._stamp)]
            self.upsert(user, self.rows(cells), question, own=False)
        for job, drawn in _BEFORE.get(name, ()):
            self.work(user, job, drawn, question)
        if name == "complete" and not self._pieces:
            self.start(user, "merge")

    def _unmerged(self, region: RegionManifest) -> range:
        merged = self.layers.merged.get(region.region_id, 0)
        return range(merged + 1, region.current_generation)

    def _follow_columns(self, columns: Columns, *, done: bool) -> None:
        found = self.base().schema.names
        if not done and found == self.columns.names:
            return
        agree("the columns", found, columns.names)
        before, self.columns = self.columns, columns
        if EXTRA in before.by_role and EXTRA not in columns.by_role:
            self._reshape(lambda row: {r: value for r, value in row.items() if r != EXTRA})
        elif EXTRA in columns.by_role and EXTRA not in before.by_role:
            self._reshape(lambda row: {**row, EXTRA: None})

    def _reshape(self, change: Callable[[Row], Row]) -> None:
        self.model = {key: change(row) for key, row in self.model.items()}
        self.layers.reshape(change)
        self._contents = {g: reshaped(rows, change) for g, rows in self._contents.items()}

    def _follow_merges(self) -> None:
        """Take the generations into the base that the table says are in it."""
        details = self.details()
        for region in self.manifests():
            merged = details.merged(region.region_id)
            for number in range(self.layers.merged.get(region.region_id, 0) + 1, merged + 1):
                self.layers.merge(region.region_id, number, self.flushed(region, number))

    def _follow_snapshot(self, before: Sequence[RegionManifest], *, must: bool) -> None:
        """Take over which generations the snapshot names: all there were, or those of the last."""
        inline = self.details().inline_snapshots
        if inline is None:
            assert not must
            return
        named = read_snapshot(self.store, inline, "the snapshot")
        reached = {region.region_id: region.current_generation for region in named}
        if must:
            for region in before:
                assert reached.get(region.region_id, 0) >= region.current_generation
        if reached == self._named_to:
            return
        for region_id, generation in self._named_to.items():
            assert reached[region_id] >= generation, "a snapshot went backwards"
        self._named_to = reached
        self.layers.named = [
            Generation(
                region.region_id, region.region_spec_id, number, self.flushed(region, number)
            )
            for region in named
            for number in self._unmerged(region)
        ]

    def _follow_rows(self, changes: Changes, *, done: bool) -> None:
        """Every row that the job changes is the new one; if it was cut short, one of the two."""
        base = self.base_rows()
        for key in {**base, **self.layers.base}:
            if base.get(key) != self.layers.base.get(key):
                assert key in changes, f"{key} has changed in the base, and nothing changed it"
                agree(f"{key} in the base", base.get(key), changes[key])
        self.layers.base = base
        self.in_front.update(changes)
        if changes and not done:
            found = self.seen_anew()
            changes = {key: row for key, row in changes.items() if found.get(key) == row}
        self.model = after(self.model, changes)

    def lose(self, user: User, question: Question, lost: Callable[..., bool]) -> None:
        """Versions that may be gone answer in full or not at all, and are forgotten."""
        for version in self.layers.forget(lost):
            if version.tag is not None:
                self.base().tags.delete(version.tag)
            how = {"version": version.version}
            answer = user.answer_or_refuse(question.wire(version.columns), EVERY, how)
            if answer is not None:
                check(self.variant, version.columns, version.rows, question, answer)

    def remember(self, *, pin: bool) -> None:
        """Keep in mind what the newest version shows, with a tag or without."""
        base = self.base()
        tag = f"v{base.version}" if pin else None
        known = [version.tag for version in self.layers.remembered]
        if tag is not None and tag not in known:
            base.tags.create(tag, base.version)
        for dropped in self.layers.remember(base.version, self.columns, tag):
            if dropped.tag is not None and dropped.tag != tag:
                base.tags.delete(dropped.tag)

    def flush_all(self, user: User) -> None:
        """Bring every row, whoever wrote it, into generations."""
        for _ in range(_FLUSH_ATTEMPTS):
            if user.flush(True):
                return
        raise AssertionError("flush is refused again and again")

    def settled(self) -> None:
        """Everything is in the base: it has exactly the rows of the table."""
        agree("the base, with everything merged,", self.layers.base, self.model)
        self.in_front.clear()

    # --- the end -------------------------------------------------------------------------------

    def finish(self, question: Question) -> None:
        """One last round of maintenance, after which the table is what any Lance user sees."""
        user = self.users[0]
        self.flush_all(user)
        self.work(user, "maintain", (True, True), question)
        agree("what a Lance user sees", self.base_rows(), self.model)
        self.work(user, "gc", ({"retain_seconds": 0.0, "orphan_seconds": 0.0},), question)
        visitor = self.enter()
        left = visitor.table.gc(retain_seconds=0, orphan_seconds=0, dry_run=True)
        assert left.files == 0, f"clean-up has left something:\n{left}"
        assert not left.unknown, f"nobody knows what these are:\n{left}"
        visitor.leave()
        agree("what a Lance user sees after clean-up", self.base_rows(), self.model)
        for pick in range(len(self.layers.remembered)):
            self.ask_of_the_past(user, question, EVERY, pick)


def field_ids(dataset: LanceDataset) -> dict[str, int]:
    return {field.name(): field.id() for field in dataset.lance_schema.fields()}
