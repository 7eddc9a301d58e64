"""What was found: a reading of the data, and once it is chosen, the facts that a config is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from forebay.init.choose import Chooser
from forebay.init.media import Pictures, Sounds

Modality = Literal["speech", "vision", "text"]


@dataclass(kw_only=True, slots=True)
class Found:
    """Data whose form is known.

    kind, manifests: of `[source]`. source: its other settings; a Path becomes relative to the config. columns: of
    `[source.columns]`, those with other names than usual. noun: what is counted, `wav files`. count: how many of it,
    about so many where not `is_exact`. sounds, pictures: what some headers say. texts: some transcripts, or the words
    of some conversations. languages: how often each was met. others: columns that nothing takes. images_a_row: of some
    rows. notes: comments for the file, in sentences. audio: settings of `[audio]` that the data itself asks for.
    prompt: what rows of images are read as, a `text.prompt`. classes: how often each class was met.
    has_all_classes: no class is missing there. unread: what may hold the texts and is not read.
    """

    kind: str
    modality: Modality
    manifests: tuple[Path, ...]
    source: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    noun: str = "samples"
    count: int = 0
    is_exact: bool = True
    sounds: Sounds | None = None
    pictures: Pictures | None = None
    texts: list[str] = field(default_factory=list)
    images_a_row: list[int] = field(default_factory=list)
    languages: Counter[str] = field(default_factory=Counter)
    others: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    audio: dict[str, Any] = field(default_factory=dict)
    prompt: str = "chat"
    classes: Counter[str] = field(default_factory=Counter)
    has_all_classes: bool = False
    has_text: bool = True
    has_labels: bool = False
    unread: tuple[str, ...] = ()

    @property
    def hours(self) -> float:
        """About how many hours of sound there are."""
        return 0.0 if self.sounds is None else self.sounds.mean_s * self.count / 3600

    def is_like(self, other: Found) -> bool:
        """Says whether one config can read both: the same kind, settings and columns."""
        return (self.kind, self.modality, self.prompt, self.columns, self.audio, _plain(self.source)) == (
            *(other.kind, other.modality, other.prompt, other.columns, other.audio),
            _plain(other.source),
        )


def _plain(source: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in source.items() if name != "keep_columns"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One way to read the data. label: what it is, for a person. score: the likelier the more. name: of its first file.

    settle: looks closer, asks what is open, and returns what was found.
    """

    kind: str
    label: str
    score: float
    settle: Callable[[Chooser], Found]
    modality: Modality = "speech"
    name: str = ""


def counted(count: int, noun: str, *, is_exact: bool = True) -> str:
    """Returns a number and what is counted: `5,210 wav files`, `about 1,200,000 clips`."""
    if count == 1:
        noun = noun[:-1] if noun.endswith("s") else noun
    return f"{'' if is_exact else 'about '}{count:,} {noun}"
