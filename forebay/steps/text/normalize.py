"""Texts that say nothing, or are annotations, and languages as manifests write them (en, EN, en-US, English).

An annotation is what a tool wrote, with its times: for the checks of `forebay lint` and for `init`.
"""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    r"[\s\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*"
)
"""White space, and what Unicode calls default ignorable: zero-width spaces and joiners, byte order marks, fillers."""


def is_unseen(text: str) -> bool:
    """Says whether a text holds nothing that is seen or heard: empty, white space, zero-width characters.

    Inside of words joiners carry meaning (Hindi, Persian), so no step takes them out.
    """
    return _UNSEEN.fullmatch(text) is not None


MAX_DIGIT_SHARE = 0.5
"""Share of digits among the characters of a text above which it is no speech but times."""
_SIGNS = ("\t", "-->", "ooTextFile")
_TIMES = re.compile(r"\d+([.:,]\d+)*\s+\d+([.:,]\d+)*\s")


def is_annotation(text: str) -> bool:
    """Returns whether a text is an export of ELAN, Praat, Audacity, HTK or TIMIT, or of subtitles."""
    return _TIMES.match(text) is not None or any(sign in text for sign in _SIGNS) or digit_share(text) > MAX_DIGIT_SHARE


def digit_share(text: str) -> float:
    """Returns the share of digits among the characters of a text, white space left out."""
    chars = "".join(text.split())
    return sum(map(str.isdigit, chars)) / len(chars) if chars else 0.0


_REGION = re.compile(r"([a-z]{2,3})[-_][a-z0-9_-]+")

_QWEN3_ASR_NAMES = {
    "ar": "Arabic",
    "cs": "Czech",
    "da": "Danish",
    "de": "German",
    "el": "Greek",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fi": "Finnish",
    "fil": "Filipino",
    "fr": "French",
    "hi": "Hindi",
    "hu": "Hungarian",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "mk": "Macedonian",
    "ms": "Malay",
    "nl": "Dutch",
    "pl": "Polish",
    "pt": "Portuguese",
    "ro": "Romanian",
    "ru": "Russian",
    "sv": "Swedish",
    "th": "Thai",
    "tr": "Turkish",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
"""The 30 languages of the Qwen3-ASR model card; a test compares them with transformers' list."""


def whisper_code(language: str) -> str | None:
    """Returns Whisper's code (`en`) of a code or English name, in any case; None for languages that Whisper has not."""
    # Whisper's own list, by way of the tokenizer's module, which is loaded with every Whisper tokenizer.
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    wanted = _without_region(language)
    code = TO_LANGUAGE_CODE.get(wanted, wanted)
    return str(code) if code in LANGUAGES else None


def qwen3_asr_name(language: str) -> str | None:
    """Returns the name that Qwen3-ASR was trained with (`English`) of a code or name, in any case; None for others."""
    wanted = _without_region(language)
    if wanted in _QWEN3_ASR_NAMES:
        return _QWEN3_ASR_NAMES[wanted]
    return next((name for name in _QWEN3_ASR_NAMES.values() if name.lower() == wanted), None)


def _without_region(language: str) -> str:
    wanted = language.strip().lower()
    match = _REGION.fullmatch(wanted)
    return match[1] if match else wanted
