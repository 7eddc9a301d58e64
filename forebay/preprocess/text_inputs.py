"""Texts as a model is given them: each different text of a source file once, as tokens of the model's own tokenizer."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import xxhash

from forebay.config.data import CaptionsConfig
from forebay.errors import ConfigError, SampleError
from forebay.preprocess.group import Items, Read, Values, columns_digest
from forebay.preprocess.probe_inputs import PROBE_TEXTS
from forebay.preprocess.row_captions import checked_captions, texts_of
from forebay.rows.manifest import Manifest
from forebay.steps.form import BatchForm
from forebay.steps.text.caption import Caption, CaptionEncoder
from forebay.store.layout import Array, Group
from forebay.store.source_files import SourceFile
from forebay.task_map import mark

_SHORT = ("a cat", "two small dogs")
"""Texts of the probe that any model takes."""
_NAMED = 60
"""Characters of a text by which an item is called."""


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The texts of rows, for the model in a folder. tokenizer: digest of its tokenizer; empty: texts as they are.

    captions: further texts of rows; None: each has its own one. is_first: the first text of each is taken.
    """

    folder: str
    tokenizer: str
    captions: CaptionsConfig | None = None
    is_first: bool = False
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

    @property
    def choices(self) -> CaptionsConfig | None:
        """The settings by which rows have several texts, of which a batch has one; None where each has one."""
        return None if self.is_first else self.captions

    def items(self, manifest: Manifest) -> Items:
        """Returns each different text of a source file once; what has no text is one that fails."""
        offsets, texts = self.of_rows(manifest.rows)
        encoded = texts.dictionary_encode(null_encoding="encode")
        listed = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), encoded.indices)
        rows = manifest.rows.append_column(self.lists, listed)
        found = Items.listed(rows, str(self.lists), pa.table({"text": encoded.dictionary}))
        table = found.table.append_column("file", pa.array(found.group.astype(np.int32)))
        return replace(found, table=table, are_choices=self.choices is not None)

    def checked(self, manifest: Manifest) -> Manifest:
        """Returns a manifest without rows whose further texts are none."""
        return manifest if self.captions is None else checked_captions(manifest, self.captions)

    def of_rows(self, rows: pa.Table) -> tuple[Array, pa.Array]:
        """Returns where the texts of each row begin, int64 [rows + 1], and the texts, null for a row without any."""
        if self.captions is None:
            return np.arange(len(rows) + 1), rows["text"].combine_chunks()
        settings = replace(self.captions, shuffles=0, keep_tags=0, empty=False) if self.is_first else self.captions
        found = [texts[:1] if self.is_first else texts for texts in texts_of(rows, settings)]
        flat = pa.array(itertools.chain.from_iterable(found), pa.large_string())
        return np.cumsum([0, *map(len, found)]), flat

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002  no file is read
        """Returns what the key of a shard says of its texts: an empty one fails unless it is wanted."""
        return {"texts": columns_digest(items.select(["text"])), **({"has_empty": True} if self._takes_empty else {})}

    @property
    def _takes_empty(self) -> bool:
        return self.choices is not None and self.choices.empty

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
                if not (text or "").strip() and not (text == "" and self._takes_empty):
                    raise SampleError("empty_text", f"text {name}: a model is given none; add it, or remove the row")
                yield {"text": text} if encoder is None else encoder.encode(text, (), sample_id=f"text {name}")
            except SampleError as err:
                yield {"failure": err.reason, "message": str(err)}

    def probed(self) -> Iterator[Values]:
        """Yields the tokens of built-in texts. Raises ConfigError where there is none of the empty text, and a model is
        to be given it.
        """
        if self._takes_empty and self.tokenizer:
            self._require_empty()
        texts = [*_SHORT, *(text for text, _ in PROBE_TEXTS)]
        yield from self.samples(pa.table({"text": texts, "sample_id": list(map(repr, texts))}), _unread)

    def _require_empty(self) -> None:
        (made,) = self.samples(pa.table({"text": [""], "sample_id": ["''"]}), _unread)
        why = f" ({made['message']})" if "message" in made else ""
        if not len(made.get("input_ids", ())):
            raise ConfigError(
                f"source.captions.empty: the tokenizer in {self.folder} gives no token of the empty text{why}, "
                "so its model can be given none; leave empty and loader.caption_dropout out",
                code="FB147",
            )

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tokens of the one text of a sample."""
        return {**sample, **items[0]}


@functools.lru_cache(maxsize=4)
def _encoder_of(folder: str, tokenizer: str) -> CaptionEncoder:
    step = Caption(tokenizer=tokenizer, processor="", tokenizer_folder=folder, processor_folder=folder)
    return CaptionEncoder(step, may_lack_pad=True)


def _unread(*_: Any) -> bytes:
    raise AssertionError("texts are read from no file")
