"""The commands that look into a cache, and that write what is inside: `inspect`, `export`.

The command that looks for what is wrong with data: `lint`.

The command that shows what becomes of texts: `text`.

The command `forebay explain`: what an error code, or the reason for which a sample was left out, means.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from forebay.cli.options import DONE, FAILED, add_config, command, load, on_disk, printed, remote
from forebay.config.remote import RemoteConfig
from forebay.config.tree import Config
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import find_cache, require
from forebay.visible import json_text


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
        "--bucket-manifests", metavar="DIR", type=on_disk, help="write one shuffled row table for each bucket of [plan]"
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
    from forebay.inspect.usage_report import run_usage
    from forebay.preprocess.decode import Heard

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
    from forebay.inspect.page.overview import CardChoice
    from forebay.inspect.page.page_command import ReportOptions, report
    from forebay.preprocess.decode import Heard

    wanted = ReportOptions(
        html=options.html,
        serve=options.serve,
        port=options.port or 0,
        choice=CardChoice(ids=options.ids, longest=options.longest, worst=options.worst),
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
    from forebay.inspect.export import ExportOptions, export
    from forebay.store.cache import open_cache
    from forebay.store.memo import note

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
        from forebay.inspect.export import export_zarr

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


def add_lint(commands: Any) -> None:
    """Adds `forebay lint`."""
    parser = command(
        commands, "lint", _lint, "look for faults in raw data or a cache: silence, clipping, duplicates, leaks, texts"
    )
    parser.add_argument("config", metavar="CONFIG|CACHE", nargs="*", help="TOML files, caches or their URLs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="as if it stood in the config"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="only the first N samples of each")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="CONFIG|CACHE",
        help="sets whose samples must not be among these; those of [[train.eval]] always",
    )
    parser.add_argument("--raw", action="store_true", help="read the raw data, also where a cache keeps the recordings")
    parser.add_argument("--drop-ids", metavar="FILE", type=on_disk, help="write the ids for [filter] drop_ids")
    parser.add_argument(
        "--severity",
        choices=("error", "warning", "info"),
        default="error",
        help="of --drop-ids and --strict: this and worse; default: error",
    )
    parser.add_argument("--strict", action="store_true", help="end with 1 where something of --severity was found")
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave a check out")
    parser.add_argument("--limit", action="append", default=[], metavar="NAME=VALUE", help="change a limit")
    parser.add_argument("--explain-checks", action="store_true", help="print the checks and their limits, and end")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="findings of a check in the lines; default: 3")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: the cores")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _lint(options: argparse.Namespace) -> int:
    from forebay.inspect.checks.limits import Limits, check_lines

    limits = Limits().changed(options.limit)
    if options.explain_checks:
        print("\n".join(check_lines(limits)))
        return DONE
    from forebay.inspect.checks.lint import LintOptions, lint

    if not options.config:
        raise ConfigError("lint needs a config or a cache (a folder or URL), or --explain-checks")
    for name in ("max_samples", "workers"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: wanted 1 or more")
    wanted = LintOptions(
        limits=limits,
        severity=options.severity,
        drop_ids=options.drop_ids,
        skip=options.skip,
        is_raw=options.raw,
        workers=options.workers,
        most=options.max_samples,
        shown=max(0, options.show),
        progress=not options.no_progress,
    )
    targets = [_target(text, options, max_samples=options.max_samples) for text in options.config]
    against = [_target(text, options, max_samples=None) for text in options.against]
    report = lint(targets, against, wanted)
    printed(options, report)
    return FAILED if options.strict and report.at_least(options.severity) else DONE


def _target(text: str, options: argparse.Namespace, *, max_samples: int | None) -> Any:
    from forebay.inspect.checks.lint import Target

    place = url_or_path(text)
    if is_url(place) or Path(place).is_dir():
        return Target(place=place, remote=remote(options))
    if not Path(place).exists():
        raise ConfigError(f"{place}: no such cache or config; name a folder, a URL or a TOML file")
    # What --set says is of the linted sets: another set has settings of its own.
    named = {"config": text, "max_samples": max_samples}
    return Target(config=load(argparse.Namespace(**{**vars(options), **named})))


def add_text(commands: Any) -> None:
    """Adds `forebay text`."""
    parser = command(
        commands, "text", _text, "show what becomes of texts: every step, tokens; without a text, a report over all"
    )
    add_config(parser)
    parser.add_argument(
        "--sample", metavar="I", help="a sample by its row of the listing, or its id where it is no row"
    )
    parser.add_argument("--text", metavar="TEXT", help="a text that is given here")
    parser.add_argument("--language", metavar="CODE", help="with --text: its language, as a manifest has it")
    parser.add_argument("--diff", action="store_true", help="with --sample or --text: mark what each step changes")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _text(options: argparse.Namespace) -> int:
    from forebay.inspect.text_command import print_view, report_texts, view_sample, view_text

    _check(options)
    config, progress = load(options), not options.no_progress
    if options.text is not None:
        view = view_text(config, options.text, language=options.language or "", is_diff=options.diff)
    elif options.sample is not None:
        view = view_sample(config, options.sample, is_diff=options.diff, progress=progress)
    else:
        return printed(options, report_texts(config, progress=progress))
    if options.json:
        print(json_text(view.to_json()))
    else:
        print_view(view)
    return DONE if view.look.failure is None else FAILED


def _check(options: argparse.Namespace) -> None:
    if options.text is not None and options.sample is not None:
        raise ConfigError(f"--text and --sample {options.sample} are two texts; name one")
    if options.language is not None and options.text is None:
        raise ConfigError(f"--language {options.language} is of --text; a sample's language stands in its manifest")
    if options.diff and options.text is None and options.sample is None:
        raise ConfigError("--diff shows one text; name it with --sample or --text")


def add_explain(commands: Any) -> None:
    """Adds `forebay explain [TOPIC]`."""
    summary = "say what an error code (FB101) or a reason (corrupt_audio) means, and what to do"
    parser = command(commands, "explain", _explain, summary, has_caches=False)
    parser.add_argument(
        "topic",
        metavar="CODE",
        nargs="*",
        help="a code, a reason, the class of an error, or words to look for; left out: the list of all codes",
    )


def _explain(options: argparse.Namespace) -> int:
    from forebay.explain import explained

    return printed(options, explained(" ".join(options.topic)))
