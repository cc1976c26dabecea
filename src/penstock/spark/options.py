"""The options of the data source, parsed once, on the driver, into one value that is sent along.

Spark gives options as text and without regard to case; `vector_format`, `vectorFormat` and
`vectorformat` are the same option here. To add an option is to add a field to `SourceOptions`.
Options that begin with `storage.` are those of the object store. What is not known is refused, so
that a misspelt option is never silently without effect; what Spark adds by itself is let through.

A path is made absolute where it is parsed: executors have working directories of their own.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from penstock.database import connect
from penstock.errors import InvalidInput, NotATable, TableNotFound
from penstock.memwal.base_table import BaseTable
from penstock.memwal.view import CONSISTENCIES
from penstock.storage.open import open_store
from penstock.storage.seams import Seams
from penstock.table import Table

MODES = ("upsert", "bulk")
VECTOR_FORMATS = ("array", "binary")
_SUFFIX = ".lance"
_STORAGE = "storage."
_OF_SPARK = {"path", "paths", "checkpointlocation", "outputmode", "queryname"}
"""Options that Spark adds, or that mean something to Spark alone."""


def _whole(least: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        try:
            number = int(text)
        except (ValueError, TypeError):
            number = least - 1
        if number < least:
            raise InvalidInput(f"option {name} must be a whole number from {least}, not {text!r}")
        return number

    return parse


def _one_of(*values: str) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text not in values:
            raise InvalidInput(f"option {name} is one of {', '.join(values)}, not {text!r}")
        return text

    return parse


def _text(name: str, text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InvalidInput(f"option {name} is empty; give it a value or leave it out")
    return text


def _names(name: str, text: str) -> tuple[str, ...]:
    """Names with commas between them, or a JSON list for names that have commas."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InvalidInput(f"option {name} is not a JSON list: {text!r}") from error
        if not all(isinstance(one, str) for one in found):
            raise InvalidInput(f"option {name} must be a list of names, not {text!r}")
    else:
        found = [part.strip() for part in text.split(",")]
    if not found or not all(found):
        raise InvalidInput(f"option {name} must be names with commas between them, not {text!r}")
    return tuple(found)


def _yes_or_no(name: str, text: str) -> bool:
    return _one_of("true", "false")(name, text.lower()) == "true"


def _starting_position(name: str, text: str) -> str | int:
    if text in ("earliest", "latest"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise InvalidInput(f"option {name} is earliest, latest or a version, not {text!r}")


def _option(parse: Callable[[str, str], Any], default: Any = None) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, slots=True)
class SourceOptions:
    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict)
    version: int | None = _option(_whole(1))
    consistency: str = _option(_one_of(*CONSISTENCIES), "strong")
    columns: tuple[str, ...] | None = _option(_names)
    filter: str | None = _option(_text)
    limit: int | None = _option(_whole(0))
    partitions: int | None = _option(_whole(1))
    parallelism: int | None = _option(_whole(1))
    """How many tasks run at a time; counts where `partitions` is not given."""
    vector_format: str = _option(_one_of(*VECTOR_FORMATS), "array")
    mode: str = _option(_one_of(*MODES), "upsert")
    sink_id: str | None = _option(_text)
    read_changes: bool = _option(_yes_or_no, False)
    starting_position: str | int = _option(_starting_position, "earliest")
    max_rows_per_trigger: int | None = _option(_whole(1))
    txn_app: str | None = _option(_text)
    txn_number: int | None = _option(_whole(0))
    create_table: bool = _option(_yes_or_no, False)
    primary_key: tuple[str, ...] | None = _option(_names)
    regions: str | None = _option(_text)
    vector_dimensions: str | None = _option(_text)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        given = {key.lower(): value for key, value in options.items()}
        uri = given.get("path")
        if not uri or not uri.strip():
            raise InvalidInput(
                'no table is named; give its path or URI: .load("/lake/docs.lance"), or '
                '.option("path", …)'
            )
        known = {_plain(one.name): one for one in fields(cls) if "parse" in one.metadata}
        storage = {}
        parsed: dict[str, Any] = {}
        for key, value in given.items():
            if key.startswith(_STORAGE):
                storage[key.removeprefix(_STORAGE)] = value
            elif _plain(key) in known:
                one = known[_plain(key)]
                parsed[one.name] = one.metadata["parse"](one.name, value)
            elif key not in _OF_SPARK and not key.startswith(("spark.", "serialization.")):
                raise _unknown(key, list(known.values()))
        if "://" not in uri:
            uri = os.path.abspath(os.path.expanduser(uri))
        if "starting_position" in parsed or "max_rows_per_trigger" in parsed:
            parsed.setdefault("read_changes", True)
        return cls(uri=uri, storage_options=storage, **parsed)

    @property
    def storage(self) -> dict[str, str] | None:
        """The options of the object store as stores and Lance take them."""
        return dict(self.storage_options) or None

    def locate(self) -> str:
        """Where the table is: as was given, or with `.lance` after it, as databases name it."""
        uri = self.uri.rstrip("/")
        tried = [uri] if uri.endswith(_SUFFIX) else [uri, uri + _SUFFIX]
        children: list[str] = []
        for location in tried:
            found = open_store(location, self.storage).list_dirs("")
            if "_versions" in found:
                return location
            children += found
        inside = [name.removesuffix(_SUFFIX) for name in children if name.endswith(_SUFFIX)]
        if inside:
            raise NotATable(
                f"{uri} is a database, not a table; name one of its tables: "
                f"{', '.join(f'{uri}/{name}{_SUFFIX}' for name in sorted(inside)[:3])}"
            )
        if children:
            raise NotATable(f"{uri} is not a table: it has no _versions directory")
        raise TableNotFound(
            f"there is no table at {uri}; check the path, or create the table first"
        )

    def base_table(self) -> BaseTable:
        """The table, to be read. A plain Lance table will do, and nothing is written."""
        store = open_store(self.locate(), self.storage)
        return BaseTable(store, self.storage, Seams())

    def open(self, *, adopt: bool = False) -> Table:
        """The table, to be changed. With `adopt`, a plain Lance table becomes a live one first."""
        location = self.locate()
        above, _, name = location.rpartition("/")
        database = connect(above or "/", self.storage)
        if name.endswith(_SUFFIX):
            return database.open_table(name.removesuffix(_SUFFIX), adopt=adopt)
        return Table(name, BaseTable(open_store(location, self.storage), self.storage, Seams()))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _unknown(key: str, known: list[Field[Any]]) -> InvalidInput:
    names = [one.name for one in known]
    near = difflib.get_close_matches(key, names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return InvalidInput(
        f"unknown option {key!r}{hint} there are: path, {', '.join(names)}, and {_STORAGE}… for "
        "the object store"
    )
