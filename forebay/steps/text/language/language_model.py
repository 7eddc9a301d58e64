"""py3langid's model: where it lies, its digest, and the probabilities that it gives the languages of a text.

The model is naive Bayes over byte n-grams, which an automaton finds. It is stored as an npz in LZMA, without pickle.
The sums are made here in float64 and not by py3langid in float32: a matrix product adds in an order that depends on the
number of threads, and a cached confidence must be the uncached one.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import lzma
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from forebay.errors import ConfigError, MissingExtraError
from forebay.extras import install_line
from forebay.store.layout import Array, Ints

_FILE = "data/model.npz.xz"


def model_file() -> Path:
    """Returns the file of py3langid's model, which is found without importing anything.

    Raises MissingExtraError where py3langid is not installed, ConfigError where its model is not in its place.
    """
    spec = importlib.util.find_spec("py3langid")
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError(
            f'text.language = "detect" needs py3langid; run: {install_line("text")}, or set text.language = "manifest"'
        )
    path = Path(spec.submodule_search_locations[0]) / _FILE
    if not path.is_file():
        raise ConfigError(
            f'text.language = "detect": py3langid has no {path}; forebay reads the model of py3langid 0.4, '
            f"run: {install_line('text')}"
        )
    return path


def model_digest() -> str:
    """Returns the sha256 of py3langid's model file, as 64 hex digits; nothing is imported. Raises as `model_file`."""
    path = model_file()
    status = path.stat()
    return _digest(path, (status.st_size, status.st_mtime_ns, status.st_ino))


@functools.lru_cache(maxsize=4)
def _digest(path: Path, _status: tuple[int, int, int]) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Judge = Callable[[Sequence[str]], list[tuple[str, float]]]
"""Texts to their most likely languages and the probabilities of these; ("", 0.0) for one without any known n-gram."""

_TEXTS_AT_ONCE = 512
_FEWEST_AT_ONCE = 8
_LONGEST_AT_ONCE = 1_024
"""Bytes: what is longer, or alone, goes through the automaton by itself."""


