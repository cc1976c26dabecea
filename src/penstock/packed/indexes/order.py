"""Sorting a million values at a time, rows of equal values in ascending order.

NumPy sorts plain 64-bit words several times faster than it sorts positions by a key. So a word is
made of the leading bits of the key and, below them, the position; where the key does not fit, the
few positions that agree in its leading bits are sorted once more by the rest of it.

Text is sorted by windows of seven bytes. A window and how much of it is text make one key, so that
"a" and "a\\0" differ; rows that agree in a full window go on to the next one, all of them at once.
Only rows that still agree after `MAX_WINDOWS` are compared as text. Many texts that begin alike
would take many windows: a sample shows it, and they are compared at once, on every core.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.packed.indexes.numeric import ordered_bits
from penstock.packed.indexes.postings import Postings

MAX_WINDOWS = 16

COMPARED_ROWS = 50_000
"""Fewer texts that begin alike are sorted window by window like others."""
MAX_SORT_THREADS = 4
SORT_CHUNK_ROWS = 16_384

SAMPLE_ROWS = 4096
"""How many rows are looked at to guess whether values repeat often."""

_WINDOW_BYTES = 7
_MORE = _WINDOW_BYTES + 1
_MASKS = np.array(
    [((1 << 8 * n) - 1) << (64 - 8 * n) for n in range(_WINDOW_BYTES + 1)] + [~0xFF & (2**64 - 1)],
    np.uint64,
)

Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def stable_order(keys: npt.NDArray[np.uint64]) -> Positions:
    """Positions of the keys in ascending order, those of equal keys ascending."""
    count = len(keys)
    if count < 2 or not np.any(keys[1:] < keys[:-1]):
        return np.arange(count)
    keys = keys - keys.min()
    used = int(np.bitwise_or.reduce(keys))
    keys >>= np.uint64((used & -used).bit_length() - 1)  # floats often end in zeros
    place_bits = (count - 1).bit_length()
    dropped = max(0, int(keys.max()).bit_length() + place_bits - 64)
    words = keys >> np.uint64(dropped) if dropped else keys
    words = (words << np.uint64(place_bits)) | np.arange(count, dtype=np.uint64)
    words.sort()
    order = (words & np.uint64((1 << place_bits) - 1)).astype(np.int64)
    if dropped:
        words >>= np.uint64(place_bits)
        _sort_ties(order, keys, words[1:] == words[:-1], dropped)
    return order


def _sort_ties(order: Positions, keys: npt.NDArray[np.uint64], ties: Flags, dropped: int) -> None:
    """Sort by the dropped bits what agrees in the others; `ties[i]`: i and i + 1 agree."""
    if not ties.any():
        return
    member = np.zeros(len(order), np.bool_)
    member[1:] = ties
    begins = ~member
    member[:-1] |= ties
    places = np.flatnonzero(member)
    groups = np.cumsum(begins[places]) - 1
    tied = order[places]
    rest = keys[tied] & np.uint64((1 << dropped) - 1)
    place_bits = (len(places) - 1).bit_length()
    if int(groups[-1]).bit_length() + dropped + place_bits <= 64:
        words = (groups.astype(np.uint64) << np.uint64(dropped)) | rest
        words = (words << np.uint64(place_bits)) | np.arange(len(places), dtype=np.uint64)
        words.sort()
        again = (words & np.uint64((1 << place_bits) - 1)).astype(np.int64)
    else:
        again = np.lexsort((rest, groups))
    order[places] = tied[again]


def number_order(values: npt.NDArray[Any]) -> Positions:
    return stable_order(ordered_bits(values))


def number_runs(in_order: npt.NDArray[Any]) -> Positions:
    """Where each distinct value of a sorted array begins, and after them the array's length."""
    begins = np.ones(len(in_order) + 1, np.bool_)
    if in_order.dtype.kind == "f":
        in_order = ordered_bits(in_order)
    np.not_equal(in_order[1:], in_order[:-1], out=begins[1:-1])
    return np.flatnonzero(begins)


# --- text ----------------------------------------------------------------------------------


