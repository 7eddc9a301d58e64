"""WebDataset: tars whose members of one name, up to its first dot, are a sample."""

from __future__ import annotations

import io
import json
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from forebay.export.samples import Samples
from forebay.store.filling import Summed
from forebay.store.layout import Array
from forebay.store.wav import pcm16_wav
from forebay.tar.write import TarWriter, member_key, member_size

_ROWS = 256
"""Rows of the table that are Python objects at once."""


def write_webdataset(samples: Samples, start: int, file: Summed, *, max_bytes: int) -> Generator[int]:
    """Writes samples from a place on, as long as the tar stays within `max_bytes`; yields where it stands.

    A sample is `{key}.json` (its row of the table, with its id as `id`), `{key}.{field}.npy` for each tensor, and
    `{key}.wav` for an int16 waveform; `patches` of images are `{key}.patches.{number}.npy`, one an image. The key is
    `member_key` of the id. A sample that is larger than `max_bytes` has a tar of its own.
    """
    tar = TarWriter(file)
    for run in samples.runs(start):
        for first in range(0, len(run.indices), _ROWS):
            rows = run.table.slice(first, _ROWS).to_pylist()
            for place, row in enumerate(rows, run.start + first):
                members = _members(samples, row)
                size = sum(member_size(name, len(data)) for name, data in members.items())
                if tar.size_bytes and tar.size_bytes + size > max_bytes:
                    tar.close()
                    return
                for name, data in members.items():
                    tar.add(name, data)
                yield place + 1
    tar.close()


def _members(samples: Samples, row: Mapping[str, Any]) -> dict[str, bytes]:
    cache, index = samples.cache, row["index"]
    key = member_key(cache.sample_id(index))
    values = cache.read(index)
    fields = {"id": row["sample_id"], **{name: value for name, value in row.items() if name != "sample_id"}}
    members = {f"{key}.json": json.dumps(fields).encode("ascii")}
    for spec in samples.tensors:
        if spec.name not in values:  # a shape, which the array of an image says itself
            continue
        value = values[spec.name]
        if isinstance(value, tuple):
            name = member_key(spec.name)
            members |= {f"{key}.{name}.{number}.npy": _npy(image) for number, image in enumerate(value)}
        elif spec.name == "waveform" and spec.dtype == "int16":
            members[f"{key}.wav"] = pcm16_wav(value, cache.constants["sample_rate_hz"])
        else:
            members[f"{key}.{member_key(spec.name)}.npy"] = _npy(value)
    return members


def _npy(value: Array) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(value), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()
