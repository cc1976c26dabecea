"""Creating an index on the base table of a live table.

Lance trains an index on the rows of the base table. A live table may have most of its rows, or
all of them, in front of the base, so vector models are trained on the table as readers see it and
then handed to Lance, which builds the base's part with them. MemTables and generations are built
with the same model from then on.

Lance commits the index. Where that meets a commit which the index does not fit, such as a
compaction of what it was built from, it is built again on what that one left.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.bitmap import Bitmap
from lance.commit import CommitConflictError
from lance.dataset import Index as LanceIndex

from penstock.errors import CommitConflict, InvalidInput, PenstockError, VersionNotFound
from penstock.index.base import (
    IndexSpec,
    create_like,
    load_index_specs,
)
from penstock.memwal import packed_indexes
from penstock.memwal.base_table import BaseSnapshot, BaseTable
from penstock.memwal.index_choice import keep_serving
from penstock.memwal.index_segments import to_remove
from penstock.memwal.packed_indexes import PACKED_KINDS, checked_name, name_taken
from penstock.memwal.packed_specs import packed_specs
from penstock.memwal.table_versions import version_exists

VECTOR_KINDS = ("ivf_flat", "ivf_pq", "ivf_sq")
SCALAR_KINDS: dict[str, Literal["INVERTED", "BTREE", "BITMAP"]] = {
    "fts": "INVERTED",
    "btree": "BTREE",
    "bitmap": "BITMAP",
}
METRICS = ("l2", "cosine", "dot")
_COUNT_OPTIONS = ("num_partitions", "num_sub_vectors", "num_bits", "sample_rate")
_VECTOR_OPTIONS = ("metric", *_COUNT_OPTIONS)
_PQ_TRAINING_ROWS = 256
SAMPLE_ROWS = 65_536
"""Vectors that a model is trained on, at most."""

Build = Callable[[BaseSnapshot, IndexSpec], LanceIndex]


def create_index(
    table: BaseTable,
    column: str,
    kind: str,
    *,
    name: str | None,
    live: Any,
    options: Mapping[str, Any],
    build: Build | None = None,
) -> str:
    """Create an index and return its name; `live()` gives the table's rows for training.

    `build` is for those who have segments built elsewhere: it is given a version and what to
    build, and writes a segment that covers the version, for this to commit.
    """
    _check_column(table.snapshot(), column)
    if isinstance(kind, str) and kind.lower() in PACKED_KINDS:
        return packed_indexes.create(table, column, kind.lower(), name, options)
    known = ", ".join([*VECTOR_KINDS, *SCALAR_KINDS, *PACKED_KINDS])
    if not isinstance(kind, str) or kind.lower() not in (*VECTOR_KINDS, *SCALAR_KINDS):
        raise InvalidInput(f"unknown index kind {kind!r}; there are: {known}")
    kind = kind.lower()
    chosen = checked_name(column, name)
    _check_options(kind, options)
    if chosen in (spec.name for spec in packed_specs(table.snapshot().details)):
        raise name_taken(table, chosen)
    models: dict[int, IndexSpec] = {}
    last: Exception | None = None
    for _ in table.seams.races():
        if kind in VECTOR_KINDS or kind == "fts":
            keep_serving(table, column)
        base = table.snapshot()
        _check_column(base, column)
        try:
            if kind not in SCALAR_KINDS:
                given = dict(options)
                _create_vector(table, base, column, kind, chosen, live, given, models, build)
            elif build is not None and base.rows:
                text = dict(options) if kind == "fts" else None
                spec = IndexSpec(chosen, kind, column, text=text)
                _publish(table, base, build(base, spec))
            else:
                base.dataset.create_scalar_index(column, SCALAR_KINDS[kind], name=chosen, **options)
        except (OSError, ValueError, RuntimeError, TypeError, KeyError, PenstockError) as error:
            if _is_overtaken(table, base, error):
                last = error
                continue
            if isinstance(error, PenstockError):
                raise
            column_type = base.shape.schema.field(column).type
            raise InvalidInput(
                f"{kind} index on {column!r} ({column_type}) was refused: {error}"
            ) from error
        if table.store.list_dirs("_indices"):
            table.store.sync("_indices")
        table.store.sync("_versions")
        return chosen
    raise CommitConflict(
        f"index {chosen!r} of {table.uri} could not be created: other commits won "
        f"{table.seams.backoff.races} times; try again when less is committed ({last})"
    )


def _check_column(base: BaseSnapshot, column: str) -> None:
    names = base.shape.schema.names
    if column not in names:
        raise InvalidInput(f"no column {column!r}; the table has {', '.join(names)}")


def _is_overtaken(table: BaseTable, base: BaseSnapshot, error: Exception) -> bool:
    """Whether it failed because of another commit, and not because of what was asked for."""
    if isinstance(error, VersionNotFound):
        return True
    cause = error.__cause__ if isinstance(error, PenstockError) else error
    if isinstance(cause, CommitConflictError) or "commit conflict" in str(cause).lower():
        return True
    # Newer versions came, and clean-up took what it was reading.
    gone = isinstance(cause, OSError | RuntimeError)
    return gone and not version_exists(table.store, base.version)


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    """Refuse options that Lance would overlook; those of a text index it checks itself."""
    if kind == "fts":
        return
    allowed = _VECTOR_OPTIONS if kind in VECTOR_KINDS else ()
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        raise InvalidInput(
            f"{kind} index: unknown option {', '.join(unknown)}; "
            f"there are: {', '.join(allowed) or 'none'}"
        )
    for name in _COUNT_OPTIONS:
        count = options.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInput(
                f"{kind} index: {name} must be a positive whole number, not {count!r}"
            )


def _create_vector(
    table: BaseTable,
    base: BaseSnapshot,
    column: str,
    kind: str,
    name: str,
    live: Any,
    options: dict[str, Any],
    models: dict[int, IndexSpec],
    build: Build | None,
) -> None:
    field_type = base.shape.schema.field(column).type
    if not pa.types.is_fixed_size_list(field_type):
        raise InvalidInput(
            f"column {column!r} is {field_type}; a vector index needs a fixed-size list of floats"
        )
    metric = options.pop("metric", "l2")
    if metric not in METRICS:
        raise InvalidInput(f"unknown metric {metric!r}; there are: {', '.join(METRICS)}")
    field_id = base.shape.field_ids[column]
    if field_id not in models:  # once, however often the index has to be built with it
        models[field_id] = _train(column, kind, metric, live(), options)
    spec = replace(models[field_id], name=name, column=column)
    if not base.rows:
        _graft(table, base, spec)
    elif build is not None:
        _publish(table, base, build(base, spec))
    else:
        create_like(spec, base.dataset)


def _publish(table: BaseTable, base: BaseSnapshot, segment: LanceIndex) -> None:
    """Let Lance commit a segment that is the whole index, in place of one of the same name."""
    named = [index for index in base.dataset.describe_indices() if index.name == segment.name]
    replaced = [to_remove(index.name, str(old.uuid)) for index in named for old in index.segments]
    lance.LanceDataset.commit(
        table.uri,
        lance.LanceOperation.CreateIndex([segment], replaced),
        read_version=base.version,
        storage_options=table.storage_options,
    )


def _graft(table: BaseTable, base: BaseSnapshot, spec: IndexSpec) -> None:
    """Give an empty base table a trained index.

    Lance builds nothing on a table without rows and would forget the model. So the index is built
    on a table with one row and no vector, and its files, which hold the model and no entries, are
    added to the base as an index that covers no fragment yet.
    """
    field = base.shape.schema.field(spec.column)
    with tempfile.TemporaryDirectory(prefix="penstock-graft-") as directory:
        row = pa.table([pa.nulls(1, field.type)], schema=pa.schema([field.with_nullable(True)]))
        donor = lance.write_dataset(row, f"{directory}/donor.lance")
        create_like(spec, donor)
        built = _created_index(donor)
        identity = str(table.seams.entropy.uuid4())
        for file in built.files or ():
            with open(f"{directory}/donor.lance/_indices/{built.uuid}/{file.path}", "rb") as source:
                table.store.put(f"_indices/{identity}/{file.path}", source.read())
    index = LanceIndex(
        uuid=identity,
        name=spec.name,
        fields=[base.shape.field_ids[spec.column]],
        dataset_version=base.version,
        fragment_ids=Bitmap(),
        index_version=built.index_version,
        index_details=built.index_details,
        files=built.files,
    )
    lance.LanceDataset.commit(
        table.uri,
        lance.LanceOperation.CreateIndex([index], []),
        read_version=base.version,
        storage_options=table.storage_options,
    )


def _created_index(dataset: lance.LanceDataset) -> LanceIndex:
    """The index that the dataset's newest version added."""
    transaction = dataset.read_transaction(dataset.version)
    assert transaction is not None
    assert isinstance(transaction.operation, lance.LanceOperation.CreateIndex)
    return transaction.operation.new_indices[0]


def _train(
    column: str, kind: str, metric: str, rows: pa.Table, options: dict[str, Any]
) -> IndexSpec:
    """A model trained by Lance on a sample of the live rows."""
    vectors = rows.select([column]).filter(pc.is_valid(rows.column(column)))
    if vectors.num_rows > SAMPLE_ROWS:
        step = vectors.num_rows / SAMPLE_ROWS
        vectors = vectors.take(pa.array([int(i * step) for i in range(SAMPLE_ROWS)]))
    partitions = int(options.pop("num_partitions", 0)) or max(1, round(vectors.num_rows**0.5 / 4))
    needed = max(partitions, _PQ_TRAINING_ROWS if kind == "ivf_pq" else 1)
    if vectors.num_rows < needed:
        raise InvalidInput(
            f"{kind} on {column!r} with {partitions} partitions is trained on at least {needed} "
            f"vectors, and the table has {vectors.num_rows}; write more rows first"
        )
    with tempfile.TemporaryDirectory(prefix="penstock-train-") as directory:
        sample = lance.write_dataset(vectors, f"{directory}/sample.lance")
        sample.create_index(
            column, kind.upper(), name="model", metric=metric, num_partitions=partitions, **options
        )
        return load_index_specs(sample, ["model"])[0]
