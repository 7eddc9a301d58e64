"""Made the golden cache of format version 3, of kept columns: `python -m tests.golden.make_v3_kept`. It is kept."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.store.key import digest
from forebay.store.layout import FieldSpec
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from tests.golden import make_v2_text as v2

FOLDER = Path(__file__).parent / "v3_kept"
"""Holds the cache and `expected.json`."""
NAME = "golden-train-v3"

FIELDS = (
    *v2.FIELDS,
    FieldSpec(name="snr", dtype="float64", group="text", role="table"),
    FieldSpec(name="speaker", dtype="str", group="text", role="table", nullable=True),
    FieldSpec(name="takes", dtype="int64", group="text", role="table"),
)
COLUMNS: dict[str, tuple[Any, ...]] = {
    "snr": (1.5, None, 3.0, -0.25, 12.0),
    "speaker": ("anna", None, "carl", "", "दीपा"),
    "takes": (1, 2, None, -(2**62), None),
}


def row_values(row: int) -> dict[str, Any]:
    """Returns a row as it is written."""
    kept = {name: values[row] for name, values in COLUMNS.items()}
    numbers = {"snr": np.float64, "takes": np.int64}
    kept |= {name: kind(kept[name]) for name, kind in numbers.items() if kept[name] is not None}
    return {**v2.row_values(row), **kept}


def write_shards(scratch: Path) -> list[tuple[Path, ShardEntry]]:
    """Writes the shards below a folder."""
    (scratch / "text").mkdir(parents=True, exist_ok=True)
    shards = []
    for index, start in enumerate(range(0, len(v2.TEXTS), v2.ROWS_PER_SHARD)):
        path = scratch / shard_name("text", index)
        part = [row_values(row) for row in range(start, min(start + v2.ROWS_PER_SHARD, len(v2.TEXTS)))]
        key = digest(["golden v3", index])
        shards.append((path, write_shard(path, shard_fields(FIELDS, "text"), part, key=key)))
    return shards


def expected() -> dict[str, Any]:
    """Returns what a reader has to find, in a form that needs no reader of ours."""
    found = v2.expected()
    kept = {name: [values[row] for row in v2.KEPT] for name, values in COLUMNS.items()}
    return {**found, "key": digest("golden v3"), "table": {**found["table"], **kept}}


def contents(scratch: Path) -> Contents:
    """Returns what the golden cache is sealed from."""
    of_v2 = v2.contents(scratch)
    recipe = {**of_v2.document["recipe"], "source": {"kind": "text", "keep_columns": sorted(COLUMNS)}}
    document = {**of_v2.document, "key": digest("golden v3"), "recipe": recipe}
    return replace(of_v2, fields=FIELDS, shards={"text": write_shards(scratch)}, document=document)


def main() -> None:
    """Makes the golden cache beside this file. Raises FileExistsError where it is: it is never written again."""
    FOLDER.mkdir()
    scratch = FOLDER / "scratch"
    seal(FOLDER / NAME, contents(scratch), scratch=scratch)
    shutil.rmtree(scratch)
    (FOLDER / "expected.json").write_text(json.dumps(expected(), indent=None), encoding="utf-8")


if __name__ == "__main__":
    main()
