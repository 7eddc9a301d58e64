"""`forebay text`: one text, one sample of a source, or the report over all of them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from forebay.config.data import SOURCE_KINDS
from forebay.config.tree import Config
from forebay.errors import ConfigError, SampleError
from forebay.preprocess.groups import Groups
from forebay.preprocess.listing import listed
from forebay.preprocess.pool import Pool
from forebay.progress import Progress
from forebay.rows.manifest import Manifest, storable
from forebay.rows.named_files import shown_name
from forebay.steps.recipe import Recipe, recipe_of
from forebay.steps.text.transcript import Transcript
from forebay.store.layout import Array
from forebay.store.remote.raw.sources import naming_urls
from forebay.transcripts.look import Asked, Look, Looker
from forebay.transcripts.one import TextView
from forebay.transcripts.pieces import Pieces
from forebay.transcripts.report import TextReport
from forebay.transcripts.tally import Tally
from forebay.visible import VisibleStream, from_here, has_colours

_BATCH = 2048
"""Texts that are looked at together."""

_STYLES = {"removed": "30;41", "added": "30;42"}
"""Black on red and on green, so that spaces are seen."""


@dataclass(frozen=True)
class _Opened:
    """A config's text section with its tokenizer and steps loaded."""

    config: Config
    recipe: Recipe
    looker: Looker
    pieces: Pieces

    @classmethod
    def of(cls, config: Config) -> _Opened:
        recipe = recipe_of(config)
        step = recipe.text.step
        if not isinstance(step, Transcript) or config.text is None:
            if config.vision is not None:
                raise ConfigError(
                    f"{config.path} has [vision], and forebay text shows transcripts; for conversations: "
                    f"forebay inspect {from_here(config.path)} --sample 0"
                )
            raise ConfigError(
                f"{config.path} has no [text] section, so nothing becomes of texts; add it: [text] tokenizer = ..."
            )
        needs_text = SOURCE_KINDS[config.source.kind].needs_text
        looker = Looker(step, Path(config.text.tokenizer), needs_text=needs_text)
        return cls(config, recipe, looker, Pieces(looker.encoder.vocabulary))

    def manifest(self, *, progress: bool) -> Manifest:
        """Returns the listing of the source; no recording is decoded."""
        groups = Groups.of(self.config, self.recipe)
        with naming_urls(), Pool(self.config.run.num_workers or os.cpu_count() or 1, shows=progress) as pool:
            return listed(self.config, groups, map_=pool.map if groups.items else map)

    def view(self, look: Look, *, is_diff: bool, source: str = "", row: int | None = None) -> TextView:
        return TextView(
            look=look,
            pieces=self.pieces,
            max_label_tokens=self.looker.limit,
            detects=self.looker.detects,
            source=source,
            row=row,
            is_diff=is_diff,
        )


def view_text(config: Config, text: str, *, language: str = "", is_diff: bool = False) -> TextView:
    """Returns what becomes of a text that is given. Raises ConfigError where the config cannot be used."""
    opened = _Opened.of(config)
    (look,) = opened.looker.look([Asked(sample_id="--text", text=text, language=language)])
    return opened.view(look, is_diff=is_diff)


def view_sample(config: Config, wanted: str, *, is_diff: bool = False, progress: bool = True) -> TextView:
    """Returns what becomes of a sample of the source. wanted: its row of the listing, or its id.

    Raises ConfigError where there is no such sample, ManifestError where the manifest cannot be used.
    """
    opened = _Opened.of(config)
    manifest = opened.manifest(progress=progress)
    rows = manifest.rows
    place = _place(rows, wanted)
    if place is None:
        raise _absent(manifest, wanted, config)
    (asked,) = _asked(rows.slice(place, 1))
    (look,) = opened.looker.look([asked])
    source = shown_name(manifest.files[rows["file"][place].as_py()])
    return opened.view(look, is_diff=is_diff, source=source, row=rows["row"][place].as_py())


