"""Images and what is said of them as a plain data set has them: decoded when asked for, given to no processor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from forebay.config.tree import Config
from forebay.preprocess.images.modality import Images
from forebay.preprocess.images.samples import loaded_text
from forebay.preprocess.vision.headers import MEDIA_ROWS, conversation_rows, media_rows
from forebay.rows.media_reader import MediaReader
from forebay.steps.recipe import ImagesRecipe, recipe_of
from forebay.steps.text.of_images import ImagesTextEncoder
from forebay.store.image.pixels import decode_image
from forebay.store.remote.raw.sources import naming_urls
from forebay.train.uncached.clips import rows_of


class Pictures:
    """The samples of a config by their ids: a data set for torch's DataLoader, whose workers may be forked."""

    def __init__(self, config: Config, ids: Sequence[str]) -> None:
        """Lists the manifest. ids: of the samples that are asked for; `self[i]` is that of `ids[i]`.

        Raises ConfigError or ManifestError where the config or its manifest cannot be used, or lacks an id.
        """
        modality = Images.of(config, cast(ImagesRecipe, recipe_of(config)))
        with naming_urls():
            manifest = modality.manifest(config)
        self._modality = modality.keeping(manifest.rows)
        self._manifest = dataclasses.replace(manifest, rows=rows_of(manifest.rows, ids, config=config))
        self._texts: list[dict[str, Any]] = []
        self._read = MediaReader(
            manifest.files,
            max_open=config.run.max_open_tars,
            max_bytes=config.source.max_sample_bytes,
            column=modality.media_column,
            as_listed=True,
        )

    @property
    def encoder(self) -> ImagesTextEncoder:
        """What writes the texts."""
        return loaded_text(self._modality.recipe.text)

    def write_texts(self) -> None:
        """Makes the fields of all texts, which say what of a sample is learnt: no plain data set has to find that."""
        rows = conversation_rows(self._manifest, self._manifest.rows)
        names = [file.name for file in self._manifest.files]
        self._texts = list(self._modality.text_samples(rows, names))

    def __len__(self) -> int:
        return len(self._manifest.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `images` of PIL, and the text and its fields as `write_texts` made them."""
        row = self._manifest.rows.slice(index, 1)
        step = self._modality.recipe.images
        different = [
            decode_image(
                self._read(place["file"], place["offset"], place["size"]),
                max_pixels=step.max_pixels,
                sample_id=place["sample_id"],
                alpha=step.alpha,
            )
            for place in media_rows(self._manifest, row).select(["sample_id", "file", "offset", "size"]).to_pylist()
        ]
        # An image that a conversation shows twice is read once.
        shown = conversation_rows(self._manifest, row)[MEDIA_ROWS][0].as_py()
        return {**self._texts[index], "images": [different[place] for place in shown]}
