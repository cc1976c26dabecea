"""A program of somebody who has Lance and has never heard of Penstock.

Run as `python -I -S`, so that nothing but what is named here can be imported; it refuses to run if
Penstock can be. Reads from its input where packages are, where the table is and what to ask of it,
and writes the answers to its output, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LANCE_LOG"] = "error"


class Refuse:
    """Whatever has a way to import Penstock must not use it."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == "penstock":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    asked = json.load(sys.stdin)
    sys.path[:] = [*sys.path, *asked["packages"]]
    sys.meta_path.insert(0, Refuse)  # type: ignore[arg-type]
    try:
        import penstock

        raise SystemExit(f"penstock was found at {penstock.__file__}")
    except ModuleNotFoundError:
        pass
    import lance

    dataset = lance.dataset(asked["uri"])
    dataset.validate()
    key, vector, text = asked["key"], asked["vector"], asked["text"]

    def keys(found: Any, *more: str) -> list[list[Any]]:
        return [list(row.values()) for row in found.select([*key, *more]).to_pylist()]

    nearest = {"column": vector["column"], "q": vector["query"], "k": vector["k"], "nprobes": 16}
    near = dataset.scanner(nearest=nearest, columns=[*key])
    rows = dataset.to_table().to_pylist()
    answers = {
        "columns": dataset.schema.names,
        "rows": rows,
        "count": dataset.count_rows(),
        "filtered": keys(dataset.to_table(filter=asked["filter"])),
        "nearest": keys(near.to_table(), "_distance"),
        "plan": near.explain_plan(verbose=True),
        "matching": keys(
            dataset.to_table(full_text_query=text["query"], columns=key, limit=10 * len(rows))
        ),
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
