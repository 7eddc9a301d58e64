"""Hypothesis strategies shared by all tests."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
from hypothesis import strategies as st

from forebay.config import BucketConfig, WindowConfig
from forebay.config.plan import LengthsConfig
from forebay.store.layout import FieldSpec


@st.composite
def plan_settings(draw: st.DrawFn) -> BucketConfig:
    """Bucket plans with every kind of batch size and tail; edges between 0.1 s and 12 s, on milliseconds."""
    edges_ms = sorted(draw(st.sets(st.integers(100, 12_000), min_size=1, max_size=6)))
    sizes: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"batch_seconds": st.floats(0.5, 60, allow_nan=False)}),
            st.fixed_dictionaries({"batch_size": st.integers(1, 9)}),
            st.fixed_dictionaries({"batch_size": st.tuples(*[st.integers(1, 9)] * len(edges_ms))}),
        )
    )
    return BucketConfig(
        edges_s=tuple(edge / 1000 for edge in edges_ms),
        lockstep=draw(st.integers(1, 9)),
        tail=draw(st.sampled_from(["short", "drop", "pad"])),
        **sizes,
    )


def durations(*, sample_rate_hz: int = 1000) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Lengths in audio samples, 1 to 200 clips of 0 to 15 s."""
    return st.lists(st.integers(0, 15 * sample_rate_hz), min_size=1, max_size=200).map(
        lambda values: np.array(values, dtype=np.int64)
    )


def transcripts() -> st.SearchStrategy[str]:
    """Texts of any script that UTF-8 can hold, without NUL; some hold what looks like a model's control tokens."""
    character = st.characters(codec="utf-8", exclude_characters="\0")
    control = st.sampled_from(
        [
            "<|endoftext|>",
            "<|startoftranscript|>",
            "<|en|>",
            "<|0.00|>",
            "<|im_end|>",
            "<|audio_pad|>",
            "<asr_text>",
            "\n",
        ]
    )
    return st.lists(st.one_of(st.text(character, max_size=12), control), max_size=6).map("".join)


def tar_names() -> st.SearchStrategy[str]:
    """Names of regular tar members: any script, bytes that are no UTF-8, long ones, folders, leading dots, newlines."""
    character = st.one_of(
        st.sampled_from("aZ9 .-_\n\u00e9\u0928\u4e2d\U0001f600"),
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]),
        st.characters(min_codepoint=0xDC80, max_codepoint=0xDCFF),
    )
    part = st.text(character, min_size=1, max_size=12).filter(lambda text: "/" not in text)
    long_part = st.builds(lambda text, count: text * count, part, st.integers(1, 30))
    path = st.lists(st.one_of(part, long_part), min_size=1, max_size=4).map("/".join)
    return st.builds(
        lambda lead, name: lead + name, st.sampled_from(["", "", "./", "././", "../", ".", "..", "/"]), path
    )


def tar_contents() -> st.SearchStrategy[list[tuple[str, bytes]]]:
    """(name, data) of the members of a tar: 0 to 12 members of 0 to 5 blocks, some at the edges of a block."""
    size = st.one_of(st.integers(0, 2500), st.sampled_from([0, 1, 511, 512, 513, 1024]))
    data = st.builds(lambda count, byte: bytes([byte]) * count, size, st.integers(0, 255))
    return st.lists(st.tuples(tar_names(), data), max_size=12)


@st.composite
def waveform_lists(draw: st.DrawFn) -> list[np.ndarray[Any, Any]]:
    """1 to 6 clips of float32 noise at 16 kHz: 1 sample to 0.5 s, many at the edges of frames; some partly silent."""
    edges = st.sampled_from([1, 2, 40, 41, 199, 200, 201, 399, 400, 401, 559, 560, 561, 5079, 5080, 5081, 7999, 8000])
    sizes = draw(st.lists(st.one_of(edges, st.integers(1, 8200)), min_size=1, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    clips = []
    for size in sizes:
        clip = rng.standard_normal(size) * draw(st.sampled_from([0.0, 1e-5, 1e-2, 1.0]))
        clip[: draw(st.integers(0, size))] *= draw(st.sampled_from([0.0, 1.0]))
        clips.append(clip.astype(np.float32))
    return clips


def json_documents() -> st.SearchStrategy[Any]:
    """Documents of JSON: null, booleans, integers, finite floats, text, lists and objects of them."""
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(),
    )
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    )


TDZ_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16")


@st.composite
def tensors(draw: st.DrawFn, *, dtypes: tuple[str, ...] = TDZ_DTYPES, max_dims: int = 3) -> np.ndarray[Any, Any]:
    """Arrays of every stored dtype with any bits, NaN payloads too; axes of length 0 and rank 0 included."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=max_dims)))
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of an archive: names of one or two levels."""
    names = st.sampled_from(["a", "b", "long_name", "values/a", "values/b", "offsets/a", "x/y"])
    return draw(st.dictionaries(names, tensors(), min_size=1, max_size=5))


