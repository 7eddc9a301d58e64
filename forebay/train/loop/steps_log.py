"""`logs/steps.jsonl` of a run: a head line with the settings, then the log lines of the run as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forebay.config.tree import Config
from forebay.errors import ForebayError
from forebay.store.files import write_bytes
from forebay.train.loop.meter import StepLog

FILE_NAME = "steps.jsonl"
VERSION = 1


class StepsLog:
    """The log lines of one run, written by rank 0."""

    def __init__(self, config: Config, folder: Path, *, step: int) -> None:
        """Touches no file yet. folder: of the run.

        step: of the checkpoint that the run goes on from; 0: the file is begun anew.
        """
        self._path = folder / "logs" / FILE_NAME
        kept = [line for line in read_lines(self._path) if isinstance(line.get("step"), int) and line["step"] <= step]
        self._kept: list[dict[str, Any]] | None = [_head(config), *(kept if step else [])]

    def add(self, line: StepLog) -> None:
        """Appends a log line; ForebayError where it cannot be written."""
        try:
            if self._kept is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(self._path, b"".join(map(_line, [*self._kept, asdict(line)])))
                self._kept = None
                return
            with open(self._path, "ab") as file:
                file.write(_line(asdict(line)))
        except OSError as err:
            raise ForebayError(
                f"cannot write the log lines to {self._path}: {err.strerror}; make room, then go on with "
                "forebay train --resume",
                code="FB703",
            ) from err


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Returns the documents of a file of JSON lines, up to one that is none; nothing where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):  # a crash has cut it short
            break
        if not isinstance(document, dict):
            break
        found.append(document)
    return found


def _head(config: Config) -> dict[str, Any]:
    settings = asdict(config)
    return {"version": VERSION, "name": config.name, "config": settings.pop("path"), "settings": settings}


def _line(document: Mapping[str, Any]) -> bytes:
    # NaN, for what a run cannot tell, is no JSON.
    finite = json.loads(json.dumps(document, default=str), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":")).encode("ascii") + b"\n"
