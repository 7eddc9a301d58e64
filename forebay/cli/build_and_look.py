"""The commands from raw data to a cache: `preprocess`, `status`, `evalset`, `key`, `index`, `symbols`.

Those that look into a cache or at data: `inspect`, `export`, `lint`, `text`; and `explain`: what an error code, or the
reason for which a sample was left out, means.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forebay.cli.options import DONE, FAILED, CacheCommand, Command, ConfigCommand, argument, command, on_disk, option
from forebay.config.remote import RemoteConfig, is_url, url_or_path
from forebay.config.tree import stand_in
from forebay.errors import ConfigError
from forebay.extras import arrow_without_pandas
from forebay.face import uncollected
from forebay.visible import json_text

if TYPE_CHECKING:
    from forebay.config.tree import Config
    from forebay.preprocess.decode import Heard
    from forebay.store.cache import Cache

_OF_SLURM = "with --runner slurm (docs/machines.md)"


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


@command("preprocess")
class PreprocessCommand(ConfigCommand):
    """Make the cache of a config; resumes; does nothing when it is sealed."""

    workers: int | None = option("processes; default: the cores", "N")
    rebuild: bool = option("make every shard again and swap the cache")
    verify: bool = option("re-hash a sealed cache first and mend its damaged shards")
    dry_run: bool = option("say what would be done and how large it will be")
    shards: tuple[int, int] | None = option("only every N-th shard from the I-th on (job arrays)", "I::N", type=_part)
    prepare: bool = option("list and hash the raw data once, for parts that start together")
    seal: bool = option("seal what all parts have made, and make nothing")
    runner: Literal["local", "ray", "slurm"] = option(
        "who makes the shards: this machine, a Ray cluster, or jobs of Slurm", default="local"
    )
    address: str | None = option("of the Ray cluster; default: RAY_ADDRESS, else the one of this machine", "HOST:PORT")
    stage: str | None = option("folder of the root's bucket for finished shards, where nodes share no disk", "URL")
    key: str | None = option("first digits of the key that the build must have, else stop", "KEY")
    no_progress: bool = option("no bars")
    array: tuple[int, int | None] | None = option(
        "parts of the array, at most M at once; --prepare checks it too", "N[%M]", group=_OF_SLURM, type=_array
    )
    submit: bool = option("call sbatch; what is finished is not made again", group=_OF_SLURM, apart="one")
    print: bool = option("print the jobs as a script that submits them (the default)", group=_OF_SLURM, apart="one")
    logs: str | None = option("where log files go; default: CACHE_ROOT/.building/logs", "DIR", group=_OF_SLURM)

    def run(self) -> int:
        if self.runner == "slurm":
            return self._slurm()
        with uncollected():
            from forebay.preprocess.build_report import Options
            from forebay.preprocess.pipeline import build, prepare

        for flag in self.given("submit", "print", "logs"):
            raise ConfigError(f"{flag} is for jobs of Slurm: add --runner slurm")
        if self.array is not None and not self.prepare:
            raise ConfigError("--array is for jobs of Slurm, and for --prepare: add --runner slurm")
        if self.seal and self.shards is not None:
            raise ConfigError("--seal is of all parts, and --shards of one: give one of them")
        if self.address is not None and self.runner != "ray":
            raise ConfigError("--address is of a Ray cluster: give --runner ray too, or leave it out")
        config, wanted = self.loaded(), self.into(Options, part=self.shards, seal_only=self.seal)
        if config.source.kind != "python":  # whose rows come from code of the user, in this process
            arrow_without_pandas()
        if self.prepare:
            return self.printed(prepare(config, wanted, num_parts=None if self.array is None else self.array[0]))
        return self.printed(build(config, wanted))

    def _slurm(self) -> int:
        from forebay.preprocess.runner.slurm import Asked, planned, submit

        single = ("rebuild", "verify", "dry_run", "shards", "prepare", "seal", "key", "address")
        for flag in self.given(*single):
            raise ConfigError(f"{flag} is not for jobs of Slurm: leave out --runner slurm")
        config = self.loaded()
        num_parts, limit = self.array or (None, None)
        asked = self.into(Asked, num_parts=num_parts, limit=limit, options=self._handed_on())
        return self.printed(submit(config, asked) if self.submit else planned(config, asked))

    def _handed_on(self) -> list[str]:
        """Returns the options that change settings, for other processes; the folder of this one is not theirs."""
        given = [f"--set={override}" for override in self.set]
        for name in ("max_samples", "cache_root", "stage"):
            given += [f"{flag}={getattr(self, name)}" for flag in self.given(name)]
        return given + ["-v"] * self.verbose


@command("status")
class StatusCommand(ConfigCommand):
    """Say how far the build of a config is, and which of its parts fail; changes nothing."""

    def run(self) -> int:
        from forebay.preprocess.runner.status import status_of

        config = self.loaded()
        if config.source.kind != "python":  # whose rows come from code of the user, in this process
            arrow_without_pandas()
        return self.printed(status_of(config))


@command("evalset")
class EvalsetCommand(ConfigCommand):
    """Draw an evaluation set for each language of a config's raw data; goes on."""

    out: Path = option("an empty or new folder", "DIR", required=True)
    per_language: int = option("samples of a language; default: 500", "N", default=500)
    seed: int = option("of the draw; default: 17", "N", default=17)
    workers: int | None = option("processes; default: the cores", "N")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.preprocess.evaluation_sets import EvalsetOptions, make_evalset

        return self.printed(make_evalset(self.loaded(), self.into(EvalsetOptions)))


