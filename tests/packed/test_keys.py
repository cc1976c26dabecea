"""Keys that wrap data keys: where they lie, who may read them, and that they never leak."""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
import stat
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Corruption, InvalidInput
from penstock.packed.aes import AesGcm
from penstock.packed.envelope import MAX_KEY_ID_BYTES
from penstock.packed.keys import EnvironmentKeys, FileKeys, KeyProvider
from penstock.storage.entropy import SeededEntropy

DATA_KEY = b"the data key of one file, 32 byt"
CONTEXT = b"this file and no other"


def text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def secrets_of(path: Path) -> list[str]:
    return list(json.loads(path.read_bytes())["keys"].values())


@pytest.fixture(params=["file", "environment"])
def keys(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> KeyProvider:
    """A provider of each kind with the keys `a` and `b`, of which `a` is for new files."""
    if request.param == "file":
        created = FileKeys.create(tmp_path / "keys.json", "a")
        created.add("b")
        return created
    monkeypatch.setenv("PENSTOCK_KEY_a", text(bytes(range(32))))
    monkeypatch.setenv("PENSTOCK_KEY_b", text(bytes(range(32, 64))))
    monkeypatch.setenv("PENSTOCK_KEY_CURRENT", "a")
    return EnvironmentKeys()


def test_a_wrapped_key_opens_only_with_its_key_in_its_context(keys: KeyProvider) -> None:
    assert keys.current() == "a"
    wrapped = keys.wrap("a", DATA_KEY, CONTEXT)
    assert keys.unwrap("a", wrapped, CONTEXT) == DATA_KEY
    assert DATA_KEY not in wrapped
    assert keys.wrap("a", DATA_KEY, CONTEXT) != wrapped

    for key_id, given_bytes, context in (
        ("b", wrapped, CONTEXT),
        ("a", wrapped, CONTEXT + b"!"),
        ("a", wrapped[:-1], CONTEXT),
        ("a", wrapped[:5], CONTEXT),
        ("a", b"", CONTEXT),
        *(
            ("a", bytes([*wrapped[:n], wrapped[n] ^ 1, *wrapped[n + 1 :]]), CONTEXT)
            for n in (0, 40)
        ),
    ):
        with pytest.raises(Corruption, match=f"key '{key_id}' does not open"):
            keys.unwrap(key_id, given_bytes, context)
    for missing in ("c", "CURRENT"):
        with pytest.raises(InvalidInput, match=f"no key '{missing}'"):
            keys.unwrap(missing, wrapped, CONTEXT)
        with pytest.raises(InvalidInput, match=f"no key '{missing}'"):
            keys.wrap(missing, DATA_KEY, CONTEXT)


def test_a_provider_travels_without_its_keys(
    keys: KeyProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = bytes(range(32))
    if isinstance(keys, FileKeys):
        raw = base64.b64decode(secrets_of(keys.path)[0])
    cipher = AesGcm(keys, ez_id=3)
    wrapped = keys.wrap("a", DATA_KEY, CONTEXT)
    carried = pickle.dumps(cipher)
    for shown in (carried, repr(keys).encode(), repr(cipher).encode(), str(vars(cipher)).encode()):
        assert raw not in shown
        assert text(raw).encode() not in shown
    arrived = pickle.loads(carried)
    assert arrived.provider.unwrap("a", wrapped, CONTEXT) == DATA_KEY
    assert arrived.ez_id == 3

    opened = cipher.new_file()
    for how in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="holds its data key"):
            how(opened)

    # Elsewhere it finds the keys of that place, or none.
    if isinstance(keys, FileKeys):
        keys.path.unlink()
    else:
        monkeypatch.delenv("PENSTOCK_KEY_a")
    with pytest.raises(InvalidInput):
        arrived.provider.unwrap("a", wrapped, CONTEXT)


def test_a_key_file_is_for_its_owner_and_grows_by_rotation(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    previous = os.umask(0)
    try:
        keys = FileKeys.create(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert keys.current() == "1"
        wrapped = keys.wrap("1", DATA_KEY, CONTEXT)
        assert keys.rotate() == "2"
        assert keys.rotate("2026-q1") == "2026-q1"
        assert keys.rotate() == "3"
        keys.add("spare", bytes(32))
    finally:
        os.umask(previous)
    assert keys.current() == "3"
    assert keys.ids() == ("1", "2", "2026-q1", "3", "spare")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["keys.json"]
    assert len(set(secrets_of(path))) == 5
    assert FileKeys(path).unwrap("1", wrapped, CONTEXT) == DATA_KEY

    for refused in (
        lambda: FileKeys.create(path),
        lambda: keys.add("1"),
        lambda: keys.rotate("2"),
        lambda: keys.remove("3"),
        lambda: keys.remove("nobody"),
        lambda: keys.add("short", b"123"),
        lambda: keys.add(""),
        lambda: keys.add("two\nlines"),
        lambda: keys.add("n" * (MAX_KEY_ID_BYTES + 1)),
    ):
        before = path.read_bytes()
        with pytest.raises(InvalidInput):
            refused()
        assert path.read_bytes() == before

    keys.remove("1")
    with pytest.raises(InvalidInput, match="no key '1'"):
        keys.unwrap("1", wrapped, CONTEXT)

    for mode in (0o640, 0o604, 0o620, 0o666):
        path.chmod(mode)
        with pytest.raises(InvalidInput, match="chmod 600"):
            keys.current()
        assert FileKeys(path, shared=True).current() == "3"
    path.chmod(0o400)
    assert keys.current() == "3"


def test_a_linked_key_file_is_changed_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    keys = FileKeys.create(tmp_path / "secret" / "keys.json")
    link = tmp_path / "keys"
    link.symlink_to(keys.path)
    assert FileKeys(link).rotate() == "2"
    assert link.is_symlink()
    assert keys.current() == "2"
    with pytest.raises(InvalidInput, match="is there already"):
        FileKeys.create(link)


def test_what_a_crash_left_of_a_key_file_is_in_nobodys_way(tmp_path: Path) -> None:
    keys = FileKeys.create(tmp_path / "keys.json")
    (tmp_path / ".keys.json.new").write_text("half a fi")
    assert keys.rotate() == "2"
    assert os.listdir(tmp_path) == ["keys.json"]


def test_those_who_rotate_at_once_lose_no_key(tmp_path: Path) -> None:
    # Each takes the lock through an open file of its own, as processes would.
    path = tmp_path / "keys.json"
    FileKeys.create(path)
    with ThreadPoolExecutor(4) as pool:
        given_ids = list(pool.map(lambda _: FileKeys(path).rotate(), range(60)))
    assert sorted(map(int, given_ids)) == list(range(2, 62))
    assert sorted(map(int, FileKeys(path).ids())) == list(range(1, 62))


SECRET = text(b"\xfe" * 32)


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "{",
        f'{{"current": "1", "keys": {{"1": "{SECRET}"}}',
        f'{{"current": "2", "keys": {{"1": "{SECRET}"}}}}',
        f'{{"current": "1", "keys": {{"1": "{SECRET}="}}}}',
        f'{{"current": "1", "keys": {{"1": "{SECRET[4:]}"}}}}',
        f'{{"current": "1", "keys": {{"1": ["{SECRET}"]}}}}',
        f'{{"current": ["1"], "keys": {{"1": "{SECRET}"}}}}',
        f'{{"keys": {{"1": "{SECRET}"}}}}',
        f'{{"current": "1", "keys": ["{SECRET}"]}}',
        f'["{SECRET}"]',
        "[" * 100_000,
        f'{{"current": "1", "keys": {{"1": "{SECRET}"}}, "note": "{"n" * (1 << 20)}"}}',
        '{"current": "1", "keys": {"1": "\xff\xfe"}}',
    ],
)
def test_a_damaged_key_file_is_refused_without_telling_what_is_in_it(
    contents: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(contents.encode("latin-1"))
    path.chmod(0o600)
    uses: list[Callable[[], object]] = [
        FileKeys(path).current,
        FileKeys(path).rotate,
        lambda: FileKeys(path).wrap("1", DATA_KEY, CONTEXT),
    ]
    for use in uses:
        with pytest.raises(InvalidInput, match="no key file") as refused:
            use()
        assert_tells_nothing(refused.value, SECRET[4:-4])
    assert path.read_bytes() == contents.encode("latin-1")


def test_a_damaged_environment_is_refused_without_telling_what_is_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = EnvironmentKeys("OTHER_")
    with pytest.raises(InvalidInput, match="set OTHER_CURRENT"):
        keys.current()
    for value in (SECRET[:-4], SECRET + "=", f" {SECRET}", "é" + SECRET, ""):
        monkeypatch.setenv("OTHER_k", value)
        with pytest.raises(InvalidInput, match="OTHER_k is no key") as refused:
            keys.wrap("k", DATA_KEY, CONTEXT)
        assert_tells_nothing(refused.value, SECRET[4:-4])


def test_without_a_key_file_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"keys\.json cannot be used.*FileKeys\.create"):
        FileKeys(tmp_path / "keys.json").current()
    with pytest.raises(InvalidInput, match="cannot be used"):
        FileKeys.create(tmp_path / "nowhere" / "keys.json")


def assert_tells_nothing(error: BaseException, secret: str) -> None:
    """Neither what is printed of an error, nor anything it carries along, shows the secret."""
    assert secret not in "".join(traceback.format_exception(error))
    found: BaseException | None = error
    while found is not None:
        assert secret not in repr((found.args, getattr(found, "__dict__", None), found))
        assert secret not in repr([getattr(found, name, None) for name in ("doc", "object")])
        found = found.__context__


@given(st.binary(max_size=64), st.binary(max_size=64), st.integers(0, 2**32))
def test_any_data_key_and_context_come_back(data_key: bytes, context: bytes, seed: int) -> None:
    name = "PENSTOCK_KEY_property"
    os.environ[name] = text(bytes(32))
    try:
        keys = EnvironmentKeys(entropy=SeededEntropy(seed))
        wrapped = keys.wrap("property", data_key, context)
        assert keys.unwrap("property", wrapped, context) == data_key
        assert wrapped == EnvironmentKeys(entropy=SeededEntropy(seed)).wrap(
            "property", data_key, context
        )
    finally:
        del os.environ[name]
