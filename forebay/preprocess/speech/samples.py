"""Rows to samples: the steps above the cut, the same code for a build and for uncached reading."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.errors import BuildError, ConfigError, ForebayError, SampleError
from forebay.preprocess.cut import NO_TEXT
from forebay.preprocess.modality import Read, Values
from forebay.preprocess.speech.decode import decode_audio
from forebay.rows.kept_columns import values_of
from forebay.spans import DECODE, FEATURES, TOKENS, span
from forebay.steps.recipe import Recipe
from forebay.steps.text.transcript import Encoded, TextEncoder
from forebay.store.layout import Array, FieldSpec
from forebay.store.texts import TextStore
from forebay.task_map import is_second_try, mark

_BLOCK_SAMPLES = 16_000 * 300
"""Decoded audio samples held at once: enough for the feature engine to fill its chunks, little beside a shard."""

_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1024, 1 << 18
"""Texts that are worked on at once, and their characters: a token takes some 100 bytes while it is made."""

_ID = FieldSpec(name="sample_id", dtype="str", role="table")

_NUM_SAMPLES = FieldSpec(name="num_audio_samples", dtype="int64", role="table")

_TEXT_TABLE = tuple(
    FieldSpec(name=name, dtype="str", group="text", role="table") for name in ("text", "language", "prompt", "source")
)


DETECTED_FIELDS = (
    FieldSpec(name="language_detected", dtype="str", group="text", role="table"),
    FieldSpec(name="language_confidence", dtype="float64", group="text", role="table"),
    FieldSpec(name="language_manifest", dtype="str", group="text", role="table"),
)
"""What rows hold beside `language`, the one that prompts use, where languages are detected."""


def sample_fields(recipe: Recipe) -> tuple[FieldSpec, ...]:
    """Returns every field of a recipe's samples, media first, without the `failure` field that shards add."""
    specs = [spec for step in recipe.stored for spec in step.fields()]
    tokens = recipe.tokens.fields() if recipe.tokens is not None else ()
    table = (_ID, _NUM_SAMPLES) if recipe.has_audio else (replace(_ID, group="text"),)
    detected = DETECTED_FIELDS if recipe.tokens is not None and recipe.tokens.text_line().detects else ()
    return (*specs, *table, *tokens, *_TEXT_TABLE, *detected)


def media_samples(recipe: Recipe, rows: pa.Table, read: Read) -> Iterator[Values]:
    """Yields the media fields of every row in order; a row that fails yields its table fields and `failure`, `message`.

    A row's values depend on that row alone, whatever rows are asked for with it. Without audio nothing is read.
    """
    if not recipe.has_audio:
        yield from ({"sample_id": sample_id} for sample_id in rows["sample_id"].to_pylist())
        return
    block: list[tuple[Values, Array | None]] = []
    held = 0
    for position, row in enumerate(rows.select(["sample_id", "file", "offset", "size"]).to_pylist()):
        mark(position)
        values: Values = {"sample_id": row["sample_id"]}
        audio = None
        try:
            data = read(row["file"], row["offset"], row["size"])
            with span(DECODE):
                audio = _clip(recipe, data, sample_id=row["sample_id"])
            values["num_audio_samples"] = np.int64(recipe.features.num_samples(audio))
            held += audio.size
        except SampleError as err:
            values |= {"failure": err.reason, "message": str(err)}
        block.append((values, audio))
        if held >= _BLOCK_SAMPLES:
            yield from _with_features(recipe, block)
            block, held = [], 0
    yield from _with_features(recipe, block)


def text_samples(
    rows: pa.Table,
    names: Sequence[str],
    encoder: TextEncoder | None,
    *,
    needs_text: bool = False,
    store: TextStore | None = None,
) -> Iterator[Values]:
    """Yields the text fields of every row in order; of one that fails, table fields, `failure` and `message`.

    names: of the source files, by `file`. encoder: None for a recipe without text. needs_text: a null text fails.
    store: of what is made of texts; when all rows were asked for, what it was given is written.
    """
    columns = {name: rows[name].to_pylist() for name in ("sample_id", "file", "text", "language", "prompt")}
    kept = list(values_of(rows))
    for start, stop in _blocks(columns["text"], columns["prompt"]):
        mark(start)
        block = {name: values[start:stop] for name, values in columns.items()}
        made = _encoded(encoder, block, needs_text=needs_text, store=store)
        for more, sample_id, file, text, language, prompt, result in zip(
            kept[start:stop], *block.values(), made, strict=True
        ):
            values: Values = {**more, "text": text or "", "language": language or "", "prompt": prompt or ""}
            values["source"] = names[file]
            if encoder is not None and encoder.detects:
                values |= _languages(values["language"], result)
            if isinstance(result, SampleError):
                values |= {"failure": result.reason, "message": str(result)}
            elif encoder is not None and result is not None:
                values |= _of_text(encoder, result, more, text=values["text"], sample_id=sample_id)
            yield values
    if encoder is not None:
        encoder.keep()


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


