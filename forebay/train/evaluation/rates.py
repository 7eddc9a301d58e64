"""Word and character errors by jiwer: of a corpus, by language, and sample by sample.

How well a model of classes does: accuracy, and F1 by counts that ranks can sum.

Texts in which a model repeats itself: what a decoder that has gone astray writes until it may write no more.

References and hypotheses of an evaluation: where they come from, and how they are normalised before they meet.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.extras import require_module
from forebay.steps.batch import IGNORED
from forebay.steps.recipe import recipe_of
from forebay.steps.text.transcript import TextEncoder, Transcript
from forebay.store.layout import Array
from forebay.store.source import SampleSource
from forebay.visible import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenTexts:
    """The text that a model has written for one sample, beside the one that it should have."""

    index: int
    """Of the sample in its set."""
    sample_id: str
    language: str
    """"" where none is known."""
    reference: str
    """Normalised, as the hypothesis is."""
    hypothesis: str
    is_astray: bool
    """Whether the hypothesis repeats itself, or is as long as the model may write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Errors of one sample or several: substitutions, deletions and insertions, and what the references hold."""

    word_errors: int = 0
    words: int = 0
    character_errors: int = 0
    characters: int = 0

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            word_errors=self.word_errors + other.word_errors,
            words=self.words + other.words,
            character_errors=self.character_errors + other.character_errors,
            characters=self.characters + other.characters,
        )

    @property
    def wer(self) -> float | None:
        """Word errors by words; None where the references have no word."""
        return self.word_errors / self.words if self.words else None

    @property
    def cer(self) -> float | None:
        """Character errors by characters; None where the references have none."""
        return self.character_errors / self.characters if self.characters else None


def jiwer_module() -> Any:
    """Returns jiwer; MissingExtraError, which names the extra, where it is not installed."""
    require_module("jiwer", "train", what="evaluation by WER")
    import jiwer

    return jiwer


def count_errors(written: Sequence[WrittenTexts]) -> list[Errors]:
    """Returns the errors of each sample; their sums are those of jiwer's `process_words` and `process_characters`.

    A sample whose reference has no word stays in: its words and characters count as insertions.
    """
    if not written:
        return []
    jiwer = jiwer_module()
    texts = [each.reference for each in written], [each.hypothesis for each in written]
    words = _errors(jiwer.process_words(*texts))
    characters = _errors(jiwer.process_characters(*texts))
    return [
        Errors(word_errors=word_errors, words=num_words, character_errors=character_errors, characters=num_characters)
        for (word_errors, num_words), (character_errors, num_characters) in zip(words, characters, strict=True)
    ]


def _errors(found: Any) -> Iterator[tuple[int, int]]:
    for reference, chunks in zip(found.references, found.alignments, strict=True):
        wrong = (chunk for chunk in chunks if chunk.type != "equal")
        # Of a substitution both sides are as long; a deletion has no hypothesis, an insertion no reference.
        yield (
            sum(
                max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx) for chunk in wrong
            ),
            len(reference),
        )


def summed(errors: Iterable[Errors]) -> Errors:
    """Returns the sum of errors."""
    return sum(errors, start=Errors())


def by_language(written: Sequence[WrittenTexts], errors: Sequence[Errors]) -> dict[str, dict[str, float]]:
    """Returns `wer`, `cer` and `samples` by language; empty where no language is known.

    Samples without one stand under `unknown`. A rate whose references are empty is left out.
    """
    if not any(each.language for each in written):
        return {}
    sums: dict[str, Errors] = {}
    counts: dict[str, int] = {}
    for each, own in zip(written, errors, strict=True):
        name = each.language or "unknown"
        sums[name] = sums.get(name, Errors()) + own
        counts[name] = counts.get(name, 0) + 1
    rates = {name: {"wer": total.wer, "cer": total.cer} for name, total in sorted(sums.items())}
    return {
        name: {rate: value for rate, value in found.items() if value is not None} | {"samples": counts[name]}
        for name, found in rates.items()
    }


def worst(
    written: Sequence[WrittenTexts], errors: Sequence[Errors], *, count: int = 20
) -> list[tuple[WrittenTexts, Errors]]:
    """Returns the samples with the most word errors a word, the worst first; those without errors are not among them.

    Of equal rates the one with more errors comes first, then the one that stands earlier in the set.
    """
    pairs = [pair for pair in zip(written, errors, strict=True) if pair[1].word_errors]
    pairs.sort(key=lambda pair: (-pair[1].word_errors / max(pair[1].words, 1), -pair[1].word_errors, pair[0].index))
    return pairs[:count]


def worst_lines(pairs: Sequence[tuple[WrittenTexts, Errors]]) -> Iterator[str]:
    """Yields the listing of the worst samples: reference above hypothesis, with S, D and I where they differ."""
    for number, (each, own) in enumerate(pairs, start=1):
        language = f" ({printable(each.language)})" if each.language else ""
        rate = "no reference words" if own.wer is None else f"WER {100 * own.wer:.2f} %"
        yield f"{number}. {printable(each.sample_id)}{language}: {rate}, {own.word_errors} errors in {own.words} words"
        yield from _aligned(printable(each.reference), printable(each.hypothesis))
        yield ""


def _aligned(reference: str, hypothesis: str) -> list[str]:
    jiwer = jiwer_module()
    shown: str = jiwer.visualize_alignment(
        jiwer.process_words(reference, hypothesis), show_measures=False, skip_correct=False
    )
    return [line.rstrip() for line in shown.splitlines() if line.strip() and not line.startswith("===")]


@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """Counts of each class: in how many samples it was right, said and wanted; int64 [classes]."""

    right: Array
    said: Array
    wanted: Array
    several: bool
    """Whether a sample has any number of classes, each of which is said where its logit is above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassRates:
    """accuracy: share of samples whose likeliest class is theirs; None where a sample has several classes.

    f1: of each class 2 * right / (said + wanted), and the mean over the classes that are said or wanted (macro).
    f1_micro: the same of the sums over all classes. None where there is no class.
    """

    accuracy: float | None = None
    f1: float | None = None
    f1_micro: float | None = None


