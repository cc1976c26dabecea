"""Which regions a filter can find rows in, told from the values in their manifests.

`regions_for` prepares a filter for one region spec: it sends every constant of the filter through
the transforms, once. `Pruner.may_match` then only compares values, region by region.

How it decides: for a region, each predicate has a set of outcomes it may have on the rows there,
out of true, false and NULL. Leaves get theirs from the fields over their column, AND, OR and NOT
combine sets as SQL combines values, and a region stays if the whole filter may be true.
- `identity` knows the value, so every outcome is exact.
- `year` and `truncate` keep order: a value of another year or prefix is before or after the
  constant as its year or prefix is; in the same one it depends on where the constant lies in it.
- `month`, `day`, `hour`, `bucket` and everything else: equal values have equal images, no more.
A field over several columns prunes when the filter leaves each of them a few values to choose from.

Invariants:
- Conservative: a region that could hold a matching row stays. A region without any values is kept
  too, as it may be one of Lance's that recorded none.
- Values must be those of the spec given. The caller prunes only by specs whose source columns all
  belong to the primary key, or where there is no key: otherwise a region left out may hold the
  newer version of a row that an older layer still shows as matching.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.types as pat

from penstock.errors import InvalidInput
from penstock.memwal import transforms
from penstock.memwal.filters import Filter
from penstock.memwal.predicates import (
    And,
    Compare,
    Constant,
    IsNull,
    Not,
    OneOf,
    Or,
    Predicate,
    TextMatch,
    Truth,
    Unknown,
)
from penstock.memwal.region_spec import RegionField, RegionSpec

_TRUE, _FALSE, _NULL = 1, 2, 4
_ANY = _TRUE | _FALSE | _NULL
_MAX_CHOICES = 1024

_KEEP_NULL = frozenset({"identity", "truncate", "year", "month", "day", "hour"})
_KEEP_ORDER = frozenset({"truncate", "year"})
# What an operator says of a column value below, equal to and above the constant.
_SIGNS: Mapping[str, tuple[int, int, int]] = {
    "=": (_FALSE, _TRUE, _FALSE),
    "!=": (_TRUE, _FALSE, _TRUE),
    "<": (_TRUE, _FALSE, _FALSE),
    "<=": (_TRUE, _TRUE, _FALSE),
    ">": (_FALSE, _FALSE, _TRUE),
    ">=": (_FALSE, _TRUE, _TRUE),
}
_BELOW, _EQUAL, _ABOVE = 1, 2, 4
_ANYWHERE = _BELOW | _EQUAL | _ABOVE

Value: TypeAlias = "pa.Scalar | None"
Leaf: TypeAlias = Compare | OneOf | IsNull | TextMatch
Images: TypeAlias = "frozenset[object] | None"
"""The region values a constant can lead to; None if that cannot be told."""


def regions_for(
    filter: Filter, spec: RegionSpec, columns_by_id: Mapping[int, str], schema: pa.Schema
) -> Pruner:
    """A filter made ready to be asked about regions of `spec`."""
    single: dict[str, list[_Field]] = {}
    joint: list[tuple[str, frozenset[object]]] = []
    leaves = _leaves(filter.predicate)
    choices = _choices(filter.predicate, True)
    for part in spec.fields:
        names = [columns_by_id.get(source) for source in part.source_ids]
        columns = [name for name in names if name is not None and name in schema.names]
        if not names or len(columns) != len(names):
            continue  # unsharded, or divided by a column that is gone
        if len(columns) == 1:
            field = _Field.of(part, schema.field(columns[0]).type, leaves.get(columns[0], ()))
            single.setdefault(columns[0], []).append(field)
        elif all(name in choices for name in columns):
            rows = _product([choices[name] for name in columns])
            kinds = [schema.field(name).type for name in columns]
            images = None if rows is None else _images(part, kinds, rows)
            if images is not None:
                joint.append((part.field_id, frozenset().union(*images)))
    return Pruner(filter.predicate, single, tuple(joint))


class Pruner:
    """Answers for one filter and one spec whether a region can hold a matching row."""

    def __init__(
        self,
        predicate: Predicate,
        single: Mapping[str, Sequence[_Field]],
        joint: Sequence[tuple[str, frozenset[object]]],
    ) -> None:
        self._predicate = predicate
        self._single = single
        self._joint = joint

    def may_match(self, region_values: Mapping[str, object]) -> bool:
        """Whether to read the region of these values, by field id; a missing one is NULL."""
        if not region_values:
            return True
        for field_id, images in self._joint:
            if region_values.get(field_id) not in images:
                return False
        return bool(self._outcomes(self._predicate, region_values) & _TRUE)

    def _outcomes(self, predicate: Predicate, values: Mapping[str, object]) -> int:
        match predicate:
            case Constant(value):
                return _NULL if value is None else _TRUE if value else _FALSE
            case And(parts):
                return _all(self._outcomes(part, values) for part in parts)
            case Or(parts):
                return _negate(_all(_negate(self._outcomes(part, values)) for part in parts))
            case Not(part):
                return _negate(self._outcomes(part, values))
            case Truth(part, wanted):
                found = self._outcomes(part, values)
                hit = _NULL if wanted is None else _TRUE if wanted else _FALSE
                return (_TRUE if found & hit else 0) | (_FALSE if found & ~hit else 0)
            case Unknown():
                return _ANY
            case _:
                outcomes = _ANY
                for field in self._single.get(predicate.column, ()):
                    outcomes &= field.outcomes(predicate, values.get(field.part.field_id))
                return outcomes


def _negate(outcomes: int) -> int:
    return (outcomes & _NULL) | (_FALSE if outcomes & _TRUE else 0) | (outcomes & _FALSE) >> 1


def _all(parts: Iterable[int]) -> int:
    """AND of sets of outcomes: each choice of one per part, combined as SQL does."""
    result = _TRUE
    for part in parts:
        false = _FALSE if (result | part) & _FALSE else 0
        true = _TRUE if result & part & _TRUE else 0
        null = (
            _NULL
            if (result & _NULL and part & ~_FALSE) or (part & _NULL and result & ~_FALSE)
            else 0
        )
        result = (false | true | null) if result and part else 0
    return result


# --- one field over one column -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    part: RegionField
    nulls: Images
    listed: Mapping[int, Images]
    """By the identity of a leaf: the images of the values it lists."""
    compared: Mapping[int, tuple[Images, object, int]]
    """The images of its constant; in a field that keeps order also the one image, and on which
    sides of the constant values with the same image may lie."""

    @classmethod
    def of(cls, part: RegionField, kind: pa.DataType, leaves: Sequence[Leaf]) -> _Field:
        listed = {}
        for leaf in leaves:
            if isinstance(leaf, OneOf):
                listed[id(leaf)] = _union(_images(part, [kind], [(v,) for v in leaf.values]))
        compares = [leaf for leaf in leaves if isinstance(leaf, Compare)]
        images = _images(part, [kind], [(leaf.value,) for leaf in compares])
        compared = {}
        for ordinal, leaf in enumerate(compares):
            own = None if images is None else images[ordinal]
            compared[id(leaf)] = (own, *_position(part, kind, leaf.value, own))
        return cls(part, _union(_images(part, [kind], [(None,)])), listed, compared)

    def outcomes(self, leaf: Leaf, region: object) -> int:
        """What the leaf may be for rows whose region value is `region`."""
        keeps_null = self.part.transform in _KEEP_NULL
        null_possible = region is None if keeps_null else self.nulls is None or region in self.nulls
        value_possible = not (keeps_null and region is None)
        if isinstance(leaf, IsNull):
            return (_TRUE if null_possible else 0) | (_FALSE if value_possible else 0)
        outcomes = _NULL if null_possible else 0
        if not value_possible:
            return outcomes
        if isinstance(leaf, Compare):
            where = self._where(leaf, region)
            return outcomes | sum({s for bit, s in enumerate(_SIGNS[leaf.op]) if where & 1 << bit})
        if isinstance(leaf, TextMatch):
            return outcomes | self._of_text(leaf, region)
        images = self.listed[id(leaf)]
        missing = _NULL if leaf.has_null else _FALSE
        if images is not None and region not in images:
            return outcomes | missing
        is_exact = self.part.transform == "identity" and images is not None
        return outcomes | _TRUE | (0 if is_exact else missing)

    def _where(self, leaf: Compare, region: Any) -> int:
        """Where column values of this region may lie, seen from the constant."""
        if self.part.transform == "identity":
            constant = leaf.value.as_py()
            return _EQUAL if region == constant else _BELOW if region < constant else _ABOVE
        images, image, sides = self.compared[id(leaf)]
        if image is not None:
            return sides if region == image else _BELOW if region < image else _ABOVE
        return _ANYWHERE if images is None or region in images else _BELOW | _ABOVE

    def _of_text(self, leaf: TextMatch, region: Any) -> int:
        transform = self.part.transform
        width = int(self.part.parameters.get("width", 0))
        if transform == "identity" or (transform == "truncate" and len(region) < width):
            tests = {"starts_with": str.startswith, "ends_with": str.endswith}
            test = tests.get(leaf.kernel, str.__contains__)
            return _TRUE if test(region, leaf.text) else _FALSE
        if transform == "truncate" and leaf.kernel == "starts_with":
            if len(leaf.text) <= width:
                return _TRUE if region.startswith(leaf.text) else _FALSE
            return _TRUE | _FALSE if leaf.text.startswith(region) else _FALSE
        return _TRUE | _FALSE


def _position(
    part: RegionField, kind: pa.DataType, value: pa.Scalar, own: Images
) -> tuple[object, int]:
    if part.transform not in _KEEP_ORDER or own is None or len(own) != 1:
        return None, _ANYWHERE
    (image,) = own
    sides = _ANYWHERE
    if isinstance(image, str):
        if value.as_py() == image:  # a prefix itself comes before all it begins
            sides &= ~_BELOW
            if len(image) < int(part.parameters["width"]):
                sides &= ~_ABOVE
        return image, sides
    for step, side in ((-1, _BELOW), (1, _ABOVE)):
        neighbour = _neighbour(value, step)
        beyond = None if neighbour is None else _union(_images(part, [kind], [(neighbour,)]))
        if beyond is not None and image not in beyond:
            sides &= ~side
    return image, sides


def _neighbour(value: pa.Scalar, step: int) -> pa.Scalar | None:
    kind = value.type
    stored = pa.int32() if pat.is_date32(kind) else pa.int64() if pat.is_timestamp(kind) else kind
    try:
        return pa.scalar(value.cast(stored).as_py() + step, stored).cast(kind)
    except (pa.ArrowInvalid, OverflowError):
        return None


# --- sending constants through a field -----------------------------------------------------


def _images(
    part: RegionField, kinds: Sequence[pa.DataType], rows: Sequence[Sequence[Value]]
) -> list[frozenset[object]] | None:
    """For each row of constants the region values it can lead to; None if that cannot be told."""
    if not rows:
        return []
    spread = [
        (ordinal, choice)
        for ordinal, row in enumerate(rows)
        for choice in itertools.product(*(_zeros(value) for value in row))
    ]
    names = [f"c{ordinal}" for ordinal in range(len(kinds))]
    arrays = [
        pa.array([choice[ordinal] for _, choice in spread], kind)
        for ordinal, kind in enumerate(kinds)
    ]
    batch = pa.RecordBatch.from_arrays(arrays, names=names)
    try:
        (values,) = transforms.evaluate(
            RegionSpec(1, (part,)), batch, dict(zip(part.source_ids, names, strict=True))
        )
    except InvalidInput:
        return None  # a constant the field refuses: no row has it, but that is not ours to say
    images: list[set[object]] = [set() for _ in rows]
    for (ordinal, _), value in zip(spread, values.to_pylist(), strict=True):
        images[ordinal].add(value)
    return [frozenset(image) for image in images]


def _union(images: Sequence[frozenset[object]] | None) -> Images:
    return None if images is None else frozenset().union(*images)


def _zeros(value: Value) -> tuple[Value, ...]:
    """0.0 and -0.0 are equal to a filter, but need not be to a transform."""
    if value is None or not pat.is_floating(value.type) or value.as_py() != 0:
        return (value,)
    return pa.scalar(0.0, value.type), pa.scalar(-0.0, value.type)


def _product(choices: Sequence[Sequence[Value]]) -> list[tuple[Value, ...]] | None:
    size = math.prod(len(values) for values in choices)
    return None if size > _MAX_CHOICES else list(itertools.product(*choices))


def _leaves(predicate: Predicate) -> dict[str, list[Leaf]]:
    """Every leaf of the filter, by its column."""
    found: dict[str, list[Leaf]] = {}
    pending: list[Predicate] = [predicate]
    while pending:
        node = pending.pop()
        match node:
            case Compare() | OneOf() | IsNull() | TextMatch():
                found.setdefault(node.column, []).append(node)
            case And(parts) | Or(parts):
                pending.extend(parts)
            case Not(part) | Truth(part, _):
                pending.append(part)
            case _:
                continue
    return found


_Choices: TypeAlias = "dict[str, list[Value]]"


def _choices(predicate: Predicate, wanted: bool) -> _Choices:
    """Columns that have one of a few values (None: NULL) wherever the predicate is `wanted`."""
    match predicate:
        case Compare(column, "=", value) if wanted:
            return {column: [value]}
        case Compare(column, "!=", value) if not wanted:
            return {column: [value]}
        case OneOf(column, values, _) if wanted and len(values) <= _MAX_CHOICES:
            return {column: list(values)}
        case IsNull(column) if wanted:
            return {column: [None]}
        case Not(part):
            return _choices(part, not wanted)
        case Truth(part, truth) if wanted and truth is not None:
            return _choices(part, truth)
        case And(parts) | Or(parts):
            sides = [_choices(part, wanted) for part in parts]
            return _both(sides) if isinstance(predicate, And) == wanted else _either(sides)
        case _:
            return {}


def _both(sides: Sequence[_Choices]) -> _Choices:
    """All hold, so any of them may be relied on: the one with the fewest values."""
    found: _Choices = {}
    for side in sides:
        for column, values in side.items():
            if column not in found or len(values) < len(found[column]):
                found[column] = values
    return found


def _either(sides: Sequence[_Choices]) -> _Choices:
    shared = set.intersection(*(set(side) for side in sides)) if sides else set()
    joined = {column: [value for side in sides for value in side[column]] for column in shared}
    return {column: values for column, values in joined.items() if len(values) <= _MAX_CHOICES}
