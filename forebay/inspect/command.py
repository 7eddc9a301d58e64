"""`forebay inspect`: prints what is asked for of a cache or a plan, as one document or as lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import CacheCorruptError, CacheError, CacheNotFoundError, ConfigError
from forebay.inspect.export import CONFIG_NAME, Places, bucket_manifests, check_target, write_table, write_wav
from forebay.inspect.facts import cache_facts, unreadable_facts
from forebay.inspect.plans import Pack, pack_bytes, read_pack, read_plan
from forebay.inspect.sample import ImageSample, Sample, holds_images, read_sample, sample_index
from forebay.inspect.terminal.layout import print_json, print_lines
from forebay.inspect.terminal.plan import plan_report_lines
from forebay.inspect.terminal.report import report_lines, verify_lines
from forebay.inspect.terminal.sample import pack_lines, sample_lines
from forebay.plan.disk import is_plan
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import find_cache, require, sealed_caches
from forebay.store.metadata import check_description, foreign_values
from forebay.store.source import has_audio
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
        return _show_cache(require(target, find_cache(target, recipe_of(target))).folder, target, options)
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
    named = options.cache_root if config is None else config.cache_root
    plan_roots = _roots(Path(os.path.abspath(folder)).parent, named)
    verified: dict[str, Any] = {}
    if options.verify:
        verified = {"verify": verify_folder(folder, progress=options.progress).to_json()}
        if not verified["verify"]["ok"]:
            facts = {**_damaged(folder, plan_roots), **verified}
            return _print(options, facts, _cache_lines(facts, None))
    cache = open_cache(folder)
    sample = None if options.sample is None else _read(cache, options.sample, config)
    written = _write(cache, sample, options)
    is_report = options.as_json or options.verify or not (sample or written)
    facts = {**(cache_facts(cache, plan_roots=plan_roots) if is_report else {}), **verified}
    return _print(options, facts, _cache_lines(facts, sample), sample=sample and sample.to_json(), written=written)


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


def _roots(own: Path, named: Path | None) -> list[Path]:
    """Returns where caches and their plans may lie: under their own root, and under the one that was named."""
    return list(dict.fromkeys([own, own if named is None else named.absolute()]))


def _damaged(folder: Path, plan_roots: list[Path]) -> dict[str, Any]:
    try:
        return cache_facts(open_cache(folder, verify="never"), plan_roots=plan_roots)
    except CacheError:
        return unreadable_facts(folder)  # why is among the problems that verifying found


def _read(cache: Cache, wanted: str, config: Config | None) -> Sample:
    check_description(cache.folder, cache.metadata)
    with foreign_values(cache.folder):
        return read_sample(cache, sample_index(cache, wanted), config=config)


def _write(cache: Cache, sample: Sample | None, outputs: InspectOptions) -> list[str]:
    if sample is not None and outputs.wav is not None:
        write_wav(cache, sample.tensors, outputs.wav)
    if sample is not None and outputs.png is not None:
        _write_png(cache, sample, outputs.png)
    if outputs.export is not None:
        write_table(cache, outputs.export)
    return [str(path) for path in (outputs.wav, outputs.png, outputs.export) if path is not None]


def _write_png(cache: Cache, sample: Sample, path: Path) -> None:
    from forebay.inspect.picture import draw, draw_tiles, sample_tiles, sample_title, write_figure

    if isinstance(sample, ImageSample):
        write_figure(draw_tiles(sample_tiles(sample), title=sample_title(sample)), path)
    elif has_audio(cache):
        write_figure(draw(sample.tensors, sample.row, sample_rate_hz=cache.constants["sample_rate_hz"]), path)
    else:
        raise ConfigError(f"--png: {cache.folder} has no audio to draw; leave --png out")


def _cache_lines(facts: dict[str, Any], sample: Sample | None) -> Iterator[str]:
    if facts.get("sealed"):
        yield from report_lines(facts)
        if "verify" in facts:
            yield ""
    if sample is not None:
        yield from sample_lines(sample)


def _print(
    options: InspectOptions, facts: dict[str, Any], lines: Iterable[str], *, written: Sequence[str] = (), **parts: Any
) -> int:
    """Prints facts and parts as one document, or as lines; returns the exit code, 1 where verifying found damage."""
    if options.as_json:
        print_json({**facts, **{name: part for name, part in {**parts, "written": written}.items() if part}})
    else:
        print_lines(lines)
        print_lines(verify_lines(facts["verify"]) if "verify" in facts else [])
        print_lines(f"wrote {path}" for path in written)
    return DONE if "verify" not in facts or facts["verify"]["ok"] else FAILED


def _show_plan(folder: Path, options: InspectOptions) -> int:
    """Prints a plan, or the pack that `sample` asks for; its cache is looked for beside it, and under `cache_root`."""
    _check_plan_outputs(folder, options)
    try:
        plan = read_plan(folder)
    except OSError as err:
        raise CacheCorruptError(f"{err}; delete {folder} and run: forebay preprocess CONFIG") from err
    facts: dict[str, Any] = {**plan, "verify": _verified(folder, plan).to_json()} if options.verify else plan
    if options.verify and not facts["verify"]["ok"]:
        return _print(options, facts, [])
    roots = _roots(folder.parent.parent, options.cache_root)
    # The newest one: every layout has the same samples.
    caches = (cache for root in roots for cache in sealed_caches(root) if cache.key in plan["cache_keys"])
    cache = next((open_cache(sealed.folder) for sealed in caches), None)
    facts = {**facts, "cache": None if cache is None else str(cache.folder)}
    if cache is not None:
        check_description(cache.folder, cache.metadata)
        facts = pack_bytes(cache, facts) if holds_images(cache) else facts
    pack = None if options.sample is None else _pack(cache, plan, options.sample, roots)
    written = [] if pack is None or options.png is None else [_draw(pack, folder, options.png)]
    lines = [*(plan_report_lines(facts) if pack is None else pack_lines(pack)), *([""] if options.verify else [])]
    return _print(options, facts, lines, pack=pack and pack.to_json(), written=written)


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
        report.check(folder / f"{name}.npy", entry)
    return report


def _pack(cache: Cache | None, plan: dict[str, Any], wanted: str, roots: Sequence[Path]) -> Pack:
    folder = Path(plan["folder"])
    if cache is None:
        key, searched = plan["cache_keys"][0][:16], ", ".join(map(str, roots))
        raise CacheNotFoundError(
            f"{folder} packs the cache with key {key}, which is not in {searched}; "
            f"run: forebay inspect {folder} --sample {wanted} --cache-root DIR"
        )
    with foreign_values(cache.folder):
        return read_pack(cache, plan, wanted)


def _draw(pack: Pack, folder: Path, path: Path) -> str:
    from forebay.inspect.picture import draw_tiles, pack_title, sample_tiles, write_figure

    tiles = [tile for i, sample in enumerate(pack.segments) for tile in sample_tiles(sample, mark=f"#{i} ")]
    write_figure(draw_tiles(tiles, title=pack_title(pack, folder.name)), path)
    return str(path)
