"""`numbers`: digits to words, by num2words (extra `text`), in the text's own language."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal

from forebay.extras import require_module
from forebay.steps.text.normal.number_forms import NumberForm, number_form
from forebay.steps.text.normal.step import NormalStep, Problem, Runner

_DIGIT = re.compile(r"\d")

_MAX_DIGITS = 15

_REFUSALS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""What num2words raises for numbers that a language of it cannot write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers(NormalStep):
    """Cardinals, decimals, negative numbers and ordinals that are written as such, as words of the text's language.

    Digits of any script are read. `1,234.5` is read as the language writes it (CLDR), so German's `1.234` is 1234. What
    is not surely one number stays as it is: what touches letters, signs or other digits (`mp3`, `$5`, `5%`, `12:30`,
    `2024-01-05`, `1.2.3`), leading zeros, more than 15 digits, `3.` inside of a sentence in languages that write
    ordinals so. No number is taken for a year or a price. In a language that num2words does not have (Hindi and Chinese
    are such), in an unknown language, and where num2words is known to be wrong (Turkish decimals), digits stay.
    """

    name: ClassVar[str] = "numbers"
    reads_language: ClassVar[bool] = True

    def check(self) -> None:
        """Returns where num2words is installed, else raises MissingExtraError."""
        require_module("num2words", "text", what='text.normalize: "numbers"')

    def open(self) -> Runner:
        """Returns what writes numbers out. Raises MissingExtraError where num2words is not installed."""
        self.check()
        import num2words

        writers: dict[str, _Writer | None] = {}

        def run(texts: Sequence[str], languages: Sequence[str]) -> list[str | Problem]:
            for language in languages:
                if language not in writers:
                    form = number_form(language)
                    converter = form and num2words.CONVERTER_CLASSES[form.converter]
                    writers[language] = None if form is None else _Writer(converter, form)
            pairs = zip(texts, (writers[language] for language in languages), strict=True)
            return [text if writer is None else writer.written(text) for text, writer in pairs]

        return run

    def found(self) -> Mapping[str, Any]:
        """Returns the version of num2words: no key names it."""
        return {"num2words": importlib.metadata.version("num2words")}


class _Writer:
    """Writes the numbers of texts in one language. converter: num2words' own."""

    def __init__(self, converter: Any, form: NumberForm) -> None:
        self._converter, self._form = converter, form
        self._asked = functools.lru_cache(maxsize=1 << 16)(self._ask)  # the same numbers come again
        self._minus = self._minus_word()

    def written(self, text: str) -> str:
        """Returns the text with its numbers in words."""
        clash = self._form.clash
        if _DIGIT.search(text) is None or (clash is not None and clash.search(text)):
            return text
        return self._form.candidates.sub(lambda match: self._words(match) or match[0], text)

    def _words(self, match: re.Match[str]) -> str | None:
        """Returns the words of a number; None where it stays as it is."""
        sign, suffix = match["sign"], match["suffix"]
        found = self._form.number.fullmatch(match["number"])
        whole, fraction = _ascii(found["whole"]) if found else None, _ascii(found["fraction"] or "") if found else None
        if not whole or fraction is None or _is_no_number(whole, fraction):
            return None
        if suffix:
            words = "" if sign or fraction else self._ordinal(whole, suffix)
        else:
            words = self._decimal(whole, fraction) if fraction else self._cardinal(int(whole))
        if not words or _DIGIT.search(words) or (sign and not self._minus):
            return None
        return f"{self._minus}{words}" if sign else words

    def _cardinal(self, number: int) -> str:
        return self._asked("cardinal", number)

    def _ordinal(self, whole: str, suffix: str) -> str:
        rule = self._form.ordinal
        is_ordinal = rule is not None and int(whole) and rule.fullmatch(whole + suffix.lower())
        return self._asked("ordinal", int(whole)) if is_ordinal else ""

    def _decimal(self, whole: str, fraction: str) -> str:
        """Returns the words of a decimal; digit by digit with its trailing zeros, which num2words leaves out."""
        form = self._form
        if form.fractions == "whole" and not fraction.endswith("0"):
            return self._asked("cardinal", Decimal(f"{whole}.{fraction}"))
        if form.fractions != "digits":
            return ""
        point = form.point or str(self._converter.pointword).strip()
        parts = [self._cardinal(int(whole)), point, *(self._cardinal(int(digit)) for digit in fraction)]
        return form.space.join(parts) if all(parts) else ""

    def _minus_word(self) -> str:
        """Returns what num2words puts before a negative number; "" where it loses the sign or writes no word."""
        positive, negative = self._cardinal(7), self._cardinal(-7)
        word = negative.removesuffix(positive)
        return word if positive and word != negative and _letters(word) else ""

    def _ask(self, kind: Literal["cardinal", "ordinal"], number: int | Decimal) -> str:
        """Returns num2words' words; "" where it has none."""
        try:
            return " ".join(str(getattr(self._converter, f"to_{kind}")(number)).split())
        except _REFUSALS:
            return ""


def _letters(word: str) -> bool:
    return all(unicodedata.category(char)[0] in "LM" for char in word.strip())


def _ascii(number: str) -> str | None:
    """Returns the digits of a number as 0 to 9, without separators; None where digits of several scripts mix."""
    digits = [char for char in number if char.isdecimal()]
    zeros = {ord(digit) - unicodedata.decimal(digit) for digit in digits}
    return "".join(str(unicodedata.decimal(digit)) for digit in digits) if len(zeros) < 2 else None


def _is_no_number(whole: str, fraction: str) -> bool:
    """Says whether digits are a code: they begin with a zero, or are more than anybody says as one number."""
    return (len(whole) > 1 and whole[0] == "0") or len(whole) + len(fraction) > _MAX_DIGITS