def _languages(stated: str, result: Encoded | SampleError | None) -> Values:
    """Returns the language of a row and its `DETECTED_FIELDS`. Of a text that cannot be used nothing is said."""
    said = (stated, "", 0.0)
    if isinstance(result, Encoded):
        said = (result.prepared.language, result.prepared.detected, result.prepared.confidence)
    language, detected, confidence = said
    return {
        "language": language,
        "language_detected": detected,
        "language_confidence": np.float64(confidence),
        "language_manifest": stated,
    }


def _of_text(
    encoder: TextEncoder, encoded: Encoded, kept: Mapping[str, Any], *, text: str, sample_id: str
) -> Mapping[str, Any]:
    """Returns the fields of a text and what the row says of it, or why the row cannot be used."""
    try:
        of_row = encoder.of_row(kept, sample_id=sample_id)
    except SampleError as err:
        return {"failure": err.reason, "message": str(err)}
    return {**encoded.fields, **of_row, "text": encoder.row_text(text, encoded.fields["input_ids"])}


def _encoded(
    encoder: TextEncoder | None, rows: Mapping[str, Sequence[Any]], *, needs_text: bool, store: TextStore | None
) -> Sequence[Encoded | SampleError | None]:
    texts, sample_ids = rows["text"], rows["sample_id"]
    if encoder is None:
        return [None] * len(texts)
    with span(TOKENS):
        made = encoder.encode_batch(
            [text or "" for text in texts], rows["language"], rows["prompt"], sample_ids=sample_ids, store=store
        )
    if not needs_text:
        return made
    return [
        SampleError(NO_TEXT, f"sample {sample_id}: nothing gives its text; add it, or remove it")
        if text is None
        else result
        for sample_id, text, result in zip(sample_ids, texts, made, strict=True)
    ]


@functools.lru_cache(maxsize=1)
def loaded_encoder(recipe: Recipe, folder: str | None) -> TextEncoder | None:
    """Returns the encoder of a recipe, None where it has no text.

    Loading a tokenizer costs more than a shard of text, so a worker keeps the last one.
    """
    return None if recipe.tokens is None or folder is None else recipe.tokens.encoder(Path(folder))


def constants(recipe: Recipe, encoder: TextEncoder | None) -> dict[str, Any]:
    """Returns what collating needs and is equal for all samples: kinds, rates, token ids."""
    return {
        "features": recipe.features.form(),
        "sample_rate_hz": recipe.decode.sample_rate_hz,
        **recipe.features.constants,
        "prompt": recipe.tokens.form() if recipe.tokens else None,
        **(encoder.constants if encoder is not None else {}),
    }


def _clip(recipe: Recipe, data: bytes, *, sample_id: str) -> Array:
    if not recipe.features.reads_sound:
        return recipe.features.opened(data)
    return decode_audio(data, recipe.decode, sample_id=sample_id, want=(recipe.waveform or recipe.features).clip_dtype)


def _with_features(recipe: Recipe, block: Sequence[tuple[Values, Array | None]]) -> Iterator[Values]:
    decoded = [audio for _, audio in block if audio is not None]
    try:
        made = iter(_compute(recipe, decoded))
    except (BuildError, ConfigError) as err:
        raise _named(err, recipe, block) from err
    for values, audio in block:
        if audio is None:
            yield values
            continue
        result = next(made)
        if isinstance(result, SampleError):
            # Without its length: a failed row has no values.
            yield {"sample_id": values["sample_id"], "failure": result.reason, "message": str(result)}
        else:
            yield {**values, **result}


def _named(err: ForebayError, recipe: Recipe, block: Sequence[tuple[Values, Array | None]]) -> ForebayError:
    """Returns what stops a build with the sample that it is of: the first for which the steps raise it alone."""
    for values, audio in block:
        try:
            if audio is not None:
                _compute(recipe, [audio])
        except (BuildError, ConfigError) as of_one:
            kind = BuildError if isinstance(err, BuildError) else ConfigError
            return kind(f"sample {values['sample_id']}: {of_one}", code=of_one.code)
    return err


def _compute(recipe: Recipe, waveforms: Sequence[Array]) -> list[Mapping[str, Array] | SampleError]:
    if not waveforms:
        return []
    try:
        with span(FEATURES):
            return list(_all_features(recipe, waveforms))
    except SampleError as err:
        if len(waveforms) == 1:
            return [err]
    # One of them cannot be used. Features do not depend on neighbours, so asking one by one changes no byte of the
    # rest.
    results: list[Mapping[str, Array] | SampleError] = []
    for waveform in waveforms:
        try:
            results += _all_features(recipe, [waveform])
        except SampleError as err:
            results.append(err)
    return results


def _all_features(recipe: Recipe, waveforms: Sequence[Array]) -> list[Mapping[str, Array]]:
    clips = waveforms
    if "int16" not in recipe.features.clip_dtypes:
        clips = [w.astype(np.float32) / np.float32(32768) if w.dtype == np.int16 else w for w in waveforms]
    made = [step.compute(waveforms if step is recipe.waveform else clips) for step in recipe.stored]
    return [{name: values for fields in each for name, values in fields.items()} for each in zip(*made, strict=True)]
