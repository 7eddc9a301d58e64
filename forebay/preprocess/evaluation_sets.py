"""`forebay evalset`: the tars of all languages, their index and their manifest, made once or gone on with.

The folder holds, beside `{language}_eval.tar`, whose samples are `{key}.wav` (16 kHz, mono, 16-bit PCM) and
`{key}.json` (`id`, `language`, `duration` in seconds, `transcription`, `source`, and `prompt` where there is one):

- `index.json`: `version`, and under `tars` by name `size_bytes`, `num_samples` and `members`, each with `name`,
  `offset` of its data, `size` and `xxh3_128`.
- `evaluation_manifest.json`, written last: `identity` (what decides every byte), `name`, `sample_rate_hz`,
  `selection`, `sources` (`name`, `xxh3_128`), `num_samples`, `hours`, `index` (`name`, `size_bytes`, `xxh3_128`,
  `sha256`), and under `files` a set each: `language` (null: unknown), `name` of the tar, `num_samples`, `hours`,
  `eligible`, `left_out` by reason, `size_bytes`, `xxh3_128`, `sha256`.

Which samples an evaluation set asks for first: a keyed draw for each language.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from forebay.config.tree import Config
from forebay.errors import BuildError, ConfigError
from forebay.preprocess.audio_group import DurationLimits
from forebay.preprocess.evalset_tars import TarTask, make_tar
from forebay.preprocess.group import narrow
from forebay.preprocess.groups import Listing
from forebay.preprocess.listing import resolve
from forebay.preprocess.pool import Pool
from forebay.preprocess.prepared import load as load_prepared
from forebay.rows.named_files import require_unchanged
from forebay.rows.readers.python_inputs import list_inputs
from forebay.steps.audio.waveform import Decode
from forebay.steps.recipe import Recipe, recipe_of
from forebay.store.files import write_aside
from forebay.store.layout import Ints
from forebay.store.memo import Memo
from forebay.store.output import Entry, Filling, Summed, filling
from forebay.store.remote.raw.raw_sources import naming_urls
from forebay.task_map import WorkerDied
from forebay.terminal import CommandReport, Progress
from forebay.visible import from_here, human_bytes

UNKNOWN = "unknown"
"""The set of the samples without a language."""

RULE = (
    "for each language, eligible samples by rising xxh3-64(sample id, seed); the first per_language that decode and "
    "pass the filters, no two of equal samples; in each tar by id"
)

_CHUNK_ROWS = 1 << 16
_UNSAFE = re.compile(r"""[/\\:*?"<>|%#]""")


@dataclass(frozen=True, kw_only=True)
class DrawnSet:
    """The candidates of one set. language: None where they have none. rows: int64, in the order of the draw."""

    language: str | None
    rows: Ints

    @property
    def name(self) -> str:
        """The name of the set."""
        return UNKNOWN if self.language is None else self.language

    @property
    def tar(self) -> str:
        """The name of its tar."""
        return f"{self.name}_eval.tar"


def drawn(rows: pa.Table, *, seed: int) -> list[DrawnSet]:
    """Returns the candidates of every language, by its name.

    A sample's place depends on its id and the seed alone: data that is added or removed moves no other sample.
    Raises ConfigError for a language that cannot be a part of a file's name, and where samples without a language
    would share a tar with a language of that name.
    """
    column = rows["language"].combine_chunks() if rows.num_rows else pa.array([], pa.large_string())
    encoded = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column).dictionary_encode()
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    names = encoded.dictionary.to_pylist()
    draws = _draws(rows["sample_id"], seed)
    found = []
    for code in np.unique(codes).tolist():
        members = np.flatnonzero(codes == code)
        language = None if code < 0 else names[code]
        if language is not None:
            _require_safe(language, len(members))
        found.append(DrawnSet(language=language, rows=members[np.argsort(draws[members], kind="stable")]))
    found.sort(key=lambda each: each.name)
    if UNKNOWN in names and any(each.language is None for each in found):
        raise ConfigError(
            f"some samples have no language and some have the language {UNKNOWN!r}; both would be {UNKNOWN}_eval.tar: "
            "correct the manifest, or name the languages that you want in source.languages"
        )
    return found


def _draws(ids: pa.ChunkedArray, seed: int) -> np.ndarray:
    draws = np.zeros(len(ids), np.uint64)
    for first in range(0, len(ids), _CHUNK_ROWS):
        part = ids.slice(first, _CHUNK_ROWS).to_pylist()
        draws[first : first + len(part)] = [xxhash.xxh3_64_intdigest(text.encode(), seed) for text in part]
    return draws


