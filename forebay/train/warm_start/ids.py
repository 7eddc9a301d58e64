"""The token ids that a model's configuration names: each moves with its token to the new vocabulary."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from forebay.errors import ConfigError

_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_LISTS_OF_LISTS = ("bad_words_ids",)
_MAPS = ("lang_to_id", "task_to_id")
_TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")


@dataclass(kw_only=True, slots=True)
class IdMover:
    """Moves ids by their tokens, and notes what the new vocabulary lacks."""

    old_tokens: Mapping[int, str]
    new_ids: Mapping[str, int]
    missing: dict[str, list[str]] = field(default_factory=dict)
    """Token to the fields that need it."""
    num_dropped: int = 0
    """Entries of lists and maps whose tokens the new vocabulary lacks."""

    def move_config(self, config: Any) -> None:
        """Makes every id in a transformers configuration, and in those that it holds, that of the new vocabulary."""
        for node in nodes(config):
            if getattr(node, "vocab_size", None) is not None:
                node.vocab_size = len(self.new_ids)
            self._move(node, node.to_dict(), type(node).__name__)

    def move_generation(self, generation: Any) -> None:
        """Makes every id in a `GenerationConfig` that of the new vocabulary."""
        self._move(generation, dict(vars(generation)), "generation_config")
        self._check_timestamps(generation)

    def _move(self, node: Any, values: Mapping[str, Any], place: str) -> None:
        for name, value in values.items():
            if value is None:
                continue
            if name.endswith("_token_id"):
                setattr(node, name, self._needed(value, f"{place}.{name}"))
            elif name in _LISTS:
                setattr(node, name, list(self._wanted(value)) or None)
            elif name in _LISTS_OF_LISTS:
                words = [list(self._wanted(word)) for word in value]
                setattr(node, name, [new for new, word in zip(words, value, strict=True) if len(new) == len(word)])
            elif name in _MAPS:
                setattr(node, name, self._map(value, f"{place}.{name}"))
            elif name == "forced_decoder_ids":
                pairs = [(at, self._needed(i, f"{place}.{name}")) for at, i in value if i is not None]
                setattr(node, name, [list(pair) for pair in pairs])

    def _needed(self, ids: Any, place: str) -> Any:
        """Returns the new id, or ids, of a token that the model cannot do without."""
        if not isinstance(ids, int):
            return [self._needed(each, place) for each in ids]
        token = self.old_tokens.get(ids)
        if token is not None and token in self.new_ids:
            return self.new_ids[token]
        if token is not None:
            self.missing.setdefault(token, []).append(place)
        elif ids < len(self.new_ids):  # by chance that of some token; a larger one stays what it was, no id
            raise ConfigError(
                f"{place} is {ids}, which is no token of the model's tokenizer and {self._name(ids)} of the new one; "
                "set it to the id of the token that is meant"
            )
        return ids

    def _name(self, number: int) -> str:
        return repr(next(token for token, i in self.new_ids.items() if i == number))

    def _wanted(self, ids: Any) -> Iterator[int]:
        """Yields the new ids of the tokens that are still there."""
        for each in ids:
            token = self.old_tokens.get(each)
            if token is None or token not in self.new_ids:
                self.num_dropped += 1
            else:
                yield self.new_ids[token]

    def _map(self, ids: Mapping[str, int], place: str) -> dict[str, int]:
        moved = {name: list(self._wanted([each])) for name, each in ids.items()}
        found = {name: new[0] for name, new in moved.items() if new}
        if ids and not found:
            for each in ids.values():
                self._needed(each, place)
        return found

    def _check_timestamps(self, generation: Any) -> None:
        """Raises ConfigError where Whisper's tokens around `<|notimestamps|>` do not stand as before.

        transformers finds the timestamps by counting up from that token, and the token of no speech right below it.
        """
        new_start = getattr(generation, "no_timestamps_token_id", None)
        if new_start is None or self.missing:
            return
        old_start = next((i for i, token in self.old_tokens.items() if self.new_ids.get(token) == new_start), None)
        if old_start is None:  # the model names no token of its own there
            return
        behind = itertools.takewhile(self._is_timestamp, itertools.count(old_start + 1))
        for old_id in [old_start - 1, *behind]:
            token, wanted = self.old_tokens.get(old_id), new_start + old_id - old_start
            if token is not None and self.new_ids.get(token) != wanted:
                raise ConfigError(
                    f"--tokenizer: {token} has id {self.new_ids.get(token)}, wanted {wanted}: Whisper counts from "
                    f"{self.old_tokens[old_start]}, whose id is {new_start}; add these tokens in the order of the "
                    "model's tokenizer"
                )

    def _is_timestamp(self, old_id: int) -> bool:
        return _TIMESTAMP.fullmatch(self.old_tokens.get(old_id, "")) is not None


def nodes(config: Any) -> Iterator[Any]:
    """Yields a transformers configuration and those that it holds, at any depth."""
    yield config
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield from nodes(inner)


def missing_message(missing: Mapping[str, list[str]], folder: object) -> str:
    """Returns which tokens the model needs and the new tokenizer lacks, what for, and how to add them."""
    named = "; ".join(f"{token} ({', '.join(dict.fromkeys(places))})" for token, places in missing.items())
    return (
        f"--tokenizer: the tokenizer in {folder} lacks tokens that the model needs: {named}; add them: "
        f"tokenizer.add_special_tokens({{'extra_special_tokens': {list(missing)}}}), then tokenizer.save_pretrained"
    )
