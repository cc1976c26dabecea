"""The vector index of a MemTable: an IVF with the base table's own centroids and codebook.

A batch goes through in two steps. `encode` assigns each vector to a partition and quantises it, and
touches nothing shared, so it runs outside every lock. `append` adds the result to the index and is
a copy into preallocated memory. `candidates` gives the rows of the partitions nearest a query; they
are compared exactly with the vectors of the MemTable itself.

Partitions and codes are the ones Lance would compute: for `cosine` vectors are scaled to length one
and then treated as for `l2`; PQ codes quantise the difference from the centroid, except for `dot`,
where they quantise the vector itself (still by the nearest code, not by the largest product).

Invariants
- Row i of the index is row i of the MemTable.
- A row without a vector (a tombstone, a null, a value that is not finite) has partition -1 and is
  never a candidate. Every other row is in exactly one partition.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.blas import one_thread
from penstock.errors import InvalidInput
from penstock.index.base import IndexSpec
from penstock.index.growing import GrowingArray

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

NO_PARTITION = -1
_PRODUCT_LIMIT = 1 << 18
"""Matrix products of up to this many multiplications stay on the calling thread in OpenBLAS. Larger
ones are shared among threads, which loses more than it wins when every core has other work."""
_MIN_PRODUCT_ROWS = 32
_CODE_ROWS = 64
"""So many rows at once keep the scores of all sub-vectors in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class IvfDelta:
    """What a batch adds to the index, row for row."""

    partitions: npt.NDArray[np.int32]
    codes: npt.NDArray[np.uint8] | None

    def __len__(self) -> int:
        return len(self.partitions)


