"""Recordings made into samples on the fly."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from forebay.config import Config
from forebay.config.recipe import Recipe
from forebay.errors import ManifestError, SampleError
from forebay.preprocess.features import num_frames
from forebay.preprocess.line import Line
from forebay.preprocess.lines import line_of
from forebay.preprocess.sources import MediaReader, read_rows
from forebay.preprocess.sources.unused import described
from forebay.store.canonical import digest
from forebay.store.key import recipe_key
from forebay.store.layout import GROUPS, FieldSpec
from forebay.store.row_table import sorted_categories
from forebay.train.uncached.substitutes import MAX_SUBSTITUTES, Substitutes

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class UncachedSource:
    """Reads, decodes and featurises a sample whenever it is asked for. Threads may share it.

    fields, lengths, constants: as of a cache; lengths come from manifest and headers, and are those of the cache where these
    are exact. tokenizer: its digest. A sample that turns out to be bad is replaced by the next one that is good, and counted
    in `failed`.
    """

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """Lists the samples and tokenises every transcript once.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        recipe = recipe_key(config)
        if not isinstance(recipe.recipe, Recipe):
            raise TypeError("a config with [vision] is read by UncachedVisionSource")
        self._recipe, self._line = recipe.recipe, line_of(config, recipe.recipe)
        manifest = read_rows(config.source, cache_root=config.cache_root)
        if manifest.unused:
            logger.warning("samples: %s", described(manifest.unused))
        self._names = [file.name for file in manifest.files]
        self._media = MediaReader(
            manifest.files,
            max_open=config.run.max_open_tars,
            max_bytes=config.source.max_sample_bytes,
            audio_column=config.source.audio_column,
        )
        tokens, self._rows = self._tokenise(manifest.rows)
        if not len(self._rows):
            raise ManifestError(
                f"no sample of {', '.join(config.source.manifests)} can be used; run: forebay preprocess {config.path}"
            )
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in self._line.fields()}
        self.constants = self._line.constants()
        self.tokenizer = self._recipe.tokens.tokenizer if self._recipe.tokens else None
        self.key = digest({"uncached": recipe.key, "rows": self._rows["sample_id"].to_pylist()})
        self.lengths = self._measure(tokens)
        self._substitutes = Substitutes()
        compare_probe(self._line, stored_probe)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Array]:
        """Returns the tensor fields of one sample, read-only.

        Raises SampleError where a hundred samples in a row are bad: then it is not the samples.
        """
        return self._substitutes.first_good(self._make, ((index + step) % len(self) for step in range(MAX_SUBSTITUTES)))

    @property
    def failed(self) -> Counter[str]:
        """Bad samples met so far, by reason."""
        return self._substitutes.failed

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the different values of `language` or `source`, sorted, and which one each sample has; see `Cache`."""
        if name == "source":
            return sorted_categories(self._names, self._rows["file"].to_numpy())
        if name not in self._rows.column_names:
            return None
        column = pc.fill_null(self._rows[name], "").dictionary_encode().combine_chunks()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())

    def sample_id(self, index: int) -> str:
        """Returns the id of one sample."""
        return str(self._rows["sample_id"][index].as_py())

    def _make(self, index: int) -> dict[str, Array]:
        row = self._rows.slice(index, 1)
        values = {
            **next(iter(self._line.media_samples(row, self._media))),
            **next(iter(self._line.text_samples(row, self._names))),
        }
        if "failure" in values:
            raise SampleError(values["failure"], values["message"])
        sample = {}
        for spec in self.fields.values():
            if spec.role == "tensor":
                array = np.ascontiguousarray(values[spec.name]).reshape(-1, *spec.shape)
                array.flags.writeable = False
                sample[spec.name] = array
        return sample

    def _tokenise(self, rows: pa.Table) -> tuple[Array, pa.Table]:
        """Returns the token counts, and the rows, of those whose text can be used: a build would leave out the others too."""
        if self._recipe.tokens is None:
            return np.zeros(len(rows), np.int64), rows
        made = self._line.text_samples(rows, self._names)
        bar: Iterable[dict[str, Any]] = tqdm(made, total=len(rows), desc="tokenise", file=sys.stderr, disable=None)
        counts = np.array([len(values["input_ids"]) if "failure" not in values else -1 for values in bar], np.int64)
        return counts[counts >= 0], rows.filter(pa.array(counts >= 0))

    def _measure(self, tokens: Array) -> dict[str, Array]:
        if not self._recipe.has_audio:
            nothing = np.zeros(len(tokens), np.int32)
            return {"num_samples": nothing, "num_frames": nothing, "num_tokens": tokens.astype(np.int32)}
        rate = self._recipe.decode.sample_rate_hz
        seconds = pc.fill_null(self._rows["duration_s"], 0.0).to_numpy()
        if self._recipe.decode.clip_s is not None:
            seconds = np.minimum(seconds, self._recipe.decode.clip_s)
        samples = np.maximum(1, np.rint(np.nan_to_num(seconds) * rate)).astype(np.int64)
        frames = np.asarray(num_frames(self._recipe.features, samples))
        lengths = {"num_samples": samples, "num_frames": frames, "num_tokens": tokens}
        return {name: values.astype(np.int32) for name, values in lengths.items()}


def compare_probe(line: Line, stored: Mapping[str, str] | None) -> None:
    """Logs where the steps give other values here than where a cache was built; `stored` is its probe."""
    for group in GROUPS if stored is not None else ():
        now = line.probe(group)
        if stored is not None and now != stored.get(group):
            logger.warning(
                "the %s steps give other values here than where the cache was built (probe %s, stored %s)",
                group,
                now,
                stored.get(group),
            )
