"""Code that a config names: a regular Python file at or below the config's folder, read as bytes and never imported.

Nothing here runs the file in this process: what makes keys needs its bytes alone. `ask` starts a process of its own.

The meaning of a config's rows is one of `MEANINGS`, or such a class, whose body says the same facts. They are read as
they are written, so that a key costs no trust:

    class Dialogues:
        columns = ("audio", "text")     # names of [source.columns] that are read
        groups = ("audio", "image")     # what a row has items of
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forebay.config.data import MEANINGS, MeaningFacts, SourceColumns
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.visible import did_you_mean

_MAX_BYTES = 1 << 20


class Asker(NamedTuple):
    """The setting of a config that names code, and the code of errors about it."""

    setting: str
    code: str

    def refused(self, what: str) -> ConfigError:
        """Returns the error for what is wrong with the setting."""
        return ConfigError(f"{self.setting}: {what}", code=self.code)


def not_allowed(setting: str, spec: str) -> str:
    """Returns what to say of a setting that is code, in a config that allows none."""
    return (
        f'{setting} has "{spec}", which is code, and run.allow_code is false; if you trust that code, write '
        "allow_code = true under [run] in the config file itself (--set cannot)"
    )


def spec_problem(spec: str, *, what: Literal["function", "class"] = "function") -> str | None:
    """Returns what is wrong with a `file.py:name` as it is written; None where nothing is."""
    file, _, name = spec.rpartition(":")
    shown = json.dumps(spec)
    if not file.endswith(".py") or not name.isidentifier():
        return f'{shown} is no "file.py:{what}"; name a Python file and a {what} of it'
    parts = file.split("/")
    if "://" in file or ":" in file or "\\" in file or not file.isprintable():
        return f"{shown} names no file beside the config; name one, without a URL"
    if file.startswith("/") or ".." in parts or "" in parts:
        return f"{shown} leads out of the config's folder; put the file beside the config"
    return None


def source_of(path: Path, folder: Path, asker: Asker) -> bytes:
    """Returns the bytes of a Python file at or below a folder, below which no part of the path is a link.

    Raises ConfigError for a link, a pipe, a folder, a device, and for more than a mebibyte.
    """
    require_plain(path, folder, asker)
    with opened(path, asker) as file:
        try:
            content: bytes = file.read(_MAX_BYTES + 1)
        except OSError as err:
            raise _unreadable(path, err, asker) from err
    if len(content) > _MAX_BYTES:
        raise asker.refused(f"{path} has more than {_MAX_BYTES} bytes; name a smaller file")
    return content


def same_source(path: Path, digest: str, asker: Asker) -> bytes:
    """Returns the bytes of a file whose sha256 is in the key. Raises ConfigError where the file holds others."""
    content = source_of(path, path.parent, asker)
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise ConfigError(
            f"{path} has changed: its sha256 was {digest[:16]} and is {found[:16]}; run it again", code=asker.code
        )
    return content


def written(content: bytes, path: Path, class_name: str, names: Sequence[str], asker: Asker) -> dict[str, object]:
    """Returns the values of some names as the body of a class has them, without running it; of absent names nothing.

    path: of the file, for messages. Raises ConfigError for what is no Python, has no such class, or no plain values.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # whoever runs the file is warned
            body = ast.parse(content, filename=str(path)).body
    except SyntaxError as err:
        raise asker.refused(f"{path}, line {err.lineno}: {err.msg}; correct the file") from err
    except (ValueError, RecursionError, MemoryError) as err:
        why = str(err) or "its parts lie too deep in one another"
        raise asker.refused(f"{path} is no Python: {why}; correct the file") from err
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    if class_name not in classes:
        raise asker.refused(f"{path} has no class {class_name}; its classes: {', '.join(classes) or 'none'}")
    found = {name: value for node in classes[class_name].body for name, value in _assigned(node) if name in names}
    return {name: _literal(value, path, names, asker) for name, value in found.items()}


