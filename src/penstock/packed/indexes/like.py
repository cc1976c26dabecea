"""SQL's LIKE: patterns into pieces, and pieces into a mask over an Arrow array of text.

A pattern is literal text with two wildcards: `%` stands for any text, the empty one and line
breaks included, and `_` for exactly one character (a Unicode code point, not a byte). A backslash
takes the character after it as it is, so `\\%` is a per cent sign and `\\\\` a backslash; a pattern
cannot end in a single one. The whole value must match, upper and lower case are different, and a
null matches nothing.

Patterns with no more than one `%` at either end become plain comparisons of bytes. All others
become a regular expression for Arrow, whose matcher takes time linear in the text whatever the
pattern is, so that no pattern can stall a query.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InvalidInput

ANY, ONE = object(), object()

Pieces: TypeAlias = "list[str | object]"

MAX_REGEX_CHARS = 2000
"""Longest pattern with wildcards inside; the matcher's memory is bounded, and so is this."""


def like_prefix(pattern: str) -> str:
    """The literal text before the first wildcard: every match begins with it."""
    first = next(iter(_pieces(pattern)), ANY)
    return first if isinstance(first, str) else ""


def like_exact(pattern: str) -> str | None:
    """The only text that matches, if the pattern has no wildcard."""
    pieces = _pieces(pattern)
    if not pieces:
        return ""
    return pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else None


def literals(pattern: str) -> list[str]:
    """The literal runs between wildcards, in order: every match contains each of them."""
    return [piece for piece in _pieces(pattern) if isinstance(piece, str)]


def like_mask(values: pa.Array, pattern: str) -> npt.NDArray[np.bool_]:
    """For every value whether it matches; false for a null."""
    pieces = _pieces(pattern)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        values = values.cast(pa.large_string())
    found = _compare(values, pieces, pattern)
    mask: npt.NDArray[np.bool_] = pc.fill_null(found, False).to_numpy(zero_copy_only=False)
    return mask


def _pieces(pattern: str) -> Pieces:
    pieces: Pieces = []
    literal: list[str] = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if char in "%_":
            if literal:
                pieces.append("".join(literal))
                literal = []
            wildcard = ANY if char == "%" else ONE
            if not (wildcard is ANY and pieces and pieces[-1] is ANY):
                pieces.append(wildcard)
            continue
        if char == "\\":
            if at == len(pattern):
                raise InvalidInput(
                    f"like: the pattern {pattern!r} ends in a backslash that takes nothing; "
                    "write two for the character itself"
                )
            char = pattern[at]
            at += 1
        literal.append(char)
    if literal:
        pieces.append("".join(literal))
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"like: the pattern {pattern!r} is not valid Unicode text") from error
    return pieces


def _compare(values: pa.Array, pieces: Pieces, pattern: str) -> pa.Array:
    match pieces:
        case []:
            return pc.equal(values, pa.scalar("", values.type))
        case [str(text)]:
            return pc.equal(values, pa.scalar(text, values.type))
        case [wildcard] if wildcard is ANY:
            return pc.is_valid(values)
        case [str(text), wildcard] if wildcard is ANY:
            return pc.starts_with(values, text)
        case [wildcard, str(text)] if wildcard is ANY:
            return pc.ends_with(values, text)
        case [before, str(text), after] if before is ANY and after is ANY:
            return pc.match_substring(values, text)
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidInput(
            f"like: a pattern with wildcards inside it may have {MAX_REGEX_CHARS} characters, "
            f"this one has {len(pattern)}; shorten it"
        )
    try:
        return pc.match_substring_regex(values, _regex(pieces))
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"like: the pattern {pattern!r} is too large ({error})") from error


def _regex(pieces: Pieces) -> str:
    parts = [r"(?s)\A"]
    for piece in pieces:
        if isinstance(piece, str):
            parts.append("".join(map(_quoted, piece)))
        else:
            parts.append(".*" if piece is ANY else ".")
    return "".join([*parts, r"\z"])


def _quoted(char: str) -> str:
    if char.isalnum() and char.isascii():
        return char
    return f"\\x{{{ord(char):x}}}"