def text_groups(values: pa.Array, rows: npt.NDArray[Any] | None) -> tuple[pa.Array, Postings]:
    """Distinct values, sorted by their bytes, and the rows of each.

    No value is null; `rows` are the ascending numbers of their rows, None if these are 0, 1, 2, …
    """
    if _repeats(values):
        encoded = values.dictionary_encode()
        order, _ = text_order(encoded.dictionary)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        codes = ranks[encoded.indices.to_numpy()]
        places = stable_order(codes.view(np.uint64))
        distinct = encoded.dictionary.take(pa.array(order))
        borders = np.zeros(len(order) + 1, np.int64)
        np.cumsum(np.bincount(codes, minlength=len(order)), out=borders[1:])
    elif len(values) >= COMPARED_ROWS and _begin_alike(values):
        in_order, places = _compared(values)
        borders = np.append(np.flatnonzero(_begins(in_order)), len(places))
        distinct = in_order if len(borders) > len(places) else in_order.take(borders[:-1])
    else:
        places, begins = text_order(values)
        borders = np.append(np.flatnonzero(begins), len(places))
        firsts = places[borders[:-1]]
        sorted_already = np.array_equal(firsts, np.arange(len(values)))
        distinct = values if sorted_already else _taken(values, firsts)
    owners = places if rows is None else rows[places]
    return distinct, Postings(borders, owners.astype(np.uint32))


def _taken(values: pa.Array, places: Positions) -> pa.Array:
    """The values at these places; those of one length are several times faster as cells."""
    cells = cells_of(values)
    if cells is None:
        return values.take(pa.array(places))
    width = cells.dtype.itemsize
    borders = np.arange(0, width * (len(places) + 1), width, dtype=_offset_type(values))
    buffers = [None, pa.py_buffer(borders), pa.py_buffer(cells.take(places))]
    return pa.Array.from_buffers(values.type, len(places), buffers)


def cells_of(values: pa.Array) -> npt.NDArray[np.void] | None:
    """The bytes of each value, if all are equally long and none is null; without a copy."""
    borders = borders_of(values)
    lengths = np.diff(borders)
    if not len(values) or values.null_count or not lengths[0] or np.any(lengths != lengths[0]):
        return None
    return np.frombuffer(values.buffers()[2], f"V{lengths[0]}", len(values), int(borders[0]))


def borders_of(values: pa.Array) -> npt.NDArray[Any]:
    """Where each value begins in the array's bytes, and where the last one ends."""
    offsets = values.buffers()[1]
    if not offsets:
        return np.zeros(len(values) + 1, _offset_type(values))
    borders = np.frombuffer(offsets, _offset_type(values))
    return borders[values.offset : values.offset + len(values) + 1]


def _offset_type(values: pa.Array) -> type[np.int32 | np.int64]:
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    return np.int64 if large else np.int32


