"""The group `image`: images that rows list, each content stored once a source file, as patches or as arrays."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.preprocess.group import Coder, Items, Read, Values, columns_digest, item_names, values_digest
from forebay.preprocess.image_form import ArrayForm, PatchForm, form_of
from forebay.preprocess.workspace import Failure
from forebay.rows.listed_frames import frame_places
from forebay.rows.manifest import LISTS, Manifest
from forebay.steps.form import BatchForm
from forebay.steps.image.image_section import ImageGroup
from forebay.steps.image.still_settings import Still
from forebay.store.image.codec import Codec, decode_image, frame_file
from forebay.store.layout import Array, FieldSpec, Group
from forebay.store.shard import Shard
from forebay.store.source_files import SourceFile
from forebay.task_map import mark

logger = logging.getLogger(__name__)
IMAGE_HASH = FieldSpec(name="image_hash", dtype="str", role="table")
_STORED_SHARE: Mapping[Codec, float] = {"raw": 1.0, "zstd": 0.6, "webp": 0.3, "source": 0.1}
"""Bytes of a stored photo over its raw values, about."""


@dataclass(frozen=True, slots=True)
class ImageItems:
    """Images of a config: an `ItemGroup`. Rows list them."""

    steps: ImageGroup
    form: PatchForm | ArrayForm
    column: str = "image"
    tells: ClassVar[bool] = True
    name: ClassVar[Group] = "image"
    unit: ClassVar[str] = "image"
    lists: ClassVar[str | None] = "images"
    decoded_name: ClassVar[str] = "images"

    @classmethod
    def of(cls, config: Config, steps: ImageGroup) -> Self:
        """Returns the group of a config. Raises ConfigError where the processor does not cut images as it is to."""
        return cls(steps, form_of(steps, steps.codec), config.source.columns.image)

    def under(self, codec: Codec) -> Self:
        return replace(self, form=replace(self.form, codec=codec))

    @property
    def merge_size(self) -> int | None:
        return self.form.merge_size

    def probe_told(self, place: int) -> Any:
        return self.form.told(self.form.probe_values[place])

    def listed_lengths(self, items: pa.Table, files: Sequence[SourceFile]) -> dict[str, Array]:  # noqa: ARG002
        return {"num_images": np.ones(len(items), np.int64), **self.form.listed_lengths(items)}

    def check(self, values: Mapping[str, Any], row: pa.Table) -> None:
        """Takes every image that could be made."""

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.form.stored().sample(sample, items)

    def decoded(self, data: bytes, *, sample_id: str) -> Any:
        step = self.steps.step
        return decode_image(data, sample_id=sample_id, **step.decoding)

    @property
    def codec(self) -> str:
        return self.form.codec

    @property
    def max_sample_bytes(self) -> int:
        return self.steps.step.max_sample_bytes

    @property
    def length_names(self) -> tuple[str, ...]:
        """Images, and where they are cut, the patches or tiles of all of them."""
        return ("num_images", *self.form.length_names)

    @property
    def read_values(self) -> frozenset[str]:
        return self.form.read_values

    def items(self, manifest: Manifest) -> Items:
        return Items.listed(manifest.rows, LISTS[self.name], manifest.items[self.name])

    def checked(self, manifest: Manifest) -> Manifest:
        return self.form.of_manifest(manifest)

    def measured(self, constants: Mapping[str, Any]) -> Self:
        if not isinstance(self.form, ArrayForm):  # its settings say it all
            return self
        known = replace(self, form=replace(self.form, known=json.dumps(constants["form"])))
        form = BatchForm.from_json(constants["form"])
        if form.promise.kind == "alone":
            logger.warning("batches of %s are %s", form.made_by, form.promise)
        return known

    def fields(self) -> tuple[FieldSpec, ...]:
        return (*self.form.fields(), IMAGE_HASH)

    def lengths(self, shard: Shard) -> Array:
        return np.concatenate([np.ones((1, shard.entry.rows), np.int64), self.form.lengths(shard)])

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002  each has its own
        return {"codec": self.codec, "images": columns_digest(items.select(["hash"]))}

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        rows = items.select(["file", "offset", "size", "hash", "still", *self.form.columns])
        return rows.append_column("sample_id", pa.array(item_names(items, files), pa.large_string()))

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        for position, row in enumerate(rows.to_pylist()):
            mark(position)
            values: Values = {"image_hash": row["hash"]}
            still, decoding = Still.read(row["still"]), self.steps.step.decoding
            try:
                frames = frame_places(row.get("frames") or ())
                data = (read(*place) for place in frames) if frames else read(row["file"], row["offset"], row["size"])
                if still.frame is not None and isinstance(data, bytes):
                    data = frame_file(data, sample_id=row["sample_id"], frame=still.frame, **decoding)
                values |= self.form.make({**row, "still": still}, data)
            except SampleError as err:
                values |= {"failure": err.reason, "message": str(err)}
            yield values

    def told(self, items: pa.Table) -> list[Any]:
        columns = [items[name].to_pylist() for name in self.form.columns]
        return [self.form.told(values) for values in zip(*columns, strict=True)]

    def constants(self) -> dict[str, Any]:
        return self.form.constants()

    def probe(self) -> str:
        return values_digest(self.form.probed())

    def probed(self) -> Iterator[Values]:
        assert isinstance(self.form, ArrayForm)
        yield from self.form.probed_stored()

    def estimate_bytes(self, items: pa.Table) -> int:
        return int(self.form.raw_bytes(items) * _STORED_SHARE[self.form.codec])

    def refused(self, lengths: Mapping[str, Array], rows: pa.Table, why: Coder) -> Array:  # noqa: ARG002
        return np.zeros(len(rows), np.int32)

    def refusals(self, lengths: Mapping[str, Array], rows: pa.Table, codes: Array, why: Coder) -> tuple[Failure, ...]:  # noqa: ARG002
        return ()

    def summary(self, lengths: Mapping[str, Array], rows: pa.Table, items: Items, keep: Array) -> dict[str, Any]:  # noqa: ARG002
        return {"codec": self.codec, "num_images": items.different}