@command("key")
class KeyCommand(ConfigCommand):
    """Print the key of a config and whether its cache is there."""

    explain: bool = option("name the fields in which the nearest cache differs")
    no_hash: bool = option("do not read raw data; the key may stay unknown")

    def run(self) -> int:
        with uncollected():
            from forebay.preprocess.listing import explain, explain_lines

        document = explain(self.loaded(), may_hash=not self.no_hash)
        print(json_text(document) if self.json else "\n".join(explain_lines(document, with_nearest=self.explain)))
        return DONE


@command("index")
class IndexCommand(CacheCommand):
    """Index every tar of the given manifests."""

    manifests: list[str] = argument("MANIFEST", "parquet or TSV manifest, tar, or folder of tars", nargs="+")
    workers: int | None = option("processes; default: the cores", "N")
    export_json: bool = option("also write <tar>.index.json for other tools")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.preprocess.index_tars import index_manifests

        report = index_manifests(
            self.manifests,
            cache_root=stand_in(self.cache_root or "caches", RemoteConfig()),
            num_workers=self.workers or os.cpu_count() or 1,
            export_json=self.export_json,
            progress=self.progress,
        )
        self.printed(report)
        if not self.json:
            for _, reason in report.failed:
                print(f"  {reason}", file=sys.stderr)
        return FAILED if report.failed else DONE


@command("symbols")
class SymbolsCommand(ConfigCommand):
    """Write the phones or characters of a config's texts as a tokenizer's folder."""

    out: Path | None = option("its folder; default: that of text.tokenizer", "DIR")
    characters: bool = option("a symbol is a character, also where phones are apart")
    pad: str = option("the pad token; default: <pad>", "TOKEN", default="<pad>")
    unknown: str = option("the unknown token; default: <unk>", "TOKEN", default="<unk>")
    bos: str | None = option("a token that begins sequences; default: none", "TOKEN")
    eos: str | None = option("a token that ends sequences; default: none", "TOKEN")
    replace: bool = option("write over another symbol table in that folder")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.preprocess.symbols_of_texts import SymbolsOptions, make_symbols
        from forebay.steps.text.symbols import Special

        split = "characters" if self.characters else None
        wanted = self.into(SymbolsOptions, special=self.into(Special), split=split)
        return self.printed(make_symbols(self.loaded(), wanted))


_APART = ("usage", "sample", "wav", "png", "export", "bucket_manifests", "seed", "verify")
"""What a page has no place for."""


