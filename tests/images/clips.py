"""Clips that tests encode from the demo photos by PyAV, and model folders of the Qwen-VL family that show videos."""

from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from tests.processes import ROOT
from tests.train.tiny_vl import older_folder, qwen3_vl_folder

MODEL = ROOT / "demo" / "vision" / "model"
PHOTOS = sorted((ROOT / "demo" / "vision" / "photos").glob("*.jpg"))
BOUNDS = {"shortest_edge": 4096, "longest_edge": 65_536}
FAMILIES = {"qwen2": "Qwen2VLProcessor", "qwen2_5": "Qwen2_5_VLProcessor", "qwen3": "Qwen3VLProcessor"}


def pictures(count: int, size: tuple[int, int] = (96, 64)) -> list[np.ndarray]:
    """Parts of the photos, uint8 [height, width, 3], each another than the one before."""
    photos = [np.asarray(Image.open(path).convert("RGB").resize((160, 120))) for path in PHOTOS[:3]]
    width, height = size
    return [photos[i % 3][i % 40 : i % 40 + height, i % 60 : i % 60 + width].copy() for i in range(count)]


def clip(
    frames: Sequence[np.ndarray],
    *,
    fps: int = 10,
    form: str = "mp4",
    codec: str = "libx264",
    times: Sequence[int] | None = None,
    seconds_apart: int | None = None,
    gop: int = 12,
    title: str = "",
) -> bytes:
    """A video of frames. times: when each is shown, in 1 / fps seconds. gop: from one frame that needs no other on."""
    file = io.BytesIO()
    height, width, _ = frames[0].shape
    with av.open(file, "w", format=form, metadata_encoding="latin-1") as container:
        container.metadata["title"] = title
        stream: Any = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.time_base = stream.codec_context.time_base = Fraction(1, fps)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number * (seconds_apart or 0) * fps if seconds_apart else (times or range(len(frames)))[number]
            frame.time_base = Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def sound() -> bytes:
    """An MP4 of sound alone."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def without_frames() -> bytes:
    """An AVI of which only the header was written."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream: Any = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        container.start_encoding()
    return file.getvalue()


def cut(data: bytes, path: Path, share: float) -> bytes:
    """The first bytes of an MP4 whose list of frames stands at its beginning. path: where it is written."""
    with (
        av.open(io.BytesIO(data), "r") as read,
        av.open(str(path), "w", options={"movflags": "faststart"}) as container,
    ):
        source: Any = read.streams.video[0]
        stream = container.add_stream_from_template(source)
        for packet in read.demux(source):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    whole = path.read_bytes()
    return whole[: int(share * len(whole))]


def turned(data: bytes) -> bytes:
    """An MP4 that says it is shown turned by 90 degrees with the clock: the matrix of its track's header."""
    at = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    return data[:at] + struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30) + data[at + 36 :]


def decoded(data: bytes) -> list[np.ndarray]:
    """All frames of a video by a plain loop, as their pictures lie in the file."""
    with av.open(io.BytesIO(data), "r") as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def model_folder(folder: Path, family: str) -> Path:
    """Makes `folder` a tiny model of a family with the demo's tokenizer, a template that shows videos, bounds small."""
    made = qwen3_vl_folder(folder) if family == "qwen3" else older_folder(folder, f"{family}_vl")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, made)
    template = (MODEL / "chat_template.jinja").read_text(encoding="utf-8")
    text = "{%- elif part.type == 'text'"
    video = "{%- elif part.type == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}\n"
    (made / "chat_template.jinja").write_text(template.replace(text, video + text), encoding="utf-8")
    _of_tokenizer(made)
    images = json.loads((MODEL / "preprocessor_config.json").read_bytes())
    images |= {"processor_class": FAMILIES[family], "size": BOUNDS}
    (made / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    kind = "Qwen3VLVideoProcessor" if family == "qwen3" else "Qwen2VLVideoProcessor"
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    videos = {"video_processor_type": kind, "size": BOUNDS} | {name: images[name] for name in names}
    (made / "video_preprocessor_config.json").write_text(json.dumps(videos), encoding="utf-8")
    return made


def _of_tokenizer(folder: Path) -> None:
    """Makes the model's config.json that of the demo's tokenizer."""
    config, demo = (json.loads((each / "config.json").read_bytes()) for each in (folder, MODEL))
    tokens = {
        token["content"]: token["id"] for token in json.loads((MODEL / "tokenizer.json").read_bytes())["added_tokens"]
    }
    config |= {name: demo[name] for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id")}
    config["video_token_id"] = tokens["<|video_pad|>"]
    for name in ("vocab_size", "pad_token_id"):
        config["text_config"][name] = demo["text_config"][name]
    if config["model_type"] == "qwen2_5_vl":
        config["vision_config"]["tokens_per_second"] = 3
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
