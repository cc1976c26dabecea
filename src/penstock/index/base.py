"""The indexes of a base table: what they are, and the same again on a generation.

`load_index_specs` reads from a Lance dataset everything needed to build more of an index that it
already has: the IVF centroids, the PQ codebook, the SQ bounds, the tokenizer's parameters. The
in-memory indexes are built from these `IndexSpec`s, `create_like` builds the index of a flushed
generation from them and `create_segment` a part of the base's own, so that a row gets the same
partition, code and terms wherever it lives.

Where things are kept: metric and compression in the index's details in the manifest; centroids in
`index.idx` and the codebook in `auxiliary.idx` as global buffers holding protobuf messages; the
tokenizer's parameters in `metadata.lance`, because the manifest's copy drops custom stop words.

Invariant: a spec never changes. A retrained base index is another spec.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
from lance.dataset import Index as LanceIndex
from lance.file import LanceFileReader

from penstock.errors import Corruption, InvalidInput, PenstockError

Floats = npt.NDArray[np.float32]

SYSTEM_INDEX_PREFIX = "__lance_"

_KINDS = {"inverted": "fts", "fts": "fts", "btree": "btree", "bitmap": "bitmap"}
_TENSOR_TYPES = {1: "<f2", 2: "<f4", 3: "<f8"}


@dataclass(frozen=True, slots=True, eq=False)
class VectorParams:
    """The trained model of a vector index. Parts that the kind does not have are None."""

    metric: str
    """`l2`, `cosine`, `dot` or `hamming`."""
    centroids: Floats | None
    """One row per partition; None for an index declared on an empty table, not trained yet."""
    codebook: Floats | None = None
    """Sub-vectors x codes x dimensions of a sub-vector."""
    num_bits: int | None = None
    sq_bounds: tuple[float, float] | None = None
    hnsw: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_sub_vectors(self) -> int | None:
        return None if self.codebook is None else int(self.codebook.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class IndexSpec:
    """One index of a base table. Kinds not listed here carry no parameters.

    `ivf_*` kinds have `vector`; `fts` has `text`, the tokenizer's parameters by Lance's names.
    """

    name: str
    kind: str
    column: str
    vector: VectorParams | None = None
    text: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CreatedIndex:
    """What `create_like` did. `skipped` says why there is no index, and is None if there is one.

    `retrained` names the parts of the model that Lance does not take from outside and computed from
    the generation's own rows; searches of that index are right but their codes are its own.
    """

    name: str
    skipped: str | None = None
    retrained: tuple[str, ...] = ()


# --- reading the base table's indexes ------------------------------------------------------


def load_index_specs(
    dataset: lance.LanceDataset,
    names: Sequence[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> list[IndexSpec]:
    """The dataset's indexes called `names`, in that order; by default all but Lance's own."""
    described = {index.name: index for index in dataset.describe_indices()}
    if names is None:
        names = [name for name in described if not name.startswith(SYSTEM_INDEX_PREFIX)]
    missing = [name for name in names if name not in described]
    if missing:
        raise InvalidInput(
            f"table {dataset.uri} has no index {', '.join(missing)}; it has {sorted(described)}"
        )
    options = storage_options or dataset.initial_storage_options or {}
    return [_load(dataset, described[name], dict(options)) for name in names]


def _load(dataset: lance.LanceDataset, described: Any, options: dict[str, str]) -> IndexSpec:
    name, lance_type = described.name, described.index_type
    if len(described.field_names) != 1:
        raise InvalidInput(f"index {name!r} of {dataset.uri} is not on exactly one column")
    kind = _KINDS.get(lance_type.lower(), lance_type.lower())
    vector = text = None
    if kind.startswith("ivf_") or kind == "fts":
        segment = max(described.segments, key=lambda segment: segment.size_bytes or 0)
        if segment.base_id is not None:
            raise InvalidInput(
                f"index {name!r} of {dataset.uri} belongs to another table (a shallow clone); "
                f"build the index on this table first"
            )
        files = _SegmentFiles(dataset.uri, str(segment.uuid), options)
        if kind == "fts":
            text = _text_params(files, described.details)
        else:
            vector = _vector_params(files, kind, described.details, segment.size_bytes or 0)
    return IndexSpec(name, kind, described.field_names[0], vector, text)


class _SegmentFiles:
    """The files of one index segment, wherever the table is stored."""

    def __init__(self, table_uri: str, uuid: str, options: dict[str, str]) -> None:
        root = table_uri if "://" in table_uri else os.path.abspath(table_uri)
        self.uri = f"{root.rstrip('/')}/_indices/{uuid}"
        self._options = options or None

    def open(self, file_name: str) -> tuple[LanceFileReader, dict[str, str]]:
        reader = LanceFileReader(f"{self.uri}/{file_name}", self._options)
        metadata = reader.metadata().schema.metadata or {}
        return reader, {key.decode(): value.decode() for key, value in metadata.items()}


def _text_params(files: _SegmentFiles, details: Mapping[str, Any]) -> dict[str, Any]:
    _, metadata = files.open("metadata.lance")
    params = dict(details)
    params.update(json.loads(metadata.get("params", "{}")))
    return params


def _vector_params(
    files: _SegmentFiles, kind: str, details: Mapping[str, Any], size_bytes: int
) -> VectorParams:
    metric = str(details["metric_type"]).lower()
    compression = details.get("compression") or {}
    num_bits = compression.get("num_bits")
    hnsw = {key: int(value) for key, value in (details.get("hnsw") or {}).items()}
    if size_bytes == 0:
        return VectorParams(metric, None, None, num_bits, None, hnsw)
    reader, metadata = files.open("index.idx")
    ivf = dict(_fields(memoryview(reader.read_global_buffer(int(metadata["lance:ivf"])))))
    centroids = _tensor(ivf[4], files.uri)
    codebook = sq_bounds = None
    if compression.get("type") in ("pq", "sq"):
        reader, metadata = files.open("auxiliary.idx")
        storage = json.loads(json.loads(metadata["storage_metadata"])[0])
        if compression["type"] == "sq":
            sq_bounds = (float(storage["bounds"]["start"]), float(storage["bounds"]["end"]))
        else:
            buffer = reader.read_global_buffer(int(storage["codebook_position"]))
            flat = _tensor(memoryview(buffer), files.uri)
            codebook = flat.reshape(int(storage["num_sub_vectors"]), 1 << int(storage["nbits"]), -1)
    return VectorParams(metric, centroids, codebook, num_bits, sq_bounds, hnsw)


def _tensor(message: int | memoryview, uri: str) -> Floats:
    """A `Tensor { data_type = 1; repeated uint32 shape = 2; bytes data = 3; }` as an array."""
    data_type, shape, data = 0, [], memoryview(b"")
    for number, value in _fields(message):
        if number == 1 and isinstance(value, int):
            data_type = value
        elif number == 2:
            shape += [value] if isinstance(value, int) else _varints(value)
        elif number == 3 and not isinstance(value, int):
            data = value
    if data_type not in _TENSOR_TYPES:
        raise InvalidInput(f"index {uri} holds vectors of an element type that is not a float")
    values = np.frombuffer(data, dtype=np.dtype(_TENSOR_TYPES[data_type]))
    if values.size != int(np.prod(shape)):
        raise Corruption(f"index {uri}: a tensor of shape {shape} has {values.size} values")
    return np.ascontiguousarray(values.reshape(shape), dtype=np.float32)


def _fields(message: int | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message, in order; fixed-width ones are skipped."""
    if isinstance(message, int):
        raise Corruption("expected a protobuf message, found a number")
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        wire_type = tag & 7
        if wire_type == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif wire_type == 2:
            size, at = _varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size
        elif wire_type in (1, 5):
            at += 8 if wire_type == 1 else 4
        else:
            raise Corruption(f"protobuf wire type {wire_type} is unknown")


