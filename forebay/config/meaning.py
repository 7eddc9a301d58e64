"""The meaning of a config's rows: one of `MEANINGS`, or a class of the user whose body says the same facts.

    class Dialogues:
        columns = ("audio", "text")     # names of [source.columns] that are read
        groups = ("audio", "image")     # what a row has items of

Nothing here imports that class: these values are read as they are written, so that a key costs no trust.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forebay.config.code import Asker, not_allowed, source_of, spec_problem, written
from forebay.config.data import MEANINGS, MeaningFacts, SourceColumns
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.visible import did_you_mean

ASKER = Asker("source.meaning", "FB144")
_GROUPS = ("audio", "image")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnMeaning:
    """A class of the user that says what rows are. digest: sha256 of the file, which is in the key."""

    facts: MeaningFacts
    path: Path
    name: str
    digest: str

    def document(self) -> dict[str, Any]:
        """Returns what the recipe key is made of."""
        return {"class": self.name, "sha256": self.digest}


def meaning_problem(config: Config) -> str | None:
    """Returns what is wrong with `source.meaning` as it is written; reads no file."""
    name = config.source.meaning
    if name is None or name in MEANINGS:
        return None
    if ":" not in name:
        near = did_you_mean(name, MEANINGS)
        return f'{ASKER.setting} is "{name}", wanted one of {", ".join(MEANINGS)}, or a class: "file.py:Class"{near}'
    if problem := spec_problem(name, what="class"):
        return f"{ASKER.setting}: {problem}"
    return None if config.run.allow_code else not_allowed(ASKER.setting, name)


def own_meaning(config: Config) -> OwnMeaning | None:
    """Returns the class of the user that says what rows are; None where one of `MEANINGS` does.

    Reads the file and runs nothing. Raises ConfigError for what is no regular file at or below the config's folder,
    and for a class whose values cannot be read as they are written.
    """
    if config.meaning in MEANINGS:
        return None
    if (problem := meaning_problem(config)) is not None:
        raise ConfigError(problem, code="FB144")
    folder, (file, _, name) = Path(config.path).parent, config.meaning.rpartition(":")
    content = source_of(folder / file, folder, ASKER)
    found = written(content, folder / file, name, ("columns", "groups"), ASKER)
    columns = _names(found.get("columns"), {each.name for each in fields(SourceColumns)})
    groups = _names(found.get("groups"), {*_GROUPS})
    if columns is None or groups is None:
        raise ConfigError(
            f"{ASKER.setting}: the body of class {name} of {folder / file} says what its rows are: "
            'columns = ("audio", "text") of the names of [source.columns], and groups = ("audio",), of "audio" and '
            '"image"',
            code="FB144",
        )
    facts = MeaningFacts(name=config.meaning, target=config.meaning, columns=columns, groups=groups)
    digest = hashlib.sha256(content).hexdigest()
    return OwnMeaning(facts=facts, path=folder / file, name=name, digest=digest)


def facts_of(config: Config) -> MeaningFacts:
    """Returns what is known of the meaning of a config's rows; raises as `own_meaning`."""
    own = own_meaning(config)
    return MEANINGS[config.meaning] if own is None else own.facts


def _names(value: object, known: set[str]) -> tuple[str, ...] | None:
    """Returns the names that a value lists; None where it lists another one, or one twice."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name in known for name in value):
        return None
    return tuple(value) if len({*value}) == len(value) else None
