"""The commands from raw data to a cache: `preprocess`, `evalset`, `key`, `index`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from forebay.cli.options import DONE, FAILED, add_config, command, load, on_disk, printed
from forebay.config.remote import RemoteConfig
from forebay.config.tree import stand_in
from forebay.errors import ConfigError
from forebay.visible import json_text


def add_preprocess(commands: Any) -> None:
    """Adds `forebay preprocess`."""
    parser = command(
        commands, "preprocess", _preprocess, "make the cache of a config; resumes; does nothing when it is sealed"
    )
    add_config(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: the cores")
    parser.add_argument("--rebuild", action="store_true", help="make every shard again and swap the cache")
    parser.add_argument(
        "--verify", action="store_true", help="re-hash a sealed cache first and mend its damaged shards"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and how large it will be")
    parser.add_argument(
        "--shards", metavar="I::N", type=_part, help="only every N-th shard from the I-th on (job arrays)"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="list and hash the raw data once, for parts that start together"
    )
    parser.add_argument("--seal", action="store_true", help="seal what all parts have made, and make nothing")
    parser.add_argument("--key", metavar="KEY", help="first digits of the key that the build must have, else stop")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("::")
    if not (first.isdigit() and step.isdigit() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I::N with I below N, for example 3::64")
    return int(first), int(step)


def _preprocess(options: argparse.Namespace) -> int:
    from forebay.preprocess.pipeline import build, prepare
    from forebay.preprocess.report import Options

    if options.seal and options.shards is not None:
        raise ConfigError("--seal is of all parts, and --shards of one: give one of them")
    config = load(options)
    asked = {name: getattr(options, name) for name in ("rebuild", "verify", "dry_run", "key")}
    wanted = Options(**asked, part=options.shards, seal_only=options.seal, progress=not options.no_progress)
    return printed(options, prepare(config, wanted) if options.prepare else build(config, wanted))


def add_evalset(commands: Any) -> None:
    """Adds `forebay evalset`."""
    summary = "draw an evaluation set for each language of a config's raw data; goes on"
    parser = command(commands, "evalset", _evalset, summary)
    add_config(parser)
    parser.add_argument("--out", metavar="DIR", type=on_disk, required=True, help="an empty or new folder")
    parser.add_argument(
        "--per-language", type=int, default=500, metavar="N", help="samples of a language; default: 500"
    )
    parser.add_argument("--seed", type=int, default=17, metavar="N", help="of the draw; default: 17")
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: the cores")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _evalset(options: argparse.Namespace) -> int:
    from forebay.preprocess.evalset.make import EvalsetOptions, make_evalset

    asked = {name: getattr(options, name) for name in ("out", "per_language", "seed")}
    wanted = EvalsetOptions(**asked, progress=not options.no_progress)
    return printed(options, make_evalset(load(options), wanted))


def add_key(commands: Any) -> None:
    """Adds `forebay key`."""
    parser = command(commands, "key", _key, "print the key of a config and whether its cache is there")
    add_config(parser)
    parser.add_argument("--explain", action="store_true", help="name the fields in which the nearest cache differs")
    parser.add_argument("--no-hash", action="store_true", help="do not read raw data; the key may stay unknown")


def _key(options: argparse.Namespace) -> int:
    from forebay.preprocess.listing import explain, explain_lines

    document = explain(load(options), may_hash=not options.no_hash)
    lines = explain_lines(document, with_nearest=options.explain)
    print(json_text(document) if options.json else "\n".join(lines))
    return DONE


def add_index(commands: Any) -> None:
    """Adds `forebay index`."""
    parser = command(commands, "index", _index, "index every tar of the given manifests")
    parser.add_argument(
        "manifests", nargs="+", metavar="MANIFEST", help="parquet or TSV manifest, tar, or folder of tars"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: the cores")
    parser.add_argument("--export-json", action="store_true", help="also write <tar>.index.json for other tools")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _index(options: argparse.Namespace) -> int:
    from forebay.preprocess.index import index_manifests

    report = index_manifests(
        options.manifests,
        cache_root=stand_in(options.cache_root or "caches", RemoteConfig()),
        num_workers=options.workers or os.cpu_count() or 1,
        export_json=options.export_json,
        progress=not options.no_progress,
    )
    printed(options, report)
    if not options.json:
        for _, reason in report.failed:
            print(f"  {reason}", file=sys.stderr)
    return FAILED if report.failed else DONE
