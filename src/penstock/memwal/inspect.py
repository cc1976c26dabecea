"""What a table is made of, down to the file: fragments, indexes, regions, generations, logs.

    newest version, region manifests, listings --inspect_table--> Inspection --> text, JSON, Arrow

The base version is read first and the regions after it, as every read does, so what was merged in
between shows as unmerged, never the other way round. Nothing is changed, and no data is read.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from penstock.memwal import names, tabular
from penstock.memwal.base_parts import (
    FragmentPart,
    IndexPart,
    VersionPart,
    read_fragments,
    read_indexes,
    read_versions,
)
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.region_parts import (
    GenerationPart,
    LogPart,
    RegionPart,
    read_generations,
    read_logs,
    read_regions,
)
from penstock.memwal.region_spec import RegionSpec
from penstock.memwal.regions import load_manifests
from penstock.memwal.snapshots import external_of

_SHOWN_ROWS = 40
"""Text shows so many rows of a kind; the others are in JSON and Arrow."""


@dataclass(frozen=True, slots=True)
class ColumnPart:
    name: str
    type: str
    nullable: bool
    field_id: int | None
    primary_key: bool


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The region snapshot that eventual reads and other tools go by."""

    taken_ms: int
    age_seconds: float
    regions: int
    size_bytes: int
    file: str | None
    """Where it lies if it is not in the index itself."""


@dataclass(frozen=True, slots=True)
class Inspection:
    uri: str
    table_id: str | None
    version: int
    rows: int
    """Rows of the base table; those in front of it are in regions."""
    data_storage_version: str
    stable_row_ids: bool
    columns: tuple[ColumnPart, ...]
    fragments: tuple[FragmentPart, ...]
    indexes: tuple[IndexPart, ...]
    region_specs: tuple[RegionSpec, ...]
    regions: tuple[RegionPart, ...]
    generations: tuple[GenerationPart, ...]
    logs: tuple[LogPart, ...]
    snapshot: SnapshotPart | None
    versions: tuple[VersionPart, ...]
    writer_defaults: Mapping[str, str]

    @property
    def primary_key(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.primary_key)

    @property
    def tags(self) -> dict[str, int]:
        return {tag: part.version for part in self.versions for tag in part.tags}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON has it."""
        plain: dict[str, Any] = _plain(asdict(self))
        plain["primary_key"] = list(self.primary_key)
        plain["tags"] = self.tags
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def to_arrow(self) -> dict[str, pa.Table]:
        """One table for each kind of part, such as `fragments` and `generations`."""
        return {name: pa.Table.from_pylist(rows, _SCHEMAS[name]) for name, rows in _rows(self)}

    def __str__(self) -> str:
        return "\n\n".join([_head(self), *(section for section in _sections(self) if section)])


def inspect_table(table: BaseTable) -> Inspection:
    """Take stock of a table as it is now."""
    base = table.snapshot()
    manifests = load_manifests(table.store, table.seams)
    fragments = read_fragments(base, table.store)
    dataset = base.dataset
    return Inspection(
        uri=table.uri,
        table_id=_table_id(table),
        version=base.version,
        rows=sum(fragment.rows for fragment in fragments),
        data_storage_version=str(dataset.data_storage_version),
        stable_row_ids=bool(dataset.has_stable_row_ids),
        columns=tuple(
            ColumnPart(
                name=field.name,
                type=str(field.type),
                nullable=field.nullable,
                field_id=base.shape.field_ids.get(field.name),
                primary_key=field.name in base.shape.key_columns,
            )
            for field in base.shape.schema
        ),
        fragments=fragments,
        indexes=read_indexes(base, fragments),
        region_specs=base.details.region_specs,
        regions=read_regions(table, base, manifests),
        generations=read_generations(table, base, manifests),
        logs=read_logs(table, manifests),
        snapshot=_snapshot(table, base),
        versions=read_versions(base, table.store),
        writer_defaults=dict(base.details.writer_config_defaults),
    )


def _table_id(table: BaseTable) -> str | None:
    """The table's id if it has one; asking `BaseTable` would make one."""
    if not table.store.exists(f"{names.PRIVATE}/table.json"):
        return None
    return str(table.table_id())


def _snapshot(table: BaseTable, base: BaseSnapshot) -> SnapshotPart | None:
    inline = base.details.inline_snapshots
    if inline is None:
        return None
    taken_ms = base.details.snapshot_ts_millis
    return SnapshotPart(
        taken_ms=taken_ms,
        age_seconds=max(0, table.seams.clock.now_ms() - taken_ms) / 1000,
        regions=base.details.num_regions,
        size_bytes=len(inline),
        file=external_of(inline, f"the snapshot of {table.uri}"),
    )