STORED_FIELDS = (
    FieldSpec(name="features", dtype="float16", group="audio", shape=(3,)),
    FieldSpec(name="pad_value", dtype="float32", group="audio"),
    FieldSpec(name="waveform", dtype="int16", group="audio"),
    FieldSpec(name="sample_id", dtype="str", group="audio", role="table"),
    FieldSpec(name="num_audio_samples", dtype="int64", group="audio", role="table"),
    FieldSpec(name="failure", dtype="str", group="audio", role="table"),
)
"""Fields of a shard of audio: two-dimensional, scalar and flat tensors, text and a number in the row table."""


@st.composite
def stored_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """0 to 6 rows of `STORED_FIELDS`: any bits, lengths of 0 included; a failed row has its id and a reason."""
    rows: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 6))):
        row: dict[str, Any] = {"sample_id": draw(st.text(max_size=6))}
        if draw(st.integers(0, 3)) == 0:
            row["failure"] = draw(st.sampled_from(["corrupt_audio", "missing_member"]))
        else:
            for field in STORED_FIELDS[:3]:
                count = 1 if field.name == "pad_value" else draw(st.integers(0, 4))
                size = count * int(np.prod(field.shape, dtype=np.int64)) * field.numpy_dtype.itemsize
                data = draw(st.binary(min_size=size, max_size=size))
                row[field.name] = np.frombuffer(data, field.numpy_dtype).reshape(count, *field.shape)
            row["num_audio_samples"] = np.int64(draw(st.integers(-(2**63), 2**63 - 1)))
        rows.append(row)
    return rows


@st.composite
def source_weights(draw: st.DrawFn, *, max_sources: int = 40) -> list[float]:
    """Weights of a mixture: 1 to `max_sources` floats of any scale, equal ones and zeros among them, not all zero."""
    size = draw(st.integers(1, max_sources))
    scale = draw(st.sampled_from([1.0, 1e-300, 1e300]))
    part = st.one_of(st.sampled_from([0.0, 1.0, 1e-9, 3.0]), st.floats(0, 1, allow_subnormal=False))
    weights = [scale * value for value in draw(st.lists(part, min_size=size, max_size=size))]
    return weights if any(weights) else [scale] * size


@st.composite
def whole_weights(draw: st.DrawFn) -> list[int]:
    """Weights of an assignment: 1 to 30 whole numbers, zeros among them, of sum 1 to 3,000."""
    weights = draw(st.lists(st.one_of(st.integers(0, 100), st.sampled_from([0, 1, 7])), min_size=1, max_size=30))
    return weights if any(weights) else [1, *weights]


