"""A reader of finite state transducers: the sorted term dictionaries inside Lance's text indexes.

Lance keeps the terms of a full-text partition as the bytes of a version-3 `fst` map, term to token
id. A lookup walks from the root, one node a byte of the term, and adds up the outputs it passes.

The bytes: u64 version, u64 type, nodes, u64 number of keys, u64 root address, u32 masked CRC-32C of
all before it. A node is addressed by its last byte, its state, and is read backwards:

- `11cccccc`: one transition, to the node that ends right before this one, output 0.
- `10cccccc`: one transition; sizes byte, address delta, output.
- `0fnnnnnn`: n transitions (0: the count is the byte before, where 1 means 256), final if f; sizes
  byte, for more than 32 a 256-byte table of input to transition, then inputs, address deltas and
  outputs, last transition first, and the final output if final.

`cccccc` is a common input byte by number, 0 if the input is the byte before. The sizes byte holds
the width of address deltas (high four bits) and outputs (low). A delta of 0 is the empty final
node, any other counts from the node's first byte.

Invariants
- The checksum is verified once, when the map is opened; after that, only a walk that leaves the
  bytes is checked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from crc32c import crc32c

from penstock.errors import Corruption

_VERSION = 3
_HEADER_BYTES = 16
_FOOTER_BYTES = 20
_TABLE_THRESHOLD = 32
_COMMON = b"te/oasripcnw.hlm-du012g=:bf3y5&_4v9678k%?xCDASFIBEjPTzRNM+LOqHG"
_MASK_DELTA = 0xA282EAD8

_Transition = tuple[int, int, int]
"""Input byte, output, address of the next node."""


class Fst:
    """An immutable map of byte strings to integers."""

    def __init__(self, data: bytes, name: str = "fst") -> None:
        self._data = data
        self._name = name
        if len(data) < _HEADER_BYTES + _FOOTER_BYTES:
            raise Corruption(f"{name} has {len(data)} bytes, too few for a term dictionary")
        version = int.from_bytes(data[:8], "little")
        if version != _VERSION:
            raise Corruption(
                f"{name} is a term dictionary of version {version}, only {_VERSION} can be read; "
                f"rebuild the index"
            )
        checksum = crc32c(memoryview(data)[:-4])
        masked = ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF
        if masked != int.from_bytes(data[-4:], "little"):
            raise Corruption(f"{name} fails its checksum; rebuild the index")
        self._length = int.from_bytes(data[-20:-12], "little")
        self._root = int.from_bytes(data[-12:-4], "little")

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def get(self, term: bytes) -> int | None:
        """The value of a term, or None."""
        address, value = self._root, 0
        for byte in term:
            step = self._step(address, byte)
            if step is None:
                return None
            output, address = step
            value += output
        final = self._final_output(address)
        return None if final is None else value + final

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Every term and its value, in the order of the terms."""
        pending = [(b"", 0, self._root)]
        while pending:
            term, value, address = pending.pop()
            final = self._final_output(address)
            if final is not None:
                yield term, value + final
            for byte, output, target in reversed(self._transitions(address)):
                pending.append((term + bytes((byte,)), value + output, target))

    def _uint(self, start: int, size: int) -> int:
        return int.from_bytes(self._data[start : start + size], "little")

    def _state(self, address: int) -> int:
        if not _HEADER_BYTES <= address < len(self._data) - _FOOTER_BYTES:
            raise Corruption(f"{self._name} points outside itself; rebuild the index")
        return self._data[address]

    def _single(self, address: int, state: int) -> _Transition:
        at = address
        common = state & 0x3F
        if common:
            byte = _COMMON[common - 1]
        else:
            at -= 1
            byte = self._data[at]
        if state >= 0xC0:
            return byte, 0, at - 1
        at -= 1
        address_size, output_size = divmod(self._data[at], 16)
        delta = self._uint(at - address_size, address_size)
        start = at - address_size - output_size
        return byte, self._uint(start, output_size), start - delta if delta else 0

    def _many(self, address: int, state: int) -> tuple[int, int, int, int, int, int]:
        """How many transitions, widths of addresses and outputs, where the table (or the inputs)
        ends, where the inputs end, and where the node starts."""
        at, count = address, state & 0x3F
        if not count:
            at -= 1
            count = self._data[at]
            # 1 always fits into the state, 0 is a node without transitions.
            count = 256 if count == 1 else count
        at -= 1
        address_size, output_size = divmod(self._data[at], 16)
        inputs_end = at - 256 if count > _TABLE_THRESHOLD else at
        outputs = count + (1 if state & 0x40 else 0)
        start = inputs_end - count * (1 + address_size) - outputs * output_size
        return count, address_size, output_size, at, inputs_end, start

    def _step(self, address: int, byte: int) -> tuple[int, int] | None:
        if address == 0:
            return None
        state = self._state(address)
        if state >= 0x80:
            single, output, target = self._single(address, state)
            return (output, target) if single == byte else None
        count, address_size, output_size, table_end, inputs_end, start = self._many(address, state)
        if count > _TABLE_THRESHOLD:
            ordinal = self._data[table_end - 256 + byte]
            if ordinal >= count:
                return None
        else:
            found = self._data.find(byte, inputs_end - count, inputs_end)
            if found < 0:
                return None
            ordinal = inputs_end - 1 - found
        addresses_end = inputs_end - count
        outputs_end = addresses_end - count * address_size
        delta = self._uint(addresses_end - (ordinal + 1) * address_size, address_size)
        output = self._uint(outputs_end - (ordinal + 1) * output_size, output_size)
        return output, start - delta if delta else 0

    def _transitions(self, address: int) -> list[_Transition]:
        if address == 0:
            return []
        state = self._state(address)
        if state >= 0x80:
            return [self._single(address, state)]
        count, _, _, _, inputs_end, _ = self._many(address, state)
        transitions = []
        for byte in reversed(self._data[inputs_end - count : inputs_end]):
            step = self._step(address, byte)
            if step is not None:
                transitions.append((byte, *step))
        return transitions

    def _final_output(self, address: int) -> int | None:
        if address == 0:
            return 0
        state = self._state(address)
        if state >= 0x80 or not state & 0x40:
            return None
        _, _, output_size, _, _, start = self._many(address, state)
        return self._uint(start, output_size)
