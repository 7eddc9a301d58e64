"""`forebay inspect PLAN_FOLDER`: a plan's settings and statistics, or one of its packs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from forebay.errors import CacheCorruptError, CacheMismatchError, CacheNotFoundError, ConfigError
from forebay.inspect.export import check_target
from forebay.inspect.image_facts import holds_images, pack_bytes
from forebay.inspect.layout import print_json, print_lines
from forebay.inspect.pack import Pack, read_pack
from forebay.inspect.pack_lines import pack_lines
from forebay.inspect.plan_lines import plan_report_lines
from forebay.inspect.plans import read_plan
from forebay.inspect.terminal import verify_lines
from forebay.store.cache import Cache, open_cache
from forebay.store.cache_document import check_description, foreign_values
from forebay.store.lookup import sealed_caches
from forebay.store.metadata import check_file
from forebay.store.verify import VerifyReport

DONE, FAILED = 0, 1

_OF_CACHES = ("wav", "export")


def run_plan(folder: Path, options: argparse.Namespace) -> int:
    """Prints what a plan is, or with `--sample` one pack of it, and returns the exit code as `command.run` does.

    The plan's cache is looked for in the root that the plan lies in, and under `--cache-root`.
    Raises ConfigError for options that a plan has no answer to, CacheCorruptError, CacheMismatchError where the plan cannot
    be read, CacheNotFoundError where a pack is asked for and its cache is not there.
    """
    folder = Path(os.path.abspath(folder))
    _check(folder, options)
    plan = _read(folder)
    facts: dict[str, Any] = {**plan, "verify": _verified(folder, plan).to_json()} if options.verify else plan
    if options.verify and not facts["verify"]["ok"]:
        _print(options, facts, None, [])
        return FAILED
    cache = _cache(folder, plan, options)
    facts = {**facts, "cache": None if cache is None else str(cache.folder)}
    if cache is not None:
        check_description(cache.folder, cache.metadata)
        facts = pack_bytes(cache, facts) if holds_images(cache) else facts
    pack = None if options.sample is None else _pack(cache, plan, options)
    written = [] if pack is None or options.png is None else [_draw(pack, folder, Path(options.png))]
    _print(options, facts, pack, written)
    return DONE


def _check(folder: Path, options: argparse.Namespace) -> None:
    for name in _OF_CACHES:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: {folder} is a plan; name its cache, or a config")
    if options.png is not None:
        if options.sample is None:
            raise ConfigError("--png needs --sample I, the pack to draw; for example --sample 0")
        check_target(Path(options.png), "--png", cache_folder=folder)


def _read(folder: Path) -> dict[str, Any]:
    try:
        return read_plan(folder)
    except CacheMismatchError as err:
        raise CacheMismatchError(f"{err}; install a newer forebay") from err
    except (CacheCorruptError, OSError) as err:
        raise CacheCorruptError(f"{err}; delete {folder} and run: forebay preprocess CONFIG") from err


def _verified(folder: Path, plan: dict[str, Any]) -> VerifyReport:
    """Metadata and statistics were compared when the plan was read."""
    report = VerifyReport()
    for name, entry in plan["arrays"].items():
        try:
            check_file(folder / f"{name}.npy", entry, verify=True)
            report.checked_bytes += int(entry["size_bytes"])
        except CacheCorruptError as err:
            report.problems.append(str(err))
    return report


def _roots(folder: Path, options: argparse.Namespace) -> list[Path]:
    named = [] if options.cache_root is None else [Path(options.cache_root).absolute()]
    return list(dict.fromkeys([folder.parent.parent, *named]))


def _cache(folder: Path, plan: dict[str, Any], options: argparse.Namespace) -> Cache | None:
    """The newest cache of the plan's key: every layout has the same samples."""
    caches = (cache for root in _roots(folder, options) for cache in sealed_caches(root))
    return next((open_cache(cache.folder) for cache in caches if cache.key in plan["cache_keys"]), None)


def _pack(cache: Cache | None, plan: dict[str, Any], options: argparse.Namespace) -> Pack:
    folder = Path(plan["folder"])
    if cache is None:
        key, searched = plan["cache_keys"][0][:16], ", ".join(map(str, _roots(folder, options)))
        raise CacheNotFoundError(
            f"{folder} packs the cache with key {key}, which is not in {searched}; "
            f"run: forebay inspect {folder} --sample {options.sample} --cache-root DIR"
        )
    with foreign_values(cache.folder):
        return read_pack(cache, plan, options.sample)


def _draw(pack: Pack, folder: Path, path: Path) -> str:
    from forebay.inspect.image_picture import pack_title, sample_tiles, write_tiles

    tiles = [tile for i, sample in enumerate(pack.segments) for tile in sample_tiles(sample, mark=f"#{i} ")]
    write_tiles(tiles, path, title=pack_title(pack, folder.name))
    return str(path)


def _print(options: argparse.Namespace, facts: dict[str, Any], pack: Pack | None, written: list[str]) -> None:
    if options.json:
        document = {**facts, **({"pack": pack.to_json()} if pack else {}), **({"written": written} if written else {})}
        print_json(document)
        return
    if pack is not None:
        print_lines(pack_lines(pack))
    elif "cache" in facts:
        print_lines(plan_report_lines(facts))
    if "verify" in facts:
        print_lines(["", *verify_lines(facts["verify"])] if "cache" in facts else verify_lines(facts["verify"]))
    print_lines(f"wrote {path}" for path in written)
