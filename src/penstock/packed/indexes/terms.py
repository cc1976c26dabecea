"""Distinct values in a tantivy index: from a value to its number, and from a range to numbers.

Values are given sorted and distinct; the number of a value is its place in that order. Each is one
tantivy document with two fields: `value` (indexed as it is, text with the `raw` tokenizer) and
`ordinal` (its number, a fast field). Because numbers follow the order, a range or a prefix is
answered by its first and last number. Rows are the business of `Postings`: a document per value
instead of one per row means that no query and no build goes through Python row by row.

tantivy lives in files. They are made in, or unpacked to, a temporary directory of the process that
goes when the index does, or, if the process is killed, when another one next makes its own. The
files are those of the tantivy that is installed; Milvus uses a fork with a format of its own, so
that neither loads the files of the other.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import struct
import tempfile
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import tantivy

from penstock.errors import Corruption, InvalidInput
from penstock.packed.entries import EntryReader, EntryWriter
from penstock.packed.indexes.ordered import TextKeys
from penstock.packed.indexes.postings import damaged

VALUE, ORDINAL = "value", "ordinal"
FILE_NAMES = "file_names"
WRITER_HEAP_BYTES = 64 << 20
MAX_FILES = 4096
MAX_TEXT_BYTES = 65_530
"""The longest term tantivy keeps; a longer one it would leave out without a word."""

_FOOTER_END = struct.Struct("<II")
"""What tantivy ends its files with: the size of a footer in JSON before it, and a mark."""
_FOOTER_MAGIC = 1337

PREFIX = "penstock-terms-"
LEFT_BEHIND_SECONDS = 3600.0
_LOCK = "lock"


class _Home:
    """The process's own directory for scratch, locked for as long as it lives.

    The lock goes with the process, however that ends. Directories of which nobody has the lock were
    left behind by processes that were killed, and the next one to come removes them.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._process = os.getpid()
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(self.remove)
        newest = self.path.stat().st_mtime - LEFT_BEHIND_SECONDS
        for other in self.path.parent.glob(f"{PREFIX}*"):
            if other != self.path:
                self._remove_left_behind(other, newest)

    def remove(self) -> None:
        if self.is_ours:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def is_ours(self) -> bool:
        """Whether it is not that of the process this one was forked from."""
        return os.getpid() == self._process

    @staticmethod
    def _remove_left_behind(home: Path, newest: float) -> None:
        try:
            if home.stat().st_mtime > newest:
                return  # perhaps one that is not locked yet
            lock = os.open(home / _LOCK, os.O_RDWR)
        except OSError:
            return  # somebody else's, or just gone
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(home, ignore_errors=True)
        except BlockingIOError:
            return
        finally:
            os.close(lock)


class Scratch:
    """A temporary directory that is removed when nobody holds this any more."""

    _home: ClassVar[_Home | None] = None
    _left_over: ClassVar[set[Path]] = set()
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        with Scratch._guard:
            home = Scratch._home
            if home is None or not home.is_ours or not home.path.exists():
                home = Scratch._home = _Home()
        self.path = Path(tempfile.mkdtemp(dir=home.path))
        weakref.finalize(self, Scratch.remove, self.path)

    @staticmethod
    def remove(*paths: Path) -> None:
        if Scratch._home is None or not Scratch._home.is_ours:
            return
        # A thread of tantivy that is just ending may put a lock file into a directory while it is
        # being removed. What is left of it is removed the next time.
        for path in {*Scratch._left_over, *paths}:
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                Scratch._left_over.add(path)
            else:
                Scratch._left_over.discard(path)


@dataclass(frozen=True, slots=True)
class Field:
    """How one type of value is put into a document, and asked for."""

    type: tantivy.FieldType
    add: Callable[[tantivy.Document, str, Any], None]
    declare: Callable[[tantivy.SchemaBuilder], Any]
    sample: Any

    def schema(self) -> tantivy.Schema:
        builder = tantivy.SchemaBuilder()
        self.declare(builder)
        builder.add_unsigned_field(ORDINAL, fast=True)
        return builder.build()


def _text_field(builder: tantivy.SchemaBuilder) -> Any:
    return builder.add_text_field(VALUE, tokenizer_name="raw", index_option="basic")


