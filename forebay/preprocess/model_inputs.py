"""The inputs of models: texts, images with texts, batches of prepared items; and which outputs become fields.

Each different text of a source file is given once, as tokens of the model's own tokenizer. A row has its own text,
those of a column, orders of their tags, and the empty one. A model of images and texts is given pairs: each image of a
row with the text of the row. Of an item there may be variants.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import xxhash

from forebay.config.data import CaptionsConfig
from forebay.errors import ConfigError, SampleError
from forebay.preprocess.group import Items, Read, Values, columns_digest
from forebay.preprocess.image_group import ImageItems
from forebay.preprocess.probes import PROBE_TEXTS
from forebay.rows.kept_columns import column_of
from forebay.rows.manifest import Manifest, rejections, without_rows
from forebay.rows.readers.json_lines import is_storable
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.form_values import shown_shape
from forebay.steps.model.model_step import ModelStep
from forebay.steps.step import Batch
from forebay.steps.text.caption import Caption, CaptionEncoder
from forebay.store.layout import Array, FieldSpec, Group, variant_name
from forebay.store.source_files import SourceFile
from forebay.task_map import mark

_ALL_ORDERS = 5
"""Tags of which all orders are looked at: 120. Of six there are more than `shuffles` may be, and some are drawn."""
_TRIES = 512
"""At most so many are drawn: tags that occur twice have fewer orders."""


def texts_of(rows: pa.Table, captions: CaptionsConfig) -> Iterator[list[str | None]]:
    """Yields the different texts of each row: its own first, each before its orders, the empty one last.

    A row without any text has None in their place.
    """
    for text, further in zip(rows["text"].to_pylist(), _further(rows, captions), strict=True):
        given = [each for each in (text, *(further or ())) if _is_text(each)]
        found = dict.fromkeys(order for each in given for order in (each, *tag_orders(each, captions)))
        yield [*(found or [None]), *([""] if captions.empty else [])]


def tag_orders(text: str, captions: CaptionsConfig) -> list[str]:
    """Returns other orders of the tags of a text, at most `captions.shuffles`, all different, by a hash of the text."""
    if not captions.shuffles:
        return []
    tags = [tag for part in text.split(",") if (tag := part.strip())]
    head, rest = tags[: captions.keep_tags], tags[captions.keep_tags :]
    orders: Iterable[tuple[str, ...]] = itertools.permutations(rest)
    if len(rest) <= _ALL_ORDERS:
        orders = sorted(orders, key=lambda order: _hash("\0".join((*order, text))))
    else:
        orders = (tuple(sorted(rest, key=lambda tag: _hash(f"{number}\0{tag}\0{text}"))) for number in range(_TRIES))
    found = {tuple(rest): None}
    for order in itertools.takewhile(lambda _: len(found) <= captions.shuffles, orders):
        found[order] = None
    return [", ".join((*head, *order)) for order in itertools.islice(found, 1, None)]


def checked_captions(manifest: Manifest, captions: CaptionsConfig) -> Manifest:
    """Returns a manifest without the rows whose column holds something else than a list of texts (`bad_text`)."""
    rows = manifest.rows
    bad = [place for place, further in enumerate(_further(rows, captions)) if further is None]
    if not bad:
        return manifest
    left_out, column = rows.take(pa.array(bad)), str(captions.column)
    messages = [
        f"{column} is {str(value)[:60]!r}, wanted a list of texts, or its JSON; correct the row"
        for value in column_of(left_out, column).to_pylist()
    ]
    named = (left_out["row"], left_out["sample_id"])
    rejected = rejections(*named, kind="failed", reason="bad_text", message=messages)
    return replace(manifest, rows=without_rows(rows, bad), rejected=pa.concat_tables([manifest.rejected, rejected]))


def caption_counts(rows: pa.Table, items: Items, keep: Array, captions: CaptionsConfig) -> dict[str, Any]:
    """Returns how many texts the kept rows have, the empty one left out, and how many blank ones were passed over."""
    assert items.offsets is not None
    counts = (np.diff(items.offsets)[keep] - captions.empty).tolist() or [0]
    kept = rows.filter(pa.array(keep))
    blank = sum(not _is_text(each) for further in _further(kept, captions) for each in further or ())
    return {"min": min(counts), "mean": round(sum(counts) / len(counts), 3), "max": max(counts), "blank": blank}


def _further(rows: pa.Table, captions: CaptionsConfig) -> Iterator[Sequence[str | None] | None]:
    """Yields the entries of each row's list; None for what is no list of texts."""
    if captions.column is None:
        return itertools.repeat((), len(rows))
    return map(_entries, column_of(rows, captions.column).to_pylist())


