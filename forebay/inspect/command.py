"""`forebay inspect`: what is asked for, in one document or in lines."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.config import Config
from forebay.errors import CacheError, ConfigError
from forebay.inspect.export import check_target, write_table, write_wav
from forebay.inspect.facts import cache_facts, unreadable_facts
from forebay.inspect.image_facts import holds_images
from forebay.inspect.image_sample import ImageSample, read_image_sample
from forebay.inspect.image_sample_lines import image_sample_lines
from forebay.inspect.layout import print_json, print_lines
from forebay.inspect.sample import Sample, read_sample, sample_index, sample_lines
from forebay.inspect.terminal import report_lines, verify_lines
from forebay.store.cache import Cache, open_cache
from forebay.store.cache_document import check_description, foreign_values

DONE, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """Files to write, None where not asked for."""

    wav: Path | None
    png: Path | None
    export: Path | None


def run(folder: Path, config: Config | None, options: argparse.Namespace) -> int:
    """Prints what is inside a cache and returns the exit code: 1 where `--verify` found something wrong, else 0.

    config: where the cache was found by one; its tokenizer decodes labels. options: json, sample, wav, png, export, verify,
    no_progress, cache_root, as `forebay.cli` parses them. With `--sample` or `--export` alone the report is left out; `--json`
    holds all of it. A damaged cache is reported as far as it can be read, and nothing is written from it.
    Raises ConfigError for options that do not go together, CacheError where the cache cannot be read.
    """
    outputs = _outputs(folder, options)
    verified = None
    if options.verify:
        from forebay.store.verify import verify_folder

        verified = verify_folder(folder, progress=not options.no_progress).to_json()
    if verified is not None and not verified["ok"]:
        damaged = _damaged(folder, _plan_roots(folder, config, options))
        _print(options, {**damaged, "verify": verified}, None, [])
        return FAILED
    cache = open_cache(folder)
    sample = None if options.sample is None else _read(cache, options.sample, config)
    written = _write(cache, sample, outputs)
    facts: dict[str, Any] = {} if verified is None else {"verify": verified}
    if options.json or options.verify or not (sample or written):
        facts = {**cache_facts(cache, plan_roots=_plan_roots(folder, config, options)), **facts}
    _print(options, facts, sample, written)
    return DONE


def _read(cache: Cache, wanted: str, config: Config | None) -> Sample | ImageSample:
    check_description(cache.folder, cache.metadata)
    with foreign_values(cache.folder):
        index = sample_index(cache, wanted)
        if holds_images(cache):
            return read_image_sample(cache, index, config=config)
        return read_sample(cache, index, config=config)


def _outputs(folder: Path, options: argparse.Namespace) -> _Outputs:
    for name in ("wav", "png"):
        if getattr(options, name) is not None and options.sample is None:
            raise ConfigError(
                f"--{name} needs --sample I, the index or id of the sample to write; for example --sample 0"
            )
    paths = {name: _path(getattr(options, name)) for name in ("wav", "png", "export")}
    for name, path in paths.items():
        if path is not None:
            check_target(path, f"--{name}", cache_folder=folder)
    if paths["export"] is not None and paths["export"].suffix != ".parquet":
        raise ConfigError(
            f"--export {paths['export']}: the row table is written as parquet; name a file that ends in .parquet"
        )
    return _Outputs(**paths)


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name)


def _plan_roots(folder: Path, config: Config | None, options: argparse.Namespace) -> list[Path]:
    """Where plans of a cache may lie: beside it, and under the root that was named (a cache may be named outright)."""
    named = config.cache_root if config is not None else _path(options.cache_root)
    roots = [Path(os.path.abspath(folder)).parent]
    if named is not None and named.absolute() != roots[0]:
        roots.append(named)
    return roots


def _damaged(folder: Path, plan_roots: list[Path]) -> dict[str, Any]:
    try:
        return cache_facts(open_cache(folder, verify="never"), plan_roots=plan_roots)
    except CacheError:
        return unreadable_facts(folder)  # why is among the problems that verifying found


def _write(cache: Cache, sample: Sample | ImageSample | None, outputs: _Outputs) -> list[str]:
    if sample is not None and outputs.wav is not None:
        write_wav(cache, sample.tensors, outputs.wav)
    if sample is not None and outputs.png is not None:
        _write_png(cache, sample, outputs.png)
    if outputs.export is not None:
        write_table(cache, outputs.export)
    return [str(path) for path in (outputs.wav, outputs.png, outputs.export) if path is not None]


def _write_png(cache: Cache, sample: Sample | ImageSample, path: Path) -> None:
    if isinstance(sample, ImageSample):
        from forebay.inspect.image_picture import sample_tiles, sample_title, write_tiles

        write_tiles(sample_tiles(sample), path, title=sample_title(sample))
        return
    from forebay.inspect.picture import write_picture

    if cache.constants["features"] == "none":
        raise ConfigError(f"--png: {cache.folder} has no audio to draw; leave --png out")
    write_picture(sample.tensors, sample.row, path, sample_rate_hz=cache.constants["sample_rate_hz"])


def _print(
    options: argparse.Namespace, facts: dict[str, Any], sample: Sample | ImageSample | None, written: list[str]
) -> None:
    if options.json:
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
        print_lines(image_sample_lines(sample) if isinstance(sample, ImageSample) else sample_lines(sample))
    if "verify" in facts:
        print_lines(verify_lines(facts["verify"]))
    print_lines(f"wrote {path}" for path in written)