TEXT = Field(tantivy.FieldType.Text, tantivy.Document.add_text, _text_field, "")
BOOL = Field(
    tantivy.FieldType.Boolean,
    tantivy.Document.add_boolean,
    lambda builder: builder.add_boolean_field(VALUE, indexed=True),
    False,
)
SIGNED = Field(
    tantivy.FieldType.Integer,
    tantivy.Document.add_integer,
    lambda builder: builder.add_integer_field(VALUE, indexed=True, fast=True),
    0,
)
UNSIGNED = Field(
    tantivy.FieldType.Unsigned,
    tantivy.Document.add_unsigned,
    lambda builder: builder.add_unsigned_field(VALUE, indexed=True, fast=True),
    0,
)
FLOAT = Field(
    tantivy.FieldType.Float,
    tantivy.Document.add_float,
    lambda builder: builder.add_float_field(VALUE, indexed=True, fast=True),
    0.0,
)


def is_text(value_type: pa.DataType) -> bool:
    return bool(pa.types.is_string(value_type) or pa.types.is_large_string(value_type))


def field_of(value_type: pa.DataType) -> Field:
    """How tantivy takes values of the type; `InvalidInput` if it does not."""
    if is_text(value_type):
        return TEXT
    if pa.types.is_boolean(value_type):
        return BOOL
    if pa.types.is_signed_integer(value_type):
        return SIGNED
    if pa.types.is_unsigned_integer(value_type):
        return UNSIGNED
    if pa.types.is_float32(value_type) or pa.types.is_float64(value_type):
        return FLOAT
    raise InvalidInput(f"a tantivy index takes text, bools, ints and floats, not {value_type}")


def _check_lengths(values: pa.Array) -> None:
    longest = pc.max(pc.binary_length(values)).as_py() or 0
    if longest > MAX_TEXT_BYTES:
        raise InvalidInput(
            f"a value has {longest} bytes; a tantivy index takes at most {MAX_TEXT_BYTES}: "
            "choose a marisa or sort index for such a column"
        )


def _check_sum(path: Path) -> None:
    """Hold a file against the checksum at its end, at which tantivy does not look by itself.

    A number that is wrong in it could make tantivy ask for so much memory that the process ends.
    """
    data = path.read_bytes()
    footer_bytes, magic = _FOOTER_END.unpack(data[-_FOOTER_END.size :].rjust(_FOOTER_END.size))
    body_bytes = len(data) - _FOOTER_END.size - footer_bytes
    try:
        footer = json.loads(data[max(body_bytes, 0) : -_FOOTER_END.size])
    except ValueError:
        footer = None
    said = footer.get("crc") if isinstance(footer, dict) else None
    if magic != _FOOTER_MAGIC or said != zlib.crc32(memoryview(data)[: max(body_bytes, 0)]):
        raise damaged(path.name, "it is not what tantivy wrote")


