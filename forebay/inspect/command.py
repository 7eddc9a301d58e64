"""`forebay inspect`: prints what is asked for of a cache or a plan, as one document or as lines."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import CacheCorruptError, CacheError, CacheNotFoundError, ConfigError
from forebay.inspect.export import CONFIG_NAME, Places, bucket_manifests, check_target, write_table, write_wav
from forebay.inspect.facts import cache_facts, holds_images, pack_bytes, unreadable_facts
from forebay.inspect.pack import Pack, read_pack
from forebay.inspect.plans import read_plan
from forebay.inspect.sample import ImageSample, Sample, read_sample, sample_index
from forebay.inspect.terminal.layout import print_json, print_lines
from forebay.inspect.terminal.plan import plan_report_lines
from forebay.inspect.terminal.report import report_lines, verify_lines
from forebay.inspect.terminal.sample import pack_lines, sample_lines
from forebay.plan.disk import is_plan
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import find_cache, require, sealed_caches
from forebay.store.metadata import check_description, check_file, foreign_values
from forebay.store.verify import VerifyReport, verify_folder

DONE, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What is asked for, as `forebay inspect` takes it.

    sample: index or id; of a plan of packs the number of a pack, or a sample's id. wav, png: files to write of that
    sample.
    export: a parquet file to write. verify: re-hash everything. cache_root: another place to look for caches and plans.
    """

    sample: str | None = None
    wav: Path | None = None
    png: Path | None = None
    export: Path | None = None
    verify: bool = False
    as_json: bool = False
    progress: bool = False
    cache_root: Path | None = None


def show(target: Path | Config, options: InspectOptions) -> int:
    """Prints what is inside a cache or a plan; returns the exit code, 1 where `verify` found something wrong, else 0.

    target: the folder, or a config, whose cache is taken and whose tokenizer decodes labels.
    Raises ConfigError for options that do not go together, CacheNotFoundError where the config has no cache or a pack's
    cache is not there, another CacheError where the cache or the plan cannot be read.
    """
    if isinstance(target, Config):
        return _show_cache(require(target, find_cache(target)).folder, target, options)
    return _show_plan(Path(os.path.abspath(target)), options) if is_plan(target) else _show_cache(target, None, options)


def show_bucket_manifests(config: Config, folder: Path, *, seed: int, places: Places, as_json: bool) -> int:
    """Writes the bucket manifests of a config, prints what was written and returns 0; see `bucket_manifests`."""
    written = bucket_manifests(config, folder, seed=seed, places=places)
    if as_json:
        print_json({"written": [str(path) for path in written], CONFIG_NAME: json.loads(written[-1].read_bytes())})
    else:
        print_lines(f"wrote {path}" for path in written)
    return DONE


def _show_cache(folder: Path, config: Config | None, options: InspectOptions) -> int:
    """Prints a cache. With `sample` or `export` alone the report is left out; the document holds all of it.

    A damaged cache is reported as far as it can be read, and nothing is written from it.
    """
    _check_outputs(folder, options)
    verified = verify_folder(folder, progress=options.progress).to_json() if options.verify else None
    if verified is not None and not verified["ok"]:
        damaged = _damaged(folder, _plan_roots(folder, config, options))
        _print(options, {**damaged, "verify": verified}, None, [])
        return FAILED
    cache = open_cache(folder)
    sample = None if options.sample is None else _read(cache, options.sample, config)
    written = _write(cache, sample, options)
    facts: dict[str, Any] = {} if verified is None else {"verify": verified}
    if options.as_json or options.verify or not (sample or written):
        facts = {**cache_facts(cache, plan_roots=_plan_roots(folder, config, options)), **facts}
    _print(options, facts, sample, written)
    return DONE


def _read(cache: Cache, wanted: str, config: Config | None) -> Sample | ImageSample:
    check_description(cache.folder, cache.metadata)
    with foreign_values(cache.folder):
        return read_sample(cache, sample_index(cache, wanted), config=config)


def _check_outputs(folder: Path, options: InspectOptions) -> None:
    for name, path in {"wav": options.wav, "png": options.png}.items():
        if path is not None and options.sample is None:
            raise ConfigError(
                f"--{name} needs --sample I, the index or id of the sample to write; for example --sample 0"
            )
    for name, path in {"wav": options.wav, "png": options.png, "export": options.export}.items():
        if path is not None:
            check_target(path, f"--{name}", cache_folder=folder)
    if options.export is not None and options.export.suffix != ".parquet":
        raise ConfigError(
            f"--export {options.export}: the row table is written as parquet; name a file that ends in .parquet"
        )


def _plan_roots(folder: Path, config: Config | None, options: InspectOptions) -> list[Path]:
    """Where plans of a cache may lie: beside it, and under the root that was named (a cache may be named outright)."""
    named = config.cache_root if config is not None else options.cache_root
    roots = [Path(os.path.abspath(folder)).parent]
    if named is not None and named.absolute() != roots[0]:
        roots.append(named)
    return roots


