"""The commands from raw data to a cache: `preprocess`, `status`, `evalset`, `key`, `index`.

The command that writes a symbol table for a tokenizer: `symbols`.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Literal

from forebay.cli.options import DONE, FAILED, CacheCommand, ConfigCommand, argument, command, option
from forebay.config.remote import RemoteConfig
from forebay.config.tree import stand_in
from forebay.errors import ConfigError
from forebay.visible import json_text

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

        return self.printed(status_of(self.loaded()))


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
        from forebay.preprocess.listing import explain, explain_lines

        document = explain(self.loaded(), may_hash=not self.no_hash)
        lines = explain_lines(document, with_nearest=self.explain)
        print(json_text(document) if self.json else "\n".join(lines))
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
