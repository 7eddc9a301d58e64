"""`forebay inspect`: prints what is asked for of a cache or a plan, as one document or as lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forebay.config.remote import RemoteConfig, is_url, parse_url, url_or_path
from forebay.config.tree import Config, stand_in
from forebay.errors import CacheCorruptError, CacheError, CacheNotFoundError, ConfigError
from forebay.inspect.bucket_manifests import CONFIG_NAME, Places, bucket_manifests, write_table, write_wav
from forebay.inspect.facts import cache_facts, unreadable_facts
from forebay.inspect.inspect_lines import pack_lines, plan_report_lines, report_lines, sample_lines, verify_lines
from forebay.inspect.plan_facts import Pack, pack_bytes, read_pack, read_plan
from forebay.inspect.sample import Sample, Sounds, read_sample, sample_index
from forebay.plan.disk import is_plan
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.lookup import find_cache, require, sealed_caches
from forebay.store.metadata import check_description, foreign_values
from forebay.store.output import check_output
from forebay.store.remote.mirror import cache_folder
from forebay.store.remote.small_files import RemoteRoot
from forebay.store.sample_filter import Filter
from forebay.store.seal import VerifyReport, verify_folder
from forebay.terminal import print_json, print_lines, wrapped
from forebay.visible import printable

DONE, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """The options, as `forebay inspect` takes it.

    sample: index or id; of a plan of packs the number of a pack, or a sample's id. wav, png: files to write of that
    sample.
    export: a parquet file to write. verify: re-hash everything. cache_root: another place to look for caches and plans,
    a folder or URL. sounds: where a config's recordings come from that the cache does not keep. remote: how the stores
    of URLs are asked.
    """

    sample: str | None = None
    wav: Path | None = None
    png: Path | None = None
    export: Path | None = None
    verify: bool = False
    as_json: bool = False
    progress: bool = False
    cache_root: str | None = None
    sounds: Sounds | None = None
    remote: RemoteConfig = field(default_factory=RemoteConfig)


def show(target: str | Path | Config, options: InspectOptions) -> int:
    """Prints what is inside a cache or a plan; returns the exit code, 1 where `verify` found something wrong, else 0.

    target: the folder, the URL of a cache, or a config, whose cache is taken and whose tokenizer decodes labels.
    Raises ConfigError for options that do not go together, CacheNotFoundError where the config has no cache or a pack's
    cache is not there, another CacheError where the cache or the plan cannot be read.
    """
    if isinstance(target, Config):
        found = require(target, find_cache(target, recipe_of(target)))
        return _show_cache(found.place, target, replace(options, remote=target.remote))
    place = url_or_path(target)
    if not is_url(place) and is_plan(Path(place)):
        return _show_plan(Path(os.path.abspath(place)), options)
    return _show_cache(place, None, options)


def show_bucket_manifests(config: Config, folder: Path, *, seed: int, places: Places, as_json: bool) -> int:
    """Writes the bucket manifests of a config, prints what was written and returns 0; see `bucket_manifests`."""
    written = bucket_manifests(config, folder, seed=seed, places=places)
    if as_json:
        print_json({"written": [str(path) for path in written], CONFIG_NAME: json.loads(written[-1].read_bytes())})
    else:
        print_lines(f"wrote {path}" for path in written)
    return DONE


def _show_cache(place: str, config: Config | None, options: InspectOptions) -> int:
    """Prints a cache. With `sample` or `export` alone the report is left out; the document holds all of it.

    A damaged cache is reported as far as it can be read, and nothing is written from it. Of a cache in a store small
    files are downloaded, and shards only where rows are asked for.
    """
    folder = cache_folder(place, options.remote)
    _check_outputs(folder, options, config)
    named = options.cache_root if config is None else config.run.cache_root
    roots = plan_roots(place, named, options.remote)
    verified: dict[str, Any] = {}
    if options.verify:
        verified = {"verify": verify_folder(folder, progress=options.progress).to_json()}
        if not verified["verify"]["ok"]:
            with foreign_values(folder):
                try:
                    facts = cache_facts(open_cache(folder, verify="never"), plan_roots=roots)
                except CacheError:
                    facts = unreadable_facts(folder)  # why is among the problems that verifying found
                return _print(options, facts | verified, _cache_lines(facts | verified, None))
    cache = open_cache(folder)
    with foreign_values(folder):
        return _show_open(cache, config, options, roots=roots, verified=verified)


def _show_open(
    cache: Cache, config: Config | None, options: InspectOptions, *, roots: list[Path], verified: dict[str, Any]
) -> int:
    sample = None
    if options.sample is not None:
        check_description(cache.folder, cache.metadata)
        sample = read_sample(cache, sample_index(cache, options.sample), config=config)
    written = _write(cache, sample, options, config=config)
    is_report = options.as_json or options.verify or not (sample or written)
    facts = {**(cache_facts(cache, plan_roots=roots) if is_report else {}), **verified}
    if is_report and config is not None and config.filter.is_given:
        facts["filter"] = Filter.of(config.filter).choose(cache, name=cache.place).to_json()
    return _print(options, facts, _cache_lines(facts, sample), sample=sample and sample.to_json(), written=written)


def _check_outputs(folder: Path, options: InspectOptions, config: Config | None) -> None:
    given = {"wav": options.wav, "png": options.png, "export": options.export}
    outputs = {name: path for name, path in given.items() if path is not None}
    needy = [name for name in outputs if name != "export" and options.sample is None]
    if needy:
        raise ConfigError(
            f"--{needy[0]} needs --sample I, the index or id of the sample to write; for example --sample 0"
        )
    for name, path in outputs.items():
        check_output(path, f"--{name}", folder=folder, config=config)
    if options.export is not None and options.export.suffix != ".parquet":
        raise ConfigError(
            f"--export {options.export}: the row table is written as parquet; name a file that ends in .parquet"
        )


def plan_roots(place: str, named: str | None, remote: RemoteConfig) -> list[Path]:
    """Returns where the plans of a cache may lie: under its own root, and under the one that was named."""
    own = str(parse_url(place).parent) if is_url(place) else os.path.dirname(os.path.abspath(place))
    places = [own] if named is None else [own, named if is_url(named) else os.path.abspath(named)]
    return [stand_in(each, remote) for each in dict.fromkeys(places)]


def _write(cache: Cache, sample: Sample | None, outputs: InspectOptions, *, config: Config | None) -> list[str]:
    if sample is not None and outputs.wav is not None:
        tensors = sample.tensors
        if "waveform" not in tensors and config is not None and outputs.sounds is not None:
            heard = outputs.sounds(config, cache)(sample.row)
            tensors = {**tensors, **({} if heard is None else {"waveform": heard})}
        write_wav(cache, tensors, outputs.wav)
    if sample is not None and outputs.png is not None:
        _write_png(cache, sample, outputs.png, config=config)
    if outputs.export is not None:
        write_table(cache, outputs.export)
    return [str(path) for path in (outputs.wav, outputs.png, outputs.export) if path is not None]


def _write_png(cache: Cache, sample: Sample, path: Path, *, config: Config | None) -> None:
    from forebay.inspect.page.cards import hop_s
    from forebay.inspect.picture import draw, draw_tiles, sample_title, write_figure

    if sample.items:
        tiles = [item.picture(config) for item in sample.shown]
        write_figure(draw_tiles(tiles, title=sample_title(sample)), path)
    elif "audio" in cache.groups:
        rate_hz, seconds = cache.constants["sample_rate_hz"], hop_s(cache.constants)
        write_figure(draw(sample.tensors, sample.row, sample_rate_hz=rate_hz, hop_s=seconds), path)
    else:
        raise ConfigError(f"--png: {cache.place} has no audio to draw; leave --png out")


def _cache_lines(facts: dict[str, Any], sample: Sample | None) -> Iterator[str]:
    if facts.get("sealed"):
        yield from report_lines(facts)
        if "filter" in facts:
            yield from wrapped("filter: ", printable(facts["filter"]["line"]))
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
    facts: dict[str, Any] = dict(plan)
    if options.verify:  # metadata and statistics were compared when the plan was read
        report = VerifyReport()
        for name, entry in plan["arrays"].items():
            report.check(folder / f"{name}.npy", entry)
        facts["verify"] = report.to_json()
    if options.verify and not facts["verify"]["ok"]:
        return _print(options, facts, [])
    cache, searched = _cache_of(folder, plan, options)
    facts = {**facts, "cache": None if cache is None else cache.place}
    if cache is not None:
        check_description(cache.folder, cache.metadata)
        facts = pack_bytes(cache, facts)
    pack = None if options.sample is None else _pack(cache, plan, options.sample, searched)
    written = [] if pack is None or options.png is None else [_draw(pack, folder, options.png)]
    lines = [*(plan_report_lines(facts) if pack is None else pack_lines(pack)), *([""] if options.verify else [])]
    return _print(options, facts, lines, pack=pack and pack.to_json(), written=written)


def _cache_of(folder: Path, plan: dict[str, Any], options: InspectOptions) -> tuple[Cache | None, list[str]]:
    """Returns the cache of a plan, None where it is not found, and the roots that were searched for it."""
    above = folder.parent.parent
    stands_for = RemoteRoot.of(above)
    searched = [str(above) if stands_for is None else str(stands_for.url)]
    if options.cache_root is not None and options.cache_root not in searched:
        searched.append(options.cache_root)
    for place, root in zip(searched, [above, *(stand_in(name, options.remote) for name in searched[1:])], strict=True):
        if is_url(place) and root != above:
            RemoteRoot.at(parse_url(place), options.remote).prepare()
        remote = RemoteRoot.of(root)
        # The newest one: every layout has the same samples.
        for sealed in sealed_caches(root):
            if sealed.key in plan["cache_keys"]:
                return open_cache(sealed.place, remote=None if remote is None else remote.settings), searched
    return None, searched


def _check_plan_outputs(folder: Path, options: InspectOptions) -> None:
    for name, path in {"wav": options.wav, "export": options.export}.items():
        if path is not None:
            raise ConfigError(f"--{name}: {folder} is a plan; name its cache, or a config")
    if options.png is not None:
        if options.sample is None:
            raise ConfigError("--png needs --sample I, the pack to draw; for example --sample 0")
        check_output(options.png, "--png", folder=folder)


def _pack(cache: Cache | None, plan: dict[str, Any], wanted: str, searched: Sequence[str]) -> Pack:
    folder = Path(plan["folder"])
    if cache is None:
        raise CacheNotFoundError(
            f"{folder} packs the cache with key {plan['cache_keys'][0][:16]}, which is not in {', '.join(searched)}; "
            f"run: forebay inspect {folder} --sample {wanted} --cache-root DIR"
        )
    with foreign_values(cache.folder):
        return read_pack(cache, plan, wanted)


def _draw(pack: Pack, folder: Path, path: Path) -> str:
    from forebay.inspect.picture import draw_tiles, pack_title, write_figure

    tiles = [
        replace(item.picture(None), mark=f"#{i} ") for i, sample in enumerate(pack.segments) for item in sample.shown
    ]
    write_figure(draw_tiles(tiles, title=pack_title(pack, folder.name)), path)
    return str(path)
