"""The commands that look into a cache, and that write what is inside: `inspect`, `export`.

The command that looks for what is wrong with data: `lint`.

The command that shows what becomes of texts: `text`.

The command `forebay explain`: what an error code, or the reason for which a sample was left out, means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from forebay.cli.options import DONE, FAILED, CacheCommand, Command, ConfigCommand, argument, command, on_disk, option
from forebay.config.url import is_url, url_or_path
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import find_cache, require
from forebay.visible import json_text

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
    wav: Path | None = option("with --sample: write its audio, where the cache keeps it", "FILE")
    png: Path | None = option("with --sample: draw its features, or its images", "FILE")
    export: Path | None = option("write the row table", "FILE.parquet")
    bucket_manifests: Path | None = option("write one shuffled row table for each bucket of [plan]", "DIR")
    seed: int | None = option("with --bucket-manifests: of the shuffle; default: 42", "N")
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
        from forebay.inspect import command
        from forebay.inspect.command import run_usage
        from forebay.preprocess.decode import Heard

        is_page = self._is_page()
        if self.usage is not None:
            if self.config is not None:
                raise ConfigError(f"--usage {self.usage} is all that is looked at; leave {self.config} out")
            return run_usage(on_disk(self.usage), as_json=self.json, remote=self.remote(self.set))
        if self.config is None:
            raise ConfigError("inspect needs a cache (a folder or URL) or a config, or --usage FILE")
        place = url_or_path(self.config)
        path = Path(place)
        if not is_url(place) and not path.exists():
            raise ConfigError(f"{path}: no such cache, plan or config; name a folder, a URL or a TOML file")
        config = None if is_url(place) or path.is_dir() else self.loaded()
        if self.seed is not None and self.bucket_manifests is None:
            raise ConfigError("--seed goes with --bucket-manifests DIR; for training: --set loader.seed=N")
        if self.bucket_manifests is not None:
            if config is None:
                raise ConfigError(f"--bucket-manifests needs a config with a [plan] section, {place} is a folder")
            from forebay.rows.list_rows import tar_places

            seed, folder = 42 if self.seed is None else self.seed, self.bucket_manifests
            return command.show_bucket_manifests(config, folder, seed=seed, places=tar_places, as_json=self.json)
        target, settings = (place, self.remote(self.set)) if config is None else (config, config.remote)
        how = {"sounds": Heard, "as_json": self.json, "remote": settings}
        if is_page:
            from forebay.inspect.page.overview import CardChoice
            from forebay.inspect.page.write_pages import ReportOptions, report

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

        found = self.named(self.config, overrides=self.set)
        if isinstance(found, str):
            cache = open_cache(found, remote=self.remote(self.set))
        else:
            cache = open_cache(require(found, find_cache(found, recipe_of(found))).place, remote=found.remote)
        note(cache.folder)
        return self.printed((export_zarr if self.form == "zarr" else export)(cache, self.into(ExportOptions)))


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