@command("inspect")
class InspectCommand(ConfigCommand):
    """Show what is inside a cache or a plan, or what a run has used."""

    config: str = argument("CONFIG", "a TOML file", completes=True, nargs="?")
    usage: str | None = option("a run's logs/data_usage.jsonl: used against expected, never used", "FILE")
    sample: str | None = option(
        "one sample by its index, or its id where it is no index; of a plan: a pack by its number or a sample's id", "I"
    )
    wav: Path | None = option("with --sample: write its audio; of several clips FILE-0.wav, FILE-1.wav, ...", "FILE")
    png: Path | None = option("with --sample: draw its features, or its images", "FILE")
    export: Path | None = option("write the row table", "FILE.parquet")
    bucket_manifests: Path | None = option("write one shuffled row table for each bucket of [plan]", "DIR")
    seed: int | None = option("with --bucket-manifests: of the shuffle, default 42; of a mixture: its weights", "N")
    verify: bool = option("re-hash everything; exit code 1 where something is wrong")
    html: Path | None = option("write a page to see and hear it: one file, at most 10 MB", "FILE.html")
    serve: bool = option("the same page over all samples, on this machine alone")
    port: int | None = option("with --serve: the port; default: any free one", "N")
    ids: str | None = option("with --html or --serve: show these samples; ids like a,b or a file, one a line", "IDS")
    longest: bool = option("with --html or --serve: show the longest samples")
    worst: bool = option(
        "with --html or --serve: show samples whose text does not fit, that clip, or that are padded most"
    )
    no_progress: bool = option("no bars")

    def run(self) -> int:
        with uncollected():
            from forebay.inspect import command

        is_page = self._is_page()
        if self.usage is not None:
            if self.config is not None:
                raise ConfigError(f"--usage {self.usage} is all that is looked at; leave {self.config} out")
            return command.run_usage(on_disk(self.usage), as_json=self.json, remote=self.remote(self.set))
        if self.config is None:
            raise ConfigError("inspect needs a cache (a folder or URL) or a config, or --usage FILE")
        place = url_or_path(self.config)
        path = Path(place)
        if not is_url(place) and not path.exists():
            raise ConfigError(f"{path}: no such cache, plan or config; name a folder, a URL or a TOML file")
        config = None if is_url(place) or path.is_dir() else self.loaded()
        if self.seed is not None and self.bucket_manifests is None:
            if config is None or not config.mixture.is_given:
                raise ConfigError(
                    "--seed goes with --bucket-manifests DIR, or a config with a [mixture]; for training: "
                    "--set loader.seed=N"
                )
            from forebay.inspect.plan_lines import show_weights
            from forebay.train.select import make_loader

            seeded = dataclasses.replace(config, loader=dataclasses.replace(config.loader, seed=self.seed))
            plan = make_loader(seeded, dp_rank=0, dp_world_size=1).plan
            return show_weights(plan, seed=self.seed, as_json=self.json)
        if self.bucket_manifests is not None:
            if config is None:
                raise ConfigError(f"--bucket-manifests needs a config with a [plan] section, {place} is a folder")
            from forebay.rows.list_rows import tar_places

            seed, folder = 42 if self.seed is None else self.seed, self.bucket_manifests
            return command.show_bucket_manifests(config, folder, seed=seed, places=tar_places, as_json=self.json)
        target, settings = (place, self.remote(self.set)) if config is None else (config, config.remote)
        how = {"sounds": _heard, "as_json": self.json, "remote": settings}
        if is_page:
            from forebay.inspect.page.overview import CardChoice
            from forebay.inspect.page.page_command import ReportOptions, report

            return report(target, self.into(ReportOptions, port=self.port or 0, choice=self.into(CardChoice), **how))
        return command.show(target, self.into(command.InspectOptions, **how))

    def _is_page(self) -> bool:
        """Whether a page is asked for. Raises ConfigError for options that do not go together."""
        pages, own = self.given("html", "serve"), self.given("port", "ids", "longest", "worst")
        if not pages and own:
            raise ConfigError(f"{own[0]} goes with --html FILE or --serve; add one of them")
        if len(pages) > 1:
            raise ConfigError(
                "--html and --serve do not go together: one writes a file, one answers a browser; leave one out"
            )
        if pages and (others := self.given(*_APART)):
            raise ConfigError(f"{pages[0]} and {others[0]} do not go together; leave one out")
        if len(chosen := self.given("ids", "longest", "worst")) > 1:
            raise ConfigError(f"{chosen[0]} and {chosen[1]} do not go together: each says which samples are shown")
        if self.port is not None and not self.serve:
            raise ConfigError("--port goes with --serve; --html writes a file and needs none")
        if self.port is not None and not 0 <= self.port < 65_536:
            raise ConfigError(f"--port is {self.port}, wanted 0 to 65535; 0 is any free one")
        return bool(pages)


def _heard(config: Config, cache: Cache) -> Heard:
    """Returns what decodes the recordings of a cache; of a cache that keeps its sounds nobody asks."""
    from forebay.preprocess.decode import Heard

    return Heard(config, cache)


@command("export")
class ExportCommand(CacheCommand):
    """Write the samples of a cache as files of another form; goes on."""

    config: str = argument("CACHE|CONFIG", "a cache, its URL, or the TOML file that made it")
    form: Literal["parquet", "webdataset", "zarr"] = option("of the files", required=True)
    out: Path = option("an empty or new folder", "DIR", required=True)
    shard_size_mb: int | None = option("about how large a file becomes; default: 1000", "N")
    ids: Path | None = option("only the samples with these ids, one a line", "FILE")
    max_samples: int | None = option("only the first N of them", "N")
    set: list[str] = option("as if it stood in the config", "SECTION.FIELD=VALUE")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.inspect.export import ExportOptions, export, export_zarr
        from forebay.store.cache import open_cache
        from forebay.store.memo import note
        from forebay.store.selection import Filter

        found, filter_ = self.named(self.config, overrides=self.set), None
        if isinstance(found, str):
            cache = open_cache(found, remote=self.remote(self.set))
        elif found.mixture.source:
            raise ConfigError(
                f"{found.path} reads several sources by [[mixture.source]]: export each by its own config"
            )
        else:
            cache = open_cache(self.sealed(found).place, remote=found.remote)
            filter_ = Filter.of(found.filter) if found.filter.is_given else None
        note(cache.folder)
        options = self.into(ExportOptions, filter=filter_)
        return self.printed((export_zarr if self.form == "zarr" else export)(cache, options))


