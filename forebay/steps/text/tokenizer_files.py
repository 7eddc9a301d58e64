"""A tokenizer as texts need it: of its files by the library tokenizers alone, or of transformers' tokenizer.

transformers takes seconds to import, and to many tokenizers it adds nothing that their files do not say. The files
alone are taken only where the class that transformers would choose makes the same tokenizer of them: the classes and
settings below were read in transformers 5.23, and tests compare both. Anything else is left to transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from forebay.steps.text.symbols import GPT2, MARK, QWEN2, cut_of

ALONE = ("tokenizers",)
"""The modules of a step that needs no more of a tokenizer than an `OpenTokenizer`."""
TRANSFORMERS = ("transformers.models.auto.tokenization_auto",)
"""The modules of a step that renders chat templates, and of one whose tokenizer is not plain."""
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names that transformers has for the tokens of any tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTokenizer:
    """A tokenizer that is open.

    backend: of the library tokenizers. named: tokens by `NAMES`. special: tokens that no text becomes. chat_template:
    empty where there is none.
    """

    backend: Any
    named: Mapping[str, str]
    special: frozenset[str]
    chat_template: str

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Returns a fast tokenizer of transformers as this."""
        named = {name: str(token) for name in NAMES if (token := getattr(tokenizer, name)) is not None}
        special = frozenset(tokenizer.all_special_tokens)
        backend = tokenizer.backend_tokenizer
        return cls(backend=backend, named=named, special=special, chat_template=template_of(tokenizer))

    @property
    def added(self) -> dict[str, int]:
        """The ids of the tokens that were added to the model's own."""
        return {token.content: number for number, token in sorted(self.backend.get_added_tokens_decoder().items())}

    def id_of(self, name: str) -> int | None:
        """Returns the id of the token of a name; None where the tokenizer names none."""
        token = self.named.get(name)
        found: int | None = None if token is None else self.backend.token_to_id(token)
        return found


def template_of(owner: Any) -> str:
    """Returns the chat template of a tokenizer or processor of transformers; empty where it has none."""
    return _default(getattr(owner, "chat_template", None))


def is_plain(folder: Path) -> bool:
    """Returns whether `plain_tokenizer` takes the tokenizer of a folder. Reads its files, imports nothing."""
    return _Files.of(folder) is not None


def plain_tokenizer(folder: Path) -> OpenTokenizer | None:
    """Returns the tokenizer of a folder by its files alone; None where only transformers can say what it is."""
    if (files := _Files.of(folder)) is None:
        return None
    from tokenizers import Tokenizer  # not at import: most of forebay's commands need no tokenizer

    try:
        backend = Tokenizer.from_file(str(folder / _TOKENIZER))
    except Exception:  # noqa: BLE001  what tokenizers raises for a file that it cannot read; transformers says it
        return None
    return OpenTokenizer(
        backend=backend,
        named=files.named,
        special=frozenset({*files.named.values(), *files.more}),
        chat_template=files.template,
    )


