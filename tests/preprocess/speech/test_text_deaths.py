"""A text that kills the worker that tokenises it is named, though texts go to the tokenizer together."""

from __future__ import annotations

import os
import signal
from typing import Any

import pyarrow as pa
import pytest
from forebay.preprocess.speech.samples import text_samples

from forebay.errors import TextError
from forebay.preprocess.pool import Pool
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

    detects = False

    def encode_batch(self, texts: list[str], *_: Any, **__: Any) -> list[TextError]:
        if "poison" in texts:
            os.kill(os.getpid(), signal.SIGKILL)
        return [TextError("bad_text", "") for _ in texts]

    def keep(self) -> None: ...


def _worked(rows: pa.Table) -> int:
    encoder: Any = Deadly()
    return len(list(text_samples(rows, ["f"], encoder)))


def test_a_text_that_kills_its_worker_is_named_among_the_texts_of_its_block() -> None:
    texts: list[str | None] = ["fine"] * 40
    texts[17] = "poison"
    with Pool(1) as pool:
        with pytest.raises(WorkerDied, match="SIGKILL") as caught:
            list(pool.run(_worked, [table(texts)]))
        assert caught.value.position == 17
