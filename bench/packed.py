"""Packed index files: how close writing and reading come to copying, and what building costs.

Plain: one large entry from a file into a packed file and back, against a loop that copies the same
bytes in pieces of 16 MiB and takes their CRC-32C. Encrypted: the same with AES-256-GCM, against a
loop that encrypts the same pieces into one buffer and writes nothing (`AES-GCM alone`), and one
that also reads, takes the CRC and writes them (`AES-GCM and copy`). Contenders take turns; a figure
is a ratio of medians. All work in one directory, by default in memory (`/dev/shm`) where there is
such a thing, so that the disk is not what is measured.

Memory: a process of its own per way of moving a 4 GiB entry; its peak less what it had before.

Requests: the store is a real S3 server; every HTTP request that reaches it is counted.

Building: `stlsort` and `bitmap` of a column of 1,000,000 rows, read from a Lance dataset, built and
written, against Lance's BTREE and BITMAP on the same column.

Filters: a table of 1,000,000 rows, with no index, with a packed one, and with Lance's own.

    python -m bench.packed [--bytes N] [--rows N] [--rounds N] [--memory-bytes N]
                           [--only copy|memory|requests|build|filter] [--dir DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c
import lance
import numpy as np
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from tests.s3_proxy import proxying
from tests.s3_server import S3Server

import penstock
from penstock.packed import AesGcm, FileKeys, PackedReader, PackedWriter, build_index

PIECE_BYTES = 16 << 20
SETTLE_BYTES = 512 << 20
WORDS = ("river", "stone", "penstock", "lake", "turbine", "gate", "water")
ENTRY = "data"
PARTS = ("copy", "memory", "requests", "build", "filter")
MOVES = ("plain write", "encrypted write", "plain read", "encrypted read", "encrypted stream")


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def medians(
    contenders: dict[str, Callable[[], object]],
    rounds: int,
    leave: Sequence[Path] = (),
    settle_bytes: int = 0,
) -> dict[str, float]:
    """Each contender's median, their runs taking turns; the first round warms up.

    Files that a run leaves behind are removed before the next, so that all write new ones, and
    so much memory is used and freed, so that none has to wait for what the one before left in
    pieces.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            for path in leave:
                path.unlink(missing_ok=True)
            if settle_bytes:
                np.empty(settle_bytes, dtype=np.uint8)[::4096] = 1
            took = timed(work)
            if number:
                seconds[name].append(took)
    return {name: statistics.median(took) for name, took in seconds.items()}


def show(name: str, ratio: float, wanted: float | None, note: str) -> None:
    aim = "" if wanted is None else f"  (wanted {wanted}x)"
    print(f"{name:<34} {ratio:6.2f}x{aim:<16} {note}", flush=True)


# --- copying -------------------------------------------------------------------------------


def copy_with_crc(source: Path, target: Path) -> None:
    crc = 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    with open(source, "rb", buffering=0) as given, open(target, "wb", buffering=0) as taken:
        while count := given.readinto(buffer):
            crc = crc32c.crc32c(buffer[:count], crc)
            taken.write(buffer[:count])
        os.fsync(taken.fileno())


def read_with_crc(source: Path) -> None:
    whole = np.empty(source.stat().st_size, dtype=np.uint8)
    view = memoryview(whole)
    crc, done = 0, 0
    with open(source, "rb", buffering=0) as given:
        while count := given.readinto(view[done : done + PIECE_BYTES]):
            crc = crc32c.crc32c(view[done : done + count], crc)
            done += count