class IvfIndex:
    """One vector index over the rows of one MemTable. One appender; any number of readers."""

    def __init__(self, spec: IndexSpec) -> None:
        model = spec.vector
        if model is None or model.centroids is None:
            raise InvalidInput(f"index {spec.name!r} has no centroids; train it on the base table")
        if model.metric not in ("l2", "cosine", "dot"):
            raise InvalidInput(
                f"index {spec.name!r} uses the metric {model.metric}, which is not kept"
            )
        self.name, self.column, self.metric = spec.name, spec.column, model.metric
        centroids = model.centroids
        self.num_partitions, self.dimensions = centroids.shape
        self._centroids = centroids
        # x.c - |c|^2/2 is largest where |x - c| is smallest; for dot the norms do not count.
        self._centroid_columns = np.ascontiguousarray(centroids.T)
        half = 0.0 if self.metric == "dot" else 0.5
        self._centroid_offsets = -half * np.square(centroids).sum(axis=1)
        self._codebook: Floats | None = None
        self._sq_bounds = model.sq_bounds
        code_width = None
        if model.codebook is not None:
            sub_vectors, codes, sub_dimensions = model.codebook.shape
            augmented = np.empty((sub_vectors, sub_dimensions + 1, codes), dtype=np.float32)
            augmented[:, :-1] = model.codebook.transpose(0, 2, 1)
            augmented[:, -1] = -0.5 * np.square(model.codebook).sum(axis=2)
            self._codebook = augmented
            code_width = sub_vectors
        elif model.sq_bounds is not None:
            code_width = self.dimensions
        self._partitions = GrowingArray(np.int32, fill=NO_PARTITION)
        self._codes = None if code_width is None else GrowingArray(np.uint8, code_width)

    def __len__(self) -> int:
        return len(self._partitions)

    @property
    def nbytes(self) -> int:
        return self._partitions.nbytes + (0 if self._codes is None else self._codes.nbytes)

    # --- building ---

    @one_thread()
    def encode(self, vectors: Floats, valid: npt.NDArray[np.bool_] | None = None) -> IvfDelta:
        """Partitions and codes of a batch, one vector a row; rows not valid get partition -1.

        Reads the model only: any number of threads may encode at once.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.dimensions:
            raise InvalidInput(
                f"column {self.column!r} holds vectors of {self.dimensions} dimensions, "
                f"got an array of shape {vectors.shape}"
            )
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        usable = np.logical_and.reduce(np.isfinite(vectors), axis=1)
        if valid is not None:
            usable &= valid
        everything = bool(usable.all())
        if not everything:
            vectors = np.where(usable[:, None], vectors, np.float32(0))
        if self.metric == "cosine":
            vectors = _unit(vectors)
        partitions = self._nearest(vectors)
        codes = self._encode_codes(vectors, partitions)
        if not everything:
            partitions[~usable] = NO_PARTITION
            if codes is not None:
                codes[~usable] = 0
        return IvfDelta(partitions, codes)

    def _nearest(self, vectors: Floats) -> npt.NDArray[np.int32]:
        step = max(_MIN_PRODUCT_ROWS, _PRODUCT_LIMIT // self._centroid_columns.size)
        nearest = np.empty(len(vectors), dtype=np.int32)
        for at in range(0, len(vectors), step):
            scores = vectors[at : at + step] @ self._centroid_columns
            scores += self._centroid_offsets
            nearest[at : at + step] = scores.argmax(axis=1)
        return nearest

    def _encode_codes(
        self, vectors: Floats, partitions: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.uint8] | None:
        if self._sq_bounds is not None:
            return _sq_codes(vectors, self._sq_bounds)
        if self._codebook is None:
            return None
        if self.metric != "dot":
            vectors = vectors - self._centroids[partitions]
        rows = len(vectors)
        sub_vectors, width, _ = self._codebook.shape
        augmented = np.ones((sub_vectors, rows, width), dtype=np.float32)
        augmented[:, :, :-1] = vectors.reshape(rows, sub_vectors, width - 1).transpose(1, 0, 2)
        codes = np.empty((sub_vectors, rows), dtype=np.uint8)
        for at in range(0, rows, _CODE_ROWS):
            scores = np.matmul(augmented[:, at : at + _CODE_ROWS], self._codebook)
            codes[:, at : at + _CODE_ROWS] = scores.argmax(axis=2)
        return np.ascontiguousarray(codes.T)

    def append(self, delta: IvfDelta, first_row: int) -> None:
        """Add a batch whose first row is the MemTable's row `first_row`."""
        if self._codes is not None and delta.codes is not None:
            self._codes.append(delta.codes, first_row)
        self._partitions.append(delta.partitions, first_row)

    # --- reading ---

    @one_thread()
    def probes(self, query: Floats, nprobes: int) -> npt.NDArray[np.int32]:
        """The `nprobes` partitions nearest the query, nearest first."""
        query = np.asarray(query, dtype=np.float32).reshape(1, -1)
        if query.shape[1] != self.dimensions:
            raise InvalidInput(
                f"column {self.column!r} holds vectors of {self.dimensions} dimensions, "
                f"the query has {query.shape[1]}"
            )
        if self.metric == "cosine":
            query = _unit(query)
        scores = (query @ self._centroid_columns)[0] + self._centroid_offsets
        order = np.argsort(-scores, kind="stable")
        return order[: max(1, nprobes)].astype(np.int32)

    def candidates(self, query: Floats, nprobes: int, visible_rows: int | None = None) -> Rows:
        """Rows below `visible_rows` in the partitions nearest the query, in row order."""
        wanted = np.zeros(self.num_partitions + 1, dtype=np.bool_)  # the last one is partition -1
        wanted[self.probes(query, nprobes)] = True
        return np.flatnonzero(wanted[self._partitions.values(visible_rows)])

    def partitions(self, visible_rows: int | None = None) -> npt.NDArray[np.int32]:
        """The partition of every row."""
        return self._partitions.values(visible_rows)

    def codes(self, visible_rows: int | None = None) -> npt.NDArray[np.uint8] | None:
        """The code of every row, one byte a sub-vector (PQ) or a dimension (SQ)."""
        return None if self._codes is None else self._codes.values(visible_rows)


@one_thread()
def exact_distances(query: Floats, vectors: Floats, metric: str) -> Floats:
    """Distances as Lance reports them: squared for `l2`, one minus the product for the others."""
    query = np.asarray(query, dtype=np.float32).reshape(-1)
    if metric == "l2":
        difference = vectors - query
        squares: Floats = np.einsum("ij,ij->i", difference, difference)
        return squares
    products: Floats = vectors @ query
    if metric == "cosine":
        norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * np.float32(np.linalg.norm(query))
        products = np.divide(products, norms, out=np.zeros_like(products), where=norms > 0)
    return np.float32(1) - products


def _unit(vectors: Floats) -> Floats:
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, None]
    unit: Floats = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
    return unit


def _sq_codes(vectors: Floats, bounds: tuple[float, float]) -> npt.NDArray[np.uint8]:
    low, high = bounds
    span = high - low
    if span <= 0:
        return np.zeros(vectors.shape, dtype=np.uint8)
    scaled = (vectors.astype(np.float64) - low) * (255.0 / span)
    codes: npt.NDArray[np.uint8] = np.clip(scaled, 0, 255).astype(np.uint8)
    return codes
