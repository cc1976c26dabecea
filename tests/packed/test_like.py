"""LIKE equals a regular expression that is built character by character."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from tests.packed.brute import expected
from tests.packed.texts import asked_columns

from penstock.errors import InvalidInput
from penstock.packed.indexes.like import like_exact, like_mask, like_prefix, literals


@settings(max_examples=400, deadline=None)
@given(asked_columns())
def test_a_mask_is_what_a_regular_expression_says(
    column: tuple[list[str | None], str, str, str],
) -> None:
    values, _, _, pattern = column
    wanted = expected(values, "like", pattern)
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        mask = like_mask(pa.array(values, kind), pattern)
        assert len(mask) == len(values)
        assert mask.nonzero()[0].tolist() == wanted
    for row in wanted:
        value = values[row]
        assert value is not None
        assert value.startswith(like_prefix(pattern))
        assert all(text in value for text in literals(pattern))
        assert like_exact(pattern) in (None, value)


def test_a_slice_of_an_array_is_matched_as_a_slice() -> None:
    values = pa.array(["a", "ab", None, "ba", "b"])[1:4]
    assert like_mask(values, "_b").tolist() == [True, False, False]
    assert like_mask(values, "%a").tolist() == [False, False, True]


def test_pieces_of_a_pattern() -> None:
    assert like_prefix(r"50\% o_f%") == "50% o"
    assert literals(r"%a\_b_c%%d\\") == ["a_b", "c", "d\\"]
    assert like_exact(r"50\%") == "50%"
    assert like_exact("") == ""
    assert like_exact("a%") is None


def test_patterns_that_mean_nothing_are_refused() -> None:
    values = pa.array(["a"])
    for pattern in ("a\\", "\\\\\\", "\ud800%"):
        with pytest.raises(InvalidInput, match="pattern"):
            like_mask(values, pattern)
    with pytest.raises(InvalidInput, match="characters"):
        like_mask(values, "a_" * 2000)
    assert not like_mask(values, "a" * 100_000).any()
    assert not like_mask(values, "%a" * 1000).any()
