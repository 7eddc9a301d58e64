"""Caches of real configs over made-up raw data, without running any step: what lookup compares is all there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import Config, parse_config
from forebay.steps.recipe import recipe_of
from forebay.store.files import hash_file
from forebay.store.key import SourceDigest, cache_key, digest, folder_name
from forebay.store.layout import FieldSpec, Group
from forebay.store.memo import Memo
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from forebay.store.source_files import ABSENT, SourceFile, StoredSource, dump_sources, listed_files

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "speech" / "model"
DEMO_VISION = Path(__file__).resolve().parents[2] / "demo" / "vision" / "model"

FIELDS = (
    FieldSpec(name="waveform", dtype="int16", group="audio"),
    FieldSpec(name="input_ids", dtype="int32", group="text"),
)


def raw_data(folder: Path, *, num_tars: int = 2) -> Path:
    """Makes a folder with tars (of no use to a decoder) and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(num_tars):
        (folder / f"{index:05d}.tar").write_bytes(b"tar %d" % index)
    return folder


def config_of(root: Path, **sections: dict[str, Any]) -> Config:
    """Returns the config of `root`/config.toml: tars in `root`/data, caches in `root`/caches, sections merged in."""
    document: dict[str, Any] = {
        "name": "made_up",
        "source": {"kind": "webdataset", "manifest": "data"},
        "audio": {"features": "waveform"},
        "run": {"cache_root": "caches"},
    }
    if "vision" in sections:
        del document["audio"]
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    return parse_config(document, path=root / "config.toml")


def shards_of(
    scratch: Path, samples: Sequence[np.ndarray[Any, Any]], *, rows_per_shard: int = 2
) -> dict[Group, list[tuple[Path, ShardEntry]]]:
    """Writes the shards of samples whose waveform and tokens are these values."""
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {"audio": [], "text": []}
    for group, name in (("audio", "waveform"), ("text", "input_ids")):
        (scratch / group).mkdir(parents=True, exist_ok=True)
        fields = shard_fields(FIELDS, group)
        dtype = fields[0].numpy_dtype
        for index, start in enumerate(range(0, len(samples), rows_per_shard)):
            rows = [{name: sample.astype(dtype)} for sample in samples[start : start + rows_per_shard]]
            path = scratch / shard_name(group, index)
            entry = write_shard(path, fields, rows, key=digest([group, [sample.tolist() for sample in samples], index]))
            shards[group].append((path, entry))
    return shards


def contents_of(scratch: Path, *, seed: int = 0, num_samples: int = 5, **document: Any) -> Contents:
    """Returns what is sealed of `num_samples` random samples."""
    rng = np.random.default_rng(seed)
    samples = [rng.integers(0, 100, int(rng.integers(0, 9))) for _ in range(num_samples)]
    lengths = np.array([[len(sample) for sample in samples]] * 2, "<i4")
    base = {
        "key": digest(seed),
        "recipe_key": digest("recipe"),
        "constants": {"audio": {}, "text": {}},
        "num_samples": num_samples,
        "length_names": ["num_audio_samples", "num_tokens"],
    }
    files = document.pop("files", {})
    return Contents(
        fields=FIELDS,
        shards=shards_of(scratch, samples),
        items={},
        arrays={
            "slots.npy": np.array([(i // 2) << 32 | i % 2 for i in range(num_samples)], "<i8"),
            "lengths.npy": lengths,
        },
        files=files,
        document={**base, **document},
    )


def build(config: Config, *, named: Sequence[SourceFile] = (), seed: int = 0) -> Path:
    """Seals a cache of a config and the raw data as they are now, and returns its folder.

    named: files that the listed ones would name (tars of a manifest); one that is not there is kept as absent.
    """
    recipe = recipe_of(config)
    files = [*listed_files(config.source), *named]
    hashes = [hash_file(file.path) if file.path.is_file() else ABSENT for file in files]
    sources = [
        StoredSource(f.name, f.entry, f.listed, h, f.path.stat().st_size if h else -1)
        for f, h in zip(files, hashes, strict=True)
    ]
    key = cache_key(recipe.key, [SourceDigest(name=f.name, xxh3_128=h) for f, h in zip(files, hashes, strict=True)])
    present = [file.path for file in files if file.path.is_file()]
    memo = Memo(config.cache_root)
    memo.hashes(present)
    scratch = config.cache_root / ".building" / key[:16]
    contents = contents_of(
        scratch,
        seed=seed,
        name=config.name,
        key=key,
        recipe_key=recipe.key,
        recipe=recipe.document,
        files={"sources.parquet": dump_sources(sources), "hashes.memo": memo.dump(present)},
    )
    folder = config.cache_root / folder_name(config, key)
    seal(folder, contents, scratch=scratch)
    shutil.rmtree(scratch.parent)
    return folder
