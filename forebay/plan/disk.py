"""A plan as a sealed folder: flat arrays and their statistics, metadata.json last, opened by memory mapping.

The names of a plan: on disk by its cache, in a loader's state by what its batches are.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.config.plan import BucketConfig, PackConfig, PlanConfig, WindowConfig
from forebay.errors import CacheCorruptError, CacheMismatchError, CacheNotFoundError
from forebay.plan.bucket.plan import ORDER_VERSION, BucketPlan
from forebay.plan.bucket.sizes import grad_accs, read_calibration
from forebay.plan.pack.plan import UNPLACED, PackPlan
from forebay.plan.window import WindowPlan
from forebay.store.chunked import MEMBERS_A_CHUNK, CheckedArray, chunk_sums
from forebay.store.files import fsync_folder, hash_file, write_all, write_aside, write_bytes
from forebay.store.key import canonical_json, digest
from forebay.store.layout import Array
from forebay.store.metadata import read_regular, regular_size
from forebay.store.temporary import sweep, temporary_name

AnyPlan = BucketPlan | WindowPlan | PackPlan


PLAN_FORMAT_VERSION = 1


METADATA = "metadata.json"


STATISTICS = "packing_stats.json"


SAMPLE_IDS = "sample_ids"
"""Digest of which samples are planned; plans of before have none."""


SUMS = "members_sums"
"""Checksums of the pieces of a large `members`, which is then checked where it is touched and not when it is opened."""


LAZY_BYTES = 2**25
"""Of `members` from which on it has them; hashing less at once takes 3 ms."""


def plan_folder(root: Path, *, dataset: str, split: str, cache_key: str, settings: PlanConfig) -> Path:
    """Returns where the plan of a cache lives under a cache root, whether it is there or not."""
    key = digest(plan_document(cache_key, settings))
    kind: str = settings.kind
    if isinstance(settings, PackConfig):
        kind = f"seq{settings.seq_len}_buf{settings.buffer_size}"
    return root / "plans" / f"{dataset}_{split}_{kind}_{key[:8]}"


def save_plan(
    plan: AnyPlan,
    folder: Path,
    *,
    cache_key: str,
    settings: PlanConfig,
    statistics: dict[str, Any],
    sample_ids: str | None = None,
) -> None:
    """Makes `folder` (of `plan_folder`) hold the plan, complete or not at all; a damaged one that is there is replaced.

    Two savers at once are fine: the first one's folder stays, the bytes are the same. Arrays that are mapped from a replaced
    folder stay valid. sample_ids: digest of which samples these are, for `sealed_content`. Raises OSError where the root cannot be written, with nothing left behind, and CacheMismatchError
    where another plan (eight equal hex digits, or a newer format) has the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    aside = temporary_name(folder)
    aside.mkdir()
    try:
        arrays = {name: _write_array(aside / f"{name}.npy", array) for name, array in _arrays(plan).items()}
        stats = json.dumps(statistics, indent=1, allow_nan=False).encode("ascii")
        write_bytes(aside / STATISTICS, stats)
        document = plan_document(cache_key, settings)
        metadata = {
            "format_version": PLAN_FORMAT_VERSION,
            "kind": settings.kind,
            "plan_key": digest(document),
            "plan": document,
            **_at_a_glance(plan, statistics),
            **({} if sample_ids is None else {SAMPLE_IDS: sample_ids}),
            "statistics_xxh3_128": xxhash.xxh3_128_hexdigest(stats),
            "arrays": arrays,
            **_figures(plan, settings),
        }
        metadata["checksum"] = _checksum(metadata)
        write_bytes(aside / METADATA, json.dumps(metadata, indent=1, allow_nan=False).encode("ascii"))
        _move_in(aside, folder, cache_key=cache_key, settings=settings)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_plan(folder: Path, *, cache_key: str, settings: PlanConfig, num_samples: int | None = None) -> AnyPlan:
    """Returns the plan of a folder, its arrays read-only mappings whose bytes have been compared with their checksums.

    A large `members` is compared piece by piece, where the plan's order touches it for the first time.
    Raises CacheNotFoundError where no plan is, CacheMismatchError where it is another one (cache, settings, number of
    samples, newer format), CacheCorruptError where bytes on disk are not the bytes written; the order raises that too.
    """
    metadata = _read_metadata(folder)
    try:
        return _loaded(folder, metadata, cache_key=cache_key, settings=settings, num_samples=num_samples)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as err:
        # Its checksum is right: somebody else wrote it.
        raise CacheCorruptError(f"{folder / METADATA} is no plan that forebay writes ({err!r:.80}); {_AGAIN}") from err


