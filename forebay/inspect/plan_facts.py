"""The plans of a cache, as they stand under `plans/` of its root: each as a document, and a pack of one."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forebay.errors import CacheCorruptError, CacheError, ConfigError
from forebay.inspect.listed_groups import PatchItem, SeenItem, float32_bytes, image_settings_of
from forebay.inspect.sample import Sample, check_index, number_of, read_sample, sample_index
from forebay.plan.disk import cache_key_of, planned_samples, read_metadata, read_statistics
from forebay.store.cache import Cache
from forebay.store.layout import METADATA, PLANS
from forebay.store.metadata import load_array
from forebay.store.selection import origin
from forebay.terminal import human_share

logger = logging.getLogger(__name__)

_HELD = ("samples", "tokens", "patches", "images")
"""The names that the statistics of packs count."""

_NO_LENGTHS = "0-1 tokens"
"""The only bucket of images without texts."""
_OF_TOKENS = " tokens"
"""How the range of a bucket of samples without sound ends."""


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
    """Returns the document of one plan, as in `plans_of`, with `num_samples`, `cache_keys` and `arrays` (their
    entries).

    Raises CacheCorruptError, CacheMismatchError for what is no plan or one of a newer forebay, OSError.
    """
    metadata = read_metadata(folder)
    return {
        **_described(folder, metadata),
        "num_samples": metadata["num_samples"],
        "cache_keys": metadata["plan"]["cache_keys"] if "filter" not in metadata else [cache_key_of(metadata)],
        "arrays": metadata["arrays"] | {n: e for n, e in metadata.get("filter", {}).items() if n == "selected"},
    }


def _described(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    figures = ("num_batches", "padding", "num_packs", "fill")
    return {
        "key": metadata["plan_key"],
        "kind": metadata["kind"],
        **{name: metadata[name] for name in figures if name in metadata},
        "folder": str(folder),
        "settings": metadata["plan"]["settings"],
        **({"filter": metadata["filter"]["said"]} if "filter" in metadata else {}),
        "statistics": read_statistics(folder, metadata),
    }


def is_without_sound(plan: Mapping[str, Any]) -> bool:
    """Returns whether no bucket of a plan is one of seconds; False of a plan without buckets."""
    ranges = [bucket["range"] for bucket in plan["statistics"].get("buckets") or ()]
    return bool(ranges) and all(str(each).endswith(_OF_TOKENS) for each in ranges)


def shown_settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a plan; of one without sound not those of seconds, which are idle there."""
    idle = is_without_sound(plan)
    return {name: value for name, value in plan["settings"].items() if not (idle and name.endswith("_s"))}


def bucket_range(bucket: Mapping[str, Any]) -> str:
    """Returns the range of a bucket in words, with two decimals: samples without tokens have no lengths."""
    text = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", str(bucket["range"]))
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
    random = plan["statistics"].get("padding_random_order") if padded else None
    return parts if random is None else [*parts, f"{human_share(random)} in random order"]


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
        return [image for sample in self.segments for image in sample.shown]

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
            "num_patches": sum(image.num_patches for image in self.images if isinstance(image, PatchItem)),
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
    places = origin(planned_samples(folder, cache))[1]
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
    members = members if places is None else places[members].tolist()
    return Pack(
        index=index,
        num_packs=plan["num_packs"],
        seq_len=plan["settings"]["seq_len"],
        max_patches=plan["settings"]["max_patches"],
        segments=tuple(read_sample(cache, member, config=None) for member in members),
    )


def _tokens(sample: Sample) -> int:
    return len(sample.tensors["input_ids"])
