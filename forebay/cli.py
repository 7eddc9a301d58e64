"""The commands. Results go to standard output, everything else to standard error; exit codes 0 done, 1 failed, 2 bad
config or usage, 3 no cache under `require`, 130 interrupted, 141 nobody reads the output any more (`| head`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forebay.config import Config
from forebay.config.load import read_remote
from forebay.config.remote import RemoteConfig
from forebay.config.tree import stand_in
from forebay.config.url import is_url, parse_url, url_or_path
from forebay.errors import CacheNotFoundError, ConfigError, ForebayError
from forebay.steps.recipe import load_config, recipe_of
from forebay.store.files import is_refusal, refusal
from forebay.store.lookup import find_cache, require
from forebay.version import __version__
from forebay.visible import json_text, one_message, visible_output

DONE, FAILED, BAD_CONFIG, NO_CACHE, INTERRUPTED = 0, 1, 2, 3, 130
CLOSED = 128 + 13
"""What a shell shows of a program that SIGPIPE ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `forebay COMMAND ...` and returns its exit code."""
    with visible_output():
        try:
            try:
                return _run(arguments)
            finally:
                sys.stdout.flush()  # a reader that has gone is met here, not when the interpreter ends
        except BrokenPipeError as err:
            if not _reader_is_gone():
                return _fail(err, FAILED)
            _discard_output()
            return CLOSED


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    _log_to_standard_error(_level(options))
    return _guarded(lambda: options.run(options))


class _OneMessage(logging.Formatter):
    """Keeps a record one message, whatever line ends the names in it hold."""

    def format(self, record: logging.LogRecord) -> str:
        return one_message(super().format(record))


def _log_to_standard_error(level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneMessage("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    # transformers' bars of loading and saving would stand among the lines.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _reader_is_gone() -> bool:
    """Whether standard output or error is a pipe that nobody reads any more."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
            poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Sends what is still buffered nowhere: the interpreter would complain of it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def inspect_cache(arguments: Sequence[str] | None = None) -> int:
    """Runs `inspect_cache [--cache-dir] DIR ...`, which is `forebay inspect DIR ...`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # argparse has no positional that is also an option.
    given = [part for part in given if part != "--cache-dir"]
    given = [part.removeprefix("--cache-dir=") for part in given]
    return main(["inspect", *given])


def _guarded(action: Callable[[], int]) -> int:
    try:
        return action()
    except ConfigError as err:
        return _fail(err, BAD_CONFIG)
    except CacheNotFoundError as err:
        return _fail(err, NO_CACHE)
    except ForebayError as err:
        return _fail(err, FAILED)
    except BrokenPipeError:
        raise
    except OSError as err:
        if is_refusal(err):
            return _fail(refusal(err), FAILED)
        where = f": {err.filename}" if err.filename else ""
        return _fail(f"{err.strerror or err}{where}; what was finished is kept, run the command again", FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted; what was finished is kept, run the command again to go on", INTERRUPTED)


def _fail(message: object, code: int) -> int:
    notes = getattr(message, "__notes__", [])
    print("\n".join(map(one_message, [f"forebay: {message}", *notes])), file=sys.stderr)
    return code


def _level(options: argparse.Namespace) -> int:
    return {0: logging.WARNING, 1: logging.INFO}.get(options.verbose, logging.DEBUG)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="forebay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--version", action="version", version=f"forebay {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_preprocess(commands)
    _add_inspect(commands)
    _add_train(commands)
    _add_calibrate(commands)
    _add_compare(commands)
    _add_eval(commands)
    _add_warm_start(commands)
    _add_key(commands)
    _add_index(commands)
    _add_cache(commands)
    return parser


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, *, has_caches: bool = True
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument("-v", "--verbose", action="count", default=0, help="log more; twice for all")
    if has_caches:
        parser.add_argument(
            "--cache-root", metavar="DIR", type=_place, help="instead of run.cache_root; a folder or URL"
        )
    return parser


def _place(text: str) -> str:
    """Returns a URL of the command line, or the absolute path of a folder."""
    try:
        place = url_or_path(text)
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    return place if is_url(place) else os.path.abspath(place)


def _path(text: str) -> Path:
    """Returns a path of the command line, which is of this machine."""
    try:
        place = url_or_path(text)
    except ConfigError as err:
        raise argparse.ArgumentTypeError(str(err)) from err
    if is_url(place):
        raise argparse.ArgumentTypeError(f"{place} is a URL, and this is of this machine: name a local path")
    return Path(place)


def _add_config(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    parser.add_argument("config", metavar="CONFIG", nargs=None if is_needed else "?", help="a TOML file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="as if it stood in the file"
    )
    parser.add_argument("--max-samples", type=int, metavar="N", help="short for --set source.max_samples=N")


def _load(options: argparse.Namespace) -> Config:
    overrides = list(getattr(options, "set", []))
    if getattr(options, "max_samples", None) is not None:
        overrides.append(f"source.max_samples={options.max_samples}")
    if options.cache_root is not None:
        overrides.append(f"run.cache_root={json.dumps(options.cache_root)}")
    if getattr(options, "workers", None) is not None:
        overrides.append(f"run.num_workers={options.workers}")
    return load_config(options.config, overrides=overrides)


def _remote(options: argparse.Namespace) -> RemoteConfig:
    """Returns what `--set remote.x=y` says, for a command that was given no config. The rest is a config's."""
    return read_remote([override for override in options.set if override.lstrip().startswith("remote.")])


