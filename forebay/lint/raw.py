"""The raw data of a config, measured: listed, read and decoded as a build does, in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from forebay.config.tree import Config
from forebay.lint.items import RawTask, measure_rows
from forebay.lint.limits import Limits
from forebay.lint.measured import Classes, ImageFacts, Measured, Refused
from forebay.lint.text import classes_in, kind_of
from forebay.lint.walk import Bad, Columns, Walk
from forebay.preprocess.audio_group import AudioItems
from forebay.preprocess.coded import Coder
from forebay.preprocess.cut import Cut
from forebay.preprocess.group import ItemGroup, Items
from forebay.preprocess.groups import Groups, Listing
from forebay.preprocess.listing import listed
from forebay.rows.manifest import Manifest
from forebay.rows.meanings.image_class import empty_classes, labels_of
from forebay.rows.named_files import shown_name
from forebay.steps.recipe import Recipe
from forebay.steps.text.normal.table import code_in
from forebay.store.layout import TEXT, Array, Group, Ints
from forebay.store.remote.raw.sources import naming_urls

_ITEMS, _TEXTS = 64, 4096
"""Rows of a task: enough to be worth its sending, few enough that the last one does not keep all waiting."""


def measure_raw(config: Config, recipe: Recipe, limits: Limits, *, name: str, progress: bool) -> Measured:
    """Returns what is known of the raw data of a config. Its samples are those that the listing leaves.

    Functions of the user in `text.normalize` are not run, which a note says.
    Raises ConfigError or ManifestError where the config or its manifest cannot be used, TarError or OSError where a
    file as a whole cannot be read.
    """
    groups = Groups.of(config, recipe.without_code())
    walk = Walk(workers=config.run.num_workers, progress=progress)
    with naming_urls(), walk.pool() as pool:
        manifest = listed(config, groups, map_=pool.map)
        listing = Listing(groups=groups.keeping(manifest.rows).under("raw"), manifest=manifest, key="")
        counts = {group.name: (len(listing.items[group.name].table), _ITEMS, group.unit) for group in groups.items}
        counts[TEXT] = (len(manifest.rows), _TEXTS, groups.text.unit)
        found = {
            group: walk.columns(
                pool, measure_rows, tasks_of(config, listing, group, limits), count, size=size, unit=unit
            )
            for group, (count, size, unit) in counts.items()
        }
    return _measured(config, listing, found, name=name)


def tasks_of(config: Config, listing: Listing, group: Group, limits: Limits) -> Callable[[int, int], RawTask]:
    """Returns what gives a task of rows [start, stop) of a group."""

    def task(start: int, stop: int) -> RawTask:
        cut = Cut(group=group, index=0, start=start, stop=stop, key="")
        files, rows = listing.groups.task_rows(listing, cut)
        return RawTask(
            start=start,
            rows=rows,
            files=files,
            groups=listing.groups,
            group=group,
            limits=limits,
            max_open_tars=config.run.max_open_tars,
        )

    return task


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What the items of a group say of the samples: fields of `Measured`, of which facts and content of all are joined.

    late: rows that are left out for what was decoded.
    """

    facts: Mapping[str, Array] = field(default_factory=dict)
    content: Mapping[str, Ints] = field(default_factory=dict)
    late: Sequence[Bad] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def _measured(config: Config, listing: Listing, found: Mapping[Group, Columns], *, name: str) -> Measured:
    rows, manifest, text, said = listing.rows, listing.manifest, listing.groups.text, found[TEXT]
    bad = [*said.bad, *_dead(said, lambda row: f"sample {rows['sample_id'][row].as_py()}")]
    known = [_Known(facts=said.facts, content=said.content)]
    for group in listing.groups.items:
        bad += _of_rows(listing.items[group.name], _bad_items(listing, group, found[group.name]))
        known += [_KNOWN[group.name](listing, group, found[group.name])] if group.name in _KNOWN else []
    refused = {row for row, _, _ in bad}
    bad += [each for one in known for each in one.late if each[0] not in refused]
    fields = {key: value for one in known for key, value in one.fields.items()}
    is_class = kind_of(text.steps.step.name, lists=bool(text.listed)) == "class"
    languages, language_of = languages_of(rows)
    return Measured(
        name=name,
        is_raw=True,
        ids=rows["sample_id"],
        places=rows["row"].to_numpy(),
        files=[shown_name(file) for file in manifest.files],
        file_of=_file_of(config, listing),
        languages=languages,
        language_of=language_of,
        facts={key: column for one in known for key, column in one.facts.items()},
        content={key: column for one in known for key, column in one.content.items()},
        refused=_refused(bad, rows, manifest),
        classes=_classes(config, rows) if is_class else None,
        left_out={} if text.listed else _lacks(said, is_sound="rate_hz" in fields),
        excluded=manifest.counts()["excluded"],
        notes=_not_run(config),
        **fields,
    )


def _not_run(config: Config) -> list[str]:
    code = [] if config.text is None else code_in(config.text.settings)
    return [f"{entry} was not run: lint runs no code, so labels are judged as they are without it" for entry in code]


