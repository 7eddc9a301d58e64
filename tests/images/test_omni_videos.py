"""Videos in conversations of the omni family: texts, values and losses are those of the model's own processor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.image_utils import SizeDict

from forebay.config import Config
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError
from forebay.steps.image.processor.whole import image_processor_of, sound_extractor_of, whole_processor
from forebay.steps.image.video_settings import video_settings
from forebay.steps.recipe import recipe_of
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.cache import Cache
from forebay.store.image.image_settings import image_settings
from forebay.train.collate.collator import Collator
from forebay.train.select import select
from tests.images.clips import clip, decoded, model_folder, pictures
from tests.images.test_videos import the_class
from tests.sound_families import SEES, listed, random_model
from tests.sound_talks import TALKS, Talks, built
from tests.train.test_uncached import assert_same, assert_same_batches

FPS = 2
VIDEO_PART = "{%- elif p.type == 'video' %}{{ '<|vision_bos|><|VIDEO|><|vision_eos|>' }}"
TALK = ["p0.png", "see", "a.mp4", "and", "clip0.flac", "?"]


def shows_videos(folder: Path) -> None:
    """Adds a video processor and its part of the template to a folder."""
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("{%- elif p.type == 'audio'", VIDEO_PART + "{%- elif p.type == 'audio'")
    )
    path = folder / "processor_config.json"
    images = json.loads(path.read_text())
    kept = {name: images["image_processor"][name] for name in ("patch_size", "merge_size", "temporal_patch_size")}
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "size": {"shortest_edge": 1, "longest_edge": 9}, **kept}
    path.write_text(json.dumps({**images, "video_processor": videos}))


class OwnVideos:
    """Stands where the video processor does: the class's arithmetic of frames that were sampled already."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = video_settings(folder, image_settings(folder))
        self.real = the_class("qwen2", monkeypatch)
        self.merge_size, self.temporal_patch_size = self.settings.merge_size, self.settings.temporal_patch_size

    def __call__(self, videos: Any, size: dict[str, int], **_: Any) -> dict[str, Any]:
        flat = [each for talk in videos for each in talk]
        made = self.real._preprocess(
            [torch.from_numpy(np.ascontiguousarray(each)).permute(0, 3, 1, 2) for each in flat],
            do_resize=True, size=SizeDict(**size), resample=3, do_rescale=True, rescale_factor=1 / 255,
            do_normalize=True, image_mean=self.settings.image_mean, image_std=self.settings.image_std,
            patch_size=self.settings.patch_size, temporal_patch_size=2, merge_size=2, cap_pixels_per_frame=False,
        )  # fmt: skip
        return {"pixel_values_videos": made["pixel_values_videos"], "video_grid_thw": made["video_grid_thw"]}


def own_processor(talks: Talks, videos: Callable[[], Any]) -> Any:
    """The family's own processor. videos: makes what stands where its video processor does."""
    folder = talks.model
    vocabulary = Vocabulary(folder, digest=tokenizer_digest(folder))
    parts = {"audio": sound_extractor_of(folder), "image": image_processor_of(folder)}
    made = whole_processor(folder, tokenizer=vocabulary.tokenizer, tokenizer_folder=folder, parts=parts)
    made.video_processor = videos()
    return made


def own_batch(processor: Any, talks: list[list[dict[str, Any]]], **options: Any) -> dict[str, torch.Tensor]:
    made = processor.apply_chat_template(talks, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs={"padding": True, **options})  # fmt: skip
    return {name: torch.as_tensor(value) for name, value in made.items()}


def samples_of(cache: Cache) -> dict[str, Any]:
    return {cache.sample_id(index): cache.read(index) for index in range(len(cache))}


@pytest.fixture(scope="module", params=sorted(SEES))
def talks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    made = Talks.made(tmp_path_factory.mktemp(request.param), request.param)
    shows_videos(made.model)
    data = made.root / "data"
    (data / "a.mp4").write_bytes(clip(pictures(30)))
    (data / "b.mp4").write_bytes(clip(pictures(14, (64, 96))))
    rows: list[dict[str, Any]] = [{"id": name, "messages": made.messages(name)} for name in ("one", "seen", "none")]
    video = {"type": "video", "video": "a.mp4"}
    parts = [video if text == "a.mp4" else made._part(text, opened=False) for text in TALK]
    rows += [
        {"id": "both", "messages": asked(*parts)},
        {"id": "two", "question": "<video> or <video>", "answer": "No.", "videos": ["b.mp4", "a.mp4"]},
        {"id": "part", "messages": asked({**video, "nframes": 4, "max_pixels": 200_000})},
    ]
    listed(data, rows)
    return made


def config_of(talks: Talks, *overrides: str, **more: str) -> Config:
    return talks.config(*overrides, **{"vision": f'processor = "{talks.family}"\nfps = {FPS}', **more})


