"""Which script letters are of, by Unicode's names; and which scripts languages are written in."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping

_SCRIPTS: Mapping[str, str] = {
    "latin": """aa af ast az bm br bs ca ceb cs cy da de en eo es et eu fi fil fj fo fr fy ga gd gl gn gsw gv ha haw hr
        ht hu hsb ia id ig is it jv kea kl kab kam ku kw la lb lg ln lt luo lv mg mi ms mt nb nl nn no nso nv ny oc om
        pap pl pt qu rm rn ro rw sc scn sco se sk sl sm sn so sq sr ss st su sv sw tk tl tn to tpi tr ts umb uz ve vi
        vot wo xh yo zu""",
    "cyrillic": "ab ba be bg ce cv kk ky mhr mk mn myv os ru rue sah sr tg tk tt udm uk uz sr bs az mo ku",
    "greek": "el grc",
    "armenian": "hy hyw",
    "georgian": "ka xmf",
    "hebrew": "he iw yi lad",
    "arabic": "ar arz ary apc ajp acm ckb fa ks ku pnb ps prs sd ug ur uz az ms skr pa kk ha bal",
    "devanagari": "hi mr ne sa kok bho mai brx doi awa mag hne bgc raj new gom sd ks sat",
    "bengali": "bn as mni bpy",
    "gurmukhi": "pa",
    "gujarati": "gu",
    "oriya": "or",
    "tamil": "ta",
    "telugu": "te",
    "kannada": "kn tcy",
    "malayalam": "ml",
    "sinhala": "si",
    "thai": "th",
    "lao": "lo",
    "tibetan": "bo dz",
    "myanmar": "my shn mnw",
    "khmer": "km",
    "ethiopic": "am ti gez",
    "mongolian": "mn",
    "thaana": "dv",
    "ol": "sat",
    "meetei": "mni",
    "tifinagh": "zgh kab",
    "cherokee": "chr",
    "canadian": "iu cr oj",
    "han": "zh ja yue cmn wuu nan hak lzh ko",
    "kana": "ja ain ryu",
    "hangul": "ko",
    "bopomofo": "zh cmn nan",
}
"""Scripts by the languages that are written in them: ISO 639-1 codes, else 639-3."""

_SUBTAGS = {
    "latn": "latin",
    "cyrl": "cyrillic",
    "arab": "arabic",
    "deva": "devanagari",
    "hans": "han",
    "hant": "han",
    "hani": "han",
    "grek": "greek",
    "hebr": "hebrew",
    "beng": "bengali",
    "guru": "gurmukhi",
    "mong": "mongolian",
    "tibt": "tibetan",
}
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

_TOGETHER = (frozenset({"han", "kana"}), frozenset({"han", "hangul"}), frozenset({"han", "bopomofo"}))
"""Scripts that one text is written in."""

_ALIKE = frozenset({"latin", "cyrillic", "greek"})
_WORD = re.compile(r"\w+")


def _scripts_by_language() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for script, languages in _SCRIPTS.items():
        for language in languages.split():
            found.setdefault(language, set()).add(script)
    return {language: frozenset(scripts) for language, scripts in found.items()}


_BY_LANGUAGE = _scripts_by_language()


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


def foreign_share(letters: Counter[str], language: str) -> tuple[float, str]:
    """Returns the share of letters that a text's language is not written with, and the script of most of these.

    Of a language that is not known: the letters of the second script, where the two are not written together.
    """
    total = sum(letters.values())
    scripts = scripts_of(language) if language else None
    if scripts is None:
        first = max(letters, key=lambda name: (letters[name], name), default="")
        scripts = frozenset({first}).union(*(pair for pair in _TOGETHER if first in pair))
    others = Counter({name: count for name, count in letters.items() if name not in scripts})
    if not others:
        return 0.0, ""
    return sum(others.values()) / total, max(others, key=lambda name: (others[name], name))


def mixed_word(text: str, letters: Counter[str]) -> str | None:
    """Returns the first word that mixes scripts whose letters look alike, None where there is none.

    letters: those of the text, which most often say that there is none.
    """
    if sum(name in _ALIKE for name in letters) < 2:
        return None
    for word in _WORD.findall(text):
        if len({script_of(character) for character in word} & _ALIKE) > 1:
            return str(word)
    return None