class LanguageModel:
    """The model in memory, 95 MB. Loading takes half a second, so that a process keeps one: `loaded`."""

    def __init__(self, path: Path) -> None:
        """Loads the model (and with it py3langid). Raises ConfigError for a file of another form."""
        from py3langid.langid import LanguageIdentifier, visit_counts

        try:
            found = LanguageIdentifier.from_modelpath(path)
        except (OSError, ValueError, EOFError, KeyError, lzma.LZMAError) as err:
            raise ConfigError(f"{path} is no model of py3langid 0.4 ({err}); run: {install_line('text')}") from err
        self._visits = visit_counts
        self._automaton = found.tk_nextmove, [row << 8 for row in found.tk_row], found.tk_output
        self._tables = tuple(np.asarray(table) for table in self._automaton)
        self._weights, self._priors = found.nb_ptc, found.nb_pc.astype(np.float64)
        self._classes: list[str] = list(found.nb_classes)
        self._judges: dict[tuple[tuple[str, ...], ...], Judge] = {}

    def among(self, codes: tuple[str, ...], *, beside: tuple[str, ...] = ()) -> Judge:
        """Returns what judges texts that are in one of these languages, made once.

        beside: languages that texts may be in too; they are not said. A language may have several classes, one a
        script: their probabilities are one. Of languages that are equally likely the model's first is said.
        """
        if (codes, beside) not in self._judges:
            self._judges[codes, beside] = self._made(codes, beside)
        return self._judges[codes, beside]

    def _made(self, codes: tuple[str, ...], beside: tuple[str, ...]) -> Judge:
        columns = [i for i, code in enumerate(self._classes) if code in codes or code in beside]
        classes = [self._classes[i] for i in columns]
        meant = np.array([i for i, code in enumerate(classes) if code in codes])
        weights, priors = np.ascontiguousarray(self._weights[:, columns]), self._priors[columns]
        again = [(classes.index(code), i) for i, code in enumerate(classes) if classes.index(code) != i]

        def judge(texts: Sequence[str]) -> list[tuple[str, float]]:
            data = [_as_trained(text) for text in texts]
            starts, features, counts = self._features(data)
            scores = np.tile(priors, (len(data), 1))
            known = np.flatnonzero(np.diff(starts))
            if len(known):
                # A sum over the rows of one text, in the order of its n-grams: bits depend on no thread, no neighbour.
                rows = np.log1p(counts)[:, None] * weights[features].astype(np.float64)
                scores[known] += np.add.reduceat(rows, starts[:-1][known], axis=0)
            # The temperature that py3langid's own probabilities have.
            lengths = np.array([max(1, len(each)) for each in data], np.float64)
            shares = np.exp((scores - scores.max(axis=1, keepdims=True)) / np.sqrt(lengths)[:, None])
            for first, other in again:
                shares[:, first] += shares[:, other]
                shares[:, other] = 0.0
            best = meant[shares[:, meant].argmax(axis=1)]
            likely = shares[np.arange(len(data)), best] / shares.sum(axis=1)
            said = [(classes[i], share) for i, share in zip(best.tolist(), likely.tolist(), strict=True)]
            return [each if some else ("", 0.0) for each, some in zip(said, np.diff(starts).tolist(), strict=True)]

        def judged(texts: Sequence[str]) -> list[tuple[str, float]]:
            parts = range(0, len(texts), _TEXTS_AT_ONCE)
            return [each for start in parts for each in judge(texts[start : start + _TEXTS_AT_ONCE])]

        return judged

    def _features(self, data: Sequence[bytes]) -> tuple[Ints, Ints, Array]:
        """Returns where the n-grams of each text begin [num_texts + 1], the n-grams, sorted by text, and their counts.

        Many texts go through the automaton side by side, a byte at a time.
        """
        places = [i for i, each in enumerate(data) if 0 < len(each) <= _LONGEST_AT_ONCE]
        if len(places) < _FEWEST_AT_ONCE:
            places = []
        found = self._side_by_side([data[i] for i in places])
        owners, seen = [np.array(places, np.int64)[found[0]]], [found[1]]
        for i in set(range(len(data))).difference(places):
            features = np.fromiter((self._visits(*self._automaton, data[i]) or Counter()).elements(), np.int64)
            owners.append(np.full(len(features), i))
            seen.append(features)
        most = int(self._tables[2].max()) + 1
        pairs, counts = np.unique(np.concatenate(owners) * most + np.concatenate(seen), return_counts=True)
        starts = np.searchsorted(pairs, np.arange(len(data) + 1) * most)
        return starts, pairs % most, counts.astype(np.float64)

    def _side_by_side(self, data: Sequence[bytes]) -> tuple[Ints, Ints]:
        """Returns (text, n-gram) of every n-gram that is seen in texts, in any order."""
        longest_first = sorted(range(len(data)), key=lambda i: -len(data[i]))
        lengths = np.array([len(data[i]) for i in longest_first], np.int64)
        width = int(lengths.max(initial=0))
        padded = b"".join(data[i].ljust(width, b"\0") for i in longest_first)
        columns = np.ascontiguousarray(np.frombuffer(padded, np.uint8).reshape(len(data), width).T)
        moves, rows, outputs = self._tables
        states, seen = np.zeros(len(data), np.int64), np.full((width, len(data)), -1, np.int64)
        alive = np.searchsorted(-lengths, -np.arange(width))  # how many are longer than each place
        for place, count in enumerate(alive.tolist()):
            states[:count] = moves[rows[states[:count]] + columns[place, :count]]
            seen[place, :count] = outputs[states[:count]]
        there = seen >= 0
        return np.array(longest_first, np.int64)[np.nonzero(there)[1]], seen[there]


@functools.lru_cache(maxsize=1)
def loaded(path: Path, digest: str) -> LanguageModel:
    """Returns the model of a file, which a process loads once. Raises ConfigError where its digest is another one."""
    if (found := model_digest()) != digest:
        raise ConfigError(
            f"{path} changed: its sha256 is {found[:16]}..., the config was read with {digest[:16]}...; "
            "run the command again"
        )
    return LanguageModel(path)


def _as_trained(text: str) -> bytes:
    lower = text.lower() if text.isupper() else text
    return unicodedata.normalize("NFC", lower).encode("utf-8", errors="surrogatepass")
