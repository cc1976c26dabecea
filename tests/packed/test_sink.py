"""Where packed files go: places that take a whole file or nothing, and memory that stays small."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.packed.fixtures import pack, pattern
from tests.s3_server import S3Server

from penstock.errors import InvalidInput, StorageError
from penstock.packed.writer import PackedWriter
from penstock.storage.open import open_store
from penstock.storage.streams import PART_BYTES

MIB = 1 << 20


def write(target: Any, entries: Mapping[str, bytes], **how: Any) -> None:
    with PackedWriter(target, **how) as writer:
        for name, data in entries.items():
            writer.write_entry(name, data)


def test_targets_that_cannot_be_are_refused(tmp_path: Path, s3: S3Server) -> None:
    (tmp_path / "directory").mkdir()
    for target in (
        "",
        "a/",
        "s3://bucket",
        "s3://bucket/",
        "s3://b/k?v=1",
        "ftp://x/y",
        io.StringIO(),
        7,
    ):
        with pytest.raises(InvalidInput):
            PackedWriter(target)
    with pytest.raises(StorageError, match="create it first"):
        PackedWriter(tmp_path / "no/such/x.v3")
    with pytest.raises(StorageError, match="directory"):
        write(tmp_path / "directory", {})
    with pytest.raises(StorageError, match="nowhere"):
        write("s3://nowhere/x.v3", {}, storage_options=s3.storage_options)
    assert os.listdir(tmp_path) == ["directory"]


def test_a_file_that_takes_little_or_nothing() -> None:
    class Little(io.RawIOBase):
        taken = b""

        def write(self, data: Any) -> int:
            self.taken += bytes(data[:3])
            return min(3, len(data))

    class Nothing(io.RawIOBase):
        def write(self, data: Any) -> None:
            return None

    little = Little()
    write(little, {"a": b"12345678"})
    assert little.taken == pack({"a": b"12345678"})
    with pytest.raises(StorageError, match="takes no more"):
        PackedWriter(Nothing())


@pytest.mark.parametrize("nameless", [True, False])
def test_a_path_shows_the_whole_file_or_what_was_there(
    nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")
    steps: list[str] = []
    for name in ("fdatasync", "rename", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, r=real: (steps.append(n), r(*a))[1])
    target = tmp_path / "x.v3"
    target.write_bytes(b"old")
    writer = PackedWriter(f"file://{target}")
    writer.write_entry("a", bytes(5 * MIB))
    assert target.read_bytes() == b"old"
    assert len(os.listdir(tmp_path)) == (1 if nameless else 2)
    assert steps == []
    total = writer.finish()
    assert steps == ["fdatasync", "rename", "fsync"]
    assert target.read_bytes() == pack({"a": bytes(5 * MIB)})
    assert total == target.stat().st_size == writer.total_bytes
    PackedWriter(target).abort()
    assert os.listdir(tmp_path) == ["x.v3"]


KILLED = """
import os, signal, sys
from penstock.packed.writer import PackedWriter
writer = PackedWriter(sys.argv[1])
writer.write_entry("a", bytes(9_000_000))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x.v3")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_objects_are_written_by_uri_in_parts(s3: S3Server) -> None:
    entries = {"large": pattern(3 * PART_BYTES + 1), "small": b"1"}
    uri = f"{s3.uri('packed')}/deep/a b.v3"
    options = s3.storage_options
    write(uri, entries, storage_options=options)
    store = open_store(uri.rpartition("/")[0], options)
    assert bytes(store.get("a b.v3").data) == pack(entries)
    assert s3.unfinished_uploads() == 0


# --- memory ---------------------------------------------------------------------------------------

GIB = """
import re, sys
from pathlib import Path
from penstock.packed import AesGcm, FileKeys, PackedWriter

def status_mib(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

class Away:
    def write(self, data):
        return len(data)

source, workers, slice_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ciphers = [None, AesGcm(FileKeys.create(source.with_name("keys.json")))]
for cipher in ciphers:
    with PackedWriter(Away(), cipher=cipher, slice_size=4096) as warm:
        warm.write_entry("a", bytes(8_000_000))
        warm.write_entry("b", source, 8_000_000)
Path("/proc/self/clear_refs").write_text("5")
before = status_mib("VmRSS")
for cipher in ciphers:
    with PackedWriter(Away(), cipher=cipher, workers=workers, slice_size=slice_size) as writer:
        writer.write_entry("file", source)
        with source.open("rb") as stream:
            only_reads = type("Stream", (), {"readinto": stream.readinto})()
            writer.write_entry("stream", only_reads, 1 << 27)
print(status_mib("VmHWM") - before)
"""


def test_memory_does_not_grow_with_the_entry(tmp_path: Path) -> None:
    workers, slice_mib = 2, 16
    source = tmp_path / "source"
    with source.open("wb") as sparse:
        sparse.truncate(1 << 29)
    command = [sys.executable, "-c", GIB, str(source), str(workers), str(slice_mib * MIB)]
    peak_mib = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert peak_mib < workers * slice_mib + 64, peak_mib
