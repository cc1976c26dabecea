"""Penstock turns lake tables into live tables.

Rows stream in, are durable in milliseconds, and are found at once, while the table they end up in
stays an ordinary Lance table. Start with `connect`.
"""

import os

# Lance logs through this variable, and reads it when it is imported.
os.environ.setdefault("LANCE_LOG", "error")

from penstock.database import Database, connect
from penstock.errors import (
    AmbiguousWrite,
    BackPressure,
    ClaimContention,
    CommitConflict,
    Corruption,
    Fenced,
    InvalidInput,
    LeaseHeld,
    LeaseLost,
    NotATable,
    ObjectExists,
    ObjectNotFound,
    PenstockError,
    PreconditionFailed,
    RegionSealed,
    StorageError,
    StoreUnsupported,
    TableExists,
    TableNotFound,
    VersionNotFound,
    WriterClosed,
    WriterPoisoned,
)
from penstock.memwal.region_spec import (
    bucket,
    day,
    expression,
    hour,
    identity,
    month,
    multi_bucket,
    truncate,
    unsharded,
    year,
)
from penstock.table import Table, Writer

__version__ = "0.1.0"

__all__ = [
    "AmbiguousWrite",
    "BackPressure",
    "ClaimContention",
    "CommitConflict",
    "Corruption",
    "Database",
    "Fenced",
    "InvalidInput",
    "LeaseHeld",
    "LeaseLost",
    "NotATable",
    "ObjectExists",
    "ObjectNotFound",
    "PenstockError",
    "PreconditionFailed",
    "RegionSealed",
    "StorageError",
    "StoreUnsupported",
    "Table",
    "TableExists",
    "TableNotFound",
    "VersionNotFound",
    "Writer",
    "WriterClosed",
    "WriterPoisoned",
    "__version__",
    "bucket",
    "connect",
    "day",
    "expression",
    "hour",
    "identity",
    "month",
    "multi_bucket",
    "truncate",
    "unsharded",
    "year",
]
