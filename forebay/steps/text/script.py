"""Which script letters are of, by Unicode's names; and which scripts languages are written in."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

SCRIPTS: Mapping[str, str] = {
    "latin": """aa ace af an ast az bcl bm br bs ca ceb crh cs cy da de en eo es et eu ext fi fil fj fo fr fuv fy ga
        gcf gcr gd gl gn gom gsw gug guw gv ha haw hr ht hsb hu ia id ig is it jv kab kam kea ki kik kl ku kw la lb lg
        lij ln lt ltg luo lv mg mi ms mt nb nl nn no nso nv ny oc om pap pcm pl pt qu rm rn ro rw sc scn sco se sk sl sm
        sn so sq sr ss st su sv sw tk tl tn to tpi tr ts umb uz uzs ve vec vi vo vot wa wo xh yo zu""",
    "cyrillic": "ab az ba be bg bs ce crh cv kk ku ky mhr mk mn mo myv os ru rue sah sr tg tk tt udm uk uz",
    "greek": "el grc", "armenian": "hy hyw", "georgian": "ka xmf", "hebrew": "he hbo iw yi lad",
    "arabic": "ace ar arz ary apc ajp acm ckb fa ks ku pnb ps prs sd sdh ug ur uz uzs az ms skr pa kk ha bal",
    "devanagari": "hi mr ne sa kok bho mai brx doi awa mag hne bgc raj new gom sd ks sat", "bengali": "bn as mni bpy",
    "gurmukhi": "pa", "gujarati": "gu", "oriya": "or", "tamil": "ta", "telugu": "te", "kannada": "kn tcy",
    "malayalam": "ml", "sinhala": "si", "thai": "th", "lao": "lo", "tibetan": "bo dz", "myanmar": "my shn mnw",
    "khmer": "km", "ethiopic": "am ti gez", "mongolian": "mn", "thaana": "dv", "ol": "sat", "meetei": "mni",
    "tifinagh": "zgh kab", "cherokee": "chr", "canadian": "iu cr oj", "han": "zh ja yue cmn wuu nan hak lzh ko",
    "kana": "ja ain ryu", "hangul": "ko", "bopomofo": "zh cmn nan",
}  # fmt: skip
"""Scripts by the languages that are written in them: ISO 639-1 codes, else 639-3."""

_SUBTAGS = {
    "latn": "latin", "cyrl": "cyrillic", "arab": "arabic", "deva": "devanagari", "hans": "han", "hant": "han",
    "hani": "han", "grek": "greek", "hebr": "hebrew", "beng": "bengali", "guru": "gurmukhi", "mong": "mongolian",
    "tibt": "tibetan",
}  # fmt: skip
"""Scripts by the subtag of a language (`sr-Latn`), which says which of its scripts is meant."""

_LONG = {
    "eng": "en", "deu": "de", "ger": "de", "fra": "fr", "fre": "fr", "spa": "es", "ita": "it", "por": "pt",
    "rus": "ru", "ukr": "uk", "pol": "pl", "nld": "nl", "dut": "nl", "swe": "sv", "tur": "tr", "ara": "ar", "fas": "fa",
    "per": "fa", "heb": "he", "ell": "el", "gre": "el", "hin": "hi", "ben": "bn", "tam": "ta", "tel": "te", "mar": "mr",
    "guj": "gu", "kan": "kn", "mal": "ml", "pan": "pa", "urd": "ur", "nep": "ne", "ori": "or", "ory": "or", "asm": "as",
    "san": "sa", "snd": "sd", "kas": "ks", "zho": "zh", "chi": "zh", "jpn": "ja", "kor": "ko", "vie": "vi", "tha": "th",
    "ind": "id", "msa": "ms", "zsm": "ms", "swa": "sw", "swh": "sw", "amh": "am", "mya": "my", "khm": "km", "lao": "lo",
    "kat": "ka", "geo": "ka", "hye": "hy", "arm": "hy", "ces": "cs", "cze": "cs", "ron": "ro", "rum": "ro", "hun": "hu",
    "fin": "fi", "dan": "da", "nor": "no", "nob": "nb", "bul": "bg", "srp": "sr", "hrv": "hr", "slk": "sk", "slv": "sl",
    "cat": "ca", "eus": "eu", "glg": "gl", "est": "et", "lav": "lv", "lit": "lt", "kaz": "kk", "uzb": "uz", "mon": "mn",
    "khk": "mn", "tgl": "tl", "yor": "yo", "ibo": "ig", "hau": "ha", "zul": "zu", "xho": "xh", "afr": "af", "sin": "si",
}  # fmt: skip
"""ISO 639-2 and 639-3 codes of languages that also have two letters."""

_NAMES = {
    "english": "en", "german": "de", "french": "fr", "spanish": "es", "italian": "it", "portuguese": "pt",
    "russian": "ru", "ukrainian": "uk", "polish": "pl", "dutch": "nl", "turkish": "tr", "arabic": "ar",
    "persian": "fa", "hebrew": "he", "greek": "el", "hindi": "hi", "bengali": "bn", "tamil": "ta", "telugu": "te",
    "marathi": "mr", "gujarati": "gu", "kannada": "kn", "malayalam": "ml", "punjabi": "pa", "urdu": "ur",
    "nepali": "ne", "odia": "or", "assamese": "as", "sanskrit": "sa", "chinese": "zh", "mandarin": "zh",
    "cantonese": "yue", "japanese": "ja", "korean": "ko", "vietnamese": "vi", "thai": "th", "indonesian": "id",
    "malay": "ms", "swahili": "sw",
}  # fmt: skip
"""English names, as Whisper and Qwen write them."""

_SAME = {"CJK": "han", "IDEOGRAPHIC": "han", "HIRAGANA": "kana", "KATAKANA": "kana", "KATAKANA-HIRAGANA": "kana"}
"""Scripts that Unicode's names call otherwise, by the first word of a name."""


