"""A small sealed vision cache of made-up conversations with its plan of packs: nothing is decoded or tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config import PackConfig
from forebay.plan.make import Samples, kept_plan
from forebay.plan.names import plan_folder
from forebay.preprocess.group import with_group
from forebay.preprocess.image_group import IMAGE_HASH
from forebay.steps.image.qwen2_vl import Patches
from forebay.steps.text.chat.chat_steps import Chat
from forebay.store.image.codec import Codec, encode, unpatchify
from forebay.store.image.image_settings import ImageSettings
from forebay.store.key import digest
from forebay.store.layout import FieldSpec, Group, ListedItems
from forebay.store.seal import Contents, seal
from forebay.store.shard import ShardEntry, shard_fields, shard_name, write_shard
from tests.flat_constants import flat
from tests.train.tiny_vl import CONSTANTS, MERGE_SIZE, PATCH_SIZE, WIDTH, FakeVlSource

HALF = (0.5, 0.5, 0.5)
SETTINGS = ImageSettings(
    patch_size=PATCH_SIZE, merge_size=MERGE_SIZE, min_pixels=1024, max_pixels=1 << 20, image_mean=HALF, image_std=HALF
)


def make_vl_cache(
    root: Path, samples: Sequence[Mapping[str, Any]], *, codec: Codec = "raw", rows_per_shard: int = 4
) -> Path:
    """Makes a sealed cache of samples as in `tiny_vl` under `root`, returns its folder; the key knows no codec."""
    key = digest([sample["input_ids"].tolist() for sample in samples])
    suffix = "" if codec == "raw" else f".{codec}"
    folder, scratch = root / f"tiny-train-{key[:16]}{suffix}", root / ".building" / codec
    columns = (FieldSpec(name=name, dtype="str", role="table") for name in ("sample_id", "text", "images", "source"))
    of_image = (*Patches(processor="").fields(codec, patch_bytes=WIDTH), IMAGE_HASH)
    of_text = (*Chat(tokenizer="").fields(), *columns)
    fields = (*with_group(of_image, "image"), *with_group(of_text, "text"))
    shards: dict[Group, list[tuple[Path, ShardEntry]]] = {"image": [], "text": []}
    slots: list[int] = []
    for index, start in enumerate(range(0, len(samples), rows_per_shard)):
        part = samples[start : start + rows_per_shard]
        made = _rows(part, start, codec)
        slots += [index << 32 | row for row in range(len(made["image"]))]
        for group, rows in made.items():
            path = scratch / shard_name(group, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            entry = write_shard(path, shard_fields(fields, group), rows, key=digest([key, codec, group, index]))
            shards[group].append((path, entry))
    lengths = FakeVlSource(samples).lengths
    contents = Contents(
        fields=fields,
        shards=shards,
        items={"image": ListedItems(np.concatenate(([0], np.cumsum(lengths["num_images"]))), np.array(slots, "<i8"))},
        arrays={
            "slots.npy": np.array([i // rows_per_shard << 32 | i % rows_per_shard for i in range(len(samples))], "<i8"),
            "lengths.npy": np.stack(list(lengths.values())).astype("<i4"),
        },
        files={},
        document={
            "name": "tiny",
            "key": key,
            "recipe_key": digest("recipe"),
            "recipe": {},
            "constants": flat(**CONSTANTS, image=SETTINGS.to_json(), max_pixels=1 << 26, alpha="drop").to_json(),
            "num_samples": len(samples),
            "length_names": list(lengths),
            "codec": codec,
        },
    )
    seal(folder, contents, scratch=scratch)
    return folder


def make_packs(root: Path, cache_key: str, samples: Sequence[Mapping[str, Any]], **settings: Any) -> Path:
    """Saves the plan of packs of a cache and returns its folder."""
    lengths = FakeVlSource(samples).lengths
    columns = Samples(
        tokens=lambda: lengths["num_tokens"],
        patches=lambda: lengths["num_patches"],
        images=lambda: lengths["num_images"],
        merge_size=MERGE_SIZE,
    )
    name: dict[str, Any] = {"cache_key": cache_key, "settings": PackConfig(**settings)}
    _, folder = kept_plan(plan_folder(root, dataset="tiny", split="train", **name), columns, **name)
    assert folder is not None
    return folder


def _rows(samples: Sequence[Mapping[str, Any]], first: int, codec: Codec) -> dict[Group, list[Any]]:
    """The rows of one shard of each group: images, and the texts that list them in this order."""
    images: list[Any] = []
    texts: list[Any] = []
    for number, sample in enumerate(samples, first):
        for patches, grid in zip(sample["patches"], sample["image_grid_thw"], strict=True):
            pixels = unpatchify(patches, tuple(grid.tolist()), SETTINGS)
            name, stored = encode(codec, data=b"", pixels=pixels, patches=patches)
            images.append({name: stored, "image_grid_thw": grid[None], "image_hash": f"image-{len(images)}"})
        texts.append(
            {
                **{name: sample[name] for name in ("input_ids", "label_mask")},
                **dict.fromkeys(("text", "images", "source"), ""),
                "sample_id": f"sample-{number}",
            }
        )
    return {"image": images, "text": texts}