def _entries(value: Any) -> Sequence[str | None] | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return ()
    try:
        found = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return None
    is_list = isinstance(found, list) and all(
        each is None or (isinstance(each, str) and is_storable(each)) for each in found
    )
    return found if is_list else None


def _is_text(text: str | None) -> bool:
    return bool((text or "").strip())


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogateescape"))


_SHORT = ("a cat", "two small dogs")
"""Texts of the probe that any model takes."""
_NAMED = 60
"""Characters of a text by which an item is called."""


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The texts of rows, for the model in a folder. tokenizer: digest of its tokenizer; empty: texts as they are.

    captions: further texts of rows; None: each has its own one. is_first: the first text of each is taken.
    """

    folder: str
    tokenizer: str
    captions: CaptionsConfig | None = None
    is_first: bool = False
    name: ClassVar[Group] = "text"
    unit: ClassVar[str] = "text"
    lists: ClassVar[str | None] = "texts"
    column: ClassVar[str] = "text"
    max_sample_bytes: ClassVar[int] = 1 << 30

    @property
    def form(self) -> BatchForm:
        """How texts are padded: on the right, where a model counts positions from a text's own first token."""
        form = _encoder_of(self.folder, self.tokenizer).form
        return replace(form, fields=tuple(replace(each, side="right") for each in form.fields))

    @property
    def choices(self) -> CaptionsConfig | None:
        """The settings by which rows have several texts, of which a batch has one; None where each has one."""
        return None if self.is_first else self.captions

    def items(self, manifest: Manifest) -> Items:
        """Returns each different text of a source file once; what has no text is one that fails."""
        offsets, texts = self.of_rows(manifest.rows)
        encoded = texts.dictionary_encode(null_encoding="encode")
        listed = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), encoded.indices)
        rows = manifest.rows.append_column(self.lists, listed)
        found = Items.listed(rows, str(self.lists), pa.table({"text": encoded.dictionary}))
        table = found.table.append_column("file", pa.array(found.group.astype(np.int32)))
        return replace(found, table=table, are_choices=self.choices is not None)

    def checked(self, manifest: Manifest) -> Manifest:
        """Returns a manifest without rows whose further texts are none."""
        return manifest if self.captions is None else checked_captions(manifest, self.captions)

    def of_rows(self, rows: pa.Table) -> tuple[Array, pa.Array]:
        """Returns where the texts of each row begin, int64 [rows + 1], and the texts, null for a row without any."""
        if self.captions is None:
            return np.arange(len(rows) + 1), rows["text"].combine_chunks()
        settings = replace(self.captions, shuffles=0, keep_tags=0, empty=False) if self.is_first else self.captions
        found = [texts[:1] if self.is_first else texts for texts in texts_of(rows, settings)]
        flat = pa.array(itertools.chain.from_iterable(found), pa.large_string())
        return np.cumsum([0, *map(len, found)]), flat

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002  no file is read
        """Returns what the key of a shard says of its texts: an empty one fails unless it is wanted."""
        return {"texts": columns_digest(items.select(["text"])), **({"has_empty": True} if self._takes_empty else {})}

    @property
    def _takes_empty(self) -> bool:
        return self.choices is not None and self.choices.empty

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:  # noqa: ARG002
        """Returns texts and what to call each."""
        texts = [text or "" for text in items["text"].to_pylist()]
        hashes = [xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogateescape")) for text in texts]
        named = items.append_column("sample_id", pa.array([repr(text[:_NAMED]) for text in texts], pa.large_string()))
        return named.append_column("hash", pa.array(hashes))

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:  # noqa: ARG002
        """Yields the tokens of each text."""
        encoder = _encoder_of(self.folder, self.tokenizer) if self.tokenizer else None
        for position, (text, name) in enumerate(
            zip(rows["text"].to_pylist(), rows["sample_id"].to_pylist(), strict=True)
        ):
            mark(position)
            try:
                if not (text or "").strip() and not (text == "" and self._takes_empty):
                    raise SampleError("empty_text", f"text {name}: a model is given none; add it, or remove the row")
                yield {"text": text} if encoder is None else encoder.encode(text, (), sample_id=f"text {name}")
            except SampleError as err:
                yield {"failure": err.reason, "message": str(err)}

    def probed(self) -> Iterator[Values]:
        """Yields the tokens of built-in texts. Raises ConfigError where there is none of the empty text, and a model is
        to be given it.
        """
        if self._takes_empty and self.tokenizer:
            self._require_empty()
        texts = [*_SHORT, *(text for text, _ in PROBE_TEXTS)]
        yield from self.samples(pa.table({"text": texts, "sample_id": list(map(repr, texts))}), _unread)

    def _require_empty(self) -> None:
        (made,) = self.samples(pa.table({"text": [""], "sample_id": ["''"]}), _unread)
        why = f" ({made['message']})" if "message" in made else ""
        if not len(made.get("input_ids", ())):
            raise ConfigError(
                f"source.captions.empty: the tokenizer in {self.folder} gives no token of the empty text{why}, "
                "so its model can be given none; leave empty and loader.caption_dropout out",
                code="FB147",
            )

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the tokens of the one text of a sample."""
        return {**sample, **items[0]}


@functools.lru_cache(maxsize=4)
def _encoder_of(folder: str, tokenizer: str) -> CaptionEncoder:
    step = Caption(tokenizer=tokenizer, processor="", tokenizer_folder=folder, processor_folder=folder)
    return CaptionEncoder(step, may_lack_pad=True)


def _unread(*_: Any) -> bytes:
    raise AssertionError("texts are read from no file")


@dataclass(frozen=True, slots=True)
class PairInputs:
    """The images of rows, each with the row's text. images, texts: prepare the two halves of a pair."""

    images: ImageItems
    texts: TextInputs
    name: ClassVar[Group] = "image"
    unit: ClassVar[str] = "pair"
    lists: ClassVar[str | None] = ImageItems.lists

    @property
    def column(self) -> str:
        """See `ItemGroup`."""
        return self.images.column

    @property
    def max_sample_bytes(self) -> int:
        """See `ItemGroup`."""
        return self.images.max_sample_bytes

    def items(self, manifest: Manifest) -> Items:
        """Returns a pair for every image of every row, in the order of the rows."""
        images = self.images.items(manifest)
        offsets, places = images.of_rows(0, len(manifest.rows))
        owners = pa.array(np.repeat(np.arange(len(manifest.rows)), np.diff(offsets)))
        table = images.table.take(pa.array(places)).append_column(
            "text", self.texts.of_rows(manifest.rows)[1].take(owners)
        )
        group = manifest.rows["group"].take(owners).to_numpy()
        return Items(table, group, len(table), offsets, np.arange(len(table)))

    def content(self, items: pa.Table, hashes: Sequence[str]) -> dict[str, Any]:
        """Returns what the key of a shard says of its pairs."""
        return {**self.images.content(items, hashes), **self.texts.content(items, hashes)}

    def task_rows(self, items: pa.Table, files: Sequence[SourceFile]) -> pa.Table:
        """Returns what is needed to make pairs; what one is called, its hash and its text among it."""
        rows = self.images.task_rows(items, files)
        pairs = zip(rows["hash"].to_pylist(), items["text"].to_pylist(), strict=True)
        keys = (f"{image}\0{text or ''}".encode("utf-8", "surrogateescape") for image, text in pairs)
        hashes = pa.array(list(map(xxhash.xxh3_128_hexdigest, keys)))
        rows = rows.set_column(rows.column_names.index("hash"), "hash", hashes)
        return rows.append_column("text", items["text"])

    def samples(self, rows: pa.Table, read: Read) -> Iterator[Values]:
        """Yields what both halves of each pair become; of one that fails, why."""
        return self._together(self.images.samples(rows, read), self.texts.samples(rows, read))

    def probed(self) -> Iterator[Values]:
        """Yields what built-in images and texts become."""
        return self._together(self.images.probed(), self.texts.probed())

    @staticmethod
    def _together(images: Iterator[Values], texts: Iterator[Values]) -> Iterator[Values]:
        for image, text in zip(images, texts, strict=False):  # of the built-in ones there are not as many
            yield next((half for half in (image, text) if "failure" in half), {**image, **text})

    def joined(self, sample: dict[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the arrays of the one pair of a sample."""
        return self.images.joined(self.texts.joined(sample, items), items)


def batches_by_length(shapes: Sequence[list[tuple[int, ...]]], size: int, *, are_alike: bool) -> Iterator[list[int]]:
    """Yields the places of items by length, a batch at a time. are_alike: a batch is of one shape."""
    order = sorted(range(len(shapes)), key=shapes.__getitem__)
    for _, found in itertools.groupby(order, key=shapes.__getitem__ if are_alike else lambda _: None):
        places = list(found)
        yield from (places[start : start + size] for start in range(0, len(places), size))


def own_rows(form: BatchForm, batch: Batch, rows: list[int]) -> list[int]:
    """Returns how many rows of a batch are each item's own: those that its mask marks. rows: where there is none."""
    mask = next((each.name for each in form.fields if each.mask_of == form.main.name and len(each.shape) == 1), None)
    return rows if mask is None else batch[mask].sum(dim=1).tolist()


def too_large(values: Mapping[str, Array], forms: Mapping[str, FieldForm]) -> str | None:
    """Returns which field holds NaN, infinity or what its stored type cannot hold; None where all is well."""
    for name, array in values.items():
        if not array.size:
            continue
        if array.dtype.kind == "f":
            stored = forms[name].stored_dtype if name in forms else "float32"
            largest = float(np.abs(array).max())
            if not largest <= float(np.finfo(stored).max):
                return f"{name} holds {largest:g}, which {stored} does not"
        elif name in forms:  # codes beyond the codebook would come round to others
            stored = forms[name].stored_dtype
            limits = np.iinfo(stored)
            for found in (int(array.min()), int(array.max())):
                if not limits.min <= found <= limits.max:
                    return f"{name} holds {found}, which {stored} does not"
    return None


def varied_fields(form: BatchForm, names: Sequence[str]) -> Iterator[FieldSpec]:
    """Yields the fields of the variants of these names; their shapes are those of the plain ones."""
    values = {field.on_disk for field in form.stored}
    for name, spec in itertools.product(names, form.specs()):
        if spec.name in values:
            yield replace(spec, name=variant_name(spec.name, name))


def require_variants(step: ModelStep, pixels: FieldForm, fields: Sequence[FieldForm]) -> None:
    """Raises ConfigError where variants would not be what they are called. pixels: of the input. fields: stored."""
    where = f"model.{step.label}"
    if not fields:
        raise ConfigError(f"{where}: variants are of arrays, and it gives numbers alone; leave flip out", code="FB147")
    if step.flip and (len(pixels.shape) != 3 or pixels.shape[0] != 3):
        shape = f"{pixels.name} {shown_shape(pixels.shape)}"
        raise ConfigError(f"{where}: flip is of [3, height, width], and it takes {shape}; leave it out", code="FB147")
