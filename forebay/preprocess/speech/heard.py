"""The sound of stored samples from their sources, for those who look into a cache that keeps no waveforms."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pyarrow.compute as pc

from forebay.config.tree import Config
from forebay.errors import ForebayError
from forebay.preprocess.speech.decode import decode_audio
from forebay.rows.list_rows import list_rows
from forebay.rows.manifest import Manifest
from forebay.rows.meanings.own import meaning_of
from forebay.rows.media_reader import MediaReader
from forebay.steps.audio.waveform import Waveform
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache
from forebay.store.layout import Array
from forebay.store.lookup import SOURCES_NAME
from forebay.store.memo import Memo
from forebay.store.remote.raw.sources import localized, place_of
from forebay.store.source_files import load_sources


class Heard:
    """Decodes samples of a cache by their rows, as `audio.keep_waveform` would keep them; threads may share it."""

    def __init__(self, config: Config, cache: Cache) -> None:
        """config: of the cache. Nothing is read before a sample is asked for; then its manifest is listed."""
        self._config, self._folder = config, cache.folder
        self._lock = threading.Lock()
        self._manifest: Manifest | None = None
        self._hashes: dict[tuple[int, str], str] = {}
        self._memo = Memo.of(config)

    def __call__(self, row: Mapping[str, Any]) -> Array | None:
        """Returns `waveform` int16 [num_samples]; None where the source is not on this machine or not what was read."""
        audio = recipe_of(self._config).audio
        if audio is None or not audio.features.reads_sound:
            return None
        try:
            data = self._encoded(str(row["sample_id"]))
            if data is None:
                return None
            clip = decode_audio(data, audio.decode, sample_id=str(row["sample_id"]), want="int16")
        except (ForebayError, OSError):
            return None
        found: Array = Waveform().make([clip])[0]["waveform"]
        return found if len(found) == row.get("num_audio_samples", len(found)) else None

    def _encoded(self, sample_id: str) -> bytes | None:
        with self._lock:
            if self._manifest is None:
                stored = load_sources(self._folder / SOURCES_NAME)
                self._hashes = {(source.entry, source.name): source.xxh3_128 for source in stored}
                self._manifest = list_rows(
                    localized(self._config).source, meaning_of(self._config), cache_root=self._config.cache_root
                )
            files, rows = self._manifest.files, self._manifest.rows
            if (place := pc.index(rows["sample_id"], sample_id).as_py()) < 0:
                return None
            number, offset, size = (rows[name][place].as_py() for name in ("file", "offset", "size"))
            file = files[number]
            if place_of(file.path) is not None or not file.path.is_file():
                return None
            if self._memo.hashes([file.path]) != [self._hashes.get((file.entry, file.name))]:
                return None
        source = self._config.source
        column, most = source.columns.media, source.max_sample_bytes
        with MediaReader(files, max_open=1, max_bytes=most, column=column, as_listed=True) as read:
            return read(number, offset, size)
