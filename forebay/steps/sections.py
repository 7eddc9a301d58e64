"""Sections of a config: what a group of steps is of one, and `[source]`, which decides which rows are samples.

A group says itself what is wrong with its section. Of `[source]` it is said here what kinds and meanings do not have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, ClassVar, Self

from forebay.config.code import facts_of, meaning_problem, own_meaning
from forebay.config.data import MEANINGS, SOURCE_KINDS, SourceColumns, SourceConfig
from forebay.config.tree import Config
from forebay.steps.step import Step, TextStep
from forebay.steps.table import audio_step
from forebay.store.inputs import inputs_problem
from forebay.store.layout import Group
from forebay.store.source import SECTIONS
from forebay.visible import did_you_mean


class GroupRecipe(ABC):
    """The steps of one group of fields. A new group is a class of this form; nothing asks which group it is.

    section: of a config, with the values of `settings`.
    """

    name: ClassVar[Group]
    section: ClassVar[str]
    settings: ClassVar[type]

    @classmethod
    def own_names(cls) -> set[str]:
        """Returns the fields of the section itself, not those of its step."""
        return {field.name for field in fields(cls.settings) if field.name != "settings"}

    @classmethod
    @abstractmethod
    def problems(cls, values: Mapping[str, Any]) -> list[str]:
        """Returns what is wrong with the section by itself, by dotted names. values: as the file has them."""

    @classmethod
    @abstractmethod
    def contradictions(cls, config: Config) -> list[str]:
        """Returns what the sections of a config say that the steps of the group cannot do together."""

    @classmethod
    @abstractmethod
    def of(cls, config: Config) -> Self | None:
        """Returns the group of a config without problems; None where samples have no such items."""

    @property
    @abstractmethod
    def steps(self) -> tuple[Step, ...]:
        """The steps, in their order: their identities are in the keys of the group's shards."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Returns what the recipe key is made of: settings by name, contents instead of paths."""

    @property
    def made_with(self) -> dict[str, str]:
        """Packages that make values, beside forebay's own, and their versions; in no key."""
        return {}

    @property
    def libraries(self) -> tuple[str, ...]:
        """Modules that the steps import when they make values. A hint: one that is missing is imported when needed."""
        return tuple(name for step in self.steps for name in step.libraries)

    def without_code(self) -> Self:
        """Returns the group without the functions of the user; for those who only look, and run no code."""
        return self

    def check(self, text: TextStep, kept: Collection[str]) -> None:  # noqa: B027  most steps are trusted
        """Returns if a build may trust the steps beside a text and kept columns. Raises ConfigError."""


LISTING_VERSION = 3
"""Bumped when the same sources and filters give other rows."""

CAPTIONS_VERSION = 1
"""Bumped when the same `[source.captions]` gives rows other texts."""
_FIELDS = (
    *("min_duration_s", "max_duration_s", "overlong", "duration_tolerance", "languages", "max_samples", "exclude"),
    *("max_sample_bytes", "max_pixels", "rows"),
)


def source_document(config: Config) -> dict[str, Any]:
    """Returns the settings of `[source]` that decide which rows are samples, in their one form."""
    source = config.source
    settings = {**asdict(source), **_plain_filters(source)}
    return {
        **{name: settings[name] for name in ("kind", "split", *_FIELDS)},
        **_columns_document(config),
        **({"keep_columns": sorted(source.keep_columns)} if source.keep_columns else {}),
        **({} if source.captions is None else {"captions": {**asdict(source.captions), "version": CAPTIONS_VERSION}}),
        **({} if source.window_s is None else {"window_s": float(source.window_s)}),
        **({"more_images": sorted(source.more_images)} if source.more_images else {}),
        **({"languages_from_folders": True} if source.languages_from_folders else {}),
        **_meaning_document(config),
        "version": LISTING_VERSION,
    }


def _columns_document(config: Config) -> dict[str, str]:
    columns, default = config.source.columns, SourceColumns()
    named = {name: getattr(columns, name) for name in columns_read(config)}
    if config.meaning == "texts":  # whose files of lines had no columns before
        named = {name: column for name, column in named.items() if column != getattr(default, name)}
    return {f"{name}_column": column for name, column in named.items() if column is not None}


def _meaning_document(config: Config) -> dict[str, Any]:
    """Returns the meaning of the rows, where it is another one than a config of these sections has anyway."""
    if (own := own_meaning(config)) is not None:
        return {"meaning": own.document()}
    return {} if config.meaning == config.default_meaning else {"meaning": config.meaning}


def _plain_filters(source: SourceConfig) -> dict[str, Any]:
    """One form for filters that let the same rows through: 30 and 30.0, ids in any order, languages in any case too."""
    limit, tolerance = source.max_duration_s, source.duration_tolerance
    languages = source.languages
    return {
        "min_duration_s": float(source.min_duration_s),
        "max_duration_s": None if limit is None else float(limit),
        "duration_tolerance": None if tolerance is None else float(tolerance),
        "languages": None if languages is None else sorted({language.lower() for language in languages}),
        "exclude": sorted(set(source.exclude)),
    }


def columns_read(config: Config) -> tuple[str, ...]:
    """Returns the columns that a config's kind of source reads by name; in the key as `audio_column`."""
    kind = SOURCE_KINDS[config.source.kind]
    # A folder of images is no table.
    is_table = kind.has_columns and not (kind.images and "image" in facts_of(config).groups)
    if is_table or facts_of(config).name != "recordings":
        return facts_of(config).columns if is_table else ()
    return kind.names