def write_alone(size_bytes: int, target: Path) -> None:
    """The same amount of bytes that are ready, into a new file."""
    piece = memoryview(os.urandom(PIECE_BYTES))
    with open(target, "wb", buffering=0) as taken:
        for _ in range(size_bytes // PIECE_BYTES):
            taken.write(piece)
        os.fsync(taken.fileno())


def encrypt_alone(size_bytes: int) -> None:
    cipher = AESGCM(os.urandom(32))
    piece = os.urandom(PIECE_BYTES)
    out = bytearray(PIECE_BYTES + 16)
    for number in range(size_bytes // PIECE_BYTES):
        cipher.encrypt_into(number.to_bytes(12, "big"), piece, b"", out)


def decrypt_alone(size_bytes: int) -> None:
    cipher = AESGCM(os.urandom(32))
    sealed = cipher.encrypt(bytes(12), os.urandom(PIECE_BYTES), b"")
    out = bytearray(PIECE_BYTES)
    for _ in range(size_bytes // PIECE_BYTES):
        cipher.decrypt_into(bytes(12), sealed, b"", out)


def encrypt_and_copy(source: Path, target: Path) -> None:
    cipher = AESGCM(os.urandom(32))
    crc, number = 0, 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    sealed = memoryview(bytearray(PIECE_BYTES + 16))
    with open(source, "rb", buffering=0) as given, open(target, "wb", buffering=0) as taken:
        while count := given.readinto(buffer):
            crc = crc32c.crc32c(buffer[:count], crc)
            nonce = number.to_bytes(12, "big")
            written = cipher.encrypt_into(nonce, buffer[:count], b"", sealed[: count + 16])
            taken.write(nonce)
            taken.write(sealed[:written])
            number += 1
        os.fsync(taken.fileno())


def write_packed(source: Path | bytes, target: Path, cipher: AesGcm | None) -> None:
    with PackedWriter(target, cipher=cipher) as writer:
        writer.write_entry(ENTRY, source)
        writer.finish()


def read_packed(source: Path, cipher: AesGcm | None) -> None:
    with PackedReader.open(source, keys=cipher) as reader:
        reader.read(ENTRY)


def to_file(source: Path, target: Path, cipher: AesGcm | None) -> None:
    with PackedReader.open(source, keys=cipher) as reader:
        reader.read_to_file(ENTRY, target)


def stream_packed(source: Path, cipher: AesGcm | None) -> None:
    with PackedReader.open(source, keys=cipher) as reader:
        for _ in reader.stream(ENTRY):
            continue


class ToNowhere:
    """A sink that takes bytes and keeps none."""

    def write(self, data: bytes) -> int:
        return len(data)


def bench_copy(directory: Path, size_bytes: int, rounds: int) -> None:
    source = directory / "source"
    source.write_bytes(os.urandom(PIECE_BYTES) * (size_bytes // PIECE_BYTES))
    keys = AesGcm(FileKeys.create(directory / "keys.json"))
    plain, sealed = directory / "plain.v3", directory / "sealed.v3"
    taken = directory / "taken"
    in_memory = source.read_bytes()
    write_packed(source, plain, None)
    write_packed(source, sealed, keys)

    def encrypted_to_nowhere() -> None:
        with PackedWriter(ToNowhere(), cipher=keys) as writer:  # type: ignore[arg-type]
            writer.write_entry(ENTRY, source)
            writer.finish()

    took = medians(
        {
            "copy": lambda: copy_with_crc(source, taken),
            "write": lambda: write_packed(source, taken, None),
            "read to file": lambda: to_file(plain, taken, None),
            "load": lambda: read_with_crc(source),
            "read": lambda: read_packed(plain, None),
            "a new file": lambda: write_alone(size_bytes, taken),
            "AES-GCM": lambda: encrypt_alone(size_bytes),
            "AES-GCM and copy": lambda: encrypt_and_copy(source, taken),
            "sealed write": lambda: write_packed(in_memory, taken, keys),
            "sealed write of a file": lambda: write_packed(source, taken, keys),
            "sealed to nowhere": encrypted_to_nowhere,
            "AES-GCM back": lambda: decrypt_alone(size_bytes),
            "sealed read": lambda: read_packed(sealed, keys),
            "sealed stream": lambda: stream_packed(sealed, keys),
            "sealed to file": lambda: to_file(sealed, taken, keys),
        },
        rounds,
        leave=[taken],
        settle_bytes=size_bytes,
    )
    speed = {name: size_bytes / seconds / 1e9 for name, seconds in took.items()}

    def against(what: str, other: str, wanted: float | None) -> None:
        note = f"{speed[what]:.2f} GB/s, {other} {speed[other]:.2f} GB/s"
        show(what, took[other] / took[what], wanted, note)

    against("write", "copy", 0.8)
    against("read to file", "copy", 0.8)
    against("read", "load", 0.8)
    against("sealed to nowhere", "AES-GCM", 0.7)
    against("sealed write", "AES-GCM", 0.7)
    against("sealed write", "a new file", None)
    against("sealed write of a file", "AES-GCM and copy", None)
    against("sealed read", "AES-GCM back", 0.7)
    against("sealed stream", "AES-GCM back", 0.7)
    against("sealed to file", "AES-GCM back", None)
    for path in (source, plain, sealed, taken):
        path.unlink(missing_ok=True)


# --- memory --------------------------------------------------------------------------------


def resident(which: str) -> int:
    """Bytes of memory that this process holds (`VmRSS`), or held at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(which))


def move(directory: Path, how: str, workers: int) -> None:
    """Run in a process of its own: moves the entry, prints the peak it added, in bytes."""
    keys = AesGcm(FileKeys(directory / "keys.json"))
    cipher = keys if how.startswith("encrypted") else None
    packed = directory / f"{'sealed' if cipher else 'plain'}.v3"
    with PackedWriter(directory / "warm.v3", cipher=cipher) as writer:
        writer.write_entry("x", b"warm")
        writer.finish()
    with PackedReader.open(directory / "warm.v3", keys=cipher) as reader:
        reader.read("x")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    if how.endswith("write"):
        with PackedWriter(packed, cipher=cipher, workers=workers) as writer:
            writer.write_entry(ENTRY, directory / "source")
            writer.finish()
    else:
        with PackedReader.open(packed, keys=cipher, workers=workers) as reader:
            if how.endswith("stream"):
                for _ in reader.stream(ENTRY):
                    continue
            else:
                reader.read_to_file(ENTRY, directory / "taken")
    print(json.dumps(resident("VmHWM") - before))


def bench_memory(directory: Path, size_bytes: int, workers: int = 4) -> None:
    FileKeys.create(directory / "keys.json")
    with open(directory / "source", "wb") as file:
        piece = os.urandom(PIECE_BYTES)
        for _ in range(size_bytes // PIECE_BYTES):
            file.write(piece)
    limit = workers * PIECE_BYTES + (64 << 20)
    for how in MOVES:
        command = [sys.executable, "-m", "bench.packed", "--move", how, "--dir", str(directory)]
        run = subprocess.run(
            [*command, "--workers", str(workers)], check=True, capture_output=True, text=True
        )
        added = int(run.stdout)
        fits = "fits" if added <= limit else "TOO MUCH"
        print(
            f"{how:<20} peak {added / 2**20:6.0f} MiB for {size_bytes / 2**30:.1f} GiB, "
            f"{workers} workers; limit {limit / 2**20:.0f} MiB: {fits}",
            flush=True,
        )
    for name in ("source", "plain.v3", "sealed.v3", "taken", "warm.v3"):
        (directory / name).unlink(missing_ok=True)


# --- requests ------------------------------------------------------------------------------


def bench_requests() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        server = S3Server().start(Path(directory) / "log")
        try:
            count_requests(server)
        finally:
            server.stop()


def count_requests(server: S3Server) -> None:
    with proxying(server.port) as proxy:
        options = {**server.storage_options, "aws_endpoint": proxy.endpoint}
        uri = f"{server.uri()}.v3"
        with PackedWriter(uri, storage_options=options) as writer:
            writer.write_entry("small", os.urandom(4096))
            writer.write_entry("large", os.urandom(32 << 20))
            writer.finish()
        before = proxy.requests
        with PackedReader.open(uri, storage_options=options) as reader:
            opened = proxy.requests - before
            reader.read("small")
            read = proxy.requests - before
    print(f"requests: {opened} to open, {read} with one small entry (wanted 2)", flush=True)


# --- building ------------------------------------------------------------------------------


def columns(rows: int) -> dict[str, pa.Array]:
    random = np.random.default_rng(7)
    nulls = random.random(rows) < 0.05
    few = random.integers(0, 1000, rows)
    names = pa.array([f"name-{n:04d}" for n in range(1000)])
    keys = [f"key-{n:08d}" for n in random.permutation(rows)]
    return {
        "int64": pa.array(random.integers(-(2**62), 2**62, rows), mask=nulls),
        "double": pa.array(random.random(rows), mask=nulls),
        "string": pa.array(keys),
        "string, nulls": pa.array(keys, mask=nulls),
        "string of two words": pa.array(
            [f"{WORDS[n % 7]} {WORDS[n % 5]}-{n}" for n in random.permutation(rows).tolist()]
        ),
        "few int64": pa.array(few, mask=nulls),
        "few string": names.take(pa.array(few, mask=nulls)),
    }


def bench_build(directory: Path, rows: int, rounds: int) -> None:
    table = pa.table(columns(rows))
    dataset = lance.write_dataset(table, str(directory / "build.lance"))
    for name in table.column_names:
        kind, other = ("bitmap", "BITMAP") if name.startswith("few") else ("stlsort", "BTREE")

        def ours(name: str = name, kind: str = kind) -> None:
            column = dataset.to_table(columns=[name]).column(0)
            with PackedWriter(directory / "built.v3") as writer:
                build_index(kind, column).write(writer)
                writer.finish()

        def lances(name: str = name, other: str = other) -> None:
            dataset.create_scalar_index(name, other, name=f"{name} index", replace=True)

        took = medians({"ours": ours, "lance": lances}, rounds, settle_bytes=SETTLE_BYTES)
        note = f"{took['ours'] * 1e3:.0f} ms, Lance's {other} {took['lance'] * 1e3:.0f} ms"
        show(f"build {kind} of {name}", took["lance"] / took["ours"], 1.0, note)
    shutil.rmtree(directory / "build.lance")
    (directory / "built.v3").unlink()


# --- filters -------------------------------------------------------------------------------


def bench_filter(directory: Path, rows: int, rounds: int) -> None:
    random = np.random.default_rng(3)
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            pa.field("tenant", pa.int64()),
            pa.field("body", pa.string()),
            pa.field("vector", pa.list_(pa.float32(), 32)),
        ]
    )
    data = pa.table(
        {
            "id": pa.array(np.arange(rows)),
            "tenant": pa.array(random.integers(0, rows // 50, rows)),
            "body": pa.array([f"text number {n} of many" for n in range(rows)]),
            "vector": pa.FixedSizeListArray.from_arrays(
                random.random(rows * 32, dtype=np.float32), 32
            ),
        },
        schema=schema,
    )
    db = penstock.connect(directory)
    tables: dict[str, penstock.Table] = {}
    for name, kind in (("none", None), ("packed", "packed_hybrid"), ("btree", "btree")):
        table = tables[name] = db.create_table(name, schema, primary_key="id")
        table.bulk_load(data)
        if kind is not None:
            table.create_index("tenant", kind)
            table.create_index("body", kind)
    wanted = iter(random.integers(0, rows // 50, 1_000_000).tolist())

    def asking(table: penstock.Table, where: str) -> Callable[[], object]:
        def ask() -> None:
            for _ in range(5):
                table.scan(filter=where.format(next(wanted))).read_all()

        return ask

    for where in (
        "tenant = {}",
        "tenant IN ({0}, 17, 33) AND id > 1000",
        "tenant < 100 AND id > {}",
        "body = 'text number {} of many'",
        "body LIKE 'text number {}%'",
    ):
        took = medians({name: asking(table, where) for name, table in tables.items()}, rounds)
        each = {name: seconds / 5 * 1e3 for name, seconds in took.items()}
        note = f"packed {each['packed']:.1f} ms, none {each['none']:.1f}, btree {each['btree']:.1f}"
        show(f"filter {where.format('n')}"[:34], took["none"] / took["packed"], None, note)
    for name in tables:
        db.drop_table(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--memory-bytes", type=int, default=4 << 30)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--move", choices=MOVES, help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path)
    arguments = parser.parse_args()
    if arguments.move:
        return move(arguments.dir, arguments.move, arguments.workers)
    chosen = (arguments.only,) if arguments.only else PARTS
    memory = Path("/dev/shm")
    fast = arguments.dir or (memory if memory.is_dir() else None)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=fast) as directory:
        if "copy" in chosen:
            bench_copy(Path(directory), arguments.bytes, arguments.rounds)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=arguments.dir) as directory:
        if "memory" in chosen:
            bench_memory(Path(directory), arguments.memory_bytes)
        if "requests" in chosen:
            bench_requests()
        if "build" in chosen:
            bench_build(Path(directory), arguments.rows, arguments.rounds)
        if "filter" in chosen:
            bench_filter(Path(directory), arguments.rows, arguments.rounds)


if __name__ == "__main__":
    main()
