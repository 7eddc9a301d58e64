"""Detection: the language of a text by its letters' script, else by py3langid among the languages of that script.

py3langid's model is naive Bayes over byte n-grams, which an automaton finds, stored as an npz in LZMA, without pickle.
The sums are made here in float64 and not by py3langid in float32: a matrix product adds in an order that depends on the
number of threads, and a cached confidence must be the uncached one.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import lzma
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np

from forebay.errors import ConfigError, MissingExtraError
from forebay.extras import install_line
from forebay.steps.text.script import SCRIPTS, code_of, languages_of, letters_of
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
        if len(places) < 8:
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


_KNOWN = """
    af am ar as az be bg bn br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hr ht hu hy id ig is
    it ja jv ka kk km kn ko ku ky la lg ln lo lt lv mg mk ml mn mr ms my ne nl no om or pa pl ps pt qu ro ru sa si sk sl
    so sq sr sv sw ta te th tl tr ug uk ur uz vi xh yo zh zu ace bcl dz ext gcf gom grc gug hbo kik nso pcm rw se sn st
    an ary crh fo fuv gcr guw kab lb lij ltg uzs wa sdh arz ba mt nn oc tg tk tt vec vo wuu yue
"""

MODEL_LANGUAGES = frozenset(_KNOWN.split())
"""What py3langid 0.4 knows. `zxx`, by which py3langid means no language, is left out."""

_ALONE = """
    greek armenian georgian hebrew gurmukhi gujarati oriya tamil telugu kannada malayalam sinhala thai lao myanmar
    khmer mongolian thaana cherokee hangul kana bopomofo
"""

ALONE = {script: languages_of(script)[0] for script in _ALONE.split()}
"""Scripts that one language uses, as good as alone: the others that `script.py` lists must be named to be meant.

Devanagari (hi, mr, ne), Bengali (bn, as), Arabic and Han (zh, ja) are no such scripts. Ethiopic (am, ti) and Tibetan
(bo, dz) are none either, and the model knows only one language of each: they say nothing until one language is named.
"""


def candidates(named: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the languages that a text of each script may be in; a script of none is left out, and says nothing.

    named: the codes of `text.languages`. Without any: the language of `ALONE`, else what the model knows and has a
    code of two letters, if these are several. Languages of three letters, most of them dialects or older forms of
    those of two (`wuu`, `arz`, `hbo`), are meant only where they are named.
    """
    if named:
        found = {script: tuple(code for code in named if code in languages_of(script)) for script in SCRIPTS}
        return {script: codes for script, codes in found.items() if codes}
    known = {
        script: tuple(code for code in languages_of(script) if code in MODEL_LANGUAGES and len(code) == 2)
        for script in SCRIPTS
    }
    several = {script: codes for script, codes in known.items() if len(codes) > 1}
    return several | {script: (code,) for script, code in ALONE.items()}


