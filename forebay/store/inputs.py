"""`kind = "python"`: where the samples of a user's iterator were written down, by the content of its file.

Nothing here runs the iterator. `forebay preprocess` lists it once, into a folder of the cache root: `samples.jsonl` has
a line a sample, with the digest of its sound, `*.media` files hold the sounds, and `images/` the images, each named by
its digest. These are the source files of the config from then on: their content is in the key, and who reads samples
reads them there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forebay.config.code import Asker, not_allowed, source_of, spec_problem
from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.store.layout import INPUTS

ASKER = Asker("source.manifest", "FB129")
SAMPLES = "samples.jsonl"
VERSION = 1
"""Bumped when the same samples are written down otherwise."""
_SPEC = re.compile(r"\.py:[^/]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """A user's iterator, by its file. subjects: words for what is made of its samples.

    most: samples after which it is stopped. folder: of what it yielded.
    """

    path: Path
    name: str
    source: bytes
    split: str
    subjects: str
    most: int | None
    folder: Path

    @property
    def label(self) -> str:
        """The name of it in messages."""
        return f"{ASKER.setting}: {self.path.name}:{self.name}"

    @property
    def samples(self) -> Path:
        """The list of its samples; not there before it was listed."""
        return self.folder / SAMPLES


def inputs_problem(config: Config) -> str | None:
    """Returns what is wrong with `source.manifest` of a config whose samples code yields, without reading a file."""
    if len(config.source.manifests) != 1:
        return f'{ASKER.setting} has {len(config.source.manifests)} entries, and kind = "python" takes one'
    if not config.run.allow_code:
        return not_allowed(ASKER.setting, _relative(config))
    problem = spec_problem(_relative(config), what="class")
    return None if problem is None else f"{ASKER.setting}: {problem}"


def inputs_of(config: Config) -> Inputs:
    """Returns the iterator that a config names; reads its file and runs nothing.

    Raises ConfigError without `[run] allow_code = true`, and for no regular file at or below the config's folder.
    """
    if (problem := inputs_problem(config)) is not None:
        raise ConfigError(problem, code="FB129")
    name, _, own = _relative(config).rpartition(":")
    folder = Path(config.path).parent
    source = source_of(folder / name, folder, ASKER)
    most = _most(config)
    asked: dict[str, Any] = {
        "version": VERSION,
        "source": hashlib.sha256(source).hexdigest(),
        "name": own,
        "split": config.source.split,
        "modality": " and ".join(config.subjects),
        "most": most,
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return Inputs(
        path=folder / name,
        name=own,
        source=source,
        split=config.source.split,
        subjects=" and ".join(config.subjects),
        most=most,
        folder=config.cache_root / INPUTS / digest[:32],
    )


def located(config: Config) -> Config:
    """Returns the config with the list of samples in the place of the iterator; any other config as it is.

    The list need not be there. Without the iterator's file, as beside a cache alone, it is one that nobody has.
    """
    if not names_code(config):
        return config
    path = Path(config.source.manifests[0].rpartition(":")[0])
    none = config.cache_root / INPUTS / "none" / SAMPLES
    samples = inputs_of(config).samples if os.path.lexists(path) else none
    return replace(config, source=replace(config.source, manifest=str(samples)))


def names_code(config: Config) -> bool:
    """Whether the manifest of a config names code: not a list of what code yielded."""
    return config.source.kind == "python" and any(map(_SPEC.search, config.source.manifests))


def is_unlisted(config: Config) -> bool:
    """Whether an iterator is there of whose samples there is no list: it was edited, or has never run here."""
    if not names_code(config) or not os.path.lexists(config.source.manifests[0].rpartition(":")[0]):
        return False
    return not inputs_of(config).samples.is_file()


def _most(config: Config) -> int | None:
    """Returns after how many samples an iterator can be stopped: a filter may leave any of them out."""
    source = config.source
    if source.rows is not None:
        return None
    is_filtered = source.min_duration_s or source.overlong == "drop" or source.languages is not None or source.exclude
    return None if is_filtered else source.max_samples


def _relative(config: Config) -> str:
    """Returns `file.py:name` as it stands in the file: paths of a config were made absolute."""
    [entry], folder = config.source.manifests, Path(config.path).parent
    return entry.removeprefix(f"{folder.as_posix().rstrip('/')}/")
