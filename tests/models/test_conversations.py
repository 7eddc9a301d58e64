"""The table of conversations: some classes that work, some that do not, each with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from benchmarks.zoo.conversations import Outcome, outcome_of
from benchmarks.zoo.page import PAGE


def outcome(name: str, folder: Path) -> Outcome:
    found = outcome_of(name, tuple(kind for kind, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name), folder)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlavaProcessor", "input_ids"),
        ("LlavaNextProcessor", "input_ids"),
        ("Idefics2Processor", "input_ids"),
        ("Gemma4Processor", "input_ids, mm_token_type_ids"),
        ("Ovis2Processor", "input_ids"),
    ],
)
def test_a_class_that_writes_conversations_is_shown_with_its_fields(name: str, fields: str, tmp_path: Path) -> None:
    assert f"| {fields} |" in outcome(name, tmp_path).line


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("CLIPProcessor", "has no image_token"),
        ("Llama4Processor", "exists for torchvision alone"),
        ("MgpstrProcessor", "cannot be made of the folder's tokenizer and image processor"),
        ("ColPaliProcessor", "Only one of text or images can be processed at a time"),
    ],
)
def test_a_class_that_does_not_says_why(name: str, why: str, tmp_path: Path) -> None:
    found = outcome(name, tmp_path)
    assert found.encoder is None
    assert why in found.line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("VibeVoiceAsrProcessor", "| input_values, padding_mask | exact |"),
        ("Qwen3OmniMoeProcessor", "| alone only: its own batches have other values in input_features"),
        ("CanaryProcessor", "| no | CanaryProcessor has no audio_token"),
        ("VoxtralProcessor", "| no | VoxtralProcessor has its conversations written by mistral-common (tekken.json)"),
    ],
)
def test_a_class_of_sound_is_shown_with_its_promise_or_its_reason(name: str, said: str, tmp_path: Path) -> None:
    families = tuple(kind for kind, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name)
    found = outcome_of(name, families, tmp_path, "audio")
    assert found is not None
    assert said in found.sound_line
    assert found.sound_line in PAGE.read_text(encoding="utf-8").splitlines()
