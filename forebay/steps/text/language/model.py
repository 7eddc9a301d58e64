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
import math
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np

from forebay.errors import ConfigError, MissingExtraError
from forebay.extras import install_line

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


Judge = Callable[[str], tuple[str, float]]
"""A text to its most likely language and the probability of that; ("", 0.0) for a text without any known n-gram."""


class Model:
    """The model in memory, 60 MB. Loading takes half a second, so that a process keeps one: `loaded`."""

    def __init__(self, path: Path) -> None:
        """Loads the model (and with it py3langid). Raises ConfigError for a file of another form."""
        from py3langid.langid import LanguageIdentifier, visit_counts

        try:
            found = LanguageIdentifier.from_modelpath(path)
        except (OSError, ValueError, EOFError, KeyError, lzma.LZMAError) as err:
            raise ConfigError(f"{path} is no model of py3langid 0.4 ({err}); run: {install_line('text')}") from err
        self._visits = visit_counts
        self._automaton = found.tk_nextmove, [row << 8 for row in found.tk_row], found.tk_output
        self._weights, self._priors = found.nb_ptc, found.nb_pc.astype(np.float64)
        self._classes: list[str] = list(found.nb_classes)
        self._judges: dict[tuple[str, ...], Judge] = {}

    def among(self, codes: tuple[str, ...]) -> Judge:
        """Returns what judges texts that are in one of these languages, made once.

        A language may have several classes, one a script: their probabilities are one. Of languages that are equally
        likely the model's first is said.
        """
        if codes not in self._judges:
            self._judges[codes] = self._made(codes)
        return self._judges[codes]

    def _made(self, codes: tuple[str, ...]) -> Judge:
        columns = [i for i, code in enumerate(self._classes) if code in codes]
        classes = [self._classes[i] for i in columns]
        weights, priors = np.ascontiguousarray(self._weights[:, columns]), self._priors[columns]
        again = [(classes.index(code), i) for i, code in enumerate(classes) if classes.index(code) != i]

        def judge(text: str) -> tuple[str, float]:
            data = _as_trained(text)
            visits = self._visits(*self._automaton, data)
            if not visits:
                return "", 0.0
            features, counts = list(visits), np.array(list(visits.values()), dtype=np.float64)
            # Row by row, in the order of the text: bits depend on no thread and no neighbour.
            scores = (np.log1p(counts)[:, None] * weights[features].astype(np.float64)).sum(axis=0) + priors
            # The temperature that py3langid's own probabilities have.
            shares = np.exp((scores - scores.max()) / math.sqrt(len(data)))
            for first, other in again:
                shares[first] += shares[other]
                shares[other] = 0.0
            best = int(shares.argmax())
            return classes[best], float(shares[best] / shares.sum())

        return judge


@functools.lru_cache(maxsize=1)
def loaded(path: Path, digest: str) -> Model:
    """Returns the model of a file, which a process loads once. Raises ConfigError where its digest is another one."""
    if (found := model_digest()) != digest:
        raise ConfigError(
            f"{path} changed: its sha256 is {found[:16]}..., the config was read with {digest[:16]}...; "
            "run the command again"
        )
    return Model(path)


def _as_trained(text: str) -> bytes:
    lower = text.lower() if text.isupper() else text
    return unicodedata.normalize("NFC", lower).encode("utf-8", errors="surrogatepass")
