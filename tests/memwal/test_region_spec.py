"""A region spec says which rows share a region; a wrong one is refused before it does harm."""

from __future__ import annotations

import lance
import pyarrow as pa
import pytest

from penstock.errors import InvalidInput
from penstock.memwal import region_spec as rs

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("tenant", pa.utf8()),
        ("at", pa.timestamp("us", "UTC")),
        ("on", pa.date32()),
        ("clock", pa.time64("us")),
        ("price", pa.float64()),
        ("blob", pa.binary()),
        ("exact", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.utf8())),
    ]
)
FIELD_IDS = {name: index * 10 for index, name in enumerate(SCHEMA.names)}


def bind(by, primary_key=()):
    return rs.bind(by, SCHEMA, FIELD_IDS, primary_key, 1)


@pytest.mark.parametrize(
    ("by", "options"),
    [
        (rs.unsharded(), {"unsharded": True}),
        (rs.bucket("id", 4), {"bucket_column": "id", "num_buckets": 4}),
        (rs.bucket("tenant", 1024), {"bucket_column": "tenant", "num_buckets": 1024}),
        (rs.identity("id"), {"identity_column": "id"}),
        (rs.identity("tenant"), {"identity_column": "tenant"}),
        (rs.identity("flag"), {"identity_column": "flag"}),
        (rs.identity("long"), {"identity_column": "long"}),
    ],
)
def test_what_lance_knows_is_written_as_lance_writes_it(tmp_path, by, options):
    schema = pa.schema(
        [
            ("id", pa.int64()),
            ("tenant", pa.utf8()),
            ("flag", pa.bool_()),
            ("long", pa.large_utf8()),
        ]
    )
    dataset = lance.write_dataset(schema.empty_table(), tmp_path / "t")
    dataset.initialize_mem_wal(**options)
    [theirs] = dataset.mem_wal_index_details()["sharding_specs"]

    field_ids = {field.name(): field.id() for field in dataset.lance_schema.fields()}
    ours = rs.bind(by, schema, field_ids, [], 1)

    [field] = ours.fields
    assert theirs == {
        "spec_id": ours.spec_id,
        "fields": [
            {
                "field_id": field.field_id,
                "source_ids": list(field.source_ids),
                "transform": field.transform,
                "expression": field.expression,
                "result_type": field.result_type,
                "parameters": dict(field.parameters),
            }
        ],
    }


def test_several_fields_combine_and_have_names_of_their_own():
    parts = [
        rs.bucket("id", 4),
        rs.day("at"),
        rs.truncate("tenant", 2),
        rs.truncate("tenant", 3),
        rs.identity("on"),
        rs.multi_bucket(["id", "blob"], 7),
        rs.expression("col1 + length(col0)", ["tenant", "id"], pa.int64()),
    ]
    spec = bind(parts)
    assert [(f.field_id, f.source_ids, f.result_type) for f in spec.fields] == [
        ("bucket_id", (0,), "int32"),
        ("day_at", (20,), "int32"),
        ("truncate_tenant", (10,), "utf8"),
        ("truncate_tenant_2", (10,), "utf8"),
        ("identity_on", (30,), "date32"),
        ("multi_bucket_id_blob", (0, 60), "int32"),
        ("expression_tenant_id", (10, 0), "int64"),
    ]
    assert spec.fields[2].parameters == {"width": "2"}
    again = bind(parts)
    assert spec == again
    assert hash(spec) == hash(again)


def test_a_key_must_not_be_able_to_change_its_region():
    """The same key in two regions has no newest row: refused, with the way out."""
    for by in (
        rs.bucket("tenant", 4),
        rs.day("at"),
        [rs.bucket("id", 4), rs.identity("tenant")],
        rs.multi_bucket(["id", "tenant"], 4),
        rs.expression("left(col0, 1)", ["tenant"], "utf8"),
    ):
        with pytest.raises(InvalidInput, match=r"not part of the primary key \['id'\].*part of"):
            bind(by, ["id"])
    assert bind([rs.bucket("id", 4), rs.identity("tenant")], ["tenant", "id"])
    assert bind(rs.unsharded(), ["id"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rs.bucket("id", 0), "from 1 to 1024"),
        (lambda: rs.bucket("id", 1025), "from 1 to 1024"),
        (lambda: rs.bucket("id", True), "from 1 to 1024"),
        (lambda: rs.multi_bucket(["id"], 2.5), "from 1 to 1024"),
        (lambda: rs.multi_bucket("id", 4), "list of column names"),
        (lambda: rs.multi_bucket(["id", "id"], 4), "names a column twice"),
        (lambda: rs.truncate("id", 0), "from 1 to"),
        (lambda: rs.bucket("nope", 4), "which the table does not have; its columns are id, tenant"),
        (lambda: rs.bucket("exact", 4), "'exact' of type decimal128.*it wants"),
        (lambda: rs.bucket("blob", 4), r"multi_bucket\(\[column\], n\) also takes binary"),
        (lambda: rs.bucket("tags", 4), "cannot use column 'tags'"),
        (lambda: rs.multi_bucket(["exact"], 4), "cannot use column 'exact'"),
        (lambda: rs.identity("price"), "cannot use column 'price' of type double"),
        (lambda: rs.identity("at"), "cannot use column 'at'"),
        (lambda: rs.year("id"), "it wants a date or timestamp"),
        (lambda: rs.hour("on"), "it wants a time or timestamp"),
        (lambda: rs.day("clock"), "it wants a date or timestamp"),
        (lambda: rs.truncate("price", 2), "it wants a string or integer"),
        (lambda: rs.expression("1", [], "int32"), "list of column names"),
        (lambda: rs.expression("col0", ["price"], "double"), "cannot be of type 'double'; use one"),
        (lambda: rs.expression("col0", ["price"], pa.float64()), "cannot be of type double"),
        (lambda: rs.expression("col0", ["tags"], "utf8"), "must be plain scalars"),
        (lambda: rs.RegionBy(("id",), "zorder"), "no region transform 'zorder'"),
        (lambda: [], "at least one field"),
        (lambda: [rs.unsharded(), rs.bucket("id", 2)], "single region"),
    ],
)
def test_wrong_specs_are_refused_with_the_reason(make, message):
    with pytest.raises(InvalidInput, match=message):
        bind(make())


def test_spec_ids_are_positive():
    for spec_id in (0, -1, 1 << 32):
        with pytest.raises(InvalidInput, match="spec id"):
            rs.bind(rs.unsharded(), SCHEMA, FIELD_IDS, [], spec_id)
