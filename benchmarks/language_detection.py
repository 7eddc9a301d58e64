"""Measures how often a detected language is right, and the cost: `python -m benchmarks.language_detection [--tiny]`.

The texts are the sentences of demo/text and the transcripts of demo/speech. `--texts FOLDER` adds files `xx.txt` of a
sentence a line, in the language `xx`. `named` restricts the candidates to the languages of the set, as `text.languages`
does; `all` leaves them open. `wrong` lists what was said instead, `-` where nothing was. Short texts are the first
words of the sentences in languages that part words by spaces. A text costs the CPU time of this process, without the
load of the model, which stands in a row of its own. The plain way is py3langid's own `classify`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pyarrow.parquet as pq

from benchmarks.report import machine, median, show, timed
from forebay.steps.text.language_detector import LIKELIER, Detector, LanguageModel, model_file

DEMO = Path(__file__).resolve().parent.parent / "demo"
SPACED = frozenset({"de", "en", "es", "fa", "fr", "mr", "pt", "ru", "uk"})
TINY = 20
Pairs = Sequence[tuple[str, str]]
"""(language, text)."""


def sentences() -> list[tuple[str, str]]:
    """Returns the demo sentences; an id begins with the language."""
    lines = (DEMO / "text" / "sentences.jsonl").read_text(encoding="utf-8").splitlines()
    return [(row["id"].partition("-")[0], row["text"]) for row in map(json.loads, lines)]


def transcripts() -> list[tuple[str, str]]:
    """Returns the demo transcripts."""
    rows = pq.read_table(DEMO / "speech" / "train.parquet", columns=["language", "transcript"]).to_pylist()
    return [(row["language"], row["transcript"]) for row in rows]


def of_folder(folder: Path, *, most: int) -> list[tuple[str, str]]:
    """Returns at most so many sentences of each file `xx.txt`, drawn with a fixed seed."""
    found = []
    for path in sorted(folder.glob("*.txt")):
        lines = sorted({line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()})
        found += [(path.stem, line) for line in random.Random(0).sample(lines, min(most, len(lines)))]
    return found


def first_words(pairs: Pairs, count: int) -> list[tuple[str, str]]:
    """Returns what sentences of languages with spaces begin with."""
    return [(language, " ".join(text.split()[:count])) for language, text in pairs if language in SPACED]


def detector(pairs: Pairs, *, is_named: bool, min_confidence: float = 0.0) -> Detector:
    """Returns a detector of all languages, or of those of the texts."""
    languages = sorted({language for language, _ in pairs}) if is_named else []
    return Detector.of(mode="detect", languages=languages, min_confidence=min_confidence)


def judged(name: str, pairs: Pairs, *, is_named: bool) -> dict[str, Any]:
    """Returns how many texts were judged right, and what was said of the others."""
    found = detector(pairs, is_named=is_named).open()([text for _, text in pairs])
    wrong = Counter(
        f"{language}>{code or '-'}" for (language, _), (code, _) in zip(pairs, found, strict=True) if code != language
    )
    right = len(pairs) - wrong.total()
    return {
        "texts": name,
        "candidates": "named" if is_named else "all",
        "count": len(pairs),
        "right_percent": round(100 * right / len(pairs), 2),
        "wrong": ", ".join(f"{pair} {count}" for pair, count in wrong.most_common(8)),
    }


def accuracy(sets: dict[str, Pairs]) -> list[dict[str, Any]]:
    """Returns a row for each set and choice of candidates."""
    return [judged(name, pairs, is_named=named) for name, pairs in sets.items() for named in (True, False)]


def by_default(name: str, pairs: Pairs) -> dict[str, Any]:
    """Returns of how many texts something is said by default, and how much of that is right; all candidates."""
    found = detector(pairs, is_named=False, min_confidence=LIKELIER).open()([text for _, text in pairs])
    said = [(language, code) for (language, _), (code, _) in zip(pairs, found, strict=True) if code]
    right = sum(language == code for language, code in said)
    return {
        "texts": name,
        "said_percent": round(100 * len(said) / len(pairs), 2),
        "right_of_said_percent": round(100 * right / max(1, len(said)), 2),
    }


def by_language(pairs: Pairs) -> list[dict[str, Any]]:
    """Returns a row for each language, with all candidates."""
    languages = sorted({language for language, _ in pairs})
    return [judged(code, [pair for pair in pairs if pair[0] == code], is_named=False) for code in languages]


def cost(pairs: Pairs, *, rounds: int) -> list[dict[str, Any]]:
    """Returns what a text costs, of forebay's detector and of py3langid's own call."""
    from py3langid.langid import LanguageIdentifier

    texts = [text for _, text in pairs]
    load = median(timed(lambda: LanguageModel(model_file())).cpu_s for _ in range(rounds))
    detect = detector(pairs, is_named=False).open()
    plain = LanguageIdentifier.from_modelpath(model_file(), norm_probs=True)
    ways: dict[str, Callable[[], object]] = {
        "forebay, a text": lambda: detect(texts),
        "py3langid classify, a text": lambda: [plain.classify(text) for text in texts],
    }
    detect(texts[:1])
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            taken[name].append(timed(work).cpu_s)
    rows = [{"work": name, "cpu_ms": 1000 * median(found) / len(texts)} for name, found in taken.items()]
    return [*rows, {"work": "the model, once a process", "cpu_ms": 1000 * load}]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a few seconds: does it run")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rounds", type=int, default=5, help="how often every way is timed")
    parser.add_argument("--texts", type=Path, help="a folder of further texts, a file xx.txt for each language")
    parser.add_argument("--most", type=int, default=200, help="sentences of each such file; default: 200")
    options = parser.parse_args(argv)
    demo, spoken = sentences(), transcripts()
    if options.tiny:
        demo = demo[:: len(demo) // (12 * TINY) + 1]
    sets: dict[str, Pairs] = {
        "demo/text": demo,
        "demo/speech": spoken,
        "demo/speech, 3 words or more": [pair for pair in spoken if len(pair[1].split()) >= 3],
        "both together": [*demo, *spoken],
        **{f"first {count} words": first_words(demo, count) for count in (1, 2, 3, 5)},
    }
    languages = demo
    if options.texts is not None:
        more = of_folder(options.texts, most=TINY if options.tiny else options.most)
        sets[options.texts.name], languages = more, more
    document = {
        "machine": machine("numpy", "py3langid"),
        "accuracy": accuracy(sets),
        "default limit": [by_default(name, pairs) for name, pairs in sets.items()],
        "languages": by_language(languages),
        "cost": cost(demo, rounds=1 if options.tiny else options.rounds),
    }
    show(document, as_json=options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