def plan_content(plan: AnyPlan) -> dict[str, Any]:
    """Returns what the batches of a plan are a function of, beside its settings: its arrays, by checksum."""
    return _content({"arrays": {name: _entry(array) for name, array in _arrays(plan).items()}, **_windows(plan)})


def sealed_content(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Returns the `plan_content` of a plan on disk, and which samples it is of, where that is known; reads no array."""
    metadata = _read_metadata(folder)
    return _content(metadata), metadata.get(SAMPLE_IDS)


def _content(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in ("arrays", "windows") if name in metadata}


def _loaded(
    folder: Path, metadata: dict[str, Any], *, cache_key: str, settings: PlanConfig, num_samples: int | None
) -> AnyPlan:
    _expect(folder, plan_document(cache_key, settings), metadata["plan"])
    if num_samples is not None and metadata["num_samples"] != num_samples:
        raise CacheMismatchError(
            f"{folder}: num_samples differs ({num_samples} in the cache, {metadata['num_samples']} in the plan); {_AGAIN}"
        )
    is_lazy = SUMS in metadata["arrays"]
    arrays: dict[str, Any] = {
        name: _map_array(folder / f"{name}.npy", expected, is_checked=not (is_lazy and name == "members"))
        for name, expected in metadata["arrays"].items()
    }
    check = None
    if is_lazy:
        path, sums = folder / "members.npy", arrays.pop(SUMS)
        members = CheckedArray(path, arrays["members"], sums, chunk_items=MEMBERS_A_CHUNK, again=_AGAIN)
        check = members.require_all
    rules: dict[str, Any] = {"tail": settings.tail, "check": check}
    if isinstance(settings, PackConfig):
        _require_packs(arrays, metadata["num_samples"], are_members_read=not is_lazy)
        return PackPlan(unplaced={reason: arrays.pop(reason) for reason in UNPLACED}, **arrays, **rules)
    rules |= {"sample_rate_hz": metadata["sample_rate_hz"], "lockstep": settings.lockstep}
    if isinstance(settings, WindowConfig):
        return WindowPlan(**arrays, **rules, **metadata["windows"])
    edges_s = tuple(metadata["edges_s"]) if "edges_s" in metadata else settings.edges_s
    return BucketPlan(
        **arrays,
        **rules,
        edges_s=edges_s,
        edges=tuple(metadata.get("edges", ())),
        grad_accs=grad_accs(settings, edges_s=edges_s, num_buckets=len(arrays["batch_sizes"])),
        locality_shards=settings.locality_shards,
    )


def _require_packs(arrays: dict[str, Array], num_samples: int, *, are_members_read: bool) -> None:
    """Raises ValueError where arrays are no packs of so many samples, whatever their checksums say."""
    members, offsets = arrays["members"], arrays["offsets"]
    lists = [members, *(arrays[reason] for reason in UNPLACED)]
    if any(array.ndim != 1 or array.dtype.kind != "i" for array in (offsets, *lists)):
        raise ValueError("its arrays are no lists of integers")
    if sum(map(len, lists)) != num_samples:
        raise ValueError(f"{sum(map(len, lists))} samples are in packs or left out, num_samples is {num_samples}")
    ends = [offsets[0], offsets[-1]]
    if ends != [0, len(members)] or np.any(offsets[1:] <= offsets[:-1]):
        raise ValueError(f"the offsets of its packs do not rise from 0 to {len(members)}")
    if any(len(a) and (a.min() < 0 or a.max() >= num_samples) for a in lists[0 if are_members_read else 1 :]):
        raise ValueError(f"it names samples outside of 0 to {num_samples - 1}")


def pack_settings(folder: Path) -> tuple[str, PackConfig]:
    """Returns of which cache the packs of a plan folder are, by its key, and the settings they were made by.

    `load_plan` wants both. Raises as that does, and CacheMismatchError where the folder is no plan of packs or has settings
    that are not known here.
    """
    metadata = _read_metadata(folder)
    if metadata["kind"] != "pack":
        raise CacheMismatchError(
            f'{folder}: kind differs ("pack" wanted, "{metadata["kind"]}" stored); name another plan'
        )
    document = metadata["plan"]
    try:
        return document["cache_keys"][0], PackConfig(**document["settings"])
    except (TypeError, ValueError) as err:
        raise CacheMismatchError(
            f"{folder}: its settings are not those of this forebay's packs ({err}); run: forebay preprocess CONFIG"
        ) from err


def _arrays(plan: AnyPlan) -> dict[str, Array]:
    arrays = {"members": plan.members}
    if isinstance(plan, PackPlan):
        arrays.update(offsets=plan.offsets, **plan.unplaced)
    elif isinstance(plan, WindowPlan):
        arrays.update(lengths=plan.lengths, starts=plan.starts)
    else:
        arrays.update(offsets=plan.offsets, batch_sizes=plan.batch_sizes)
        if plan.shard_counts is not None:
            arrays["shard_counts"] = plan.shard_counts
    if plan.members.nbytes >= LAZY_BYTES:
        arrays[SUMS] = chunk_sums(plan.members, MEMBERS_A_CHUNK)
    return arrays


def _at_a_glance(plan: AnyPlan, statistics: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures that a list of plans shows."""
    if isinstance(plan, PackPlan):
        return {"num_samples": plan.num_samples, "num_packs": plan.num_batches, "fill": statistics["fill"]}
    return {
        "sample_rate_hz": plan.sample_rate_hz,
        "num_samples": len(plan.members),
        "num_batches": plan.num_batches,
        "padding": statistics["padding"],
    }


def _figures(plan: AnyPlan, settings: PlanConfig) -> dict[str, Any]:
    """Returns what a plan is made of beside its settings and arrays."""
    if not isinstance(plan, BucketPlan):
        return _windows(plan)
    if plan.edges:
        return {"edges_s": list(plan.edges_s), "edges": list(plan.edges)}
    return {"edges_s": list(plan.edges_s)} if isinstance(settings, BucketConfig) and settings.k is not None else {}


def _windows(plan: AnyPlan) -> dict[str, Any]:
    if not isinstance(plan, WindowPlan):
        return {}
    names = ("num_windows", "batches_per_window", "last_batches", "batch_size", "budget")
    return {"windows": {name: getattr(plan, name) for name in names}}


_AGAIN = "delete that folder and run: forebay preprocess CONFIG"


def _write_array(path: Path, array: Array) -> dict[str, Any]:
    array = np.ascontiguousarray(array)
    with write_aside(path) as file:
        write_all(file, _head(array))
        write_all(file, array.data)
    return _entry(array)


def _entry(array: Array) -> dict[str, Any]:
    """Returns what the metadata say of an array: of the file that it is, or would be."""
    array = np.ascontiguousarray(array)
    head = _head(array)
    state = xxhash.xxh3_128(head)
    state.update(array.data)
    return {
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "size_bytes": len(head) + array.nbytes,
        "xxh3_128": state.hexdigest(),
    }


def _head(array: Array) -> bytes:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(array))
    return head.getvalue()


