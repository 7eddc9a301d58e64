"""A cache as one JSON document: all that `forebay inspect` prints of it, with histograms of the lengths.

How many samples of a cache of images have each class; what was detected of the languages of a cache, and where that is
not what its manifest says; its plans, as they stand under `plans/` of its root: each as a document, and a pack of one.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forebay.errors import CacheCorruptError, CacheError, ConfigError
from forebay.inspect.listed_groups import SeenItem, float32_bytes, image_settings_of, listed_groups
from forebay.inspect.sample import Sample, check_index, number_of, read_sample, sample_index
from forebay.inspect.seen_images import duration_histogram
from forebay.plan.disk import cache_key_of, is_of_all, planned_samples, read_metadata, read_statistics
from forebay.steps.form import promises
from forebay.steps.table import axis_names
from forebay.steps.text.script import code_of
from forebay.store.cache import Cache
from forebay.store.cut_samples import CutPiece, CutSamples, ItemKind
from forebay.store.layout import METADATA, PLANS, Array, FieldSpec, Group
from forebay.store.metadata import check_description, load_array
from forebay.store.selection import origin
from forebay.terminal import human_share, table
from forebay.visible import printable

logger = logging.getLogger(__name__)
_HELD = ("samples", "tokens", "patches", "frames", "images")
"""The names that the statistics of packs count."""
_NO_LENGTHS = "0-1 tokens"
"""The only bucket of images without texts."""


def plans_of(key: str, roots: Iterable[Path]) -> list[dict[str, Any]]:
    """Returns one document a plan of the cache `key` under these cache roots, sorted by folder name.

    Each has `key`, `kind`, `folder`, `settings` and `statistics` (of packing_stats.json), and what the plan says of
    `num_batches`, `padding` or `num_packs`, `fill`. A plan that cannot be read is logged and left out: it costs
    seconds to make again, and must not hide the cache.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in (path.parent for root in roots for path in sorted((root / PLANS).glob(f"*/{METADATA}"))):
        try:
            metadata = read_metadata(folder)
            if key in (*metadata["plan"]["cache_keys"], cache_key_of(metadata)):
                found.setdefault(metadata["plan_key"], _described(folder, metadata))
        except (CacheError, OSError) as err:
            logger.warning("leaving out a plan: %s", err)
    return sorted(found.values(), key=lambda plan: Path(plan["folder"]).name)


def read_plan(folder: Path) -> dict[str, Any]:
    """Returns the document of a plan, as in `plans_of`, with `num_samples`, `cache_keys` and `arrays` (their entries).

    Raises CacheCorruptError, CacheMismatchError for what is no plan or one of a newer forebay, OSError.
    """
    metadata = read_metadata(folder)
    return {
        **_described(folder, metadata),
        "num_samples": metadata["num_samples"],
        "cache_keys": metadata["plan"]["cache_keys"] if "filter" not in metadata else [cache_key_of(metadata)],
        "arrays": metadata["arrays"]
        | {n: e for n, e in metadata.get("filter", {}).items() if n in ("selected", "cut")},
    }


