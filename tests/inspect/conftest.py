"""A cache of the demo photos with its plan of packs, built once for all tests that look into one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from forebay.plan.make import plan_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import FIELDS, Codec, encode, unpatchify
from forebay.store.image.image_settings import ImageSettings
from forebay.store.layout import FieldSpec
from forebay.store.seal import Contents, seal
from forebay.store.shard import shard_fields, write_shard
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus

PHOTOS = ("bird.jpg", "nuthatch.jpg", "dogs.jpg")


@dataclass(frozen=True)
class Built:
    """corpus: what the cache was made of; folder: the cache, plan: its plan of packs."""

    corpus: PhotoCorpus
    folder: Path
    plan: Path

    @property
    def config(self) -> Path:
        return self.corpus.folder / "config.toml"

    def with_codec(self, root: Path, codec: Codec) -> Path:
        """Makes the same cache with another codec under `root`, without a build, and returns its folder."""
        cache = open_cache(self.folder)
        image = FieldSpec(name=FIELDS[codec], dtype="uint8", shape=(768,) if codec == "raw" else (), group="image")
        fields = (image, *(spec for name, spec in cache.fields.items() if name != "patches"))
        scratch = root / ".building"
        images = []
        for number in range(cache.unit_count("image")):
            path = scratch / f"{number}.tdz"
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                encoded_row(cache, self.corpus, number, row, codec) for row in range(len(image_hashes(cache, number)))
            ]
            images.append((path, write_shard(path, shard_fields(fields, "image"), rows, key=f"{number:064}")))
        kept = {name: value for name, value in cache.metadata.items() if name not in ("checksum", "files", "fields")}
        sizes = sum(entry.size_bytes for _, entry in [*images, *cache.shard_entries("text")])
        folder = root / f"{self.folder.name}.{codec}"
        contents = Contents(
            fields=fields,
            shards={"image": images, "text": cache.shard_entries("text")},
            items={"image": cache.items("image")},
            arrays={"slots.npy": cache.slots, "lengths.npy": np.load(self.folder / "lengths.npy")},
            files={"rejected.jsonl": (self.folder / "rejected.jsonl").read_bytes()},
            document={**kept, "codec": codec, "size_bytes": sizes},
        )
        seal(folder, contents, scratch=scratch)
        return folder


def image_hashes(cache: Cache, number: int) -> list[str]:
    """The hashes of a shard's images."""
    return cache.shard("image", number).strings("image_hash")


def encoded_row(cache: Cache, corpus: PhotoCorpus, number: int, row: int, codec: Codec) -> dict[str, object]:
    """An image of a raw cache, stored by another codec."""
    shard = cache.shard("image", number)
    values, digest = shard.row(row), image_hashes(cache, number)[row]
    if not len(values["patches"]):
        return {"image_hash": digest, "failure": shard.string("failure", row)}
    grid = tuple(values["image_grid_thw"][0].tolist())
    pixels = unpatchify(values["patches"], grid, ImageSettings.from_json(cache.constants["image"]))
    data = {hash_of(path): path.read_bytes() for path in corpus.folder.glob("*.jpg")}[digest]
    name, stored = encode(codec, data=data, pixels=pixels, patches=values["patches"])
    return {name: stored, "image_grid_thw": values["image_grid_thw"], "image_hash": digest}


def hash_of(path: Path) -> str:
    """The xxh3-128 by which a shard knows an image."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(path.read_bytes())


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Eight conversations about three photos of the demo, in two shards, and one about a photo that is no photo."""
    corpus = PhotoCorpus(tmp_path_factory.mktemp("photos"))
    for name in PHOTOS:
        corpus.add_photo(name, (DEMO / "photos" / name).read_bytes())
    corpus.add_photo("torn.jpg", (DEMO / "photos" / "bird.jpg").read_bytes()[:3000])
    for turn in range(2):
        for name in PHOTOS:
            corpus.ask(f"{name[:-4]}-{turn}", name, answer=f"Number {turn}.")
    corpus.rows += [
        {"id": "torn", "image": "torn.jpg", "question": "What is it?", "answer": "Nothing."},
        {"id": "both", "messages": BOTH},
        {"id": "text-only", "messages": TEXT_ONLY},
    ]
    corpus.write_manifest()
    config = corpus.config("run.num_workers=1")
    report = build_here(config)
    planned = plan_of(config, open_cache(report.cache))
    assert planned.folder is not None
    return Built(corpus, Path(report.cache), planned.folder)


BOTH = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "First:"},
            {"type": "image", "image": "dogs.jpg"},
            {"type": "text", "text": "Second:"},
            {"type": "image", "image": "bird.jpg"},
            {"type": "text", "text": "Which costs $5 or less?"},
        ],
    },
    {"role": "assistant", "content": "The second.\nThe first is two dogs."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
TEXT_ONLY = [{"role": "user", "content": "Which metal is liquid?"}, {"role": "assistant", "content": "Mercury."}]