def _require_safe(language: str, count: int) -> None:
    is_safe = (
        language.isprintable()
        and not _UNSAFE.search(language)
        and language == language.strip()
        and language[0] not in ".-"
        and len(language.encode()) <= 100
    )
    if not is_safe:
        raise ConfigError(
            f"{count} samples have the language {language[:60]!r}, which cannot be part of a tar's name "
            "(LANGUAGE_eval.tar); correct it in the manifest, or name the languages that you want in source.languages"
        )


logger = logging.getLogger(__name__)
RATE_HZ = 16_000
INDEX, DOCUMENT = "index.json", "evaluation_manifest.json"
_VERSION = 1
"""Moves when the same data gives other bytes, or the documents have another form."""
_SPARE = 64
"""Candidates beyond those wanted that a task has at first, for bad ones."""


@dataclass(frozen=True, kw_only=True)
class EvalsetOptions:
    """The request for evaluation sets. seed: of the draw."""

    out: Path
    per_language: int = 500
    seed: int = 17
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class EvalsetReport(CommandReport):
    """The sets made; its fields are those of the JSON document. sets: as `files` of the manifest. kept: tars that were
    there."""

    folder: str
    key: str
    num_samples: int
    hours: float
    size_bytes: int
    per_language: int
    kept: int
    sets: Sequence[Mapping[str, Any]]
    seconds: float

    def lines(self) -> Iterator[str]:
        """Yields what `forebay evalset` prints."""
        there = f", {self.kept} of them were there" if self.kept else ""
        yield (
            f"{sum(each['name'] is not None for each in self.sets)} sets{there}: {self.num_samples} samples, "
            f"{self.hours:.2f} h, {human_bytes(self.size_bytes)}, {self.seconds:.1f} s: {from_here(self.folder)}"
        )
        for each in self.sets:
            language = each["language"] or "unknown (no language)"
            few = "" if each["num_samples"] >= self.per_language else f" of {self.per_language} wanted"
            left = ", ".join(f"{reason} {count}" for reason, count in each["left_out"].items())
            yield (
                f"  {language}: {each['num_samples']} samples{few}, {each['hours']:.2f} h"
                + (f"; left out: {left}" if left else "")
                + ("" if each["name"] else "; no tar")
            )


def make_evalset(config: Config, options: EvalsetOptions) -> EvalsetReport:
    """Makes a folder hold the evaluation sets of a config, and returns what was made; interrupted, it goes on.

    The samples are those that a build of the config would take: its filters, its durations, its text. Of a clip that
    cannot be used the next of the draw takes the place. A language with fewer samples than wanted has all of them;
    samples without a language are the set `unknown`. `overlong = "clip"` cuts clips here too; a feature's own limit
    (30 s of log_mel) does not.
    Raises ConfigError for a config without recordings, and for a folder that holds anything else; BuildError where no
    sample is left or a source changes meanwhile.
    """
    started_s = time.monotonic()
    recipe = _speech_recipe(config, options)
    list_inputs(config)
    memo = Memo.of(config)
    with naming_urls(), Pool(config.run.num_workers or os.cpu_count() or 1, shows=options.progress) as pool:
        standing = load_prepared(config, recipe)
        listing = resolve(config, memo, pool.map, recipe=recipe) if standing is None else standing.listing
        draws = drawn(listing.rows, seed=options.seed)
        identity = {
            "version": _VERSION,
            "key": listing.key,
            "recipe_key": recipe.key,
            "per_language": options.per_language,
            "seed": options.seed,
        }
        with filling(options.out, DOCUMENT, identity=identity, option="--out") as folder:
            kept = len(folder.finished) if folder.document is None else len(folder.document["files"])
            if folder.document is None:
                _fill(folder, config, options, listing, draws, pool)
                require_unchanged(listing.files, memo=memo, map_=pool.map)
                _seal(folder, config, listing, draws)
    assert folder.document is not None
    found = folder.document
    return EvalsetReport(
        folder=str(options.out),
        key=listing.key,
        num_samples=found["num_samples"],
        hours=found["hours"],
        size_bytes=sum(each["size_bytes"] for each in found["files"]),
        per_language=options.per_language,
        kept=kept,
        sets=found["files"],
        seconds=time.monotonic() - started_s,
    )


def _speech_recipe(config: Config, options: EvalsetOptions) -> Recipe:
    if options.per_language < 1:
        raise ConfigError(f"--per-language {options.per_language}: wanted 1 or more")
    if not 0 <= options.seed < 1 << 64:
        raise ConfigError(f"--seed {options.seed}: wanted 0 to {(1 << 64) - 1}")
    if config.audio is None:
        raise ConfigError(
            f"{config.path} is of images, and an evaluation set is of recordings; name a config of speech"
        )
    recipe = recipe_of(config)
    if recipe.audio is None or not recipe.audio.features.reads_sound:
        raise ConfigError(
            f"{config.path} has no recordings (source.kind {config.source.kind!r}, audio.features "
            f"{config.audio.features!r}), and an evaluation set is of recordings; name a config of the raw recordings"
        )
    return recipe