@contextmanager
def _tantivy_errors() -> Iterator[None]:
    """What tantivy says of files it cannot make sense of, a panic included, as `Corruption`."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        raise damaged("meta.json", f"tantivy cannot use its files ({error})") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise damaged("meta.json", f"tantivy cannot use its files ({error})") from error


class Terms:
    def __init__(self, scratch: Scratch, field: Field) -> None:
        self._field = field
        with _tantivy_errors():
            self._index = tantivy.Index.open(str(scratch.path))
            self._index.config_reader("manual")  # or a thread would watch for commits
            self._searcher = self._index.searcher()
            self._schema = self._index.schema
        self._all: TextKeys | None = None
        self._scratch = scratch
        self._file_bytes = sum(path.stat().st_size for path in scratch.path.iterdir())

    def __len__(self) -> int:
        return self._searcher.num_docs

    @property
    def nbytes(self) -> int:
        held = 0 if self._all is None else int(self._all.values.nbytes)
        return self._file_bytes + held

    # --- files -------------------------------------------------------------------------------

    @staticmethod
    def build(values: pa.Array) -> Terms:
        """Index sorted distinct values: text, bool, int or float."""
        field = field_of(values.type)
        if field is TEXT:
            _check_lengths(values)
        scratch = Scratch()
        writer = tantivy.Index(field.schema(), path=str(scratch.path)).writer(WRITER_HEAP_BYTES, 1)
        add_value, add_document = field.add, writer.add_document
        for ordinal, value in enumerate(values.to_pylist()):
            document = tantivy.Document()
            add_value(document, VALUE, value)
            document.add_unsigned(ORDINAL, ordinal)
            add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        return Terms(scratch, field)

    def write(self, writer: EntryWriter) -> None:
        """One entry per file, and their names in the meta."""
        directory = self._scratch.path
        names = sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")
        for name in names:
            writer.write_entry(name, directory / name)
        writer.put_meta(FILE_NAMES, names)

    @staticmethod
    def load(reader: EntryReader, value_type: pa.DataType) -> Terms:
        names = reader.meta.get(FILE_NAMES)
        if not isinstance(names, list) or not 0 < len(names) <= MAX_FILES:
            raise damaged("__meta__", f"{FILE_NAMES} is no list of the index's files")
        entries = set(reader.names())
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or name in (".", ".."):
                raise damaged("__meta__", f"{FILE_NAMES} holds {name!r}, which names no file")
            if name not in entries:
                raise Corruption(f"the index has no entry {name!r}; build it again")
        scratch = Scratch()
        reader.read_to_files({name: scratch.path / name for name in names})
        for name in names:
            if not name.endswith(".json"):
                _check_sum(scratch.path / name)
        field = field_of(value_type)
        terms = Terms(scratch, field)
        terms.ordinals([field.sample])  # an error if the field is of another type
        return terms

    # --- questions ---------------------------------------------------------------------------

    def ordinals(self, values: Sequence[Any]) -> npt.NDArray[np.int64]:
        """The numbers of those of the values that are there; none is given twice."""
        if not values:
            return np.zeros(0, np.int64)
        with _tantivy_errors():
            query = tantivy.Query.term_set_query(self._schema, VALUE, values)
            hits = self._searcher.search(query, len(values), count=False).hits
            found = self._searcher.fast_field_values(ORDINAL, [address for _, address in hits])
        return self._checked(found)

    def span(self, low: Any, high: Any, with_low: bool, with_high: bool) -> tuple[int, int]:
        """The numbers, from the first up to before the last, of values in a range of numbers."""
        if low is None and high is None:
            return 0, len(self)
        ends = []
        with _tantivy_errors():
            query = tantivy.Query.range_query(
                self._schema, VALUE, self._field.type, low, high, with_low, with_high
            )
            for order in (tantivy.Order.Asc, tantivy.Order.Desc):
                result = self._searcher.search(
                    query, 1, count=False, order_by_field=ORDINAL, order=order
                )
                ends += [number for number, _ in result.hits]
        if not ends:
            return 0, 0
        first, last = self._checked(ends)
        return int(first), int(last) + 1

    def below(self, prefix: str) -> tuple[TextKeys, int]:
        """Texts that begin so, in order, and the number of the first; the rest follow it."""
        texts = self._all
        if texts is None:
            with _tantivy_errors():
                found = [term for term, _ in self._searcher.terms_with_prefix(VALUE, prefix)]
            # Code points order as their UTF-8 does.
            found.sort()
            texts = TextKeys(pa.array(found, pa.large_string()))
            if not prefix:
                self._all = texts
        elif prefix:
            texts = TextKeys(texts.values[slice(*texts.prefix_ends(prefix))])
        if not len(texts):
            return texts, 0
        first = self.ordinals([texts.values[0].as_py()])
        if len(first) != 1 or first[0] + len(texts) > len(self):
            raise damaged("meta.json", "terms and documents do not fit together")
        return texts, int(first[0])

    def _checked(self, found: Sequence[Any]) -> npt.NDArray[np.int64]:
        if None in found:
            raise damaged("meta.json", "a value has no number")
        numbers = np.fromiter(found, np.uint64, len(found))
        if len(numbers) and int(numbers.max()) >= len(self):
            raise damaged("meta.json", f"a value has a number past the {len(self)} there are")
        return numbers.astype(np.int64)
