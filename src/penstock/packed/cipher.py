"""What the container needs of encryption; `keys` and `aes` are the ones that are real.

A `Cipher` makes one `FileCipher` per file. The container cuts entries into slices, numbers every
slice of the file in the order of writing (`sequence`, from 0, never used twice), and gives each a
`label`: bytes that say which entry, and which of its slices, this is. What was sealed under one
label opens under no other. `layout.slice_label` makes labels.
"""

from __future__ import annotations

from typing import Protocol


class FileCipher(Protocol):
    """The encryption of one file. Every method may be called from many threads at once."""

    @property
    def edek(self) -> str:
        """The wrapped data key, as text for the directory's `__edek__`."""

    @property
    def ez_id(self) -> str:
        """The encryption zone, as text for the directory's `__ez_id__`."""

    @property
    def overhead_bytes(self) -> int:
        """How much longer a sealed slice is than its plaintext."""

    def seal_into(self, sequence: int, label: bytes, plain: memoryview, out: memoryview) -> None:
        """Encrypt one slice; `out` has exactly `len(plain) + overhead_bytes` bytes."""

    def open_into(self, label: bytes, sealed: memoryview, out: memoryview) -> None:
        """Decrypt one slice; `out` has exactly `len(sealed) - overhead_bytes` bytes.

        `Corruption` if the slice is not what was sealed under the label; `out` then means nothing.
        """


class Cipher(Protocol):
    def new_file(self) -> FileCipher:
        """Encryption for a file that is about to be written, with a data key of its own."""

    def open_file(self, edek: str, ez_id: str) -> FileCipher:
        """Encryption of a file that exists; an error if its data key cannot be unwrapped."""
