"""The commands that look into a cache, and that write what is inside: `inspect`, `export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forebay.cli.options import add_config, command, load, on_disk, printed, remote
from forebay.config.remote import RemoteConfig
from forebay.config.tree import Config
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import find_cache, require


def add_inspect(commands: Any) -> None:
    """Adds `forebay inspect`."""
    parser = command(commands, "inspect", _inspect, "show what is inside a cache or a plan, or what a run has used")
    add_config(parser, is_needed=False)
    parser.add_argument(
        "--usage", metavar="FILE", help="a run's logs/data_usage.jsonl: used against expected, never used"
    )
    parser.add_argument(
        "--sample",
        metavar="I",
        help="one sample by its index, or its id where it is no index; of a plan: a pack by its number or a sample's "
        "id",
    )
    parser.add_argument(
        "--wav", metavar="FILE", type=on_disk, help="with --sample: write its audio, where the cache keeps it"
    )
    parser.add_argument("--png", metavar="FILE", type=on_disk, help="with --sample: draw its features, or its images")
    parser.add_argument("--export", metavar="FILE.parquet", type=on_disk, help="write the row table")
    parser.add_argument(
        "--bucket-manifests",
        metavar="DIR",
        type=on_disk,
        help="write one shuffled row table for each bucket of [plan]",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="with --bucket-manifests: of the shuffle; default: 42")
    parser.add_argument(
        "--verify", action="store_true", help="re-hash everything; exit code 1 where something is wrong"
    )
    parser.add_argument(
        "--html", metavar="FILE.html", type=on_disk, help="write a page to see and hear it: one file, at most 10 MB"
    )
    parser.add_argument("--serve", action="store_true", help="the same page over all samples, on this machine alone")
    parser.add_argument("--port", type=int, metavar="N", help="with --serve: the port; default: any free one")
    parser.add_argument(
        "--ids", metavar="IDS", help="with --html or --serve: show these samples; ids like a,b or a file, one a line"
    )
    parser.add_argument("--longest", action="store_true", help="with --html or --serve: show the longest samples")
    parser.add_argument(
        "--worst",
        action="store_true",
        help="with --html or --serve: show samples whose text does not fit, that clip, or that are padded most",
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _inspect(options: argparse.Namespace) -> int:
    from forebay.inspect import command
    from forebay.inspect.usage import run_usage
    from forebay.preprocess.speech.heard import Heard

    is_page = _is_page(options)
    if options.usage is not None:
        if options.config is not None:
            raise ConfigError(f"--usage {options.usage} is all that is looked at; leave {options.config} out")
        return run_usage(on_disk(options.usage), as_json=options.json, remote=remote(options))
    if options.config is None:
        raise ConfigError("inspect needs a cache (a folder or URL) or a config, or --usage FILE")
    place = url_or_path(options.config)
    path = Path(place)
    if not is_url(place) and not path.exists():
        raise ConfigError(f"{path}: no such cache, plan or config; name a folder, a URL or a TOML file")
    config = None if is_url(place) or path.is_dir() else load(options)
    if options.seed is not None and options.bucket_manifests is None:
        raise ConfigError("--seed goes with --bucket-manifests DIR; for training: --set loader.seed=N")
    if options.bucket_manifests is not None:
        if config is None:
            raise ConfigError(f"--bucket-manifests needs a config with a [plan] section, {place} is a folder")
        from forebay.rows.list_rows import tar_places

        seed, folder = 42 if options.seed is None else options.seed, options.bucket_manifests
        return command.show_bucket_manifests(config, folder, seed=seed, places=tar_places, as_json=options.json)
    if is_page:
        return _page(place if config is None else config, options)
    asked = {name: getattr(options, name) for name in ("sample", "wav", "png", "export", "verify", "cache_root")}
    asked["remote"] = remote(options) if config is None else config.remote
    wanted = command.InspectOptions(**asked, sounds=Heard, as_json=options.json, progress=not options.no_progress)
    return command.show(place if config is None else config, wanted)


_PAGES = ("html", "serve")
_OF_PAGES = ("port", "ids", "longest", "worst")
_CHOICES = ("ids", "longest", "worst")
_APART = ("usage", "sample", "wav", "png", "export", "bucket_manifests", "seed", "verify")
"""What a page has no place for."""


def _is_page(options: argparse.Namespace) -> bool:
    """Whether a page is asked for. Raises ConfigError for options that do not go together."""

    def given(names: tuple[str, ...]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) not in (None, False)]

    pages, own = given(_PAGES), given(_OF_PAGES)
    if not pages and own:
        raise ConfigError(f"{own[0]} goes with --html FILE or --serve; add one of them")
    if len(pages) > 1:
        raise ConfigError(
            "--html and --serve do not go together: one writes a file, one answers a browser; leave one out"
        )
    if pages and (others := given(_APART)):
        raise ConfigError(f"{pages[0]} and {others[0]} do not go together; leave one out")
    if len(chosen := given(_CHOICES)) > 1:
        raise ConfigError(f"{chosen[0]} and {chosen[1]} do not go together: each says which samples are shown")
    if options.port is not None and not options.serve:
        raise ConfigError("--port goes with --serve; --html writes a file and needs none")
    if options.port is not None and not 0 <= options.port < 65_536:
        raise ConfigError(f"--port is {options.port}, wanted 0 to 65535; 0 is any free one")
    return bool(pages)


def _page(target: str | Path | Config, options: argparse.Namespace) -> int:
    from forebay.inspect.report.command import ReportOptions, report
    from forebay.inspect.report.overview import Choice
    from forebay.preprocess.speech.heard import Heard

    wanted = ReportOptions(
        html=options.html,
        serve=options.serve,
        port=options.port or 0,
        choice=Choice(ids=options.ids, longest=options.longest, worst=options.worst),
        as_json=options.json,
        progress=not options.no_progress,
        cache_root=options.cache_root,
        sounds=Heard,
        remote=target.remote if isinstance(target, Config) else remote(options),
    )
    return report(target, wanted)


def add_export(commands: Any) -> None:
    """Adds `forebay export`."""
    parser = command(commands, "export", _export, "write the samples of a cache as files of another form; goes on")
    parser.add_argument("config", metavar="CACHE|CONFIG", help="a cache, its URL, or the TOML file that made it")
    parser.add_argument("--form", required=True, choices=("parquet", "webdataset", "zarr"), help="of the files")
    parser.add_argument("--out", metavar="DIR", type=on_disk, required=True, help="an empty or new folder")
    parser.add_argument("--shard-size-mb", type=int, metavar="N", help="about how large a file becomes; default: 1000")
    parser.add_argument("--ids", metavar="FILE", type=on_disk, help="only the samples with these ids, one a line")
    parser.add_argument("--max-samples", type=int, metavar="N", dest="limit", help="only the first N of them")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="as if it stood in the config"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _export(options: argparse.Namespace) -> int:
    from forebay.export.command import ExportOptions, export
    from forebay.store.cache import open_cache
    from forebay.store.last_use import note

    place, settings = _cache_of(options)
    wanted = ExportOptions(
        form=options.form,
        out=options.out,
        shard_size_mb=options.shard_size_mb,
        ids=options.ids,
        max_samples=options.limit,
        progress=not options.no_progress,
    )
    cache = open_cache(place, remote=settings)
    note(cache.folder)
    if options.form == "zarr":
        from forebay.export.zarr import export_zarr

        return printed(options, export_zarr(cache, wanted))
    return printed(options, export(cache, wanted))


def _cache_of(options: argparse.Namespace) -> tuple[str, RemoteConfig]:
    """Returns the cache that the options name, or that of the config, and how its store is asked."""
    place = url_or_path(options.config)
    if is_url(place) or Path(place).is_dir():
        return place, remote(options)
    if not Path(place).exists():
        raise ConfigError(f"{place}: no such cache or config; name a folder, a URL or a TOML file")
    config = load(options)
    return require(config, find_cache(config, recipe_of(config))).place, config.remote
