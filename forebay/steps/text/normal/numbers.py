"""`numbers`: digits to words, by num2words (extra `text`), in the text's own language.

How languages write numbers in digits, for `numbers`: separators, ordinals, and the word for the decimal point.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, ClassVar, Literal

from forebay.extras import require_module
from forebay.steps.text.normal.normal_step import NormalStep, Runner, one_by_one, tongue

_SPACES = " \u00a0\u2009\u202f"


@dataclass(frozen=True, kw_only=True, slots=True)
class Separators:
    """groups: what may stand between groups of thousands. point: what may stand before the fraction."""

    groups: str
    point: str


_POINT = Separators(groups=",", point=".")
_COMMA = Separators(groups=".", point=",")
_SPACE = Separators(groups=_SPACES, point=",")
_SWISS = Separators(groups="'\u2019", point=".")
_ARABIC = Separators(groups="\u066c,", point="\u066b.")
_IBERIAN = Separators(groups=_SPACES + ".", point=",")

_SEPARATORS: Mapping[Separators, str] = {
    _POINT: "en en_IN en_NG es_GT es_NI ja ko th he bn te kn cy ce",
    _COMMA: "de nl it es es_CO es_CR es_VE pt_BR id tr da ca vi ro sl sr is az tet fr_DZ",
    _SPACE: "fr fr_BE fr_CH ru uk be pl cs sk hu fi sv no lt lv kz eo tg",
    _ARABIC: "ar fa",
    _IBERIAN: "pt",
}
"""By CLDR 48, `numbers/symbols` of the language; codes are num2words' own.

`am` is left out: above 1,000 it raises, or never ends."""

_REGIONS: Mapping[tuple[str, str], Separators] = {
    **{("es", region): _POINT for region in ["419", "mx", "us", "pr", "gt", "hn", "ni", "pa", "pe", "sv", "do", "cu"]},
    **dict.fromkeys((("de", "ch"), ("de", "li"), ("it", "ch")), _SWISS),
}
"""Regions that write numbers otherwise than their language, by CLDR 48."""

_WITH_REGION = ["en_IN", "en_NG", "es_CO", "es_CR", "es_GT", "es_NI", "es_VE", "fr_BE", "fr_CH", "fr_DZ", "pt_BR"]
"""Languages of a region that num2words has."""
_OWN_CODES = {"kk": "kz"}
"""Where num2words calls a language otherwise than ISO 639-1."""
_WHOLE_FRACTIONS = frozenset(["az", "be", "cs", "hu", "kz", "lt", "lv", "pl", "ru", "sk", "sr", "uk"])
"""Languages in which num2words says a fraction as one number: three point fourteen."""
_POINT_WORDS = {"it": "virgola", "id": "koma", "ja": "点"}
"""Where num2words has no one `pointword`."""
_NO_FRACTIONS = frozenset(["ar", "bn", "ce", "cy", "fa", "tet", "tr", "vi"])
"""Languages in which num2words 0.5.14 says decimals wrong (0.05 as 0.5, no fraction at all)."""
_UNSPACED = frozenset(["ja", "th"])
"""Languages without spaces between words, in which a number's words stand right beside letters."""
_INDIAN = frozenset(["en", "en_IN", "bn", "te", "kn"])
"""Languages that group lakhs, 12,34,567, or may."""
_CYRILLIC = re.compile("[\u0400-\u04ff]")
"""Serbian has two scripts, and num2words writes one of them, the Latin."""
_DOTTED = frozenset(["cs", "da", "de", "fi", "hu", "is", "lv", "no", "pl", "sk", "sl", "sr", "tr"])
"""Languages that write ordinals as `3.`, so that a point inside of a sentence ends none for sure."""

_ORDINALS = {
    "en": r"\d*(?:(?<!1)(?:1st|2nd|3rd)|(?:1[123]|[04-9])th)",
    "fr": r"1er|(?!1\D)\d+(?:e|[eè]me|i[eè]me)",
    "es": r"\d+(?:\.?º|o)",
    "it": r"\d+(?:º|o)",
    "pt": r"\d+(?:\.?º|o)",
    "nl": r"\d+(?:e|ste|de)",
    "sv": r"\d*(?:(?<!1)[12]:a|(?:1[12]|[03-9]):e)",
}
"""Ordinals that cannot be anything else and that num2words writes in their gender. `º` is `o` after NFKC."""

