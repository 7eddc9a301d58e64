"""One way to read some data: a kind of source, its files, what its rows mean, and once it is chosen, all facts of it.

A reading makes candidates of names and of the first rows of files. The config is written from the one that is chosen.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from forebay.config.data import SOURCE_KINDS
from forebay.config.pretrained_folder import model_of
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.init.folder_files import extension_of, spread
from forebay.init.found_model import Model
from forebay.init.media_headers import Films, Pictures, Sounds
from forebay.init.questions import BESIDE, Chooser
from forebay.init.table_head import Row, TableHead, are_pairs, classes_of, languages_of, videos_of_row, words_of
from forebay.rows.meanings.chat_fields import ANSWERS, IMAGES, NAMED_BY, VIDEOS, WITH_MESSAGES, WITH_QUESTION
from forebay.rows.meanings.chat_fields import BESIDE as FIELDS_BESIDE
from forebay.rows.reader import DURATIONS, IDS
from forebay.steps.form import BatchForm
from forebay.steps.recipe import Recipe
from forebay.terminal import counted, first_of
from forebay.visible import printable

_WIDTH = 118
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


@dataclass(slots=True)
class Section:
    """Settings of one section; the name is empty for those in front of all sections.

    lines: name, value and comment of each setting. notes: comments above them. offers: settings below them that a
    person may take, as comments. is_entry: it is an entry of a list, `[[name]]`.
    """

    name: str
    lines: list[tuple[str, Any, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    offers: list[tuple[str, Any]] = field(default_factory=list)
    is_entry: bool = False

    def add(self, name: str, value: Any, comment: str = "") -> None:
        """Adds a setting."""
        self.lines.append((name, value, comment))


def text_of(sections: Sequence[Section], *, head: Sequence[str]) -> str:
    """Returns a TOML text of some sections, with comments at its head. Raises ConfigError for what TOML cannot hold."""
    return "\n".join([*_comments(head), *(line for section in sections for line in _section(section))]) + "\n"


def document_of(sections: Sequence[Section]) -> dict[str, Any]:
    """Returns what a TOML reader has to make of the text of some sections."""
    document: dict[str, Any] = {}
    for section in sections:
        at = document
        *above, last = section.name.split(".") if section.name else [""]
        for name in above:
            at = at.setdefault(name, {})
        values = {name: value for name, value, _ in section.lines}
        if not last:
            at.update(values)
        elif section.is_entry:
            at.setdefault(last, []).append(values)
        else:
            at.setdefault(last, {}).update(values)
    return document


def _section(section: Section) -> Iterator[str]:
    if section.name:
        yield ""
        yield f"[[{section.name}]]" if section.is_entry else f"[{section.name}]"
    yield from _comments(section.notes)
    for name, value, comment in section.lines:
        yield from _line(f"{name} = {value_of(value)}", comment)
    yield from (f"# {name} = {value_of(value)}" for name, value in section.offers)


def _line(setting: str, comment: str) -> Iterator[str]:
    if not comment:
        yield setting
        return
    shown = f"# {printable(comment)}"
    width = max(44, len(setting) + 2)
    if width + len(shown) > _WIDTH:
        yield from _comments([comment])
        yield setting
    else:
        yield f"{setting:{width}}{shown}"


def _comments(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        lines = textwrap.wrap(printable(text), _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
        yield from (f"# {line}" for line in lines or [""])


def python_line(code: str) -> str:
    """Returns a command that runs some Python, quoted as a person would where a shell takes that."""
    return f"python -c {shlex.quote(code)}" if set(code) & set('"$`\\!') else f'python -c "{code}"'


def value_of(value: Any) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_of, value))}]"
    return str(value).lower()  # also true, 1e-05, inf and nan


def _string(text: str) -> str:
    """Returns a basic string; what a person would not see is escaped."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise ConfigError(
            f"{text!r} is not UTF-8, which is all that TOML can hold; rename it, or name a link to it (ln -s)"
        ) from err
    return f'"{"".join(c if c.isprintable() and c not in _SHORT else _escaped(c) for c in text)}"'


def _escaped(character: str) -> str:
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}")


Setting = tuple[str, Any, str]
"""Name, value and comment."""
_LANGUAGES = 8
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")


