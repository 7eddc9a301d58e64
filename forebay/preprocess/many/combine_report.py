"""The report of `forebay cache merge` and `forebay cache subset`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forebay.preprocess.many.combine import Linked
from forebay.preprocess.many.linked_parts import Part
from forebay.store.seal import Contents
from forebay.store.shard import shard_name
from forebay.terminal import CommandReport
from forebay.visible import from_here, human_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyReport(CommandReport):
    """The document of `forebay cache merge|subset --json`; its fields are an interface."""

    action: Literal["merge", "subset"]
    cache: str
    key: str
    made_of: list[str]
    """Keys of the caches, in their order."""
    num_samples: int
    hours: float
    languages: dict[str, Any]
    shards_linked: int
    """Files that share their bytes with the caches that this one was made of."""
    shards_copied: int
    """Files on another file system than those, which cost their bytes again."""
    size_bytes: int
    """Bytes of the shards."""
    sample_bytes: int
    """Those of them that are values of samples of this cache."""
    already_there: bool
    seconds: float
    duplicates: int = 0
    """Samples of a merge that were left out, because an earlier cache has their ids."""
    missing: int = 0
    """Ids of a list that the cache does not have."""
    repeated: int = 0
    """Lines of a list that name an id again."""

    @classmethod
    def of(
        cls,
        action: Literal["merge", "subset"],
        folder: Path,
        contents: Contents,
        *,
        parts: Sequence[Part],
        linked: Linked,
        **counts: Any,
    ) -> ManyReport:
        """Returns the report of a sealed folder; `counts` are the fields that it does not tell."""
        num_linked, num_files = _num_linked(folder, linked), len(linked.links)
        return cls(
            action=action,
            cache=str(folder),
            key=contents.document["key"],
            made_of=[part.cache.key for part in parts],
            num_samples=contents.document["num_samples"],
            hours=_hours(parts),
            languages=contents.document["languages"],
            shards_linked=num_linked,
            shards_copied=num_files - num_linked,
            size_bytes=linked.size_bytes,
            sample_bytes=linked.sample_bytes,
            **counts,
        )

    def lines(self) -> Iterator[str]:
        """Yields what the command prints."""
        done = "already there" if self.already_there else {"merge": "merged", "subset": "made"}[self.action]
        hours = f", {self.hours:.3g} hours" if self.hours else ""
        yield f"{done}: {from_here(self.cache)} ({self.num_samples:,} samples{hours}, {self.seconds:.1f} s)"
        share = f" ({100 * self.sample_bytes / self.size_bytes:.0f} %)" if self.size_bytes else ""
        yield (
            f"shards: {self.shards_linked} linked, {self.shards_copied} copied; {human_bytes(self.size_bytes)}, of "
            f"which {human_bytes(self.sample_bytes)}{share} are values of these samples"
        )
        if self.duplicates:
            yield f"duplicates: {self.duplicates:,} samples left out, an earlier cache has their ids"
        if self.missing or self.repeated:
            yield f"ids: {self.missing:,} are not in the cache, {self.repeated:,} lines name an id again"
        yield f"key: {self.key}"
        yield "to use it, in a config of the same steps:"
        yield "  [loader]"
        yield f"  cache_dir = {json.dumps(self.cache, ensure_ascii=False)}"


def _num_linked(folder: Path, linked: Linked) -> int:
    """Returns how many files of a sealed folder are files of the caches that it was made of."""
    count = 0
    for group, links in linked.shards.items():
        for number, link in enumerate(links):
            with contextlib.suppress(FileNotFoundError):  # it was there already, in another layout
                count += os.path.samefile(link.path, folder / shard_name(group, number))
    return count


def _hours(parts: Sequence[Part]) -> float:
    first = parts[0].cache
    rate_hz = first.constants.get("sample_rate_hz")
    if rate_hz is None or "num_audio_samples" not in first.lengths:
        return 0.0
    heard = sum(int(part.cache.lengths["num_audio_samples"][part.kept].sum(dtype="int64")) for part in parts)
    return heard / int(rate_hz) / 3600