def _show(options: argparse.Namespace, report: Any) -> int:
    """Prints a report: its document, or its lines."""
    print(json_text(report.to_json()) if options.json else "\n".join(report.lines()))
    return DONE


def _add_preprocess(commands: Any) -> None:
    parser = _command(
        commands, "preprocess", _preprocess, "make the cache of a config; resumes; does nothing when it is sealed"
    )
    _add_config(parser)
    parser.add_argument("--workers", type=int, metavar="N", help="processes; default: the cores")
    parser.add_argument("--rebuild", action="store_true", help="make every shard again and swap the cache")
    parser.add_argument(
        "--verify", action="store_true", help="re-hash a sealed cache first and mend its damaged shards"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done and how large it will be")
    parser.add_argument(
        "--shards", metavar="I::N", type=_part, help="only every N-th shard from the I-th on (job arrays)"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("::")
    if not (first.isdigit() and step.isdigit() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I::N with I below N, for example 3::64")
    return int(first), int(step)


def _preprocess(options: argparse.Namespace) -> int:
    from forebay.preprocess.pipeline import build
    from forebay.preprocess.report import Options

    config = _load(options)
    asked = {name: getattr(options, name) for name in ("rebuild", "verify", "dry_run")}
    report = build(config, Options(**asked, part=options.shards, progress=not options.no_progress))
    return _show(options, report)


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", _inspect, "show what is inside a cache or a plan, or what a run has used")
    _add_config(parser, is_needed=False)
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
        "--wav", metavar="FILE", type=_path, help="with --sample: write its audio, where the cache keeps it"
    )
    parser.add_argument("--png", metavar="FILE", type=_path, help="with --sample: draw its features, or its images")
    parser.add_argument("--export", metavar="FILE.parquet", type=_path, help="write the row table")
    parser.add_argument(
        "--bucket-manifests", metavar="DIR", type=_path, help="write one shuffled row table for each bucket of [plan]"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="with --bucket-manifests: of the shuffle; default: 42")
    parser.add_argument(
        "--verify", action="store_true", help="re-hash everything; exit code 1 where something is wrong"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _inspect(options: argparse.Namespace) -> int:
    from forebay.inspect import command
    from forebay.inspect.usage import run_usage

    if options.usage is not None:
        if options.config is not None:
            raise ConfigError(f"--usage {options.usage} is all that is looked at; leave {options.config} out")
        return run_usage(_path(options.usage), as_json=options.json, remote=_remote(options))
    if options.config is None:
        raise ConfigError("inspect needs a cache (a folder or URL) or a config, or --usage FILE")
    place = url_or_path(options.config)
    path = Path(place)
    if not is_url(place) and not path.exists():
        raise ConfigError(f"{path}: no such cache, plan or config; name a folder, a URL or a TOML file")
    config = None if is_url(place) or path.is_dir() else _load(options)
    if options.seed is not None and options.bucket_manifests is None:
        raise ConfigError("--seed goes with --bucket-manifests DIR; for training: --set loader.seed=N")
    if options.bucket_manifests is not None:
        if config is None:
            raise ConfigError(f"--bucket-manifests needs a config with a [plan] section, {place} is a folder")
        from forebay.preprocess.sources.speech.listing import tar_places

        seed, folder = 42 if options.seed is None else options.seed, options.bucket_manifests
        return command.show_bucket_manifests(config, folder, seed=seed, places=tar_places, as_json=options.json)
    asked = {name: getattr(options, name) for name in ("sample", "wav", "png", "export", "verify", "cache_root")}
    asked["remote"] = _remote(options) if config is None else config.remote
    wanted = command.InspectOptions(**asked, as_json=options.json, progress=not options.no_progress)
    return command.show(place if config is None else config, wanted)


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", _train, "a small reference loop for Whisper, Qwen3-ASR and Qwen3-VL models")
    _add_config(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint under train.output_dir")
    parser.add_argument("--dry-run", action="store_true", help="plan and loader alone, without a model")
    parser.add_argument("--steps", type=int, metavar="N", help="with --dry-run: micro-batches to read; default: 200")
    parser.add_argument(
        "--profile", type=int, nargs="?", const=20, metavar="N", help="where the time of N steps goes; default: 20"
    )


def _train(options: argparse.Namespace) -> int:
    logging.getLogger("forebay.train").setLevel(min(logging.INFO, _level(options)))
    if options.dry_run:
        return _dry_run(options)
    if options.steps is not None:
        raise ConfigError("--steps goes with --dry-run; for training: --set train.max_steps=N")
    config = _load(options)
    from forebay.train.loop.phases import Phases

    phases = Phases()
    with phases("imports"):
        from forebay.train.loop.run import run
        from forebay.train.profile.command import profile

    report: Any = (
        run(config, resume=options.resume, phases=phases)
        if options.profile is None
        else profile(config, num_steps=options.profile, resume=options.resume, phases=phases)
    )
    return DONE if report is None else _show(options, report)  # None: not the rank that reports


def _dry_run(options: argparse.Namespace) -> int:
    from forebay.train.loop.dry_run import dry_run

    if options.profile is not None:
        raise ConfigError("--profile does not go with --dry-run: without a model there are no steps to look at")
    if options.resume:
        raise ConfigError("--resume does not go with --dry-run, which has no checkpoint to go on from")
    return _show(options, dry_run(_load(options), steps=200 if options.steps is None else options.steps))


def _add_calibrate(commands: Any) -> None:
    parser = _command(commands, "calibrate", _calibrate, "find the largest batch of every bucket, or the largest pack")
    _add_config(parser)
    parser.add_argument(
        "--bucket", action="append", default=[], metavar="B", help="only this bucket, by name or index: b_0_3 or 0"
    )
    parser.add_argument("--start-bs", type=int, metavar="N", help="first batch that is tried; default: that of a line")
    parser.add_argument("--min-bs", type=int, default=8, metavar="N", help="smallest batch that counts; default: 8")
    parser.add_argument(
        "--max-memory-gb", type=float, metavar="G", help="GB of 10^9 bytes; default: 91 %% of the CUDA device"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="optimizer steps of a trial; default: 5")
    parser.add_argument("--target-samples", type=int, metavar="N", help="samples of a step over all ranks: grad_acc")
    parser.add_argument("--out", type=_path, metavar="FILE", help="default: calibrated_bs.json beside the config")
    parser.add_argument("--mode", choices=("find", "verify-all"), default="find", help="verify-all: under torchrun")


def _calibrate(options: argparse.Namespace) -> int:
    from forebay.train.calibrate.bench import CalibrateOptions
    from forebay.train.calibrate.run import calibrate
    from forebay.train.calibrate.verify import verify

    names = ("start_bs", "min_bs", "max_memory_gb", "steps", "target_samples", "out")
    asked = CalibrateOptions(buckets=tuple(options.bucket), **{name: getattr(options, name) for name in names})
    out = sys.stderr if options.json else sys.stdout
    tell: Callable[[str], None] = partial(print, file=out, flush=True)
    if options.mode == "find":
        found = calibrate(_load(options), asked, tell=tell)
        return DONE if found is None else _show(options, found)  # None: not the rank that reports
    verified = verify(_load(options), asked, tell=tell)
    if verified is None:
        return DONE
    _show(options, verified)
    return FAILED if verified.problems else DONE


def _add_compare(commands: Any) -> None:
    parser = _command(commands, "compare", _compare, "a config's way beside others on the same samples, or two runs")
    _add_config(parser)
    parser.add_argument("other", metavar="RUN", nargs="?", help="with a run folder instead of CONFIG: the other run")
    parser.add_argument(
        "--against", metavar="ARMS", help="uncached, unbucketed, hf, uncached+unbucketed; several with commas"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps of the config's own way; default: 200")
    parser.add_argument("--out", metavar="DIR", type=_path, help="default: compare/ in the run's folder")


def _compare(options: argparse.Namespace) -> int:
    from forebay.train.compare.command import CompareOptions, show

    logging.getLogger("forebay.train").setLevel(min(logging.INFO, _level(options)))
    asked = {name: getattr(options, name) for name in ("other", "against", "steps", "out")}
    first = Path(options.config)
    return _show(options, show(first if first.is_dir() else _load(options), CompareOptions(**asked)))


def _add_eval(commands: Any) -> None:
    parser = _command(commands, "eval", _eval, "WER, CER and loss of a checkpoint on the sets of [[train.eval]]")
    _add_config(parser)
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        type=_path,
        help="default: the run's best one, else its last one, else train.model",
    )


def _eval(options: argparse.Namespace) -> int:
    from forebay.train.evaluation.alone import evaluate_alone

    report = evaluate_alone(_load(options), checkpoint=options.checkpoint)
    return DONE if report is None else _show(options, report)  # None: not the rank that reports


def _add_warm_start(commands: Any) -> None:
    parser = _command(commands, "warm-start", _warm_start, "put a model on a new tokenizer", has_caches=False)
    parser.add_argument("model", metavar="MODEL", type=_path, help="folder of a transformers model with weights")
    parser.add_argument("--tokenizer", metavar="DIR", type=_path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--out", metavar="DIR", type=_path, required=True, help="folder to make")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of the new rows; default: 0")


def _warm_start(options: argparse.Namespace) -> int:
    from forebay.train.warm_start.run import warm_start

    return _show(options, warm_start(options.model, tokenizer=options.tokenizer, out=options.out, seed=options.seed))


def _add_key(commands: Any) -> None:
    parser = _command(commands, "key", _key, "print the key of a config and whether its cache is there")
    _add_config(parser)
    parser.add_argument("--explain", action="store_true", help="name the fields in which the nearest cache differs")
    parser.add_argument("--no-hash", action="store_true", help="do not read raw data; the key may stay unknown")


def _key(options: argparse.Namespace) -> int:
    from forebay.preprocess.listing import explain, explain_lines

    document = explain(_load(options), may_hash=not options.no_hash)
    lines = explain_lines(document, with_nearest=options.explain)
    print(json_text(document) if options.json else "\n".join(lines))
    return DONE


def _add_index(commands: Any) -> None:
    parser = _command(commands, "index", _index, "index every tar of the given manifests")
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
    _show(options, report)
    if not options.json:
        for _, reason in report.failed:
            print(f"  {reason}", file=sys.stderr)
    return FAILED if report.failed else DONE


def _add_cache(commands: Any) -> None:
    summary = "bring sealed caches to a store and back, and shards to this node"
    actions = commands.add_parser("cache", help=summary, description=summary)
    actions = actions.add_subparsers(required=True, metavar="ACTION")
    _add_push(actions)
    _add_pull(actions)
    _add_warm(actions)


def _add_push(actions: Any) -> None:
    parser = _command(actions, "push", _push, "make a URL of a store a sealed cache of this machine; goes on")
    parser.add_argument("config", metavar="CACHE|CONFIG", help="the folder of a cache, or the TOML file that made it")
    place = "of the cache; with a slash at its end, of a folder of caches"
    parser.add_argument("url", metavar="URL", nargs="?", help=f"{place}; default: a run.cache_root that is a URL")
    parser.add_argument("--verify", action="store_true", help="read everything back, and send what is damaged again")
    _add_transfer(parser)


def _add_pull(actions: Any) -> None:
    parser = _command(actions, "pull", _pull, "make a folder the sealed cache of a URL; goes on")
    parser.add_argument("url", metavar="URL", help="of the cache")
    place = "of the cache; with a slash at its end, of a folder of caches"
    parser.add_argument("folder", metavar="DIR", nargs="?", help=f"{place}; or give --cache-root")
    _add_transfer(parser)


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="remote.FIELD=VALUE", help="how the store is asked"
    )
    parser.add_argument("--no-progress", action="store_true", help="no bars")


def _push(options: argparse.Namespace) -> int:
    from forebay.store.remote.transfer.transfer import place_below, push

    source = url_or_path(options.config)
    if is_url(source):
        raise ConfigError(f"{source} lies in a store; a push takes a folder of this machine, and a pull makes one")
    if Path(source).is_dir():
        folder, settings, default = Path(source), read_remote(options.set), None
    else:
        config = _load(options)
        sealed = require(config, find_cache(config, recipe_of(config)))
        if sealed.url is not None:
            raise ConfigError(f"{source}: its cache lies in a store already: {sealed.url}; to have it here: cache pull")
        folder, settings, default = sealed.folder, config.remote, config.remote_root
    if (place := options.url or (default and f"{default}/")) is None:
        raise ConfigError(f"where to? For example: forebay cache push {options.config} s3://bucket/caches/")
    url, progress = parse_url(place_below(place, folder.name)), not options.no_progress
    return _show(options, push(folder, url, settings, verify=options.verify, progress=progress))


def _pull(options: argparse.Namespace) -> int:
    from forebay.store.remote.transfer.transfer import place_below, pull

    if (options.folder is None) == (options.cache_root is None):
        raise ConfigError(f"where to? forebay cache pull {options.url} DIR, or --cache-root DIR; one of the two")
    url = parse_url(options.url)
    place = f"{options.cache_root}/" if options.folder is None else options.folder
    folder = url_or_path(place_below(place, url.name))
    if is_url(folder):
        raise ConfigError(f"{folder} is a URL; a pull makes a folder of this machine")
    return _show(options, pull(url, Path(folder), read_remote(options.set), progress=not options.no_progress))


def _add_warm(actions: Any) -> None:
    parser = _command(actions, "warm", _warm, "download what the next micro-batches of this node need, soonest first")
    _add_config(parser)
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
    return _show(options, warm(_load(options), wanted))
