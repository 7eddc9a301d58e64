"""`forebay inspect`: prints what is asked for of a cache or a plan, as one document or as lines.

`--usage FILE` says what a run has used, against what it was to use, and what it never used.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forebay.config.remote import RemoteConfig, is_url, parse_url, url_or_path
from forebay.config.tree import Config, stand_in
from forebay.errors import (
    CacheCorruptError,
    CacheError,
    CacheNotFoundError,
    ConfigError,
    MissingExtraError,
    RemoteError,
)
from forebay.inspect.facts import Pack, cache_facts, pack_bytes, read_pack, read_plan, unreadable_facts
from forebay.inspect.inspect_lines import pack_lines, report_lines, sample_lines, verify_lines
from forebay.inspect.plan_lines import plan_report_lines, usage_lines
from forebay.inspect.sample import Sample, Sounds, read_sample, sample_index
from forebay.plan.disk import is_plan
from forebay.store.cache import Cache, open_cache
from forebay.store.layout import Array
from forebay.store.lookup import find_cache, require, sealed_caches
from forebay.store.metadata import check_description, foreign_values
from forebay.store.output import check_output
from forebay.store.remote.mirror import cache_folder
from forebay.store.remote.small_files import RemoteRoot
from forebay.store.seal import VerifyReport, verify_folder
from forebay.store.selection import Filter
from forebay.terminal import print_json, print_lines, wrapped
from forebay.visible import printable

if TYPE_CHECKING:
    from forebay.inspect.bucket_manifests import Places

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
        from forebay.steps.recipe import recipe_of  # not at import: a folder is looked at without the steps

        found = require(target, find_cache(target, recipe_of(target)))
        return _show_cache(found.place, target, replace(options, remote=target.remote))
    place = url_or_path(target)
    if not is_url(place) and is_plan(Path(place)):
        return _show_plan(Path(os.path.abspath(place)), options)
    return _show_cache(place, None, options)


def show_bucket_manifests(config: Config, folder: Path, *, seed: int, places: Places, as_json: bool) -> int:
    """Writes the bucket manifests of a config, prints what was written and returns 0; see `bucket_manifests`."""
    from forebay.inspect.bucket_manifests import CONFIG_NAME, bucket_manifests

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
    wavs: dict[Path, Mapping[str, Array]] = {}
    if sample is not None and outputs.wav is not None:
        from forebay.inspect.bucket_manifests import write_wav

        wavs = _sounds(cache, sample, outputs, outputs.wav, config)
        for path, tensors in wavs.items():
            check_output(path, "--wav", folder=cache.folder, config=config)
            write_wav(cache, tensors, path)
    if sample is not None and outputs.png is not None:
        from forebay.inspect.page.cards import hop_s
        from forebay.inspect.picture import draw, draw_tiles, sample_title, write_figure

        if sample.items:
            tiles = [item.picture(config) for item in sample.shown]
            write_figure(draw_tiles(tiles, title=sample_title(sample)), outputs.png)
        elif "audio" in cache.groups:
            rate_hz, seconds = cache.constants["sample_rate_hz"], hop_s(cache.constants)
            write_figure(draw(sample.tensors, sample.row, sample_rate_hz=rate_hz, hop_s=seconds), outputs.png)
        else:
            raise ConfigError(f"--png: {cache.place} has no audio to draw; leave --png out")
    if outputs.export is not None:
        from forebay.inspect.bucket_manifests import write_table

        write_table(cache, outputs.export)
    return [str(path) for path in (*wavs, outputs.png, outputs.export) if path is not None]


def _sounds(
    cache: Cache, sample: Sample, options: InspectOptions, path: Path, config: Config | None
) -> dict[Path, Mapping[str, Array]]:
    """Returns the tensors of each WAV: of a recording, or of each clip that a sample lists, numbered if it has several.

    Raises ConfigError for a sample without clips, and for clips that cannot be had.
    """
    listen = None if config is None or options.sounds is None else options.sounds(config, cache)
    if "audio" not in sample.items:
        heard = None if listen is None or "waveform" in sample.tensors else listen(sample.row)
        return {path: {**sample.tensors, **({} if heard is None else {"waveform": heard})}}
    name, clips = str(sample.row["sample_id"]), sample.items["audio"]
    if not clips:
        raise ConfigError(f"--wav: sample {name} of {cache.place} has no clips; leave --wav out")
    found = {} if listen is None else listen.clips(name)
    if gone := next((clip for clip in clips if clip.hash not in found), None):
        raise ConfigError(
            f"--wav: {cache.place} keeps features of clips alone, and {gone.name} is not at hand as it was read; name "
            "the config where its sources are on this machine, as they were read"
        )
    ends = [""] if len(clips) == 1 else [f"-{number}" for number in range(len(clips))]
    places = [path.with_name(f"{path.stem}{end}{path.suffix}") for end in ends]
    return {place: {"waveform": found[clip.hash]} for place, clip in zip(places, clips, strict=True)}


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


_COLUMNS = ("part", "language", "source")


def usage_facts(path: Path, *, remote: RemoteConfig | None = None) -> dict[str, Any]:
    """Returns the document of `forebay inspect --usage FILE --json`: the lines of the log added up.

    `languages`, `sources`, and `parts` of a mixture: by name the `samples` handed out, their `share`, the `expected`
    share, and how many samples are `there`. `shards`: `num`, `touched`, and how often the least and the most used one
    was gone through (`min_passes`, `max_passes`). `never_used`: `languages`, `sources` (names), `shards` (numbers),
    `samples` (indices; null where the log names none, see `train.usage_ids`), `sample_ids` (null also where the cache
    is not there). `gaps`: pairs of steps between which nothing was recorded.
    remote: how the stores of caches are asked whose folders are URLs.
    Raises ConfigError where the file cannot be read, CacheCorruptError, CacheMismatchError for what is no usage log.
    """
    from forebay.plan.plan_usage import FILE_NAME, walk_usage

    try:
        head, lines = walk_usage(path)
        return _facts(path, head, _added(head, (line for line, _ in lines)), remote)
    except OSError as err:
        raise ConfigError(f"cannot read {path}: {err.strerror}; name a run's logs/{FILE_NAME}") from err
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as err:
        raise CacheCorruptError(f"{path} does not hold a usage log: {err!r}") from err


@dataclass(kw_only=True, slots=True)
class _Added:
    """The sums of the lines of a log, added up one by one."""

    last: Mapping[str, Any]
    shards: Array
    used: Array
    columns: dict[str, Counter[str]]
    sums: Counter[str] = field(default_factory=Counter)
    gaps: list[list[int]] = field(default_factory=list)
    names_ids: bool = True


def _added(head: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> _Added:
    from forebay.plan.plan_usage import add_counts, unpack_ids

    done = head["from_step"]
    found = _Added(
        last={"step": done, "to": {"epoch": 0, "position": 0}},
        shards=np.zeros(len(head["shards"]), np.int64),
        used=np.zeros(head["num_samples"], bool),
        columns={f"{name}s": Counter() for name in _COLUMNS if f"{name}s" in head},
        gaps=[[0, done]] if done else [],
    )
    for line in lines:
        for name in ("samples", "batches", "repeats", "frames", "padded_frames"):
            found.sums[name] += line[name]
        for name, counts in found.columns.items():
            for value, row in line[name].items():
                counts[value] += row["samples"]
        add_counts(found.shards, line["shards"])
        found.names_ids &= "ids" in line
        if found.names_ids:
            found.used[unpack_ids(line["ids"])] = True
        if found.last["step"] != line["from_step"]:
            found.gaps.append([found.last["step"], line["from_step"]])
        found.last = line
    return found


def _facts(path: Path, head: Mapping[str, Any], added: _Added, remote: RemoteConfig | None) -> dict[str, Any]:
    sums, shards = added.sums, added.shards
    columns = {name: _column(head[name], counts) for name, counts in added.columns.items()}
    unused = np.flatnonzero(~added.used) if added.names_ids else None
    frames = sums["frames"] + sums["padded_frames"]
    return {
        "file": str(path),
        "steps": added.last["step"],
        "from_step": head["from_step"],
        "gaps": added.gaps,
        "epoch": added.last["to"]["epoch"],
        "position": added.last["to"]["position"],
        "num_batches": head["num_batches"],
        "seed": head["seed"],
        "plan_key": head["plan_key"],
        "caches": [{name: cache[name] for name in ("folder", "key")} for cache in head["caches"]],
        "source_key": head["source_key"],
        "num_samples": head["num_samples"],
        "samples": sums["samples"],
        "batches": sums["batches"],
        "repeats": sums["repeats"],
        "padding": sums["padded_frames"] / frames if sums["frames"] else 0.0,
        **columns,
        "shards": _shards(head, shards),
        "never_used": {
            **{name: [value for value, row in rows.items() if not row["samples"]] for name, rows in columns.items()},
            "shards": np.flatnonzero((shards == 0) & (np.array(head["shards"], np.int64) > 0)).tolist(),
            "samples": None if unused is None else unused.tolist(),
            "sample_ids": None if unused is None else _sample_ids(head, unused, remote),
        },
    }


def _column(there: Mapping[str, Any], counts: Counter[str]) -> dict[str, dict[str, Any]]:
    total = max(counts.total(), 1)
    return {
        value: {
            "samples": counts[value],
            "share": counts[value] / total,
            "expected": row["expected"],
            "there": row["samples"],
        }
        for value, row in there.items()
    }


def _shards(head: Mapping[str, Any], counts: Array) -> dict[str, Any]:
    sizes = np.array(head["shards"], np.int64)
    passes = counts[sizes > 0] / sizes[sizes > 0]
    return {
        "num": len(passes),
        "touched": int(np.count_nonzero(passes)),
        "min_passes": float(passes.min()) if len(passes) else None,
        "max_passes": float(passes.max()) if len(passes) else None,
    }


def _sample_ids(head: Mapping[str, Any], indices: Array, remote: RemoteConfig | None) -> list[str] | None:
    """Returns the ids of samples; None where not all of the caches that were used are there."""
    from forebay.plan.plan_usage import unpack_ids

    names: list[str] = []
    for described in head["caches"]:
        try:
            cache = open_cache(described["folder"], remote=remote)
            cache.require_key(described["key"])
        except (CacheError, RemoteError, MissingExtraError):
            return None
        ids = cache.table(["sample_id"])["sample_id"]
        names += (ids.take(unpack_ids(described["places"])) if "places" in described else ids).to_pylist()
    return [names[index] for index in indices] if names else None


def run_usage(path: Path, *, as_json: bool, remote: RemoteConfig | None = None) -> int:
    """Prints the report on a usage log and returns the exit code, 0."""
    facts = usage_facts(path, remote=remote)
    if as_json:
        print_json(facts)
    else:
        print_lines(usage_lines(facts))
    return 0