def _lacks(said: Columns, *, is_sound: bool) -> dict[str, str]:
    """Returns what a set of recordings, or of texts alone, does not have."""
    has_text = bool(np.any(said.facts.get("chars", np.zeros(0)) > 0))
    lacks = {} if is_sound else dict.fromkeys(("sound", "file", "seconds"), "the samples have no sound")
    return lacks | ({} if has_text else dict.fromkeys(("text", "seconds"), "the samples have no texts"))


def _dead(found: Columns, name: Callable[[int], str]) -> list[Bad]:
    return [
        (row, "kills_decoder", f"{name(row)}: reading it ended the process twice; write it again")
        for row in found.deaths
    ]


def _bad_items(listing: Listing, group: ItemGroup, found: Columns) -> list[Bad]:
    table, label = listing.items[group.name].table, "sample " if group.lists is None else ""

    def name(item: int) -> str:
        return label + str(group.task_rows(table.slice(item, 1), listing.files)["sample_id"][0].as_py())

    return [*found.bad, *_dead(found, name)]


def _of_rows(items: Items, bad: Sequence[Bad]) -> list[Bad]:
    """Returns what is bad of items as what is bad of the rows that have them."""
    if items.offsets is None:
        return list(bad)
    owners = np.repeat(np.arange(len(items.offsets) - 1), np.diff(items.offsets))
    why = {item: (reason, message) for item, reason, message in bad}
    uses = np.flatnonzero(np.isin(items.places, list(why)))
    return [(int(owners[use]), *why[int(items.places[use])]) for use in uses]


def _of_clips(listing: Listing, group: AudioItems, found: Columns) -> _Known:
    """Seconds: as decoded; of a clip that is cut as its header says."""
    limits, rows, facts = group.limits, listing.rows, {**found.facts}
    num_samples = facts.pop("num_samples", np.zeros(len(rows), np.int64))
    seconds = np.where(num_samples > 0, num_samples / limits.sample_rate_hz, np.nan)
    if limits.clip_s is not None and "file_s" in facts:
        is_cut = num_samples >= round(limits.clip_s * limits.sample_rate_hz)
        seconds = np.where(is_cut, facts["file_s"], seconds)
    stated_s = rows["stated_s"].to_numpy(zero_copy_only=False).astype(np.float64)
    longer = limits.longer(num_samples, stated_s) & (num_samples > 0)
    rate = {"rate_hz": limits.sample_rate_hz} if group.steps.features.reads_sound else {}
    return _Known(
        facts={**facts, "stated_s": stated_s, "seconds": seconds},
        content=found.content,
        late=list(_by_duration(group, rows, num_samples, stated_s)),
        fields={"longer": longer, **rate},
    )


def _by_duration(group: AudioItems, rows: pa.Table, num_samples: Array, stated_s: Array) -> Iterator[Bad]:
    """Yields what a build leaves out by what it decoded: `duration_mismatch`, `too_long`, `too_short`."""
    reasons, limits = Coder(), group.limits
    codes = limits.refused(num_samples, stated_s, reasons)
    codes[num_samples == 0] = 0
    names = reasons.coded(codes).names
    for row in np.flatnonzero(codes).tolist():
        reason, sample_id, count = names[codes[row]], rows["sample_id"][row].as_py(), int(num_samples[row])
        seconds = count / limits.sample_rate_hz
        message = f"sample {sample_id}: {seconds:.2f} s of audio, which the duration filters leave out"
        if reason == "duration_mismatch":
            message = limits.message(sample_id, count, float(stated_s[row]))
        yield row, reason, message


def _of_images(listing: Listing, group: ItemGroup, found: Columns) -> _Known:
    items = listing.items[group.name]
    images = ImageFacts(
        names=group.task_rows(items.table, listing.files)["sample_id"].to_pylist(),
        hashes=items.table["hash"].to_pylist(),
        width=items.table["width"].to_numpy(),
        height=items.table["height"].to_numpy(),
        range=found.facts.get("range", np.full(found.count, np.nan)),
        starts=np.zeros(1, np.int64) if items.offsets is None else items.offsets,
        flat=items.places,
    )
    return _Known(fields={"images": images})


_KNOWN: Mapping[Group, Callable[[Listing, Any, Columns], _Known]] = {"audio": _of_clips, "image": _of_images}
"""What is said of samples by the items of a group."""


def languages_of(rows: pa.Table) -> tuple[list[str], Ints]:
    """Returns the different languages of rows behind "", and which one each row has."""
    return coded(rows["language"]) if "language" in rows.column_names else ([""], np.zeros(len(rows), np.int64))


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
    return [
        *first.values(),
        *(
            Refused(sample_id=each["sample_id"], reason=each["reason"], message=each["message"], place=each["row"])
            for each in manifest.rejected.to_pylist()
            if each["kind"] == "failed"
        ),
    ]


def _file_of(config: Config, listing: Listing) -> Array:
    """Returns the file of each row: the one that holds its media, where images are listed themselves, or lists it."""
    rows = listing.rows
    if "file" in rows.column_names:
        return np.asarray(rows["file"].to_numpy())
    (items, *_) = listing.items.values()
    if config.source.kind == "folder" and len(items.places) == len(rows):
        return np.asarray(items.table["file"].to_numpy()[items.places])
    return np.asarray(rows["group"].to_numpy())


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
