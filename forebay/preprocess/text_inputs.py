"""Texts as a model is given them: each different text of a source file once, as tokens of the model's own tokenizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import xxhash

from forebay.errors import SampleError
from forebay.preprocess.group import Items, Read, Values, columns_digest
from forebay.preprocess.probe_inputs import PROBE_TEXTS
from forebay.rows.manifest import Manifest
from forebay.steps.form import BatchForm
from forebay.steps.text.caption import Caption, CaptionEncoder
from forebay.store.layout import Group
from forebay.store.source_files import SourceFile
from forebay.task_map import mark

_SHORT = ("a cat", "two small dogs")
"""Texts of the probe that any model takes."""
_NAMED = 60
"""Characters of a text by which an item is called."""


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The texts of rows, for the model in a folder. tokenizer: digest of its tokenizer; empty: texts as they are."""

    folder: str
    tokenizer: str
    name: ClassVar[Group] = "text"
    unit: ClassVar[str] = "text"
    lists: ClassVar[str | None] = "texts"
    column: ClassVar[str] = "text"
    max_sample_bytes: ClassVar[int] = 1 << 30

    @property
    def form(self) -> BatchForm:
        """How texts are padded: on the right, where a model counts positions from a text's own first token."""
        form = _encoder_of(self.folder, self.tokenizer).form
        return replace(form, fields=tuple(replace(each, side="right") for each in form.fields))

    def items(self, manifest: Manifest) -> Items:
        """Returns each different text of a source file once; what has no text is one that fails."""
        texts = manifest.rows["text"].combine_chunks().dictionary_encode(null_encoding="encode")
        codes = texts.indices.to_numpy()
        rows = manifest.rows.append_column(
            self.lists, pa.ListArray.from_arrays(np.arange(len(codes) + 1, dtype=np.int32), pa.array(codes, pa.int32()))
        )
        found = Items.listed(rows, str(self.lists), pa.table({"text": texts.dictionary}))
        table = found.table.append_column("file", pa.array(found.group.astype(np.int32)))
        return Items(table, found.group, found.different, found.offsets, found.places)

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002  no file is read
        """Returns what the key of a shard says of its texts."""
        return {"texts": columns_digest(items.select(["text"]))}

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:  # noqa: ARG002
        """Returns texts and what to call each."""
        texts = [text or "" for text in items["text"].to_pylist()]
        hashes = [xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogateescape")) for text in texts]
        named = items.append_column("sample_id", pa.array([repr(text[:_NAMED]) for text in texts], pa.large_string()))
        return named.append_column("hash", pa.array(hashes))

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:  # noqa: ARG002
        """Yields the tokens of each text."""
        encoder = _encoder_of(self.folder, self.tokenizer) if self.tokenizer else None
        for position, (text, name) in enumerate(
            zip(rows["text"].to_pylist(), rows["sample_id"].to_pylist(), strict=True)
        ):
            mark(position)
            try:
                if not (text or "").strip():
                    raise SampleError("empty_text", f"text {name}: a model is given none; add it, or remove the row")
                yield {"text": text} if encoder is None else encoder.encode(text, (), sample_id=f"text {name}")
            except SampleError as err:
                yield {"failure": err.reason, "message": str(err)}

    def probed(self) -> Iterator[Values]:
        """Yields the tokens of built-in texts."""
        texts = [*_SHORT, *(text for text, _ in PROBE_TEXTS)]
        yield from self.samples(pa.table({"text": texts, "sample_id": list(map(repr, texts))}), _unread)

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tokens of the one text of a sample."""
        return {**sample, **items[0]}


@functools.lru_cache(maxsize=4)
def _encoder_of(folder: str, tokenizer: str) -> CaptionEncoder:
    step = Caption(tokenizer=tokenizer, processor="", tokenizer_folder=folder, processor_folder=folder)
    return CaptionEncoder(step, may_lack_pad=True)


def _unread(*_: Any) -> bytes:
    raise AssertionError("texts are read from no file")