_OPENING = r"\s(\[{\"“‘«„‹¿¡「『（【《〈"
_CLOSING = r".,;:!?…)\]}\"”»›」』）】》〉。、，；：！？।॥،؛؟۔።"
_BESIDE = r"0-9\dA-Za-z.,:;/\\+\-−–—'’%‰°$€£¥₩₹#@&*=_^~٫٬"


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberForm:
    """How one language writes numbers.

    converter: num2words' code. candidates: finds what may be a number, as `sign`, `number` and `suffix`. number: what a
    number is, as `whole` and `fraction`. ordinal: a number with a suffix that makes it one; None where none surely
    does. fractions: how they are said; a whole number, digit by digit, or not at all because num2words is wrong.
    point: the word before the digits; None where num2words itself has it. space: what stands between words. clash: in a
    text with such characters num2words would write another script.
    """

    converter: str
    candidates: re.Pattern[str]
    number: re.Pattern[str]
    ordinal: re.Pattern[str] | None
    fractions: Literal["whole", "digits", "none"]
    point: str | None
    space: str
    clash: re.Pattern[str] | None


@functools.lru_cache(maxsize=1024)
def number_form(language: str) -> NumberForm | None:
    """Returns how a language writes numbers, by its code or name; None for one whose numbers cannot be written out."""
    code, region = tongue(language)
    regional = f"{code}_{region.upper()}"
    converter = regional if regional in _WITH_REGION else _OWN_CODES.get(code, code)
    separators = _REGIONS.get((code, region)) or next(
        (separators for separators, codes in _SEPARATORS.items() if converter in codes.split()), None
    )
    if separators is None:
        return None
    ordinal = _ORDINALS.get(code)
    spoken: Literal["whole", "none", "digits"] = "digits"
    if converter in _WHOLE_FRACTIONS:
        spoken = "whole"
    elif converter in _NO_FRACTIONS:
        spoken = "none"
    return NumberForm(
        converter=converter,
        candidates=_candidates(code, separators, has_ordinals=ordinal is not None),
        number=_number(separators, is_indian=converter in _INDIAN),
        ordinal=None if ordinal is None else re.compile(ordinal),
        fractions=spoken,
        point=_POINT_WORDS.get(converter),
        space="" if code in _UNSPACED else " ",
        clash=_CYRILLIC if code == "sr" else None,
    )


def _candidates(code: str, separators: Separators, *, has_ordinals: bool) -> re.Pattern[str]:
    """Returns what finds numbers with all that touches them, so that nothing is a number because a part of it is."""
    spaces = _SPACES if " " in separators.groups else ""
    body = rf"(?P<number>\d+(?:[.,:/'’٫٬{spaces}]\d+)*)"
    suffix = r"(?P<suffix>\.?º|:[ae]|[a-zè]{1,4})?" if has_ordinals else "(?P<suffix>(?!))?"
    if code in _UNSPACED:
        return re.compile(rf"(?<![{_BESIDE}])(?P<sign>(?!))?{body}{suffix}(?![{_BESIDE}])")
    ordinal_dot = rf"(?!\.[{_CLOSING}]*\s+\S)" if code in _DOTTED else ""
    end = rf"{ordinal_dot}(?=[{_CLOSING}]*(?:\s|\Z))"
    return re.compile(rf"(?<![^{_OPENING}])(?P<sign>[-−])?{body}{suffix}{end}", re.IGNORECASE)


def _number(separators: Separators, *, is_indian: bool) -> re.Pattern[str]:
    """Returns what a number of a language is: groups by one separator throughout, or no groups."""
    groups = rf"\d{{1,3}}(?P<group>[{separators.groups}])\d{{3}}(?:(?P=group)\d{{3}})*"
    lakhs = r"|\d{1,2}(?:,\d{2})+,\d{3}" if is_indian else ""
    return re.compile(rf"(?P<whole>{groups}{lakhs}|\d+)(?:[{separators.point}](?P<fraction>\d+))?")


_DIGIT = re.compile(r"\d")
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

        @functools.cache
        def writer(language: str) -> _Writer | None:
            form = number_form(language)
            return None if form is None else _Writer(num2words.CONVERTER_CLASSES[form.converter], form)

        def write(text: str, language: str) -> str:
            found = writer(language)
            return text if found is None else found.written(text)

        return one_by_one(write)

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
        is_word = all(unicodedata.category(char)[0] in "LM" for char in word.strip())
        return word if positive and word != negative and is_word else ""

    def _ask(self, kind: Literal["cardinal", "ordinal"], number: int | Decimal) -> str:
        """Returns num2words' words; "" where it has none."""
        try:
            return " ".join(str(getattr(self._converter, f"to_{kind}")(number)).split())
        except _REFUSALS:
            return ""


def _ascii(number: str) -> str | None:
    """Returns the digits of a number as 0 to 9, without separators; None where digits of several scripts mix."""
    digits = [char for char in number if char.isdecimal()]
    zeros = {ord(digit) - unicodedata.decimal(digit) for digit in digits}
    return "".join(str(unicodedata.decimal(digit)) for digit in digits) if len(zeros) < 2 else None


def _is_no_number(whole: str, fraction: str) -> bool:
    """Says whether digits are a code: they begin with a zero, or are more than anybody says as one number."""
    return (len(whole) > 1 and whole[0] == "0") or len(whole) + len(fraction) > 15
