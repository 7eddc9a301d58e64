"""Caches of any rows, and whether a folder is the cache that went to its cold form."""

from __future__ import annotations

import filecmp
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from forebay.config.remote import RemoteConfig
from forebay.errors import RemoteExistsError, RemoteMissingError
from forebay.store.key import digest
from forebay.store.layout import FieldSpec, Group
from forebay.store.remote.bucket.bucket import ObjectInfo
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from tests.strategies import STORED_FIELDS, stored_rows

Row = dict[str, Any]
Shards = Sequence[Sequence[Row]]

FIELDS = (
    *STORED_FIELDS[:-1],  # each group has its field `failure` anyway
    FieldSpec(name="input_ids", dtype="int32", group="text"),
    FieldSpec(name="scores", dtype="float64", shape=(2, 2), group="text"),
    FieldSpec(name="nothing", dtype="uint8", shape=(0,), group="text"),
    FieldSpec(name="text", dtype="str", group="text", role="table"),
)


@st.composite
def shards_of_rows(draw: st.DrawFn) -> Shards:
    """1 to 4 shards of 0 to 6 rows each, of both groups."""
    shards: list[list[Row]] = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(stored_rows())
        for row in rows:
            row["input_ids"] = np.array(draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)), np.int32)
            data = draw(st.binary(min_size=32, max_size=32))
            row["scores"] = np.frombuffer(data * draw(st.integers(0, 2)), "<f8").reshape(-1, 2, 2)
            row["nothing"] = np.zeros((draw(st.integers(0, 3)), 0), np.uint8)
            row["text"] = draw(st.text(max_size=4))
        shards.append(rows)
    return shards


def make_cache(root: Path, shards: Shards) -> Path:
    """Makes a sealed cache of these rows, and returns its folder. Rows with a `failure` are no samples."""
    files: dict[Group, list[tuple[Path, ShardEntry]]] = {"audio": [], "text": []}
    for group, found in files.items():
        fields = shard_fields(FIELDS, group)
        names = {field.name for field in fields}
        (root / "scratch" / group).mkdir(parents=True)
        for index, rows in enumerate(shards):
            kept = [{name: value for name, value in row.items() if name in names} for row in rows]
            path = root / "scratch" / shard_name(group, index)
            found.append((path, write_shard(path, fields, kept, key=digest([group, index]))))
    places = [(i << 32) | j for i, rows in enumerate(shards) for j, row in enumerate(rows) if "failure" not in row]
    lengths = [len(shards[place >> 32][place & 0xFFFFFFFF]["input_ids"]) for place in places]
    contents = Contents(
        fields=FIELDS,
        shards=files,
        items={},
        arrays={"slots.npy": np.array(places, "<i8"), "lengths.npy": np.array([lengths] * 2, "<i4")},
        files={"rejected.jsonl": b"", "sources.parquet": b"of no use to a reader"},
        document={
            "key": digest([len(rows) for rows in shards]),
            "recipe_key": digest("recipe"),
            "recipe": {},
            "constants": {"audio": {}, "text": {}},
            "num_samples": len(places),
            "length_names": ["num_audio_samples", "num_tokens"],
        },
    )
    seal(root / "cache", contents, scratch=root / "scratch")
    return root / "cache"


class Memory:
    """A place in memory."""

    def __init__(self, settings: RemoteConfig) -> None:
        self.url, self.settings = Path("/memory"), settings
        self.data: dict[str, bytes] = {}

    def info(self, name: str) -> ObjectInfo:
        self.read(name)
        return ObjectInfo(name=name, size_bytes=len(self.data[name]), etag=_etag(self.data[name]), modified_ns=0)

    def read(self, name: str) -> bytes:
        if name not in self.data:
            raise RemoteMissingError(f"{name} is missing")
        return self.data[name]

    def put(self, name: str, data: bytes, *, create: bool = False) -> str:
        if create and name in self.data:
            raise RemoteExistsError(f"{name} is there already")
        self.data[name] = data
        return _etag(data)

    def objects(self) -> Iterator[ObjectInfo]:
        yield from map(self.info, sorted(self.data))


def _etag(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def same(left: Path, right: Path) -> bool:
    """Whether two folders hold the same names with the same bytes."""
    names = [sorted(str(p.relative_to(f)) for p in f.rglob("*") if p.is_file()) for f in (left, right)]
    return names[0] == names[1] and not filecmp.cmpfiles(left, right, names[0], shallow=False)[1]


def settings_of(tmp_path: Path, **changes: Any) -> RemoteConfig:
    """Returns settings that keep what they keep below the test's own folder."""
    return RemoteConfig(**{"shard_dir": str(tmp_path / "node"), "retries": 0, "timeout_s": 20, **changes})
