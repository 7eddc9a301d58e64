"""The commands `forebay cache ACTION`: caches to a store and back, shards to this node, caches made of caches.

The command `forebay fetch`: an evaluation set, or any prefix of a store, as files of a folder of this machine.
Models of the Hub come to the cache of its client.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from forebay.cli.options import (
    DONE,
    FAILED,
    CacheCommand,
    Command,
    ConfigCommand,
    argument,
    command,
    load_config,
    option,
)
from forebay.config.load import read_remote
from forebay.config.pretrained_folder import split_id
from forebay.config.remote import RemoteConfig, is_url, parse_url, url_or_path
from forebay.errors import ConfigError

_CACHE = "the folder of a cache, or the TOML file that made it"
_PLACE = "of the cache; with a slash at its end, of a folder of caches"
_OUT = "a folder, or a name without a slash: a folder beside the (first) cache, or in --cache-root"


@command("cache push")
class PushCommand(CacheCommand):
    """Make a URL of a store a sealed cache of this machine; goes on."""

    config: str = argument("CACHE|CONFIG", _CACHE)
    url: str | None = argument("URL", f"{_PLACE}; default: a run.cache_root that is a URL", nargs="?")
    form: Literal["tdz", "zarr"] = option(
        "tdz: the cache as it is, to train from. zarr: compressed, for other readers and to keep; a pull makes "
        "the cache of it again, and URL may be a folder; default: tdz",
        default="tdz",
    )
    level: int | None = option("of zstd in the form zarr, 1 to 22; default: 3", "N")
    verify: bool = option("read everything back, and send what is damaged again")
    set: list[str] = option("how the store is asked", "remote.FIELD=VALUE")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.store.remote.carry.transfer import place_below

        source = url_or_path(self.config)
        if is_url(source):
            raise ConfigError(f"{source} lies in a store; a push takes a folder of this machine, and a pull makes one")
        if Path(source).is_dir():
            folder, settings, default, named = Path(source), read_remote(self.set), None, self.config
        else:
            if not Path(source).exists():
                raise ConfigError(f"{source}: no such cache or config; see what there is: forebay cache ls")
            config = self.load(self.config, overrides=self.set)
            sealed = self.sealed(config)
            if sealed.url is not None:
                raise ConfigError(
                    f"{source}: its cache lies in a store already: {sealed.url}; to have it here: cache pull"
                )
            folder, settings, default, named = sealed.folder, config.remote, config.remote_root, config.named
        if (place := self.url or (default and f"{default}/")) is None:
            raise ConfigError(f"where to? For example: forebay cache push {named} s3://bucket/caches/")
        return self._send(folder, place_below(place, folder.name), settings)

    def _send(self, folder: Path, place: str, settings: RemoteConfig) -> int:
        how: dict[str, Any] = {"verify": self.verify, "progress": self.progress}
        if self.form == "zarr":
            from forebay.store.cold.push import LEVEL, push_zarr

            level = LEVEL if self.level is None else self.level
            return self.printed(push_zarr(folder, url_or_path(place), settings, level=level, **how))
        if self.level is not None:
            raise ConfigError(
                "--level is of the form zarr, and a cache in its own form is not compressed; add --form zarr"
            )
        from forebay.store.remote.carry.transfer import push

        return self.printed(push(folder, parse_url(place), settings, **how))


@command("cache pull")
class PullCommand(CacheCommand):
    """Make a folder the sealed cache of a URL; goes on."""

    url: str = argument("URL", "of the cache, or of its zarr form, which may lie in a folder too")
    folder: str | None = argument("DIR", f"{_PLACE}; or give --cache-root", nargs="?")
    set: list[str] = option("how the store is asked", "remote.FIELD=VALUE")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.store.cold.pull import pull_any
        from forebay.store.remote.carry.transfer import place_below

        if (self.folder is None) == (self.cache_root is None):
            raise ConfigError(f"where to? forebay cache pull {self.url} DIR, or --cache-root DIR; one of the two")
        source = url_or_path(self.url)
        place = self.folder or f"{self.cache_root}/"
        folder = url_or_path(place_below(place, parse_url(source).name if is_url(source) else Path(source).name))
        if is_url(folder):
            raise ConfigError(f"{folder} is a URL; a pull makes a folder of this machine")
        return self.printed(pull_any(source, Path(folder), read_remote(self.set), progress=self.progress))


@command("cache warm")
class WarmCommand(ConfigCommand):
    """Download what the next micro-batches of this node need, soonest first."""

    steps: int | None = option("what the next N micro-batches of each rank need", "N", apart="required")
    all: bool = option("everything, as far as remote.cache_size_gb allows", apart="required")
    resume: bool = option("from where the last checkpoint stands")
    epoch: int = option("from this epoch on; default: 0", "E", default=0)
    position: int = option("from this micro-batch of all ranks on; default: 0", "P", default=0)
    dp_ranks: str | None = option("ranks of this node, of W; default: torchrun's, else 0/1", "A-B/W")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.train.warm import WarmOptions, ranks_of_node, warm

        found = ranks_of_node(self.dp_ranks)
        if found is None:  # another process of this node does it
            return DONE
        ranks, world = found
        wanted = self.into(WarmOptions, ranks=ranks, world=world)
        return self.printed(warm(self.loaded(), wanted))


@command("cache merge")
class MergeCommand(CacheCommand):
    """Make several caches of one recipe one cache; shards are linked."""

    caches: list[str] = argument("CACHE|CONFIG", _CACHE, nargs="+")
    out: str = option(_OUT, "NAME|DIR", required=True)
    no_progress: bool = option("no bars")
    on_duplicate: Literal["refuse", "keep-first"] = option(
        "what becomes of a sample whose id an earlier cache has; default: refuse", default="refuse"
    )

    def run(self) -> int:
        from forebay.preprocess.merge import merge

        places = [_sealed_place(self, text) for text in self.caches]
        how = {name: getattr(self, name) for name in ("on_duplicate", "cache_root", "progress")}
        return self.printed(merge(places, self.out, **how))


@command("cache subset")
class SubsetCommand(CacheCommand):
    """Make some samples of a cache a cache of its own; shards are linked."""

    cache: str = argument("CACHE|CONFIG", _CACHE)
    ids: Path | None = option("a file with the id of a sample a line", "FILE", apart="required")
    where: str | None = option(
        "a condition over the columns of the row table: language == 'hi' and ...", "EXPR", apart="required"
    )
    out: str = option(_OUT, "NAME|DIR", required=True)
    no_progress: bool = option("no bars")
    missing: Literal["refuse", "ok"] = option(
        "with --ids: what becomes of ids that the cache does not have; default: refuse", default="refuse"
    )

    def run(self) -> int:
        from forebay.preprocess.merge import subset

        how = {name: getattr(self, name) for name in ("where", "ids", "missing", "cache_root", "progress")}
        return self.printed(subset(_sealed_place(self, self.cache), self.out, **how))


def _sealed_place(asked: CacheCommand, text: str) -> str:
    """Returns the folder or URL of a cache that was named, or of the cache of a config that was."""
    if is_url(url_or_path(text)) or not Path(text).is_file():
        return text
    return asked.sealed(asked.load(text)).place


@command("fetch")
class FetchCommand(Command):
    """Bring an evaluation set, any prefix of a store, or models of the Hub; checked, and goes on."""

    url: str = argument(
        "URL|MODEL|CONFIG",
        "a folder of a store, an object, or a manifest (.json); owner/name@COMMIT of the Hub, into the cache of its "
        "client; a config, for all models of the Hub that it names",
    )
    output: Path | None = option("the folder of a URL; made if missing", "DIR")
    prefix: str = option("only what begins with P below the URL: hi_", "P", default="")
    overwrite: bool = option("replace files that have other bytes")
    max_size_gb: float = option("refuse more; default: 100", "N", default=100.0)
    max_files: int = option("refuse more; default: 100000", "N", default=100_000)
    ignore_etags: bool = option("an etag of S3 is no MD5 here: KMS, SSE-C")
    dry_run: bool = option("say what would be downloaded, and download nothing")
    set: list[str] = option("how the store is asked", "remote.FIELD=VALUE")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.store.remote.carry.fetch import fetch
        from forebay.store.remote.carry.fetch_list import FetchOptions
        from forebay.tar.index import check_members

        for name, most in (("max-size-gb", self.max_size_gb), ("max-files", self.max_files)):
            if not most > 0:
                raise ConfigError(f"--{name} is {most}, wanted more than 0")
        if not is_url(url_or_path(self.url)):
            return self._fetch_models()
        if self.output is None:
            raise ConfigError("--output: missing; it names the folder that the files of a URL come to")
        asked = self.into(FetchOptions, max_bytes=int(self.max_size_gb * 1_000_000_000), etags=not self.ignore_etags)
        report = fetch(parse_url(self.url), self.output, read_remote(self.set), asked, examine=check_members)
        self.printed(report)
        return FAILED if report.refused else DONE

    def _fetch_models(self) -> int:
        from forebay.preprocess.fetch_models import FetchModelsReport, commit_of, fetch_model, fetch_models

        given = self.given("output", "overwrite", "ignore_etags", "dry_run") + ["--prefix"] * bool(self.prefix)
        if given:
            raise ConfigError(f"{given[0]} is of a URL: models of the Hub come to the cache of its client")
        found = None if Path(self.url).is_file() else split_id(self.url)
        if found is None:
            return self.printed(fetch_models(load_config(self.url, overrides=self.set)))
        name, revision = found
        model = commit_of(name, revision)
        if model.commit != revision:
            raise ConfigError(f"{self.url} is no commit, and can move; today it is the one to write: {model}")
        return self.printed(FetchModelsReport(models=(fetch_model(model, with_weights=True),)))
