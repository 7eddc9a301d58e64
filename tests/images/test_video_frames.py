"""Videos whose frames are images of their own: values and times are those of transformers' classes."""

from __future__ import annotations

import base64
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from forebay.errors import SampleError
from forebay.steps.image.video_settings import Sampling, VideoSettings, video_settings
from forebay.store.cache import Cache, open_cache
from forebay.store.image.image_settings import image_settings
from forebay.train.collate.packed import PackCollator
from forebay.train.collate.patches import fields_of
from forebay.train.select import select
from tests.images.clips import PHOTOS, clip, model_folder, pictures
from tests.images.test_videos import config_in, processed, samples_of, the_class
from tests.preprocess.here_pool import build_here
from tests.train.test_uncached import assert_same

FRAMES = pictures(7)
TIMED = {"sample_fps": 4, "raw_fps": 24}


def frame_files(folder: Path, count: int = 7) -> list[str]:
    folder.mkdir(exist_ok=True)
    for number, pixels in enumerate(FRAMES[:count]):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return [f"{folder.name}/{number}.png" for number in range(count)]


def asking(name: str, *parts: dict[str, Any] | str, **more: Any) -> dict[str, Any]:
    content = parts[0] if isinstance(parts[0], str) else [*parts]
    return {
        "id": name,
        "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}],
    } | more


