"""Clips of several windows of 30 seconds: batches and losses of the processors that divide them, and their limits."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers

from forebay.pretrained import from_folder
from forebay.steps.audio.extractor.conversation_sound import ClipMel, ConversationSound
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder
from forebay.store.cache import open_cache
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.sound_families import RATE_HZ, clips, hearing, listed, said
from tests.sound_talks import Talks
from tests.vlm_families import Family, write_family

_SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
_TEXT = {**_SMALL, "num_key_value_heads": 1, "max_position_embeddings": 4096}
SECONDS = (0.9, 30.0, 30.0 + 1 / RATE_HZ, 64.321, 90.0)


def _flamingo(ids: Callable[[str], int], size: int) -> Any:
    audio = {**_SMALL, "num_mel_bins": 128}
    text = {"model_type": "qwen2", "vocab_size": size, **_TEXT}
    return transformers.AudioFlamingo3Config(audio_config=audio, text_config=text, audio_token_id=ids("<sound>"))


def _glm(ids: Callable[[str], int], size: int) -> Any:
    audio = {**_SMALL, "intermediate_size": 64, "num_mel_bins": 128}
    text = {"model_type": "llama", "vocab_size": size, "eos_token_id": [0], **_TEXT}
    return transformers.GlmAsrConfig(audio_config=audio, text_config=text, audio_token_id=ids("<|pad|>"))


def family(processor: str, token: str, config: Callable[[Callable[[str], int], int], Any], **settings: Any) -> Family:
    return Family(
        processor=processor,
        image_processor="WhisperFeatureExtractor",
        image_settings={"feature_size": 128},
        template=hearing(token),
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", token),
        eos="<|im_end|>",
        settings=settings,
        config=config,
        model=processor.replace("Processor", "ForConditionalGeneration"),
    )


FAMILIES = {
    "flamingo": family("AudioFlamingo3Processor", "<sound>", _flamingo),
    "glm": family("GlmAsrProcessor", "<|pad|>", _glm),
}


class LongTalks(Talks):
    """Talks of one clip each, called by it."""

    def messages(self, name: str, *, opened: bool = False) -> list[dict[str, Any]]:
        sound = soundfile.read(self.root / "data" / name, dtype="float32")[0] if opened else name
        parts = [{"type": "audio", "audio": sound}, {"type": "text", "text": f"What is {name}?"}]
        answer = {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}
        return [{"role": "user", "content": parts}, answer]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.few("glm")
def test_a_batch_and_its_loss_are_the_processor_s_own(name: str, tmp_path: Path) -> None:
    write_family(FAMILIES[name], tmp_path / name)
    names = clips(tmp_path / "data", SECONDS)
    talks = LongTalks(tmp_path, name, tuple(names))
    listed(tmp_path / "data", [{"id": clip, "messages": talks.messages(clip)} for clip in names])
    config = talks.config()
    report = build_here(config)
    assert report.failed == {}
    cache = open_cache(report.cache)
    (batch,) = make_loader(config)
    ids = [row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    clip_of = cache.samples["sample_id"].to_pylist()
    known = {tuple(cache.read(place)["input_ids"].tolist()): clip for place, clip in enumerate(clip_of)}
    order = [known[tuple(row)] for row in ids]
    own = talks.own_batch(order)
    assert own.keys() == batch.keys() - {"labels"}
    assert batch["input_features"].shape == (1 + 1 + 2 + 3 + 3, 128, 3000)
    for field, values in own.items():
        if field == "input_features":
            assert (values - batch[field]).abs().max() <= 1e-6
        else:
            assert torch.equal(values.to(batch[field].dtype), batch[field]), field
    torch.manual_seed(0)
    model = getattr(transformers, FAMILIES[name].model)(from_folder(transformers.AutoConfig, talks.model)).eval()
    with torch.no_grad():
        assert torch.allclose(model(**batch).loss, model(**own, labels=batch["labels"]).loss, atol=1e-5)
    frames = cache.lengths["num_frames"]
    stored = [len(cache.read(place)["input_features"][0]) for place in range(len(cache))]
    assert frames.tolist() == stored
    uncached = make_loader(talks.config('run.cache_root="no"'))
    assert sum(len(each["input_features"]) for each in uncached) == 10


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.few("flamingo")
def test_a_clip_of_more_windows_than_the_processor_takes_is_refused_or_cut(name: str, tmp_path: Path) -> None:
    found = FAMILIES[name]
    default = inspect.signature(getattr(transformers, found.processor).__init__).parameters["max_audio_len"].default
    write_family(found, tmp_path / name)
    step = ConversationSound.native(ExtractorFolder.read(tmp_path / name), dtype="float32")
    assert isinstance(step, ClipMel)
    assert step.windows == default // 30
    path = tmp_path / name / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_audio_len": 65}))
    talks = LongTalks(tmp_path, name, ())
    names = clips(tmp_path / "data", (59.9, 60.01, 61.0))
    listed(tmp_path / "data", [said("<audio>q", "A.", audio=clip, id=clip) for clip in names])
    report = build_here(talks.config())
    assert report.failed == {"clip_too_long": 2}
    report = build_here(talks.config("source.max_duration_s=60.0", 'source.overlong="clip"'))
    cache = open_cache(report.cache)
    assert (report.failed, cache.metadata["clipped"]) == ({}, 2)
    (batch,) = make_loader(talks.config("source.max_duration_s=60.0", 'source.overlong="clip"'))
    assert batch["input_features"].shape[0] == 6
    assert batch["input_features_mask"].sum(dim=1).tolist().count(3000) == 5


def test_windows_of_any_length_are_those_of_its_parts() -> None:
    step = ClipMel(n_mels=128, dtype="float32", mask="m", windows=3)
    rng = np.random.default_rng(0)
    for size in (1, 159, 480_000, 480_001, 480_161, 960_000, 1_000_123):
        sound = rng.normal(size=size).astype(np.float32) * np.float32(0.1)
        (made,) = step.make([sound])
        parts = step.make([sound[start : start + 480_000] for start in range(0, size, 480_000)])
        for field in ("input_features", "m"):
            assert np.array_equal(made[field], np.concatenate([part[field] for part in parts])), (size, field)
        assert len(made["input_features"]) == step.num_frames(np.array([size]))[0]
    assert step.num_frames(np.array([0, 1]))[0] == 0
    assert step.refused(1_440_000) is None
    assert step.refused(1_440_001) is not None
