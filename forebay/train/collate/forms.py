"""The forms of a source: of its items, clips or images, and of the text beside them. Collators read these alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch

from forebay.config.frozen_models import TokenPattern
from forebay.errors import ConfigError
from forebay.steps.audio.declared import form_of
from forebay.steps.batch import IGNORED, collate, collate_fields, count
from forebay.steps.form import BatchForm, FieldForm
from forebay.steps.step import CLIPS, REJECTED, Allocate, Batch, Dtype, PaddingSide, Stored, TextBatch
from forebay.steps.table import form_step, forms_of, prompts_beside, text_step_of, unknown
from forebay.steps.text.transcript import Transcript
from forebay.store.layout import CHOICES, TEXT, Array
from forebay.store.source import Sample, column
from forebay.train.augment.draws import Drawing
from forebay.train.collate.ragged import Crossing

IDS, MASK, LABELS = "input_ids", "label_mask", "labels"
COMPLETION = "completion_mask"
"""Of pairs: 1 where a token is of an answer, as TRL calls it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchItems:
    """The items of a group in a batch. A batch without an item has none of their fields."""

    form: BatchForm
    who: str = "clips"
    """What the items are, in a message."""
    advice: str = "rebuild the cache: forebay preprocess"
    """Where they stand in no batch together."""
    code: str | None = None
    counted: Literal["frames", "tokens", "items"] = "frames"
    """What padding is a share of."""
    is_one_each: bool = True
    """Whether every sample has exactly one."""
    tokens: Mapping[str, TokenPattern] = field(default_factory=dict)
    """Codes that stand in the batch as tokens, by field."""

    def collate(
        self,
        samples: Sequence[Sample],
        *,
        dtype: Dtype,
        allocate: Allocate,
        crossing: Crossing | None = None,
        drawing: Drawing | None = None,
    ) -> Batch:
        """Returns the fields of the form. Raises ConfigError for items that stand in no batch together.

        crossing: makes what a device finishes. drawing: of the samples, where they are changed.
        """
        form, columns = self.form, self._columns(samples)
        if not any(columns[form.main.name]):
            return {}
        behind = [field.name for field in form.stored if field.join == "cat"]
        gone = {name for name in behind if not any(len(array) for arrays in columns[name] for array in arrays)}
        if gone:  # as the processor's own batch lacks an output that none of its images has
            kept = (f for f in form.fields if not gone & {f.name, f.mask_of, f.lengths_of})
            form = replace(form, fields=tuple(kept))
        try:
            if crossing is not None:
                return crossing.collate(columns, allocate=allocate, drawing=drawing)
            return collate_fields(form, columns, dtype=dtype, allocate=allocate, are_rows=True)
        except (ValueError, IndexError) as err:
            raise ConfigError(
                f"{self.who} of {form.made_by} stand in no batch together: {err}; its promise is {form.promise}: set "
                f"plan.batch_size = 1, or {self.advice}",
                code=self.code,
            ) from err

    def count(self, samples: Sequence[Sample]) -> tuple[int, int]:
        """Returns (frames, tokens or items of the samples, those that their batch has room for)."""
        if self.counted == "tokens":
            return count_tokens(samples)
        main = self.form.main
        if self.counted == "items":
            items = sum(len(sample[main.on_disk][: self.form.most]) for sample in samples)
            return items, items
        return count(main, self._columns(samples)[main.name], are_rows=True)

    def _columns(self, samples: Sequence[Sample]) -> dict[str, list[Sequence[Array]]]:
        columns = self.form.columns(samples)
        for name, pattern in self.tokens.items():
            columns[name] = [[in_pattern(codes, pattern) for codes in of_one] for of_one in columns[name]]
        return columns

    @property
    def has_rows(self) -> bool:
        """Whether the first dimension of every field of batches is that of the samples.

        It is not where a sample has several items, or none, and where arrays stand one behind the other.
        """
        joins = {field.join for field in self.form.fields}
        return "cat" not in joins and (self.is_one_each or joins == {"nest"})


def count_tokens(samples: Sequence[Sample]) -> tuple[int, int]:
    """Returns (tokens of the samples, those that their batch has room for)."""
    lengths = list(map(len, column(samples, IDS)))
    return sum(lengths), len(lengths) * max(lengths)


def items_of(stored: Stored) -> tuple[BatchItems, ...]:
    """Returns what a cache stores of its items as batches have it, a group each; raises as `forms_of`."""
    text = text_step_of(stored.constants)
    beside: Literal["tokens", "items"] = "tokens" if IDS in stored.fields else "items"
    found = []
    for group, form in forms_of(stored).items():
        constants = stored.constants.of(group)
        step = form_step(constants["features"])
        assert step is not None
        if not form.fields:  # lengths alone
            continue
        found.append(
            BatchItems(
                form=replace(
                    form,
                    is_listed=step.form() == CLIPS or constants.get("is_listed", False),
                    most=1 if CHOICES in constants else None,
                ),
                who=step.items,
                advice=step.apart,
                code=step.code,
                counted="frames" if step.fills else beside,
                is_one_each=step.fills or (text is not None and text.needs_items == 1),
            )
        )
    return tuple(found)


