"""Samples made on the fly by the very steps of a build: the fallback where there is no cache, bit for bit the same values.

The only module of this room that reaches `preprocess`.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from forebay.config import Config
from forebay.errors import ManifestError, SampleError
from forebay.preprocess.features import num_frames
from forebay.preprocess.probe import probe
from forebay.preprocess.samples import constants, media_samples, sample_fields, text_encoder, text_samples
from forebay.preprocess.sources import MediaReader, read_rows
from forebay.store.canonical import digest
from forebay.store.key import recipe_key
from forebay.store.layout import FieldSpec
from forebay.store.row_table import sorted_categories

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_MAX_SUBSTITUTES = 100


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
        self._recipe = recipe.recipe
        tokenizer = config.text.tokenizer if config.text else None
        self._encoder = text_encoder(self._recipe, tokenizer)
        manifest = read_rows(config.source, cache_root=config.cache_root)
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
        self.fields: Mapping[str, FieldSpec] = {spec.name: spec for spec in sample_fields(self._recipe)}
        self.constants = constants(config, self._recipe, self._encoder)
        self.tokenizer = self._recipe.tokens.tokenizer if self._recipe.tokens else None
        self.key = digest({"uncached": recipe.key, "rows": self._rows["sample_id"].to_pylist()})
        self.lengths = self._measure(tokens)
        self.failed: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._compare_probe(tokenizer, stored_probe)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Array]:
        """Returns the tensor fields of one sample, read-only.

        Raises SampleError where a hundred samples in a row are bad: then it is not the samples.
        """
        for step in range(_MAX_SUBSTITUTES):
            try:
                return self._make((index + step) % len(self))
            except SampleError as err:
                with self._lock:
                    self.failed[err.reason] += 1
                logger.warning("reading the next sample instead, %s: %s", err.reason, err)
                last = err
        raise last

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
            **next(iter(media_samples(self._recipe, row, self._media))),
            **next(iter(text_samples(row, self._names, self._encoder))),
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
        if self._encoder is None:
            return np.zeros(len(rows), np.int64), rows
        made = text_samples(rows, self._names, self._encoder)
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

    def _compare_probe(self, tokenizer: str | None, stored: Mapping[str, str] | None) -> None:
        if stored is None:
            return
        now = probe(self._recipe, tokenizer)
        for group in ("media", "text"):
            if now[group] != stored.get(group):
                logger.warning(
                    "the %s steps give other values here than where the cache was built (probe %s, stored %s)",
                    group,
                    now[group],
                    stored.get(group),
                )
