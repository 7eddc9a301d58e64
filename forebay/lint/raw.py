"""The raw data of a config, measured: listed, read and decoded as a build does, in worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.data import SOURCE_KINDS
from forebay.config.tree import Config
from forebay.lint.clips import Bad, Clips, ClipTask, measure_clips
from forebay.lint.limits import Limits
from forebay.lint.measured import Classes, ImageFacts, Measured, Refused
from forebay.lint.pictures import PictureTask, Said, classes_in, measure_images, measure_texts
from forebay.lint.spans import Done, SpanTask, cut, run_spans
from forebay.preprocess.images.modality import Images
from forebay.preprocess.modality import Coder, modality_of, narrow
from forebay.preprocess.pool import Pool
from forebay.preprocess.sources.naming import shown_name
from forebay.preprocess.sources.rows import Manifest
from forebay.preprocess.sources.vision.classes import empty_classes
from forebay.preprocess.sources.vision.labels import labels_of
from forebay.preprocess.sources.vision.part import flattened
from forebay.preprocess.speech.modality import Speech
from forebay.preprocess.vision.headers import conversation_rows, image_names, images_of
from forebay.preprocess.vision.modality import Vision
from forebay.progress import Progress
from forebay.steps.recipe import Recipe
from forebay.steps.text.normal.table import code_in
from forebay.store.layout import Array, Ints
from forebay.store.remote.raw.sources import naming_urls

_CLIPS, _TEXTS, _IMAGES = 64, 4096, 64
"""Rows of a task: enough to be worth its sending, few enough that the last one does not keep all waiting."""

_CLIP_COLUMNS = ("sample_id", "file", "offset", "size", "text", "language", "prompt")


def measure_raw(config: Config, recipe: Recipe, limits: Limits, *, name: str, progress: bool) -> Measured:
    """Returns what is known of the raw data of a config. Its samples are those that the listing leaves.

    Functions of the user in `text.normalize` are not run, which a note says.
    Raises ConfigError or ManifestError where the config or its manifest cannot be used, TarError or OSError where a
    file as a whole cannot be read.
    """
    modality = modality_of(config, recipe.without_code())
    work = _Work(config, limits, progress=progress)
    with naming_urls(), work.pool() as pool:
        manifest = modality.manifest(config, map_=pool.map)
        if isinstance(modality, Speech):
            found = _speech(work, pool, manifest, modality, name=name)
            return replace(found, notes=[*found.notes, *_not_run(config)])
        if isinstance(modality, Vision | Images):
            return _vision(work, pool, manifest, modality, name=name)
    raise TypeError(f"there is no lint of {type(modality).__name__}")


def _not_run(config: Config) -> list[str]:
    code = [] if config.text is None else code_in(config.text.settings)
    return [f"{entry} was not run: lint runs no code, so labels are judged as they are without it" for entry in code]


class _Work:
    """What the runs over one config share."""

    def __init__(self, config: Config, limits: Limits, *, progress: bool) -> None:
        self.config, self.limits, self.progress = config, limits, progress

    def pool(self) -> Pool:
        return Pool(self.config.run.num_workers or os.cpu_count() or 1, shows=self.progress)

    def run(
        self, pool: Pool, function: Callable[[Any], Any], make: Callable[[int, int], SpanTask], count: int, **how: Any
    ) -> Done[Any]:
        """Returns what a function gives for `count` rows. how: `size` of a task, `unit` of the bar, perhaps `keep`."""
        with Progress(count, desc="lint", unit=how["unit"], is_shown=self.progress) as bar:
            keep, spans = how.get("keep"), cut(count, how["size"])
            return run_spans(pool, function, make, spans, new_pool=self.pool, done=bar.update, keep=keep)


def _speech(work: _Work, pool: Pool, manifest: Manifest, modality: Speech, *, name: str) -> Measured:
    rows, config, recipe = manifest.rows, work.config, modality.recipe
    has_media = recipe.has_audio and SOURCE_KINDS[config.source.kind].has_audio
    is_sound = has_media and recipe.features.reads_sound

    def task(start: int, stop: int) -> ClipTask:
        files, part = narrow(rows.select(_CLIP_COLUMNS).slice(start, stop - start), manifest.files)
        return ClipTask(
            start=start,
            rows=part,
            files=files,
            modality=modality,
            limits=work.limits,
            max_open_tars=config.run.max_open_tars,
            is_heard=has_media,
        )

    size, unit = (_CLIPS, "clip") if has_media else (_TEXTS, "text")
    found = Clips.unknown(len(rows))
    done = work.run(pool, measure_clips, task, len(rows), size=size, unit=unit, keep=found.put)
    stated_s = rows["stated_s"].to_numpy(zero_copy_only=False).astype(np.float64)
    bad = [*found.bad, *_died(done, rows)]
    heard = found.num_samples > 0
    facts = found.facts | {"stated_s": stated_s, "seconds": _seconds(found, modality)}
    longer = modality.limits.longer(found.num_samples, stated_s) & heard
    bad += _by_duration(modality, rows, found, stated_s, {row for row, _, _ in bad})
    languages, language_of = coded(rows["language"])
    return Measured(
        name=name,
        modality="speech",
        is_raw=True,
        rate_hz=recipe.decode.sample_rate_hz if is_sound else None,
        ids=rows["sample_id"],
        places=rows["row"].to_numpy(),
        files=[shown_name(file) for file in manifest.files],
        file_of=rows["file"].to_numpy(),
        languages=languages,
        language_of=language_of,
        facts=facts | found.strings,
        content=found.content,
        refused=_refused(bad, rows, manifest),
        longer=longer,
        left_out=_left_out(is_sound=is_sound, has_text=bool(np.any(found.facts["chars"] > 0))),
        excluded=manifest.counts()["excluded"],
    )


def _left_out(*, is_sound: bool, has_text: bool) -> dict[str, str]:
    lacks = {} if is_sound else dict.fromkeys(("media", "file", "seconds"), "the samples have no sound")
    return lacks | ({} if has_text else dict.fromkeys(("text", "seconds"), "the samples have no texts"))


def _died(done: Done[Any], rows: pa.Table) -> list[Bad]:
    return [
        (
            row,
            "kills_decoder",
            f"sample {rows['sample_id'][row].as_py()}: reading it ended the process twice; write it again",
        )
        for row in done.deaths
    ]


def _seconds(found: Clips, modality: Speech) -> Array:
    """Returns how long clips are: as decoded; of one that is cut as its header says."""
    limits = modality.limits
    seconds = np.where(found.num_samples > 0, found.num_samples / limits.sample_rate_hz, np.nan)
    if limits.clip_s is None:
        return np.asarray(seconds)
    return np.where(found.num_samples >= round(limits.clip_s * limits.sample_rate_hz), found.facts["file_s"], seconds)


def _by_duration(modality: Speech, rows: pa.Table, found: Clips, stated_s: Array, bad: set[int]) -> list[Bad]:
    """What a build leaves out by what it decoded: `duration_mismatch`, `too_long`, `too_short`."""
    reasons = Coder()
    codes = modality.limits.refused(found.num_samples, stated_s, reasons)
    codes[found.num_samples == 0] = 0
    names = reasons.coded(codes).names
    late = []
    for row in np.flatnonzero(codes).tolist():
        reason, sample_id = names[codes[row]], rows["sample_id"][row].as_py()
        seconds = found.num_samples[row] / modality.limits.sample_rate_hz
        message = f"sample {sample_id}: {seconds:.2f} s of audio, which the duration filters leave out"
        if reason == "duration_mismatch":
            message = modality.limits.message(sample_id, int(found.num_samples[row]), float(stated_s[row]))
        if row not in bad:
            late.append((row, reason, message))
    return late


def coded(column: pa.ChunkedArray) -> tuple[list[str], Ints]:
    """Returns the different strings of a column behind "", and which one each row has; null is ""."""
    encoded = column.dictionary_encode().combine_chunks()
    indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return ["", *encoded.dictionary.to_pylist()], indices + 1


def _refused(bad: Sequence[Bad], rows: pa.Table, manifest: Manifest) -> list[Refused]:
    """Returns what the steps refuse, a row once, and what failed in the listing."""
    first: dict[int, Refused] = {}
    for row, reason, message in sorted(bad, key=lambda each: each[0]):
        sample_id, place = rows["sample_id"][row].as_py(), rows["row"][row].as_py()
        known = Refused(sample_id=sample_id, reason=reason, message=message, row=row, place=place)
        first.setdefault(row, known)
    listed = [
        Refused(sample_id=each["sample_id"], reason=each["reason"], message=each["message"], place=each["row"])
        for each in manifest.rejected.to_pylist()
        if each["kind"] == "failed"
    ]
    return [*first.values(), *listed]


def _vision(work: _Work, pool: Pool, manifest: Manifest, modality: Vision | Images, *, name: str) -> Measured:
    rows, images = manifest.rows, images_of(manifest)
    # Which classes there are, the listing says.
    raw = modality.keeping(rows).with_codec("raw") if isinstance(modality, Images) else modality.with_codec("raw")
    numbers = np.arange(len(images))
    names = image_names(manifest, numbers)

    def task(files_and_rows: tuple[Any, pa.Table], start: int) -> PictureTask:
        files, part = files_and_rows
        return PictureTask(
            start=start, rows=part, files=files, modality=raw, max_open_tars=work.config.run.max_open_tars
        )

    def image_task(start: int, stop: int) -> PictureTask:
        part = images.slice(start, stop - start).append_column(
            "sample_id", pa.array(names[start:stop], pa.large_string())
        )
        return task(narrow(part, manifest.files), start)

    def text_task(start: int, stop: int) -> PictureTask:
        part = conversation_rows(manifest, rows.slice(start, stop - start))
        return task(narrow(part, manifest.files), start)

    seen = work.run(pool, measure_images, image_task, len(images), size=_IMAGES, unit="image")
    said = work.run(pool, measure_texts, text_task, len(rows), size=_TEXTS, unit="text")
    starts, flat = flattened(rows["images"])
    ranges, bad_images = np.full(len(images), np.nan), dict(_dead_images(seen, names))
    for start, (values, bad) in seen.parts.items():
        ranges[start : start + len(values)] = values
        bad_images |= {start + row: (reason, message) for row, reason, message in bad}
    bad_rows: list[Bad] = _died(said, rows)
    for start, (_, bad) in said.parts.items():
        bad_rows += [(start + row, reason, message) for row, reason, message in bad]
    texts = joined_texts({start: part for start, (part, _) in said.parts.items()}, len(rows))
    of_images = [
        (row, *bad_images[image])
        for row in range(len(rows))
        for image in flat[starts[row] : starts[row + 1]].tolist()
        if image in bad_images
    ]
    return Measured(
        name=name,
        modality="vision",
        is_raw=True,
        rate_hz=None,
        ids=rows["sample_id"],
        places=rows["row"].to_numpy(),
        files=[shown_name(file) for file in manifest.files],
        file_of=_file_of(work.config, rows, images, flat),
        languages=[""],
        language_of=np.zeros(len(rows), np.int64),
        facts={**texts.facts, **{key: np.array(values, object) for key, values in texts.strings.items()}},
        content={"text": texts.hashes},
        refused=_refused([*bad_rows, *of_images], rows, manifest),
        images=ImageFacts(
            names=names,
            hashes=images["hash"].to_pylist(),
            width=images["width"].to_numpy(),
            height=images["height"].to_numpy(),
            range=ranges,
            starts=starts,
            flat=flat,
        ),
        classes=_classes(work.config, rows) if work.config.reads == "labels" else None,
        excluded=manifest.counts()["excluded"],
    )


def _file_of(config: Config, rows: pa.Table, images: pa.Table, flat: Array) -> Array:
    """Returns the file of each row: its manifest, or where images are listed themselves its image."""
    if config.source.kind == "folder" and len(flat) == len(rows):
        return np.asarray(images["file"].to_numpy()[flat])
    return np.asarray(rows["group"].to_numpy())


def joined_texts(parts: Mapping[int, Said], count: int) -> Said:
    """Returns the parts of what was measured of `count` texts as one; where a task died, nothing is known."""
    facts: dict[str, Array] = {}
    strings: dict[str, list[str]] = {}
    hashes = np.zeros(count, np.int64)
    for start, part in parts.items():
        stop = start + len(part.hashes)
        hashes[start:stop] = part.hashes
        for name, values in part.facts.items():
            facts.setdefault(name, np.full(count, np.nan))[start:stop] = values
        for name, texts in part.strings.items():
            strings.setdefault(name, [""] * count)[start:stop] = texts
    return Said(facts=facts, strings=strings, hashes=hashes)


def _classes(config: Config, rows: pa.Table) -> Classes:
    """Returns the classes of listed rows, those that are declared, and folders of classes without images."""
    labels = labels_of(rows)
    given = None if config.text is None else config.text.settings.get("classes")
    known = given if given is not None else (None if labels is None else labels.names)
    return Classes(
        names=classes_in(rows["text"].to_pylist(), is_multi=labels is not None and labels.is_multi),
        known=tuple(map(str, known or ())),
        folders=empty_classes(config.source),
    )


def _dead_images(seen: Done[Any], names: Sequence[str]) -> list[tuple[int, tuple[str, str]]]:
    return [
        (image, ("kills_decoder", f"{names[image]}: decoding it ended the process twice; write it again"))
        for image in seen.deaths
    ]
