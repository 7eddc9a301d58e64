"""A tokenizer folder: text to ids in which nothing that was transcribed can become a control token."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.pretrained import from_folder, without_dropout
from forebay.steps.text.symbols import CLASS, Words, fast_letters, is_symbol_table
from forebay.steps.text.tokenizer_files import OpenTokenizer, plain_tokenizer, template_of

_TIME = re.compile(r"<(?:timestamp|\|\d+\.\d+\|)>")
_UNSTEADY = re.compile(r"strftime_now|\|\s*random\b")
_MARK = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)


class Vocabulary:
    """The tokenizer of a local folder.

    A transcript becomes what the tokenizer makes of it alone, but for control tokens: `<|endoftext|>` in a transcript
    stays the characters that somebody wrote. Those are the special ones, and of the other added tokens those that a
    prompt or the chat template writes (`<asr_text>`, `<think>`); they enter by their ids, from the prompt alone. Any
    other added token is a word of the text. control_ids: those that no text becomes.
    """

    def __init__(self, folder: Path, *, digest: str) -> None:
        """Loads the tokenizer.

        digest: what the key was made with. Raises ConfigError where the folder's files have another one by now, or
        where transformers cannot load them. transformers is imported only where the files alone do not say all.
        """
        require_digest("text.tokenizer", folder, tokenizer_digest(folder), digest)
        self.folder = folder
        self.open = plain_tokenizer(folder) or OpenTokenizer.of(self.tokenizer)
        """The tokenizer without transformers."""
        self._document = json.loads(self.open.backend.to_str())
        self._document.update(post_processor=None, truncation=None, padding=None)
        self._added = self.open.added
        self._ready: dict[str, list[int]] = {}
        self.eos_token_id = self.open.id_of("eos_token")
        self._unknown = _unknown_token(self._document["model"])
        self._unknown_id = self._added.get(self._unknown or "") if is_symbol_table(folder) else None
        self._reserve({*self.open.special, *filter(_TIME.fullmatch, self._added)})
        self._reserve(self._marks(self.open.chat_template))

    @functools.cached_property
    def tokenizer(self) -> Any:
        """transformers' tokenizer, for chat templates and what else only that can do; imports transformers."""
        return _fast(load_tokenizer(self.folder), self.folder)

    def renders(self, owner: Any) -> None:
        """Takes the chat template of a tokenizer or processor as the one that is rendered: its marks are no text.

        Raises ConfigError where what it writes depends on the day, or on chance.
        """
        template = template_of(owner)
        if found := _UNSTEADY.search(template):
            raise ConfigError(
                f"text.tokenizer: the chat template of {self.folder} asks for the date of the day or for chance "
                f"({found[0]}), so ids would differ from build to build; take it out of a copy of the template",
                code="FB126",
            )
        self._reserve(self._marks(template))

    def _marks(self, template: str) -> set[str]:
        return {token for token in self._added if token in template and _MARK.fullmatch(token)}

    def _reserve(self, tokens: set[str]) -> None:
        """Keeps tokens as text where a text has them."""
        for entry in self._document["added_tokens"]:
            entry["special"] |= entry["content"] in tokens
        self._plain = type(self.open.backend).from_str(json.dumps(self._document))
        self._plain.encode_special_tokens = True
        control = {entry["content"] for entry in self._document["added_tokens"] if entry["special"]}
        # An unknown token that is another one's too ends a text, or fills up: no character becomes that.
        named = {self.open.named.get(name) for name in ("bos_token", "eos_token", "pad_token")}
        self.control_ids = frozenset(self._added[token] for token in control - ({self._unknown} - named))
        # Of a model's own pieces: an id that it cannot give is not looked for in every text.
        self._refused = self.control_ids.intersection(self._plain.get_vocab(with_added_tokens=False).values())
        self._words = Words.of(self._plain, self._document)
        self._control_pattern = tokens_pattern(control)

    @property
    def size(self) -> int:
        """One more than the largest id: what a model's embedding must hold."""
        return 1 + int(max(self.open.backend.get_vocab().values()))

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills up batches: the pad token, else the end token, where the tokenizer names one."""
        pad = self.open.id_of("pad_token")
        return self.eos_token_id if pad is None else pad

    def find(self, token: str) -> int | None:
        """Returns the id of a control token, None where the tokenizer has no such token."""
        return self._added.get(token)

    def require(self, token: str, *, prompt: str) -> int:
        """Returns the id of a control token; ConfigError where the tokenizer has none."""
        found = self.find(token)
        if found is None:
            raise ConfigError(
                f'text.prompt = "{prompt}" needs the token {token}, which the tokenizer in {self.folder} does not '
                "have; name another prompt or the model's own tokenizer",
                code="FB106",
            )
        if found not in self.control_ids:
            self._reserve({token})
        return found

    @contextlib.contextmanager
    def together(self, texts: Iterable[str]) -> Iterator[None]:
        """Tokenises texts in one call, each different one once: `encode` has their ids within the block.

        What `encode` gives does not depend on that: other texts are tokenised when they are asked for.
        """
        different = list(dict.fromkeys(texts))
        # What one of them is at fault for is raised when that one is asked for.
        with contextlib.suppress(Exception):
            self._ready = self._tokenised(different)
        try:
            yield
        finally:
            self._ready = {}

    def _tokenised(self, texts: Sequence[str]) -> dict[str, list[int]]:
        found = self._words.encode(texts) if self._words is not None else [None] * len(texts)
        others = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        # Without offsets, which nothing reads.
        made = iter(self._plain.encode_batch_fast(others, add_special_tokens=False))
        return {text: next(made).ids if ids is None else ids for text, ids in zip(texts, found, strict=True)}

    def encode(self, text: str, *, sample_id: str) -> list[int]:
        """Returns the ids of a text as characters: no control token comes out of it. The list is the caller's.

        Raises TextError `bad_text` where the tokenizer's model itself knows a control token as a piece of text,
        `unknown_symbol` where a symbol table lacks a symbol of it.
        """
        ready = self._ready.get(text)
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if ready is None else ready.copy()
        if self._refused and (found := self._refused.intersection(ids)):
            token = self.open.backend.id_to_token(min(found))
            raise TextError(
                "bad_text", f"{sample_id}: the tokenizer reads {token} in the text as a control token; clean the text"
            )
        if self._unknown_id is not None and self._unknown_id in ids:
            raise self._unknown_symbol(text, sample_id)
        return ids

    def _unknown_symbol(self, text: str, sample_id: str) -> TextError:
        found = self._plain.encode(text, add_special_tokens=False)
        start, stop = found.offsets[found.ids.index(self._unknown_id)]
        return TextError(
            "unknown_symbol",
            f"{sample_id}: the symbol table in {self.folder} has no {text[start:stop][:40]!r}; clean the text, or "
            "write the table again with forebay symbols",
        )

    def split(self, template: str) -> list[str | int]:
        """Returns a rendered template as ids of its control tokens and the texts between them."""
        parts: list[str | int] = []
        position = 0
        for match in self._control_pattern.finditer(template):
            parts += [template[position : match.start()], self._added[match[0]]]
            position = match.end()
        return [part for part in (*parts, template[position:]) if part != ""]

    def encode_parts(self, parts: Sequence[str | int], *, sample_id: str) -> list[int]:
        """Returns the ids of texts and control tokens; neighbouring texts are tokenised as one."""
        ids: list[int] = []
        for part in joined(parts):
            ids += self.encode(part, sample_id=sample_id) if isinstance(part, str) else [part]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, control tokens and what is below zero (masked labels) left out."""
        said = [i for i in ids if i >= 0 and i not in self.control_ids]
        return str(self._plain.decode(said, skip_special_tokens=False))


