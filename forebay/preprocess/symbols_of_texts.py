"""The symbol table of a config: its texts go through the text line, and their symbols become a tokenizer's folder."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.config.tree import Config, TextConfig
from forebay.errors import ConfigError
from forebay.preprocess.group import NO_TEXT
from forebay.rows.list_rows import list_rows
from forebay.rows.meanings.own import meaning_of
from forebay.steps.table import text_step
from forebay.steps.text.line import TextLine
from forebay.steps.text.normal.normal_step import Problem
from forebay.steps.text.normal.phones import Phones
from forebay.steps.text.symbols import Special, Split, SymbolTable, is_symbol_table
from forebay.steps.text.text_section import item_steps_of, text_line
from forebay.steps.text.transcript import Transcript
from forebay.store.files import folder_aside, temporary_name
from forebay.store.remote.raw.raw_sources import localized
from forebay.store.texts import TextStore
from forebay.terminal import CommandReport, Progress, first_of
from forebay.visible import from_here, json_text, printable

COUNTS = "symbols.json"
"""The file that says how often each symbol was seen. No key knows it."""
_BLOCK_TEXTS = 4096
_RARE, _SHOWN = 5, 12


@dataclass(frozen=True, kw_only=True)
class SymbolsOptions:
    """How a table is made. out: its folder, that of `text.tokenizer` where it is left out.

    split: what a symbol is; None for what the text line's last step writes. replace: another table may stand there.
    """

    special: Special
    out: Path | None = None
    split: Split | None = None
    replace: bool = False
    progress: bool = True


@dataclass(frozen=True, kw_only=True)
class SymbolsReport(CommandReport):
    """The symbols made; its fields are those of the JSON document. failed: texts without symbols, by reason."""

    folder: str
    state: Literal["written", "kept"]
    split: Split
    num_texts: int
    num_symbols: int
    num_tokens: int
    symbols: Mapping[str, int]
    failed: Mapping[str, int]

    def lines(self) -> Iterator[str]:
        """Yields what `forebay symbols` prints."""
        yield (
            f"{self.state}: {from_here(self.folder)}, {self.num_tokens} tokens, {self.num_symbols} symbols of "
            f"{self.num_texts} texts ({'by ' if self.split == 'spaces' else ''}{self.split})"
        )
        seldom = sorted((count, symbol) for symbol, count in self.symbols.items() if count < _RARE)
        if seldom:
            shown = first_of([f"{printable(symbol)!r} {count}" for count, symbol in seldom], _SHOWN)
            yield f"  seen fewer than {_RARE} times: {shown}"
        for reason, count in self.failed.items():
            yield f"  without symbols: {count} {reason}"


def make_symbols(config: Config, options: SymbolsOptions) -> SymbolsReport:
    """Makes a folder hold the symbol table of a config's texts, and returns what was done.

    A table of the same symbols is kept. Raises ConfigError where texts are no texts, where something else stands in the
    way, or where no text has a symbol.
    """
    text = _text(config)
    line = text_line(config, text)
    line.check()
    out = Path(text.tokenizer) if options.out is None else options.out
    split = options.split or _split(line)
    failed: Counter[str] = Counter()
    texts = [*_prepared(config, line, failed, progress=options.progress)]
    table = SymbolTable.of(texts, split=split, special=options.special)
    if not table.counts:
        raise ConfigError(f"{config.path}: none of its texts has a symbol ({dict(failed)}); look at the first of them")
    return SymbolsReport(
        folder=str(out),
        state=_written(table, out, replace=options.replace),
        split=split,
        num_texts=len(texts),
        num_symbols=len(table.counts),
        num_tokens=len(table.tokens),
        symbols=dict(table.counts),
        failed=dict(sorted(failed.items())),
    )


def _text(config: Config) -> TextConfig:
    """Returns the `[text]` of a config whose rows have texts. Raises ConfigError for any other."""
    text = config.text
    step = None if text is None else text_step(text.prompt, {g: s.form() for g, s in item_steps_of(config).items()})
    if text is None or step is None or not issubclass(step, Transcript):
        raise ConfigError(
            f"{config.path}: a symbol table is of transcripts; name a config with [text], without [vision]"
        )
    if step.reads_labels:
        raise ConfigError(f'{config.path}: text.prompt = "{text.prompt}" reads no texts; name another config')
    return text


def _split(line: TextLine) -> Split:
    """Returns what a symbol of the line's texts is: a phone where phones stand apart, else a character."""
    last = line.steps[-1] if line.steps else None
    return "spaces" if isinstance(last, Phones) and last.separator.isspace() else "characters"


def _prepared(config: Config, line: TextLine, failed: Counter[str], *, progress: bool) -> Iterator[str]:
    """Yields the texts of a config as they are tokenised, and counts those that cannot be.

    What is made of a text is kept in the store of texts, so that a build makes none of it again.
    """
    rows = list_rows(localized(config).source, meaning_of(config), cache_root=config.cache_root).rows.select(
        ["text", "language"]
    )
    opened, store = line.open(), TextStore(config.cache_root)
    with contextlib.suppress(OSError):  # the store says itself that nothing can be kept there
        config.cache_root.mkdir(parents=True, exist_ok=True)
    with Progress(len(rows), desc="text", unit="text", is_shown=progress) as bar:
        for start in range(0, len(rows), _BLOCK_TEXTS):
            block = rows.slice(start, _BLOCK_TEXTS).to_pylist()
            there = [row for row in block if row["text"] is not None]
            failed.update({NO_TEXT: len(block) - len(there)} if len(there) < len(block) else {})
            languages = [(row["language"] or "").strip() for row in there]
            for found in opened.prepare([row["text"] for row in there], languages, store=store):
                if isinstance(found, Problem):
                    failed[found.reason] += 1
                else:
                    yield found.text
            bar.update(len(block))
            opened.keep()


def _written(table: SymbolTable, out: Path, *, replace: bool) -> Literal["written", "kept"]:
    """Makes the folder hold the table; says whether it did already."""
    files = table.files()
    if is_symbol_table(out) and all(_content(out / name) == content for name, content in files.items()):
        return "kept"
    old = temporary_name(out) if out.exists() else None
    if old is not None:
        _require_replaceable(out, table, replace=replace)
    with folder_aside(out, clear=None if old is None else functools.partial(os.rename, out, old)) as aside:
        for name, content in files.items():
            (aside / name).write_bytes(content)
        (aside / COUNTS).write_text(json_text({"split": table.split, "symbols": dict(table.counts)}) + "\n")
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return "written"


def _require_replaceable(out: Path, table: SymbolTable, *, replace: bool) -> None:
    if not is_symbol_table(out):
        raise ConfigError(
            f"forebay symbols: {out} is there and no symbol table of forebay; name another folder with --out, and in "
            "text.tokenizer",
            code="FB115",
        )
    if not replace:
        raise ConfigError(
            f"forebay symbols: {out} holds another table than the {len(table.tokens)} tokens of these texts, and "
            "models may have its ids; name another folder with --out, or say --replace",
            code="FB115",
        )


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
