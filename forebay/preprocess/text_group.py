"""The group `text`: a row a sample. Its columns, and what the prompt makes of its text, told of the items it lists."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.errors import SampleError
from forebay.preprocess.group import NO_TEXT, Values, columns_digest, kept_document, values_digest
from forebay.preprocess.probes import PROBE_LABELS, PROBE_TEXTS, probe_conversations
from forebay.rows.kept_columns import PREFIX, values_of
from forebay.rows.windows import SPOKEN
from forebay.steps.form import BatchForm
from forebay.steps.step import REJECTED, TextStep
from forebay.steps.text.row_encoder import EncodedRow, EncodedRows, RowEncoder
from forebay.steps.text.text_section import TextGroup
from forebay.steps.text.transcript import DETECTED_FIELDS, Transcript
from forebay.store.key import digest
from forebay.store.layout import TEXT, Array, FieldSpec, Group
from forebay.store.shard import Shard
from forebay.store.texts import TextStore
from forebay.task_map import is_second_try, mark

_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1024, 1 << 18
"""Texts that are worked on at once, and their characters: a token takes some 100 bytes while it is made."""
TOKENS = "input_ids"
"""The field that samples are counted by."""
TOLD, NAMES = "told", "item_names"
"""Columns of a task's rows: what prompts are told of the items of a row (JSON), and their names by column (JSON)."""
_COLUMNS = ("sample_id", "text", "language", "prompt")
_ASIDE = (TOLD, NAMES, SPOKEN)
_BYTES_PER_TOKEN = 5
_TOKENS_PER_BYTE = 0.5


