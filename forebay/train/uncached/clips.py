"""Recordings and tokens as a plain data set has them: decoded when they are asked for, without features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ManifestError
from forebay.preprocess.speech.decode import decode_audio
from forebay.preprocess.speech.modality import Speech
from forebay.rows.media_reader import MediaReader
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.layout import Array
from forebay.store.remote.raw.sources import naming_urls


class Clips:
    """The clips of a config by their ids: a data set for torch's DataLoader, whose workers may be forked."""

    def __init__(self, config: Config, ids: Sequence[str]) -> None:
        """Lists the manifest. ids: of the samples that are asked for; `self[i]` is that of `ids[i]`.

        Raises ConfigError or ManifestError where the config or its manifest cannot be used, or lacks an id.
        """
        self._recipe = recipe = cast(Recipe, recipe_of(config))
        self._modality = Speech.of(config, recipe)
        with naming_urls():
            manifest = self._modality.manifest(config)
        self._rows, self._names = rows_of(manifest.rows, ids, config=config), [file.name for file in manifest.files]
        self._read = MediaReader(
            manifest.files,
            max_open=config.run.max_open_tars,
            max_bytes=config.source.max_sample_bytes,
            column=self._modality.media_column,
            as_listed=True,
        )
        self.constants = self._modality.constants()
        self.fields = {spec.name: spec for spec in self._modality.fields()}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `waveform` float32 [num_samples] and the stored fields of the text."""
        row = self._rows.slice(index, 1)
        place = row.select(["sample_id", "file", "offset", "size"]).to_pylist()[0]
        data = self._read(place["file"], place["offset"], place["size"])
        waveform: Array = decode_audio(data, self._recipe.decode, sample_id=place["sample_id"])
        text = next(iter(self._modality.text_samples(row, self._names)))
        names = () if self._recipe.tokens is None else [spec.name for spec in self._recipe.tokens.fields()]
        return {"waveform": waveform, **{name: text[name] for name in names}}


def rows_of(rows: pa.Table, ids: Sequence[str], *, config: Config) -> pa.Table:
    """Returns the listed rows with these ids, in their order. Raises ManifestError for an id that is not listed."""
    places = {sample_id: place for place, sample_id in enumerate(rows["sample_id"].to_pylist())}
    for sample_id in ids:
        if sample_id not in places:
            raise ManifestError(
                f"sample {sample_id!r} of the cache is not in {', '.join(config.source.manifests)}; "
                f"run: forebay preprocess {config.path}"
            )
    return rows.take(pa.array(np.array([places[sample_id] for sample_id in ids], np.int64)))