@pytest.fixture(scope="module")
def cache(talks: Talks) -> Cache:
    found, report = built(config_of(talks))
    assert (report.num_samples, report.failed) == (6, {})
    return found


def shown(talks: Talks, name: str) -> np.ndarray:
    """The frames at 2 a second of a clip of 10 a second."""
    frames = decoded((talks.root / "data" / name).read_bytes())
    count = min(max(len(frames) / 10 * FPS, 4), len(frames)) // 2 * 2
    return np.stack([frames[i] for i in torch.arange(0, len(frames), len(frames) / count).int()])


def opened(talks: Talks, name: str) -> list[dict[str, Any]]:
    video = {each: {"type": "video", "video": shown(talks, each)} for each in ("a.mp4", "b.mp4")}
    if name in TALKS:
        return talks.messages(name, opened=True)
    if name == "two":
        return asked(video["b.mp4"], {"type": "text", "text": " or "}, video["a.mp4"], answer="No.")
    return asked(*(video.get(each) or talks._part(each, opened=True) for each in TALK))


def asked(*parts: Any, answer: str = "A dog.") -> list[dict[str, Any]]:
    """A question of these parts, and its answer."""
    text = {"type": "text", "text": answer}
    return [{"role": "user", "content": [*parts]}, {"role": "assistant", "content": [text]}]


@pytest.mark.few("qwen3_omni")
def test_a_batch_is_the_processor_s_and_so_is_its_loss(
    talks: Talks, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, collate = own_processor(talks, lambda: OwnVideos(talks.model, monkeypatch)), Collator(cache)
    samples, model = samples_of(cache), random_model(talks.family, talks.model)
    for names in (["both"], ["two"], ["none", "two", "seen", "both"], ["one"]):
        wanted = own_batch(processor, [opened(talks, name) for name in names], videos_kwargs={"fps": FPS})
        found = collate([samples[name] for name in names])
        labels = found.pop("labels")
        assert found.keys() == wanted.keys()
        # Qwen3-Omni makes another value of a clip beside a longer one: "alone only".
        features = {"input_features", "feature_attention_mask"} if len(names) > 1 and "qwen3" in talks.family else set()
        for name in wanted.keys() - features:
            close = 1e-5 if name == "input_features" else 0
            torch.testing.assert_close(found[name], wanted[name], atol=close, rtol=0, check_dtype="mask" not in name)
        with torch.no_grad():
            losses = [
                model(**{**each, **{name: found[name] for name in features}}, labels=labels).loss
                for each in (found, wanted)
            ]
        assert abs(losses[0] - losses[1]) < 1e-5
        rounded = Collator(cache, dtype=torch.bfloat16)([samples[name] for name in names])
        assert rounded.get("video_second_per_grid", torch.zeros(1)).dtype == torch.float32


def test_a_part_has_frames_and_sizes_of_its_own(talks: Talks, cache: Cache) -> None:
    sample = samples_of(cache)["part"]
    rows = [array for array in sample["pixel_values_videos"] if len(array)]
    factor = 28 if talks.family == "qwen2_5_omni" else 32
    (grid,) = (each[0] for each in sample["video_grid_thw"] if len(each))
    assert (len(rows[0]), grid[0]) == (grid.prod(), 2)
    assert 128 * factor**2 <= grid[1:].prod() * factor**2 / 4 <= 200_000
    np.testing.assert_array_equal(sample["video_second_per_grid"][0], np.array([2 / (4 / 30 * 10)], np.float32))
    assert cache.lengths["num_patches"][list(samples_of(cache)).index("part")] == grid.prod()


@pytest.mark.few("qwen2_5_omni")
def test_other_codecs_and_no_cache_give_the_same(talks: Talks, cache: Cache) -> None:
    zstd, _ = built(config_of(talks, vision=f'processor = "{talks.family}"\nfps = {FPS}\ncodec = "zstd"'))
    several = ([source.read(index) for index in range(len(source))] for source in (cache, zstd))
    packed, wanted = (
        Collator(source)(samples) for source, samples in zip((zstd, cache), reversed([*several]), strict=True)
    )
    assert all(torch.equal(packed[name], value) for name, value in wanted.items())
    config, off = config_of(talks), config_of(talks, 'loader.cache="off"')
    assert_same(cache, select(off), range(len(cache)))
    assert_same_batches(config, off)


def test_what_cannot_be_is_refused_by_name(talks: Talks) -> None:
    with pytest.raises(ConfigError, match="positions beside clips packs do not have"):
        config_of(talks, plan='kind = "pack"\nseq_len = 500')
    other = model_folder(talks.root / "vl", "qwen2_5")
    vision = f'processor = "{other}"\nimages = "processor"\nfps = 2'
    with pytest.raises(ConfigError, match=r'images = "processor" has of Qwen2\.5-Omni'):
        recipe_of(config_of(talks, vision=vision, audio="", text=f'tokenizer = "{other}"\nprompt = "chat"'))