@st.composite
def class_sizes(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Samples by source and length class: 1 to 5 sources, 1 to 9 classes, some of them empty, no source without any."""
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 9)))
    count = st.one_of(st.just(0), st.integers(0, 12))
    sizes = np.array(draw(st.lists(count, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))).reshape(shape)
    sizes[:, 0] += sizes.sum(1) == 0
    return sizes


@st.composite
def plan_settings_of_any_kind(draw: st.DrawFn) -> LengthsConfig:
    """Plans of given and of optimal edges, within few shards, and of windows; counts, seconds and tokens."""
    common: dict[str, Any] = {
        "lockstep": draw(st.integers(1, 5)),
        "tail": draw(st.sampled_from(["short", "drop", "pad"])),
    }
    seconds = st.fixed_dictionaries({"batch_seconds": st.floats(0.5, 60, allow_nan=False)})
    count = st.fixed_dictionaries({"batch_size": st.integers(1, 9)})
    if draw(st.booleans()):
        window = draw(st.integers(1, 9))
        return WindowConfig(window=window, **common, **draw(st.one_of(seconds, count)))
    tokens = st.fixed_dictionaries({"batch_tokens": st.integers(1, 400)})
    both = st.fixed_dictionaries({"batch_tokens": st.integers(1, 400), "batch_seconds": st.floats(0.5, 60)})
    return BucketConfig(
        k=draw(st.one_of(st.none(), st.integers(1, 8))),
        locality=draw(st.sampled_from(["global", "shards:1", "shards:3"])),
        **common,
        **draw(st.one_of(seconds, count, tokens, both)),
    )


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[tuple[int, int, int]]]:
    """A conversation in canonical form with one assistant turn or more, and the grids of its images.

    Texts of any characters, line ends and pieces of control tokens among them; an assistant's text is never blank.
    """
    pieces = st.sampled_from(
        ["<|im_", "end|>", "<|image_pad|", "assistant\n", "\n", "\r\n\n", " ", "e\u0301", "<image>", "\U0001f600"]
    )
    letters = st.characters(codec="utf-8", exclude_categories=("Cs", "Cn", "Co"), exclude_characters="\0")
    text = st.lists(st.one_of(pieces, st.text(letters, max_size=8)), max_size=6).map("".join)
    image = st.just({"type": "image"})

    def parts(*kinds: st.SearchStrategy[Any]) -> list[dict[str, Any]]:
        return draw(st.lists(st.one_of(*kinds), min_size=1, max_size=4))

    texts = text.map(lambda value: {"type": "text", "text": value})
    messages: list[dict[str, Any]] = [{"role": "system", "content": parts(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": parts(texts, image)})
        answer = draw(text.filter(str.strip))
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    num_images = sum(part["type"] == "image" for message in messages for part in message["content"])
    sides = st.integers(1, 5).map(lambda blocks: 2 * blocks)
    return messages, [(1, draw(sides), draw(sides)) for _ in range(num_images)]


@st.composite
def pack_lengths(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int, int]:
    """Tokens and patches of 1 to 60 samples, with a `seq_len` and a `max_patches` that not all of them need to fit."""
    seq_len, max_patches = draw(st.integers(1, 300)), draw(st.sampled_from([4, 40, 400, 1200]))
    top = draw(st.sampled_from([seq_len, max(seq_len // 3, 1), seq_len + 5]))
    count = draw(st.integers(1, 60))
    tokens = draw(st.lists(st.integers(1, top), min_size=count, max_size=count))
    images = st.one_of(st.just(0), st.integers(0, max_patches // 4 + 1))
    patches = [4 * n for n in draw(st.lists(images, min_size=count, max_size=count))]
    return np.array(tokens), np.array(patches), seq_len, max_patches


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, *alien: bytes) -> bytes:
    """`data` with one to four pieces flipped, cut out, doubled, overwritten or `alien`; at times all alien."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(result)))
        stop = min(len(result), start + draw(st.one_of(st.integers(0, 8), st.integers(0, 600))))
        piece = draw(
            st.one_of(
                st.binary(max_size=16),
                st.sampled_from([b"", bytes(result[start:stop]) * 2, b"\xff" * 8, b"\0" * 8, b"9" * 20, *alien]),
            )
        )
        result[start:stop] = piece
    return bytes(result)


def changed_documents(document: Any) -> st.SearchStrategy[Any]:
    """A JSON document in which one or two values, at any depth, are another value, gone, or another's."""
    places = list(_places(document, ()))
    return st.lists(st.tuples(st.sampled_from(places), _foreign_values(), st.booleans()), min_size=1, max_size=2).map(
        lambda changes: _with_changes(document, changes)
    )


def _foreign_values() -> st.SearchStrategy[Any]:
    paths = ["../../outside/secret", "/etc/passwd", "a\0b", "a/b", "..", "\n", "x" * 300]
    numbers = st.one_of(st.integers(-2, 2), st.sampled_from([2**31, 2**63, -(2**63), 10**40, 1e300]))
    return st.one_of(st.sampled_from(paths), numbers, json_documents(), st.just([]), st.just({}))


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from _places(part, (*path, key))


def _with_changes(document: Any, changes: list[tuple[tuple[Any, ...], Any, bool]]) -> Any:
    result = json.loads(json.dumps(document))  # no part stands in two places
    for (*path, last), drawn, is_key in changes:
        owner, value = result, copy.deepcopy(drawn)
        for key in path:
            inside = isinstance(owner, dict) and key in owner
            inside = inside or (isinstance(owner, list) and isinstance(key, int) and key < len(owner))
            if not inside:
                break
            owner = owner[key]
        else:
            if isinstance(owner, dict):
                if is_key and isinstance(value, str):  # another name for what is there
                    owner[value] = owner.pop(last, None)
                else:
                    owner[str(last)] = value  # a number where an earlier change put an object in place of a list
            elif isinstance(owner, list) and isinstance(last, int) and last < len(owner):
                owner[last] = value
    return result


def wicked_texts() -> st.SearchStrategy[str]:
    """Names as a stranger writes them: terminal escapes, controls, line ends, turned direction, lost bytes."""
    pieces = st.sampled_from(
        [
            "\x1b[2J",
            "\x1b]0;title\x07",
            "\x9b31m",
            "\r",
            "\n",
            "\nWARNING forebay: all is well",
            "\b\b\b",
            "\x7f",
            "\x00",
            "\u202e",
            "\u2066",
            "\u2028",
            "\u200b",
            "\udce9",
            "\x85",
            "नमस्ते",
        ]
    )
    control = st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])
    return st.lists(st.one_of(pieces, st.text(control, max_size=4), st.text(max_size=4)), max_size=4).map("".join)
