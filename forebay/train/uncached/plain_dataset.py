"""Samples as a plain data set has them: items decoded when they are asked for, texts with their fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import ManifestError
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.steps.recipe import recipe_of
from forebay.steps.text.row_encoder import RowEncoder
from forebay.store.layout import TEXT
from forebay.store.remote.raw.raw_sources import naming_urls


class PlainSamples:
    """The samples of a config by their ids: a data set for torch's DataLoader, whose workers may be forked."""

    def __init__(self, config: Config, ids: Sequence[str]) -> None:
        """Lists the manifest. ids: of the samples that are asked for; `self[i]` is that of `ids[i]`.

        Raises ConfigError or ManifestError where the config or its manifest cannot be used, or lacks an id.
        """
        groups = Groups.of(config, recipe_of(config))
        with naming_urls():
            manifest = listed(config, groups)
        self.groups = groups.keeping(manifest.rows)
        manifest = dataclasses.replace(manifest, rows=_rows_of(manifest.rows, ids, config=config))
        self._listing = Listing(groups=self.groups, manifest=manifest, key="")
        self._names, self._items = [file.name for file in manifest.files], self._listing.items
        self._texts: list[dict[str, Any]] = []
        self._readers = self._listing.readers(config)
        self.constants = self.groups.constants()
        self.fields = {spec.name: spec for spec in self.groups.fields()}

    @property
    def encoder(self) -> RowEncoder:
        """The writer of the texts."""
        return self.groups.text.encoder

    def write_texts(self) -> None:
        """Makes the fields of all texts, which say what of a sample is learnt: no plain data set has to find that."""
        self._texts = self._made(0, len(self))

    def __len__(self) -> int:
        return len(self._listing.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns the decoded items of each group, by `ItemGroup.decoded_name`, and the text and its fields."""
        text = self._texts[index] if self._texts else self._made(index, index + 1)[0]
        names = {spec.name for spec in self.fields.values() if (spec.group, spec.role) == (TEXT, "tensor")}
        sample: dict[str, Any] = {name: value for name, value in text.items() if name in names or name == "text"}
        for group in self.groups.items:
            items = self._items[group.name]
            _, places = items.of_rows(index, index + 1)
            used, inverse = np.unique(places, return_inverse=True)
            rows = group.task_rows(items.table.take(pa.array(used)), self._listing.files)
            read = self._readers[group.name]
            # What a row shows twice is read once.
            made = [
                group.decoded(read(row["file"], row["offset"], row["size"]), sample_id=row["sample_id"])
                for row in rows.select(["sample_id", "file", "offset", "size"]).to_pylist()
            ]
            shown = [made[place] for place in inverse.reshape(-1).tolist()]
            sample[group.decoded_name] = shown[0] if group.lists is None else shown
        return sample

    def _made(self, start: int, stop: int) -> list[dict[str, Any]]:
        rows = self.groups.text_rows(self._listing, start, stop)
        return list(self.groups.text.samples(rows, self._names))


def _rows_of(rows: pa.Table, ids: Sequence[str], *, config: Config) -> pa.Table:
    """Returns the listed rows with these ids, in their order. Raises ManifestError for an id that is not listed."""
    places = {sample_id: place for place, sample_id in enumerate(rows["sample_id"].to_pylist())}
    for sample_id in ids:
        if sample_id not in places:
            raise ManifestError(
                f"sample {sample_id!r} of the cache is not in {', '.join(config.source.manifests)}; "
                f"run: forebay preprocess {config.path}"
            )
    return rows.take(pa.array(np.array([places[sample_id] for sample_id in ids], np.int64)))
