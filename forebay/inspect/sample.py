"""One sample of a cache: its row, its tensors, its labels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.config import Config
from forebay.errors import CacheError
from forebay.inspect.labels import labels_of
from forebay.inspect.layout import paragraph
from forebay.inspect.units import human_number
from forebay.store.cache import ROW_BITS, Cache
from forebay.store.layout import FieldSpec
from forebay.store.shard import Shard
from forebay.visible import printable

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
        fields = {name: {k: _finite(v) for k, v in summary(value).items()} for name, value in self.tensors.items()}
        return {"index": self.index, "row": dict(self.row), "fields": fields, "labels": self.labels}


def read_sample(cache: Cache, index: int, *, config: Config | None) -> Sample:
    """Returns one sample, its bytes checked against their hash.

    config: names the tokenizer by which labels are decoded. Raises CacheError for an index that the cache does not have,
    CacheCorruptError where bytes are not those that were written.
    """
    check_index(index, len(cache), what=f"{cache.folder} has {len(cache)} samples")
    tensors = cache.read(index)
    return Sample(index=index, row=_row(cache, index), tensors=tensors, labels=labels_of(cache, config, tensors))


def check_index(index: int, count: int, *, what: str) -> None:
    """Raises CacheError where `--sample` names none of what is there; `what` says how many there are."""
    if not 0 <= index < count:
        span = f"0 to {count - 1}" if count else "none"
        raise CacheError(f"--sample {index}: {what} ({span}); name one of them")


def sample_index(cache: Cache, wanted: str) -> int:
    """Returns the index of the sample that `--sample` names: by its index, or by its id.

    A number without leading zeros that is an index of the cache is the index; all else is an id first.
    Raises CacheError where there is no such sample, and says so of a row that was left out.
    """
    number = number_of(wanted)
    if number is not None and 0 <= number < len(cache):
        return number
    found = _index_of_id(cache, wanted)
    if found is not None:
        return found
    if number is not None:
        check_index(number, len(cache), what=f"{cache.folder} has {len(cache)} samples")
    raise CacheError(
        f"--sample {wanted}: {cache.folder} has no sample with that id; what was left out: "
        f"{cache.folder / 'rejected.jsonl'}; every id: forebay inspect {cache.folder} --export FILE.parquet"
    )


def number_of(wanted: str) -> int | None:
    """Returns the number that a text is, written as Python would write it, else None: `007` is a name."""
    is_number = wanted.removeprefix("-").isdecimal() and len(wanted) < 20
    return int(wanted) if is_number and str(int(wanted)) == wanted else None


def _index_of_id(cache: Cache, sample_id: str) -> int | None:
    """Reads the ids alone, shard by shard."""
    if (spec := cache.fields.get("sample_id")) is None:
        return None
    for number in range(cache.num_shards):
        ids = cache.shard(spec.group, number).strings("sample_id")
        if sample_id not in ids:
            continue
        slot = number << ROW_BITS | ids.index(sample_id)
        places = np.flatnonzero(cache.slots == slot)
        if not len(places):
            raise CacheError(f"--sample {sample_id}: that row was left out; why: {cache.folder / 'rejected.jsonl'}")
        return int(places[0])
    return None


def sample_lines(sample: Sample) -> Iterator[str]:
    """Yields a sample for a terminal."""
    yield f"sample {sample.index}"
    yield from row_lines(sample.row)
    yield ""
    yield from tensor_lines(sample.tensors)
    if sample.labels is not None:
        yield ""
        yield from _label_lines(sample.labels)


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields the cells of a row, one a line."""
    width = max(map(len, row))
    for name, value in row.items():
        yield from paragraph(f"  {name:<{width}}  ", printable(value) if isinstance(value, str) else json.dumps(value))


def tensor_lines(tensors: Mapping[str, Array]) -> Iterator[str]:
    """Yields dtype, shape and range of tensors as a table."""
    yield f"{'fields':<18}{'dtype':<10}{'shape':<16}{'min':>12}{'max':>12}{'mean':>12}"
    for name, value in tensors.items():
        about = summary(value)
        numbers = "".join(f"{human_number(about[key]):>12}" for key in ("min", "max", "mean"))
        yield f"  {name:<16}{about['dtype']:<10}{about['shape']!s:<16}{numbers}"


def shown_ids(ids: Sequence[object]) -> str:
    """Returns the first token ids, or groups of them."""
    return ", ".join(map(str, ids[:_SHOWN_IDS])) + (", ..." if len(ids) > _SHOWN_IDS else "")


def _label_lines(labels: Mapping[str, Any]) -> Iterator[str]:
    ids, prefix_len = labels["ids"], labels["prefix_len"]
    yield f"labels: {len(ids)} tokens, the first {prefix_len} are the prefix (not trained on)"
    yield from paragraph("  ids      ", shown_ids(ids))
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
    for group in cache.groups:
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


def summary(value: Array) -> dict[str, Any]:
    """Returns dtype, shape, min, max and mean of a tensor; None for the numbers of an empty one."""
    about: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if not value.size:
        return {**about, "min": None, "max": None, "mean": None}
    # float64: a float16 sum of a clip's frames overflows.
    return {**about, "min": value.min().item(), "max": value.max().item(), "mean": float(value.mean(dtype=np.float64))}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