def _described(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    figures = ("num_batches", "padding", "num_packs", "fill")
    return {
        "key": metadata["plan_key"],
        "kind": metadata["kind"],
        **{name: metadata[name] for name in figures if name in metadata},
        "folder": str(folder),
        "settings": metadata["plan"]["settings"],
        **({"filter": metadata["filter"]["said"]} if not is_of_all(metadata) else {}),
        "statistics": read_statistics(folder, metadata),
    }


def is_without_sound(plan: Mapping[str, Any]) -> bool:
    """Returns whether the range of every bucket of a plan ends with ` tokens`; False of a plan without buckets."""
    ranges = [bucket["range"] for bucket in plan["statistics"].get("buckets") or ()]
    return bool(ranges) and all(str(each).endswith(" tokens") for each in ranges)


def shown_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a plan; of one without sound not those of seconds, which are idle there."""
    idle = is_without_sound(plan)
    return {name: value for name, value in plan["settings"].items() if not (idle and name.endswith("_s"))}


def bucket_range(bucket: Mapping[str, Any]) -> str:
    """Returns the range of a bucket in words, with two decimals: samples without tokens have no lengths."""
    text = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", str(bucket["range"]))
    if bucket.get("tokens"):
        return f"{text}, {bucket['tokens'][0]}-{bucket['tokens'][1]} tokens"
    return "no lengths" if text == _NO_LENGTHS else text


def has_lengths(plan: Mapping[str, Any]) -> bool:
    """Returns whether a plan's samples have lengths, so that its figures of padding mean something."""
    buckets = plan["statistics"].get("buckets") or ()
    return not buckets or any(bucket["range"] != _NO_LENGTHS for bucket in buckets)


def plan_figures(plan: Mapping[str, Any]) -> list[str]:
    """Returns how many batches or packs a plan has, and how much of them is padding or filled, in words."""
    parts = [f"{plan[name]:,} {name.removeprefix('num_')}" for name in ("num_batches", "num_packs") if name in plan]
    padded = ("padding",) if has_lengths(plan) else ()
    parts += [f"{human_share(plan[name])} {name}" for name in (*padded, "fill") if name in plan]
    random, tokens = (plan["statistics"].get(name) for name in ("padding_random_order", "token_padding"))
    parts += [] if random is None or not padded else [f"{human_share(random)} in random order"]
    return parts if tokens is None else [*parts, f"{human_share(tokens)} padding of label tokens"]


def held_rows(statistics: Mapping[str, Any]) -> list[list[str]]:
    """Returns a row for each thing that packs hold: its name, and how many a pack holds on average, least and most."""
    held = {name: statistics[name] for name in _HELD if name in statistics}
    return [[n, f"{found['mean']:,.1f}", f"{found['min']:,}", f"{found['max']:,}"] for n, found in held.items()]


def unplaced_text(statistics: Mapping[str, Any]) -> str:
    """Returns how many samples no pack holds, by the reason; empty where there are none."""
    return ", ".join(f"{reason} {count:,}" for reason, count in statistics["unplaced"].items() if count)


def pack_bytes(cache: Cache, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan, with `bytes_per_pack` (of the cache) and `float32_bytes_per_pack` if it is one of packs.

    `float32_bytes_per_pack` is what one pack's `pixel_values` take: its images as often as its samples use them.
    """
    patches = plan["statistics"].get("patches")
    if plan["kind"] != "pack" or not plan["num_packs"] or patches is None or "image" not in cache.constants:
        return dict(plan)
    return {
        **plan,
        "bytes_per_pack": int(cache.metadata["size_bytes"]) / plan["num_packs"],
        "float32_bytes_per_pack": float32_bytes(patches["mean"], image_settings_of(cache)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One pack as a plan lists it, before any shuffling of packs. segments: its samples, in the order of the row."""

    index: int
    num_packs: int
    seq_len: int
    max_patches: int | None
    segments: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments; the rest of `seq_len` is padding, where it is padded."""
        return sum(_tokens(sample) for sample in self.segments)

    @property
    def images(self) -> list[SeenItem]:
        """The images of all segments; one that two segments use is there twice."""
        return [image for sample in self.segments for image in sample.items.get("image", [])]

    def to_json(self) -> dict[str, Any]:
        """Returns the `pack` part of `forebay inspect PLAN --sample I --json`."""
        ends = np.cumsum([_tokens(sample) for sample in self.segments]).tolist()
        segments = [
            {"start": start, "end": end, "num_learnt": sample.num_learnt, **sample.to_json()}
            for start, end, sample in zip([0, *ends], ends, self.segments, strict=False)
        ]
        return {
            "index": self.index,
            "num_tokens": self.num_tokens,
            "num_learnt": sum(sample.num_learnt for sample in self.segments),
            "seq_len": self.seq_len,
            "fill": self.num_tokens / self.seq_len,
            "pad_tokens": self.seq_len - self.num_tokens,
            "num_patches": sum(sample.row.get("num_patches", 0) for sample in self.segments),
            "max_patches": self.max_patches,
            "num_images": len(self.images),
            "stored_bytes": sum(image.stored_bytes for image in self.images),
            "float32_bytes": sum(image.float32_bytes for image in self.images),
            "segments": segments,
        }


def read_pack(cache: Cache, plan: Mapping[str, Any], wanted: str) -> Pack:
    """Returns one pack of a plan over its cache, with every byte of its samples checked.

    plan: of `read_plan`. wanted: the pack's number, or the id of a sample that it holds. Raises ConfigError where the
    plan is none of packs, CacheError for a pack that it does not have, CacheCorruptError where bytes are not those that
    were written.
    """
    folder = Path(plan["folder"])
    if plan["kind"] != "pack":
        raise ConfigError(
            f'--sample: {folder} is a plan of kind "{plan["kind"]}", wanted "pack"; for one sample name its cache'
        )
    entries = plan["arrays"]
    arrays = {n: load_array(folder, f"{n}.npy", entries[n], verify=True) for n in ("members", "offsets")}
    source = planned_samples(folder, cache)
    places = origin(source)[1]
    index = number_of(wanted)
    if index is None:
        sample = sample_index(cache, wanted)
        of_cache = arrays["members"] if places is None else places[arrays["members"]]
        if not len(found := np.flatnonzero(of_cache == sample)):
            why = "it is longer than one" if places is None else "it is longer than one, or the filter left it out"
            raise CacheError(f"--sample {wanted}: sample {sample} is in no pack of {folder}: {why}", code="FB421")
        index = int(np.searchsorted(arrays["offsets"], found[0], side="right")) - 1
    check_index(index, plan["num_packs"], what=f"{folder} has {plan['num_packs']} packs")
    start, end = arrays["offsets"][index : index + 2].tolist()
    members, count = arrays["members"][start:end].tolist(), len(cache if places is None else places)
    if not members or not all(0 <= member < count for member in members):
        raise CacheCorruptError(
            f"{folder}: pack {index} holds samples {members}, its cache has {count}; "
            "delete that folder and run: forebay preprocess CONFIG",
            code="FB412",
        )
    shown = [read_sample(cache, member if places is None else int(places[member]), config=None) for member in members]
    if isinstance(source, CutSamples):
        pieces = map(source.piece, members)
        shown = [each if piece is None else of_piece(each, piece) for each, piece in zip(shown, pieces, strict=True)]
    return Pack(
        index=index,
        num_packs=plan["num_packs"],
        seq_len=plan["settings"]["seq_len"],
        max_patches=plan["settings"]["max_patches"],
        segments=tuple(shown),
    )


def of_piece(sample: Sample, piece: CutPiece) -> Sample:
    """Returns what a piece has of a sample: its tokens, and the items that it shows."""
    tensors = {name: piece.of_tokens(sample.tensors[name]) for name in ("input_ids", "label_mask")}
    counts = {name: length for name, length in piece.lengths().items() if name in sample.row}
    kinds: dict[Group, tuple[ItemKind, ...]] = {"audio": ("audio",), "image": ("image", "video")}
    items = {group: piece.of_items(shown, *kinds[group]) for group, shown in sample.items.items()}
    return replace(sample, tensors=tensors, row={**sample.row, **counts}, items=items, conversation=None)


def _tokens(sample: Sample) -> int:
    return len(sample.tensors["input_ids"])


_Facts = TypeVar("_Facts")
_SHOWN = 24


def _counted(cache: Cache, what: str, make: Callable[[], _Facts | None]) -> _Facts | None:
    """Returns what is counted; None of a cache in a store, which would be downloaded, and of a damaged one."""
    if cache.mirror is not None:
        return None
    try:
        return make()
    except CacheError as err:
        logger.warning("%s of %s are not counted: %s", what, cache.place, err)
        return None


def class_facts(cache: Cache) -> dict[str, Any]:
    """Returns `classes` of `forebay inspect --json`; nothing of a cache without classes, or far away.

    num_classes: one more than the largest number. is_multi: a sample has a list. counts: `class`, its `number` and
    `samples`, the most frequent first. absent: named classes that no sample has.
    """
    if cache.constants.get("prompt") != "label":
        return {}
    found = _counted(cache, "the classes", lambda: cache.categories("text"))
    if found is None:
        return {}
    (texts, codes), constants = found, cache.constants
    is_multi = bool(constants["text_form"]["fields"][0]["shape"])
    counts: Counter[str] = Counter()
    for text, samples in zip(texts, np.bincount(codes, minlength=len(texts)).tolist(), strict=True):
        counts.update({str(name): samples for name in (json.loads(text) if is_multi else [text])})
    names: list[str] | None = constants["classes"]
    numbers = {} if names is None else {name: number for number, name in enumerate(names)}
    shown = [
        {"class": name, "number": numbers.get(name, int(name) if name.isdecimal() else None), "samples": counts[name]}
        for name in sorted(counts, key=lambda name: (-counts[name], name))
    ]
    absent = sum(name not in counts for name in names or ())
    num_classes = constants["num_classes"]
    return {"classes": {"num_classes": num_classes, "is_multi": is_multi, "counts": shown, "absent": absent}}


def class_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yields how many samples have each class, for a terminal; `facts` is the document of `cache_facts`."""
    found, whole = facts["classes"], facts["num_samples"]
    rows = [
        [printable(each["class"]), f"{each['number']}", f"{each['samples']:,}", human_share(each["samples"] / whole)]
        for each in found["counts"][:_SHOWN]
    ]
    yield from table([f"{found['num_classes']:,} classes", "number", "samples", "share"], rows, left=1)
    if len(found["counts"]) > _SHOWN:
        yield f"  and {len(found['counts']) - _SHOWN:,} more (--json lists them all)"
    if found["absent"]:
        yield f"  {found['absent']:,} classes have no sample"


def detection_facts(cache: Cache) -> dict[str, Any] | None:
    """Returns what `text.language = "detect"` found; None where it was not asked, or would have to be downloaded.

    languages: `language`, `samples` and mean `confidence` of each detected one, the most frequent first. unsaid:
    samples that keep the manifest's language, since nothing was said or asked. unknown: samples without any language.
    num_disagreements: samples of which manifest and detection say different languages. disagreements: `manifest`,
    `detected`, `samples` and some `ids` of each pair; `nb` and `no`, or `English` and `en`, are one language.
    """
    if "language_detected" not in cache.column_names:
        return None
    return _counted(cache, "the detected languages", lambda: _language_facts(cache))


def _language_facts(cache: Cache) -> dict[str, Any] | None:
    detected, stated = cache.categories("language_detected"), cache.categories("language_manifest")
    if detected is None or stated is None:  # a cache made of caches, of which some said nothing
        return None
    (names, codes), (manifest_names, manifest_codes) = detected, stated
    confidence = cache.table(["language_confidence"])["language_confidence"].fill_null(0.0).to_numpy()
    counts = np.bincount(codes, minlength=len(names))
    sums = np.bincount(codes, weights=confidence, minlength=len(names))
    nothing, none_stated = (np.array(n, object)[c] == "" for n, c in (detected, stated))
    pairs = _disagreements(cache, names, codes, manifest_names, manifest_codes)
    return {
        "languages": [
            {"language": names[i], "samples": int(counts[i]), "confidence": round(float(sums[i] / counts[i]), 4)}
            for i in sorted(range(len(names)), key=lambda i: (-counts[i], names[i]))
            if names[i]
        ],
        "unsaid": int((nothing & ~none_stated).sum()),
        "unknown": int((nothing & none_stated).sum()),
        "num_disagreements": sum(pair["samples"] for pair in pairs),
        "disagreements": pairs,
    }


def _disagreements(
    cache: Cache, names: list[str], codes: Array, manifest_names: list[str], manifest_codes: Array
) -> list[dict[str, Any]]:
    both = manifest_codes.astype(np.int64) * len(names) + codes
    found = []
    for pair, count in zip(*np.unique(both, return_counts=True), strict=True):
        manifest, detected = manifest_names[pair // len(names)], names[pair % len(names)]
        if manifest and detected and code_of(manifest) != code_of(detected):
            ids = [cache.sample_id(int(i)) for i in np.flatnonzero(both == pair)[:3]]
            found.append({"manifest": manifest, "detected": detected, "samples": int(count), "ids": ids})
    return sorted(found, key=lambda entry: (-entry["samples"], entry["manifest"], entry["detected"]))


INTERFACE = (
    "key",
    "format_version",
    "num_samples",
    "hours",
    "languages",
    "fields",
    "size_bytes",
    "excluded",
    "failed",
    "plans",
)
"""The fields of `--json` that are never renamed; more may be added."""


def _captions(cache: Cache, metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {group: metadata[f"{group}_captions"] for group in cache.groups if f"{group}_captions" in metadata}
    return {"captions": found} if found else {}


def cache_facts(cache: Cache, *, plan_roots: Sequence[Path]) -> dict[str, Any]:
    """Returns the document of `forebay inspect --json`, without `verify`.

    Beside the interface: num_tokens (of all samples together), folder, name, split, recipe_key, recipe, constants,
    groups, bytes_per_hour, clipped, longer, rejected (the file that lists what was left out), histogram, probe,
    made_with, promises (how batches of a declared form compare with those of what made it, in words), captions (where
    rows have several: by group min, mean, max, and the blank ones that were passed over), made_of (the caches that
    it was made of, if it was made of caches). Sizes are those of the shards.
    detection (see `detection_facts`; null where no language was detected). Without audio histogram is null, and lengths
    says how long the texts are. A cache whose samples list items has what their groups say too (`ListedGroup.facts`),
    one of classes what `class_facts` says.
    Raises CacheCorruptError where the metadata describes no cache, or the lengths are not those that were written.
    """
    metadata = cache.metadata
    check_description(cache.folder, metadata)
    durations_s = durations_of(cache)
    hours = 0.0 if durations_s is None else float(durations_s.sum()) / 3600
    size_bytes = int(metadata["size_bytes"])
    tokens = cache.lengths["num_tokens"]
    return {
        "key": cache.key,
        "format_version": metadata["format_version"],
        "num_samples": len(cache),
        "hours": hours,
        "languages": metadata["languages"],
        "fields": {name: _field(spec, axis_names(cache.constants)) for name, spec in cache.fields.items()},
        "size_bytes": size_bytes,
        "excluded": metadata["excluded"],
        "failed": metadata["failed"],
        "plans": [pack_bytes(cache, plan) for plan in plans_of(cache.key, plan_roots)],
        "num_tokens": int(tokens.sum(dtype=np.int64)),
        "folder": os.path.abspath(cache.folder) if cache.mirror is None else cache.place,
        "name": metadata["name"],
        "split": metadata["split"],
        "sealed": True,
        "recipe_key": cache.recipe_key,
        "recipe": metadata["recipe"],
        "constants": dict(cache.constants),
        "rows_per_shard": metadata["rows_per_shard"],
        "groups": {group: _group(cache, group) for group in cache.groups},
        "bytes_per_hour": size_bytes / hours if hours else None,
        "clipped": metadata["clipped"],
        "longer": metadata["longer"],
        "rejected": os.path.abspath(cache.folder / "rejected.jsonl"),
        "histogram": None if durations_s is None else duration_histogram(durations_s),
        "lengths": _token_lengths(tokens) if durations_s is None else None,
        "detection": detection_facts(cache),
        "probe": metadata["probe"],
        "made_with": metadata["made_with"],
        "promises": promises(cache.constants.groups),
        **_captions(cache, metadata),
        "made_of": metadata.get("made_of", []),
        **{name: value for group in listed_groups(cache).values() for name, value in group.facts().items()},
        **class_facts(cache),
    }


def unreadable_facts(folder: Path) -> dict[str, Any]:
    """Returns the document of a folder that cannot be opened: the interface with null everywhere."""
    return {**dict.fromkeys(INTERFACE), "folder": os.path.abspath(folder), "sealed": False}


def _token_lengths(tokens: Array) -> dict[str, float]:
    if not len(tokens):
        return {"min": 0, "mean": 0.0, "max": 0}
    return {"min": int(tokens.min()), "mean": float(tokens.mean()), "max": int(tokens.max())}


def durations_of(cache: Cache) -> Array | None:
    """Returns float64 [num_samples]: seconds; None for a cache without recordings."""
    num_samples = cache.lengths.get("num_audio_samples")
    return None if num_samples is None else np.asarray(num_samples / cache.constants.get("sample_rate_hz", 1))


def axes(spec: FieldSpec, names: Mapping[str, str | int]) -> list[str | int]:
    """Returns a field's shape with the first axis named where it differs from sample to sample: `["frames", 80]`."""
    return [] if spec.role == "table" else [names.get(spec.name.partition("~")[0], "n"), *spec.shape]


def _field(spec: FieldSpec, names: Mapping[str, str | int]) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": axes(spec, names), "group": spec.group, "role": spec.role}


def _group(cache: Cache, group: Group) -> dict[str, Any]:
    entries = [entry for _, entry in cache.shard_entries(group)]
    return {
        "num_shards": len(entries),
        "rows": sum(entry.rows for entry in entries),
        "size_bytes": sum(entry.size_bytes for entry in entries),
        "variants": cache.constants.of(group).get("variants", []),
    }