class RowMeaning(Protocol):
    """The meaning of rows for a config: its sections, its settings, and what a model makes of it.

    name: in the document of `--json`. mixed: settings of `[mixture]` where such data stands beside other data.
    is_alone: it stands beside none. may_miss: it may stand without its texts, which are then looked for.
    """

    name: str
    mixed: tuple[Setting, ...] = ()
    is_alone: bool = False
    may_miss: bool = False

    def check(self, model: Model | None) -> None:
        """Raises ConfigError where the data needs a model's folder and there is none, or the model takes other data."""

    def sections(self, made: Draft) -> list[Section]:
        """Returns the sections of steps and plan; adds to `[source]` what they ask of it."""

    def check_rows(self, found: Candidate, config: Config) -> None:  # noqa: ARG002
        """Raises ManifestError for rows that a build would refuse all data for."""
        return

    def try_steps(self, made: Draft, recipe: Recipe) -> bool:  # noqa: ARG002
        """Opens the steps that classes of transformers are in as a build does, and notes what they give.

        Returns whether a config can be built as it is; False where a setting was added, and it is to be tried again.
        Raises OutputError or UnstorableError for what cannot be stored, ConfigError where nothing helps.
        """
        return True

    def trains(self, found: Candidate, model: Model) -> bool:
        """Returns whether `forebay train` can train a model on what was found, as far as config.json says it."""

    def not_learnt(self, found: Candidate, model: Model) -> str:
        """Returns why `forebay train` does not train a model on what was found, and what to do."""


@dataclass(slots=True)
class Candidate:
    """One way to read the data.

    kind, manifests: of `[source]`. meaning: what its rows are. label: what it is, for a person. score: the likelier the
    more. name: of its first file. look: looks closer, asks what is open, and adds all that follows.

    source: other settings of `[source]`; a Path becomes relative to the config. columns: of `[source.columns]`, those
    with other names than usual. noun: what is counted, `wav files`. count: how many of it, about so many where not
    `is_exact`. sounds, pictures, films: what some headers say. texts: some transcripts, or the words of some
    conversations. languages: how often each was met. others: columns that nothing takes. images_a_row, videos_a_row: of
    some rows. notes: comments for the file, in sentences. audio: settings of `[audio]` that the data itself asks for.
    prompt: what is read beside images, a `text.prompt`. classes: how often each class was met. has_all_classes: no
    class is missing there. unread: what may hold the texts and is not read. are_pairs: rows have an answer to reject.
    """

    kind: str
    manifests: tuple[Path, ...]
    meaning: RowMeaning
    label: str
    score: float
    look: Callable[[Candidate, Chooser], None]
    name: str = field(default="", kw_only=True)
    source: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    noun: str = "samples"
    count: int = 0
    is_exact: bool = True
    sounds: Sounds = field(default_factory=Sounds)
    pictures: Pictures = field(default_factory=Pictures)
    films: Films = field(default_factory=Films)
    texts: list[str] = field(default_factory=list)
    images_a_row: list[int] = field(default_factory=lambda: [1])
    videos_a_row: list[int] = field(default_factory=list)
    languages: Counter[str] = field(default_factory=Counter)
    others: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    audio: dict[str, Any] = field(default_factory=dict)
    prompt: str = "chat"
    classes: Counter[str] = field(default_factory=Counter)
    has_all_classes: bool = False
    has_text: bool = True
    has_labels: bool = False
    are_pairs: bool = False
    unread: tuple[str, ...] = ()

    @property
    def hours(self) -> float:
        """The hours of sound, estimated."""
        seconds = self.sounds.seconds
        return sum(seconds) / len(seconds) * self.count / 3600 if seconds else 0.0

    def is_like(self, other: Candidate) -> bool:
        """Says whether one config can read both: the same kind, settings and columns."""
        names = ("kind", "meaning", "prompt", "columns", "audio", "source", "are_pairs")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def with_rows_of(self, other: Candidate) -> Candidate:
        """Returns this one and another one that one config can read as one."""
        added = (
            "count",
            "sounds",
            "pictures",
            "films",
            "texts",
            "images_a_row",
            "videos_a_row",
            "languages",
            "classes",
        )
        return replace(
            self,
            **{name: getattr(self, name) + getattr(other, name) for name in added},
            manifests=tuple(dict.fromkeys((*self.manifests, *other.manifests))),
            is_exact=self.is_exact and other.is_exact,
            has_all_classes=self.has_all_classes and other.has_all_classes,
            noun=self.noun if self.noun == other.noun else "samples",
            notes=list(dict.fromkeys((*self.notes, *other.notes))),
            has_text=self.has_text or other.has_text,
        )

    def take_recordings(self, tables: Sequence[TableHead], columns: Mapping[str, str | None]) -> None:
        """Takes texts, languages and further columns of tables of recordings. columns: by role."""
        table, text = tables[0], columns["text"]
        self.columns = self._named(columns)
        self.texts = table.strings(text)
        self.languages = languages_of(tables, columns["language"])
        self.others = _others(table, {*columns.values(), "prompt", *IDS, *DURATIONS})
        self.has_text = text is not None

    def take_images(self, table: TableHead, prompt: str, columns: Mapping[str, str | None]) -> list[Row]:
        """Takes what is read beside the images of a table, and returns the rows that hold that. columns: by role."""
        said = [(row, words) for row in table.rows if (words := _words_beside(row, prompt, columns)) is not None]
        self.prompt, self.noun = prompt, BESIDE[prompt].noun
        self.columns = self._named(columns)
        self.texts = [words for _, words in said if words]
        self.others = _others(
            table, {*columns.values(), *WITH_MESSAGES, *WITH_QUESTION, *FIELDS_BESIDE, *IMAGES, *NAMED_BY[VIDEOS]}
        )
        self.are_pairs = prompt == "chat" and are_pairs(table.rows)
        if label := columns.get("label"):
            self.classes = classes_of(table, label)
            self.classes.update(dict.fromkeys(table.classes.get(label, ()), 0))
            self.has_all_classes = label in table.classes or (table.is_exact and table.num_rows == len(table.rows))
        return [row for row, _ in said]

    def take_videos(self, folder: Path, rows: Sequence[Row]) -> None:
        """Takes the videos of rows of conversations. folder: of their names."""
        named = [videos_of_row(row) for row in rows] if self.prompt == "chat" else []
        self.films = Films.of(spread([folder / name for names in named for name in names if isinstance(name, str)]))
        self.videos_a_row = [len(names) for names in named]

    def _named(self, columns: Mapping[str, str | None]) -> dict[str, str]:
        return unlike_usual(columns) if SOURCE_KINDS[self.kind].has_columns else {}