def source_problems(config: Config) -> list[str]:
    """Returns what the kind of source, or the meaning of its rows, does not have that the config says."""
    source, subjects = config.source, {*config.subjects}
    if (problem := meaning_problem(config)) is not None:
        return [problem]
    called = " and ".join(config.subjects)
    kinds = [name for name, kind in SOURCE_KINDS.items() if subjects <= {*kind.holds}]
    if source.kind not in kinds:
        hint = did_you_mean(source.kind, kinds)
        return [f'source.kind is "{source.kind}", for {called} wanted one of {", ".join(kinds)}{hint}']
    if source.kind == "python" and (problem := inputs_problem(config)) is not None:
        return [problem]
    if found := _groups_problems(config):
        return found
    # What is not in the key must not be read either: a column that is in no key has its default name.
    known = columns_read(config)
    return _table_problems(config, called) + [
        f'source.columns.{name} is "{column}", and source.kind = "{source.kind}" for {called} reads '
        f"{'only the columns ' + ', '.join(known) if known else 'no columns by name'}; leave it out"
        for name, column in asdict(source.columns).items()
        if name not in known and column != getattr(SourceColumns(), name)
    ]


def _groups_problems(config: Config) -> list[str]:
    """Returns where the sections of a config want items that its rows do not have."""
    facts, kind, audio = facts_of(config), SOURCE_KINDS[config.source.kind], config.audio
    wanted = [f"[{SECTIONS[group]}]" for group in facts.groups]
    rows = f'source.meaning is "{facts.name}", whose rows have items of {" and ".join(wanted) or "no group"}'
    if len(config.subjects) > 1 and len(wanted) < len(config.subjects):
        return [f"give one of [audio] and [vision]: {rows}"]
    if audio is not None and (step := audio_step(audio.features)).has_audio == (kind.meaning == "texts"):
        return [
            f'source.kind is "{config.source.kind}" and audio.features is "{step.name}"; text alone needs '
            'kind = "text" and features = "none"'
        ]
    has_sound = audio is not None and kind.meaning != "texts"
    given = [*(["[audio]"] if has_sound else []), *(["[vision]"] if config.vision else [])]
    others, missing = ([name for name in one if name not in two] for one, two in ((given, wanted), (wanted, given)))
    return [f"{rows}; {f'add {missing[0]}' if missing else f'leave out {others[0]}'}"] if others else []


def _table_problems(config: Config, called: str) -> list[str]:
    """Returns which settings of tables a config has whose kind of source takes none."""
    source, groups, found = config.source, facts_of(config).groups, _media_problems(config)
    for name in ("texts", "languages_from_folders"):
        if getattr(source, name) and source.kind != "folder":
            found.append(f'source.{name} is for source.kind = "folder", and it is "{source.kind}"; leave it out')
    if source.kind == "folder" and config.meaning == "conversations" and "image" not in groups:
        found.append('source.kind is "folder", which has recordings and no conversations; list them in JSON lines')
    elif source.kind == "folder":
        found += (_pictures_problems if "image" in groups else _recordings_problems)(config)
    keeps = {name: kind for name, kind in SOURCE_KINDS.items() if {*config.subjects} <= {*kind.keeps}}
    if source.keep_columns and source.kind not in keeps:
        wanted = " or ".join(f'"{name}"' for name in keeps)
        found.append(
            f'source.keep_columns and source.captions.column are not read from source.kind = "{source.kind}", '
            f"{f'wanted {wanted}' if keeps else f'for {called} no kind keeps columns yet'}; leave them out"
        )
    return found


def _media_problems(config: Config) -> list[str]:
    source, groups, found = config.source, facts_of(config).groups, []
    named = ("table", "kaldi", "nemo", "lhotse")
    if source.audio_dir is not None and source.kind not in named:
        wanted = ", ".join(named)
        found.append(f'source.audio_dir is for source.kind {wanted}, and it is "{source.kind}"; leave it out')
    elif source.audio_dir is not None and "audio" not in groups:
        found.append("source.audio_dir is for recordings; name the folder of the images as source.image_dir")
    if source.image_dir is not None and "image" not in groups:
        found.append("source.image_dir is for images; name the folder of the recordings as source.audio_dir")
    elif source.image_dir is not None and source.kind not in ("jsonl", "table"):
        found.append(
            f'source.image_dir is for source.kind = "table" or "jsonl", and it is "{source.kind}"; leave it out'
        )
    if source.rows is not None and source.kind != "text" and not {*groups} & {*facts_of(config).lists}:
        found.append('source.rows is only for a config with [vision], and for source.kind = "text"')
    return found


def _recordings_problems(config: Config) -> list[str]:
    """Returns what a folder of recordings does not have."""
    source, found = config.source, []
    if source.keep_columns and source.texts is None:
        found.append(
            "source.captions.column and source.keep_columns are columns of source.texts, and there is none; name the "
            "table, or leave them out"
        )
    unread = ("features", "labels", "start", "end", "channel")
    given = [name for name in unread if getattr(source.columns, name) is not None]
    return [*found, *(f'source.columns.{name} is not for source.kind = "folder"; leave it out' for name in given)]


def _pictures_problems(config: Config) -> list[str]:
    """Returns what a folder of images does not have."""
    source, found = config.source, []
    if config.meaning == "conversations":
        prompts = [facts.prompt for facts in MEANINGS.values() if facts.prompt and facts.name != config.meaning]
        wanted = " or ".join(f'"{prompt}"' for prompt in prompts)
        found.append(f'source.kind is "folder", which has images and no conversations; set [text] prompt = {wanted}')
    return found + [
        f"source.{name} is for recordings, and the first folder below source.manifest is the class of an image, or "
        f"NAME.txt beside it its text; leave {name} out"
        for name in ("texts", "languages_from_folders")
        if getattr(source, name)
    ]