# --- as data -------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _rows(found: Inspection) -> list[tuple[str, list[dict[str, Any]]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for name in ("columns", "fragments", "indexes", "regions", "generations", "logs", "versions"):
        kinds[name] = [_plain(asdict(part)) for part in getattr(found, name)]
    kinds["data_files"] = []
    for row in kinds["fragments"]:
        row["row_ids"] = [{"first": first, "last": last} for first, last in row["row_ids"]]
        for file in row.pop("files"):
            kinds["data_files"].append({"fragment_id": row["fragment_id"], **file})
    kinds["segments"] = []
    for row in kinds["indexes"]:
        row["caught_up"] = list(row["caught_up"].items())
        for segment in row.pop("segments"):
            kinds["segments"].append({"index": row["name"], **segment})
    for row in kinds["regions"]:
        row["values"] = [(name, _text(value)) for name, value in row["values"].items()]
    kinds["region_specs"] = [
        {"spec_id": spec.spec_id, "field": number, **_plain(asdict(field))}
        for spec in found.region_specs
        for number, field in enumerate(spec.fields)
    ]
    for row in kinds["region_specs"]:
        row["parameters"] = list(row["parameters"].items())
    return [(name, kinds[name]) for name in _SCHEMAS]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_STRINGS = pa.list_(pa.string())
_MOMENT = pa.timestamp("ms", "UTC")
_SCHEMAS: dict[str, pa.Schema] = {
    "columns": pa.schema(
        {
            "name": pa.string(),
            "type": pa.string(),
            "nullable": pa.bool_(),
            "field_id": pa.int32(),
            "primary_key": pa.bool_(),
        }
    ),
    "fragments": pa.schema(
        {
            "fragment_id": pa.uint64(),
            "physical_rows": pa.uint64(),
            "deleted_rows": pa.uint64(),
            "size_bytes": pa.uint64(),
            "deletion_kind": pa.string(),
            "deletion_file": pa.string(),
            "row_ids": pa.list_(pa.struct({"first": pa.uint64(), "last": pa.uint64()})),
        }
    ),
    "data_files": pa.schema(
        {
            "fragment_id": pa.uint64(),
            "path": pa.string(),
            "columns": _STRINGS,
            "size_bytes": pa.uint64(),
        }
    ),
    "indexes": pa.schema(
        {
            "name": pa.string(),
            "kind": pa.string(),
            "columns": _STRINGS,
            "fragments": pa.string(),
            "covered_rows": pa.uint64(),
            "uncovered_rows": pa.uint64(),
            "maintained": pa.bool_(),
            "caught_up": pa.map_(pa.string(), pa.uint64()),
        }
    ),
    "segments": pa.schema(
        {
            "index": pa.string(),
            "uuid": pa.string(),
            "fragments": pa.string(),
            "rows": pa.uint64(),
            "size_bytes": pa.uint64(),
            "created_ms": _MOMENT,
        }
    ),
    "region_specs": pa.schema(
        {
            "spec_id": pa.uint32(),
            "field": pa.uint32(),
            "field_id": pa.string(),
            "source_ids": pa.list_(pa.int32()),
            "transform": pa.string(),
            "expression": pa.string(),
            "result_type": pa.string(),
            "parameters": pa.map_(pa.string(), pa.string()),
        }
    ),
    "regions": pa.schema(
        {
            "region_id": pa.string(),
            "region_spec_id": pa.uint32(),
            "values": pa.map_(pa.string(), pa.string()),
            "status": pa.string(),
            "manifest_version": pa.uint64(),
            "writer_epoch": pa.uint64(),
            "current_generation": pa.uint64(),
            "merged_generation": pa.uint64(),
            "wal_covered": pa.uint64(),
            "wal_position": pa.uint64(),
        }
    ),
    "generations": pa.schema(
        {
            "region_id": pa.string(),
            "generation": pa.uint64(),
            "path": pa.string(),
            "physical_rows": pa.uint64(),
            "size_bytes": pa.uint64(),
            "written_ms": _MOMENT,
            "merged": pa.bool_(),
            "present": pa.bool_(),
            "indexes": _STRINGS,
        }
    ),
    "logs": pa.schema(
        {
            "region_id": pa.string(),
            "entries": pa.uint64(),
            "fences": pa.uint64(),
            "size_bytes": pa.uint64(),
            "first_position": pa.uint64(),
            "last_position": pa.uint64(),
            "unflushed_entries": pa.uint64(),
            "unflushed_bytes": pa.uint64(),
            "oldest_unflushed_ms": _MOMENT,
        }
    ),
    "versions": pa.schema(
        {
            "version": pa.uint64(),
            "written_ms": _MOMENT,
            "size_bytes": pa.uint64(),
            "tags": _STRINGS,
        }
    ),
}


# --- as text -------------------------------------------------------------------------------


def _head(found: Inspection) -> str:
    key = ", ".join(found.primary_key) or "none"
    lines = [
        f"{found.uri} at version {found.version}",
        f"  {found.rows:,} rows in the base table, primary key: {key}, "
        f"{'stable row ids' if found.stable_row_ids else 'row addresses'}, "
        f"Lance {found.data_storage_version}",
    ]
    if found.snapshot is None:
        lines.append("  no snapshot of the regions was taken")
    else:
        where = found.snapshot.file or "in the index"
        lines.append(
            f"  snapshot of {tabular.counted(found.snapshot.regions, 'region')} taken "
            f"{tabular.age(found.snapshot.age_seconds)} ago, {where}"
        )
    kept = [part.version for part in found.versions]
    tags = ", ".join(f"{name} = {version}" for name, version in found.tags.items()) or "none"
    lines.append(f"  {tabular.counted(len(kept), 'version')}: {tabular.ranges(kept)}; tags: {tags}")
    for name, value in found.writer_defaults.items():
        lines.append(f"  writers: {name} = {value}")
    return "\n".join(tabular.cut(line) for line in lines)