def lines(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.fixture(scope="module", params=["qwen2", "qwen2_5", "qwen3"])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """One list at the default times, one timed beside a file and a photo, one turned by its EXIF, one in the line."""
    root = tmp_path_factory.mktemp(request.param)
    model_folder(root / "model", request.param)
    names = frame_files(root / "f")
    (root / "a.mp4").write_bytes(clip(FRAMES))
    shutil.copy(PHOTOS[0], root / "p.jpg")
    exif = Image.Exif()
    exif[274] = 6
    for number, pixels in enumerate(FRAMES[:2]):
        Image.fromarray(pixels).save(root / f"turned{number}.jpg", exif=exif)
    inline = ["data:image/png;base64," + base64.b64encode((root / name).read_bytes()).decode() for name in names[2:4]]
    video = {"type": "video", "video": names[:4], **TIMED}
    lines(
        root,
        [
            asking("plain", "What <video> is it?", videos=[names]),
            asking("mixed", {"type": "image", "image": "p.jpg"}, video, {"type": "video", "video": "a.mp4", "fps": 3}),
            asking("turned", "<video>", videos=[["turned0.jpg", "turned1.jpg"]]),
            asking("inline", {"type": "video", "video": inline}),
            asking("again", "<video><video>", videos=[names[::-1], names]),
        ],
    )
    report = build_here(config_in(root))
    assert report.num_samples == 5, report.failed
    return open_cache(report.cache)


def test_values_and_times_are_the_processor_s(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, family = cache.folder.parents[1] / "model", str(cache.constants["video_family"])
    found, samples = video_settings(folder, image_settings(folder)), samples_of(cache)
    real, collator = the_class(family, monkeypatch), PackCollator(cache)
    turned = [np.asarray(Image.open(folder.parent / f"turned{n}.jpg").rotate(-90, expand=True)) for n in range(2)]
    wanted = {"plain": [FRAMES], "turned": [turned], "inline": [FRAMES[2:4]], "again": [FRAMES[::-1], FRAMES]}
    for name, videos in wanted.items():
        values, grids = zip(*(processed(real, frames, found) for frames in videos), strict=True)
        batch = fields_of(collator([samples[name]]))
        np.testing.assert_array_equal(batch["pixel_values_videos"], np.concatenate(values))
        assert batch["video_grid_thw"].tolist() == [grid for each in grids for grid in each]
    first = samples["mixed"]["video_patches"][0]
    assert len(samples["mixed"]["video_patches"]) == 2
    assert len(first) == np.prod(samples["mixed"]["video_grid_thw"][0])
    timed = VideoMetadata(4 / 4 * 24, 24.0, frames_indices=[*range(4)])
    seconds = {"plain": VideoMetadata(7, None, frames_indices=[*range(7)]), "mixed": timed}
    for name, metadata in seconds.items():
        assert samples[name]["second_per_grid_ts"][0] == np.float32(2 / metadata.sampled_fps)


def test_texts_say_the_times_of_transformers() -> None:
    found = VideoSettings(family="qwen3", patch_size=16, min_pixels=1024, max_pixels=8192)
    processor: Any = object.__new__(Qwen3VLProcessor)
    for asked, num_frames in ((Sampling(), 5), (Sampling(sample_fps=2.0), 4), (Sampling(**TIMED), 3)):
        _, rate = asked.timed(num_frames, 0.0)
        indices = found.indices(num_frames, 0.0, asked)
        assert indices == [*range(num_frames)]
        wanted = processor._calculate_timestamps([*indices], rate, 2)
        assert found.seconds(indices, rate) == [f"<{each:.1f} seconds>" for each in wanted]
    assert Sampling().timed(5, 0.0) == (5, 24)


@pytest.mark.few("qwen2")
def test_the_same_on_the_fly_and_by_every_kind_of_row(cache: Cache) -> None:
    root, wanted = cache.folder.parents[1], samples_of(cache)
    online = select(config_in(root, 'loader.cache="off"'))
    assert_same(cache, online, range(len(cache)))
    for name, lengths in cache.lengths.items():
        np.testing.assert_array_equal(lengths, online.lengths[name])
    names = [f"f/{number}.png" for number in range(7)]
    columns = {"id": ["plain"], "question": ["What <video> is it?"], "answer": ["Yes."]}
    pq.write_table(pa.table({**columns, "videos": [[names]]}), root / "rows.parquet")
    cell = json.dumps([names]).replace('"', '""')
    (root / "rows.csv").write_text(f'id,question,answer,videos\nplain,What <video> is it?,Yes.,"{cell}"\n', "utf-8")
    for name in ("rows.parquet", "rows.csv"):
        config = config_in(root, 'source.kind="table"', f'source.manifest="{root / name}"')
        made = samples_of(open_cache(build_here(config).cache))["plain"]
        for field in wanted["plain"]:
            np.testing.assert_array_equal(list(made[field]), list(wanted["plain"][field]), err_msg=f"{name}: {field}")


def test_a_changed_frame_makes_another_cache_and_the_same_frames_none(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "qwen2_5")
    names = frame_files(tmp_path / "f", 3)
    lines(tmp_path, [asking("a", "<video>", videos=[names])])
    before = build_here(config_in(tmp_path))
    assert build_here(config_in(tmp_path)).cache == before.cache
    Image.fromarray(FRAMES[5]).save(tmp_path / names[1])
    after = build_here(config_in(tmp_path))
    assert after.cache != before.cache
    one, two = (open_cache(each.cache).read(0)["video_patches"][0] for each in (before, after))
    assert not np.array_equal(one, two)


def test_lists_of_several_manifests_have_their_own_frames(tmp_path: Path) -> None:
    """Items of a manifest are numbered behind those of the one before; shards name files anew."""
    model_folder(tmp_path / "model", "qwen2_5")
    names = frame_files(tmp_path / "f", 6)
    shown = {"a": [names[:3]], "b": [names[2:5], names[4:]], "c": [names[::-1]]}
    rows = [asking(name, "<video>" * len(lists), videos=lists) for name, lists in shown.items()]
    lines(tmp_path, rows)
    whole = samples_of(open_cache(build_here(config_in(tmp_path)).cache))
    for row in rows:
        (tmp_path / f"{row['id']}.jsonl").write_text(json.dumps(row), encoding="utf-8")
    paths = [str(tmp_path / f"{name}.jsonl") for name in shown]
    apart = samples_of(open_cache(build_here(config_in(tmp_path, f"source.manifest={json.dumps(paths)}")).cache))
    assert apart.keys() == whole.keys()
    for name, sample in whole.items():
        for one, two in zip(sample["video_patches"], apart[name]["video_patches"], strict=True):
            np.testing.assert_array_equal(one, two)


def test_bad_frames_are_counted_by_reason(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "qwen3")
    names = frame_files(tmp_path / "f")
    (tmp_path / "a.mp4").write_bytes(clip(FRAMES))
    Image.fromarray(FRAMES[0][:32]).save(tmp_path / "small.png")
    whole = (tmp_path / names[0]).read_bytes()
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])

    def shown(*frames: Any, **more: Any) -> dict[str, Any]:
        return {"type": "video", "video": [*frames], **more}

    parts = {
        "missing_file": shown(*names, "none.png"),
        "frame_sizes": shown(*names, "small.png"),
        "empty_file": shown("empty.png", *names),
        "unreadable_image": shown(*names, "cut.png"),
        "no_frames": shown(),
        "too_few_frames": shown(names[0]),
        "too_many_frames": shown(*names * 2),
        "video_as_frames": shown(*names, {"bytes": None}),
        "bad_sampling": shown(*names, fps=2),
        "good": shown(*names),
    }
    rows = [asking(name, part) for name, part in parts.items()]
    rows += [asking("timed", {"type": "video", "video": "a.mp4", "sample_fps": 2})]
    rows += [asking("untimed", shown(*names, raw_fps=24)), asking("empty", "<video>", videos=[[]])]
    lines(tmp_path, rows)
    report = build_here(config_in(tmp_path, "run.max_failed_share=1", max_frames=8))
    wanted = dict.fromkeys(sorted({*parts} - {"good"}), 1) | {"bad_sampling": 3, "no_frames": 2}
    assert (report.num_samples, report.failed) == (1, wanted)


def test_a_list_of_frames_in_a_tar_is_refused(tmp_path: Path) -> None:
    model_folder(tmp_path / "model", "qwen3")
    members = {"a.json": json.dumps({"question": "<video>", "answer": "A.", "videos": [["x.png", "y.png"]]}).encode()}
    with tarfile.open(tmp_path / "rows.tar", "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    config = config_in(tmp_path, 'source.kind="webdataset"', f'source.manifest="{tmp_path / "rows.tar"}"')
    with pytest.raises(Exception, match="video_as_frames"):
        build_here(config)


def test_a_list_is_bounded() -> None:
    found = VideoSettings(family="qwen2", min_pixels=1024, max_pixels=8192, max_frames=5)
    assert found.indices(5, 0.0, Sampling()) == [0, 1, 2, 3, 4]
    with pytest.raises(SampleError, match="max_frames is 5"):
        found.indices(6, 0.0, Sampling())
