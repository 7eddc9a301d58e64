"""Recordings and texts made into samples on the fly, and how long clips will be once they are decoded.

Lengths come from headers that say them to the sample: a manifest's durations are often rounded (two decimals in a file
list), and then batches could differ from those of the cache, whose lengths are those of the decoded audio.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.preprocess.speech.modality import Speech
from forebay.preprocess.speech.samples import DETECTED_FIELDS
from forebay.progress import Progress
from forebay.rows.kept_columns import column_of, names_of
from forebay.rows.manifest import WHOLE_FILE, Manifest, described
from forebay.rows.media_reader import open_parts, sparse_files
from forebay.rows.readers.python_inputs import list_inputs
from forebay.steps.audio.waveform import Decode
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.layout import Array
from forebay.store.memo import SIZE
from forebay.store.remote.raw.sources import source_stat
from forebay.store.row_table import as_texts, sorted_categories
from forebay.store.sound_headers import AudioInfo, parsed_header
from forebay.store.source_files import SourceFile
from forebay.train.uncached.source import Rejected, UncachedSource

logger = logging.getLogger(__name__)

UNKNOWN = -1

_HEADERS_A_PIECE = 512
"""Rows that a thread does at once."""

_SAID = pa.schema(
    {
        "language": pa.large_string(),
        **{field.name: pa.large_string() if field.dtype == "str" else pa.float64() for field in DETECTED_FIELDS},
    }
)
"""The columns of rows whose languages are detected."""

_THREADS = 8
"""Most of them wait if the files lie on a network."""


class UncachedSpeech(UncachedSource):
    """Recordings, decoded and featurised whenever they are asked for; texts, tokenised.

    fields, lengths, constants: as of a cache. Lengths come from exact headers (FLAC, WAV) and are then those of the
    cache; else from the manifest, which a warning says.
    """

    def __init__(self, config: Config, *, stored_probe: Mapping[str, str] | None = None) -> None:
        """Lists the samples and tokenises every transcript once.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        self._recipe = recipe = cast(Recipe, recipe_of(config))
        recipe.check()
        list_inputs(config)
        self._modality = Speech.of(config, recipe)
        self._said: pa.Table | None = None
        manifest = self._modality.manifest(config)
        self._modality = self._modality.keeping(manifest.rows)
        if manifest.unused:
            logger.warning("samples: %s", described(manifest.unused))
        tokens, rows, rejected = self._tokenise(manifest)
        super().__init__(
            config,
            recipe=recipe,
            modality=self._modality,
            files=manifest.files,
            rows=rows,
            rejected=rejected,
            stored_probe=stored_probe,
        )
        self.lengths = self._measure(tokens)

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer, None without text."""
        return self._recipe.tokens.tokenizer if self._recipe.tokens else None

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the values of `language` or `source`, sorted, and which one each sample has; see `SampleSource`."""
        if name == "source":
            return self._by_file("file")
        if self._said is not None and name in self._said.column_names:
            found = self._said[name]
        elif name in names_of(self._rows):
            found = column_of(self._rows, name)
        elif name in self._rows.column_names:
            found = self._rows[name]
        else:
            return None
        column = as_texts(found).dictionary_encode().combine_chunks()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())

    def _texts(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._modality.text_samples(self._rows, self._names))

    def _row_columns(self) -> dict[str, Callable[[], Any]]:
        made = super()._row_columns()
        # A cache has no null here.
        made |= {name: partial(self._filled, name) for name in ("language", "prompt")}
        if self._said is not None:
            made |= {name: partial(self._said.column, name) for name in self._said.column_names}
        return made | {"source": lambda: self._file_names("file")}

    def _counted(self) -> Mapping[str, Array]:
        if not self._recipe.has_audio:
            return {"num_tokens": self.lengths["num_tokens"]}
        seconds = np.asarray(self.lengths["num_audio_samples"]) / self._recipe.decode.sample_rate_hz
        return {"duration_s": seconds, **self.lengths}

    def _filled(self, name: str) -> pa.ChunkedArray:
        return pc.fill_null(self._rows[name], "")

    def _candidates(self, index: int) -> Iterator[int]:
        return ((index + step) % len(self) for step in range(len(self)))

    def _make(self, index: int) -> dict[str, Array]:
        row = self._rows.slice(index, 1)
        values = {
            **next(iter(self._modality.media_samples(row, self._media))),
            **next(iter(self._modality.text_samples(row, self._names))),
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
        if self._modality.limits.shorter(np.array([values["num_audio_samples"]]), stated_s)[0]:
            message = self._modality.limits.message(
                values["sample_id"], int(values["num_audio_samples"]), float(stated_s[0])
            )
            raise SampleError("duration_mismatch", message)

    def _tokenise(self, manifest: Manifest) -> tuple[Array, pa.Table, Rejected]:
        """Returns token counts and rows of the texts that can be used, and the others: a build leaves those out too."""
        rows, rejected = manifest.rows, Rejected.of(manifest)
        if self._recipe.tokens is None:
            return np.zeros(len(rows), np.int64), rows, rejected
        made = self._modality.text_samples(rows, [file.name for file in manifest.files])
        bar = Progress(len(rows), unit="text", desc="text").over(made)
        counts = np.full(len(rows), -1, np.int64)
        said: list[Mapping[str, Any]] = []
        for place, values in enumerate(bar):
            if "failure" in values:
                rejected.add(values["failure"])
            else:
                counts[place] = len(values["input_ids"])
                if self._recipe.tokens.text_line().detects:
                    said.append({name: values[name] for name in _SAID.names})
        if said:
            self._said = pa.Table.from_pylist(said, schema=_SAID)
        return counts[counts >= 0], rows.filter(pa.array(counts >= 0)), rejected

    def _measure(self, tokens: Array) -> dict[str, Array]:
        if not self._recipe.has_audio:
            nothing = np.zeros(len(tokens), np.int32)
            return {"num_audio_samples": nothing, "num_frames": nothing, "num_tokens": tokens.astype(np.int32)}
        samples = self._samples()
        frames = self._recipe.features.num_frames(samples)
        lengths = {"num_audio_samples": samples, "num_frames": frames, "num_tokens": tokens}
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
        if is_stated.any() and self._recipe.features.reads_sound:  # else the listing counted frames
            logger.warning(
                "the lengths of %d of %d samples are the manifest's or a header's estimate, since no FLAC or WAV "
                "header says them exactly: batches may differ from those of the cache, and a state saved here is then "
                "refused there",
                is_stated.sum(),
                len(exact),
            )
        return np.where(is_stated, stated, exact)


def exact_lengths(rows: pa.Table, files: Sequence[SourceFile], step: Decode) -> Array:
    """Returns the audio samples of every row after decoding, int64 [num_rows]; UNKNOWN where no header says it exactly.

    rows, files: as in `Manifest`. FLAC and RIFF WAVE say it, in a read of 4 KiB a clip, with a progress bar. Clips
    inside of a table (`hf`) are UNKNOWN: reading them is reading everything. So is what cannot be opened: it will fail
    when it is read.
    """
    columns = [rows[name].to_numpy() for name in ("file", "offset", "size")]
    pieces = [
        [column[start : start + _HEADERS_A_PIECE].tolist() for column in columns]
        for start in range(0, len(rows), _HEADERS_A_PIECE)
    ]
    found = np.full(len(rows), UNKNOWN, np.int64)
    sparse = sparse_files(rows, files)
    bar = Progress(len(rows), unit="clip", desc="audio headers")
    with ThreadPoolExecutor(_THREADS) as threads, bar:
        made = threads.map(lambda piece: list(_lengths(piece, files, step, sparse)), pieces)
        for number, lengths in enumerate(made):
            found[number * _HEADERS_A_PIECE : number * _HEADERS_A_PIECE + len(lengths)] = lengths
            bar.update(len(lengths))
    return found


def _lengths(
    piece: list[list[int]], files: Sequence[SourceFile], step: Decode, sparse: frozenset[int]
) -> Iterator[int]:
    for number, places in groupby(zip(*piece, strict=True), key=lambda place: place[0]):
        file = files[number]
        with ExitStack() as stack:
            read: Callable[[int, int], bytes] | None = None
            for _, offset, size in places:
                if size == WHOLE_FILE and file.listed:
                    yield UNKNOWN
                    continue
                try:
                    if read is None:
                        read = stack.enter_context(open_parts(str(file.path), is_sparse=number in sparse))
                    if size == WHOLE_FILE:
                        size = source_stat(file.path)[SIZE]
                    yield _length(read, offset, size, step)
                except OSError:
                    yield UNKNOWN


def _length(read: Callable[[int, int], bytes], offset: int, size: int, step: Decode) -> int:
    info = parsed_header(lambda start, count: read(max(0, min(count, size - start)), offset + start), size)
    return UNKNOWN if info is None else decoded_length(info, step)


def decoded_length(info: AudioInfo, step: Decode) -> int:
    """Returns the samples of a clip at the step's rate, no more than it clips to; UNKNOWN if the header has none."""
    if info.num_samples <= 0 or info.sample_rate_hz <= 0:
        return UNKNOWN
    # soxr rounds half up.
    length = (2 * info.num_samples * step.sample_rate_hz + info.sample_rate_hz) // (2 * info.sample_rate_hz)
    return max(1, length if step.clip_s is None else min(length, round(step.clip_s * step.sample_rate_hz)))
