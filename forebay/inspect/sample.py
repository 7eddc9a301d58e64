"""One sample of a cache: its row, tensors, items and labels, which the tokenizer of a config turns into text again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.config.tree import Config
from forebay.errors import CacheError, ConfigError
from forebay.inspect.listed_groups import SeenItem, listed_groups
from forebay.pretrained import from_folder
from forebay.store.cache import Cache
from forebay.store.image.stored_items import stored_items
from forebay.store.key import TEXT, list_of, record
from forebay.store.layout import NULL_TEXT, ROW_BITS, ROW_MASK, Array, FieldSpec, Group
from forebay.store.shard import Shard


class Listen(Protocol):
    """The sound of samples, from its sources. Only `preprocess` reads these, which is not known here."""

    def __call__(self, row: Mapping[str, Any], /) -> Array | None:
        """Returns the waveform of a row; None where its source is not there, or changed."""

    def clips(self, sample_id: str) -> Mapping[str, Array]:
        """Returns the waveforms of the clips that a sample lists, by their hashes; those whose source is there."""


Sounds = Callable[[Config, Cache], Listen]
"""A function of a config and its cache."""

_CONVERSATION = list_of(record({"role": TEXT, "content": list_of(record({"type": TEXT}, {"text": TEXT}))}))


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as it is stored.

    row: table fields, `shard` and `shard_row`; `duration_s` of a recording, lengths where it lists items. tensors:
    read-only views [n, *shape] by field name; of a field of items the values of all. labels: of `labels_of`.
    items: by the group that lists them. conversation: messages in canonical form, if the text is one.
    """

    index: int
    row: Mapping[str, Any]
    tensors: Mapping[str, Array]
    labels: Mapping[str, Any] | None
    items: Mapping[Group, tuple[SeenItem, ...]] = field(default_factory=dict)
    conversation: list[dict[str, Any]] | None = None

    @property
    def shown(self) -> list[SeenItem]:
        """The items of all groups."""
        return [item for items in self.items.values() for item in items]

    @property
    def num_learnt(self) -> int:
        """Tokens that are targets."""
        return int(np.count_nonzero(self.tensors["label_mask"]))

    def to_json(self) -> dict[str, Any]:
        """Returns the `sample` part of `forebay inspect --json`; what is not a number in JSON (NaN) is null."""
        fields = {
            name: {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary(value).items()}
            for name, value in self.tensors.items()
        }
        own = {"index": self.index, "row": dict(self.row), "fields": fields, "labels": self.labels}
        if not self.items:
            return own
        listed = {f"{group}s": [item.to_json() for item in items] for group, items in self.items.items()}
        return {**own, "conversation": self.conversation, **listed}


def read_sample(cache: Cache, index: int, *, config: Config | None) -> Sample:
    """Returns one sample, its bytes checked against their hash, with the items that it lists.

    config: names the tokenizer by which labels are decoded.
    Raises CacheError for an index that the cache lacks, CacheCorruptError for bytes that were not written.
    """
    check_index(index, len(cache), what=f"{cache.place} has {len(cache)} samples")
    read, row, groups = cache.read(index), read_row(cache, index), listed_groups(cache)
    tensors: dict[str, Any] = read
    for stored in stored_items(cache.metadata, folder=cache.folder).values():
        tensors = stored.joined(tensors)
    return Sample(
        index=index,
        row=row,
        tensors=tensors,
        labels=labels_of(cache, config, read),
        items={name: group.items(index, read, row[f"{name}s"]) for name, group in groups.items()},
        conversation=told_conversation(row["text"]) if groups else None,
    )


def check_index(index: int, count: int, *, what: str) -> None:
    """Raises CacheError where `--sample` names none of what is there; `what` says how many there are."""
    if not 0 <= index < count:
        span = f"0 to {count - 1}" if count else "none"
        raise CacheError(f"--sample {index}: {what} ({span}); name one of them", code="FB421")