def report_texts(config: Config, *, progress: bool = True) -> TextReport:
    """Returns the report over all texts that a config lists. No recording is decoded, no cache is read.

    Raises ConfigError or ManifestError where the config or its manifest cannot be used.
    """
    opened = _Opened.of(config)
    manifest = opened.manifest(progress=progress)
    rows = manifest.rows
    tally = Tally(opened.looker.step_names, opened.pieces.codes)
    for sample_id, reason, message in manifest.failed():
        tally.fail(reason, sample_id, message)
    seconds = _seconds(opened.recipe, rows)
    with Progress(len(rows), desc="text", unit="text", is_shown=progress) as bar:
        for start in range(0, len(rows), _BATCH):
            looks = opened.looker.look(_asked(rows.slice(start, _BATCH)))
            tally.add(looks, None if seconds is None else seconds[start : start + _BATCH])
            bar.update(len(looks))
    return TextReport(
        config=config.path,
        tally=tally,
        rows=rows,
        max_label_tokens=opened.looker.limit,
        detects=opened.looker.detects,
        is_part=config.source.max_samples is not None and len(rows) >= config.source.max_samples,
        durations=_durations(rows, seconds),
        excluded=manifest.counts()["excluded"],
    )


def print_view(view: TextView) -> None:
    """Prints a text to standard output: what changed in colour on a terminal, elsewhere with marks."""
    has_colour = has_colours(sys.stdout)
    for line in view.lines(has_marks=not has_colour):
        for part in line:
            if part.change in _STYLES and isinstance(sys.stdout, VisibleStream) and has_colour:
                sys.stdout.write_styled(part.text, _STYLES[part.change])
            else:
                sys.stdout.write(part.text)
        sys.stdout.write("\n")


def _place(rows: pa.Table, wanted: str) -> int | None:
    """Returns where a sample stands: a number without leading zeros is a row first, all else an id."""
    number = _number(wanted)
    if number is not None and len(found := np.flatnonzero(rows["row"].to_numpy() == number)):
        return int(found[0])
    place = int(rows["sample_id"].index(pa.scalar(storable(wanted), pa.large_string())).as_py())
    return None if place < 0 else place


def _number(wanted: str) -> int | None:
    is_number = wanted.isascii() and wanted.isdecimal() and len(wanted) < 19 and str(int(wanted)) == wanted
    return int(wanted) if is_number else None


def _absent(manifest: Manifest, wanted: str, config: Config) -> SampleError | ConfigError:
    """Returns why a sample is not among the rows: it was left out, or nothing is called that."""
    rejected, number, name = manifest.rejected, _number(wanted), storable(wanted)
    for each in rejected.filter(
        pc.or_(pc.equal(rejected["row"], number), pc.equal(rejected["sample_id"], name))
    ).to_pylist():
        return SampleError(each["reason"], f"--sample {wanted}: {each['message']}")
    rows = manifest.rows
    span = f", rows 0 to {pc.max(rows['row']).as_py()}" if len(rows) else ""
    return ConfigError(
        f"--sample {wanted}: {from_here(config.path)} lists {len(rows)} samples{span}, and none with that id; "
        "the ids stand in the manifest"
    )


def _asked(rows: pa.Table) -> list[Asked]:
    columns = (rows[name].to_pylist() for name in ("sample_id", "text", "language", "prompt"))
    return [
        Asked(sample_id=sample_id, text=text, language=language or "", prompt=prompt or "")
        for sample_id, text, language, prompt in zip(*columns, strict=True)
    ]


def _seconds(recipe: Recipe, rows: pa.Table) -> Array | None:
    """Returns how long the recordings are as manifest or headers say, NaN where neither does; None without audio."""
    return rows["duration_s"].to_numpy().astype(np.float64) if recipe.audio is not None else None


def _durations(rows: pa.Table, seconds: Array | None) -> str:
    """Returns where the lengths are from, "" where there are none."""
    if seconds is None or not np.isfinite(seconds).any():
        return ""
    stated = int(np.isfinite(rows["stated_s"].to_numpy(zero_copy_only=False).astype(np.float64)).sum())
    if stated == len(rows):
        return "by the manifest"
    return "by their headers" if not stated else "by the manifest or their headers"