def joined(parts: Iterable[str | int]) -> list[str | int]:
    """Returns the parts of a sequence, neighbouring texts as one; none of the texts is empty."""
    found: list[str | int] = []
    for part in parts:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        elif part != "":
            found.append(part)
    return found


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    number = model.get("unk_id")  # of a Unigram model, which has no names
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def tokens_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern of control tokens, the longest first; none is found in any text where there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def require_digest(setting: str, folder: Path, found: str, wanted: str) -> None:
    """Raises ConfigError where the files of a folder have another digest than the one that the key was made with."""
    if found != wanted:
        raise ConfigError(
            f"{setting}: the files of {folder} have digest {found[:16]}, the recipe was made with {wanted[:16]}; they "
            "changed in between: run the command again"
        )


def load_tokenizer(folder: Path) -> Any:
    """Returns transformers' tokenizer of a folder, without dropout. Raises ConfigError where it cannot be loaded."""
    from transformers import AutoTokenizer  # not at import: most of forebay's commands need no tokenizer

    try:
        tokenizer = from_folder(AutoTokenizer, folder)
    except Exception as err:  # not our work: tokenizers raises bare Exception for a file that it cannot read
        raise ConfigError(f"text.tokenizer: transformers cannot load {folder}: {err!r}", code="FB105") from err
    without_dropout(tokenizer)
    return tokenizer


def tools_apart(messages: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns messages without the `tools` that the first one may have, and these as an argument of a template."""
    first, *others = messages
    return [{name: first[name] for name in first if name != "tools"}, *others], {
        name: first[name] for name in ("tools",) if name in first
    }


def render_chat(owner: Any, messages: Sequence[Any], *, add_generation_prompt: bool = False) -> str:
    """Returns a conversation as the chat template of a tokenizer or processor writes it.

    Raises ValueError where the template refuses it.
    """
    from jinja2 import TemplateError  # comes with transformers

    talk, tools = tools_apart(messages)
    try:
        made = owner.apply_chat_template([talk], tokenize=False, add_generation_prompt=add_generation_prompt, **tools)
    except (TypeError, TemplateError) as err:  # TypeError: a template for texts alone adds strings to the list of parts
        raise ValueError(str(err)) from err
    return str(made[0])


def _fast(tokenizer: Any, folder: Path) -> Any:
    if type(tokenizer).__name__ == CLASS:
        return fast_letters(tokenizer, folder)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(
            f"text.tokenizer: {folder} has only a Python tokenizer ({type(tokenizer).__name__}); "
            "save its fast form (tokenizer.json) there",
            code="FB105",
        )
    return tokenizer
