"""Conversations with videos and clips that are longer than a pack: cut as a plain loop over their ids cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.config import Config, PackConfig
from forebay.errors import PlanError
from forebay.plan.pack.overlong import in_pieces
from forebay.store.cut_samples import CutSamples
from forebay.store.layout import Constants
from forebay.train import make_loader
from forebay.train.collate.packed import PackCollator
from forebay.train.select import select
from tests.images.clips import PHOTOS, clip, model_folder, pictures
from tests.images.test_video_frames import frame_files, lines
from tests.images.test_videos import config_in
from tests.preprocess.here_pool import build_here
from tests.sound_talks import Talks

OF_VIDEOS = ("video_grid_thw", "video_patches", "second_per_grid_ts")


def video_talks(root: Path) -> Config:
    """Talks of four exchanges with photos, videos and lists of frames in any turn."""
    (root / "a.mp4").write_bytes(clip(pictures(12)))
    (root / "b.mp4").write_bytes(clip(pictures(8, size=(64, 96))))
    (root / "p.jpg").write_bytes(PHOTOS[0].read_bytes())
    names = frame_files(root / "f", 4)
    shown = ["<video>", "<image>", "", "<video>a<image>b<video>", "<image><video>", "Why?"]
    rows = []
    for number in range(6):
        turns = [shown[(number + turn) % len(shown)] + f"It is {turn}." for turn in range(4)]
        messages = [{"role": "system", "content": "<video>Be kind."}] * (number % 2)
        for turn in turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "A dog, a cat."}]
        count = sum(message["content"].count("<video>") for message in messages)
        videos = [["a.mp4", names, "b.mp4"][i % 3] for i in range(count)]
        images = ["p.jpg"] * sum(turn.count("<image>") for turn in turns)
        rows.append({"id": f"t{number}", "messages": messages, "videos": videos, "images": images})
    lines(root, rows)
    return config_in(root)


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3", "qwen2_audio", "qwen2_5_omni"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    root = tmp_path_factory.mktemp(request.param)
    if request.param in ("qwen2_5", "qwen3"):
        model_folder(root / "model", request.param)
        made = video_talks(root)
    else:
        made = Talks.made(root, request.param).config("plan={kind='pack', seq_len=4000}")
    build_here(made)
    return made


def spans_of(ids: list[int], constants: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    """Where each item begins and ends with its marks, and its kind, token by token."""
    pads = {
        constants.get("image_token_id"): "image",
        constants.get("video_token_id"): "video",
        constants.get("mrope", {}).get("token"): "image",
        constants.get("clip_token"): "audio",
    }
    pads.pop(None)
    begin, depth, kind, before = 0, 0, "", -1
    for place, token in enumerate(ids):
        if "vision_start_token_id" in constants:
            if token == constants["vision_start_token_id"]:
                begin, depth = (place if depth == 0 else begin), depth + 1
            kind = pads.get(token, kind)
            if token == constants["vision_end_token_id"]:
                depth -= 1
                if depth == 0:
                    yield begin, place + 1, kind
        else:
            if token in pads and token != before:
                begin = place - 1
            if before in pads and token != before:
                yield begin, place + 1, pads[before]
        before = token


def expected(sample: Mapping[str, Any], plan: PackConfig, constants: Mapping[str, Any], user: int) -> list[list[int]]:
    """The tokens of each piece, as places in the sample; of what cannot be cut all of them."""
    ids = sample["input_ids"].tolist()
    spans, every = [*spans_of(ids, constants)], [*range(len(ids))]
    patches = {"image": [*sample.get("patches", sample.get("pixel_values", ()))], "video": []}
    patches["video"] = [*sample.get("video_patches", ())]
    frames = {"audio": [*sample.get("input_features", ())]}

    def held(piece: list[int], arrays: Mapping[str, list[Any]]) -> int:
        taken = {kind: iter(each) for kind, each in arrays.items()}
        sizes = [(start, len(next(taken[kind]))) for start, _, kind in spans if kind in taken]
        return sum(size for start, size in sizes if start in piece)

    def fits(piece: list[int]) -> bool:
        return (
            len(piece) <= plan.seq_len
            and (plan.max_patches is None or held(piece, patches) <= plan.max_patches)
            and (plan.max_frames is None or held(piece, frames) <= plan.max_frames)
        )

    if fits(every):
        return [every]
    turns = [place for place, token in enumerate(ids) if token == ids[0]]
    head = every[: turns[1]] if plan.repeat_system and ids[1] != user else []
    learnt = {place for place in every if sample["label_mask"][place]}
    if plan.overlong == "truncate":
        cuts = [place for place in range(len(ids) + 1) if not any(a < place < b for a, b, _ in spans)]
        pieces = [every[:cut] for cut in cuts][::-1]
        if plan.truncate_side == "left":
            pieces = [head + every[cut:] for cut in cuts if cut >= len(head)]
        piece = next(piece for piece in pieces if fits(piece))
        return [piece] if learnt & {*piece} else [every]
    bounds = [0, *(place for place in turns[1:] if ids[place + 1] == user and place > turns[1])]
    bounds = [place for n, place in enumerate(bounds) if n == 0 or learnt & {*range(place)}]
    found: list[list[int]] = []
    for start, stop in zip(bounds, [*bounds[1:], len(ids)], strict=True):
        exchange = [*range(start, stop)]
        if found and fits(found[-1] + exchange):
            found[-1] += exchange
        else:
            found.append(head * bool(found) + exchange)
    return [piece for piece in found if learnt & {*piece}] if len(found) > 1 else [every]


PLANS: tuple[dict[str, Any], ...] = (
    {"overlong": "truncate"},
    {"overlong": "truncate", "truncate_side": "left"},
    {"overlong": "split"},
    {"overlong": "truncate", "truncate_side": "left", "repeat_system": True},
    {"overlong": "split", "repeat_system": True},
)


@pytest.mark.parametrize("plan", PLANS, ids=("right", "left", "split", "left behind a system", "split behind a system"))
@pytest.mark.few
def test_pieces_are_those_of_a_plain_loop(config: Config, plan: dict[str, Any]) -> None:
    whole = select(config)
    longest, patches = (int(np.max(whole.lengths.get(name, [0]))) for name in ("num_tokens", "num_patches"))
    frames = int(np.max(whole.lengths.get("num_frames", [0])))
    asked: list[dict[str, Any]] = [{"seq_len": longest * part // 10} for part in (9, 6, 4, 2)]
    asked += [{"seq_len": longest, "max_patches": patches * 6 // 10}] if patches else []
    asked += [{"seq_len": longest, "max_frames": frames * 7 // 10}] if frames else []
    user = first_user(whole)
    cut_any = False
    for budget in asked:
        made = PackConfig(**budget, **plan)
        found = select(replace(config, plan=made))
        wanted = [
            (index, piece)
            for index in range(len(whole))
            for piece in expected(whole.read(index), made, whole.constants, user)
        ]
        assert len(found) == len(wanted)
        cut_any |= isinstance(found, CutSamples)
        for number, (index, piece) in enumerate(wanted):
            compare(found, number, whole, index, piece)
    assert cut_any


def first_user(whole: Any) -> int:
    """The token behind the first of a turn of the user."""
    ids = next(
        s["input_ids"] for s in map(whole.read, range(len(whole))) if s["label_mask"][: len(s["input_ids"])].any()
    )
    before = int(np.flatnonzero(ids == ids[0])[-2])
    return int(ids[before + 1])


def compare(found: Any, number: int, whole: Any, index: int, piece: list[int]) -> None:
    own, sample = found.read(number), whole.read(index)
    spans = [*spans_of(sample["input_ids"].tolist(), whole.constants)]
    shown: dict[str, list[int]] = {"image": [], "video": [], "audio": []}
    counts = dict.fromkeys(shown, 0)
    for start, _, kind in spans:
        if start in piece:
            shown[kind].append(counts[kind])
        counts[kind] += 1
    for name, values in sample.items():
        if name in ("input_ids", "label_mask"):
            np.testing.assert_array_equal(own[name], values[piece])
            continue
        is_sound = name in ("input_features", "feature_attention_mask")
        places = shown["video" if name in OF_VIDEOS else "audio" if is_sound else "image"]
        assert len(own[name]) == len(places), name
        for one, place in zip(own[name], places, strict=True):
            np.testing.assert_array_equal(one, values[place])
    lengths = {name: int(each[number]) for name, each in found.lengths.items()}
    assert lengths["num_tokens"] == len(piece)
    if "num_images" in lengths:
        assert lengths["num_images"] == len(shown["image"]) + len(shown["video"])
        assert lengths["num_patches"] == sum(
            len(each) for name in ("patches", "pixel_values", "video_patches") for each in own.get(name, ())
        )
    if "num_audios" in lengths:
        assert lengths["num_audios"] == len(shown["audio"])
        assert lengths["num_frames"] == sum(map(len, own["input_features"]))
        assert 0 <= lengths["num_audio_samples"] <= int(whole.lengths["num_audio_samples"][index])


@pytest.mark.few("qwen2_5", "qwen2_audio")
def test_batches_of_pieces_are_whole_and_the_same_on_the_fly(config: Config) -> None:
    """A collator looks whether tokens and items agree; a loader of the raw data gives the same batches."""
    most = int(np.max(select(config).lengths["num_tokens"])) * 7 // 10
    cut = replace(config, plan=PackConfig(seq_len=most, overlong="split"))
    source = select(cut)
    assert isinstance(source, CutSamples)
    PackCollator(source)([source.read(index) for index in range(len(source))])
    off = replace(cut, loader=replace(cut.loader, cache="off"))
    for one, two in zip(make_loader(cut), make_loader(off), strict=True):
        assert one.keys() == two.keys()
        for name, values in one.items():
            np.testing.assert_array_equal(np.asarray(values), np.asarray(two[name]), err_msg=name)


def test_clips_whose_tokens_are_not_known_are_refused(tmp_path: Path) -> None:
    """A cache that an earlier version made says no token of clips."""
    talks = Talks.made(tmp_path, "qwen2_audio").config("plan={kind='pack', seq_len=4000}")
    build_here(talks)
    source = select(talks)
    groups = {group: dict(values) for group, values in source.constants.groups.items()}
    del groups["text"]["clip_token"]
    source.constants = Constants(groups)
    with pytest.raises(PlanError, match="build the cache again"):
        in_pieces(source, PackConfig(seq_len=30, overlong="truncate"))