def _map_array(path: Path, expected: dict[str, Any], *, is_checked: bool) -> Array:
    try:
        size_bytes = regular_size(path)
        found = hash_file(path) if is_checked else expected["xxh3_128"]
    except OSError as err:
        raise CacheCorruptError(f"{path} cannot be read: {err.strerror}; {_AGAIN}") from err
    if size_bytes != expected["size_bytes"]:
        raise CacheCorruptError(f"{path}: {size_bytes} bytes, {expected['size_bytes']} were written; {_AGAIN}")
    if found != expected["xxh3_128"]:
        raise CacheCorruptError(f"{path}: checksum {expected['xxh3_128']} stored, {found} computed; {_AGAIN}")
    try:
        # A plain view: indexing np.memmap itself costs microseconds more each time.
        array: Array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as err:
        raise CacheCorruptError(f"{path} is no array: {err}; {_AGAIN}") from err
    if [array.dtype.str, list(array.shape)] != [expected["dtype"], expected["shape"]]:
        raise CacheCorruptError(
            f"{path} holds {array.dtype.str} {list(array.shape)}, "
            f"{expected['dtype']} {expected['shape']} were written; {_AGAIN}"
        )
    return array


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        content = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(f"no plan in {folder}: no {METADATA}; run: forebay preprocess CONFIG") from err
    try:
        metadata = json.loads(content)
        stored = metadata.pop("checksum")
        version = metadata["format_version"]
        computed = _checksum(metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise CacheCorruptError(f"{path} is not a plan's metadata ({err}); {_AGAIN}") from err
    # Before the checksum: a newer version may compute it in another way.
    if isinstance(version, int) and version > PLAN_FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path}: format_version differs ({version} stored, {PLAN_FORMAT_VERSION} is the newest that this forebay "
            f"reads); install a newer forebay, or {_AGAIN}"
        )
    if stored != computed:
        raise CacheCorruptError(f"{path}: checksum {stored} stored, {computed} computed; {_AGAIN}")
    checked: dict[str, Any] = metadata
    return checked


def _checksum(metadata: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json(metadata))


def _expect(folder: Path, wanted: dict[str, Any], stored: dict[str, Any], *, section: str = "") -> None:
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        here, there = wanted.get(name), stored.get(name)
        if isinstance(here, dict) and isinstance(there, dict):
            _expect(folder, here, there, section="plan.")
        elif here != there:
            raise CacheMismatchError(
                f"{folder}: {section}{name} differs ({here} wanted, {there} stored); "
                "the plan belongs to another cache or config; run: forebay preprocess CONFIG"
            )