def _varints(packed: memoryview) -> list[int]:
    values, at = [], 0
    while at < len(packed):
        value, at = _varint(packed, at)
        values.append(value)
    return values


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


# --- more of the same index ----------------------------------------------------------------


def create_like(spec: IndexSpec, generation: lance.LanceDataset) -> CreatedIndex:
    """Build on a generation the index that `spec` describes, with the base table's own model.

    Any number of rows will do, also none that can be indexed. `generation` moves to the version
    that has the index. Raises `PenstockError` if Lance refuses.
    """
    recipe = _recipe(spec)
    if recipe.refusal is not None:
        return CreatedIndex(spec.name, skipped=recipe.refusal)
    create: Any = generation.create_index if spec.vector else generation.create_scalar_index
    with _refusals(spec, generation):
        create(spec.column, recipe.kind, name=spec.name, **recipe.options)
    return CreatedIndex(spec.name, retrained=recipe.retrained)


def create_segment(
    spec: IndexSpec, dataset: lance.LanceDataset, fragment_ids: Sequence[int]
) -> LanceIndex:
    """Write a segment of an index for some fragments, with the model it has; in no version yet.

    Raises `InvalidInput` if the index is of a kind that cannot be built so.
    """
    part = create_part(spec, dataset, fragment_ids)
    # Only this makes an index of the parts that Lance's workers have written.
    return join_parts(spec, dataset, [part]) if spec.kind == "fts" else part