def _fill(
    folder: Filling, config: Config, options: EvalsetOptions, listing: Listing, draws: Sequence[DrawnSet], pool: Pool
) -> None:
    """Makes the tars that are not there; a set that ran out of candidates is asked for again, with twice as many."""
    done = {entry["language"] for entry in folder.finished}
    waiting = [draw for draw in draws if draw.language not in done]
    number = options.per_language + max(_SPARE, options.per_language // 4)
    bar = Progress(len(draws), unit="set", desc="evalset", is_shown=options.progress)
    with bar:
        bar.update(len(done), is_kept=True)
        while waiting:
            tasks = (_task(config, options, listing, draw, number) for draw in waiting)
            try:
                short = _made(folder, pool.run(make_tar, tasks), bar)
            except WorkerDied as err:
                raise BuildError(_death(config, err), code="FB302") from err
            waiting, number = [draw for draw in waiting if draw.language in short], 2 * number


def _made(folder: Filling, results: Iterator[tuple[TarTask, Entry | None]], bar: Progress) -> list[str | None]:
    """Notes the tars that are made, and returns the languages that had too few candidates."""
    short = []
    for task, entry in results:
        if entry is None:
            short.append(task.language)
            continue
        folder.add(entry)
        bar.update()
        for message in entry["messages"]:
            logger.warning("%s: left out: %s", task.path.name, message)
    return short


_NOT_OF_TASKS = ("member", "duration_s", "explicit_id", "group")
"""Columns of a listing that no task has a use for."""


def _task(config: Config, options: EvalsetOptions, listing: Listing, draw: DrawnSet, number: int) -> TarTask:
    columns = [name for name in listing.rows.column_names if name not in _NOT_OF_TASKS]
    files, rows = narrow(listing.rows.select(columns).take(draw.rows[:number]), listing.files)
    source = config.source
    clip_s = source.max_duration_s if source.overlong == "clip" else None
    decode = Decode(sample_rate_hz=RATE_HZ, clip_s=clip_s, max_sample_bytes=source.max_sample_bytes)
    return TarTask(
        language=draw.language,
        path=options.out / draw.tar,
        rows=rows,
        files=files,
        text=listing.groups.text,
        column=source.columns.media,
        decode=decode,
        limits=DurationLimits.of(source, decode),
        wanted=options.per_language,
        is_all=number >= len(draw.rows),
        max_open_tars=config.run.max_open_tars,
    )


def _death(config: Config, err: WorkerDied) -> str:
    sample_id = err.task.rows["sample_id"][err.position].as_py()
    return (
        f"{err} at sample {sample_id!r} of {err.task.path.name}; finished tars are kept. If that is to blame, leave it "
        f'out: [source] exclude = ["{sample_id}"] in {config.path}, and write to a new folder: its key is another one'
    )


def _seal(folder: Filling, config: Config, listing: Listing, draws: Sequence[DrawnSet]) -> None:
    eligible = {draw.language: len(draw.rows) for draw in draws}
    entries = sorted(folder.finished, key=lambda entry: entry["language"] or UNKNOWN)
    num_samples = sum(entry["num_samples"] for entry in entries)
    if not num_samples:
        raise BuildError(
            f"{config.path}: no sample is left of {len(listing.rows)}; mend what was left out, or change the filters "
            f"of [source]; what a build leaves out, and why: forebay preprocess {config.named}"
        )
    index = _write_index(folder, entries)
    folder.seal(
        {
            "name": config.name,
            "sample_rate_hz": RATE_HZ,
            "selection": RULE,
            "num_samples": num_samples,
            "hours": sum(entry["hours"] for entry in entries),
            "sources": [{"name": source.name, "xxh3_128": source.xxh3_128} for source in listing.sources()],
            "index": index,
            "files": [_set(entry, eligible[entry["language"]]) for entry in entries],
        }
    )


def _set(entry: Entry, eligible: int) -> Entry:
    kept = {name: value for name, value in entry.items() if name not in ("members", "messages")}
    return {"language": kept.pop("language"), "name": kept.pop("name"), "eligible": eligible, **kept}


def _write_index(folder: Filling, entries: Sequence[Entry]) -> Entry:
    """Writes index.json and returns what is said of it."""
    tars = {
        entry["name"]: {name: entry[name] for name in ("size_bytes", "num_samples", "members")}
        for entry in entries
        if entry["name"] is not None
    }
    with write_aside(folder.folder / INDEX) as raw:
        file = Summed(raw, with_sha256=True)
        file.write(json.dumps({"version": _VERSION, "tars": tars}, indent=1).encode("ascii") + b"\n")
    return {"name": INDEX, **file.sums()}
