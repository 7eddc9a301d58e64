"""Parts that ask for a stretch of their video, or for other bounds of pixels than the processor's."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers.image_processing_backends import TorchvisionBackend
from transformers.image_utils import SizeDict

from forebay.errors import SampleError
from forebay.steps.image.video_settings import Sampling, VideoSettings, video_settings
from forebay.store.cache import Cache, open_cache
from forebay.store.image.image_settings import image_settings
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import fields_of
from forebay.train.select import select
from tests.images.clips import clip, decoded, model_folder, pictures
from tests.images.test_video_frames import asking, lines
from tests.images.test_videos import config_in, processed, sampled, samples_of, the_class
from tests.preprocess.here_pool import build_here
from tests.train.test_uncached import assert_same

FRAMES = pictures(40)
PARTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "small": {"max_pixels": 4096, "min_pixels": 1024},
    "large": {"min_pixels": 9000, "nframes": 6},
    "total": {"total_pixels": 6 * 2048, "nframes": 6, "min_pixels": 1024},
    "middle": {"video_start": 0.95, "video_end": 2.05},
    "from": {"video_start": 3, "fps": 10},
    "until": {"video_end": 4.05, "nframes": 4},
}
STRETCHES = {"middle": (10, 20), "from": (30, 39)}


def part(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": "a.mp4", **PARTS.get(name, {}), **more}


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    root = tmp_path_factory.mktemp(request.param)
    model_folder(root / "model", request.param)
    (root / "a.mp4").write_bytes(clip(FRAMES))
    (root / "f").mkdir()
    names = [f"f/{number}.png" for number in range(4)]
    for pixels, name in zip(FRAMES, names, strict=False):
        Image.fromarray(pixels).save(root / name)
    rows = [asking(name, part(name)) for name in PARTS]
    lines(root, [*rows, asking("frames", part("", video=names, max_pixels=4096, min_pixels=1024, sample_fps=2.5))])
    report = build_here(config_in(root))
    assert report.num_samples == len(rows) + 1, report.failed
    return open_cache(report.cache)


def test_values_are_those_of_a_call_that_is_told_so(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, family = cache.folder.parents[1] / "model", str(cache.constants["video_family"])
    found, samples = video_settings(folder, image_settings(folder)), samples_of(cache)
    real, collator = the_class(family, monkeypatch), PackCollator(cache)
    every = decoded((folder.parent / "a.mp4").read_bytes())
    for name, fields in [*PARTS.items(), ("frames", {"max_pixels": 4096, "min_pixels": 1024})]:
        asked = {each: value for each, value in fields.items() if each in ("fps", "nframes")}
        sampling = Sampling(**asked) if asked else Sampling(fps=5)
        start, last = STRETCHES.get(name, (0, 39))
        places = [start + i for i in sampled(real, found, last + 1 - start, 10.0, sampling)]
        frames = FRAMES[:4] if name == "frames" else [every[place] for place in places]
        times = len(frames) if family == "qwen3" else 1
        size = {each: fields[each] * times for each in ("min_pixels", "max_pixels") if each in fields}
        size |= {"max_pixels": 4096 * times} if name == "total" else {}
        values, grids = processed(real, frames, dataclasses.replace(found, **size))
        batch = fields_of(collator([samples[name]]))
        np.testing.assert_array_equal(batch["pixel_values_videos"], values, err_msg=name)
        assert batch["video_grid_thw"].tolist() == grids
    assert samples["frames"]["second_per_grid_ts"][0] == np.float32(2 / 2.5)
    sizes = [samples[name]["video_grid_thw"][0, 1:].tolist() for name in ("whole", "small", "large")]
    assert sizes[1] != sizes[2]


def test_times_of_a_stretch_are_those_of_the_file() -> None:
    found = VideoSettings(family="qwen3", min_pixels=1024, max_pixels=8192)
    places = found.indices(40, 10.0, Sampling(video_start=3, nframes=4))
    assert (places, found.seconds(places, 10.0)) == ([30, 33, 36, 39], ["<3.1 seconds>", "<3.8 seconds>"])


def test_on_the_fly_they_are_the_same(cache: Cache) -> None:
    assert_same(cache, select(config_in(cache.folder.parents[1], 'loader.cache="off"')), range(len(cache)))


@given(
    num_frames=st.integers(1, 400),
    fps=st.sampled_from([1.0, 10.0, 23.976, 30.0]),
    bounds=st.tuples(st.floats(0, 50), st.none() | st.floats(0.01, 50)),
)
def test_a_stretch_has_the_frames_that_begin_in_it(
    num_frames: int, fps: float, bounds: tuple[float, float | None]
) -> None:
    start_s, end_s = bounds
    asked, length_s = Sampling(video_start=start_s, video_end=end_s), num_frames / fps
    try:
        found = [*asked.stretch(num_frames, fps)]
    except SampleError:
        found = None
    if found is None:
        assert max(start_s, end_s or 0) > length_s
        return
    within = [i for i in range(num_frames) if i >= start_s * fps and (end_s is None or i <= end_s * fps)]
    assert found == within


@given(
    data=st.data(),
    family=st.sampled_from(["qwen2", "qwen2_5", "qwen3"]),
    count=st.integers(1, 20).map(lambda n: 2 * n),
    size=st.tuples(st.integers(40, 1500), st.integers(40, 1500)),
)
def test_sizes_are_those_of_every_frame_alone(
    data: st.DataObject, family: Any, count: int, size: tuple[int, int]
) -> None:
    """Bounds of a frame give the same size in all families, and the class's for its `size`."""
    least = data.draw(st.integers(1024, 200_000))
    most = data.draw(st.integers(least, 2_000_000))
    total = data.draw(st.none() | st.integers(1, 40_000_000))
    found = VideoSettings(family=family, min_pixels=5000, max_pixels=10_000)
    called = found.of_call(Sampling(min_pixels=least, max_pixels=most, total_pixels=total), count)
    share = most if total is None else min(most, max(total * 2 // count, int(least * 1.05)))
    alone = VideoSettings(family="qwen2", min_pixels=least, max_pixels=share)
    if total is None or family != "qwen3":
        assert called.grid(count, *size)[1:] == alone.grid(count, *size)[1:]
    sizes: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        real = the_class(family, monkeypatch)
        monkeypatch.setattr(TorchvisionBackend, "resize", lambda _, size, **__: sizes.append((size.height, size.width)))
        blank = torch.empty(1, count, 1, *size[::-1], device="meta")
        bounds = SizeDict(shortest_edge=called.min_pixels, longest_edge=called.max_pixels)
        real.resize(blank, bounds, 3, temporal_factor=2, factor=found.factor, cap_pixels_per_frame=False)
    _, rows, columns = called.grid(count, *size)
    assert (rows * 14, columns * 14) == sizes[0]
    assert called.max_pixels >= called.min_pixels
    assert math.isfinite(called.max_pixels)


def test_bad_parts_are_counted_by_reason(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "qwen3")
    (tmp_path / "a.mp4").write_bytes(clip(FRAMES))
    bad: dict[str, list[dict[str, Any]]] = {
        "bad_sampling": [
            {"video_start": 2, "video_end": 1},
            {"video_start": -1},
            {"video_end": "2"},
            {"min_pixels": 9000, "max_pixels": 8000},
            {"max_pixels": 0},
            {"max_pixels": 1.5},
            {"nframes": 4, "fps": 2},
        ],
        "segment_past_end": [{"video_start": 9}, {"video_start": 1, "video_end": 4.3}],
        "too_few_frames": [{"video_start": 1.01, "video_end": 1.05}, {"video_start": 3.9}],
        "too_many_pixels": [{"min_pixels": 10**9, "max_pixels": 10**9}],
        "image_pixel_limits": [{"resized_height": 96, "resized_width": 96}],
    }
    rows = [asking(f"{name}{i}", part("", **more)) for name, each in bad.items() for i, more in enumerate(each)]
    rows += [asking("good", part("", video_start=1, video_end=4.1, max_pixels=4096, min_pixels=1024))]
    lines(tmp_path, rows)
    report = build_here(config_in(tmp_path, "run.max_failed_share=1"))
    assert (report.num_samples, report.failed) == (1, {name: len(bad[name]) for name in sorted(bad)})