@dataclass(frozen=True, slots=True)
class TextItems:
    """The texts of a config. listed: columns of the listing whose rows list items. merge_size: of images as patches.

    known: the form of the texts as JSON, where a worker found it; None: nothing was measured. texts: what was made of
    texts, under the cache root.
    """

    steps: TextGroup
    listed: tuple[str, ...] = ()
    merge_size: int | None = None
    known: str | None = None
    texts: TextStore | None = None
    name: ClassVar[Group] = TEXT
    unit: ClassVar[str] = "text"

    @classmethod
    def of(cls, config: Config, steps: TextGroup, *, listed: Sequence[str], merge_size: int | None) -> Self:
        """Returns the group of a config."""
        store = TextStore(config.cache_root) if isinstance(steps.step, Transcript) else None
        return cls(steps, tuple(listed), merge_size, texts=store)

    @property
    def encoder(self) -> RowEncoder:
        """The writer of rows; a worker keeps the last one: loading a tokenizer costs more than a shard of text."""
        return opened_text(self.steps.step, self.steps.folder, self.merge_size)

    def with_step(self, step: TextStep) -> Self:
        """Returns the group with another step."""
        return replace(self, steps=replace(self.steps, step=step))

    def measured(self, constants: Mapping[str, Any]) -> Self:
        """See `ItemGroup`."""
        return replace(self, known=json.dumps(constants.get("text_form")))

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of a row, without kept columns: those of the prompt, then those of the row table."""
        step = self.steps.step
        form = None if self.known is None else json.loads(self.known)
        made = step.fields() if form is None else step.fields_of(BatchForm.from_json(form))
        names = ("sample_id", "text", *self.listed, *self._beside, "source")
        table = [FieldSpec(name=name, dtype="str", role="table") for name in names]
        detected = DETECTED_FIELDS if isinstance(step, Transcript) and step.text_line().detects else ()
        return (*made, *table, *detected)

    @property
    def _beside(self) -> tuple[str, ...]:
        """The columns beside the text: of conversations about listed items there are none."""
        return ("language", "prompt") if self.steps.step.is_of_texts or not self.listed else ()

    def lengths(self, shard: Shard) -> Array:
        """Returns the tokens of each row, of a pair those of the longer text, int64 [rows]."""
        found = [shard.lengths(field.name) for field in shard.fields if field.name in (TOKENS, REJECTED + TOKENS)]
        return np.max(found, axis=0) if found else np.zeros(shard.entry.rows, np.int64)

    def content(self, rows: pa.Table, names: Sequence[str]) -> dict[str, Any]:
        """Returns what the key of a shard says of its rows. names: of the source files."""
        files, inverse = np.unique(_files(rows), return_inverse=True)
        columns = [name for name in (*_COLUMNS, *_ASIDE) if name in rows.column_names]
        document: dict[str, Any] = {
            "files": [names[file] for file in files.tolist()],
            "rows": columns_digest(rows.select(columns), inverse),
            **kept_document(rows),
        }
        if self.steps.needs_text and rows["text"].null_count:
            document["null_text"] = NO_TEXT
        return document

    def task_rows(self, rows: pa.Table) -> pa.Table:
        """Returns what a task needs to make these rows."""
        wanted = [n for n in rows.column_names if n in (*_COLUMNS, *_ASIDE) or n.startswith(PREFIX)]
        return rows.select(wanted).append_column("file", pa.array(_files(rows), pa.int32()))

    def samples(self, rows: pa.Table, names: Sequence[str]) -> Iterator[Values]:
        """Yields the fields of every row in order; of one that fails, table fields, `failure` and `message`.

        names: of the source files, by `file`.
        """
        columns = [self._column(rows, name) for name in _COLUMNS]
        told = [
            [tuple(item) if isinstance(item, list) else item for item in items]
            for items in _parsed(self._column(rows, TOLD), [])
        ]
        named = _parsed(self._column(rows, NAMES), {})
        spoken = _parsed(self._column(rows, SPOKEN), None)
        kept, files = list(values_of(rows)), rows["file"].to_pylist()
        for start, stop in _blocks(columns[1], columns[3]):
            mark(start)
            part = slice(start, stop)
            ids, texts, languages, prompts = (column[part] for column in columns)
            block = EncodedRows(
                ids=ids,
                texts=texts,
                languages=languages,
                prompts=prompts,
                kept=kept[part],
                told=told[part],
                spoken=spoken[part],
            )
            for place, made in enumerate(self.encoder.encode_rows(block, store=self.texts)):
                row: Values = {"sample_id": ids[place], "text": texts[place] or ""}
                listed = named[start + place].items()
                row |= {column: json.dumps(found, ensure_ascii=False) for column, found in listed}
                beside = {"language": languages[place] or "", "prompt": prompts[place] or ""}
                row |= {column: beside[column] for column in self._beside}
                row = {**kept[start + place], **row, "source": names[files[start + place]]}
                yield self._made(row, made, text=texts[place])

    def _made(self, row: Values, made: EncodedRow, *, text: str | None) -> Values:
        error = made.error
        if self.steps.needs_text and text is None:
            error = SampleError(NO_TEXT, f"sample {row['sample_id']}: nothing gives its text; add it, or remove it")
        if error is None:
            return row | dict(made.values)
        said = {name: value for name, value in made.values.items() if name.startswith("language")}
        return {**row, **said, "failure": error.reason, "message": str(error)}

    def _column(self, rows: pa.Table, name: str) -> list[Any]:
        return rows[name].to_pylist() if name in rows.column_names else [None] * len(rows)

    def constants(self) -> dict[str, Any]:
        """See `ItemGroup`."""
        return self.encoder.constants if self.steps.is_given else {}

    def probe(self, told: Mapping[Group, Sequence[Any]]) -> str:
        """Returns the xxh3-128 of what is made of built-in texts, and of what the steps find on this machine.

        told: what prompts are told of two items of each group that rows list.
        """
        rows, encoder = self._probe_rows(told), self.encoder
        made = [
            {"failure": row.error.reason} if row.error is not None else dict(row.values)
            for row in encoder.encode_rows(rows)
        ]
        # A program's version and data speak for more than a few texts can show.
        found = encoder.found(rows)
        more = [{"found": json.dumps(found, sort_keys=True)}] if found else []
        return values_digest([*made, *more, {"constants": digest(encoder.constants)}])

    def _probe_rows(self, told: Mapping[Group, Sequence[Any]]) -> EncodedRows:
        step = self.steps.step
        languages: list[str | None]
        if self.listed and not step.is_of_texts:
            texts = [*probe_conversations([*told]), *(text for text, _ in PROBE_TEXTS[:1]), "0", "cat"]
            counts, languages = [0, 1, 2, 1, 1, 1], [None] * 6
        else:
            pairs = PROBE_LABELS if isinstance(step, Transcript) and step.reads_labels else PROBE_TEXTS
            texts, counts = [text for text, _ in pairs], [0] * len(pairs)
            only = getattr(self.encoder, "languages", ())
            languages = [only[0] if only else language for _, language in pairs]
        return EncodedRows(
            ids=[f"probe-{i}" for i in range(len(texts))],
            texts=texts,
            languages=languages,
            prompts=[None] * len(texts),
            kept=[{}] * len(texts),
            told=[[item for items in told.values() for item in items[:count]] for count in counts],
        )

    def estimate_bytes(self, rows: pa.Table) -> int:
        """Returns about how much is stored of rows, beside the tokens of items."""
        found = [name for name in ("text", "prompt", "language") if name in rows.column_names]
        text_bytes: int = sum(chunk.nbytes for name in found for chunk in rows[name].chunks)
        has_tokens = self.steps.step.tokenizer_digest is not None
        return text_bytes + (int(_BYTES_PER_TOKEN * _TOKENS_PER_BYTE * text_bytes) if has_tokens else 0)


@functools.lru_cache(maxsize=1)
def opened_text(step: TextStep, folder: str, merge_size: int | None) -> RowEncoder:
    """Returns what writes rows with the tokenizer of a folder."""
    return step.opened(Path(folder), merge_size=merge_size)


def _files(rows: pa.Table) -> Array:
    """Returns which file each row is of: the one that holds its media, else the one that lists it."""
    return np.asarray(rows["file" if "file" in rows.column_names else "group"].to_numpy())


def _parsed(texts: Sequence[str | None], nothing: Any) -> list[Any]:
    return [nothing if text is None else json.loads(text) for text in texts]


def _blocks(*columns: Sequence[str | None]) -> Iterator[tuple[int, int]]:
    """Yields [start, stop) of rows that are worked on at once: few, and of few characters unless one alone has more.

    Where a process has died over them every row is a block, so that the row is known if it happens again.
    """
    most = 1 if is_second_try() else _BLOCK_TEXTS
    start = held = 0
    for stop, texts in enumerate(zip(*columns, strict=True)):
        size = sum(len(text) for text in texts if text)
        if stop > start and (stop - start == most or held + size > _BLOCK_CHARACTERS):
            yield start, stop
            start, held = stop, 0
        held += size
    if start < len(columns[0]):
        yield start, len(columns[0])
