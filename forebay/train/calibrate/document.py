"""`calibrated_bs.json`: an entry a bucket, written after each, and which entries still hold."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.store.files import hash_file, write_bytes
from forebay.store.key import digest
from forebay.train.calibrate.case import Case
from forebay.train.models.table import ModelFacts

FILE_NAME = "calibrated_bs.json"
_VERSION = 1
"""Raised when the same facts give another entry: entries of before are made again."""
_OF_MEMORY = ("lora", "freeze", "embed_lr_mult", "gradient_checkpointing", "compile", "mixed_precision", "text_encoder")
"""Settings of [train] that memory depends on."""


def made_by(config: Config, facts: ModelFacts, case: Case, **others: Any) -> str:
    """Returns the digest of all that the entry of a case depends on, `others` among it; its first 16 hex digits."""
    train = dataclasses.asdict(config.train)
    document = {
        "version": _VERSION,
        "model": hash_file(facts.folder / "config.json"),
        "train": json.loads(json.dumps({name: train[name] for name in _OF_MEMORY})),
        "has_norm": config.train.max_grad_norm > 0,
        "dtype": [config.loader.dtype, config.loader.pack_shapes, config.loader.varlen],
        "longest": [case.name, dict(case.longest)],
        "torch": [torch.__version__, transformers.__version__],
        **others,
    }
    return digest(document)[:16]


@dataclass(slots=True)
class Entries:
    """The entries of a file; every change is on disk at once, whole."""

    path: Path
    entries: dict[str, Any]

    @classmethod
    def of(cls, path: Path) -> Entries:
        """Returns those of a file, none where it is not there. Raises ConfigError where it is no such file."""
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            found = {}
        except OSError as err:
            raise ConfigError(f"--out: cannot read {path}: {err.strerror}") from err
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"--out: {path} is there and is not JSON: {err}; name another file") from err
        if not isinstance(found, dict) or not all(isinstance(entry, dict) for entry in found.values()):
            raise ConfigError(f"--out: {path} is there and is no calibration; name another file")
        return cls(path, found)

    def kept(self, name: str, made_by: str | None) -> dict[str, Any] | None:
        """Returns the entry of a name where the same facts made it."""
        entry: dict[str, Any] | None = self.entries.get(name)
        return entry if entry is not None and made_by is not None and entry.get("made_by") == made_by else None

    def foreign(self, names: Mapping[str, str]) -> list[str]:
        """Returns which of these names have an entry that other facts made. names: what each would be made by now."""
        return [name for name, made in names.items() if name in self.entries and self.kept(name, made) is None]

    def put(self, name: str, entry: Mapping[str, Any], *, order: list[str]) -> None:
        """Makes an entry the one of a name, on disk too. order: of all names; the file has others behind them."""
        entries = {**self.entries, name: dict(entry)}
        known = [each for each in order if each in entries]
        self.entries = {each: entries[each] for each in (*known, *(e for e in entries if e not in known))}
        self._write()

    def drop(self, name: str) -> None:
        """Takes the entry of a name out, on disk too."""
        if self.entries.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        write_bytes(self.path, (json.dumps(self.entries, indent=1) + "\n").encode())