def _move_in(aside: Path, folder: Path, *, cache_key: str, settings: PlanConfig) -> None:
    """Renames; an equal plan that stands there stays, an incomplete or damaged one makes room first."""
    while True:
        try:
            os.rename(aside, folder)
            break
        except OSError:
            if not folder.is_dir():
                raise
        try:
            load_plan(folder, cache_key=cache_key, settings=settings)
            return  # another saver's: replacing it would leave a moment without a plan
        except (CacheCorruptError, CacheNotFoundError):
            replaced = temporary_name(folder)
        try:
            os.rename(folder, replaced)
        except FileNotFoundError:
            continue  # another saver moved it away at the same time
        shutil.rmtree(replaced, ignore_errors=True)
    fsync_folder(folder.parent)


_OPTIONAL = ("edges_s", "edges", "k", "batch_tokens", "calibration", "locality")
"""Settings of buckets that stay out of the document where they are left out."""


_EARLIER = "resume with the earlier config, or start anew without the state"


_CHANGES = (
    f"the settings of [plan] or a mixture changed since: {_EARLIER}",
    f"the recipe ([source], [audio], [text], [vision]) changed since: {_EARLIER}",
    "the samples are others: the data changed since, or a run without the cache had samples that the build left out as bad; "
    'resume with the earlier data, a run that had no cache with loader.cache = "off"',
    "the lengths of the samples give other batches: a run without the cache takes the manifest's durations, rounded or not, "
    'where no header says how long the audio is; resume as the state was made, with loader.cache = "off" or with the cache',
)
"""What it means where a part of a state key differs, in the order of the parts."""


_PART = 16
"""Hex digits of a state key that each part has."""


PACKER_VERSION = 1
"""Bumped when the same lengths and settings give other packs."""


def plan_document(cache_key: str, settings: PlanConfig) -> dict[str, Any]:
    """Returns everything that a plan depends on; it stands in the plan's metadata.json.

    A calibration file is in it by its content. Raises ConfigError where that cannot be read.
    """
    described = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(settings).items()}
    packer = {"packer_version": PACKER_VERSION} if isinstance(settings, PackConfig) else {}
    if not isinstance(settings, PackConfig) and settings.batch_seconds is not None:
        described["batch_seconds"] = float(settings.batch_seconds)
    if isinstance(settings, BucketConfig):
        # 3 and 3.0 seconds are one edge: an int in a TOML file must not make another plan.
        described["edges_s"] = [float(edge) for edge in settings.edges_s] if settings.k is None else None
        described["locality"] = None if settings.locality == "global" else settings.locality
        if settings.calibration is not None:
            described["calibration"] = read_calibration(settings.calibration)
        described = {name: value for name, value in described.items() if value is not None or name not in _OPTIONAL}
    return {"order_version": ORDER_VERSION, **packer, "cache_keys": [cache_key], "settings": described}


def plan_key(cache_key: str, settings: PlanConfig) -> str:
    """Returns the sha256 of the plan's document, 64 hex digits: its name on disk."""
    return digest(plan_document(cache_key, settings))


def state_key(settings: PlanConfig, *, recipe: str, sample_ids: str, content: Mapping[str, Any]) -> str:
    """Returns what a loader's state is checked by, 64 hex digits: 16 each of the settings, the recipe, the samples, the batches.

    recipe, sample_ids: digests of how samples are made, and of which they are. content: of the plan, see `plan_content`.
    Nothing here says whether samples are read from a cache: where their lengths put them into the same batches a state goes
    from one to the other.
    """
    document = plan_document("", settings)
    del document["cache_keys"]
    return "".join(digest(part)[:_PART] for part in (document, recipe, sample_ids, content))


def with_mixture(key: str, mixture: Mapping[str, Any]) -> str:
    """Returns the state key of a mixture over the plan of `key`: it is a setting, on top of those of the plan."""
    return digest({"plan": key[:_PART], "mixture": mixture})[:_PART] + key[_PART:]


def why_differ(stored: Any, wanted: str) -> str:
    """Returns for a message what it means that a state key is not the wanted one: the first part that differs."""
    if not isinstance(stored, str) or len(stored) != len(wanted):
        stored = ""
    starts = range(0, _PART * len(_CHANGES), _PART)
    changes = [
        change
        for change, start in zip(_CHANGES, starts, strict=True)
        if stored[start : start + _PART] != wanted[start : start + _PART]
    ]
    # Nothing in common: a key of another making, or of other data altogether.
    is_partial = 0 < len(changes) < len(_CHANGES)
    return changes[0] if is_partial else f"the data, the [plan] section or a mixture changed since: {_EARLIER}"