def _words_beside(row: Row, prompt: str, columns: Mapping[str, str | None]) -> str | None:
    """Returns the words that are read of a row; None of a row without the conversation that is wanted."""
    if prompt == "chat":
        return words_of(row, columns)
    text = row.get(columns.get("text") or "")
    return text if isinstance(text, str) else ""


def _others(table: TableHead, taken: Collection[str | None]) -> tuple[str, ...]:
    return tuple(name for name in table.names if name not in taken and table.values(name))


def unlike_usual(columns: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the columns of `[source.columns]` that have another name than they have when nothing is said."""
    usual = {role: IDS if role == "id" else (role,) for role in columns}
    asked, answered = columns.get("question"), columns.get("answer")
    if ANSWERS.get(asked or "") == answered:  # read by these names, with what stands beside them
        usual |= {"question": (asked or "",), "answer": (answered or "",)}
    return {role: name for role, name in columns.items() if name and name not in usual[role]}


def files_noun(names: Sequence[str], other: str) -> str:
    """Returns what files of some names are called: `wav files`, or `other` where they are of several forms."""
    kinds = {extension_of(name)[1:] for name in names}
    return f"{kinds.pop()} files" if len(kinds) == 1 else other


def facts(found: Candidate) -> str:
    """Returns one line on what was found: how many of what, how long, which languages, which sizes."""
    parts = [counted(found.count, found.noun, is_exact=found.is_exact)]
    parts += [*found.sounds.facts(found.hours), *found.pictures.facts(), *found.films.facts()]
    if found.classes.total():
        number = len(found.classes)
        parts.append(f"{number:,} class{'es' * (number > 1)} ({_shares(found.classes)})")
    if found.languages:
        parts.append(f"languages {_shares(found.languages)}")
    return ", ".join(parts)


def problems(found: Candidate) -> list[str]:
    """Returns what a person should know of the data before a build."""
    bad = [
        f"{each.unreadable} of {count + each.unreadable} {each.noun} that were looked at cannot be read{each.then}."
        for each, count in (
            (found.sounds, len(found.sounds.seconds)),
            (found.pictures, len(found.pictures.sizes)),
            (found.films, len(found.films.seen)),
        )
        if each.unreadable
    ]
    return [*found.notes, *bad]


def _shares(counts: Counter[str]) -> str:
    """Returns the commonest values and their shares: `hi 60 %, ta 40 %`."""
    total = counts.total()
    return first_of([f"{name} {100 * count / total:.0f} %" for name, count in counts.most_common()], _LANGUAGES)


@dataclass(slots=True, kw_only=True)
class Draft:
    """A config to be written, while its sections come together. trains: whether `forebay train` can train on it.

    head: comments on top. said: what was decided and a person should hear too.
    """

    name: str
    out: Path
    found: Candidate
    model: Model | None = None
    weights: str | None = None
    trains: bool = False
    sections: list[Section] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def section(self, name: str) -> Section:
        """Returns the section of a name."""
        return next(section for section in self.sections if section.name == name)

    def note_form(self, name: str, form: BatchForm) -> None:
        """Notes at a section what its step gives, and how its batches are beside others."""
        section = self.section(name)
        has_codes = any(field.table is not None for field in form.stored)
        codes = "; floats as codes and a table of their values, bit for bit" if has_codes else ""
        names = ", ".join(field.name for field in form.fields)
        note = f"{form.made_by} gives {names}{codes}. Batches beside those that it makes itself: {form.promise}."
        if note not in section.notes:
            section.notes.append(note)
            said = f"{note} docs/vision.md says what that means."
            if form.promise.kind == "alone" and said not in self.found.notes:
                self.found.notes.append(said)

    def relative(self, path: Path) -> str:
        """Returns a path as the config writes it: relative to the config's folder; a model of the Hub by its id."""
        if (model := model_of(path)) is not None:
            return str(model)
        text = os.path.relpath(path, self.out.parent)
        return f"./{text}" if _SCHEME.match(text) else text
