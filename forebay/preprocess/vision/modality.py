"""Vision: images and conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.preprocess.cut import Cut
from forebay.preprocess.modality import Finished, Listing, Read, Rows, Values, gathered
from forebay.preprocess.vision.cut import name_image_cuts
from forebay.preprocess.vision.headers import (
    MEDIA_ROWS,
    images_of,
    media_task_rows,
    text_task_rows,
    with_grids,
)
from forebay.preprocess.vision.media import of_rows, row_reasons, used_by
from forebay.preprocess.vision.probe import chat_probe, image_probe
from forebay.preprocess.vision.samples import (
    conversation_samples,
    image_samples,
    loaded_chat,
    loaded_steps,
    vision_fields,
)
from forebay.rows.kept_columns import fields_of
from forebay.rows.list_images import read_conversations
from forebay.rows.manifest import Manifest
from forebay.steps.image.qwen2_vl import PixelSteps
from forebay.steps.recipe import VisionRecipe
from forebay.steps.text.chat.packed import ChatEncoder
from forebay.store.image.codec import Codec
from forebay.store.image.settings import ImageSettings, image_settings
from forebay.store.layout import GROUPS, Array, FieldSpec, Group
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.sources import localized
from forebay.store.shard import Shard
from forebay.store.source_files import SourceFile
from forebay.task_map import Map

_STORED_SHARE: Mapping[Codec, float] = {"raw": 1.0, "zstd": 0.6, "webp": 0.3, "source": 0.1}
"""Bytes of a stored photo over its raw patches, about."""

_BYTES_PER_TOKEN = 5
"""The size of an id and its mask."""


@dataclass(frozen=True, slots=True)
class Vision:
    """A config's steps over images and conversations: a `Modality`.

    processor, tokenizer: folders. kept: the fields of `source.keep_columns`.
    """

    recipe: VisionRecipe
    processor: str
    tokenizer: str
    codec: Codec
    settings: ImageSettings
    media_column: str = "image"
    kept: tuple[FieldSpec, ...] = ()
    media_unit = "image"
    row_unit = "conversations"

    @classmethod
    def of(cls, config: Config, recipe: VisionRecipe) -> Vision:
        """Returns the modality of a config. Raises ConfigError where its processor is none of the Qwen2-VL family."""
        if config.vision is None or config.text is None:
            raise ValueError("a vision recipe comes from a config with [vision]")
        vision, column = config.vision, config.source.columns.image
        settings = image_settings(Path(vision.processor))
        return cls(recipe, vision.processor, config.text.tokenizer, vision.codec, settings, column)

    def with_codec(self, codec: Codec) -> Vision:
        """Returns the modality that stores images in another way."""
        return replace(self, codec=codec)

    @property
    def max_sample_bytes(self) -> int:
        return self.recipe.patches.max_sample_bytes

    @property
    def groups(self) -> tuple[Group, ...]:
        """Both, also where no conversation has an image."""
        return GROUPS

    @property
    def read_values(self) -> frozenset[str]:
        """How large images are, and whose they are."""
        return frozenset(("image_grid_thw", MEDIA_ROWS))

    @property
    def length_names(self) -> tuple[str, ...]:
        """Tokens, patches of all images, images."""
        return ("num_tokens", "num_patches", "num_images")

    def manifest(self, config: Config, *, map_: Map = map, is_hashed: bool = False) -> Manifest:  # noqa: ARG002  it reads all
        # `images` gets `grid_h` and `grid_w`, in patches after the resize.
        forget()
        return with_grids(
            read_conversations(localized(config).source, cache_root=config.cache_root, map_=map_), self.settings
        )

    def keeping(self, rows: pa.Table) -> Vision:
        return replace(self, kept=fields_of(rows))

    def measured(self, constants: Mapping[str, Any]) -> Vision:  # noqa: ARG002  its settings say it all
        return self

    def fields(self) -> tuple[FieldSpec, ...]:
        return (*vision_fields(self.recipe, self.codec, patch_bytes=self.settings.patch_bytes), *self.kept)

    def shard_rows(self, rows_per_shard: int) -> int:
        return rows_per_shard

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        return name_image_cuts(
            self.recipe,
            listing,
            codec=self.codec,
            of_text=self._of_text,
            probe=probe,
            rows_per_shard=rows_per_shard,
        )

    def task_rows(self, listing: Listing, cut: Cut, group: Group) -> tuple[tuple[SourceFile, ...], pa.Table]:
        # A media row is an image, a text row a conversation.
        make = media_task_rows if group == "media" else text_task_rows
        return make(listing, cut.start, cut.stop)

    def media_samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        return image_samples(self._steps(), rows, read, codec=self.codec)

    def text_samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        return conversation_samples(rows, names, self._encoder())

    def used_by(self, listing: Listing, rows: pa.Table, *, group: Group, position: int) -> tuple[str, list[str]]:
        return used_by(listing, rows, group=group, position=position)

    def constants(self) -> dict[str, Any]:
        # `patch_table` [3][256]: the processor's float32 for each uint8 value, by channel.
        return {
            "features": "patches",
            "patch_size": self.settings.patch_size,
            "merge_size": self.settings.merge_size,
            "temporal_patch_size": self.settings.temporal_patch_size,
            "patch_table": self._steps().table.tolist(),
            "image": self.settings.to_json(),
            "max_pixels": self.recipe.patches.max_pixels,
            "alpha": self.recipe.patches.alpha,
            **self._encoder().constants,
        }

    def probe(self, group: Group) -> str:
        return image_probe(self._steps()) if group == "media" else chat_probe(self._encoder())

    def estimate_bytes(self, listing: Listing) -> int:
        # Exact for raw patches unless images stand in several shards, about right for the rest.
        images = images_of(listing.manifest)
        patches = int(np.sum(images["grid_h"].to_numpy().astype(np.int64) * images["grid_w"].to_numpy()))
        text: int = sum(chunk.nbytes for chunk in listing.rows["text"].chunks)
        tokens = text // 4 + patches // self.settings.merge_size**2
        stored = int(patches * self.settings.patch_bytes * _STORED_SHARE[self.codec])
        return stored + text + _BYTES_PER_TOKEN * tokens

    def read_rows(self, finished: Finished, listing: Listing) -> Rows:  # noqa: ARG002
        return gathered(self.fields(), finished, reasons=row_reasons, lengths=_lengths)[0]

    def summary(self, listing: Listing, rows: Rows, keep: Array) -> dict[str, Any]:  # noqa: ARG002
        # `media_rows`: the text field that names a sample's media rows.
        return {
            "clipped": 0,
            "longer": 0,
            "languages": {},
            "codec": self.codec,
            "media_rows": MEDIA_ROWS,
            "num_images": len(images_of(listing.manifest)),
        }

    def _of_text(self, images: pa.Table) -> dict[str, list[Array]]:
        """Returns how many tokens images have in a text."""
        patches = images["grid_h"].to_numpy().astype(np.int64) * images["grid_w"].to_numpy()
        return {"image_tokens": [patches // self.settings.merge_size**2]}

    def _steps(self) -> PixelSteps:
        return loaded_steps(self.recipe.patches, self.processor, self.settings)

    def _encoder(self) -> ChatEncoder:
        return loaded_chat(self.recipe.chat, self.tokenizer, self.settings.merge_size)


def _lengths(media: Shard | None, text: Shard) -> Array:
    """Returns tokens, patches and images."""
    assert media is not None
    grids, grid_offsets = media.column("image_grid_thw")
    patches = np.zeros(media.entry.rows, np.int64)
    present = np.diff(grid_offsets) > 0
    patches[present] = grids[grid_offsets[:-1][present]].astype(np.int64).prod(axis=1)
    return np.stack([text.lengths("input_ids"), of_rows(text, patches), text.lengths(MEDIA_ROWS)])
