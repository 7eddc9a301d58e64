"""What samples made on the fly share whose rows show images: their listing, and what stands in for a bad one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.preprocess.images.modality import Images
from forebay.preprocess.vision.headers import MEDIA_ROWS, conversation_rows, media_rows
from forebay.preprocess.vision.modality import Vision
from forebay.rows.kept_columns import column_of, names_of
from forebay.rows.manifest import Manifest
from forebay.store.layout import Array
from forebay.store.row_table import as_texts, sorted_categories
from forebay.train.uncached.conversations import conversations, listed_lengths
from forebay.train.uncached.source import UncachedSource


class UncachedRows(UncachedSource):
    """Rows with images, decoded and tokenised whenever they are asked for.

    fields, lengths, constants: as of a cache with codec "raw", lengths as far as they are known without decoding. What
    stands in for a bad sample is no longer than that sample, so that it fits where the bad one stood.
    """

    def __init__(self, config: Config, modality: Vision | Images, *, stored_probe: Mapping[str, str] | None) -> None:
        """Lists the samples, reads every image's header and makes every text, unless that was kept.

        stored_probe: of a cache that these samples stand beside; a difference in numerics is logged.
        Raises ConfigError or ManifestError where the config or its manifest cannot be used.
        """
        found = conversations(config, modality, recipe_key=modality.recipe.key)
        self._rows_of = modality.keeping(found.rows)
        super().__init__(
            config,
            recipe=modality.recipe,
            modality=self._rows_of,
            files=found.files,
            rows=found.rows,
            rejected=found.rejected,
            stored_probe=stored_probe,
        )
        self._manifest = Manifest(files=found.files, rows=found.rows, images=found.images)
        self._texts_of = [s.name for s in self.fields.values() if (s.role, s.group) == ("tensor", "text")]
        self._texts_of.remove(MEDIA_ROWS)
        self.lengths = {name: found.rows[name].to_numpy() for name in listed_lengths(modality)}

    @property
    def tokenizer(self) -> str | None:
        """Digest of the tokenizer, None without one."""
        found: str | None = getattr(self._rows_of.recipe.text_steps[0], "tokenizer", None)
        return found or None

    @property
    def processor(self) -> str | None:
        """Digest of the processor that makes the images."""
        return str(self._rows_of.recipe.document["vision"]["processor"])

    def categories(self, name: str) -> tuple[list[str], Array] | None:
        """Returns the values of `source`, sorted, and which one each sample has; see `SampleSource`."""
        if name == "source":
            return self._by_file("group")
        if name not in names_of(self._rows):
            return None
        column = as_texts(column_of(self._rows, name)).dictionary_encode().combine_chunks()
        return sorted_categories(column.dictionary.to_pylist(), column.indices.to_numpy())

    @abstractmethod
    def _joined(self, text: dict[str, Any], images: Sequence[Mapping[str, Array]]) -> dict[str, Any]:
        """Returns the sample of its text fields and the media rows of its images."""

    def _texts(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows_of.text_samples(conversation_rows(self._manifest, self._rows), self._names))

    def _table_fields(self) -> list[str]:
        # The media rows of a cache of images are images.
        return [spec.name for spec in self.fields.values() if (spec.role, spec.group) == ("table", "text")]

    def _row_columns(self) -> dict[str, Callable[[], Any]]:
        return super()._row_columns() | {"source": lambda: self._file_names("group")}

    def _candidates(self, index: int) -> Iterator[int]:
        """The sample itself, then those behind it, around the end, that need no more room."""
        yield index
        lengths = [length for name, length in self.lengths.items() if name != "num_images"]
        for step in range(1, len(self)):
            other = (index + step) % len(self)
            if all(length[other] <= length[index] for length in lengths):
                yield other

    def _make(self, index: int) -> dict[str, Any]:
        row = self._rows.slice(index, 1)
        text = self._good(next(iter(self._rows_of.text_samples(conversation_rows(self._manifest, row), self._names))))
        made = [
            self._good(values) for values in self._rows_of.media_samples(media_rows(self._manifest, row), self._media)
        ]
        used = text[MEDIA_ROWS].tolist()
        return self._joined({name: text[name] for name in self._texts_of}, [made[place] for place in used])

    def _good(self, values: dict[str, Any]) -> dict[str, Any]:
        if "failure" in values:
            raise SampleError(values["failure"], values["message"])
        for name, spec in self.fields.items():
            if spec.role == "tensor" and name in values:
                values[name].flags.writeable = False
        return values
