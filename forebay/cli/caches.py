"""The commands `forebay cache ACTION`: caches to a store and back, shards to this node, caches made of caches.

The command `forebay fetch`: an evaluation set, or any prefix of a store, as files of a folder of this machine.
Models of the Hub come to the cache of its client.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forebay.cli.housekeeping import add_housekeeping
from forebay.cli.options import DONE, FAILED, add_config, command, load, on_disk, printed
from forebay.config.hub import split_id
from forebay.config.load import read_remote
from forebay.config.remote import RemoteConfig
from forebay.config.url import is_url, parse_url, url_or_path
from forebay.errors import ConfigError
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.lookup import find_cache, require


def add_cache(commands: Any) -> None:
    """Adds `forebay cache push|pull|warm|merge|subset|ls|du|rm|prune|diff|verify`."""
    summary = "list, compare, verify and remove caches; bring them to a store and back; make caches of caches"
    actions = commands.add_parser("cache", help=summary, description=summary)
    actions = actions.add_subparsers(required=True, metavar="ACTION")
    _add_push(actions)
    _add_pull(actions)
    _add_warm(actions)
    _add_merge(actions)
    _add_subset(actions)
    add_housekeeping(actions)


def _add_push(actions: Any) -> None:
    parser = command(actions, "push", _push, "make a URL of a store a sealed cache of this machine; goes on")
    parser.add_argument("config", metavar="CACHE|CONFIG", help="the folder of a cache, or the TOML file that made it")
    place = "of the cache; with a slash at its end, of a folder of caches"
    parser.add_argument("url", metavar="URL", nargs="?", help=f"{place}; default: a run.cache_root that is a URL")
    parser.add_argument(
        "--form",
        choices=("tdz", "zarr"),
        default="tdz",
        help="tdz: the cache as it is, to train from. zarr: compressed, for other readers and to keep; a pull makes "
        "the cache of it again, and URL may be a folder; default: tdz",
    )
    parser.add_argument("--level", type=int, metavar="N", help="of zstd in the form zarr, 1 to 22; default: 3")
    parser.add_argument("--verify", action="store_true", help="read everything back, and send what is damaged again")
    _add_transfer(parser)


def _add_pull(actions: Any) -> None:
    parser = command(actions, "pull", _pull, "make a folder the sealed cache of a URL; goes on")
    parser.add_argument("url", metavar="URL", help="of the cache, or of its zarr form, which may lie in a folder too")
    place = "of the cache; with a slash at its end, of a folder of caches"
    parser.add_argument("folder", metavar="DIR", nargs="?", help=f"{place}; or give --cache-root")
    _add_transfer(parser)


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="remote.FIELD=VALUE", help="how the store is asked"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _push(options: argparse.Namespace) -> int:
    from forebay.store.remote.carry.transfer import place_below

    source = url_or_path(options.config)
    if is_url(source):
        raise ConfigError(f"{source} lies in a store; a push takes a folder of this machine, and a pull makes one")
    if Path(source).is_dir():
        folder, settings, default = Path(source), read_remote(options.set), None
    else:
        if not Path(source).exists():
            raise ConfigError(f"{source}: no such cache or config; see what there is: forebay cache ls")
        config = load(options)
        sealed = require(config, find_cache(config, recipe_of(config)))
        if sealed.url is not None:
            raise ConfigError(f"{source}: its cache lies in a store already: {sealed.url}; to have it here: cache pull")
        folder, settings, default = sealed.folder, config.remote, config.remote_root
    if (place := options.url or (default and f"{default}/")) is None:
        raise ConfigError(f"where to? For example: forebay cache push {options.config} s3://bucket/caches/")
    return _send(folder, place_below(place, folder.name), settings, options)


def _send(folder: Path, place: str, settings: RemoteConfig, options: argparse.Namespace) -> int:
    how = {"verify": options.verify, "progress": not options.no_progress}
    if options.form == "zarr":
        from forebay.store.cold.push import LEVEL, push_zarr

        level = LEVEL if options.level is None else options.level
        return printed(options, push_zarr(folder, url_or_path(place), settings, level=level, **how))
    if options.level is not None:
        raise ConfigError("--level is of the form zarr, and a cache in its own form is not compressed; add --form zarr")
    from forebay.store.remote.carry.transfer import push

    return printed(options, push(folder, parse_url(place), settings, **how))


def _pull(options: argparse.Namespace) -> int:
    from forebay.store.cold.pull import pull_any
    from forebay.store.remote.carry.transfer import place_below

    if (options.folder is None) == (options.cache_root is None):
        raise ConfigError(f"where to? forebay cache pull {options.url} DIR, or --cache-root DIR; one of the two")
    source = url_or_path(options.url)
    place = f"{options.cache_root}/" if options.folder is None else options.folder
    folder = url_or_path(place_below(place, parse_url(source).name if is_url(source) else Path(source).name))
    if is_url(folder):
        raise ConfigError(f"{folder} is a URL; a pull makes a folder of this machine")
    return printed(options, pull_any(source, Path(folder), read_remote(options.set), progress=not options.no_progress))


def _add_warm(actions: Any) -> None:
    parser = command(actions, "warm", _warm, "download what the next micro-batches of this node need, soonest first")
    add_config(parser)
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--steps", type=int, metavar="N", help="what the next N micro-batches of each rank need")
    amount.add_argument("--all", action="store_true", help="everything, as far as remote.cache_size_gb allows")
    parser.add_argument("--resume", action="store_true", help="from where the last checkpoint stands")
    parser.add_argument("--epoch", type=int, default=0, metavar="E", help="from this epoch on; default: 0")
    parser.add_argument(
        "--position", type=int, default=0, metavar="P", help="from this micro-batch of all ranks on; default: 0"
    )
    parser.add_argument("--dp-ranks", metavar="A-B/W", help="ranks of this node, of W; default: torchrun's, else 0/1")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _warm(options: argparse.Namespace) -> int:
    from forebay.train.warm import WarmOptions, ranks_of_node, warm

    found = ranks_of_node(options.dp_ranks)
    if found is None:  # another process of this node does it
        return DONE
    ranks, world = found
    asked = {name: getattr(options, name) for name in ("steps", "resume", "epoch", "position")}
    wanted = WarmOptions(**asked, ranks=ranks, world=world, progress=not options.no_progress)
    return printed(options, warm(load(options), wanted))


def _add_merge(actions: Any) -> None:
    parser = command(actions, "merge", _merge, "make several caches of one recipe one cache; shards are linked")
    parser.add_argument("caches", metavar="CACHE|CONFIG", nargs="+", help=_CACHE)
    _add_out(parser)
    parser.add_argument(
        "--on-duplicate",
        choices=("refuse", "keep-first"),
        default="refuse",
        help="what becomes of a sample whose id an earlier cache has; default: refuse",
    )


def _add_subset(actions: Any) -> None:
    parser = command(actions, "subset", _subset, "make some samples of a cache a cache of its own; shards are linked")
    parser.add_argument("cache", metavar="CACHE|CONFIG", help=_CACHE)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--ids", metavar="FILE", type=on_disk, help="a file with the id of a sample a line")
    chosen.add_argument(
        "--where", metavar="EXPR", help="a condition over the columns of the row table: language == 'hi' and ..."
    )
    _add_out(parser)
    parser.add_argument(
        "--missing",
        choices=("refuse", "ok"),
        default="refuse",
        help="with --ids: what becomes of ids that the cache does not have; default: refuse",
    )


_CACHE = "the folder of a cache, or the TOML file that made it"


def _add_out(parser: argparse.ArgumentParser) -> None:
    place = "a folder, or a name without a slash: a folder beside the (first) cache, or in --cache-root"
    parser.add_argument("--out", metavar="NAME|DIR", required=True, help=place)
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _merge(options: argparse.Namespace) -> int:
    from forebay.preprocess.many.merge import merge

    places = [_sealed_place(options, text) for text in options.caches]
    asked = {name: getattr(options, name) for name in ("on_duplicate", "cache_root")}
    return printed(options, merge(places, options.out, **asked, progress=not options.no_progress))


def _subset(options: argparse.Namespace) -> int:
    from forebay.preprocess.many.merge import subset

    asked = {name: getattr(options, name) for name in ("where", "ids", "missing", "cache_root")}
    place = _sealed_place(options, options.cache)
    return printed(options, subset(place, options.out, **asked, progress=not options.no_progress))


def _sealed_place(options: argparse.Namespace, text: str) -> str:
    """Returns the folder or URL of a cache that was named, or of the cache of a config that was."""
    if is_url(url_or_path(text)) or not Path(text).is_file():
        return text
    config = load(argparse.Namespace(config=text, cache_root=options.cache_root))
    return require(config, find_cache(config, recipe_of(config))).place


_GB = 1_000_000_000


def add_fetch(commands: Any) -> None:
    """Adds `forebay fetch URL --output DIR`, and `forebay fetch MODEL|CONFIG`."""
    summary = "bring an evaluation set, any prefix of a store, or models of the Hub; checked, and goes on"
    parser = command(commands, "fetch", _fetch, summary, has_caches=False)
    parser.add_argument(
        "url",
        metavar="URL|MODEL|CONFIG",
        help="a folder of a store, an object, or a manifest (.json); owner/name@COMMIT of the Hub, into the cache of "
        "its client; a config, for all models of the Hub that it names",
    )
    parser.add_argument("--output", metavar="DIR", type=on_disk, help="the folder of a URL; made if missing")
    parser.add_argument("--prefix", metavar="P", default="", help="only what begins with P below the URL: hi_")
    parser.add_argument("--overwrite", action="store_true", help="replace files that have other bytes")
    parser.add_argument("--max-size-gb", type=float, default=100.0, metavar="N", help="refuse more; default: 100")
    parser.add_argument("--max-files", type=int, default=100_000, metavar="N", help="refuse more; default: 100000")
    parser.add_argument("--ignore-etags", action="store_true", help="an etag of S3 is no MD5 here: KMS, SSE-C")
    parser.add_argument("--dry-run", action="store_true", help="say what would be downloaded, and download nothing")
    parser.add_argument(
        "--set", action="append", default=[], metavar="remote.FIELD=VALUE", help="how the store is asked"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _fetch(options: argparse.Namespace) -> int:
    from forebay.store.remote.carry.fetch import fetch
    from forebay.store.remote.carry.fetch_list import FetchOptions
    from forebay.tar.index import check_members

    for name in ("max_size_gb", "max_files"):
        if not getattr(options, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(options, name)}, wanted more than 0")
    if not is_url(url_or_path(options.url)):
        return _fetch_models(options)
    if options.output is None:
        raise ConfigError("--output: missing; it names the folder that the files of a URL come to")
    asked = FetchOptions(
        prefix=options.prefix,
        max_bytes=int(options.max_size_gb * _GB),
        max_files=options.max_files,
        overwrite=options.overwrite,
        etags=not options.ignore_etags,
        dry_run=options.dry_run,
        progress=not options.no_progress,
    )
    settings = read_remote(options.set)
    report = fetch(parse_url(options.url), options.output, settings, asked, examine=check_members)
    printed(options, report)
    return FAILED if report.refused else DONE


def _fetch_models(options: argparse.Namespace) -> int:
    from forebay.preprocess.fetch_models import FetchModelsReport, commit_of, fetch_model, fetch_models

    if options.output is not None or options.prefix:
        raise ConfigError("--output and --prefix are of a URL: models of the Hub come to the cache of its client")
    found = None if Path(options.url).is_file() else split_id(options.url)
    if found is None:
        return printed(options, fetch_models(load_config(options.url, overrides=options.set)))
    name, revision = found
    model = commit_of(name, revision)
    if model.commit != revision:
        raise ConfigError(f"{options.url} is no commit, and can move; today it is the one to write: {model}")
    return printed(options, FetchModelsReport(models=(fetch_model(model, with_weights=True),)))
