"""A plan as a sealed folder: flat arrays and their statistics, metadata.json last, opened by memory mapping.

Checksums prove that the bytes of a folder are those that were written, and not that forebay wrote them: what the
metadata and the statistics hold is checked too, before anything uses it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from forebay.config.plan import PackConfig, PlanConfig
from forebay.errors import CacheCorruptError, CacheMismatchError, CacheNotFoundError
from forebay.plan.bucket_plan import BucketPlan
from forebay.plan.names import plan_document
from forebay.plan.pack.pack_plan import PackPlan
from forebay.plan.statistics import FORM, PACK_FORM
from forebay.plan.window import WindowPlan
from forebay.store.cache import Cache
from forebay.store.cut_samples import CutSamples
from forebay.store.files import (
    fsync_folder,
    hash_file,
    put_in_place,
    sweep,
    temporary_name,
    write_all,
    write_aside,
    write_bytes,
)
from forebay.store.key import (
    COUNT,
    NUMBER,
    OBJECT,
    POSITIVE,
    TEXT,
    Check,
    all_of,
    digest,
    list_of,
    map_of,
    or_null,
    record,
)
from forebay.store.layout import METADATA, PLANS, Array
from forebay.store.metadata import checksum, read_regular, regular_size
from forebay.store.open_shards import MEMBERS_A_CHUNK, CheckedArray, chunk_sums
from forebay.store.selection import Selection

AnyPlan = BucketPlan | WindowPlan | PackPlan
_KINDS: dict[str, type[AnyPlan]] = {"bucket": BucketPlan, "window": WindowPlan, "pack": PackPlan}
PLAN_FORMAT_VERSION = 2
"""1 is of plans beside caches of the formats 1 to 3."""


STATISTICS = "packing_stats.json"
SUMS = "members_sums"
"""Checksums of the pieces of a large `members`, which is then checked where it is touched and not when it is opened."""
LAZY_BYTES = 2**25
"""A `members` of so many bytes has `SUMS`; hashing less at once takes 3 ms."""
SELECTED = "selected.npy"
"""Beside packs of what a filter left of a cache: the places of these samples in the cache, int64."""
CUT = "cut.npy"
"""Beside packs of conversations of which some are cut: `CutSamples.cut`; `SELECTED` is of what each is a piece of."""
_ARRAY = record({"size_bytes": COUNT, "xxh3_128": TEXT})
_FILTER = record({"of": TEXT, "key": TEXT, "said": TEXT}, {"selected": _ARRAY, "cut": _ARRAY})
_PACKS = all_of(map_of(_ARRAY), record({"members": _ARRAY, "offsets": _ARRAY}))
_PACK_SETTINGS = record({"seq_len": POSITIVE, "max_patches": or_null(COUNT)}, {"max_frames": COUNT})


def _form(counted: str, share: str, *, arrays: Check, settings: Check) -> Check:
    """Returns the check of a plan's metadata."""
    plan = record({"cache_keys": list_of(TEXT, may_be_empty=False), "settings": settings})
    texts = dict.fromkeys(("plan_key", "kind", "statistics_xxh3_128"), TEXT)
    counts = {"num_samples": COUNT, counted: COUNT, share: NUMBER}
    return record({**texts, **counts, "arrays": arrays, "plan": plan}, {"filter": _FILTER, "cut": map_of(COUNT)})


_METADATA_OF_PACKS = _form("num_packs", "fill", arrays=_PACKS, settings=_PACK_SETTINGS)
_METADATA_OF_BATCHES = _form("num_batches", "padding", arrays=map_of(_ARRAY), settings=OBJECT)
_AGAIN = "delete that folder and run: forebay preprocess CONFIG"