def _assigned(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        return [(node.target.id, node.value)] if isinstance(node.target, ast.Name) else []
    if isinstance(node, ast.Assign):
        return [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
    return []


def _literal(node: ast.expr, path: Path, names: Sequence[str], asker: Asker) -> object:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as err:
        raise asker.refused(
            f"{path}, line {node.lineno}: {' and '.join(names)} are read without running the file; write them as plain "
            "values"
        ) from err


def digest_of(path: Path, folder: Path, asker: Asker) -> str:
    """Returns the sha256 of a file of any size that code depends on; the rules of `source_of` hold for its place."""
    require_plain(path, folder, asker)
    with opened(path, asker) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_plain(path: Path, folder: Path, asker: Asker) -> None:
    """Raises ConfigError where a part of a path below a folder is a link, or where nothing is there."""
    try:
        for part in [path, *path.parents]:
            if part == folder:
                return
            if stat.S_ISLNK(part.lstat().st_mode):
                raise asker.refused(f"{part} is a link; code is a regular file beside the config")
    except OSError as err:
        raise _unreadable(path, err, asker) from err


def opened(path: Path, asker: Asker) -> Any:
    """Returns a regular file, opened as bytes. Raises ConfigError for a pipe, a folder, a device or a link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise _unreadable(path, err, asker) from err
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise asker.refused(f"{path} is no regular file; name a Python file")
    return os.fdopen(descriptor, "rb")


def _unreadable(path: Path, err: OSError, asker: Asker) -> ConfigError:
    return asker.refused(f"cannot read {path}: {err.strerror}; code lies beside the config")


def ask(
    program: Sequence[str],
    question: Mapping[str, Any],
    *,
    seed: str,
    timeout_s: float | None,
    called: str,
    asker: Asker,
    work: str = "",
) -> dict[str, Any]:
    """Returns what a program says to a question, both JSON, in a Python process with this seed of `hash`.

    Neither the current folder nor that of the program is on its `sys.path`. called: the user's code, in messages.
    work: to be done within `timeout_s`. Raises ConfigError where it does not end in time or gives no answer.
    """
    where = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(
            [sys.executable, "-P", *program],
            input=json.dumps(question).encode("ascii"),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": where, "PYTHONHASHSEED": seed},
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as err:
        raise ConfigError(
            f"{called} did not end with {work} in {timeout_s:.0f} s; correct it", code=asker.code
        ) from err
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError as err:
        last = " ".join(done.stderr.decode("utf-8", "replace").split())[-200:]
        raise ConfigError(
            f"{called} ended its process with exit status {done.returncode}: {last or 'no message'}; correct the file",
            code=asker.code,
        ) from err
    return found


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
    """Returns the class of the user that says what rows are, whose file is read; None where one of `MEANINGS` does.

    Raises ConfigError for no regular file at or below the config's folder, and for values that are not plain.
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
        raise ASKER.refused(
            f'the body of class {name} of {folder / file} says what its rows are: columns = ("audio", "text") of '
            'the names of [source.columns], and groups = ("audio",), of "audio" and "image"'
        )
    facts = MeaningFacts(name=config.meaning, target=config.meaning, columns=columns, groups=groups)
    digest = hashlib.sha256(content).hexdigest()
    return OwnMeaning(facts=facts, path=folder / file, name=name, digest=digest)


def facts_of(config: Config) -> MeaningFacts:
    """Returns what is known of the meaning of a config's rows; raises as `own_meaning`."""
    if (own := own_meaning(config)) is not None:
        return own.facts
    sections = {"audio": config.audio, "image": config.vision}
    facts = MEANINGS[config.meaning].of_groups([group for group, section in sections.items() if section is not None])
    settings = {} if config.vision is None else config.vision.settings
    has_videos = settings.get("fps") is not None
    return replace(facts, has_videos=has_videos, has_sound=has_videos and bool(settings.get("sound")))


def _names(value: object, known: set[str]) -> tuple[str, ...] | None:
    """Returns the names that a value lists; None where it lists another one, or one twice."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name in known for name in value):
        return None
    return tuple(value) if len({*value}) == len(value) else None
