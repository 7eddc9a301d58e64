"""Which samples an evaluation set asks for first: a keyed draw for each language."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from forebay.errors import ConfigError
from forebay.store.layout import Ints

UNKNOWN = "unknown"
"""The set of the samples without a language."""

RULE = (
    "for each language, eligible samples by rising xxh3-64(sample id, seed); the first per_language that decode and "
    "pass the filters, no two of equal samples; in each tar by id"
)

_CHUNK_ROWS = 1 << 16
_MAX_NAME_BYTES = 100
_UNSAFE = re.compile(r"""[/\\:*?"<>|%#]""")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The candidates of one set. language: None where they have none. rows: int64, in the order of the draw."""

    language: str | None
    rows: Ints

    @property
    def name(self) -> str:
        """What the set is called."""
        return UNKNOWN if self.language is None else self.language

    @property
    def tar(self) -> str:
        """The name of its tar."""
        return f"{self.name}_eval.tar"


def drawn(rows: pa.Table, *, seed: int) -> list[Drawn]:
    """Returns the candidates of every language, by its name.

    A sample's place depends on its id and the seed alone: data that is added or removed moves no other sample.
    Raises ConfigError for a language that cannot be a part of a file's name, and where samples without a language
    would share a tar with a language of that name.
    """
    column = rows["language"].combine_chunks() if rows.num_rows else pa.array([], pa.large_string())
    encoded = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column).dictionary_encode()
    codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
    names = encoded.dictionary.to_pylist()
    draws = _draws(rows["sample_id"], seed)
    found = []
    for code in np.unique(codes).tolist():
        members = np.flatnonzero(codes == code)
        language = None if code < 0 else names[code]
        if language is not None:
            _require_safe(language, len(members))
        found.append(Drawn(language=language, rows=members[np.argsort(draws[members], kind="stable")]))
    found.sort(key=lambda each: each.name)
    if UNKNOWN in names and any(each.language is None for each in found):
        raise ConfigError(
            f"some samples have no language and some have the language {UNKNOWN!r}; both would be {UNKNOWN}_eval.tar: "
            "correct the manifest, or name the languages that you want in source.languages"
        )
    return found


def _draws(ids: pa.ChunkedArray, seed: int) -> np.ndarray:
    draws = np.zeros(len(ids), np.uint64)
    for first in range(0, len(ids), _CHUNK_ROWS):
        part = ids.slice(first, _CHUNK_ROWS).to_pylist()
        draws[first : first + len(part)] = [xxhash.xxh3_64_intdigest(text.encode(), seed) for text in part]
    return draws


def _require_safe(language: str, count: int) -> None:
    is_safe = (
        language.isprintable()
        and not _UNSAFE.search(language)
        and language == language.strip()
        and language[0] not in ".-"
        and len(language.encode()) <= _MAX_NAME_BYTES
    )
    if not is_safe:
        raise ConfigError(
            f"{count} samples have the language {language[:60]!r}, which cannot be part of a tar's name "
            "(LANGUAGE_eval.tar); correct it in the manifest, or name the languages that you want in source.languages"
        )
