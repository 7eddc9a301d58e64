"""The commands from raw data to a cache: `preprocess`, `evalset`, `key`, `index`.

The command that writes a symbol table for a tokenizer: `symbols`.
"""

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

RUNNERS = ("local", "ray", "slurm")


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
    parser.add_argument(
        "--runner",
        choices=RUNNERS,
        default="local",
        help="who makes the shards: this machine, a Ray cluster, or jobs of Slurm",
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="of the Ray cluster; default: RAY_ADDRESS, else the one of this machine"
    )
    parser.add_argument(
        "--stage", metavar="URL", help="folder of the root's bucket for finished shards, where nodes share no disk"
    )
    parser.add_argument("--key", metavar="KEY", help="first digits of the key that the build must have, else stop")
    parser.add_argument("--no-progress", action="store_true", help="no bars")
    slurm = parser.add_argument_group("with --runner slurm (docs/cluster.md)")
    slurm.add_argument(
        "--array", type=_array, metavar="N[%M]", help="parts of the array, at most M at once; --prepare checks it too"
    )
    how = slurm.add_mutually_exclusive_group()
    how.add_argument("--submit", action="store_true", help="call sbatch; what is finished is not made again")
    how.add_argument("--print", action="store_true", help="print the jobs as a script that submits them (the default)")
    slurm.add_argument("--logs", metavar="DIR", help="where log files go; default: CACHE_ROOT/.building/logs")


def _array(text: str) -> tuple[int, int | None]:
    number, sign, limit = text.partition("%")
    if not (number.isdigit() and int(number) > 0 and (limit.isdigit() and int(limit) > 0 if sign else True)):
        raise argparse.ArgumentTypeError(f"{text!r} is not N or N%M, for example 64 or 64%16")
    return int(number), int(limit) if sign else None


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("::")
    if not (first.isdigit() and step.isdigit() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I::N with I below N, for example 3::64")
    return int(first), int(step)


def _preprocess(options: argparse.Namespace) -> int:
    if options.runner == "slurm":
        return _slurm(options)
    from forebay.preprocess.build_report import Options
    from forebay.preprocess.pipeline import build, prepare

    for name in ("submit", "print", "logs"):
        if getattr(options, name):
            raise ConfigError(f"--{name} is for jobs of Slurm: add --runner slurm")
    if options.array is not None and not options.prepare:
        raise ConfigError("--array is for jobs of Slurm, and for --prepare: add --runner slurm")
    if options.seal and options.shards is not None:
        raise ConfigError("--seal is of all parts, and --shards of one: give one of them")
    if options.address is not None and options.runner != "ray":
        raise ConfigError("--address is of a Ray cluster: give --runner ray too, or leave it out")
    config = load(options)
    names = ("rebuild", "verify", "dry_run", "key", "runner", "address", "stage")
    asked = {name: getattr(options, name) for name in names}
    wanted = Options(**asked, part=options.shards, seal_only=options.seal, progress=not options.no_progress)
    if options.prepare:
        num_parts = None if options.array is None else options.array[0]
        return printed(options, prepare(config, wanted, num_parts=num_parts))
    return printed(options, build(config, wanted))


def _slurm(options: argparse.Namespace) -> int:
    from forebay.preprocess.runner.slurm import Asked, planned, submit

    single = ("rebuild", "verify", "dry_run", "shards", "prepare", "seal", "key", "address")
    alone = [name for name in single if _given(options, name)]
    if alone:
        raise ConfigError(f"--{alone[0].replace('_', '-')} is not for jobs of Slurm: leave out --runner slurm")
    config = load(options)
    num_parts, limit = options.array or (None, None)
    asked = Asked(
        config=options.config,
        num_parts=num_parts,
        limit=limit,
        logs=options.logs,
        options=_handed_on(options),
        workers=options.workers,
        stage=options.stage,
    )
    return printed(options, submit(config, asked) if options.submit else planned(config, asked))


def _given(options: argparse.Namespace, name: str) -> bool:
    return getattr(options, name) not in (None, False)


def _handed_on(options: argparse.Namespace) -> list[str]:
    """Returns the options that change settings, for other processes; the folder of this one is not theirs."""
    given = [f"--set={override}" for override in options.set]
    given += [] if options.max_samples is None else [f"--max-samples={options.max_samples}"]
    given += [] if options.cache_root is None else [f"--cache-root={options.cache_root}"]
    given += [] if options.stage is None else [f"--stage={options.stage}"]
    return given + ["-v"] * options.verbose


def add_status(commands: Any) -> None:
    """Adds `forebay status`."""
    parser = command(
        commands,
        "status",
        _status,
        "say how far the build of a config is, and which of its parts fail; changes nothing",
    )
    add_config(parser)


def _status(options: argparse.Namespace) -> int:
    from forebay.preprocess.runner.status import status_of

    return printed(options, status_of(load(options)))


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
    from forebay.preprocess.evaluation_sets import EvalsetOptions, make_evalset

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
    from forebay.preprocess.index_tars import index_manifests

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


def add_symbols(commands: Any) -> None:
    """Adds `forebay symbols`."""
    parser = command(
        commands, "symbols", _symbols, "write the phones or characters of a config's texts as a tokenizer's folder"
    )
    add_config(parser)
    parser.add_argument("--out", metavar="DIR", type=on_disk, help="its folder; default: that of text.tokenizer")
    parser.add_argument(
        "--characters", action="store_true", help="a symbol is a character, also where phones are apart"
    )
    for name, default in (("pad", "<pad>"), ("unknown", "<unk>")):
        parser.add_argument(f"--{name}", metavar="TOKEN", default=default, help=f"the {name} token; default: {default}")
    for name, what in (("bos", "begins"), ("eos", "ends")):
        parser.add_argument(f"--{name}", metavar="TOKEN", help=f"a token that {what} sequences; default: none")
    parser.add_argument("--replace", action="store_true", help="write over another symbol table in that folder")
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _symbols(options: argparse.Namespace) -> int:
    from forebay.preprocess.symbols_of_texts import SymbolsOptions, make_symbols
    from forebay.steps.text.symbols import Special

    wanted = SymbolsOptions(
        special=Special(pad=options.pad, unknown=options.unknown, bos=options.bos, eos=options.eos),
        out=options.out,
        split="characters" if options.characters else None,
        replace=options.replace,
        progress=not options.no_progress,
    )
    return printed(options, make_symbols(load(options), wanted))