def counted(logits: torch.Tensor, labels: torch.Tensor) -> ClassCounts:
    """Returns the counts of a batch.

    logits: [batch, classes]. labels: int64 [batch], a class or -100 for none; or floats [batch, classes], 0 and 1.
    """
    logits, labels, several = logits.float().cpu(), labels.cpu(), labels.is_floating_point()
    if several:
        said, wanted = logits > 0, labels > 0.5
    else:
        known, classes = labels != IGNORED, torch.arange(logits.shape[1])
        said, wanted = ((rows[known, None] == classes) for rows in (logits.argmax(-1), labels))
    right, says, wants = (each.sum(0).numpy() for each in (said & wanted, said, wanted))
    return ClassCounts(right=right, said=says, wanted=wants, several=several)


def class_rates(counts: Iterable[ClassCounts]) -> ClassRates:
    """Returns the rates of all counts together; each None where there are none."""
    own = list(counts)
    if not own:
        return ClassRates()
    right, both = (np.sum(each, axis=0) for each in ([c.right for c in own], [c.said + c.wanted for c in own]))
    samples = int(sum(c.wanted.sum() for c in own))
    occurs = both > 0
    if not occurs.any():
        return ClassRates()
    return ClassRates(
        accuracy=None if own[0].several else int(right.sum()) / samples,
        f1=float(np.mean(2 * right[occurs] / both[occurs])),
        f1_micro=2 * int(right.sum()) / int(both.sum()),
    )


_TIMES = 3
"""In a row, from which on a repetition is one."""
_UNSPACED = re.compile(
    # Chinese and Japanese, Thai, Lao, Burmese, Khmer: one match a character, with its marks.
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"
    r"[\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ecd]*"
)


def repeats_itself(text: str) -> bool:
    """Returns whether some words stand in `text` three times or more in a row.

    Words are what stands between white space. Writing without spaces (Chinese, Japanese, Thai, Lao, Burmese, Khmer) is
    taken character by character, and a single character does not count: three of them in a row are often right.
    """
    words: list[str] = []
    is_single: list[bool] = []
    for chunk in text.split():
        characters = _UNSPACED.findall(chunk)
        words += characters or [chunk]
        is_single += [True] * len(characters) or [False]
    if len(words) < _TIMES:
        return False
    numbers = np.unique(words, return_inverse=True)[1]
    return any(_has_run(numbers, size, np.array(is_single)) for size in range(1, len(words) // _TIMES + 1))


def _has_run(numbers: Array, size: int, is_single: Array) -> bool:
    """Returns whether `size` words stand three times in a row."""
    equal = numbers[size:] == numbers[:-size]
    if size == 1:
        equal = equal & ~is_single[1:]
    wanted = (_TIMES - 1) * size
    ends = np.flatnonzero(np.append(~equal, True))
    return bool((np.diff(np.append(-1, ends)) - 1 >= wanted).any())


_logger = logging.getLogger(__name__)
_SPELLINGS = "normalizer.json"


Normalisation = Literal["none", "basic", "whisper"]


def normalizer(kind: Normalisation, *, tokenizer: Path) -> Callable[[str], str]:
    """Returns what `text` of an evaluation does to a text; ends are always stripped, as jiwer does.

    `basic` and `whisper` are transformers' `BasicTextNormalizer` and `EnglishTextNormalizer`. The latter's spellings
    are those of the tokenizer's normalizer.json. Where that file is missing no spelling changes, and a warning says so.
    """
    if kind == "none":
        return str.strip
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    made = BasicTextNormalizer() if kind == "basic" else EnglishTextNormalizer(_spellings(tokenizer / _SPELLINGS))
    return lambda text: str(made(text)).strip()


def _spellings(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        _logger.warning(
            'text = "whisper": there is no %s, so British and American spellings stay different words; copy the file '
            "from a published Whisper to make them one",
            path,
        )
        return {}
    except (OSError, ValueError) as err:
        raise ConfigError(f'text = "whisper": cannot read {path}: {err}; restore it, or set text = "basic"') from err
    if not isinstance(found, dict):
        raise ConfigError(f'text = "whisper": {path} holds a {type(found).__name__}, wanted words by words')
    return {str(word): str(other) for word, other in found.items()}


def text_encoder(config: Config) -> TextEncoder:
    """Returns what writes and reads the texts of a speech config. Raises ConfigError without a `[text]` section."""
    text = recipe_of(config).text
    if not isinstance(text.step, Transcript):
        raise ConfigError(f"{config.path}: no [text] section, so no evaluation can compare texts; add one")
    return text.step.opened(Path(text.folder))


def languages_of(source: SampleSource) -> list[str]:
    """Returns the language of every sample, "" where none is known."""
    found = source.categories("language")
    if found is None:
        return [""] * len(source)
    names, codes = found
    return [names[code] for code in codes.tolist()]
