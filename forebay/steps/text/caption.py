"""`plain` under `[vision]`: the text of an image as the tokenizer of its model writes it, for CLIP and SigLIP."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.steps.form import BatchForm, FieldForm, Promise
from forebay.steps.step import TextStep
from forebay.steps.text.row_encoder import TURN, OneByOne, Size
from forebay.steps.text.tokenizer_files import TRANSFORMERS
from forebay.steps.text.vocabulary import load_tokenizer, require_digest, tokens_pattern
from forebay.store.layout import Array, FieldSpec

_DOCUMENTS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
_NO_LIMIT = 1 << 30
"""From here on, a tokenizer's `model_max_length` says that it has none."""
_TRIED = ("a", "a cat")
_OF_TRAINING: Mapping[str, Mapping[str, Any]] = {"SiglipProcessor": {"padding": "max_length"}}
"""What a model was trained with and its processor's class does not say: SigLIP's own page asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption(TextStep):
    """`input_ids`, and `attention_mask` and `token_type_ids` where the tokenizer gives them, with its special tokens.

    A batch is what the model's own processor makes of the same texts. What a setting leaves out is as the class of the
    processor in `vision.processor` has it, else as the tokenizer.
    """

    name: ClassVar[str] = "plain"
    libraries: ClassVar[tuple[str, ...]] = TRANSFORMERS
    axes: ClassVar[dict[str, str | int]] = {"input_ids": "tokens", "token_type_ids": "tokens"}
    given: ClassVar[frozenset[str]] = frozenset({"tokenizer", "processor", "tokenizer_folder", "processor_folder"})
    needs_items: ClassVar[int | None] = 1

    tokenizer: str
    processor: str
    padding: Literal["longest", "max_length"] | None = None
    """How long the texts of a batch are: as the longest of them, or always `max_length`. Left out: as the processor,
    else `longest`; SigLIP `max_length`."""
    max_length: int | None = None
    """The most tokens of a text. Left out: as the processor, else the tokenizer's `model_max_length`."""
    truncation: bool | None = None
    """Whether a longer text is cut, else its sample is `label_too_long`. Left out: as the processor, else not."""
    version: int = 1
    tokenizer_folder: str = field(default="", compare=False)
    processor_folder: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}, wanted 1 or more")

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the text group. Loads the tokenizer, which says what it gives."""
        return _opened(self).form.specs("text")

    def opened(self, folder: Path, *, merge_size: int | None) -> CaptionEncoder:  # noqa: ARG002
        """Returns what writes texts.

        Raises ConfigError where the tokenizer cannot be loaded, is not that of `tokenizer`, or cannot pad as it should.
        """
        return _opened(self)


@functools.lru_cache(maxsize=2)
def _opened(step: Caption) -> CaptionEncoder:
    return CaptionEncoder(step)


class CaptionEncoder(OneByOne):
    """Writes the texts of images with the tokenizer of a local folder."""

    name, needs_items = Caption.name, Caption.needs_items
    turn = TURN

    def __init__(self, step: Caption, *, may_lack_pad: bool = False) -> None:
        """may_lack_pad: a tokenizer that names no pad_token pads with its eos_token, for who looks at no padding."""
        self._folder = Path(step.tokenizer_folder)
        require_digest("text.tokenizer", self._folder, tokenizer_digest(self._folder), step.tokenizer)
        self.tokenizer = _load(self._folder, may_lack_pad=may_lack_pad)
        own = _own_settings(Path(step.processor_folder), self._folder, self.tokenizer)
        self._padding = step.padding or ("max_length" if own.get("padding") == "max_length" else "longest")
        self._limit = step.max_length or own.get("max_length") or _model_limit(self.tokenizer)
        self._truncates = bool(own.get("truncation", False)) if step.truncation is None else step.truncation
        self._others = {name: own[name] for name in ("add_special_tokens", "padding_side") if name in own}
        self._reserved = _reserved(self.tokenizer)
        if self._limit is None and (self._padding == "max_length" or self._truncates):
            raise ConfigError(
                f"text.max_length: the tokenizer in {self._folder} has no limit, and texts are padded or cut to one; "
                "set it to the model's number of positions",
                code="FB106",
            )
        self.form = self._form()

    @property
    def constants(self) -> dict[str, Any]:
        """`prompt`, `vocab_size`, `pad_token_id`, and the form of batches."""
        return {
            "prompt": Caption.name,
            "vocab_size": len(self.tokenizer),
            "pad_token_id": self.tokenizer.pad_token_id,
            "text_form": self.form.to_json(),
        }

    def encode(self, text: str, told: Sequence[Size], *, sample_id: str) -> dict[str, Array]:  # noqa: ARG002
        """Returns the fields of a text. Raises TextError `special_token_in_text`, `bad_text`, `label_too_long`."""
        if (reserved := self._reserved.search(text)) is not None:
            raise TextError(
                "special_token_in_text",
                f"{sample_id}: the text has {reserved[0]}, which the tokenizer takes for a control token; clean it",
            )
        if "\0" in text:
            raise TextError("bad_text", f"{sample_id}: the text has a NUL; clean it")
        made = self._tokens([text])
        length = len(made["input_ids"][0])
        if self._limit is not None and length > self._limit:
            raise TextError(
                "label_too_long",
                f"{sample_id}: {length} tokens, and a text has at most {self._limit}; set text.truncation = true to "
                "cut it, or text.max_length where the model allows more",
            )
        return {
            name: array
            for each in self.form.stored
            for name, array in each.stored(np.array(made[each.name][0], np.int64)).items()
        }

    def together(self, texts: Sequence[str]) -> dict[str, list[list[int]]]:
        """Returns what the tokenizer gives of a batch of texts, padded and cut as the model's processor does it."""
        return self._tokens(texts, padding=self._padding)

    def cut_tokens(self, text: str) -> int:
        """Returns how many tokens of a text are cut off; 0 where texts are not cut."""
        if not self._truncates or self._limit is None:
            return 0
        whole = self.tokenizer([text], truncation=False, verbose=False, **self._others)["input_ids"][0]
        return max(0, len(whole) - self._limit)

    def decode(self, input_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of the ids of a sample, without control tokens."""
        return str(self.tokenizer.decode([int(i) for i in input_ids], skip_special_tokens=True))

    def _tokens(self, texts: Sequence[str], *, padding: str | bool = False) -> dict[str, list[list[int]]]:
        limit = {"max_length": self._limit} if self._truncates or padding == "max_length" else {}
        settings: dict[str, Any] = {"truncation": self._truncates} | limit | self._others
        return dict(self.tokenizer(list(texts), padding=padding, verbose=False, **settings))

    def _form(self) -> BatchForm:
        """Returns how the tokenizer itself puts texts together, compared with what it gives of two."""
        alone = [self._tokens([text]) for text in _TRIED]
        side = self._others.get("padding_side", self.tokenizer.padding_side)
        length = self._limit if self._padding == "max_length" else None
        forms = []
        for name in alone[0]:
            if name == "attention_mask":
                form = FieldForm(name=name, dtype="int64", shape=(None,), stored_dtype="uint8", mask_of="input_ids")
            elif name in ("input_ids", "token_type_ids"):
                pad = self.tokenizer.pad_token_id if name == "input_ids" else self.tokenizer.pad_token_type_id
                form = FieldForm(
                    name=name, dtype="int64", shape=(None,), stored_dtype="int32", pad=pad, side=side, length=length
                )
            else:
                raise ConfigError(
                    f"text.tokenizer: {type(self.tokenizer).__name__} in {self._folder} gives {name}, and input_ids, "
                    "attention_mask and token_type_ids are stored; take another tokenizer",
                    code="FB106",
                )
            forms.append(form)
        promise = self._promise(forms, alone)
        return BatchForm(made_by=type(self.tokenizer).__name__, fields=tuple(forms), promise=promise)

    def _promise(self, forms: Sequence[FieldForm], alone: Sequence[Mapping[str, list[list[int]]]]) -> Promise:
        together = self._tokens(_TRIED, padding=self._padding)
        for form in forms:
            rows = [made[form.mask_of or form.name][0] for made in alone]
            like = next(each for each in forms if each.name == (form.mask_of or form.name))
            room = like.room(max(map(len, rows)))
            expected = [_padded(row, room, like, is_mask=form.mask_of is not None) for row in rows]
            if expected != together[form.name]:
                why = f"{form.name} of two texts together are not those of each, padded on the {like.side}"
                return Promise(kind="alone", why=why)
        return Promise(kind="exact")


def _padded(row: Sequence[int], room: int, form: FieldForm, *, is_mask: bool) -> list[int]:
    values = [1] * len(row) if is_mask else list(row)
    behind = [0 if is_mask else int(form.pad or 0)] * (room - len(row))
    return values + behind if form.side == "right" else behind + values


def _load(folder: Path, *, may_lack_pad: bool = False) -> Any:
    for name in _DOCUMENTS:
        if "auto_map" in _document(folder / name):
            raise ConfigError(
                f"text.tokenizer: {folder / name} has auto_map, which names code of the folder, and none is run; use a "
                "class of transformers itself, and remove the entry",
                code="FB105",
            )
    tokenizer = load_tokenizer(folder)
    if tokenizer.pad_token_id is None and may_lack_pad:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"text.tokenizer: the tokenizer in {folder} names no pad_token, and texts of a batch are padded; use the "
            "model's own tokenizer",
            code="FB106",
        )
    return tokenizer


def _own_settings(processor: Path, tokenizer_folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Returns how the class of the processor calls the tokenizer, where it says so itself."""
    import transformers

    named = [_document(folder / name) for folder in (processor, tokenizer_folder) for name in _DOCUMENTS]
    found = next((name for each in named if isinstance(name := each.get("processor_class"), str)), "")
    cls = getattr(transformers, found, None) if found.endswith("Processor") else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.ProcessorMixin):
        return {}
    kwargs: Any = getattr(cls, "valid_processor_kwargs", None)
    settings = {
        **_OF_TRAINING.get(found, {}),
        **(getattr(cls, "text_kwargs", None) or {}),
        **(getattr(kwargs, "_defaults", {}) or {}).get("text_kwargs", {}),
    }
    # A tokenizer's own settings go before those of the processor's class.
    init = getattr(tokenizer, "init_kwargs", {})
    return settings | {name: init[name] for name in ("padding", "truncation", "max_length") if name in init}


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _model_limit(tokenizer: Any) -> int | None:
    limit = tokenizer.model_max_length
    return int(limit) if isinstance(limit, int | float) and 0 < limit < _NO_LIMIT else None


def _reserved(tokenizer: Any) -> re.Pattern[str]:
    """Returns a pattern of the tokens that no text may write: they would become control tokens."""
    control = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    tokens = {token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token or token in control}
    return tokens_pattern(tokens)
