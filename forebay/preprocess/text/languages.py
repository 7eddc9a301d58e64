"""Languages as manifests write them (en, EN, en-US, English) to what the models' prompts want."""

from __future__ import annotations

import re

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
    """Returns Whisper's language code (`en`) of a code or English name, in any case; None where Whisper has no such language."""
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