def _scripts_by_language() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for script, languages in SCRIPTS.items():
        for language in languages.split():
            found.setdefault(language, set()).add(script)
    return {language: frozenset(scripts) for language, scripts in found.items()}


_BY_LANGUAGE = _scripts_by_language()


_OTHER_CODES = {"nb": "no", "fil": "tl", "iw": "he", "cmn": "zh", "arb": "ar", "prs": "fa", "hyw": "hy", "mo": "ro"}
"""Codes of languages that py3langid calls otherwise: the same language, or a written form that it does not tell."""


@functools.lru_cache(maxsize=4096)
def code_of(language: str) -> str:
    """Returns the code by which a language is compared: `en` for `en-US`, `eng` and `English`, `no` for `nb`.

    A code or name that is not known stays as it is, in lower case and without subtags.
    """
    first = re.split(r"[-_]", language.strip().lower())[0]
    first = _NAMES.get(first) or _LONG.get(first) or first
    return _OTHER_CODES.get(first, first)


@functools.lru_cache(maxsize=4096)
def scripts_of(language: str) -> frozenset[str] | None:
    """Returns the scripts that a language is written in; None for a language that is not in the table.

    language: an ISO 639 code or an English name, in any case, with subtags or without: `en`, `pt-BR`, `sr_Latn`, `hin`.
    """
    first, *subtags = re.split(r"[-_]", language.strip().lower())
    first = _NAMES.get(first) or _LONG.get(first) or first
    for subtag in subtags:
        if subtag in _SUBTAGS:
            return frozenset({_SUBTAGS[subtag]})
    return _BY_LANGUAGE.get(first)


def languages_of(script: str) -> tuple[str, ...]:
    """Returns the languages that are written in a script, by ISO 639-1 code, else 639-3; none for another script."""
    return tuple(SCRIPTS.get(script, "").split())


@functools.lru_cache(maxsize=65536)
def script_of(character: str) -> str | None:
    """Returns the script of a letter in lower case; None for what is no letter, and for letters of no script."""
    plain = unicodedata.normalize("NFKC", character)[:1]
    if not plain or unicodedata.category(plain) not in ("Lu", "Ll", "Lt", "Lo"):
        return None
    word = unicodedata.name(plain, "").split(" ")[0]
    return _SAME.get(word, word.lower()) or None


def letters_of(text: str) -> Counter[str]:
    """Returns how many letters of each script a text has."""
    found: Counter[str] = Counter()
    for character, count in Counter(text).items():
        script = script_of(character)
        if script is not None:
            found[script] += count
    return found
