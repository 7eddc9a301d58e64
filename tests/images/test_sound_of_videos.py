"""The sound of videos as clips of conversations, beside frames, for the omni family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.config import Config
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError
from forebay.preprocess.decode import Heard
from forebay.steps.text.chat.processor_ids import Writer
from forebay.steps.text.row_encoder import ShownVideo
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.cache import Cache
from forebay.train.collate.collator import Collator
from forebay.train.select import select
from tests.images.clips import clip, film, heard_in, pictures
from tests.images.test_omni_videos import FPS, OwnVideos, asked, own_processor, samples_of, shown, shows_videos
from tests.sound_families import SEES, listed, random_model, recordings
from tests.sound_talks import Talks, built
from tests.train.test_uncached import assert_same, assert_same_batches

RATE_HZ = 16_000
TALK = ["clip3.flac", "then", "a.mp4", "or", "p0.png", "and", "b.webm", "clip1.flac", "?"]


def tone(seconds: float, rate_hz: int, channels: int = 1) -> np.ndarray:
    """Speech, so many seconds of it, in other channels backwards."""
    found = soxr.resample(np.resize(recordings()[0], round(seconds * RATE_HZ)), RATE_HZ, rate_hz).astype(np.float32)
    return np.stack([found, found[::-1]][:channels])


@pytest.fixture(scope="module", params=sorted(SEES))
def talks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    made = Talks.made(tmp_path_factory.mktemp(request.param), request.param)
    shows_videos(made.model)
    data = made.root / "data"
    (data / "a.mp4").write_bytes(film(pictures(18), tone(1.7, 44_100, 2), rate_hz=44_100))
    webm = film(pictures(10), tone(1.2, 48_000), form="webm", codecs=("libvpx-vp9", "libopus"))
    (data / "b.webm").write_bytes(webm)
    rows: list[dict[str, Any]] = [{"id": name, "messages": made.messages(name)} for name in ("one", "seen", "none")]
    rows += [{"id": "both", "messages": talk(made, opened=False)}]
    rows += [{"id": "film", "question": "<video>Who?", "answer": "A cat.", "videos": ["a.mp4"]}]
    part = {"type": "video", "video": "a.mp4", "video_start": 0.3, "video_end": 1.2}
    rows += [{"id": "stretch", "messages": asked(part)}]
    listed(data, rows)
    return made


def talk(talks: Talks, *, opened: bool) -> list[dict[str, Any]]:
    def part(name: str) -> dict[str, Any]:
        if not name.endswith((".mp4", ".webm")):
            return talks._part(name, opened=opened)
        return {"type": "video", "video": shown(talks, name) if opened else name}

    return asked(*(part(name) for name in TALK))


def sound_of(talks: Talks, name: str) -> np.ndarray:
    found, rate_hz = heard_in((talks.root / "data" / name).read_bytes())
    mean = found.mean(axis=0, dtype=np.float32)
    return np.asarray(soxr.resample(mean, rate_hz, RATE_HZ, quality="HQ"))


def config_of(talks: Talks, *overrides: str, **more: str) -> Config:
    vision = f'processor = "{talks.family}"\nfps = {FPS}\nsound = true'
    return talks.config(*overrides, **{"vision": vision, **more})


@pytest.fixture(scope="module")
def cache(talks: Talks) -> Cache:
    found, report = built(config_of(talks))
    assert (report.num_samples, report.failed) == (6, {})
    return found


@pytest.mark.few("qwen2_5_omni")
def test_a_batch_is_the_processor_s_with_its_positions_and_its_loss(
    talks: Talks, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, said = own_processor(talks, lambda: OwnVideos(talks.model, monkeypatch)), talk(talks, opened=True)
    clips = [part["audio"] for part in said[0]["content"] if part["type"] == "audio"]
    clips = [clips[0], sound_of(talks, "a.mp4"), sound_of(talks, "b.webm"), clips[1]]
    processor._multimodal_inputs_from_conversations = with_audio(processor, clips)
    made = processor.apply_chat_template(
        [said], tokenize=True, return_dict=True, return_tensors="pt",
        load_audio_from_video=True, processor_kwargs={"padding": True, "videos_kwargs": {"fps": FPS}},
    )  # fmt: skip
    wanted = {name: torch.as_tensor(value) for name, value in made.items()}
    found: dict[str, Any] = Collator(cache)([samples_of(cache)["both"]])
    assert found["use_audio_in_video"] is True
    features = {"input_features", "feature_attention_mask"}
    for name in wanted.keys() - features:
        torch.testing.assert_close(found[name], wanted[name], atol=0, rtol=0, check_dtype=False)
    lengths = found["feature_attention_mask"].sum(-1)
    for own, of_one, frames in zip(found["input_features"], wanted["input_features"], lengths, strict=True):
        if talks.family == "qwen2_5_omni" or frames == of_one.shape[-1]:  # "alone only"
            torch.testing.assert_close(own[:, :frames], of_one[:, :frames], atol=1e-5, rtol=0)
    model = random_model(talks.family, talks.model)
    shared = {name: found[name] for name in features} | {"labels": found["labels"], "use_audio_in_video": True}
    with torch.no_grad():
        losses = [model(**{**each, **shared}).loss for each in (found, wanted)]
    assert losses[0] == losses[1]


def with_audio(processor: Any, clips: list[np.ndarray]) -> Any:
    """The items that the processor finds in a conversation, with the sound of videos: torchcodec is not there."""
    finds = processor._multimodal_inputs_from_conversations

    def found(*args: Any, **options: Any) -> Any:
        images, videos, _, more = finds(*args, **options)
        return images, videos, clips, more

    return found


@dataclass
class Grids:
    """Stands where a video processor does: it says grids alone."""

    said: Sequence[tuple[int, int, int]] = ()
    merge_size: int = 2
    temporal_patch_size: int = 2

    def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"video_grid_thw": np.array(self.said, np.int64).reshape(-1, 3)}


@pytest.fixture(scope="module")
def writers(talks: Talks) -> tuple[Writer, Any]:
    vocabulary = Vocabulary(talks.model, digest=tokenizer_digest(talks.model))
    writer = Writer(vocabulary, talks.model, ("audio", "image"), videos=True, sound=True)
    return writer, own_processor(talks, Grids)


@given(data=st.data())
def test_tokens_alternate_as_the_processor_writes_them(writers: tuple[Writer, Any], data: st.DataObject) -> None:
    writer, processor = writers
    fps = data.draw(st.sampled_from([0.5, 1, 2, 3, 24 / 7]))
    kinds = data.draw(st.lists(st.sampled_from(["video", "audio"]), min_size=1, max_size=4))
    lengths, side = [data.draw(st.integers(1_000, 32_000)) for _ in kinds], st.sampled_from([2, 4])
    if "Qwen3" in writer.name:  # which makes another token of a clip beside a longer one: "alone only"
        lengths = lengths[:1] * len(kinds)
    grids = [(data.draw(st.integers(1, 12)), data.draw(side), data.draw(side)) for kind in kinds if kind == "video"]
    found = writer.write(
        asked(*({"type": kind} for kind in kinds)), [*lengths, *(ShownVideo(*grid, 2 / fps) for grid in grids)]
    )
    clips = [np.zeros(length, np.float32) for length in lengths]
    items = ({"type": kind, kind: clip if kind == "audio" else "film"} for kind, clip in zip(kinds, clips, strict=True))
    processor.video_processor.said = grids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "_multimodal_inputs_from_conversations", with_audio(processor, clips))
        made = processor.apply_chat_template(
            [asked(*items)], tokenize=True, load_audio_from_video=True, processor_kwargs={"videos_kwargs": {"fps": fps}}
        )
    assert found.fields["input_ids"].tolist() == made[0]


def test_sound_is_what_a_plain_loop_hears(talks: Talks, cache: Cache) -> None:
    ids = list(samples_of(cache))
    lengths = dict(zip(ids, cache.lengths["num_audio_samples"].tolist(), strict=True))
    assert lengths["film"] == len(sound_of(talks, "a.mp4"))
    found, rate_hz = heard_in((talks.root / "data" / "a.mp4").read_bytes())
    cut = found[:, round(0.3 * rate_hz) : round(1.2 * rate_hz)].mean(axis=0, dtype=np.float32)
    assert lengths["stretch"] == len(soxr.resample(cut, rate_hz, RATE_HZ, quality="HQ"))
    (heard,) = Heard(config_of(talks), cache).clips("film").values()
    wanted = np.clip(np.round(sound_of(talks, "a.mp4") * 32768), -32768, 32767)
    np.testing.assert_array_equal(heard, wanted.astype(np.int16))


@pytest.mark.few("qwen3_omni")
def test_no_cache_gives_the_same_and_sound_is_in_the_key(talks: Talks, cache: Cache) -> None:
    off = config_of(talks, 'loader.cache="off"')
    assert_same(cache, select(off), range(len(cache)))
    assert_same_batches(config_of(talks), off)
    for batch in (Collator(cache)([samples_of(cache)[name]]) for name in ("one", "seen", "none")):
        assert "use_audio_in_video" not in batch
    with pytest.raises(ConfigError, match=r"set vision\.fps, and \[audio\]"):
        config_of(talks, vision=f'processor = "{talks.family}"\nsound = true')


def test_bad_sound_costs_its_sample(tmp_path: Path) -> None:
    talks = Talks.made(tmp_path, "qwen2_5_omni")
    shows_videos(talks.model)
    data = talks.root / "data"
    whole = film(pictures(12), tone(1.2, 48_000))
    (data / "good.mp4").write_bytes(whole)
    (data / "silent.mp4").write_bytes(clip(pictures(10)))
    (data / "longer.mp4").write_bytes(film(pictures(8), tone(1.9, 16_000), rate_hz=16_000))
    (data / "shorter.mp4").write_bytes(film(pictures(20), tone(0.4, 16_000), rate_hz=16_000))
    at = whole.rindex(b"mdat") + 4
    (data / "damaged.mp4").write_bytes(damaged(whole, at))
    late = film(pictures(8), tone(1.9, 16_000), rate_hz=16_000, path=tmp_path / "late.mp4")
    (data / "cut.mp4").write_bytes(late[: int(0.8 * len(late))])
    names = ("good", "silent", "longer", "shorter", "damaged", "cut")
    rows: list[dict[str, Any]] = [{"id": n, "messages": asked({"type": "video", "video": f"{n}.mp4"})} for n in names]
    rows += [{"id": "frames", "messages": asked({"type": "video", "video": ["p0.png", "p0.png"]})}]
    rows += [{"id": "heard alone", "question": "<audio>?", "answer": "A.", "audios": ["good.mp4"]}]
    listed(data, rows)
    found, report = built(config_of(talks))
    assert {found.sample_id(n) for n in range(len(found))} == {"good", "longer", "shorter", "heard alone"}
    assert (report.failed["no_sound"], report.failed["truncated_sound"]) == (2, 1)
    assert sum(report.failed.values()) == 4


def damaged(data: bytes, start: int) -> bytes:
    """A film whose sound is waste: what lies behind its frames."""
    half = start + (len(data) - start) // 2
    return data[:half] + bytes(len(data) - half)
