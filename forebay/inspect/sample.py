"""One sample of a cache: its row, its tensors, its labels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config import Config
from forebay.errors import CacheError
from forebay.inspect.labels import labels_of
from forebay.inspect.layout import paragraph
from forebay.inspect.units import human_number, printable
from forebay.store.cache import ROW_BITS, Cache
from forebay.store.layout import GROUPS, FieldSpec
from forebay.store.shard import Shard

Array = np.ndarray[Any, Any]

_SHOWN_IDS = 64


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as it is stored.

    row: table fields, `duration_s` and `shard`. tensors: read-only views [n, *shape] by field name. labels: of `labels_of`.
    """

    index: int
    row: Mapping[str, Any]
    tensors: Mapping[str, Array]
    labels: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`; what is not a number in JSON (NaN) is null."""
        fields = {name: {k: _finite(v) for k, v in _summary(value).items()} for name, value in self.tensors.items()}
        return {"index": self.index, "row": dict(self.row), "fields": fields, "labels": self.labels}


def read_sample(cache: Cache, index: int, *, config: Config | None) -> Sample:
    """Returns one sample, its bytes checked against their hash.

    config: names the tokenizer by which labels are decoded. Raises CacheError for an index that the cache does not have,
    CacheCorruptError where bytes are not those that were written.
    """
    if not 0 <= index < len(cache):
        span = f"0 to {len(cache) - 1}" if len(cache) else "none"
        raise CacheError(f"--sample {index}: {cache.folder} has {len(cache)} samples ({span}); name one of them")
    tensors = cache.read(index)
    return Sample(index=index, row=_row(cache, index), tensors=tensors, labels=labels_of(cache, config, tensors))


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yields a sample for a terminal."""
    yield f"sample {sample.index}"
    width = max(map(len, sample.row))
    for name, value in sample.row.items():
        yield from paragraph(f"  {name:<{width}}  ", printable(value) if isinstance(value, str) else json.dumps(value))
    yield ""
    yield f"{'fields':<18}{'dtype':<10}{'shape':<16}{'min':>12}{'max':>12}{'mean':>12}"
    for name, value in sample.tensors.items():
        about = _summary(value)
        numbers = "".join(f"{human_number(about[key]):>12}" for key in ("min", "max", "mean"))
        yield f"  {name:<16}{about['dtype']:<10}{about['shape']!s:<16}{numbers}"
    if sample.labels is not None:
        yield ""
        yield from _label_lines(sample.labels)


def _label_lines(labels: Mapping[str, Any]) -> Iterator[str]:
    ids, prefix_len = labels["ids"], labels["prefix_len"]
    shown = ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")
    yield f"labels: {len(ids)} tokens, the first {prefix_len} are the prefix (not trained on)"
    yield from paragraph("  ids      ", shown)
    if labels["note"]:
        yield from paragraph("  text     ", printable(labels["note"]))
        return
    yield from paragraph("  text     ", printable(labels["text"]))
    yield from paragraph("  special  ", printable(labels["with_special_tokens"]))


def _row(cache: Cache, index: int) -> dict[str, Any]:
    """Reads the columns of the sample's own shards: `cache.samples` would read those of all."""
    slot = int(cache.slots[index])
    number, position = slot >> ROW_BITS, slot & ((1 << ROW_BITS) - 1)
    row: dict[str, Any] = {}
    for group in GROUPS:
        shard = cache.shard(group, number)
        for spec in shard.fields:
            if spec.role == "table" and spec.name != "failure":
                row[spec.name] = _cell(shard, spec, position)
    duration_s = int(cache.lengths["num_samples"][index]) / cache.constants["sample_rate_hz"]
    heard = {} if cache.constants["features"] == "none" else {"duration_s": duration_s}
    return {**row, **heard, "shard": number, "shard_row": position}


def _cell(shard: Shard, spec: FieldSpec, position: int) -> Any:
    values, offsets = shard.column(spec.name)
    value = values[offsets[position] : offsets[position + 1]]
    if spec.dtype == "str":
        return value.tobytes().decode("utf-8", "surrogateescape")
    return value[0].item() if len(value) else None


def _summary(value: Array) -> dict[str, Any]:
    about: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if not value.size:
        return {**about, "min": None, "max": None, "mean": None}
    # float64: a float16 sum of a clip's frames overflows.
    return {**about, "min": value.min().item(), "max": value.max().item(), "mean": float(value.mean(dtype=np.float64))}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