@command("lint")
class LintCommand(CacheCommand):
    """Look for faults in raw data or a cache: silence, clipping, duplicates, leaks, texts."""

    config: list[str] = argument("CONFIG|CACHE", "TOML files, caches or their URLs", nargs="*")
    set: list[str] = option("as if it stood in the config", "SECTION.FIELD=VALUE")
    max_samples: int | None = option("only the first N samples of each", "N")
    against: list[str] = option(
        "sets whose samples must not be among these; those of [[train.eval]] always", "CONFIG|CACHE", nargs="+"
    )
    raw: bool = option("read the raw data, also where a cache keeps the recordings")
    drop_ids: Path | None = option("write the ids for [filter] drop_ids", "FILE")
    severity: Literal["error", "warning", "info"] = option(
        "of --drop-ids and --strict: this and worse; default: error", default="error"
    )
    strict: bool = option("end with 1 where something of --severity was found")
    skip: list[str] = option("leave a check out", "CHECK")
    limit: list[str] = option("change a limit", "NAME=VALUE")
    explain_checks: bool = option("print the checks and their limits, and end")
    show: int = option("findings of a check in the lines; default: 3", "N", default=3)
    workers: int | None = option("processes; default: the cores", "N")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.inspect.checks.limits import Limits, check_lines

        limits = Limits().changed(self.limit)
        if self.explain_checks:
            print("\n".join(check_lines(limits)))
            return DONE
        from forebay.inspect.checks.lint import LintOptions, lint

        if not self.config:
            raise ConfigError("lint needs a config or a cache (a folder or URL), or --explain-checks")
        for flag, number in (("--max-samples", self.max_samples), ("--workers", self.workers)):
            if number is not None and number < 1:
                raise ConfigError(f"{flag} {number}: wanted 1 or more")
        wanted = self.into(LintOptions, limits=limits, is_raw=self.raw, most=self.max_samples, shown=max(0, self.show))
        targets = [self._target(text, max_samples=self.max_samples) for text in self.config]
        against = [self._target(text, max_samples=None) for text in self.against]
        report = lint(targets, against, wanted)
        self.printed(report)
        return FAILED if self.strict and report.at_least(self.severity) else DONE

    def _target(self, text: str, *, max_samples: int | None) -> Any:
        from forebay.inspect.checks.lint import Target

        found = self.named(text, overrides=self.set, max_samples=max_samples)
        if isinstance(found, str):
            return Target(place=found, remote=self.remote(self.set))
        return Target(config=found)


@command("text")
class TextCommand(ConfigCommand):
    """Show what becomes of texts: every step, tokens; without a text, a report over all."""

    sample: str | None = option("a sample by its row of the listing, or its id where it is no row", "I")
    text: str | None = option("a text that is given here", "TEXT")
    language: str | None = option("with --text: its language, as a manifest has it", "CODE")
    diff: bool = option("with --sample or --text: mark what each step changes")
    no_progress: bool = option("no bars")

    def run(self) -> int:
        from forebay.inspect.text_command import print_view, report_texts, view_sample, view_text

        if self.text is not None and self.sample is not None:
            raise ConfigError(f"--text and --sample {self.sample} are two texts; name one")
        if self.language is not None and self.text is None:
            raise ConfigError(f"--language {self.language} is of --text; a sample's language stands in its manifest")
        if self.diff and self.text is None and self.sample is None:
            raise ConfigError("--diff shows one text; name it with --sample or --text")
        config = self.loaded()
        if self.text is not None:
            view = view_text(config, self.text, language=self.language or "", is_diff=self.diff)
        elif self.sample is not None:
            view = view_sample(config, self.sample, is_diff=self.diff, progress=self.progress)
        else:
            return self.printed(report_texts(config, progress=self.progress))
        if self.json:
            print(json_text(view.to_json()))
        else:
            print_view(view)
        return DONE if view.look.failure is None else FAILED


@command("explain")
class ExplainCommand(Command):
    """Say what an error code (FB101) or a reason (corrupt_audio) means, and what to do."""

    topic: list[str] = argument(
        "CODE",
        "a code, a reason, the class of an error, or words to look for; left out: the list of all codes",
        nargs="*",
    )

    def run(self) -> int:
        from forebay.explain import explained

        return self.printed(explained(" ".join(self.topic)))
