"""Transcripts to tokens: normalisation, languages, and the prompts of Whisper and Qwen3-ASR."""

from __future__ import annotations

from forebay.steps.text.encoder import TextEncoder, field_specs
from forebay.steps.text.normalize import normalize_text

__all__ = ["TextEncoder", "field_specs", "normalize_text"]
