"""Rows that are what a class of the user says: a file beside the config, which is run where rows are read.

class Dialogues:
    columns = ("audio", "image", "text")   # names of [source.columns] that are read
    groups = ("audio", "image")            # what a row has items of

    def row(self, record):
        return {"text": record["text"], "audio": record["audio"], "image": record["photos"]}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from forebay.config.code import ASKER, facts_of, own_meaning, same_source
from forebay.config.tree import Config
from forebay.errors import ConfigError, SampleError
from forebay.rows.manifest import UNLOCATED, Meaning, MeantRow, MediaPlace, Record, meaning_named, storable
from forebay.rows.meanings.canonical_chat import decoded_fields
from forebay.rows.meanings.recordings import Recorded
from forebay.rows.named_files import path_stem
from forebay.rows.readers.json_lines import JsonError, seconds_of, string_of
from forebay.rows.windows import WindowRules
from forebay.steps.run_code import CodeError, described, loaded
from forebay.store.layout import Group
from forebay.visible import an

_TEXTS = ("text", "language", "prompt", "id")


@dataclass(frozen=True)
class OwnRows(Meaning):
    """Rows that a class of the user makes of records. digest: sha256 of its file, which is in the key."""

    path: Path
    name: str
    digest: str
    in_fields: ClassVar[bool] = True
    bad: ClassVar[str | None] = "meaning_failed"

    def row(self, record: Record, *, unknown: set[str], home: Path) -> MeantRow:  # noqa: ARG002  it may take any field
        fields = decoded_fields(record)
        found = self._returned(
            dict(fields)
            if record.media is None
            else {**fields, **{group: [*places] for group, places in record.media.items()}}
        )
        try:
            return self._meant(found)
        except JsonError as err:
            raise _failed(f"{self._label}: {err}") from err

    def _meant(self, found: Mapping[str, Any]) -> MeantRow:
        items = {group: self._places(group, found.get(group)) for group in self.facts.groups}
        given = found.get("id")
        text, language, prompt = (string_of(found, (name,)) for name in _TEXTS[:-1])
        if given is not None and not (isinstance(given, (str, int)) and str(given)):
            raise self._wrong("id", given, "a text or an integer")
        own = items[self.own][0] if self.own is not None else None
        return MeantRow(
            text=text,
            items=items,
            sample_id=None if given is None else string_of({"id": str(given)}, ("id",)),
            name=None if own is None else path_stem(own.member or own.path or "") or None,
            language=language,
            prompt=prompt,
            seconds=0.0 if self.own is None else seconds_of(found, ("duration_s",)),
        )

    def _returned(self, fields: dict[str, Any]) -> Mapping[str, Any]:
        instance = _made(self.path, self.name, self.digest)
        try:
            found = instance.row(fields)
        except (KeyboardInterrupt, MemoryError, SampleError):
            raise
        except BaseException as err:
            raise _failed(f"{self._label} raised {described(err)}") from err
        if not isinstance(found, Mapping):
            raise _failed(f"{self._label} returned {an(type(found).__name__)}, wanted a dict")
        known = {*_TEXTS, "duration_s", *self.facts.groups}
        if others := sorted(str(name) for name in found.keys() - known):
            raise _failed(f"{self._label} returned {others}, wanted some of {sorted(known)}")
        return found

    def _places(self, group: Group, found: Any) -> list[MediaPlace]:
        several = found if isinstance(found, list) else [] if found is None else [found]
        if group not in self.facts.lists and len(several) != 1:
            raise self._wrong(group, found, "one item")
        return [self._place(group, each) for each in several]

    def _place(self, group: Group, found: Any) -> MediaPlace:
        match found:
            case MediaPlace():
                return found
            case str():
                return MediaPlace(string_of({group: found}, (group,)))
            case (str(tar), str(member)):
                place = string_of({group: tar}, (group,))
                return MediaPlace(place, storable(member.removeprefix("./")), size=UNLOCATED)
        raise self._wrong(group, found, "the name of a file, (tar, member) or what the record has")

    def _wrong(self, name: str, found: Any, wanted: str) -> SampleError:
        return _failed(f"{self._label} returned {name} as {found!r:.80}, wanted {wanted}")

    @property
    def _label(self) -> str:
        return f"{self.path.name}:{self.name}"


def _failed(message: str) -> SampleError:
    return SampleError("meaning_failed", message)


@functools.lru_cache(maxsize=8)
def _made(path: Path, name: str, digest: str) -> Any:
    """Returns an object of the class in a file of these bytes. Raises ConfigError where there is none."""
    where = f"{ASKER.setting}: class {name} of {path}"
    try:
        made = loaded(same_source(path, digest, ASKER), str(path), name, what="class")()
    except CodeError as err:
        raise ConfigError(f"{ASKER.setting}: {path}: {err}; correct the file", code="FB144") from err
    except (KeyboardInterrupt, MemoryError, ConfigError):
        raise
    except BaseException as err:
        raise ConfigError(f"{where} cannot be made: it raised {described(err)}", code="FB144") from err
    if not callable(getattr(made, "row", None)):
        raise ConfigError(f"{where} has no method row(record); add it", code="FB144")
    return made


def meaning_of(config: Config) -> Meaning:
    """Returns the meaning of a config's rows. Raises ConfigError for a class that is none; runs nothing of it."""
    own = own_meaning(config)
    if own is not None:
        return OwnRows(own.facts, own.path, own.name, own.digest)
    found, columns = meaning_named(config.meaning, facts_of(config)), config.source.columns
    if not config.source.has_segments or not isinstance(found, Recorded):
        return found
    said = {} if config.text is None else config.text.settings
    shares = {name: float(said.get(name, 0.0)) for name in ("previous_text", "no_speech")}
    timestamps = said.get("timestamps", False) is True
    windows = WindowRules(timestamps=timestamps, needs_text=config.text is not None, **shares)
    return replace(found, segments=(columns.start, columns.end, columns.channel), windows=windows)
