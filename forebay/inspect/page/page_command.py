"""`forebay inspect --html` and `--serve`: which cache is meant, what does not go together, and the page of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from forebay.config.remote import RemoteConfig, is_url, url_or_path
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.inspect.command import plan_roots
from forebay.inspect.page.overview import CardChoice, Overview, overview_of
from forebay.inspect.page.serve import Server
from forebay.inspect.page.write_pages import write_report
from forebay.inspect.sample import Sounds
from forebay.plan.disk import is_plan
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.lookup import find_cache, require
from forebay.store.metadata import foreign_values
from forebay.store.output import check_output
from forebay.terminal import during, print_json, print_lines
from forebay.visible import human_bytes


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The options. html: the file to write; serve: a page on localhost instead, on `port` (0: any free one).

    choice: which samples are shown first. cache_root: another place to look for plans, a folder or URL. sounds: where
    a config's recordings come from that the cache does not keep. remote: how the stores of URLs are asked.
    """

    html: Path | None = None
    serve: bool = False
    port: int = 0
    choice: CardChoice = field(default_factory=CardChoice)
    as_json: bool = False
    progress: bool = False
    cache_root: str | None = None
    sounds: Sounds | None = None
    remote: RemoteConfig = field(default_factory=RemoteConfig)


def report(target: str | Path | Config, options: ReportOptions) -> int:
    """Writes or serves the page of a cache; returns the exit code.

    target: the folder, the URL of a cache, or a config, whose cache is taken, whose plan stands first and whose
    tokenizer makes tokens readable.
    Raises ConfigError for what does not go together, CacheNotFoundError where the config has no cache, another
    CacheError where the cache cannot be read.
    """
    config = target if isinstance(target, Config) else None
    place = require(config, find_cache(config, recipe_of(config))).place if config else str(url_or_path(str(target)))
    if not is_url(place) and is_plan(Path(place)):
        raise ConfigError(f"--{'serve' if options.serve else 'html'}: {place} is a plan; name its cache, or a config")
    cache = open_cache(place, remote=options.remote if config is None else config.remote)
    if options.html is not None:
        check_output(options.html, "--html", folder=cache.folder, config=config)
    named = options.cache_root if config is None else config.run.cache_root
    roots = plan_roots(place, named or None, options.remote if config is None else config.remote)
    with foreign_values(cache.folder):
        with during("the columns of the cache", is_shown=options.progress):
            overview = overview_of(cache, config, choice=options.choice, roots=roots, sounds=options.sounds)
        if options.html is not None:
            return _written(overview, options.html, options)
        return _served(overview, port=options.port, as_json=options.as_json)


def _written(overview: Overview, path: Path, options: ReportOptions) -> int:
    size_bytes = write_report(overview, path, progress=options.progress)
    if options.as_json:
        print_json({"written": [str(path)], "size_bytes": size_bytes, "samples": [c.index for c in overview.chosen]})
    else:
        print_lines([f"wrote {path} ({human_bytes(size_bytes)}, {len(overview.chosen)} samples on it)"])
    return 0


def _served(overview: Overview, *, port: int, as_json: bool) -> int:
    """Answers until it is interrupted, which is how it ends well."""
    with Server(overview, port=port) as server:
        if as_json:
            print_json({"url": server.url, "samples": len(overview.columns)})
        else:
            print_lines([f"{server.url} (on this machine alone; Ctrl-C ends it)"])
        sys.stdout.flush()
        try:
            server.serve_forever(poll_interval=0.25)
        except KeyboardInterrupt:
            print_lines([] if as_json else ["stopped"])
    return 0