def beside(named: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Returns the other languages that a text may be in, of every script with one candidate that does not decide.

    Such a candidate is said with its probability among all: a text of its script may be in no language that was named.
    """
    everything = candidates(())
    return {
        script: tuple(other for other in everything.get(script, ()) if other != code)
        for script, (code, *more) in candidates(named).items()
        if not more and code in MODEL_LANGUAGES and set(everything.get(script, ())) - {code}
    }


def check_languages(named: Sequence[str]) -> None:
    """Returns where every code of `text.languages` can be told from the others.

    Raises ConfigError for an unknown code, for a code given twice, and for a language that the model does not know
    beside another one of the same script.
    """
    everything = sorted({code for script in SCRIPTS for code in languages_of(script)})
    for code in named:
        if code not in everything:
            near = [known for known in (code_of(code),) if known in everything]
            near = near or difflib.get_close_matches(code, everything, n=1)
            raise ConfigError(
                f"text.languages: {code!r:.40} is no language that can be detected"
                f"{f'; did you mean {near[0]!r}?' if near else '; write its ISO 639 code, for example de'}",
                code="FB102",
            )
        if list(named).count(code) > 1:
            raise ConfigError(f"text.languages: {code!r} stands there twice; leave one out", code="FB102")
    for script, codes in candidates(named).items():
        unknown = [code for code in codes if code not in MODEL_LANGUAGES]
        if unknown and len(codes) > 1:
            raise ConfigError(
                f"text.languages: {' and '.join(codes)} are written in the same script ({script}), and py3langid does "
                f"not know {', '.join(unknown)}; keep one of them",
                code="FB102",
            )


Detect = Callable[[Sequence[str]], list[tuple[str, float]]]
"""Texts to (code, confidence) of each, in order; ("", confidence) where nothing can be said."""
MOST_CHARACTERS = 4096
"""What is read of a text. A line of 10 MB is in the language that it begins in."""
LIKELIER = 0.5
"""The confidence from which a language is likelier than all others together: below it nothing is said, by default."""
_BYTES = {"latin": 1, "greek": 2, "cyrillic": 2, "armenian": 2, "hebrew": 2, "arabic": 2, "thaana": 2}
"""Bytes of a letter by script, 3 of the others. So words in Latin letters (names, brands, commands), which stand in
texts of all scripts, outweigh no sentence around them; and a Chinese character is more than a letter."""

_KANA_SHARE = 0.1
"""Chinese texts have a stray kana, and hardly any Japanese sentence has nine ideographs for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    """Says which language a text is in. What is said of a text depends on that text alone.

    mode: `detect` for all rows, `detect_missing` for rows without a language. languages: the codes that a text may be
    in; empty for all. min_confidence: below it nothing is said. model: digest of py3langid's model file.
    """

    mode: Literal["detect", "detect_missing"] = "detect"
    languages: tuple[str, ...] = ()
    min_confidence: float = LIKELIER
    model: str = ""
    version: int = 1

    @classmethod
    def of(
        cls, *, mode: Literal["detect", "detect_missing"], languages: Sequence[str], min_confidence: float
    ) -> Detector:
        """Returns the detector of settings, with the digest of the model that is installed. Imports nothing of it.

        The order of `languages` changes nothing. Raises MissingExtraError where py3langid is not installed, ConfigError
        for languages that cannot be told from each other.
        """
        check_languages(languages)
        return cls(
            mode=mode,
            languages=tuple(sorted(languages)),
            min_confidence=min_confidence,
            model=model_digest(),
            version=2 if beside(languages) else 1,  # others say what they said
        )

    def identity(self) -> dict[str, Any]:
        """Returns the canonical description, for keys."""
        return {"step": "Detector", **asdict(self)}

    def found(self) -> Mapping[str, Any]:
        """Returns what the store of texts must know beside the identity: versions of libraries that no key names."""
        return {"py3langid": metadata.version("py3langid"), "unicode": unicodedata.unidata_version}

    def values_identity(self) -> dict[str, Any]:
        """Returns what is said of a text depends on: all but `mode`, which says of which rows it is asked."""
        return {name: value for name, value in self.identity().items() if name != "mode"}

    def open(self) -> Detect:
        """Returns what detects. The model is loaded for the first text that its script does not decide.

        A confidence is the probability of the language among the candidates of the script, of a single candidate that
        among all languages of the script; times the share of letters of that script, in steps of 0.0001. ("", 0.0) is
        said of fewer than two letters, and of a script that no candidate has.
        """
        return _Detection(self)


class _Detection:
    def __init__(self, detector: Detector) -> None:
        self._by_script, self._beside = candidates(detector.languages), beside(detector.languages)
        self._min_confidence, self._digest = detector.min_confidence, detector.model
        self._judges: dict[str, Judge] = {}

    def __call__(self, texts: Sequence[str]) -> list[tuple[str, float]]:
        found = [self._by_its_script(text[:MOST_CHARACTERS]) for text in texts]
        results = [("", 0.0)] * len(texts)
        open_: dict[str, list[int]] = defaultdict(list)
        for place, (script, _) in enumerate(found):
            codes = self._by_script.get(script, ())
            if len(codes) == 1 and script not in self._beside:
                results[place] = codes[0], 1.0
            elif codes:
                open_[script].append(place)
        for script, places in open_.items():
            judged = self._judge(script)([texts[place][:MOST_CHARACTERS] for place in places])
            for place, said in zip(places, judged, strict=True):
                results[place] = said
        shares = (share for _, share in found)
        sure = [(code, round(likely * share, 4)) for (code, likely), share in zip(results, shares, strict=True)]
        return [(code if confidence >= self._min_confidence else "", confidence) for code, confidence in sure]

    @staticmethod
    def _by_its_script(text: str) -> tuple[str, float]:
        """Returns the script of a text and its share; of a text with too few letters "", 0."""
        letters = letters_of(text)
        return main_script(letters) if letters.total() >= 2 else ("", 0.0)

    def _judge(self, script: str) -> Judge:
        if script not in self._judges:
            model = loaded(model_file(), self._digest)
            self._judges[script] = model.among(self._by_script[script], beside=self._beside.get(script, ()))
        return self._judges[script]


def main_script(letters: Mapping[str, int]) -> tuple[str, float]:
    """Returns the script that most of a text is in, and its share of the letters. letters: by script, one or more.

    A letter counts as often as it has bytes in UTF-8 (`_BYTES`). Ideographs of a text with kana are Japanese.
    """
    found = Counter({script: count * _BYTES.get(script, 3) for script, count in letters.items()})
    together = found["kana"] + found["han"]
    if found["kana"] >= _KANA_SHARE * together > 0:
        found["kana"], found["han"] = together, 0
    script = max(found, key=lambda name: (found[name], name))
    return script, found[script] / found.total()
