"""CRC-32C (Castagnoli), and that of two stretches joined without reading them again.

Two libraries, because each does one half best: `crc32c` is the faster one and takes any buffer,
`awscrt` can combine. The latter takes a tenth of a second to import, and only large entries that
go to files need it.
"""

from __future__ import annotations

from typing import cast

import crc32c as _crc32c

from penstock.storage.objects import Buffer


def crc32c(data: Buffer | bytearray, crc: int = 0) -> int:
    """The CRC of the data, or of what had `crc` before and the data behind it."""
    return _crc32c.crc32c(cast("bytes", data), crc)


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC of two stretches in a row, from theirs and the length of the second."""
    from awscrt import checksums

    return cast("int", checksums.combine_crc32c(first, second, second_bytes))
