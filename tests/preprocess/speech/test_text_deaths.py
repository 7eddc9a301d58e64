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
from forebay.preprocess import text_group as samples
from forebay.preprocess.group import Values, values_digest
from forebay.preprocess.pool import Pool
from forebay.preprocess.text_group import TextItems, opened_text
from forebay.steps.step import TextStep
from forebay.steps.text.row_encoder import EncodedRow, EncodedRows
from forebay.steps.text.text_section import TextGroup
from forebay.store.layout import FieldSpec
from forebay.task_map import WorkerDied
from tests.steps.text.test_encoder import ROWS, encoder


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


def blocks(*lengths: int) -> list[tuple[int, int]]:
    return list(samples._blocks(["x" * length for length in lengths], [None] * len(lengths)))


def test_blocks_hold_few_texts_and_few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_BLOCK_TEXTS", 3)
    monkeypatch.setattr(samples, "_BLOCK_CHARACTERS", 10)
    assert blocks() == []
    assert blocks(1) == [(0, 1)]
    assert blocks(1, 1, 1, 1) == [(0, 3), (3, 4)]
    assert blocks(4, 6, 1) == [(0, 2), (2, 3)]
    assert blocks(50, 1, 50, 50, 0) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert list(samples._blocks(["x" * 6, None, "x"], [None, "x" * 5, "x"])) == [(0, 1), (1, 3)]


@pytest.mark.parametrize("prompt", ["whisper", "plain", "qwen3_asr"])
def test_blocks_of_any_size_give_the_same_values(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = table([*(row["transcript"] for row in ROWS), None, "", "\0", "a plain line, of English words"])
    whole = list(text_samples(rows, ["f"], encoder(prompt), needs_text=True))
    assert [values.get("failure") for values in whole[-4:]] == ["no_text", "empty_text", "bad_text", None]
    for most, characters in ((1, 1 << 18), (7, 1 << 18), (1024, 30)):
        monkeypatch.setattr(samples, "_BLOCK_TEXTS", most)
        monkeypatch.setattr(samples, "_BLOCK_CHARACTERS", characters)
        again = list(text_samples(rows, ["f"], encoder(prompt), needs_text=True))
        assert values_digest(again) == values_digest(whole)
        assert [values.get("message") for values in again] == [values.get("message") for values in whole]
