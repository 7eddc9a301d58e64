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
from forebay.errors import ManifestError, SampleError
from forebay.preprocess.durations import DurationLimits
from forebay.preprocess.lines import line_of
from forebay.preprocess.modality import Line
from forebay.preprocess.sources import MediaReader, read_rows
from forebay.preprocess.sources.unused import described
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.key import digest
from forebay.store.layout import Array, FieldSpec
from forebay.store.row_table import sorted_categories, strings_digest
from forebay.train.uncached.listing import UNKNOWN, exact_lengths
from forebay.train.uncached.substitutes import MAX_SUBSTITUTES, Substitutes

logger = logging.getLogger(__name__)


class UncachedSource:
    """Reads, decodes and featurises a sample whenever it is asked for. Threads may share it.

    fields, lengths, constants: as of a cache. Lengths come from exact headers (FLAC, WAV) and are then those of the cache; else
    from the manifest, which a warning says. recipe_key: digest of the steps. tokenizer: its digest. A sample that turns out to be bad is replaced by the next one that is good, and counted
    in `failed`.
    """

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """Lists the samples and tokenises every transcript once.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        recipe = recipe_of(config)
        if not isinstance(recipe, Recipe):
            raise TypeError("a config with [vision] is read by UncachedVisionSource")
        self._recipe, self._line = recipe, line_of(config, recipe)
        self._limits = DurationLimits.of(config.source, recipe.decode)
        manifest = read_rows(config.source, cache_root=config.cache_root)
        if manifest.unused:
            logger.warning("samples: %s", described(manifest.unused))
        self._files, self._names = manifest.files, [file.name for file in manifest.files]
        self._media = MediaReader(
            manifest.files,
            max_open=config.run.max_open_tars,
            max_bytes=config.source.max_sample_bytes,
            audio_column=config.source.audio_column,
            as_listed=True,
        )
        tokens, self._rows = self._tokenise(manifest.rows)
        if not len(self._rows):
            raise ManifestError(
                f"no sample of {', '.join(config.source.manifests)} can be used; run: forebay preprocess {config.path}"
            )
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in self._line.fields()}
        self.constants = self._line.constants()
        self.tokenizer = self._recipe.tokens.tokenizer if self._recipe.tokens else None
        self.recipe_key = recipe.key
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

    def ids_digest(self) -> str:
        """Returns the digest of the samples' ids in their order."""
        return strings_digest(self._rows["sample_id"])

    def _make(self, index: int) -> dict[str, Array]:
        row = self._rows.slice(index, 1)
        values = {
            **next(iter(self._line.media_samples(row, self._media))),
            **next(iter(self._line.text_samples(row, self._names))),
        }
        if "failure" in values:
            raise SampleError(values["failure"], values["message"])
        if self._recipe.has_audio:
            self._check_duration(values, stated_s=row["stated_s"].to_numpy())
        sample = {}
        for spec in self.fields.values():
            if spec.role == "tensor":
                array = np.ascontiguousarray(values[spec.name]).reshape(-1, *spec.shape)
                array.flags.writeable = False
                sample[spec.name] = array
        return sample

    def _check_duration(self, values: Mapping[str, Any], *, stated_s: Array) -> None:
        """Raises SampleError where a build leaves a sample out for what was decoded of it."""
        if self._limits.shorter(np.array([values["num_samples"]]), stated_s)[0]:
            message = self._limits.message(values["sample_id"], int(values["num_samples"]), float(stated_s[0]))
            raise SampleError("duration_mismatch", message)

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
        samples = self._samples()
        frames = self._recipe.features.num_frames(samples)
        lengths = {"num_samples": samples, "num_frames": frames, "num_tokens": tokens}
        return {name: values.astype(np.int32) for name, values in lengths.items()}

    def _samples(self) -> Array:
        """Returns the audio samples of each row; logs for how many the manifest alone says it."""
        step = self._recipe.decode
        exact = exact_lengths(self._rows, self._files, step)
        seconds = pc.fill_null(self._rows["duration_s"], 0.0).to_numpy()
        if step.clip_s is not None:
            seconds = np.minimum(seconds, step.clip_s)
        stated = np.maximum(1, np.rint(np.nan_to_num(seconds) * step.sample_rate_hz)).astype(np.int64)
        is_stated = exact == UNKNOWN
        if is_stated.any():
            logger.warning(
                "the lengths of %d of %d samples are the manifest's or a header's estimate, since no FLAC or WAV header says "
                "them exactly: batches may differ from those of the cache, and a state saved here is then refused there",
                is_stated.sum(),
                len(exact),
            )
        return np.where(is_stated, stated, exact)


def compare_probe(line: Line, stored: Mapping[str, str] | None) -> None:
    """Logs where the steps give other values here than where a cache was built; `stored` is its probe."""
    for group in line.groups if stored is not None else ():
        now = line.probe(group)
        if stored is not None and now != stored.get(group):
            logger.warning(
                "the %s steps give other values here than where the cache was built (probe %s, stored %s)",
                group,
                now,
                stored.get(group),
            )