def _repeats(values: pa.Array) -> bool:
    step = max(1, len(values) // SAMPLE_ROWS)
    sample = values.take(pa.array(np.arange(0, len(values), step)))
    return bool(2 * pc.count_distinct(sample).as_py() <= len(sample))


def text_order(values: pa.Array) -> tuple[Positions, Flags]:
    """Positions of the values, sorted by bytes, and which of them begin a new value."""
    count = len(values)
    if _is_sorted(values[:SAMPLE_ROWS]) and _is_sorted(values):
        return np.arange(count), _begins(values)
    windows = _Windows(values)
    keys = windows.keys(np.arange(count), 0)
    order = stable_order(keys)
    keys = keys[order]
    begins = np.ones(count, np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=begins[1:])
    places = _unsettled(begins, np.arange(count), keys)
    for window in range(1, MAX_WINDOWS):
        if not len(places):
            break
        tied = order[places]
        keys = windows.keys(tied, window)
        again = _order_within(np.cumsum(begins[places]), keys)
        order[places] = tied[again]
        keys = keys[again]
        begins[places[1:]] |= keys[1:] != keys[:-1]
        places = _unsettled(begins, places, keys)
    if len(places):
        tied = order[places]
        groups = pa.array(np.cumsum(begins[places]))
        rest = pa.table({"group": groups, "text": values.take(pa.array(tied))})
        again = pc.sort_indices(rest, [("group", "ascending"), ("text", "ascending")]).to_numpy()
        order[places] = tied[again]
        texts = rest["text"].combine_chunks().take(pa.array(again))
        begins[places[1:]] |= pc.not_equal(texts[1:], texts[:-1]).to_numpy(zero_copy_only=False)
    return order, begins


def _begins(in_order: pa.Array) -> Flags:
    """Which of sorted texts differ from the one before."""
    begins = np.ones(len(in_order), np.bool_)
    begins[1:] = pc.not_equal(in_order[1:], in_order[:-1]).to_numpy(zero_copy_only=False)
    return begins


def _begin_alike(values: pa.Array) -> bool:
    """Whether most texts agree in their first window, so that several would have to be sorted."""
    step = max(1, len(values) // SAMPLE_ROWS)
    sample = values.take(pa.array(np.arange(0, len(values), step)))
    keys = _Windows(sample).keys(np.arange(len(sample)), 0)
    return bool(2 * len(np.unique(keys)) <= len(keys)) and not _is_sorted(sample)


def _compared(values: pa.Array) -> tuple[pa.Array, Positions]:
    """The values in order, and the position of each; DataFusion compares them on every core."""
    from datafusion import SessionConfig, SessionContext, col

    parts = min(MAX_SORT_THREADS, os.cpu_count() or 1)
    context = SessionContext(SessionConfig().with_target_partitions(parts))
    rows = pa.table({"text": values, "row": pa.array(np.arange(len(values), dtype=np.uint32))})
    share = -(-len(values) // parts)
    some = [
        rows.slice(n * share, share).to_batches(max_chunksize=SORT_CHUNK_ROWS) for n in range(parts)
    ]
    frame = context.create_dataframe([batches for batches in some if batches])
    done = pa.Table.from_batches(frame.sort(col("text").sort(), col("row").sort()).collect())
    texts = done.column("text").cast(values.type).combine_chunks()
    in_order = texts if isinstance(texts, pa.Array) else pa.concat_arrays(texts.chunks)
    return in_order, done.column("row").to_numpy().astype(np.int64)


def _is_sorted(values: pa.Array) -> bool:
    return pc.all(pc.less_equal(values[:-1], values[1:])).as_py() is not False


def _order_within(groups: Positions, keys: npt.NDArray[np.uint64]) -> Positions:
    """The order by group, then key, then position."""
    by_key = stable_order(keys)
    by_group = stable_order(groups[by_key].astype(np.uint64))
    order: Positions = by_key[by_group]
    return order


def _unsettled(begins: Flags, places: Positions, keys: npt.NDArray[np.uint64]) -> Positions:
    """Of these places, those whose text goes on and equals a neighbour's so far."""
    goes_on = (keys & np.uint64(0xFF)) == _MORE
    following = np.append(begins[1:], True)
    unsettled: Positions = places[goes_on & ~(begins[places] & following[places])]
    return unsettled


class _Windows:
    """Windows of the values' bytes, after the bytes that all values begin with."""

    def __init__(self, values: pa.Array) -> None:
        borders = borders_of(values).astype(np.int64)
        data = values.buffers()[2]
        first, stop = int(borders[0]), int(borders[-1])
        padded = np.zeros(stop - first + 8, np.uint8)
        if data is not None:
            padded[:-8] = np.frombuffer(data, np.uint8)[first:stop]
        shared = _shared_prefix_bytes(values)
        self._starts = borders[:-1] - first + shared
        self._lengths = np.diff(borders) - shared
        # A view of the eight bytes that begin at every byte; the padding keeps it inside.
        self._words = np.ndarray((stop - first + 1,), ">u8", padded, strides=(1,))

    def keys(self, positions: Positions, window: int) -> npt.NDArray[np.uint64]:
        skipped = window * _WINDOW_BYTES
        left = np.clip(self._lengths[positions] - skipped, 0, _MORE)
        starts = self._starts[positions] + skipped
        words = self._words[np.minimum(starts, len(self._words) - 1)].astype(np.uint64)
        keys: npt.NDArray[np.uint64] = (words & _MASKS[left]) | left.astype(np.uint64)
        return keys


def _shared_prefix_bytes(values: pa.Array) -> int:
    shared = 0
    for some in (values[:SAMPLE_ROWS], values):
        ends = pc.min_max(some)
        low, high = (ends[name].cast(pa.large_binary()).as_py() for name in ("min", "max"))
        shared = min(len(low), len(high))
        differ = np.frombuffer(low, np.uint8)[:shared] != np.frombuffer(high, np.uint8)[:shared]
        if differ.any():
            shared = int(differ.argmax())
        if not shared:
            break
    return shared
