"""Documents for the demo: the docstrings of Python's own standard library.

Real text, on every machine, without a download. Source files are parsed and never imported, so
nothing in them runs. Each module, class and function with a docstring becomes one row. Its vector
is a hashed bag of words: every word of the text adds +1 or -1 to one of 64 dimensions, chosen by
its hash, and the sum is scaled to length 1. Texts that share words are near each other, and the
same text has the same vector everywhere.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput
from penstock.memwal.murmur import bucket_hash

DIMENSIONS = 64
SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("module", pa.string()),
        pa.field("kind", pa.string()),
        pa.field("body", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSIONS)),
    ]
)
_SKIPPED = frozenset({"test", "tests", "idlelib", "turtledemo", "site-packages", "dist-packages"})
_WORD = "[^0-9a-z]+"


def documents(limit: int) -> pa.Table:
    """The first `limit` docstrings of the standard library, or all if there are fewer."""
    found: dict[str, tuple[str, str, str]] = {}
    for name, module, kind, body in _docstrings(Path(sysconfig.get_path("stdlib"))):
        found.setdefault(name, (module, kind, body))
        if len(found) >= limit:
            break
    if not found:
        raise InvalidInput(
            "this Python has no readable standard library sources, which the demo streams; "
            "run it with another Python"
        )
    modules, kinds, bodies = zip(*found.values(), strict=True)
    text = pa.array(bodies, pa.string())
    columns = [list(found), list(modules), list(kinds), text, embed(text)]
    return pa.table(columns, schema=SCHEMA)


def embed(texts: pa.Array) -> pa.Array:
    """One vector per text, as a hashed bag of its words."""
    words = pc.split_pattern_regex(pc.ascii_lower(texts), _WORD)
    rows = pc.list_parent_indices(words).to_numpy()
    hashes = bucket_hash(words.flatten()).astype(np.int64)
    signs = np.where(hashes & DIMENSIONS, 1.0, -1.0)
    cells = np.bincount(
        rows * DIMENSIONS + hashes % DIMENSIONS, signs, minlength=len(texts) * DIMENSIONS
    )
    matrix = cells.reshape(-1, DIMENSIONS)
    length = np.linalg.norm(matrix, axis=1, keepdims=True)
    unit = (matrix / np.where(length, length, 1.0)).astype(np.float32)
    return pa.FixedSizeListArray.from_arrays(pa.array(unit.ravel()), DIMENSIONS)


def _docstrings(library: Path) -> Iterator[tuple[str, str, str, str]]:
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not _SKIPPED.isdisjoint(parts):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        try:
            with warnings.catch_warnings():
                # Old library code has escapes that newer Pythons frown upon; it is only read.
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a deliberately broken file, such as lib2to3's samples
        yield from _of(tree, module, module)


def _of(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    module: str,
) -> Iterator[tuple[str, str, str, str]]:
    body = ast.get_docstring(node)
    if body:
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        yield name, module, kind, body
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of(child, f"{name}.{child.name}", module)
