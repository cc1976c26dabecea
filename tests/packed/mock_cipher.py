"""The cipher of the golden encrypted files: every byte XOR one key byte, `MOCK` before the slice.

It keeps no secret and binds nothing to its place; it is there because it gives the same bytes as
the writer that made the golden files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.errors import Corruption

TAG = b"MOCK"


@dataclass(frozen=True, slots=True)
class MockFileCipher:
    key: int
    ez_id: str

    @property
    def edek(self) -> str:
        return chr(self.key)

    @property
    def overhead_bytes(self) -> int:
        return len(TAG)

    def seal_into(self, sequence: int, label: bytes, plain: memoryview, out: memoryview) -> None:
        assert len(out) == len(plain) + len(TAG)
        self._xor(memoryview(TAG), out[: len(TAG)])
        self._xor(plain, out[len(TAG) :])

    def open_into(self, label: bytes, sealed: memoryview, out: memoryview) -> None:
        tag = bytearray(len(TAG))
        self._xor(sealed[: len(TAG)], memoryview(tag))
        if tag != TAG:
            raise Corruption("a slice does not carry the mock cipher's tag")
        self._xor(sealed[len(TAG) :], out)

    def _xor(self, data: memoryview, out: memoryview) -> None:
        np.bitwise_xor(
            np.frombuffer(data, np.uint8), np.uint8(self.key), out=np.frombuffer(out, np.uint8)
        )


@dataclass(frozen=True, slots=True)
class MockCipher:
    key: int = 7
    ez_id: int = 1

    def new_file(self) -> MockFileCipher:
        return MockFileCipher(self.key, str(self.ez_id))

    def open_file(self, edek: str, ez_id: str) -> MockFileCipher:
        if len(edek) != 1 or ord(edek) > 255:
            raise Corruption(f"{edek!r} is no key of the mock cipher: it has one byte")
        return MockFileCipher(ord(edek), ez_id)