def sample_index(cache: Cache, wanted: str) -> int:
    """Returns the index of the sample that `--sample` names: by its index, or by its id.

    A number without leading zeros that is an index of the cache is the index; all else is an id first.
    Raises CacheError where there is no such sample, and says so of a row that was left out.
    """
    number = number_of(wanted)
    if number is not None and 0 <= number < len(cache):
        return number
    if (found := _index_of_id(cache, wanted)) is not None:
        return found
    if number is not None:
        check_index(number, len(cache), what=f"{cache.place} has {len(cache)} samples")
    raise CacheError(
        f"--sample {wanted}: {cache.place} has no sample with that id; what was left out: "
        f"{cache.folder / 'rejected.jsonl'}; every id: forebay inspect {cache.place} --export FILE.parquet",
        code="FB421",
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
            raise CacheError(
                f"--sample {sample_id}: that row was left out; why: {cache.folder / 'rejected.jsonl'}", code="FB421"
            )
        return int(places[0])
    return None


def read_row(cache: Cache, index: int) -> dict[str, Any]:
    """Returns a row of the row table, from the sample's own shards: `cache.samples` would read those of all."""
    slot = int(cache.slots[index])
    number, position = slot >> ROW_BITS, slot & ROW_MASK
    shards = [cache.shard(group, number) for group in reversed(cache.groups) if group not in cache.listed]
    row = {
        spec.name: _cell(shard, spec, position)
        for shard in shards
        for spec in shard.fields
        if spec.role == "table" and spec.name != "failure"
    }
    if cache.listed:
        row |= {name: int(values[index]) for name, values in cache.lengths.items()}
    if "num_audio_samples" in cache.lengths:
        row["duration_s"] = int(cache.lengths["num_audio_samples"][index]) / cache.constants["sample_rate_hz"]
    return {**row, "shard": number, "shard_row": position}


def _cell(shard: Shard, spec: FieldSpec, position: int) -> Any:
    values, offsets = shard.column(spec.name)
    value = values[offsets[position] : offsets[position + 1]]
    if spec.dtype == "str":
        if spec.nullable and value.tobytes() == NULL_TEXT:
            return None
        return value.tobytes().decode("utf-8", "surrogateescape")
    return value[0].item() if len(value) else None


def summary(value: Array) -> dict[str, Any]:
    """Returns dtype, shape, min, max and mean of a tensor; None for the numbers of an empty one."""
    about: dict[str, Any] = {"dtype": value.dtype.name, "shape": list(value.shape)}
    if not value.size:
        return {**about, "min": None, "max": None, "mean": None}
    # float64: a float16 sum of a clip's frames overflows.
    return {**about, "min": value.min().item(), "max": value.max().item(), "mean": float(value.mean(dtype=np.float64))}


def told_conversation(text: str) -> list[dict[str, Any]] | None:
    """Returns the messages of a row's text; None where it is no conversation: a caption, a label, nothing."""
    try:
        conversation: list[dict[str, Any]] = json.loads(text)
        _CONVERSATION(conversation, "the conversation")
    except (ValueError, RecursionError):
        return None
    return conversation


def spoken(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns (role, text) of every message; an item stands there by its number in the conversation: `[image 0]`.

    Reasoning and calls stand there as `[thinks ...]` and `[calls NAME {...}]`.
    """
    found, counts = [], {"audio": 0, "image": 0}
    for message in messages:
        text = ""
        for part in message["content"]:
            kind = part["type"]
            if (group := "image" if kind == "video" else kind) in counts:
                text = f"{text.rstrip(' ')} [{'clip' if kind == 'audio' else kind} {counts[group]}] "
                counts[group] += 1
            elif kind == "box":
                text += str(part["box"])
            else:
                text += part["text"].lstrip(" ") if text.endswith(" ") else part["text"]
        functions = (call["function"] for call in message.get("tool_calls", ()))
        thought = [f"[thinks {message['reasoning_content']}] "] if "reasoning_content" in message else []
        calls = [f" [calls {each['name']} {json.dumps(each['arguments'])}]" for each in functions]
        text = "".join([*thought, text, *calls])
        found.append((message["role"], text.strip(" ")))
        found += [("rejected", text) for _, text in spoken(message.get("rejected", ()))]
    return found


def labels_of(cache: Cache, config: Config | None, sample: Mapping[str, Array]) -> dict[str, Any] | None:
    """Returns a sample's ids and what is learnt of them, as text where the recipe's tokenizer is at hand; else None.

    Behind a prefix: `prefix_len`, and `text`, which follows it, without special tokens. Of a mask: `learnt`, for every
    run of targets its `start`, `end` and `text`, control tokens shown. `ids` are as stored, `with_special_tokens` is
    all of them. Where texts are None, `note` says why.
    """
    if "input_ids" not in sample or not {"prefix_len", "label_mask"} & sample.keys():
        return None
    ids = sample["input_ids"].tolist()
    tokenizer, note = _tokenizer_of(cache, config)

    def text(start: int, end: int, *, skips: bool = False) -> str | None:
        return None if tokenizer is None else str(tokenizer.decode(ids[start:end], skip_special_tokens=skips))

    if "prefix_len" in sample:
        first = int(sample["prefix_len"][0])
        found: dict[str, Any] = {"prefix_len": first, "text": text(first, len(ids), skips=True)}
    else:
        # The places before the first and after the last value of every run of values that are not 0.
        edges = np.flatnonzero(np.diff(np.concatenate(([0], sample["label_mask"] != 0, [0])).astype(np.int8)))
        runs = edges.reshape(-1, 2).tolist()
        found = {"learnt": [{"start": start, "end": end, "text": text(start, end)} for start, end in runs]}
    return {"ids": ids, **found, "with_special_tokens": text(0, len(ids)), "note": note}


def _tokenizer_of(cache: Cache, config: Config | None) -> tuple[Any, str | None]:
    """Returns the tokenizer that a cache was made with, where the config names it; else None, and a note that says why.

    Another tokenizer would give other text without a word.
    """
    if config is None or config.text is None:
        return None, "not decoded: a cache does not hold its tokenizer; run: forebay inspect CONFIG --sample I"
    folder = Path(config.text.tokenizer)
    found = tokenizer_digest(folder)
    if found == cache.tokenizer:
        return load_tokenizer(folder), None
    return None, (
        f"not decoded: text.tokenizer {folder} has digest {found[:16]}, the cache was made with "
        f"{str(cache.tokenizer)[:16]}; name the folder that the cache was made with"
    )


def load_tokenizer(folder: Path) -> Any:
    """Returns the tokenizer in a model's folder. Raises ConfigError where transformers cannot load it."""
    from transformers import AutoTokenizer  # not at import: it takes seconds, and only this needs it

    try:
        tokenizer = from_folder(AutoTokenizer, folder)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as err:
        raise ConfigError(f"text.tokenizer: transformers cannot load {folder}: {err}") from err
    # The tokenizer itself, where there is one: Whisper's class drops time stamps and tidies spaces on its way.
    return getattr(tokenizer, "backend_tokenizer", None) or tokenizer