def save_plan(
    plan: AnyPlan,
    folder: Path,
    *,
    cache_key: str,
    settings: PlanConfig,
    statistics: dict[str, Any],
    sample_ids: str | None = None,
    selection: Selection | None = None,
) -> None:
    """Makes `folder` (of `plan_folder`) hold the plan, complete or not at all; a damaged one that is there is replaced.

    Two savers at once are fine: the first one's folder stays, the bytes are the same. Arrays that are mapped from a
    replaced folder stay valid. sample_ids: the digest of which samples are planned. selection: these samples, where a
    filter chose them.
    Raises OSError where the root cannot be written, with nothing left behind, and CacheMismatchError where another plan
    (eight equal hex digits, or a newer format) has the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    sweep(folder.parent)
    aside = temporary_name(folder)
    aside.mkdir(exist_ok=True)  # nobody else has its name: what is there is ours
    try:
        arrays = {name: _write_array(aside / f"{name}.npy", array) for name, array in _arrays(plan).items()}
        stats = json.dumps(statistics, indent=1, allow_nan=False).encode("ascii")
        write_bytes(aside / STATISTICS, stats)
        metadata = {
            **_described(plan, plan_document(cache_key, settings), settings=settings, statistics=statistics),
            **({} if sample_ids is None else {"sample_ids": sample_ids}),
            **({} if selection is None else {"filter": _write_selection(aside, selection, settings)}),
            "statistics_xxh3_128": xxhash.xxh3_128_hexdigest(stats),
            "arrays": arrays,
            **plan.figures(settings),
        }
        metadata["checksum"] = checksum(metadata)
        write_bytes(aside / METADATA, json.dumps(metadata, indent=1, allow_nan=False).encode("ascii"))
        if put_in_place(aside, folder, may_stay=partial(_is_whole, folder, cache_key=cache_key, settings=settings)):
            fsync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _described(
    plan: AnyPlan, document: dict[str, Any], *, settings: PlanConfig, statistics: dict[str, Any]
) -> dict[str, Any]:
    share = "fill" if settings.kind == "pack" else "padding"
    return {
        "format_version": PLAN_FORMAT_VERSION,
        "kind": settings.kind,
        "plan_key": digest(document),
        "plan": document,
        **plan.counts(),
        share: statistics[share],
    }


def load_plan(folder: Path, *, cache_key: str, settings: PlanConfig, num_samples: int | None = None) -> AnyPlan:
    """Returns the plan of a folder, its arrays read-only mappings whose bytes have been compared with their checksums.

    A large `members` is compared piece by piece, where the plan's order touches it for the first time.
    Raises CacheNotFoundError where no plan is, CacheMismatchError where it is another one (cache, settings, number of
    samples, newer format), CacheCorruptError where bytes on disk are not the bytes written; the order raises that too.
    """
    metadata = read_metadata(folder)
    wanted, version = plan_document(cache_key, settings), metadata["plan"].get("packer_version")
    if isinstance(version, int) and 1 <= version < wanted.get("packer_version", 0):
        wanted["packer_version"] = version  # packs of an older packer are packs
    _expect(folder, wanted, metadata["plan"])
    if num_samples is not None and metadata["num_samples"] != num_samples:
        raise CacheMismatchError(
            f"{folder}: num_samples differs ({num_samples} in the cache, {metadata['num_samples']} in the plan); "
            f"{_AGAIN}",
            code="FB413",
        )
    try:
        return _mapped(folder, metadata, settings)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as err:
        # Its checksum is right: somebody else wrote it.
        raise _damaged(f"{folder / METADATA} is none that forebay writes ({err!r:.80})") from err


def _write_selection(folder: Path, selection: Selection, settings: PlanConfig) -> dict[str, Any]:
    """Returns what the metadata say of a filter. Packs alone are read without the config that has it."""
    key, said = selection.filter_key or "", "" if selection.choice is None else str(selection.choice)
    note: dict[str, Any] = {"of": selection.source.key, "key": key, "said": said}
    if isinstance(settings, PackConfig):
        note["selected"] = _write_array(folder / SELECTED, selection.places)
    if isinstance(selection, CutSamples):
        note["cut"] = _write_array(folder / CUT, selection.cut)
    return note


def cache_key_of(metadata: Mapping[str, Any]) -> str:
    """Returns the key of the cache whose samples, or some of them, a plan is of. metadata: of `read_metadata`."""
    note = metadata.get("filter")
    return str(metadata["plan"]["cache_keys"][0] if note is None else note["of"])


def is_of_all(metadata: Mapping[str, Any]) -> bool:
    """Whether a plan is of all samples of its cache, whole or cut. metadata: of `read_metadata`."""
    return not metadata.get("filter", {}).get("key")


def planned_samples(folder: Path, cache: Cache) -> Cache | Selection:
    """Returns the samples of a cache that a plan of packs is of: all of them, those that a filter left, or pieces.

    cache: of the key that `cache_key_of` gives. Raises CacheCorruptError where the plan's list of them is damaged.
    """
    metadata = read_metadata(folder)
    if (note := metadata.get("filter")) is None:
        return cache
    path = folder / SELECTED
    try:
        places = _map_array(path, note["selected"], is_checked=True)
    except KeyError as err:
        raise CacheCorruptError(f"{folder / METADATA} has a filter and no {SELECTED}; {_AGAIN}") from err
    count, least = metadata["num_samples"], int("cut" not in note)
    is_right = places.dtype == np.int64 and places.shape == (count,) and bool((np.diff(places) >= least).all())
    if not is_right or (count and not 0 <= places[0] <= places[-1] < len(cache)):
        raise CacheCorruptError(f"{path} is no list of {count} samples among {len(cache)}; {_AGAIN}")
    key, filter_key = metadata["plan"]["cache_keys"][0], note["key"] or None
    if "cut" not in note:
        return Selection(cache, places, key=key, filter_key=filter_key)
    cut = _map_array(folder / CUT, note["cut"], is_checked=True)
    try:
        return CutSamples(cache, places, cut, key=key, counts=metadata["cut"], filter_key=filter_key)
    except (KeyError, TypeError, ValueError, IndexError) as err:
        raise CacheCorruptError(f"{folder / CUT} holds no pieces of {count} samples; {_AGAIN}") from err


def _mapped(folder: Path, metadata: dict[str, Any], settings: PlanConfig) -> AnyPlan:
    is_lazy = SUMS in metadata["arrays"]
    arrays = {
        name: _map_array(folder / f"{name}.npy", expected, is_checked=not (is_lazy and name == "members"))
        for name, expected in metadata["arrays"].items()
    }
    check = None
    if is_lazy:
        path, sums = folder / "members.npy", arrays.pop(SUMS)
        check = CheckedArray(path, arrays["members"], sums, chunk_items=MEMBERS_A_CHUNK, again=_AGAIN).require_all
    kind: Any = _KINDS[settings.kind]
    plan: AnyPlan = kind.restored({**arrays, "check": check}, metadata=metadata, settings=settings)
    return plan


def plan_content(plan: AnyPlan, settings: PlanConfig) -> dict[str, Any]:
    """Returns what the batches of a plan are a function of, beside its settings: its arrays, by checksum."""
    arrays = {name: _entry(array) for name, array in _arrays(plan).items()}
    return _content({"arrays": arrays, **plan.figures(settings)})


def sealed_content(folder: Path) -> tuple[dict[str, Any], str | None]:
    """Returns the `plan_content` of a plan on disk, and which samples it is of, where that is known; reads no array."""
    metadata = read_metadata(folder)
    return _content(metadata), metadata.get("sample_ids")


def _content(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in ("arrays", "windows", "patch_classes") if name in metadata}


def pack_settings(folder: Path) -> tuple[str, PackConfig]:
    """Returns of which cache the packs of a plan folder are, by its key, and the settings they were made by.

    `load_plan` wants both. Raises as that does, and CacheMismatchError where the folder is no plan of packs or has
    settings that are not known here.
    """
    metadata = read_metadata(folder)
    if metadata["kind"] != "pack":
        raise CacheMismatchError(
            f'{folder}: kind differs ("pack" wanted, "{metadata["kind"]}" stored); name another plan'
        )
    document = metadata["plan"]
    try:
        return document["cache_keys"][0], PackConfig(**document["settings"])
    except (TypeError, ValueError) as err:
        raise CacheMismatchError(
            f"{folder}: its settings are not those of this forebay's packs ({err}); run: forebay preprocess CONFIG",
            code="FB413",
        ) from err


def is_plan(folder: Path) -> bool:
    """Whether a folder is, or was meant to be, a plan and not a cache."""
    try:
        document = json.loads(read_regular(folder / METADATA))
    except (OSError, ValueError, RecursionError, CacheCorruptError):
        return folder.absolute().parent.name == PLANS
    return isinstance(document, dict) and "plan_key" in document


def read_metadata(folder: Path) -> dict[str, Any]:
    """Returns the checked metadata of a plan's folder, by which plans are found, listed and compared; reads no array.

    Raises CacheNotFoundError where no plan is, CacheCorruptError where the document is not what was written or none
    that forebay writes, CacheMismatchError where a newer or an older forebay wrote it, OSError where it cannot be read.
    """
    path = folder / METADATA
    try:
        content = read_regular(path)
    except (FileNotFoundError, NotADirectoryError) as err:
        raise CacheNotFoundError(f"no plan in {folder}: no {METADATA}; run: forebay preprocess CONFIG") from err
    try:
        metadata: dict[str, Any] = json.loads(content)
        version, stored = metadata["format_version"], metadata["checksum"]
        computed = checksum(metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise _damaged(f"{path} is not a plan's metadata ({err!r:.80})") from err
    # Before the checksum: a newer version may compute it in another way.
    if isinstance(version, int) and version > PLAN_FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path}: format_version differs ({version} stored, {PLAN_FORMAT_VERSION} is the newest that this forebay "
            f"reads); install a newer forebay, or {_AGAIN}",
            code="FB406",
        )
    if isinstance(version, int) and version < PLAN_FORMAT_VERSION:
        raise CacheMismatchError(
            f"{path}: format_version is {version}, this forebay reads {PLAN_FORMAT_VERSION}; {_AGAIN}", code="FB407"
        )
    if stored != computed:
        raise _damaged(f"{path}: checksum {stored} stored, {computed} computed")
    _require(_METADATA_OF_PACKS if metadata.get("kind") == "pack" else _METADATA_OF_BATCHES, metadata, path)
    for name in metadata["arrays"]:
        if os.path.basename(name) != name or "\0" in name:
            raise _damaged(f"{path} names an array {name!r:.80}, which is not in its folder")
    return metadata


def read_statistics(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Returns the checked statistics of a plan's folder. metadata: of `read_metadata`.

    Raises CacheCorruptError where the document is not what was written or none that forebay writes, OSError.
    """
    path, stored = folder / STATISTICS, metadata["statistics_xxh3_128"]
    content = read_regular(path)
    computed = xxhash.xxh3_128_hexdigest(content)
    if computed != stored:
        raise _damaged(f"{path}: checksum {stored} stored, {computed} computed")
    try:
        document: dict[str, Any] = json.loads(content)
    except (ValueError, RecursionError) as err:
        raise _damaged(f"{path} is not JSON: {err}") from err
    _require(PACK_FORM if metadata["kind"] == "pack" else FORM, document, path)
    return document


