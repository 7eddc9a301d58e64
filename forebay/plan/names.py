"""The name of a plan: on disk by its cache and settings, in a loader's state by its batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay.config.plan import DURATION, BucketConfig, PackConfig, PlanConfig
from forebay.plan.bucket_plan import ORDER_VERSION, read_calibration
from forebay.store.key import digest
from forebay.store.layout import PLANS

PACKER_VERSION = 3
"""Bumped when the same lengths and settings give other packs. 1 had the histogram's packs, or those of one line; 2 had
exact completions alone along a line."""
_OPTIONAL = ("edges_s", "edges", "k", "batch_tokens", "calibration", "locality", "by", "token_s")
"""Settings of buckets that stay out of the document where they are left out."""


def plan_document(cache_key: str, settings: PlanConfig) -> dict[str, Any]:
    """Returns everything that a plan depends on; it stands in the plan's metadata.json.

    A calibration file is in it by its content. Raises ConfigError where that cannot be read.
    """
    described = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    packer = {"packer_version": PACKER_VERSION} if isinstance(settings, PackConfig) else {}
    if described.get("max_frames", 0) is None:  # as plans of images have always been named
        del described["max_frames"]
    if isinstance(settings, PackConfig):
        others = dict.fromkeys(("balance", "costs", "lockstep"), settings.is_balanced)
        others |= {"shapes": settings.has_shapes, "repeat_system": settings.repeat_system}
        others["truncate_side"] = settings.truncate_side != "right"
        described = {name: value for name, value in described.items() if others.get(name, True)}
    if not isinstance(settings, PackConfig) and settings.batch_seconds is not None:
        described["batch_seconds"] = float(settings.batch_seconds)
    if isinstance(settings, BucketConfig):
        # 3 and 3.0 seconds are one edge: an int in a TOML file must not make another plan.
        has_edges = settings.k is None and not settings.has_shapes
        described["edges_s"] = [float(edge) for edge in settings.edges_s] if has_edges else None
        described.update(token_s=float(settings.token_s) if settings.has_cells else None)
        described["by"] = None if settings.by == DURATION else list(settings.by)
        described["locality"] = None if settings.locality == "global" else settings.locality
        if settings.calibration is not None:
            described["calibration"] = read_calibration(settings.calibration)
        described = {name: value for name, value in described.items() if value is not None or name not in _OPTIONAL}
    return {"order_version": ORDER_VERSION, **packer, "cache_keys": [cache_key], "settings": described}


def plan_key(cache_key: str, settings: PlanConfig) -> str:
    """Returns the sha256 of the plan's document, 64 hex digits: its name on disk."""
    return digest(plan_document(cache_key, settings))


def plan_folder(root: Path, *, dataset: str, split: str, cache_key: str, settings: PlanConfig) -> Path:
    """Returns where the plan of a cache lives under a cache root, whether it is there or not."""
    kind: str = settings.kind
    if isinstance(settings, PackConfig):
        kind = f"seq{settings.seq_len}_buf{settings.buffer_size}"
    return root / PLANS / f"{dataset}_{split}_{kind}_{plan_key(cache_key, settings)[:8]}"


_EARLIER = "resume with the earlier config, or start anew without the state"
_WAS_SHORT = 'if neither did, it is older than the default plan.tail = "split": set plan.tail = "short", and it goes on'

_FILTER_CHANGED = (
    "[filter] is another one (key {stored} in the state, {wanted} here): its where or quota, or the ids that the files "
    f"of ids and drop_ids hold, changed since, or one of the two was made without it: {_EARLIER}"
)

_CHANGES = (
    f"the settings of [plan] or a mixture changed since, or one of the two was made with shuffle = False: {_EARLIER}",
    f"the recipe ([source], [audio], [text], [vision]) changed since: {_EARLIER}",
    "the samples are others: the data changed since, or a run without the cache had samples that the build left out as "
    'bad; resume with the earlier data, a run that had no cache with loader.cache = "off"',
    "the lengths of the samples give other batches: a run without the cache takes the manifest's durations, rounded or "
    "not, where no header says how long the audio is; resume as the state was made, with loader.cache = "
    '"off" or with the cache',
)
"""What it means where a part of a state key differs, in the order of the parts."""

_PART = 16
"""Hex digits of a state key that each part has."""


def state_key(
    settings: PlanConfig, *, recipe: str, sample_ids: str, content: Mapping[str, Any], filter_key: str | None = None
) -> str:
    """Returns what a loader's state is checked by: 16 hex digits each of settings, recipe, samples and batches.

    With a filter it has 16 digits more. recipe, sample_ids: digests of how samples are made, and of which they are.
    content: of the plan, see `plan_content`. filter_key: of what the samples were chosen by; None: they are all that
    there are. Nothing here says whether samples are read from a cache: where their lengths put them into the same
    batches a state goes from one to the other.
    """
    document = plan_document("", settings)
    del document["cache_keys"]
    if "packer_version" in document:
        document["packer_version"] = 1  # `content` is the packs: a state goes on where an older packer made the same
    parts = [document, recipe, sample_ids, content, *([] if filter_key is None else [filter_key])]
    return "".join(digest(part)[:_PART] for part in parts)


def with_mixture(key: str, mixture: Mapping[str, Any]) -> str:
    """Returns the state key of a mixture over the plan of `key`: it is a setting, on top of those of the plan."""
    return digest({"plan": key[:_PART], "mixture": mixture})[:_PART] + key[_PART:]


def combined(keys: Iterable[str]) -> str:
    """Returns the state key of several plans of the same settings together, part by part."""
    cut = [[key[start : start + _PART] for start in range(0, 5 * _PART, _PART)] for key in keys]
    return "".join(digest(parts)[:_PART] for parts in zip(*cut, strict=True) if any(parts))


def without_shuffle(key: str, *, by_part: bool) -> str:
    """Returns the state key of the same batches in the order of the cache. by_part: no batch is of two sources."""
    return digest({"plan": key[:_PART], "shuffle": False, "by_part": by_part})[:_PART] + key[_PART:]


def why_differ(stored: Any, wanted: str, *, tail: str | None = None) -> str:
    """Returns for a message what it means that a state key is not the wanted one: the first part that differs.

    tail: of the plan here.
    """
    if not isinstance(stored, str):
        stored = ""
    whole = _PART * len(_CHANGES)
    is_key = whole <= len(stored) <= whole + _PART
    # Other samples, batches and shares of a mixture follow from another filter.
    if is_key and stored[whole:] != wanted[whole:] and stored[_PART : 2 * _PART] == wanted[_PART : 2 * _PART]:
        return _FILTER_CHANGED.format(stored=stored[whole:] or "none", wanted=wanted[whole:] or "none")
    if len(stored) != len(wanted):
        stored = ""
    starts = range(0, _PART * len(_CHANGES), _PART)
    changes = [
        change
        for change, start in zip(_CHANGES, starts, strict=True)
        if stored[start : start + _PART] != wanted[start : start + _PART]
    ]
    # Nothing in common: a key of another making, or of other data altogether. Shares of a mixture follow from samples.
    is_partial = 0 < len(changes) < len(_CHANGES) and not {_CHANGES[0], _CHANGES[2]} <= {*changes}
    if tail == "split" and changes == [_CHANGES[0]]:
        return f"{_CHANGES[0]}; {_WAS_SHORT}"
    return changes[0] if is_partial else f"the data, the [plan] section or a mixture changed since: {_EARLIER}"
