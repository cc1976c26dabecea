"""Rows for benchmarks: an int64 id, a clustered 128-d vector, and about twenty words of text."""

from __future__ import annotations

import lance
import numpy as np
import pyarrow as pa

DIMENSIONS = 128
_VOCABULARY = 5_000
_CLUSTERS = 64

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32(), DIMENSIONS)),
        pa.field("body", pa.string()),
    ]
)


class Rows:
    """A reproducible source of batches with ids that count up."""

    def __init__(self, seed: int = 7) -> None:
        self._random = np.random.default_rng(seed)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
        lengths = self._random.integers(3, 11, _VOCABULARY)
        self._words = ["".join(self._random.choice(letters, n)) for n in lengths]
        self._centres = self._random.normal(size=(_CLUSTERS, DIMENSIONS)).astype(np.float32)
        self.next_id = 0

    def batch(self, rows: int) -> pa.RecordBatch:
        random = self._random
        centres = self._centres[random.integers(0, _CLUSTERS, rows)]
        vectors = centres + 0.3 * random.normal(size=(rows, DIMENSIONS)).astype(np.float32)
        ranks = np.minimum(random.zipf(1.3, (rows, 20)) - 1, _VOCABULARY - 1)
        texts = [" ".join(map(self._words.__getitem__, row)) for row in ranks.tolist()]
        ids = np.arange(self.next_id, self.next_id + rows)
        self.next_id += rows
        values = pa.array(vectors.astype(np.float32).reshape(-1))
        arrays = [
            pa.array(ids),
            pa.FixedSizeListArray.from_arrays(values, DIMENSIONS),
            pa.array(texts),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def create_search_indexes(dataset: lance.LanceDataset) -> None:
    dataset.create_index(
        "vector",
        "IVF_PQ",
        name="vector_idx",
        metric="l2",
        num_partitions=256,
        num_sub_vectors=32,
        sample_rate=64,
    )
    dataset.create_scalar_index("body", "INVERTED", name="body_idx", with_position=True)