def _sections(found: Inspection) -> list[str]:
    short = _short_ids([region.region_id for region in found.regions])
    return [
        _section(
            "columns",
            ["name", "type", "id", "nullable", "key"],
            [
                [c.name, tabular.cut(c.type, 56), c.field_id, c.nullable, c.primary_key]
                for c in found.columns
            ],
        ),
        _section(
            "fragments",
            ["id", "rows", "deleted", "by", "size", "files", "row ids"],
            [
                [
                    f.fragment_id,
                    f.physical_rows,
                    f.deleted_rows,
                    f.deletion_kind,
                    tabular.size(f.size_bytes),
                    len(f.files),
                    tabular.spans(f.row_ids) or None,
                ]
                for f in found.fragments
            ],
        ),
        _section(
            "data files",
            ["fragment", "path", "columns"],
            [
                [f.fragment_id, file.path, ",".join(file.columns)]
                for f in found.fragments
                if len(f.files) > 1
                for file in f.files
            ],
        ),
        _section(
            "indexes",
            ["name", "kind", "columns", "covered", "uncovered", "segments", "fragments"],
            [
                [
                    i.name,
                    i.kind,
                    ",".join(i.columns),
                    i.covered_rows,
                    i.uncovered_rows,
                    len(i.segments),
                    i.fragments,
                ]
                for i in found.indexes
            ],
        ),
        _section(
            "index segments",
            ["index", "uuid", "rows", "size", "fragments"],
            [
                [i.name, s.uuid, s.rows, tabular.size(s.size_bytes), s.fragments]
                for i in found.indexes
                for s in i.segments
            ],
        ),
        _section(
            "index catch-up",
            ["index", "region and generation"],
            [
                [
                    i.name,
                    ", ".join(f"{short.get(r, r)} {generation}" for r, generation in items),
                ]
                for i in found.indexes
                if (items := list(i.caught_up.items()))
            ],
        ),
        _section(
            "region specs",
            ["spec", "field", "type", "made by"],
            [
                [spec.spec_id, field.field_id, field.result_type, _made_by(field, found)]
                for spec in found.region_specs
                for field in spec.fields
            ],
        ),
        _section(
            "regions",
            ["region", "spec", "epoch", "gen", "merged", "WAL", "lag", "status", "values"],
            [
                [
                    str(r.region_id),
                    r.region_spec_id,
                    r.writer_epoch,
                    r.current_generation,
                    r.merged_generation,
                    r.wal_position,
                    r.wal_lag_entries,
                    r.status,
                    ", ".join(f"{name} = {value}" for name, value in r.values.items()),
                ]
                for r in found.regions
            ],
        ),
        _section(
            "generations",
            ["region", "gen", "rows", "size", "state", "directory", "indexes"],
            [
                [
                    short[str(g.region_id)],
                    g.generation,
                    g.physical_rows,
                    tabular.size(g.size_bytes),
                    _state(g),
                    g.path.rsplit("/", 1)[-1],
                    ",".join(g.indexes) or None,
                ]
                for g in found.generations
            ],
        ),
        _section(
            "logs",
            ["region", "entries", "fences", "size", "positions", "unflushed", "size of these"],
            [
                [
                    short[str(log.region_id)],
                    log.entries,
                    log.fences,
                    tabular.size(log.size_bytes),
                    f"{log.first_position or 0} to {log.last_position or 0}",
                    log.unflushed_entries,
                    tabular.size(log.unflushed_bytes),
                ]
                for log in found.logs
            ],
        ),
    ]


def _section(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    text = f"{title}\n{tabular.grid(headers, rows[:_SHOWN_ROWS])}"
    more = len(rows) - _SHOWN_ROWS
    return text if more <= 0 else f"{text}\n  … {more:,} more, see --json"


def _made_by(field: Any, found: Inspection) -> str:
    if field.expression is not None:
        return str(field.expression)
    names_by_id = {column.field_id: column.name for column in found.columns}
    sources = [names_by_id.get(source, f"field {source}") for source in field.source_ids]
    return f"{field.transform}({', '.join([*sources, *field.parameters.values()])})"


def _state(generation: GenerationPart) -> str:
    if generation.merged:
        return "merged" if generation.present else "merged, gone"
    return "unmerged" if generation.present else "MISSING"


def _short_ids(ids: Sequence[uuid.UUID]) -> dict[str, str]:
    """The first digits of each id, as many as tell them apart."""
    digits = 8
    while digits < 36 and len({str(one)[:digits] for one in ids}) < len(ids):
        digits += 1
    return {str(one): str(one)[:digits] for one in ids}