def _damaged(folder: Path, plan_roots: list[Path]) -> dict[str, Any]:
    try:
        return cache_facts(open_cache(folder, verify="never"), plan_roots=plan_roots)
    except CacheError:
        return unreadable_facts(folder)  # why is among the problems that verifying found


def _write(cache: Cache, sample: Sample | ImageSample | None, outputs: InspectOptions) -> list[str]:
    if sample is not None and outputs.wav is not None:
        write_wav(cache, sample.tensors, outputs.wav)
    if sample is not None and outputs.png is not None:
        _write_png(cache, sample, outputs.png)
    if outputs.export is not None:
        write_table(cache, outputs.export)
    return [str(path) for path in (outputs.wav, outputs.png, outputs.export) if path is not None]


def _write_png(cache: Cache, sample: Sample | ImageSample, path: Path) -> None:
    if isinstance(sample, ImageSample):
        from forebay.inspect.picture import sample_tiles, sample_title, write_tiles

        write_tiles(sample_tiles(sample), path, title=sample_title(sample))
        return
    from forebay.inspect.picture import write_picture

    if cache.constants["features"] == "none":
        raise ConfigError(f"--png: {cache.folder} has no audio to draw; leave --png out")
    write_picture(sample.tensors, sample.row, path, sample_rate_hz=cache.constants["sample_rate_hz"])


def _print(
    options: InspectOptions, facts: dict[str, Any], sample: Sample | ImageSample | None, written: list[str]
) -> None:
    if options.as_json:
        document = {
            **facts,
            **({"sample": sample.to_json()} if sample else {}),
            **({"written": written} if written else {}),
        }
        print_json(document)
        return
    if facts.get("sealed"):
        print_lines([*report_lines(facts), ""] if "verify" in facts else report_lines(facts))
    if sample is not None:
        print_lines(sample_lines(sample))
    if "verify" in facts:
        print_lines(verify_lines(facts["verify"]))
    print_lines(f"wrote {path}" for path in written)


def _show_plan(folder: Path, options: InspectOptions) -> int:
    """Prints a plan, or the pack that `sample` asks for; its cache is looked for beside it, and under `cache_root`."""
    _check_plan_outputs(folder, options)
    try:
        plan = read_plan(folder)
    except OSError as err:
        raise CacheCorruptError(f"{err}; delete {folder} and run: forebay preprocess CONFIG") from err
    facts: dict[str, Any] = {**plan, "verify": _verified(folder, plan).to_json()} if options.verify else plan
    if options.verify and not facts["verify"]["ok"]:
        _print_plan(options, facts, None, [])
        return FAILED
    cache = _cache(folder, plan, options)
    facts = {**facts, "cache": None if cache is None else str(cache.folder)}
    if cache is not None:
        check_description(cache.folder, cache.metadata)
        facts = pack_bytes(cache, facts) if holds_images(cache) else facts
    pack = None if options.sample is None else _pack(cache, plan, options.sample, options)
    written = [] if pack is None or options.png is None else [_draw(pack, folder, options.png)]
    _print_plan(options, facts, pack, written)
    return DONE


def _check_plan_outputs(folder: Path, options: InspectOptions) -> None:
    for name, path in {"wav": options.wav, "export": options.export}.items():
        if path is not None:
            raise ConfigError(f"--{name}: {folder} is a plan; name its cache, or a config")
    if options.png is not None:
        if options.sample is None:
            raise ConfigError("--png needs --sample I, the pack to draw; for example --sample 0")
        check_target(options.png, "--png", cache_folder=folder)


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


def _roots(folder: Path, options: InspectOptions) -> list[Path]:
    named = [] if options.cache_root is None else [options.cache_root.absolute()]
    return list(dict.fromkeys([folder.parent.parent, *named]))


def _cache(folder: Path, plan: dict[str, Any], options: InspectOptions) -> Cache | None:
    """The newest cache of the plan's key: every layout has the same samples."""
    caches = (cache for root in _roots(folder, options) for cache in sealed_caches(root))
    return next((open_cache(cache.folder) for cache in caches if cache.key in plan["cache_keys"]), None)


def _pack(cache: Cache | None, plan: dict[str, Any], wanted: str, options: InspectOptions) -> Pack:
    folder = Path(plan["folder"])
    if cache is None:
        key, searched = plan["cache_keys"][0][:16], ", ".join(map(str, _roots(folder, options)))
        raise CacheNotFoundError(
            f"{folder} packs the cache with key {key}, which is not in {searched}; "
            f"run: forebay inspect {folder} --sample {wanted} --cache-root DIR"
        )
    with foreign_values(cache.folder):
        return read_pack(cache, plan, wanted)


def _draw(pack: Pack, folder: Path, path: Path) -> str:
    from forebay.inspect.picture import pack_title, sample_tiles, write_tiles

    tiles = [tile for i, sample in enumerate(pack.segments) for tile in sample_tiles(sample, mark=f"#{i} ")]
    write_tiles(tiles, path, title=pack_title(pack, folder.name))
    return str(path)


def _print_plan(options: InspectOptions, facts: dict[str, Any], pack: Pack | None, written: list[str]) -> None:
    if options.as_json:
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