def _damaged(what: str) -> CacheCorruptError:
    return CacheCorruptError(f"{what}; {_AGAIN}", code="FB412")


def _require(check: Check, document: Any, path: Path) -> None:
    try:
        check(document, "it")
    except ValueError as err:
        raise _damaged(f"{path} is none that forebay writes: {err}") from err


def _arrays(plan: AnyPlan) -> dict[str, Array]:
    arrays = plan.arrays()
    return {**arrays, SUMS: chunk_sums(plan.members, MEMBERS_A_CHUNK)} if plan.members.nbytes >= LAZY_BYTES else arrays


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
        raise _damaged(f"{path} cannot be read: {err.strerror}") from err
    if size_bytes != expected["size_bytes"]:
        raise _damaged(f"{path}: {size_bytes} bytes, {expected['size_bytes']} were written")
    if found != expected["xxh3_128"]:
        raise _damaged(f"{path}: checksum {expected['xxh3_128']} stored, {found} computed")
    try:
        # A plain view: indexing np.memmap itself costs microseconds more each time.
        array: Array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except ValueError as err:
        raise _damaged(f"{path} is no array: {err}") from err
    if [array.dtype.str, list(array.shape)] != [expected["dtype"], expected["shape"]]:
        raise _damaged(
            f"{path} holds {array.dtype.str} {list(array.shape)}, {expected['dtype']} {expected['shape']} were written"
        )
    return array


def _expect(folder: Path, wanted: dict[str, Any], stored: dict[str, Any], *, section: str = "") -> None:
    for name in [*wanted, *(name for name in stored if name not in wanted)]:
        here, there = wanted.get(name), stored.get(name)
        if isinstance(here, dict) and isinstance(there, dict):
            _expect(folder, here, there, section="plan.")
        elif here != there:
            raise CacheMismatchError(
                f"{folder}: {section}{name} differs ({here} wanted, {there} stored); "
                "the plan belongs to another cache or config; run: forebay preprocess CONFIG",
                code="FB413",
            )


def _is_whole(folder: Path, *, cache_key: str, settings: PlanConfig) -> bool:
    try:
        load_plan(folder, cache_key=cache_key, settings=settings)
    except (CacheCorruptError, CacheNotFoundError):
        return False
    return True
