"""Word and character errors by jiwer: of a corpus, by language, and sample by sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.extras import require_module
from forebay.visible import printable


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a model has written for one sample, beside what it should have."""

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


def count_errors(written: Sequence[Written]) -> list[Errors]:
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


def by_language(written: Sequence[Written], errors: Sequence[Errors]) -> dict[str, dict[str, float]]:
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


def worst(written: Sequence[Written], errors: Sequence[Errors], *, count: int = 20) -> list[tuple[Written, Errors]]:
    """Returns the samples with the most word errors a word, the worst first; those without errors are not among them.

    Of equal rates the one with more errors comes first, then the one that stands earlier in the set.
    """
    pairs = [pair for pair in zip(written, errors, strict=True) if pair[1].word_errors]
    pairs.sort(key=lambda pair: (-pair[1].word_errors / max(pair[1].words, 1), -pair[1].word_errors, pair[0].index))
    return pairs[:count]


def worst_lines(pairs: Sequence[tuple[Written, Errors]]) -> Iterator[str]:
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
