"""Fragments of Lance tables, as far as several modules look at them in the same way.

A row address has the fragment in its upper and the row's offset in its lower 32 bits. What a
fragment's rows are is said by `contents`: what was worked out from them holds as long as that is
the same, whichever version of the table the fragment is found in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from lance.fragment import FragmentMetadata, LanceFragment

from penstock.storage.objects import ObjectStore

_FRAGMENT_BITS = np.uint64(32)
_OFFSET_MASK = np.uint64(0xFFFFFFFF)

Addresses = npt.NDArray[np.uint64]
Offsets = npt.NDArray[np.int64]


def fragments_of(addresses: Addresses) -> Addresses:
    """Of each row address the number of its fragment."""
    numbers: Addresses = addresses >> _FRAGMENT_BITS
    return numbers


def offsets_of(addresses: Addresses) -> Offsets:
    """Of each row address the offset within its fragment."""
    offsets: Offsets = (addresses & _OFFSET_MASK).astype(np.int64)
    return offsets


def contents(fragment: LanceFragment) -> str:
    """What a fragment's rows are: the same as long as its files and its deletions are."""
    described = fragment.metadata.to_json()
    named = {part: described[part] for part in ("id", "files", "overlays", "deletion_file")}
    return json.dumps(named, sort_keys=True)


def data_keys(fragments: Iterable[FragmentMetadata]) -> list[str]:
    """The objects that hold the columns of fragments."""
    return [f"data/{file.path}" for fragment in fragments for file in fragment.files]


def sync_data(store: ObjectStore, fragments: Iterable[FragmentMetadata]) -> None:
    """Make what Lance wrote for fragments durable."""
    for key in data_keys(fragments):
        store.sync(key)