def create_part(
    spec: IndexSpec, dataset: lance.LanceDataset, fragment_ids: Sequence[int]
) -> LanceIndex:
    """Write a part of a segment, for `join_parts`."""
    recipe = _buildable(spec, dataset.uri)
    with _refusals(spec, dataset):
        return dataset.create_index_uncommitted(
            spec.column,
            recipe.kind,
            name=spec.name,
            replace=True,  # or Lance refuses the name; it replaces nothing before it is committed
            fragment_ids=list(fragment_ids),
            **recipe.options,
        )


def join_parts(
    spec: IndexSpec, dataset: lance.LanceDataset, parts: Sequence[LanceIndex]
) -> LanceIndex:
    """Make one segment of parts, whose files are not needed any more then."""
    with _refusals(spec, dataset):
        return dataset.merge_existing_index_segments(list(parts))


def is_divisible(spec: IndexSpec, uri: str) -> bool:
    """Whether parts of a segment fit together: not if each computes its own model.

    Raises `InvalidInput` if the index, of the table at `uri`, cannot be built at all.
    """
    return not _buildable(spec, uri).retrained


def _buildable(spec: IndexSpec, uri: str) -> _Recipe:
    recipe = _recipe(spec)
    if recipe.refusal is not None:
        raise InvalidInput(f"index {spec.name!r} of {uri}: {recipe.refusal}")
    return recipe


@contextmanager
def _refusals(spec: IndexSpec, dataset: lance.LanceDataset) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise PenstockError(
            f"could not build index {spec.name!r} ({spec.kind}) on {dataset.uri}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What Lance has to be told to build an index again, or why it cannot be."""

    kind: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    retrained: tuple[str, ...] = ()
    refusal: str | None = None


def _recipe(spec: IndexSpec) -> _Recipe:
    if spec.kind == "fts":
        return _text_recipe(spec)
    if spec.kind.startswith("ivf_"):
        return _vector_recipe(spec)
    if spec.kind in ("btree", "bitmap"):
        return _Recipe(spec.kind.upper())
    return _Recipe(refusal=f"kind {spec.kind} is not maintained")


def _text_recipe(spec: IndexSpec) -> _Recipe:
    params = dict(spec.text or {})
    if params.pop("document_granularity", "row") != "row":
        return _Recipe(refusal="only documents that are rows are maintained")
    params.pop("lance_tokenizer", None)  # follows from the column's type; Lance takes no option
    given = {
        key: value
        for key, value in params.items()
        if value is not None or key == "max_token_length"  # None is no limit there
    }
    return _Recipe("INVERTED", given)


def _vector_recipe(spec: IndexSpec) -> _Recipe:
    model = spec.vector
    if model is None or model.centroids is None:
        return _Recipe(refusal="the base table's index has not been trained yet")
    options: dict[str, Any] = {
        "metric": model.metric,
        "num_partitions": len(model.centroids),
        "ivf_centroids": model.centroids,
    }
    retrained: list[str] = []
    if model.num_bits is not None:
        options["num_bits"] = model.num_bits
    if model.codebook is not None:
        options["num_sub_vectors"] = model.num_sub_vectors
        options["pq_codebook"] = model.codebook
    if model.sq_bounds is not None:
        retrained.append("sq_bounds")
    if spec.kind.endswith("_rq"):
        retrained.append("rq_rotation")
    if model.hnsw:
        options["m"] = model.hnsw.get("max_connections", 20)
        options["ef_construction"] = model.hnsw.get("construction_ef", 150)
        options["max_level"] = model.hnsw.get("max_level", 7)
    return _Recipe(spec.kind.upper(), options, tuple(retrained))
