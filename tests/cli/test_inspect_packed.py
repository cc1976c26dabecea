"""`penstock inspect file.v3`: what a packed file holds, with and without its keys, sound or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.packed import sealed
from tests.packed.fixtures import FIXTURES, golden
from tests.s3_server import S3Server
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.packed import PackedReader, PackedWriter, build_index
from penstock.packed.rotate import rewrap


def output(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def report(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output(*arguments, "--json"))
    return found


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("penstock: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_golden_file(tmp_path: Path) -> None:
    path = str(FIXTURES / "s_json_int64_nonexist.v3")
    found = report(path, "--verify")
    with PackedReader.open(path) as reader:
        assert found["size_bytes"] == reader.size_bytes
        assert found["meta"] == reader.meta
        names = [*reader.names(), "__meta__"]
    assert [entry["name"] for entry in found["entries"]] == names
    # Entries lie one behind the other, then come directory and footer.
    end = 0
    for entry in found["entries"]:
        assert (entry["offset"], entry["slices"]) == (end, 1)
        assert entry["size"] == entry["stored_bytes"]
        end += entry["size"]
    assert found["size_bytes"] == 8 + end + found["directory_table_size"] + 32
    assert found["entries"][-1]["size"] == found["meta_entry_size"]
    assert found["encryption"] is None
    assert found["index"] == {"kind": "json"}
    assert found["verified"] == {"entries": 5, "bytes": end}
    text = output(path)
    for entry in found["entries"]:
        assert any(entry["name"] in line and entry["crc32"] in line for line in text.splitlines())

    damaged = bytearray(golden("s_json_int64_nonexist"))
    damaged[8 + 3] ^= 1
    damaged[8 + 50] ^= 1
    copy = tmp_path / "copy.v3"
    copy.write_bytes(damaged)
    assert [entry["name"] for entry in report(str(copy))["entries"]] == names
    assert "2 of 5 entries are damaged (index_data, idx_to_offsets)" in refusal(
        str(copy), "--verify"
    )


def test_an_index_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ages.v3"
    texts = pa.array(['{"age": 3}', "{}"])
    with PackedWriter(path) as writer:
        build_index("json", texts, path="/age", value_type="int64").write(writer)
    index = report(str(path))["index"]
    assert index == {"kind": "json", "type": "int64", "path": "/age", "inner": "hybrid"}


def test_an_encrypted_file_tells_little_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, key_file = tmp_path / "sealed.v3", tmp_path / "keys.json"
    cipher = sealed.new_cipher(tmp_path)
    data = sealed.write(path, cipher, secret="tenant 42")
    without = report(str(path))
    assert without["encryption"] == {"ez_id": "5", "slice_size": 4096, "key_ids": ["old"]}
    by_name = {entry["name"]: entry for entry in without["entries"]}
    assert {name: entry["size"] for name, entry in by_name.items() if name != "__meta__"} == {
        name: len(content) for name, content in sealed.contents().items()
    }
    assert (by_name["long"]["slices"], by_name["empty"]["slices"]) == (4, 0)
    assert without["meta"].startswith("encrypted")
    assert "tenant 42" not in output(str(path))
    assert "--key-file" in refusal(str(path), "--verify")

    found = report(str(path), "--verify", "--key-file", str(key_file))
    assert found["meta"] == {"secret": "tenant 42"}
    assert found["verified"]["entries"] == 6
    ring = json.loads(key_file.read_text())
    monkeypatch.setenv("PENSTOCK_KEY_old", ring["keys"]["old"])
    assert report(str(path), "--verify")["verified"] == found["verified"]

    damaged = bytearray(data)
    damaged[8 + by_name["twin"]["offset"] + 40] ^= 1
    path.write_bytes(damaged)
    assert report(str(path))["meta"] == {"secret": "tenant 42"}
    assert "1 of 6 entries are damaged (twin)" in refusal(str(path), "--verify")

    path.write_bytes(data)
    cipher.provider.rotate("new")
    rewrap(path, cipher)
    assert "new" in report(str(path))["encryption"]["key_ids"]


def test_files_whose_keys_others_keep() -> None:
    found = report(str(FIXTURES / "e02_multislice.v3"))
    assert "not Penstock's" in found["encryption"]["key_ids"]
    assert max(entry["slices"] for entry in found["entries"]) > 1


def test_what_cannot_be_inspected(tmp_path: Path) -> None:
    bad = FIXTURES / "bad"
    assert "version 4" in refusal(str(bad / "version_4.v3"))
    assert "CRC" in refusal(str(bad / "meta_bitflip.v3"))
    assert "nowhere.v3" in refusal(str(tmp_path / "nowhere.v3"))
    assert "packed files" in refusal(str(tmp_path), "--verify")
    sealed.new_cipher(tmp_path)
    keys = ("--key-file", str(tmp_path / "keys.json"))
    assert "__edek__" in refusal(str(FIXTURES / "e01_small.v3"), *keys)
    path = tmp_path / "other.v3"
    sealed.write(path, sealed.new_cipher(tmp_path, "other.json"))
    assert "other.v3" in refusal(str(path), *keys)
    assert "no.json" in refusal(str(path), "--key-file", str(tmp_path / "no.json"))


def test_a_packed_file_on_s3(s3: S3Server) -> None:
    options = s3.storage_options
    uri = f"{s3.uri('cli')}/small.v3"
    with PackedWriter(uri, storage_options=options) as writer:
        writer.write_entry("a", b"1234")
    given = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    assert report(uri, "--verify", *given)["verified"] == {"entries": 2, "bytes": 6}
