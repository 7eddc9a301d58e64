"""Numbers are num2words' own words where it is right; what is not surely a number stays."""

from __future__ import annotations

import builtins
import importlib.metadata
import re
from decimal import Decimal
from typing import Any

import num2words
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import MissingExtraError
from forebay.steps.text.normal.numbers import Numbers, number_form
from tests.strategies import transcripts

RUN = Numbers().open()
KNOWN = sorted(set(num2words.CONVERTER_CLASSES) - {"am"})
LANGUAGES = [code.replace("_", "-").replace("kz", "kk") for code in KNOWN]


def written(text: str, language: str) -> str:
    (result,) = RUN([text], [language])
    assert isinstance(result, str)
    return result


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("en", "In 1990, (1,234) of -5!", "In one thousand, nine hundred and ninety, "
            "(one thousand, two hundred and thirty-four) of minus five!"),
        ("en-US", "3.14 and 0.50", "three point one four and zero point five zero"),
        ("English", "21st 12th 3rd 2ND", "twenty-first twelfth third second"),
        ("en-IN", "1,00,000", "one lakh"),
        ("de", "1.234,5 am Ende 1990.", "eintausendzweihundertvierunddreißig Komma fünf am Ende "
            "eintausendneunhundertneunzig."),
        ("fr", "12\u202f345 et 12 345, 1er 3e", "douze mille trois cent quarante-cinq et douze mille trois cent "
            "quarante-cinq, premier troisième"),
        ("fr-CH", "75", "septante-cinq"),
        ("es", "1.234,5 1º 2o", "mil doscientos treinta y cuatro punto cinco primero segundo"),
        ("es-MX", "1,234.5", "mil doscientos treinta y cuatro punto cinco"),
        ("de-CH", "1’234.5", "eintausendzweihundertvierunddreißig Komma fünf"),
        ("ru", "3,05", "три целых пять сотых"),
        ("fa", "۱۲۳ و ۱٬۲۳۴", "صد و بیست و سه و هزار و دویست و سی و چهار"),
        ("fa-IR", "-5", "منفی پنج"),
        ("bn", "১২৩", "একশত তেইশ"),
        ("ja", "123円と1.5倍", "百二十三円と一点五倍"),
        ("th", "๓คน", "สามคน"),
        ("uk", "-0,05", "мінус нуль кома нуль п'ять"),
        ("kk", "7", "жеті"),
        ("sv", "1:a 3:e", "första tredje"),
    ],
)  # fmt: skip
def test_numbers_become_words_of_the_language(language: str, text: str, expected: str) -> None:
    assert written(text, language) == expected


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("en", "mp3 $5 5% 5km 12:30 007 2024-01-05 1.2.3 10/12 555-1234 1,5 1,23 x=5 #1 1990s 11st 1234567890123456"),
        ("en", "1,234 ".strip().replace(",", ",,") + " +5 5-6 5.x"),
        ("de", "Am 3. Mai 1.5"),
        ("fr", "06 12 34 56 78 et 1e 3,14 2,5"),
        ("es", "3ª 1er"),
        ("hi", "123 १२३"),  # num2words has no Hindi
        ("", "12"),
        ("fil", "12"),  # num2words itself would take these two for Finnish and Korean
        ("kok", "12"),
        ("tr", "3,14 5'te"),
        ("vi", "-5 0,05"),
        ("cs", "-5"),
        ("ko", "3명"),
        ("sr", "имам 5"),
        ("en", "1\u0662"),  # two scripts
        ("am", "1234"),
    ],
)
def test_what_is_not_surely_a_number_stays(language: str, text: str) -> None:
    assert written(text, language) == text


@pytest.mark.parametrize(("code", "language"), list(zip(KNOWN, LANGUAGES, strict=True)))
def test_words_are_those_of_num2words(code: str, language: str) -> None:
    converter = num2words.CONVERTER_CLASSES[code]
    form = number_form(language)
    assert form is not None
    assert form.converter == code
    for number in (0, 1, 7, 13, 21, 100, 999, 1234, 45_678):
        assert written(str(number), language) == " ".join(converter.to_cardinal(number).split())
    point = {"fr_DZ": ","}.get(code) or ("," if written("3,14", language) != "3,14" else ".")
    for decimal in ("3.14", "0.05", "12.305"):
        if form.fractions != "none" and code != "it":  # it takes floats alone
            spoken = written(decimal.replace(".", point), language)
            assert spoken == " ".join(converter.to_cardinal(Decimal(decimal)).split())
    if form.fractions == "none":
        assert written("3,14", language) == "3,14"
        assert written("3.14", language) == "3.14"


def test_italian_decimals_are_those_of_num2words_for_floats() -> None:
    assert written("3,14", "it") == num2words.num2words(3.14, lang="it")


@given(
    text=st.lists(st.one_of(transcripts(), st.from_regex(r"[-−]?[0-9]{1,4}([ .,][0-9]{1,3}){0,3}(st|e|º|er)?[.,!]? ?",
           fullmatch=True)), max_size=6).map("".join),
    language=st.sampled_from([*LANGUAGES, "hi", "", "English", "de-CH", "es-MX"]),
)  # fmt: skip
def test_twice_changes_nothing_more_and_all_but_numbers_stays(text: str, language: str) -> None:
    once = written(text, language)
    assert written(once, language) == once
    if not re.search(r"\d", text):
        assert once == text


def test_a_long_line_of_digits_and_separators_takes_no_time_with_its_square() -> None:
    for part in ("1", "1,", "1 ", "1.5 ", "1 1x "):
        text = part * 50_000 + "x"
        assert isinstance(written(text, "fr"), str)


def test_the_version_of_num2words_is_found_and_in_no_key() -> None:
    assert Numbers().identity() == {"step": "Numbers", "version": 1}
    assert Numbers().found() == {"num2words": importlib.metadata.version("num2words")}


def test_without_num2words_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "num2words":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("forebay.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'"numbers" needs num2words; run: pip install .forebay\[text\]'):
        Numbers().open()
