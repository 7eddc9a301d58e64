"""Videos in packs of Qwen-VL: frames and values are those of the processor's class, positions those of the model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from forebay import load_config
from forebay.config import Config, TrainConfig
from forebay.errors import ConfigError, ForebayError, SampleError
from forebay.plan.make import plan_of
from forebay.pretrained import from_folder
from forebay.steps.image.video_frames import frames_at, video_facts, video_patches
from forebay.steps.image.video_settings import Sampling, VideoSettings, video_settings
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.image_settings import ImageSettings, image_settings
from forebay.train import make_loader
from forebay.train.collate.packed import PackCollator, PackShapes
from forebay.train.collate.patches import fields_of, to_model_inputs
from forebay.train.loop import trainable
from forebay.train.loop.trainable import set_passes
from forebay.train.select import select
from tests.images.clips import (
    FAMILIES,
    PHOTOS,
    clip,
    cut,
    decoded,
    model_folder,
    pictures,
    sound,
    turned,
    without_frames,
)
from tests.preprocess.here_pool import build_here
from tests.train.test_uncached import assert_same, assert_same_batches
from tests.train.tiny_vl import random_large

FPS = 5
FRAMES = pictures(20)
SLOW = [0, 1, 2, 3, 4, 5, 6, 7, 20, 40, 41, 42]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, a photo, conversations about them, a tiny model of the family."""
    root = tmp_path_factory.mktemp(family)
    model_folder(root / "model", family)
    files = {
        "a.mp4": clip(FRAMES),
        "turned.mp4": turned(clip(FRAMES[:12])),
        "slow.mkv": clip(FRAMES[:12], form="matroska", times=SLOW),
        "vp9.webm": clip(FRAMES[:9], form="webm", codec="libvpx-vp9"),
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    shutil.copy(PHOTOS[0], root / "p.jpg")
    asked = [{"type": "image", "image": "p.jpg"}, {"type": "text", "text": "and"}]
    parts = [
        *asked,
        {"type": "video", "video": "turned.mp4", "nframes": 6},
        {"type": "video", "video": "a.mp4", "fps": 2},
    ]
    rows = [
        {"id": "both", "messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A dog."}]},
        {"id": "clip", "question": "What <video> is it?", "answer": "A cat.", "videos": ["a.mp4"]},
        {"id": "slow", "question": "Slow?", "answer": "Yes.", "video": "slow.mkv"},
        {"id": "photo", "question": "Who?", "answer": "Me.", "image": "p.jpg"},
        {"id": "vp9", "question": "<video><image>Who?", "answer": "You.", "image": "p.jpg", "videos": ["vp9.webm"]},
        {"id": "text", "question": "Who?", "answer": "We."},
    ]
    (root / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return root


def config_in(folder: Path, *overrides: str, **vision: Any) -> Config:
    document = {
        "name": "v",
        "source": {"kind": "jsonl", "manifest": str(folder / "train.jsonl")},
        "vision": {k: v for k, v in ({"processor": str(folder / "model"), "fps": FPS} | vision).items() if v},
        "text": {"tokenizer": str(folder / "model"), "prompt": "chat"},
        "plan": {"kind": "pack", "seq_len": 2048, "buffer_size": 0},
        "run": {"cache_root": str(folder / "caches")},
    }
    return load_config(document, overrides=overrides)


@pytest.fixture(scope="module")
def cache(folder: Path) -> Cache:
    report = build_here(config_in(folder))
    assert report.num_samples == 6
    return open_cache(report.cache)


def samples_of(cache: Cache) -> dict[str, Any]:
    return {cache.sample_id(index): cache.read(index) for index in range(len(cache))}


def the_class(family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of transformers; where torchvision does not load, with the torch functions that torchvision calls."""
    name, kind = ("qwen3_vl", "Qwen3VLVideoProcessor") if family == "qwen3" else ("qwen2_vl", "Qwen2VLVideoProcessor")
    if importlib.util.find_spec("torchvision") is None:
        for part in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
            monkeypatch.setitem(sys.modules, f"torchvision{part}", ModuleType(f"torchvision{part}"))
        monkeypatch.setattr(TorchvisionBackend, "resize", _resize)
        monkeypatch.setattr(TorchvisionBackend, "normalize", _normalize)
    module = importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
    made = object.__new__(getattr(module, kind))
    made.__dict__ |= {"num_frames": None, "fps": None}
    return made


def _resize(self: Any, image: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
    flat, shape = image.reshape(-1, *image.shape[-3:]), (size.height, size.width)
    made = torch.nn.functional.interpolate(flat, size=shape, mode="bicubic", antialias=True)
    return made.reshape(*image.shape[:-2], *shape)


def _normalize(self: Any, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    return image.sub_(mean[:, None, None]).div_(std[:, None, None])


def processed(real: Any, frames: list[np.ndarray], found: VideoSettings) -> tuple[np.ndarray, list[list[int]]]:
    """`pixel_values_videos` and `video_grid_thw` of the class for frames."""
    real.max_video_tokens = found.max_video_tokens
    made = real._preprocess(
        [torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()],
        do_resize=True,
        size=SizeDict(shortest_edge=found.min_pixels, longest_edge=found.max_pixels),
        resample=3,
        do_rescale=True,
        rescale_factor=found.rescale_factor,
        do_normalize=True,
        image_mean=found.image_mean,
        image_std=found.image_std,
        patch_size=found.patch_size,
        temporal_patch_size=found.temporal_patch_size,
        merge_size=found.merge_size,
        cap_pixels_per_frame=found.cap_pixels_per_frame,
    )
    return made["pixel_values_videos"].numpy(), made["video_grid_thw"].tolist()


def sampled(real: Any, found: VideoSettings, num_frames: int, fps: float, asked: Sampling) -> list[int]:
    """The frames that the class samples."""
    real.min_frames, real.max_frames, real.temporal_patch_size = asked.min_frames or 4, asked.max_frames or 768, 2
    length = {"fps": asked.fps} if asked.nframes is None else {"num_frames": asked.nframes}
    return [int(i) for i in real.sample_frames(metadata=VideoMetadata(total_num_frames=num_frames, fps=fps), **length)]


def shown_frames(folder: Path, name: str, asked: Sampling, real: Any, found: VideoSettings) -> list[np.ndarray]:
    """The frames that a model is shown, by a plain loop."""
    frames, fps = decoded((folder / name).read_bytes()), 10.0
    if name == "turned.mp4":
        frames = [np.rot90(frame, -1) for frame in frames]
    if name == "slow.mkv":  # what is seen at its time
        fps = 11 / 4.2
        places = [max(n for n, t in enumerate(SLOW) if t / 10 <= i / fps + 1e-6) for i in range(12)]
        frames = [frames[place] for place in places]
    return [frames[i] for i in sampled(real, found, len(frames), fps, asked)]


VIDEOS = {
    "both": [("turned.mp4", Sampling(nframes=6)), ("a.mp4", Sampling(fps=2))],
    "clip": [("a.mp4", Sampling(fps=FPS))],
    "slow": [("slow.mkv", Sampling(fps=FPS))],
    "vp9": [("vp9.webm", Sampling(fps=FPS))],
}


def test_a_batch_has_the_class_s_values_for_every_frame(
    family: str, folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = video_settings(folder / "model", image_settings(folder / "model"))
    real, samples = the_class(family, monkeypatch), samples_of(cache)
    as_values, as_codes = PackCollator(cache), PackCollator(cache, dtype=None)
    for name, videos in VIDEOS.items():
        wanted = [processed(real, shown_frames(folder, *each, real, found), found) for each in videos]
        batch = as_values([samples[name]])
        np.testing.assert_array_equal(batch["pixel_values_videos"], np.concatenate([values for values, _ in wanted]))
        assert batch["video_grid_thw"].tolist() == [grid for _, grids in wanted for grid in grids]
        assert ("second_per_grid_ts" in batch) == (family == "qwen2_5")
        expanded = to_model_inputs(as_codes([samples[name]]), cache.constants)
        assert torch.equal(expanded["pixel_values_videos"], batch["pixel_values_videos"])
    for name in ("photo", "text"):
        found_names = set(fields_of(as_values([samples[name]])))
        assert not {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"} & found_names


def test_texts_are_those_of_the_processor(family: str, folder: Path, cache: Cache) -> None:
    kind: Any = Qwen3VLProcessor if family == "qwen3" else Qwen2_5_VLProcessor
    tokenizer, samples = from_folder(AutoTokenizer, folder / "model"), samples_of(cache)
    processor = object.__new__(kind)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.image_processor = processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    grids, places = samples["clip"]["video_grid_thw"], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    if family == "qwen3":
        places = np.linspace(0, 19, 10).round().astype(int).tolist()
    told = {
        "video_grid_thw": torch.from_numpy(grids),
        "video_metadata": [VideoMetadata(20, 10.0, frames_indices=places)],
    }
    turn = "<|im_start|>user\nWhat <|vision_start|><|video_pad|><|vision_end|> is it?<|im_end|>\n"
    text = turn + "<|im_start|>assistant\nA cat.<|im_end|>\n"
    (wanted,), _ = processor.get_text_with_replacements([text], [], [processor.replace_video_token(told, 0)])
    ids = tokenizer(wanted, add_special_tokens=False)["input_ids"]
    assert samples["clip"]["input_ids"].tolist() == ids
    assert tokenizer.decode(samples["clip"]["input_ids"][samples["clip"]["label_mask"] == 1]) == "A cat.<|im_end|>"
    np.testing.assert_array_equal(samples["clip"]["second_per_grid_ts"], np.array([2 / (10 / 20 * 10)], np.float32))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.few
def test_packed_equals_separate_and_positions_are_the_model_s(folder: Path, cache: Cache, attention: str) -> None:
    model = random_large(folder / "model", attention=attention)
    samples, collator, config = [*samples_of(cache).values()], PackCollator(cache), model.config
    with torch.no_grad():
        packed, start = model(**fields_of(collator(samples))).logits[0], 0
        for sample in samples:
            batch, length = collator([sample]), len(sample["input_ids"])
            ids = batch["input_ids"][:, :length]  # without the image of padding
            kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
            names = {"pixel_values_videos", "video_grid_thw", "second_per_grid_ts"} & set(fields_of(batch))
            given = {name: batch[name] for name in names} | {"mm_token_type_ids": kinds}
            if len(sample["patches"]):
                given |= {name: batch[name] for name in ("pixel_values", "image_grid_thw")}
            wanted, _ = model.model.get_rope_index(ids, **{k: v for k, v in given.items() if "pixel" not in k})
            assert torch.equal(batch["position_ids"][1:, 0, :length], wanted[:, 0])
            alone = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits[0]
            torch.testing.assert_close(packed[start : start + length], alone, atol=1e-5, rtol=0)
            start += length


@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)))
def test_frames_and_sizes_are_the_class_s(data: st.DataObject, family: Any) -> None:
    number = st.integers(1, 900)
    count, fps = data.draw(number), data.draw(st.sampled_from([1.0, 10.0, 23.976, 24.0, 29.97, 30.0, 60.0]))
    bounded = st.builds(Sampling, fps=st.floats(0.05, 90), min_frames=st.integers(1, 9), max_frames=st.integers(9, 800))
    asked = data.draw(st.builds(Sampling, nframes=st.integers(1, 64)) | bounded)
    least = data.draw(st.integers(1024, 200_000))
    most = data.draw(st.integers(least, 2_000_000))
    found = VideoSettings(
        family=family,
        min_pixels=least,
        max_pixels=most,
        cap_pixels_per_frame=data.draw(st.booleans()),
        max_video_tokens=data.draw(st.integers(16, 4000)),
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        real = the_class(family, monkeypatch)
        indices = _or_none(found.indices, count, fps, asked)
        if indices is None:
            wanted = _or_none(sampled, real, found, count, fps, asked)
            assert wanted is None or (family == "qwen3" and len(wanted) < 2)  # this one finds no size for a frame
            return
        assert indices == sampled(real, found, count, fps, asked)
        width, height = data.draw(st.integers(20, 2000)), data.draw(st.integers(20, 2000))
        sizes: list[tuple[int, int]] = []
        monkeypatch.setattr(TorchvisionBackend, "resize", lambda _, size, **__: sizes.append((size.height, size.width)))
        real.max_video_tokens = found.max_video_tokens
        blank = torch.empty(1, len(indices), 1, height, width, device="meta")
        bounds = SizeDict(shortest_edge=least, longest_edge=most)
        capped = {"cap_pixels_per_frame": found.cap_pixels_per_frame, "temporal_factor": 2, "factor": found.factor}
        real.resize(blank, bounds, 3, **capped)
        t, rows, columns = found.grid(len(indices), width, height)
        assert (t, rows * 14, columns * 14) == (-(-len(indices) // 2), *sizes[0])


def _or_none(function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (SampleError, ValueError, ZeroDivisionError, RuntimeError):
        return None


@pytest.mark.few("qwen3")
def test_every_codec_gives_the_same_samples(folder: Path, cache: Cache) -> None:
    wanted = samples_of(cache)
    for codec in ("zstd", "webp", "source"):
        found = samples_of(open_cache(build_here(config_in(folder, codec=codec)).cache))
        for name, sample in found.items():
            assert sample.keys() == wanted[name].keys()
            for field, value in sample.items():
                for left, right in zip(value, wanted[name][field], strict=True):
                    np.testing.assert_array_equal(left, right)


@pytest.mark.few("qwen2")
def test_on_the_fly_a_sample_is_what_a_cache_has(folder: Path, cache: Cache) -> None:
    config, off = config_in(folder), config_in(folder, 'loader.cache="off"')
    online = select(off)
    assert_same(cache, online, range(len(cache)))
    for name, lengths in cache.lengths.items():
        np.testing.assert_array_equal(lengths, online.lengths[name])
    assert_same_batches(config, off)


@pytest.mark.few("qwen2_5")
def test_videos_in_a_tar_and_in_tables_are_those_of_files(folder: Path, cache: Cache, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    data, row = (folder / "a.mp4").read_bytes(), {"question": "What <video> is it?", "answer": "A cat."}
    (tmp_path / "a.mp4").write_bytes(data)
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for name, content in (("clip.json", json.dumps(row).encode()), ("clip.mp4", data)):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    columns = {"id": ["clip"], "question": [row["question"]], "answer": [row["answer"]]}
    pq.write_table(pa.table({**columns, "videos": [["a.mp4"]]}), tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text("id,question,answer,video\nclip,What <video> is it?,A cat.,a.mp4\n", "utf-8")
    for kind, name in (("webdataset", "rows.tar"), ("table", "rows.parquet"), ("table", "rows.csv")):
        config = config_in(tmp_path, f'source.kind="{kind}"', f'source.manifest="{tmp_path / name}"')
        made = samples_of(open_cache(build_here(config).cache))
        for field, wanted in samples_of(cache)["clip"].items():
            np.testing.assert_array_equal(list(made["clip"][field]), list(wanted), err_msg=f"{name}: {field}")


def test_what_is_sampled_is_in_the_key(tmp_path: Path) -> None:
    folder = tmp_path
    model_folder(folder / "model", "qwen2")
    changed: tuple[dict[str, Any], ...] = ({}, {"fps": 2.5}, {"max_frames": 8})
    keys = {recipe_of(config_in(folder, **vision)).key for vision in changed}
    keys.add(recipe_of(config_in(folder, "source.max_video_s=9")).key)
    path = folder / "model" / "video_preprocessor_config.json"
    before = path.read_text(encoding="utf-8")
    path.write_text(json.dumps({**json.loads(before), "min_frames": 5}), encoding="utf-8")
    keys.add(recipe_of(config_in(folder)).key)
    path.write_text(before, encoding="utf-8")
    assert len(keys) == 5


BAD = {
    "no_video_stream": sound(),
    "unreadable_video": clip(FRAMES)[:2000],
    "empty_file": b"",
    "video_too_long": clip(FRAMES[:4], seconds_apart=12_000),
    "no_frames": without_frames(),
}
HOSTILE = (
    b"#EXTM3U\n#EXTINF:10,\n/etc/hostname\n#EXT-X-ENDLIST\n",
    b"ffconcat version 1.0\nfile /etc/hostname\n",
    PHOTOS[0].read_bytes(),
    b"no video",
)


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_video_has_a_reason(reason: str) -> None:
    with pytest.raises(SampleError) as caught:
        video_facts(BAD[reason], max_video_s=3600, max_pixels=10**6, sample_id="x")
    assert caught.value.reason == reason


def test_a_truncated_video_is_told_by_its_header(tmp_path: Path) -> None:
    webm, avi = clip(FRAMES, form="webm", codec="libvpx-vp9"), clip(FRAMES, form="avi")
    for data in (cut(clip(FRAMES), tmp_path / "a.mp4", 0.7), webm[: len(webm) // 2], avi[: len(avi) * 9 // 10]):
        with pytest.raises(SampleError) as caught:
            video_facts(data, max_video_s=3600, max_pixels=10**6, sample_id="x")
        assert caught.value.reason == "truncated_video"


@pytest.mark.parametrize("data", HOSTILE)
def test_what_would_open_other_files_is_no_video(data: bytes) -> None:
    with pytest.raises(SampleError) as caught:
        video_facts(data, max_video_s=3600, max_pixels=10**6, sample_id="x")
    assert caught.value.reason == "unreadable_video"


JUMPED = (("mp4", "libx264"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpegts", "libx264"))


@pytest.mark.parametrize(("form", "codec"), JUMPED)
def test_frames_far_apart_are_those_of_a_plain_loop(form: str, codec: str) -> None:
    data = clip(FRAMES, form=form, codec=codec, gop=4)
    every = decoded(data)
    for indices in ([0, 19], [3, 9, 9, 18], [13], [5, 6, 7, 16], [*range(20)], [2, 2, 12]):
        found = [*frames_at(data, indices, 10.0, sample_id="x")]
        for index, frame in zip(indices, found, strict=True):
            np.testing.assert_array_equal(frame, every[index])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_cut_and_damaged_videos_decode_or_have_a_reason(data: st.DataObject) -> None:
    whole = WHOLE[data.draw(st.integers(0, 2))]
    at, size, how = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, 200)), data.draw(st.integers(0, 2))
    damaged = whole[:at] + (b"", bytes(size), b"\xff" * size + whole[at + size :])[how]
    with contextlib.suppress(SampleError):
        found = video_facts(damaged, max_video_s=60, max_pixels=10**6, sample_id="x")
        assert len([*frames_at(damaged, range(found.num_frames), found.fps, sample_id="x")]) == found.num_frames


def test_a_title_that_is_no_utf_8_is_no_fault() -> None:
    titled = clip(FRAMES[:2], form="avi", title="Été")
    assert "Été".encode("latin-1") in titled
    assert video_facts(titled, max_video_s=60, max_pixels=10**6, sample_id="x").num_frames == 2


WHOLE = (clip(FRAMES[:6]), clip(FRAMES[:6], form="webm", codec="libvpx-vp9"), clip(FRAMES[:6], form="avi"))


def test_bad_rows_are_counted_by_reason(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "qwen3")
    (tmp_path / "a.mp4").write_bytes(clip(FRAMES[:6]))
    (tmp_path / "one.mp4").write_bytes(clip(FRAMES[:1]))
    (tmp_path / "long.mp4").write_bytes(BAD["video_too_long"])

    def row(name: str, content: Any, **more: Any) -> dict[str, Any]:
        answer = {"role": "assistant", "content": "Yes."}
        return {"id": name, "messages": [{"role": "user", "content": content}, answer], **more}

    parts: dict[str, dict[str, Any]] = {
        "bad_sampling": {"nframes": 0},
        "image_pixel_limits": {"resized_height": 90},
    }
    rows = [row(name, [{"type": "video", "video": "a.mp4", **more}]) for name, more in parts.items()]
    rows += [
        row("video_count_mismatch", "<video><video>", videos=["a.mp4"]),
        row("missing_file", "<video>", videos=["none.mp4"]),
        row("too_few_frames", "<video>", videos=["one.mp4"]),
        row("video_too_long", "<video>", video="long.mp4"),
        row("format", "<image>", image="a.mp4"),
        row("good", "<video>Well?", video="a.mp4"),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    report = build_here(config_in(tmp_path, "run.max_failed_share=1"))
    assert report.num_samples == 1
    assert report.failed == dict.fromkeys(sorted({each["id"] for each in rows} - {"good"}), 1)
    with pytest.raises(ForebayError, match="has_video"):
        build_here(config_in(tmp_path, fps=None))


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"do_resize": False}, "do_resize is false"),
        ({"num_frames": 8}, "num_frames is 8"),
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, "wanted Qwen3VLVideoProcessor"),
        ({"patch_size": 14}, "patch_size is 14, that of images 16"),
        ({"max_frames": 0}, "wanted 1 or more"),
        ({"size": {"longest_edge": "big"}}, "max_pixels is"),
    ],
)
def test_a_processor_of_other_arithmetic_is_refused(tmp_path: Path, changed: dict[str, Any], wanted: str) -> None:
    folder = model_folder(tmp_path, "qwen3")
    path = folder / "video_preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changed}), encoding="utf-8")
    with pytest.raises(ConfigError, match=wanted):
        video_settings(folder, image_settings(folder))


def test_settings_that_videos_do_not_go_with_are_refused(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "qwen3")
    for override, wanted in (
        ("vision.fps=0", "vision.fps is 0"),
        ("vision.max_frames=0", "vision.max_frames is 0"),
    ):
        with pytest.raises(ConfigError, match=wanted):
            config_in(tmp_path, override)


def test_the_last_frame_is_repeated() -> None:
    found = VideoSettings(family="qwen2", patch_size=16, min_pixels=1024, max_pixels=8192)
    stills = ImageSettings(patch_size=16)
    grid = found.grid(3, 96, 64)
    made = video_patches(iter(FRAMES[:3]), grid, found, stills)
    repeated = video_patches(iter([*FRAMES[:3], FRAMES[2]]), grid, found, stills)
    np.testing.assert_array_equal(made, repeated)
    assert made.shape == (grid[0] * grid[1] * grid[2] * 2, 768)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.few
def test_fixed_packs_have_items_of_both_kinds_and_their_samples_logits(
    folder: Path, cache: Cache, attention: str
) -> None:
    config = config_in(folder, "plan.shapes=fixed", "plan.seq_len=700", "plan.max_patches=900")
    planned = plan_of(config, cache)
    classes, model = planned.plan.patch_classes, random_large(folder / "model", attention=attention)
    assert len(classes) in (1, 2)
    loader, natural, seen = make_loader(config, dp_rank=0, dp_world_size=1), PackCollator(cache), []
    packs = loader.plan.order(loader.settings.seed, 0)
    for batch, pack in zip(loader, packs.batches(range(len(packs))), strict=True):
        assert batch["input_ids"].shape == (1, 700)
        patches = [len(batch[name]) for name in ("pixel_values", "pixel_values_videos")]
        assert sum(patches) - 2 * 4 in classes
        assert min(patches) >= 4
        counts = [int(batch[name].prod(dim=1).sum()) for name in ("image_grid_thw", "video_grid_thw")]
        assert counts == patches
        samples = [cache.read(index) for index in pack.tolist()]
        used = sum(len(sample["input_ids"]) for sample in samples)
        with torch.no_grad():
            logits, alone = (model(**each).logits[0, :used] for each in (batch, natural(samples)))
        torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)
        if "second_per_grid_ts" in batch:
            assert len(batch["second_per_grid_ts"]) == len(batch["video_grid_thw"])
        codes = PackCollator(cache, shapes=PackShapes.of(planned.plan, config.plan, cache.constants), dtype=None)
        expanded = to_model_inputs(codes(samples), cache.constants)
        assert torch.equal(expanded["pixel_values_videos"], batch["pixel_values_videos"])
        seen += pack.tolist()
    assert sorted(seen) == [*range(len(cache))]


@pytest.mark.few("qwen3")
def test_fixed_packs_are_one_graph(folder: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of images and videos samples have: the layers of the language model see tokens alone."""
    config = config_in(folder, "plan.shapes=fixed", "plan.seq_len=300", "plan.max_patches=900")
    model, graphs, kinds = random_large(folder / "model", attention="sdpa"), list[Any](), set()

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(trainable, "BACKEND", count)
    set_passes(model, TrainConfig(compile=True))
    with torch.no_grad():
        for batch in make_loader(config, dp_rank=0, dp_world_size=1):
            kinds.add((len(batch["pixel_values"]), len(batch["pixel_values_videos"])))
            model(**batch)
    torch._dynamo.reset()
    assert len(kinds) > 1
    assert len(graphs) == 1
