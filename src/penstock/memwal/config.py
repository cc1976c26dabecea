"""What a writer may be told, with the names Lance uses for the same things in a table's defaults.

A table keeps its defaults in the MemWAL index (`writer_config_defaults`, text to text); a caller
overrides them per writer. Limits carry their unit in the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from penstock.errors import InvalidInput

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class WriterConfig:
    durable: bool = True
    """A write returns when it is in the WAL; else it may be lost in a crash until `flush`."""
    indexed: bool = True
    """A write returns when the live indexes have it; else they catch up when searched."""
    max_memtable_bytes: int = 256 * _MIB
    max_memtable_rows: int = 100_000
    max_memtable_age_ms: int = 600_000
    max_unflushed_bytes: int = 1024 * _MIB
    """Rows not yet in a generation; beyond it writes wait for a flush."""
    max_batch_bytes: int = 64 * _MIB
    """One call's rows for one region; a WAL entry never takes more than this."""
    wal_buffer_bytes: int = 10 * _MIB
    """Writes that are not durable go to the WAL when so much has gathered,"""
    wal_flush_interval_ms: int = 100
    """or when this time has passed."""
    back_pressure_timeout_ms: int = 60_000
    fence_window_ms: int = 5_000
    """The longest a writer trusts its claim without looking; clean-up waits for longer."""
    flush_on_close: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise InvalidInput(f"writer option {field.name} must be True or False")
            elif isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InvalidInput(
                    f"writer option {field.name} must be a positive whole number, not {value!r}"
                )

        least_bytes = self.max_memtable_bytes + self.max_batch_bytes
        if self.max_unflushed_bytes < least_bytes:
            raise InvalidInput(
                f"writer option max_unflushed_bytes = {self.max_unflushed_bytes} must be at least "
                f"max_memtable_bytes + max_batch_bytes = {least_bytes}"
            )

    def with_options(self, options: Mapping[str, Any]) -> WriterConfig:
        known = {field.name for field in fields(self)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise InvalidInput(
                f"unknown writer option {', '.join(unknown)}; there are: {', '.join(sorted(known))}"
            )
        return replace(self, **options)

    def with_defaults(self, defaults: Mapping[str, str]) -> WriterConfig:
        """The configuration with a table's stored defaults; foreign keys are left alone."""
        options: dict[str, Any] = {}
        for ours, stored in _STORED_NAMES.items():
            text = defaults.get(stored)
            if text is None:
                continue
            if ours in _BOOLEANS:
                options[ours] = text.lower() in ("true", "1")
            elif text.isdecimal() and int(text) > 0:
                options[ours] = int(text)
        # Lance knows no batch limit and may store a smaller allowance than ours has to be.
        memtable_bytes = options.get("max_memtable_bytes", self.max_memtable_bytes)
        options["max_unflushed_bytes"] = max(
            options.get("max_unflushed_bytes", self.max_unflushed_bytes),
            memtable_bytes + options.get("max_batch_bytes", self.max_batch_bytes),
        )
        return replace(self, **options)

    def to_defaults(self) -> dict[str, str]:
        """The options that differ from the built-in ones, as a table stores them."""
        builtin = asdict(WriterConfig())
        return {
            _STORED_NAMES[name]: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in asdict(self).items()
            if value != builtin[name]
        }


_BOOLEANS = {field.name for field in fields(WriterConfig) if field.type == "bool"}
_LANCE_NAMES = {
    "durable": "durable_write",
    "max_memtable_bytes": "max_memtable_size",
    "wal_buffer_bytes": "max_wal_buffer_size",
    "wal_flush_interval_ms": "max_wal_flush_interval_ms",
    "max_unflushed_bytes": "max_unflushed_memtable_bytes",
    "max_memtable_rows": "max_memtable_rows",
}
_STORED_NAMES = {
    field.name: _LANCE_NAMES.get(field.name, f"penstock.{field.name}")
    for field in fields(WriterConfig)
}