def as_tokens(
    items: tuple[BatchItems, ...], tokens: Mapping[str, TokenPattern], *, name: str
) -> tuple[BatchItems, ...]:
    """Returns items some of whose codes stand in the batch as tokens. Raises ConfigError for what are no codes.

    tokens: by field. name: of the cache.
    """
    known = {form.name for each in items for form in each.form.stored if _are_codes(form)}
    if unknown := sorted(tokens.keys() - known):
        codes = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"loader.tokens.{unknown[0]}: {name} has codes [frames, codebooks] in these fields: {codes}")
    return tuple(_with_tokens(each, tokens) for each in items)


def _with_tokens(items: BatchItems, tokens: Mapping[str, TokenPattern]) -> BatchItems:
    by_name = {each.name: each for each in items.form.fields}
    own = {name: tokens[name] for name in by_name if name in tokens}
    by_name |= {name: replace(by_name[name], stored_dtype="int32", pad=p.pad) for name, p in own.items()}
    return replace(items, form=replace(items.form, fields=tuple(by_name.values())), tokens=own)


def _are_codes(form: FieldForm) -> bool:
    return form.dtype == "int64" and len(form.shape) == 2 and form.grows == (0,)


def in_pattern(codes: Array, pattern: TokenPattern) -> Array:
    """Returns codes as tokens, int32 [frames + ..., codebooks], see `TokenPattern`. codes: [frames, codebooks]."""
    frames, books = codes.shape
    bos, eos = (np.array([] if token is None else [token], np.int32) for token in (pattern.bos, pattern.eos))
    length = len(bos) + frames + len(eos)
    out = np.full((length + pattern.delay * (books - 1), books), pattern.pad, np.int32)
    for book in range(books):
        raised = codes[:, book].astype(np.int32) + book * pattern.offset
        start = book * pattern.delay
        out[start : start + length, book] = np.concatenate((bos, raised, eos))
    return out


def text_of(stored: Stored) -> TextBatch | None:
    """Returns the form of the tokens beside the items; None for a cache without text."""
    if "text_form" in stored.constants:
        return DeclaredText.of(stored)
    prompt, constants = stored.constants.get("prompt"), stored.constants
    if constants.has_items and prompt is None:
        return None
    step = text_step_of(constants)
    if step is None:
        items = {group: str(values.get("features")) for group, values in constants.groups.items() if group != TEXT}
        where = "" if items else " without audio"
        raise ConfigError(
            f"{stored.name}: no batch form for prompt {prompt!r}{where}; {unknown(prompts_beside(items), prompt)}"
        )
    features = constants["features"]
    if issubclass(step, Transcript) and step.audio_features not in (None, features):
        raise ConfigError(
            f"{stored.name}: text.prompt is {prompt!r}, which counts audio tokens by frames of features "
            f"{step.audio_features!r}; audio.features is {features!r}"
        )
    return step.batch(stored)


@dataclass(frozen=True, slots=True)
class DeclaredText:
    """The text of a batch by its form; `labels` are the ids that `label_mask` marks, where a cache has such.

    Of pairs a batch has both texts of each sample, `doubled`, and in the place of labels a `completion_mask`; it is
    padded on the right, as TRL's.
    """

    form: BatchForm
    learns: bool
    has_pairs: bool = False

    @classmethod
    def of(cls, stored: Stored) -> DeclaredText:
        """Returns the form that a cache declares."""
        form = form_of(stored, "text_form", group="text")
        by_name = {field.name: field for field in form.fields}
        has_pairs = bool(stored.constants.get("pairs"))
        learns = not has_pairs and MASK in stored.fields and IDS in by_name and LABELS not in by_name
        if learns:
            labels = replace(by_name[IDS], name=LABELS, dtype="int64", pad=IGNORED)
            form = replace(form, fields=(*(field for field in form.fields if field.name != MASK), labels))
        elif has_pairs:
            mask = replace(by_name[IDS], name=COMPLETION, dtype="int64", stored_dtype="uint8", pad=0)
            form = replace(form, fields=tuple(replace(field, side="right") for field in (*form.fields, mask)))
        return cls(form, learns, has_pairs)

    def doubled(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Returns the rows of a batch of samples: of pairs all that are preferred, then all that are rejected."""
        if not self.has_pairs:
            return samples
        names = [name for name in samples[0] if name.startswith(REJECTED)]
        other = [{**each, **{name.removeprefix(REJECTED): each[name] for name in names}} for each in samples]
        return [{**each, COMPLETION: each[MASK]} for each in (*samples, *other)]

    def __call__(self, samples: Sequence[Sample], *, padding_side: PaddingSide, allocate: Allocate) -> Batch:
        """Returns the fields of the form. padding_side: "left" wins over the form's own, which is that of the model."""
        form = self.form
        if padding_side == "left":
            form = replace(form, fields=tuple(replace(field, side="left") for field in form.fields))
        return collate(form, list(map(self._arrays, samples)), dtype=torch.float32, allocate=allocate, are_rows=True)

    def _arrays(self, sample: Sample) -> Mapping[str, Sequence[Array]]:
        if self.learns:
            labels = np.where(sample[MASK], sample[IDS], sample[IDS].dtype.type(IGNORED))
            sample = {**sample, LABELS: labels}
        return self.form.items(sample)
