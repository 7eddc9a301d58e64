"""Encoded audio for tests: by libsndfile, and RIFF files chunk by chunk."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import soundfile

from forebay.tar.scan import scan_tar

DEMO = Path(__file__).parents[2] / "demo" / "speech"
LOSSLESS = ("FLAC", "WAV", "WAVEX", "RF64", "AIFF")


def voice(num_samples: int, *, channels: int = 1, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns int16 [num_samples, channels] that is neither silence nor noise."""
    rng = np.random.default_rng(seed)
    phase = np.cumsum(0.05 + 0.04 * np.sin(np.arange(num_samples) / 900))[:, None] + np.arange(channels)
    return (8_000 * np.sin(phase) + rng.normal(0, 300, (num_samples, channels))).astype(np.int16)


def encoded(samples: np.ndarray[Any, Any], rate_hz: int, *, kind: str = "FLAC", subtype: str | None = None) -> bytes:
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate_hz, format=kind, subtype=subtype)
    return sink.getvalue()


def with_flac_length(data: bytes, num_samples: int) -> bytes:
    """Returns a FLAC file whose STREAMINFO claims another number of samples; 0 says that it is not known."""
    packed = int.from_bytes(data[18:26], "big") >> 36 << 36 | num_samples
    return data[:18] + packed.to_bytes(8, "big") + data[26:]


def with_flac_rate(data: bytes, rate_hz: int) -> bytes:
    packed = int.from_bytes(data[18:26], "big") & (1 << 44) - 1 | rate_hz << 44
    return data[:18] + packed.to_bytes(8, "big") + data[26:]


def chunk(name: bytes, body: bytes, *, size: int | None = None, order: str = "<") -> bytes:
    length = len(body) if size is None else size
    return name + struct.pack(order + "I", length) + body + bytes(len(body) & 1)


def wave(*chunks: bytes, magic: bytes = b"RIFF", order: str = "<") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return magic + struct.pack(order + "I", min(len(body), 0xFFFFFFFF)) + body


def fmt(
    *, kind: int = 1, channels: int = 1, rate_hz: int = 16_000, bits: int = 16, order: str = "<", extra: bytes = b""
) -> bytes:
    block = channels * ((bits + 7) // 8)
    body = struct.pack(order + "HHIIHH", kind, channels, rate_hz, rate_hz * block & 0xFFFFFFFF, block, bits)
    return chunk(b"fmt ", body + extra, order=order)


def demo_clips() -> Iterator[tuple[str, bytes, float]]:
    """Yields (member name, encoded bytes, duration in seconds by the manifest) of every real recording."""
    for row in pq.read_table(DEMO / "train.parquet").to_pylist():
        tar = DEMO / row["tar_path"]
        index = scan_tar(tar)
        member = index.find(row["tar_member_name"])
        assert member is not None
        with open(tar, "rb") as file:
            file.seek(int(index.offsets[member]))
            yield row["tar_member_name"], file.read(int(index.sizes[member])), row["duration_s"]


def mp3(samples: np.ndarray[Any, Any], rate_hz: int = 16_000, *, mode: str = "VARIABLE") -> bytes:
    """Returns an MP3 with the Xing or Info tag that libsndfile's encoder writes."""
    sink = io.BytesIO()
    soundfile.write(sink, samples, rate_hz, format="MP3", bitrate_mode=mode, compression_level=0.3)
    return sink.getvalue()


def without_tag(data: bytes) -> bytes:
    """Returns an MP3 without its first frame, which holds the tag."""
    return data[data.index(data[:2], 2 + min(at for at in map(data.find, (b"Xing", b"Info")) if at > 0)) :]


def id3(num_bytes: int = 5_000) -> bytes:
    """Returns an ID3v2 tag of so many zero bytes."""
    return b"ID3\x04\x00\x00" + bytes((0, 0, num_bytes >> 7, num_bytes & 0x7F)) + bytes(num_bytes)


def ogg_pages(data: bytes) -> list[bytes]:
    """Returns the pages of an Ogg file."""
    pages = []
    while data:
        size = 27 + data[26] + sum(data[27 : 27 + data[26]])
        pages.append(data[:size])
        data = data[size:]
    return pages


def ogg_page(packet: bytes, *, flags: int = 0, serial: int = 7, sequence: int = 0, granule: int = 0) -> bytes:
    """Returns an Ogg page that holds one packet, with its checksum."""
    table = bytes([255] * (len(packet) // 255) + [len(packet) % 255])
    head = struct.pack("<4sBBqIIIB", b"OggS", 0, flags, granule, serial, sequence, 0, len(table))
    page = head + table + packet
    register = 0
    for byte in page:
        register ^= byte << 24
        for _ in range(8):
            register = register << 1 ^ (0x04C11DB7 if register >> 31 else 0)
        register &= 0xFFFFFFFF
    return page[:22] + struct.pack("<I", register) + page[26:]


def ogg_flac(samples: np.ndarray[Any, Any], rate_hz: int = 16_000) -> bytes:
    """Returns FLAC in Ogg, a frame a page. samples: a whole number of frames of 4,096."""
    data = encoded(samples, rate_hz)
    frames = len(samples) // 4_096
    first = data.index(b"\xff\xf8")
    starts = [data.index(data[first : first + 4] + bytes((n,)), first) for n in range(frames)]
    head = b"\x7fFLAC\x01\x00\x00\x01fLaC" + b"\0" + data[5:42]
    comment = b"\x84\x00\x00\x08" + bytes(8)
    packets = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    pages = [ogg_page(head, flags=2), ogg_page(comment, sequence=1)]
    for number, packet in enumerate(packets):
        flags = 4 if number == frames - 1 else 0
        pages.append(ogg_page(packet, flags=flags, sequence=number + 2, granule=4_096 * (number + 1)))
    return b"".join(pages)
