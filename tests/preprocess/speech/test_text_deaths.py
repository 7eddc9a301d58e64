"""A text that kills the worker that tokenises it is named, though texts go to the tokenizer together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from forebay.errors import TextError
from forebay.preprocess.group import Values
from forebay.preprocess.pool import Pool
from forebay.preprocess.text_group import TextItems, opened_text
from forebay.steps.step import TextStep
from forebay.steps.text.row_encoder import EncodedRow, EncodedRows
from forebay.steps.text.text_section import TextGroup
from forebay.store.layout import FieldSpec
from forebay.task_map import WorkerDied


def table(texts: list[str | None]) -> pa.Table:
    count = len(texts)
    return pa.table(
        {
            "sample_id": pa.array([f"s{i}" for i in range(count)], pa.large_string()),
            "file": pa.array([0] * count, pa.int32()),
            "text": pa.array(texts, pa.large_string()),
            "language": pa.array(["en"] * count, pa.large_string()),
            "prompt": pa.nulls(count, pa.large_string()),
        }
    )


class Deadly:
    """An encoder that a text kills, as a fault in native code would."""

    def encode_rows(self, rows: EncodedRows, **_: Any) -> Iterator[EncodedRow]:
        if "poison" in rows.texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return (EncodedRow(error=TextError("bad_text", "")) for _ in rows.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Opens(TextStep):
    """A step that gives an encoder; as many are made as are asked for."""

    encoder: Any = field(compare=False)

    def fields(self) -> tuple[FieldSpec, ...]:
        return ()

    def opened(self, folder: Path, *, merge_size: int | None) -> Any:
        return self.encoder


def text_samples(rows: pa.Table, names: list[str], encoder: Any, *, needs_text: bool = False) -> Iterator[Values]:
    """The values that a build makes of rows with an encoder."""
    opened_text.cache_clear()
    return TextItems(TextGroup(step=Opens(encoder=encoder), needs_text=needs_text)).samples(rows, names)


def _worked(rows: pa.Table) -> int:
    return len(list(text_samples(rows, ["f"], Deadly())))


def test_a_text_that_kills_its_worker_is_named_among_the_texts_of_its_block() -> None:
    texts: list[str | None] = ["fine"] * 40
    texts[17] = "poison"
    with Pool(1) as pool:
        with pytest.raises(WorkerDied, match="SIGKILL") as caught:
            list(pool.run(_worked, [table(texts)]))
        assert caught.value.position == 17
