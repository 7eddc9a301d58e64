"""How languages write numbers in digits, for `numbers`: separators, ordinals, and the word for the decimal point."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from forebay.steps.text.normal.tongue import tongue

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
    separators = _REGIONS.get((code, region)) or _separators(converter)
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


def _separators(converter: str) -> Separators | None:
    return next((separators for separators, codes in _SEPARATORS.items() if converter in codes.split()), None)


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
