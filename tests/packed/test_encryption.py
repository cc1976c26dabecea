"""Encrypted packed files: they read back only with their key, and only as they were written."""

from __future__ import annotations

import base64
import io
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import crc32c
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.packed.sealed import SLICE, Taken, contents, new_cipher, read, write

from penstock.errors import Corruption, InvalidInput, PenstockError
from penstock.packed.aes import MAX_AHEAD, AesGcm
from penstock.packed.envelope import Slot, decode_envelope, encode_envelope, encode_slot, slot_place
from penstock.packed.keys import FileKeys
from penstock.packed.layout import META
from penstock.packed.reader import PackedReader
from penstock.packed.writer import PackedWriter
from penstock.storage.objects import ObjectStore

SLICES = [("long", 0), ("long", 1), ("long", 3), ("twin", 0), ("twin", 3), ("short", 0)]


@pytest.fixture(scope="module")
def cipher(tmp_path_factory: pytest.TempPathFactory) -> AesGcm:
    return new_cipher(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def file(cipher: AesGcm, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("file") / "one.v3", cipher, kind="test")


@pytest.fixture(scope="module")
def other(cipher: AesGcm, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of the same shape, with the same key and zone, that says something else."""
    return write(tmp_path_factory.mktemp("file") / "two.v3", cipher, contents(100), kind="test")


def wanted(salt: int = 0) -> dict[str, bytes]:
    return {**contents(salt), META: b'{"kind":"test"}'}


# --- reading back ---------------------------------------------------------------------------------


def test_a_file_reads_back_in_every_way(
    cipher: AesGcm, file: bytes, any_store: ObjectStore, tmp_path: Path
) -> None:
    assert read(file, cipher) == wanted()
    with PackedWriter.to_store(any_store, "a/b.v3", cipher=cipher, slice_size=SLICE) as writer:
        for name, data in contents().items():
            writer.write_entry(name, io.BytesIO(data), len(data))
    with PackedReader.from_store(any_store, "a/b.v3", keys=cipher) as reader:
        assert {name: reader.size(name) for name in reader.names()} == {
            name: len(data) for name, data in contents().items()
        }
        reader.read_to_files({name: tmp_path / name for name in reader.names()})
        for name, data in contents().items():
            assert (tmp_path / name).read_bytes() == data
            assert b"".join(reader.stream(name)) == data
            assert reader.read(name) == data


def test_without_the_key_there_is_nothing_to_read(
    cipher: AesGcm, file: bytes, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="is encrypted; give the keys"):
        PackedReader.open(file)
    stranger = new_cipher(tmp_path)
    with pytest.raises(Corruption, match="key 'old' does not open the data key"):
        PackedReader.open(file, keys=stranger)
    with pytest.raises(InvalidInput, match="no key 'old'"):
        PackedReader.open(file, keys=AesGcm(FileKeys.create(tmp_path / "k2", "new")))
    assert read(file, AesGcm(cipher.provider, ez_id=99)) == wanted()


class Vault:
    """A key management service: keys that never leave it, and large wrapped keys."""

    def __init__(self) -> None:
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=4096)
        self.name = "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
        self.calls = 0

    def current(self) -> str:
        return self.name

    def wrap(self, key_id: str, data_key: bytes, context: bytes) -> bytes:
        return self._key.public_key().encrypt(data_key, self._oaep(key_id, context))

    def unwrap(self, key_id: str, wrapped: bytes, context: bytes) -> bytes:
        self.calls += 1
        try:
            return self._key.decrypt(wrapped, self._oaep(key_id, context))
        except ValueError:
            raise Corruption(f"key {key_id!r} did not wrap this") from None

    def _oaep(self, key_id: str, context: bytes) -> padding.OAEP:
        if key_id != self.name:
            raise InvalidInput(f"no key {key_id!r}")
        digest = hashes.SHA256()
        return padding.OAEP(padding.MGF1(digest), digest, label=context)


def test_a_key_management_service_fits(tmp_path: Path) -> None:
    vault = Vault()
    cipher = AesGcm(vault, ez_id=-(1 << 63))
    file = write(tmp_path / "a.v3", cipher, kind="test")
    assert read(file, cipher) == wanted()
    assert vault.calls == 1
    taken = Taken.apart(file)
    taken.table["__ez_id__"] = str((1 << 63) - 1)
    with pytest.raises(Corruption, match="did not wrap this"):
        PackedReader.open(taken.together(), keys=cipher)
    assert vault.calls == 2, "equal slots are asked about once"


# --- the bytes ------------------------------------------------------------------------------------


def test_the_bytes_are_as_documented(cipher: AesGcm, file: bytes) -> None:
    """Decrypted by hand, from what docs/formats/packed.md says and nothing else."""
    taken = Taken.apart(file)
    assert taken.table["__ez_id__"] == "5"
    edek = base64.b64decode(taken.table["__edek__"], validate=True)
    assert len(taken.table["__edek__"]) == 2072
    version, file_id, zero = struct.unpack_from("<B16sB", edek)
    assert (version, zero) == (1, 0)
    assert edek[18:786] == edek[786:]
    slot = edek[18:786]
    assert struct.unpack_from("<H3sH", slot) == (3, b"old", 60)
    assert set(slot[7 + 60 : 764]) == {0}
    assert struct.unpack("<I", slot[764:]) == (crc32c.crc32c(slot[:764]),)

    wrapped, context = slot[7:67], b"penstock packed v1" + file_id + struct.pack("<q", 5)
    data_key = cipher.provider.unwrap("old", wrapped, context)
    opened = bytearray()
    for number in range(4):
        sealed = taken.sealed("twin", number)
        assert len(sealed) == min(SLICE, 3 * SLICE + 100 - number * SLICE) + 28
        label = struct.pack("<IQ", 4, number) + b"twin"
        opened += AESGCM(data_key).decrypt(sealed[:12], sealed[12:], file_id + label)
    assert opened == contents()["twin"]


def test_nonces_count_the_slices_and_never_repeat(
    cipher: AesGcm, file: bytes, other: bytes
) -> None:
    taken = Taken.apart(file)
    nonces = [
        int.from_bytes(taken.sealed(entry["name"], number)[:12], "big")
        for entry in taken.entries
        for number in range(len(entry["slices"]))
    ]
    assert nonces == list(range(len(nonces)))
    assert len(nonces) == 11
    ids = {decode_envelope(Taken.apart(each).table["__edek__"]).file_id for each in (file, other)}
    assert len(ids) == 2
    # Each file has a data key of its own: the same text is sealed differently every time.
    again = Taken.apart(write_bytes(cipher))
    for name, number in SLICES:
        assert again.sealed(name, number)[12:] != taken.sealed(name, number)[12:]


def write_bytes(cipher: AesGcm) -> bytes:
    out = io.BytesIO()
    with PackedWriter(out, cipher=cipher, slice_size=SLICE) as writer:
        for name, data in contents().items():
            writer.write_entry(name, data)
        writer.put_meta("kind", "test")
    return out.getvalue()


def test_plaintext_is_nowhere_while_a_file_is_written(
    cipher: AesGcm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mark = b"recognisable plaintext; "
    seen: list[int] = []

    class Watching(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            seen.append(look())
            return super().readinto(buffer)  # type: ignore[arg-type]

        def read(self, size: int | None = -1) -> bytes:
            seen.append(look())
            return super().read(size)

    def look() -> int:
        total = 0
        for data in everything_below(tmp_path):
            assert mark not in data
            total += len(data)
        return total

    text = mark * 50_000
    path = tmp_path / "deep" / "a.v3"
    path.parent.mkdir()
    with PackedWriter(path, cipher=cipher, slice_size=16 * SLICE) as writer:
        writer.write_entry("one", Watching(text), len(text))
        writer.put_meta("note", mark.decode())
        writer.write_entry("two", Watching(text), len(text))
    assert max(seen) > len(text) // 2, "nothing was looked at while it was written"
    assert look() > 2 * len(text)
    with PackedReader.open(path, keys=cipher) as reader:
        assert bytes(reader.read("two")) == text
        assert reader.meta["note"] == mark.decode()
        list(reader.stream("one"))
    look()


def everything_below(directory: Path) -> Iterator[bytes]:
    """The bytes of all files there, and of those that are open and have no name."""
    for folder, _, names in os.walk(directory):
        for name in names:
            yield Path(folder, name).read_bytes()
    for fd in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{fd}"
        try:
            if os.readlink(link).startswith(str(directory)) and os.path.isfile(link):
                yield Path(link).read_bytes()
        except FileNotFoundError:
            continue


# --- attacks --------------------------------------------------------------------------------------

Attack = Callable[[Taken, Taken], None]
"""Changes the first file; the second is another with the same key and the same shape."""


def directory_attacks() -> Iterator[tuple[str, Attack]]:
    def remove(name: str) -> Attack:
        return lambda it, _: it.entries.remove(it.entry(name))

    def edit(name: str, key: str, value: object) -> Attack:
        return lambda it, _: it.entry(name).update({key: value})

    def top(key: str, value: object) -> Attack:
        return lambda it, _: it.table.update({key: value})

    def swap_names(it: Taken, _: Taken) -> None:
        one, two = it.entry("long"), it.entry("twin")
        one["name"], two["name"] = "twin", "long"

    def swap_order(it: Taken, _: Taken) -> None:
        it.entries[2], it.entries[3] = it.entries[3], it.entries[2]

    def swap_places(it: Taken, _: Taken) -> None:
        slices = it.entry("long")["slices"]
        slices[0], slices[1] = slices[1], slices[0]

    def swap_entries(it: Taken, _: Taken) -> None:
        for key in ("slices", "crc32"):
            one, two = it.entry("short"), it.entry("brief")
            one[key], two[key] = two[key], one[key]

    def add_empty(it: Taken, _: Taken) -> None:
        entry = {"name": "more", "original_size": 0, "crc32": "00000000", "slices": []}
        it.entries.insert(0, entry)

    def cut_entry(it: Taken, _: Taken) -> None:
        # The attacker knows the plaintext, so the checksum is right.
        kept = contents()["long"][: 2 * SLICE]
        crc = f"{crc32c.crc32c(kept):08X}"
        it.entry("long").update(original_size=len(kept), crc32=crc)
        del it.entry("long")["slices"][2:]

    def no_meta(also: Attack) -> Attack:
        def attack(it: Taken, other: Taken) -> None:
            also(it, other)
            del it.data[it.place(META, 0)]
            it.entry(META).update(original_size=0, crc32="00000000", slices=[])

        return attack

    def meta_of_other(it: Taken, other: Taken) -> None:
        it.data[it.place(META, 0)] = other.sealed(META, 0)

    def edek_of_other(it: Taken, other: Taken) -> None:
        it.table["__edek__"] = other.table["__edek__"]

    def id_of_other(it: Taken, other: Taken) -> None:
        it.table["__edek__"] = other.table["__edek__"][:24] + it.table["__edek__"][24:]

    def data_of_other(it: Taken, other: Taken) -> None:
        it.data[:] = other.data

    def directory_of_other(it: Taken, other: Taken) -> None:
        it.table.update({**other.table, "__edek__": it.table["__edek__"]})

    def unsealed(it: Taken, _: Taken) -> None:
        del it.table["__edek__"]

    yield "an empty entry removed", remove("empty")
    yield "a short entry removed", remove("short")
    yield "meta removed", remove(META)
    yield "an entry renamed", edit("short", "name", "other")
    yield "the empty entry renamed", edit("empty", "name", "void")
    yield "names swapped", swap_names
    yield "entries reordered", swap_order
    yield "the contents of entries swapped", swap_entries
    yield "slices swapped by their places", swap_places
    yield "an entry added", add_empty
    yield "an entry cut at a slice", cut_entry
    yield "crc edited", edit("short", "crc32", "01234567")
    yield "crc of the empty entry edited", edit("empty", "crc32", "01234567")
    yield "crc of meta edited", edit(META, "crc32", "01234567")
    yield "size edited", edit("short", "original_size", 99)
    yield "size of meta edited", edit(META, "original_size", 2)
    yield "slice_size halved", top("slice_size", SLICE // 2)
    yield "slice_size doubled", top("slice_size", SLICE * 2)
    for zone in ("6", "-5", "05", "5 ", "five", "", "9" * 30):
        yield f"zone {zone!r}", top("__ez_id__", zone)
    yield "meta emptied", no_meta(lambda it, other: None)
    yield "meta emptied and an entry removed", no_meta(remove("empty"))
    yield "meta emptied and an entry cut", no_meta(cut_entry)
    yield "meta of another file", meta_of_other
    yield "wrapped key of another file", edek_of_other
    yield "id of another file", id_of_other
    yield "data of another file", data_of_other
    yield "directory of another file", directory_of_other
    yield "no wrapped key", unsealed
    for text in ("", "AAAA", "é" * 2072, "=" * 2072, "A" * 2072, "Ag" + "A" * 2070):
        yield f"wrapped key {text[:6]!r}", top("__edek__", text)


@pytest.mark.parametrize(
    "attack", [pytest.param(each, id=name) for name, each in directory_attacks()]
)
def test_an_edited_directory_is_refused_at_once(
    attack: Attack, cipher: AesGcm, file: bytes, other: bytes
) -> None:
    taken = Taken.apart(file)
    assert taken.together() == file
    attack(taken, Taken.apart(other))
    with pytest.raises(Corruption):
        PackedReader.open(taken.together(), keys=cipher)


def test_a_slice_size_that_changes_no_shape_is_refused(cipher: AesGcm, tmp_path: Path) -> None:
    taken = Taken.apart(write(tmp_path / "a.v3", cipher, {"short": b"12345"}))
    taken.table["slice_size"] *= 2
    with pytest.raises(Corruption):
        PackedReader.open(taken.together(), keys=cipher)


def test_a_plain_file_in_place_of_a_sealed_one_is_refused_where_asked(
    cipher: AesGcm, file: bytes
) -> None:
    out = io.BytesIO()
    with PackedWriter(out) as writer:
        writer.write_entry("short", b"forged")
    with pytest.raises(Corruption, match="not encrypted"):
        PackedReader.open(out.getvalue(), keys=cipher, require_encrypted=True)
    PackedReader.open(file, keys=cipher, require_encrypted=True).close()


def data_attacks() -> Iterator[tuple[str, Attack]]:
    def swap(first: tuple[str, int], second: tuple[str, int]) -> Attack:
        return lambda it, _: it.swap(first, second)

    def replay(name: str, number: int) -> Attack:
        def attack(it: Taken, other: Taken) -> None:
            it.data[it.place(name, number)] = other.sealed(name, number)

        return attack

    def flip(name: str, number: int, at: int) -> Attack:
        def attack(it: Taken, _: Taken) -> None:
            place = it.place(name, number)
            it.data[range(place.start, place.stop)[at]] ^= 1

        return attack

    def repeat(it: Taken, _: Taken) -> None:
        it.data[it.place("long", 2)] = it.sealed("long", 1)

    yield "slices of an entry swapped", swap(("long", 0), ("long", 1))
    yield "slices of two entries swapped", swap(("long", 1), ("twin", 1))
    yield "entries swapped", swap(("short", 0), ("brief", 0))
    yield "a slice repeated", repeat
    for name, number in SLICES:
        yield f"slice {number} of {name} from another file", replay(name, number)
    for at in (0, 11, 12, 50, -17, -16, -1):
        yield f"a bit at {at}", flip("long", 3, at)


@pytest.mark.parametrize("attack", [pytest.param(each, id=name) for name, each in data_attacks()])
def test_slices_that_are_not_in_their_place_are_refused(
    attack: Attack, cipher: AesGcm, file: bytes, other: bytes, tmp_path: Path
) -> None:
    taken = Taken.apart(file)
    attack(taken, Taken.apart(other))
    refused = 0
    with PackedReader.open(taken.together(), keys=cipher) as reader:
        for name, data in contents().items():
            target = tmp_path / name
            for way in (
                lambda name=name: bytes(reader.read(name)),
                lambda name=name: b"".join(reader.stream(name)),
                lambda name=name, target=target: (
                    reader.read_to_file(name, target),
                    target.read_bytes(),
                )[1],
            ):
                try:
                    assert way() == data
                except Corruption:
                    refused += 1
    assert refused in (3, 6), "one entry or two, in each of three ways"


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_refused_or_changes_nothing(
    data: st.DataObject, cipher: AesGcm, file: bytes
) -> None:
    damaged = bytearray(file)
    for at in data.draw(st.lists(st.integers(0, len(file) - 1), min_size=1, max_size=3)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(damaged), cipher)
    except PenstockError:
        return
    # Only one of the two copies of the wrapped key can be hit without harm.
    assert found == wanted()
    start = file.index(b'"__edek__":"') + 12
    assert damaged[:start] + damaged[start + 2072 :] == file[:start] + file[start + 2072 :]


# --- the cipher itself ----------------------------------------------------------------------------


@settings(deadline=None)
@given(plain=st.binary(max_size=300), label=st.binary(max_size=40), more=st.binary(min_size=1))
def test_what_is_sealed_opens_under_its_label_only(
    plain: bytes, label: bytes, more: bytes, cipher: AesGcm
) -> None:
    sealing = cipher.new_file()
    sealed = memoryview(bytearray(len(plain) + sealing.overhead_bytes))
    sealing.seal_into(0, label, memoryview(plain), sealed)
    opening = cipher.open_file(sealing.edek, sealing.ez_id)
    out = memoryview(bytearray(len(plain)))
    opening.open_into(label, sealed, out)
    assert out == plain
    for wrong in (label + more, more + label):
        if wrong != label:
            with pytest.raises(Corruption):
                opening.open_into(wrong, sealed, out)
    with pytest.raises(Corruption):
        cipher.new_file().open_into(label, sealed, out)
    with pytest.raises(Corruption, match="does not hold"):
        opening.open_into(label, sealed[:-1], out)
    with pytest.raises(InvalidInput, match="only the cipher of a new file"):
        opening.seal_into(1, label, memoryview(plain), sealed)


def test_no_sequence_number_is_ever_used_twice(cipher: AesGcm) -> None:
    sealing = cipher.new_file()

    def seal(sequence: int) -> None:
        sealing.seal_into(sequence, b"", memoryview(b"x"), memoryview(bytearray(29)))

    for sequence in (1, 0, 5, 3, 2):
        seal(sequence)
    for used in (0, 1, 2, 3, 5, -1):
        with pytest.raises(InvalidInput, match="never be used twice"):
            seal(used)
    with pytest.raises(InvalidInput, match="without gaps"):
        seal(4 + MAX_AHEAD)
    with pytest.raises(InvalidInput, match="smaller slice_size"):
        sealing.seal_into(4, b"", memoryview(b"x"), memoryview(bytearray(28)))
    seal(4)

    taken: list[int] = []

    def race() -> None:
        for sequence in range(6, 600):
            try:
                seal(sequence)
            except InvalidInput:
                continue
            taken.append(sequence)

    threads = [threading.Thread(target=race) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(6, 600))


@pytest.mark.parametrize("zone", [1 << 63, -(1 << 63) - 1, True, "1", 1.0, None])
def test_a_zone_is_an_int64(zone: int, cipher: AesGcm) -> None:
    with pytest.raises(InvalidInput, match="give an int64"):
        AesGcm(cipher.provider, ez_id=zone)


# --- the two slots --------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=60),
    st.binary(min_size=1, max_size=512),
    st.binary(min_size=16, max_size=16),
    st.data(),
)
def test_slots_are_independent_and_know_whether_they_are_whole(
    key_id: str, wrapped: bytes, file_id: bytes, data: st.DataObject
) -> None:
    slot = Slot(key_id, wrapped)
    edek = encode_envelope(file_id, slot)
    assert decode_envelope(edek).slots == (slot, slot)
    assert decode_envelope(edek).file_id == file_id
    number = data.draw(st.integers(0, 1))
    start, length = slot_place(number), len(encode_slot(slot))
    fresh = encode_slot(Slot("new", b"other"))
    replaced = edek[:start] + fresh + edek[start + length :]
    assert decode_envelope(replaced).slots[number] == Slot("new", b"other")
    assert decode_envelope(replaced).slots[1 - number] == slot

    at = data.draw(st.integers(start, start + length - 1))
    for character in ("A", "B", "=", "é", "\0"):
        if edek[at] != character:
            torn = decode_envelope(edek[:at] + character + edek[at + 1 :])
            assert torn.slots[number] is None
            assert torn.slots[1 - number] == slot


def test_a_wrapped_key_without_room_is_refused() -> None:
    with pytest.raises(InvalidInput, match="room for 1 to 757"):
        encode_slot(Slot("key", bytes(758)))
    with pytest.raises(InvalidInput, match="room for"):
        encode_slot(Slot("key", b""))
    assert decode_envelope(encode_envelope(bytes(16), Slot("key", bytes(757)))).slots[0]


def test_slots_that_lie_about_their_lengths_are_not_whole() -> None:
    for body in (
        struct.pack("<H", 65535),
        struct.pack("<H", 762),
        struct.pack("<H3sH", 3, b"key", 800),
        struct.pack("<H3sH", 3, b"key", 0),
        struct.pack("<HH", 0, 3) + b"abc",
        struct.pack("<H2sH", 2, b"\xff\xfe", 1) + b"w",
        (struct.pack("<H3sH", 3, b"key", 1) + b"w").ljust(763, b"\0") + b"!",
    ):
        padded = body.ljust(764, b"\0")
        lying = base64.b64encode(padded + struct.pack("<I", crc32c.crc32c(padded))).decode()
        good = encode_envelope(bytes(16), Slot("key", b"w"))
        assert decode_envelope(good[: slot_place(1)] + lying).slots == (Slot("key", b"w"), None)


def test_a_slot_whose_key_is_missing_does_not_hide_the_other(cipher: AesGcm) -> None:
    sealing = cipher.new_file()
    for foreign in (Slot("unknown", b"w" * 60), Slot("old", b"w" * 60)):
        text = encode_slot(foreign)
        edek = sealing.edek
        for number in (0, 1):
            start = slot_place(number)
            changed = edek[:start] + text + edek[start + len(text) :]
            cipher.open_file(changed, sealing.ez_id)
        lost = edek[: slot_place(0)] + text * 2
        with pytest.raises((InvalidInput, Corruption), match=foreign.key_id):
            cipher.open_file(lost, sealing.ez_id)
    with pytest.raises(Corruption, match="both copies"):
        cipher.open_file(edek[: slot_place(0)] + "A" * 2048, sealing.ez_id)