_TOKENIZER = "tokenizer.json"
_BPE = {
    **{"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False},
    **{"continuing_subword_prefix": "", "end_of_word_suffix": "", "ignore_merges": False},
}
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """A class of transformers that makes a tokenizer of vocabulary, merges and added tokens, by rules of its own.

    normalizer, cut: these rules. defaults: names whose tokens it chooses itself where the folder does not say them.
    model_types: those of config.json for which transformers takes this class.
    """

    normalizer: Any
    cut: re.Pattern[str]
    defaults: Collection[str]
    model_types: Collection[str]


_AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that take tokenizer.json whatever it holds, if no config.json names a model."""
_QWEN_MODELS = (
    *("qwen2", "qwen2_moe", "qwen2_audio", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3", "qwen3_moe"),
    *("qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "qwen3_next", "qwen3_omni_moe"),
)
_REBUILT = {
    "WhisperTokenizer": _Rebuilt(None, GPT2, ("unk_token", "bos_token", "eos_token"), ("whisper",)),
    "Qwen2Tokenizer": _Rebuilt({"type": "NFC"}, QWEN2, ("unk_token", "eos_token", "pad_token"), _QWEN_MODELS),
}
_WITHOUT_EFFECT = frozenset(
    (
        *("tokenizer_class", "backend", "model_max_length", "clean_up_tokenization_spaces", "errors", "name_or_path"),
        *("processor_class", "padding_side", "truncation_side", "model_input_names", "special_tokens_map_file"),
        *("add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens", "is_local", "chat_template"),
        *("language", "task", "predict_timestamps", "additional_special_tokens", "extra_special_tokens"),
        *("added_tokens_decoder", MARK),
    )
)
"""Settings of tokenizer_config.json that change no id of a text without special tokens, or that are read here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """Answers of a folder's files. named: tokens by `NAMES`. more: other special tokens. template: may be empty."""

    named: Mapping[str, str]
    more: Collection[str]
    template: str

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Returns what the files say where they say all; else None."""
        try:
            return cls._of(folder)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None  # not of the form that it should have: transformers says what is wrong

    @classmethod
    def _of(cls, folder: Path) -> Self | None:
        config, document = _json(folder / "tokenizer_config.json"), _json(folder / _TOKENIZER)
        model_type = _json(folder / "config.json").get("model_type") or ""
        wanted = config["tokenizer_class"]
        rebuilt = _REBUILT.get(wanted.removesuffix("Fast"))
        if model_type not in ("", *(rebuilt.model_types if rebuilt else ())) or not (rebuilt or wanted in _AS_IT_IS):
            return None
        unknown = [name for name in config if not name.endswith("_token") and name not in _WITHOUT_EFFECT]
        if unknown or any(config.get(name) for name in ("add_prefix_space", "split_special_tokens")):
            return None
        if config.get("backend", "tokenizers") != "tokenizers":
            return None
        if document["model"].get("dropout") or document.get("truncation") or document.get("padding"):
            return None
        named = {name: _content(config[name]) for name in NAMES if config.get(name) is not None}
        others = [value for name, value in config.items() if name.endswith("_token") and name not in NAMES]
        lists = [config[name] for name in ("extra_special_tokens", "additional_special_tokens") if config.get(name)]
        more = [*(token for token in others if token is not None), *(token for tokens in lists for token in tokens)]
        if len(lists) > 1 or not all(isinstance(each, (list, str)) for each in (*lists, *more)):
            return None
        added = {entry["content"]: entry for entry in document["added_tokens"]}
        special = {*named.values(), *more}
        if not all(added[token]["special"] for token in special) or not _agree(folder, config, added):
            return None
        if rebuilt and not _is_rebuilt(rebuilt, config, document, added, special):
            return None
        return cls(named=named, more=more, template=_template(folder, config))


def _agree(folder: Path, config: Mapping[str, Any], added: Mapping[str, Any]) -> bool:
    """Whether other files and settings that transformers reads say of tokens what tokenizer.json says."""
    listed = config.get("added_tokens_decoder")
    if listed is not None and listed != {str(e["id"]): _without_id(e) for e in added.values()}:
        return False
    if any(number != added.get(token, {}).get("id") for token, number in _json(folder / "added_tokens.json").items()):
        return False
    for name, value in _json(folder / "special_tokens_map.json").items():
        found = config.get(name)
        if found is None or (found != value if isinstance(value, list) else _content(found) != _content(value)):
            return False
    return True


def _is_rebuilt(
    by: _Rebuilt,
    config: Mapping[str, Any],
    document: Mapping[str, Any],
    added: Mapping[str, Any],
    special: Collection[str],
) -> bool:
    """Whether a tokenizer that is made anew, of vocabulary, merges and added tokens, is that of the document."""
    # Without an unknown token they do; without another one of their defaults they may raise.
    if any(config.get(name) is None and (name != "unk_token" or name not in config) for name in by.defaults):
        return False
    if document["normalizer"] != by.normalizer or cut_of(document) is not by.cut:
        return False
    model = {name: value for name, value in document["model"].items() if name not in ("vocab", "merges")}
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        model[name] = model.get(name) or ""
    vocab = document["model"]["vocab"]
    numbers = {**vocab}
    for entry in sorted(added.values(), key=lambda entry: entry["id"]):
        if numbers.setdefault(entry["content"], len(numbers)) != entry["id"]:
            return False
    return (
        {**_BPE, **model} == _BPE
        and document["decoder"]["type"] == "ByteLevel"
        and sorted(vocab.values()) == list(range(len(vocab)))
        and all(_without_id(added[token]) == {"content": token, **_FLAGS} for token in special)
    )


def _without_id(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name != "id"}


def _content(token: Any) -> str:
    """Returns the text of a token that is written as a text, or with its flags."""
    return str(token if isinstance(token, str) else token["content"])


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    alone, others = folder / "chat_template.jinja", folder / "additional_chat_templates"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    if others.is_dir() and any(others.glob("*.jinja")):
        return ""  # these replace what the settings have, and none of them is the default
    found = config.get("chat_template")
    return _default({each["name"]: each["template"] for each in found} if isinstance(found, list) else found)


def _default(template: Any) -> str:
    found = template or ""
    return str(found.get("default", "") if isinstance(found, dict) else found)


def _json(path: Path) -> dict[str, Any]:
    """Returns the document of a file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise TypeError(f"{path} holds a {type(found).__name__}, wanted an object")
    return found
