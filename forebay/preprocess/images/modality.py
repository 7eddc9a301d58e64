"""Images: images as their processor gives them, and conversations, captions, labels or nothing beside them."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.preprocess.cut import Cut
from forebay.preprocess.images.probe import mean_bytes, processor_probe, text_probe
from forebay.preprocess.images.samples import (
    array_fields,
    image_samples,
    loaded_processor,
    loaded_text,
    text_samples,
)
from forebay.preprocess.modality import Finished, Listing, Read, Rows, Values, gathered
from forebay.preprocess.vision.cut import name_image_cuts
from forebay.preprocess.vision.headers import MEDIA_ROWS, images_of, media_task_rows, text_task_rows
from forebay.preprocess.vision.media import of_rows, row_reasons, used_by
from forebay.preprocess.vision.samples import IMAGE_HASH, ROW_FIELDS
from forebay.rows.kept_columns import fields_of
from forebay.rows.list_images import read_conversations
from forebay.rows.manifest import Manifest
from forebay.rows.meanings.image_class import class_doubts, labels_of
from forebay.steps.form import BatchForm
from forebay.steps.recipe import ImagesRecipe
from forebay.steps.text.label import Label
from forebay.store.image.arrays import FEATURES, ArrayField, shape_name
from forebay.store.image.codec import Codec
from forebay.store.layout import GROUPS, Array, FieldSpec, Group
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.raw.sources import localized
from forebay.store.shard import Shard
from forebay.store.source_files import SourceFile
from forebay.task_map import Map

logger = logging.getLogger(__name__)

TOKENS = "input_ids"
"""The field of text that samples are counted by."""

_STORED_SHARE: Mapping[Codec, float] = {"raw": 1.0, "zstd": 0.6}
"""Bytes of a stored photo over its raw values, about."""

_BYTES_PER_TOKEN = 5


@dataclass(frozen=True, slots=True)
class Images:
    """A config's steps over images and what stands beside them: a `Modality`.

    kept: fields of `source.keep_columns`. forms: of the images and of the text, as JSON, where a worker found them;
    empty: they are found here, which loads the processor.
    """

    recipe: ImagesRecipe
    codec: Codec
    media_column: str = "image"
    kept: tuple[FieldSpec, ...] = ()
    forms: str = ""
    media_unit = "image"
    row_unit = "samples"

    @classmethod
    def of(cls, config: Config, recipe: ImagesRecipe) -> Images:
        """Returns the modality of a config."""
        if config.vision is None:
            raise ValueError("a recipe of images comes from a config with [vision]")
        return cls(recipe, config.vision.codec, config.source.columns.image)

    def with_codec(self, codec: Codec) -> Images:
        """Returns the modality that stores images in another way."""
        return replace(self, codec=codec)

    @property
    def form(self) -> BatchForm:
        """The declared form of what the processor gives of an image."""
        return _known_forms(self.forms)[0] if self.forms else loaded_processor(self.recipe.images).form

    @property
    def max_sample_bytes(self) -> int:
        return self.recipe.images.max_sample_bytes

    @property
    def groups(self) -> tuple[Group, ...]:
        """Both, also where no row has a text."""
        return GROUPS

    @property
    def read_values(self) -> frozenset[str]:
        """Whose images are whose, and how large they are."""
        counted = _counted(self.form, self.codec)
        shapes = [shape_name(counted.name)] if counted is not None and counted.has_shape else []
        return frozenset((MEDIA_ROWS, *shapes))

    @property
    def length_names(self) -> tuple[str, ...]:
        """Tokens, 0 without text, images, and of processors that cut them the patches or tiles of all images."""
        names: tuple[str, ...] = ("num_tokens", "num_images")
        return names if _counted(self.form, self.codec) is None else (*names, "num_patches")

    def manifest(self, config: Config, *, map_: Map = map, is_hashed: bool = False) -> Manifest:  # noqa: ARG002  it reads all
        forget()
        source = localized(config).source
        manifest = read_conversations(source, cache_root=config.cache_root, map_=map_, reads=config.reads)
        for doubt in class_doubts(config.source, manifest.rows) if config.reads == "labels" else ():
            logger.warning("classes: %s", doubt)
        return manifest

    def keeping(self, rows: pa.Table) -> Images:
        # Which classes there are, the listing says.
        text = self.recipe.text
        known = text.of_source(labels_of(rows)) if isinstance(text, Label) else text
        return replace(self, recipe=replace(self.recipe, text=known), kept=fields_of(rows))

    def measured(self, constants: Mapping[str, Any]) -> Images:
        known = replace(self, forms=json.dumps([constants["form"], constants.get("text_form")]))
        if known.form.promise.kind == "alone":
            logger.warning("batches of %s are %s", known.form.made_by, known.form.promise)
        return known

    def fields(self) -> tuple[FieldSpec, ...]:
        media = [spec for field in array_fields(self.form, self.codec) for spec in field.specs()]
        fields = (*media, IMAGE_HASH, *self._text_fields, *ROW_FIELDS, *self.kept)
        names = [field.name for field in fields]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"{self.form.made_by} gives {twice[0]!r}, and the text or a kept column of the samples has that name "
                "too; leave the column out of source.keep_columns, or choose another text.prompt",
                code="FB125",
            )
        return fields

    def shard_rows(self, rows_per_shard: int) -> int:
        return rows_per_shard

    def cuts(self, listing: Listing, *, probe: Mapping[Group, str], rows_per_shard: int) -> Iterator[Cut]:
        return name_image_cuts(
            self.recipe,
            listing,
            codec=self.codec,
            of_text=_of_text,
            probe=probe,
            rows_per_shard=rows_per_shard,
        )

    def task_rows(self, listing: Listing, cut: Cut, group: Group) -> tuple[tuple[SourceFile, ...], pa.Table]:
        # A media row is an image, a text row a sample.
        make = media_task_rows if group == "media" else text_task_rows
        return make(listing, cut.start, cut.stop)

    def media_samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        # By the form that stands in the cache, whatever this worker would find.
        form = self.form if self.forms else None
        return image_samples(loaded_processor(self.recipe.images, form), rows, read, codec=self.codec)

    def text_samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        return text_samples(rows, names, self.recipe.text, loaded_text(self.recipe.text))

    def used_by(self, listing: Listing, rows: pa.Table, *, group: Group, position: int) -> tuple[str, list[str]]:
        return used_by(listing, rows, group=group, position=position)

    def constants(self) -> dict[str, Any]:
        return {"features": FEATURES, "form": self.form.to_json(), **loaded_text(self.recipe.text).constants}

    def probe(self, group: Group) -> str:
        if group == "media":
            return processor_probe(loaded_processor(self.recipe.images))
        return text_probe(loaded_text(self.recipe.text))

    def estimate_bytes(self, listing: Listing) -> int:
        # Of arrays of one shape, raw, exact unless images stand in several shards.
        images = len(images_of(listing.manifest))
        stored = int(images * mean_bytes(loaded_processor(self.recipe.images)) * _STORED_SHARE[self.codec])
        text: int = sum(chunk.nbytes for chunk in listing.rows["text"].chunks)
        return stored + text + (_BYTES_PER_TOKEN * text // 4 if self._has_tokens else 0)

    def read_rows(self, finished: Finished, listing: Listing) -> Rows:  # noqa: ARG002
        lengths = partial(_lengths, has_tokens=self._has_tokens, counted=_counted(self.form, self.codec))
        count = len(self.length_names)
        return gathered(self.fields(), finished, reasons=row_reasons, lengths=lengths, num_lengths=count)[0]

    def summary(self, listing: Listing, rows: Rows, keep: Array) -> dict[str, Any]:  # noqa: ARG002
        return {
            "clipped": 0,
            "longer": 0,
            "languages": {},
            "codec": self.codec,
            "media_rows": MEDIA_ROWS,
            "num_images": len(images_of(listing.manifest)),
        }

    @property
    def _text_fields(self) -> tuple[FieldSpec, ...]:
        text = self.recipe.text
        return text.fields_of(_known_forms(self.forms)[1]) if self.forms else text.fields()

    @property
    def _has_tokens(self) -> bool:
        return any(field.name == TOKENS for field in self._text_fields)


@functools.lru_cache(maxsize=4)
def _known_forms(forms: str) -> tuple[BatchForm, BatchForm | None]:
    images, text = json.loads(forms)
    return BatchForm.from_json(images), None if text is None else BatchForm.from_json(text)


def _of_text(images: pa.Table) -> dict[str, list[Array]]:
    """Returns what texts depend on of images: how large they are."""
    return {"image_sizes": [images[name].to_numpy().astype(np.int64) for name in ("width", "height")]}


def _counted(form: BatchForm, codec: Codec) -> ArrayField | None:
    """Returns the field whose first axis counts the patches or tiles of an image; None where images are not cut."""
    pixels = form.pixels
    if pixels.grows != (0,) or pixels.join == "stack":
        return None
    return next(field for field in array_fields(form, codec) if field.name == pixels.name)


def _lengths(media: Shard | None, text: Shard, *, has_tokens: bool, counted: ArrayField | None) -> Array:
    """Returns tokens, images, and where images are cut, their patches."""
    assert media is not None
    images = text.lengths(MEDIA_ROWS)
    found = [text.lengths(TOKENS) if has_tokens else np.zeros(len(images), np.int64), images]
    if counted is not None:
        found.append(of_rows(text, _patches(media, counted)))
    return np.stack(found)


def _patches(media: Shard, counted: ArrayField) -> Array:
    """Returns the patches of every media row, 0 of an image that failed."""
    if not counted.has_shape:
        return media.lengths(counted.name)
    values, offsets = media.column(shape_name(counted.name))
    patches = np.zeros(media.entry.rows, np.int64)
    present = np.diff(offsets) > 0
    patches[present] = values[offsets[:-1][present]]
    return patches
