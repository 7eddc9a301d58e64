"""Images with the texts of their rows, as a model of both is given them: each image of a row is a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import xxhash

from forebay.preprocess.group import Items, Read, Values
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.text_inputs import TextInputs
from forebay.rows.manifest import Manifest
from forebay.store.layout import Group
from forebay.store.source_files import SourceFile


@dataclass(frozen=True, slots=True)
class PairInputs:
    """The images of rows, each with the row's text. images, texts: prepare the two halves of a pair."""

    images: ImageItems
    texts: TextInputs
    name: ClassVar[Group] = "image"
    unit: ClassVar[str] = "pair"
    lists: ClassVar[str | None] = ImageItems.lists

    @property
    def column(self) -> str:
        """See `ItemGroup`."""
        return self.images.column

    @property
    def max_sample_bytes(self) -> int:
        """See `ItemGroup`."""
        return self.images.max_sample_bytes

    def items(self, manifest: Manifest) -> Items:
        """Returns a pair for every image of every row, in the order of the rows."""
        images = self.images.items(manifest)
        offsets, places = images.of_rows(0, len(manifest.rows))
        owners = pa.array(np.repeat(np.arange(len(manifest.rows)), np.diff(offsets)))
        table = images.table.take(pa.array(places)).append_column(
            "text", self.texts.of_rows(manifest.rows)[1].take(owners)
        )
        group = manifest.rows["group"].take(owners).to_numpy()
        return Items(table, group, len(table), offsets, np.arange(len(table)))

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:
        """Returns what the key of a shard says of its pairs."""
        return {**self.images.content(items, hashes), **self.texts.content(items, hashes)}

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        """Returns what is needed to make pairs; what one is called, its hash and its text among it."""
        rows = self.images.task_rows(items, files)
        pairs = zip(rows["hash"].to_pylist(), items["text"].to_pylist(), strict=True)
        keys = (f"{image}\0{text or ''}".encode("utf-8", "surrogateescape") for image, text in pairs)
        hashes = pa.array(list(map(xxhash.xxh3_128_hexdigest, keys)))
        rows = rows.set_column(rows.column_names.index("hash"), "hash", hashes)
        return rows.append_column("text", items["text"])

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        """Yields what both halves of each pair become; of one that fails, why."""
        return self._together(self.images.samples(rows, read), self.texts.samples(rows, read))

    def probed(self) -> Iterator[Values]:
        """Yields what built-in images and texts become."""
        return self._together(self.images.probed(), self.texts.probed())

    @staticmethod
    def _together(images: Iterator[Values], texts: Iterator[Values]) -> Iterator[Values]:
        for image, text in zip(images, texts, strict=False):  # of the built-in ones there are not as many
            yield next((half for half in (image, text) if "failure" in half), {**image, **text})

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the arrays of the one pair of a sample."""
        return self.images.joined(self.texts.joined(sample, items), items)
