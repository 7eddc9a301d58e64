"""Small images and readers of conversations for the tests of sources."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from PIL import Image, ImageOps

from forebay.config import SourceConfig
from forebay.config.data import MEANINGS
from forebay.rows.list_rows import list_rows
from forebay.rows.manifest import Manifest, meaning_named
from forebay.rows.media_reader import MediaReader


def picture(number: int = 0, *, width: int = 8, height: int = 6, kind: str = "PNG", **options: Any) -> bytes:
    """Returns an image of one colour, encoded; another number is another image."""
    file = io.BytesIO()
    colour = (number % 256, number // 256 % 256, 128)
    Image.new("RGB", (width, height), colour).save(file, kind, **options)
    return file.getvalue()


def write_picture(path: Path, number: int = 0, **options: Any) -> Path:
    """Writes `picture`, as JPEG where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture(number, kind="JPEG" if path.suffix == ".jpg" else "PNG", **options))
    return path


def asked(image: Any = None, *, question: str = "q", answer: str = "a", **fields: Any) -> dict[str, Any]:
    """Returns a row of a question about an image or a list of them."""
    name = "images" if isinstance(image, list) else "image"
    return {**({name: image} if image is not None else {}), "question": question, "answer": answer, **fields}


def write_lines(path: Path, rows: Sequence[dict[str, Any] | str | bytes]) -> Path:
    """Writes rows as JSON lines; a string or bytes as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def source_of(kind: Any, *manifests: Path | str, **settings: Any) -> SourceConfig:
    """Returns the `[source]` of a config."""
    return SourceConfig(kind=kind, manifest=tuple(map(str, manifests)), **settings)


def read_conversations(source: SourceConfig, *, meaning: str = "conversations", **options: Any) -> Manifest:
    """Returns the rows of a source of images."""
    return list_rows(source, meaning_named(meaning, MEANINGS[meaning].of_groups(["image"])), **options)


def converse(kind: Any, *manifests: Path | str, root: Path, **settings: Any) -> Manifest:
    """Returns the conversations of a source, checked: every image is what its entry says, read as a build reads it."""
    source = source_of(kind, *manifests, **settings)
    manifest = read_conversations(source, cache_root=root / "cache_root")
    check(manifest, source)
    return manifest


def check(manifest: Manifest, source: SourceConfig) -> None:
    """Asserts what holds of every manifest of conversations."""
    entries = manifest.items["image"].to_pylist()
    with MediaReader(manifest.files, max_open=2, column=source.columns.image) as read:
        for entry in entries:
            data = read(entry["file"], entry["offset"], entry["size"])
            assert entry["hash"] == xxhash.xxh3_128_hexdigest(data)
            assert (entry["width"], entry["height"]) == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    assert len({entry["hash"] for entry in entries}) == len(entries)
    rows = manifest.rows.to_pylist()
    used = [image for row in rows for image in row["images"]]
    assert list(dict.fromkeys(used)) == list(range(len(entries)))
    for row in rows:
        parts = [part for message in json.loads(row["text"]) for part in message["content"]]
        assert sum(part == {"type": "image"} for part in parts) == len(row["images"])
    groups = [row["item_group"] for row in rows]
    assert groups == sorted(groups)
    assert [row["group"] for row in rows] == sorted(row["group"] for row in rows)
    assert len({row["row"] for row in rows}) == len(rows)
    left_out = manifest.rejected["row"].to_pylist()
    assert left_out == sorted(left_out)


def images_of(manifest: Manifest) -> dict[str, list[str]]:
    """Returns the names of each row's images by sample id: the file, or the member of a tar."""
    names = [row["member"] or manifest.files[row["file"]].name for row in manifest.items["image"].to_pylist()]
    return {row["sample_id"]: [names[i] for i in row["images"]] for row in manifest.rows.to_pylist()}
