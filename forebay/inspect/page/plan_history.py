"""The plans of a cache, and some of their batches or packs to be drawn to scale."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from forebay.config.plan import PlanConfig
from forebay.config.tree import Config
from forebay.errors import CacheCorruptError, CacheError, ConfigError, PlanError
from forebay.inspect.facts import bucket_range, plans_of
from forebay.inspect.page.page_samples import PageColumns
from forebay.inspect.seen_images import pixel_padding
from forebay.plan.disk import planned_samples, read_metadata
from forebay.plan.make import make_plan, plan_statistics, samples_of
from forebay.plan.names import plan_key
from forebay.plan.pack.overlong import in_pieces
from forebay.store.layout import ROW_BITS, ROW_MASK, Array
from forebay.store.metadata import load_array
from forebay.store.selection import Filter, filtered, origin
from forebay.store.source import SampleSource

logger = logging.getLogger(__name__)
_PACKS, _SEGMENTS = 12, 600
_BATCHES, _ROWS = 10, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSegment:
    """A sample in a row. length: tokens, or seconds. images: where its image tokens begin and end in it."""

    index: int
    length: float
    images: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnPlan:
    """Rows of one batch, or one pack, that are computed as long as `room`. label: which it is."""

    label: str
    room: float
    rows: tuple[tuple[PackSegment, ...], ...]
    left_out: int = 0

    @property
    def held(self) -> float:
        """The lengths of all samples together."""
        return sum(segment.length for row in self.rows for segment in row)

    @property
    def padding(self) -> float:
        """The share of the rows that is padding."""
        return 1 - self.held / (self.room * len(self.rows)) if self.room else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanView:
    """A plan as `plans_of` describes it. is_wanted: it is that of the config. drawn: some of it, to scale.

    padding: float64 [num_samples], the share of a sample's row that its bucket's longest sample pads; None: no buckets.
    fills: float64 [num_packs]; None: no packs. pixel_padding: see `seen_images`; None: images of one size.
    """

    facts: Mapping[str, Any]
    is_wanted: bool
    is_kept: bool
    drawn: Sequence[DrawnPlan] = ()
    padding: Array | None = None
    fills: Array | None = None
    pixel_padding: float | None = None

    @property
    def fill_counts(self) -> tuple[list[float], list[int]]:
        """The histogram of how full packs are, in percent: its edges and counts."""
        shares = np.clip(100 * np.asarray(self.fills), 0, 100)
        low = int(min(90, np.floor(shares.min() / 10) * 10)) if len(shares) else 0
        edges = np.linspace(low, 100, 11)
        return edges.tolist(), np.histogram(shares, edges)[0].tolist()


def views_of(columns: PageColumns, config: Config | None, *, roots: Sequence[Path]) -> list[PlanView]:
    """Returns the plans below these roots, that of the config first; it is made in memory where none is kept.

    A plan that cannot be read or made is left out with a warning: it must not hide the cache.
    """
    settings = None if config is None or config.mixture.is_given else config.plan
    source: SampleSource = columns.cache
    if config is not None and config.filter.is_given:
        source = filtered(columns.cache, Filter.of(config.filter))
    source = in_pieces(source, settings)
    wanted = None if settings is None else plan_key(source.key, settings)
    found = sorted(plans_of(columns.cache.key, roots), key=lambda plan: plan["key"] != wanted)[:6]
    views = [
        view for plan in found if (view := _kept(columns, source, plan, is_wanted=plan["key"] == wanted)) is not None
    ]
    if settings is None or any(view.is_wanted for view in views):
        return views
    try:
        return [_made(columns, source, settings, key=wanted or ""), *views]
    except (PlanError, ConfigError) as err:
        logger.warning("the plan of this config is left out: %s", err)
        return views


def _in_cache(arrays: Mapping[str, Array], places: Array | None, *, count: int, name: str) -> dict[str, Array]:
    """Returns a plan's arrays, its members as samples of the cache; CacheCorruptError where they are none.

    places: where the samples that a filter left stand in the cache; None: the plan is of all `count` samples.
    """
    if "members" not in arrays or "offsets" not in arrays:
        return dict(arrays)
    members = arrays["members"]
    _require_members(name, members, arrays["offsets"], count=count if places is None else len(places))
    return {**arrays, "members": members if places is None else places[members]}


def _kept(columns: PageColumns, source: SampleSource, facts: Mapping[str, Any], *, is_wanted: bool) -> PlanView | None:
    folder = Path(facts["folder"])
    try:
        metadata = read_metadata(folder)
        note = metadata.get("filter")
        is_own = source.key in metadata["plan"]["cache_keys"]
        if note is not None and not is_own and "selected" not in note:
            # Buckets of another filter: which samples they are of stands nowhere.
            return PlanView(facts=facts, is_wanted=is_wanted, is_kept=True)
        places = origin(source if is_own else planned_samples(folder, columns.cache))[1]
        entries = metadata["arrays"]
        names = [name for name in ("members", "offsets", "batch_sizes") if name in entries]
        arrays = {name: load_array(folder, f"{name}.npy", entries[name], verify=True) for name in names}
        arrays = _in_cache(arrays, places, count=len(columns), name=str(folder))
        return _view(columns, facts, arrays, is_wanted=is_wanted, is_kept=True)
    except (CacheError, OSError) as err:
        logger.warning("leaving out a plan: %s", err)
        return None


def _made(columns: PageColumns, source: SampleSource, settings: PlanConfig, *, key: str) -> PlanView:
    samples = samples_of(source)
    plan = make_plan(samples, settings)
    statistics = plan_statistics(plan, samples)
    share = "fill" if settings.kind == "pack" else "padding"
    facts = {
        "key": key,
        "kind": settings.kind,
        "settings": {},
        "statistics": statistics,
        share: statistics[share],
        **{name: count for name, count in plan.counts().items() if name in ("num_packs", "num_batches")},
    }
    arrays = _in_cache(plan.arrays(), origin(source)[1], count=len(columns), name="the plan of this config")
    return _view(columns, facts, arrays, is_wanted=True, is_kept=False)


def _view(
    columns: PageColumns, facts: Mapping[str, Any], arrays: Mapping[str, Array], *, is_wanted: bool, is_kept: bool
) -> PlanView:
    members, offsets, sizes = (arrays.get(name) for name in ("members", "offsets", "batch_sizes"))
    view = PlanView(facts=facts, is_wanted=is_wanted, is_kept=is_kept)
    if members is None or offsets is None or "cut" in facts["statistics"]:  # it is drawn of whole samples
        return view
    if facts["kind"] == "pack":
        room = int(facts["settings"].get("seq_len") or _room(facts, members, offsets, columns))
        drawn, fills = _packs(columns, members, offsets, room=room)
        return replace(view, drawn=drawn, fills=fills)
    pixels = None
    if sizes is not None and len(sizes) == len(offsets) - 1:
        buckets = [members[a:b] for a, b in itertools.pairwise(offsets.tolist())]
        pixels = pixel_padding(columns.cache, buckets, sizes.tolist())
    drawn = _batches(columns, facts, arrays) if columns.length.any() else []
    return replace(view, drawn=drawn, padding=_padding(columns.length, members, offsets), pixel_padding=pixels)


def _room(facts: Mapping[str, Any], members: Array, offsets: Array, columns: PageColumns) -> int:
    """Returns the tokens of a pack of a plan in memory, by its figures."""
    held = int(columns.tokens[members].sum()) + int(facts["statistics"]["pad_tokens"])
    return max(held // max(len(offsets) - 1, 1), 1)


def _require_members(name: str, members: Array, offsets: Array, *, count: int) -> None:
    is_right = (
        members.ndim == offsets.ndim == 1
        and members.dtype.kind == offsets.dtype.kind == "i"
        and len(offsets) > 0
        and offsets[0] == 0
        and offsets[-1] == len(members)
        and not np.any(np.diff(offsets) < 0)
        and not (len(members) and (members.min() < 0 or members.max() >= count))
    )
    if not is_right:
        raise CacheCorruptError(
            f"{name}: its members are no samples of a cache with {count}; delete that folder and run: "
            "forebay preprocess CONFIG"
        )


def _packs(columns: PageColumns, members: Array, offsets: Array, *, room: int) -> tuple[list[DrawnPlan], Array]:
    """Returns packs from the emptiest to the fullest, and how full all of them are."""
    held = np.add.reduceat(columns.tokens[members], offsets[:-1]) if len(members) else np.zeros(0)
    fills = np.asarray(held / room, np.float64)
    order = np.argsort(fills, kind="stable")
    chosen = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _PACKS)).astype(np.int64))]
    drawn: list[DrawnPlan] = []
    left = _SEGMENTS
    for number in chosen.tolist():
        own = members[offsets[number] : offsets[number + 1]].tolist()
        left -= len(own)
        if left < 0 and drawn:
            break
        row = tuple(_segment(columns, index) for index in own[:_SEGMENTS])
        drawn.append(DrawnPlan(label=f"pack {number}", room=float(room), rows=(row,)))
    return drawn, fills


def _segment(columns: PageColumns, index: int) -> PackSegment:
    length = float(columns.tokens[index])
    image_id = columns.cache.constants.get("image_token_id")
    if image_id is None:
        return PackSegment(index=index, length=length)
    # The text of the sample alone: `cache.read` would decode its images.
    slot = int(columns.cache.slots[index])
    shard, row = columns.cache.shard("text", slot >> ROW_BITS), slot & ROW_MASK
    values = shard.row(row)
    shard.check_row(row, [*values.values()])
    ids = values["input_ids"]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], ids == image_id, [0])).astype(np.int8))).reshape(-1, 2)
    return PackSegment(index=index, length=length, images=tuple((int(a), int(b)) for a, b in edges))


def _batches(columns: PageColumns, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> list[DrawnPlan]:
    """Returns a batch of each bucket as a shuffle might draw it, of up to ten buckets that hold samples."""
    members, offsets, sizes = arrays["members"], arrays["offsets"], arrays.get("batch_sizes")
    ranges = [bucket_range(bucket) for bucket in facts["statistics"].get("buckets", ())]
    if sizes is None or len(ranges) != len(offsets) - 1 or len(sizes) != len(ranges):
        return []
    held = np.flatnonzero(np.diff(offsets))
    chosen = held[np.unique(np.linspace(0, len(held) - 1, min(len(held), _BATCHES)).astype(np.int64))]
    rng = np.random.default_rng(0)
    return [
        _batch(columns, members[offsets[b] : offsets[b + 1]], int(sizes[b]), label=ranges[b], rng=rng)
        for b in chosen.tolist()
    ]


def _batch(columns: PageColumns, own: Array, size: int, *, label: str, rng: np.random.Generator) -> DrawnPlan:
    drawn = own if len(own) <= size else rng.choice(own, size=size, replace=False)
    lengths = columns.length[drawn]
    order = np.argsort(-lengths, kind="stable")
    kept = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _ROWS)).astype(np.int64))]
    rows = tuple((PackSegment(index=int(drawn[i]), length=float(lengths[i])),) for i in kept)
    return DrawnPlan(label=label, room=float(lengths.max()), rows=rows, left_out=len(order) - len(kept))


def _padding(length: Array, members: Array, offsets: Array) -> Array:
    padding = np.full(len(length), np.nan)
    for start, end in itertools.pairwise(offsets.tolist()):
        own = members[start:end]
        longest = float(length[own].max()) if len(own) else 0.0
        if longest > 0:
            padding[own] = 1.0 - length[own] / longest
    return padding
