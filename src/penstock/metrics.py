"""Counters and gauges of one process, in Prometheus' form.

Best-effort work (hints, caches, clean-up) may fail without an error; every such failure is
counted here. Each metric is described in `docs/guide/metrics.md`, or the docs test fails.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

registry = CollectorRegistry()


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"penstock_{name}", text, labels, registry=registry)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"penstock_{name}", text, labels, registry=registry)


claim_races = _counter("claim_races", "Claims of a region that lost a race and were retried")
fenced_writers = _counter("fenced_writers", "Writers that found a higher epoch and stopped")
hint_failures = _counter("hint_failures", "Version hints that could not be read or written")
wal_entries = _counter("wal_entries", "WAL entries written")
wal_bytes = _counter("wal_bytes", "Bytes of WAL entries written")
wal_retries = _counter("wal_retries", "WAL writes repeated after a storage error")
rows_written = _counter("rows_written", "Rows acknowledged, deletes included")
split_groups = _counter("split_groups", "Joined upserts taken apart because one was not valid")
flushes = _counter("flushes", "MemTables flushed to a generation")
flush_failures = _counter("flush_failures", "Flush attempts that failed and were retried")
poisoned_writers = _counter("poisoned_writers", "Writers stopped by a failure")
back_pressure_waits = _counter("back_pressure_waits", "Writes that waited for a flush")
missed_ticks = _counter("missed_ticks", "Rounds of housekeeping that found no thread")
memtable_bytes = _gauge("memtable_bytes", "Bytes in MemTables, frozen ones included")
cache_hits = _counter("cache_hits", "Reads answered from a reader cache", "cache")
cache_misses = _counter("cache_misses", "Reads that had to fill a reader cache", "cache")
cache_evictions = _counter("cache_evictions", "Values dropped for a cache's limit", "cache")
cache_bytes = _gauge("cache_bytes", "Bytes in a reader cache when it was last filled", "cache")
stale_views = _counter("stale_views", "Views taken again because something vanished under them")
failed_advances = _counter("failed_advances", "Versions that could not be tried beforehand")
gc_files = _counter("gc_files", "Files removed by clean-up", "what")
gc_bytes = _counter("gc_bytes", "Bytes of files removed by clean-up", "what")
gc_postponed = _counter("gc_postponed", "Regions whose generations clean-up left for the next time")
packed_read_bytes = _counter("packed_read_bytes", "Bytes of entries read from packed files")
packed_written_bytes = _counter("packed_written_bytes", "Bytes of packed files written")
packed_budget_waits = _counter("packed_budget_waits", "Reads that waited for a byte budget")
