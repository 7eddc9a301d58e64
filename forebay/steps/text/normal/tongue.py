"""Languages as manifests write them, to the plain code and the region that a step of `text.normalize` asks about."""

from __future__ import annotations

import functools

_OTHERS = {
    "ar": "ara arabic", "az": "aze azerbaijani", "be": "bel belarusian", "bn": "ben bengali bangla",
    "ca": "cat catalan", "ce": "che chechen", "cs": "ces cze czech", "cy": "cym wel welsh", "da": "dan danish",
    "de": "deu ger german", "en": "eng english", "eo": "epo esperanto", "es": "spa spanish castilian",
    "fa": "fas per pes prs persian farsi dari", "fi": "fin finnish", "fr": "fra fre french", "he": "heb iw hebrew",
    "hi": "hin hindi", "hu": "hun hungarian", "id": "ind in indonesian", "is": "isl ice icelandic",
    "it": "ita italian", "ja": "jpn japanese", "kk": "kaz kazakh", "kn": "kan kannada", "ko": "kor korean",
    "lt": "lit lithuanian", "lv": "lav latvian", "nl": "nld dut dutch flemish", "no": "nor nb nob norwegian",
    "pl": "pol polish", "pt": "por portuguese", "ro": "ron rum mo romanian", "ru": "rus russian",
    "sk": "slk slo slovak", "sl": "slv slovenian", "sr": "srp serbian", "sv": "swe swedish", "te": "tel telugu",
    "tet": "tetum", "tg": "tgk tajik", "th": "tha thai", "tr": "tur turkish", "uk": "ukr ukrainian",
    "vi": "vie vietnamese",
}  # fmt: skip
"""Codes and English names that stand for a code. Source: ISO 639-1, 639-2 and 639-3."""

_CODES = {other: code for code, others in _OTHERS.items() for other in others.split()}


@functools.lru_cache(maxsize=1024)
def tongue(language: str) -> tuple[str, str]:
    """Returns the code and the region of a language, both in small letters; "" for what is not there.

    `en-US`, `en_us` and `English` are known, and codes of two and three letters alike: `eng` is `en`. What is not known
    is its own code.
    """
    first, *subtags = language.strip().lower().replace("_", "-").split("-")
    region = next((tag for tag in subtags if (len(tag), tag.isalpha()) in ((2, True), (3, False))), "")
    return _CODES.get(first, first), region
