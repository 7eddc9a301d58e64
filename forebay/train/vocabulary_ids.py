"""The token ids that a model's configuration names: each moves with its token to the new vocabulary.

Embeddings of a new vocabulary: rows that are copied, and rows that are drawn like the old ones.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from forebay.errors import ConfigError, ForebayError

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
            elif name in ("suppress_tokens", "begin_suppress_tokens"):
                setattr(node, name, list(self._wanted(value)) or None)
            elif name in ("bad_words_ids",):
                words = [list(self._wanted(word)) for word in value]
                setattr(node, name, [new for new, word in zip(words, value, strict=True) if len(new) == len(word)])
            elif name in ("lang_to_id", "task_to_id"):
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


_BLOCK_ROWS = 4096
"""Rows that are computed together: a whole vocabulary in float64 would take gigabytes."""
_FIRST_JITTER, _LAST_JITTER = 1e-10, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The normal distribution that rows are drawn from. mean: float64 [d]. factor: float64 [d, d], lower triangular."""

    mean: torch.Tensor
    factor: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, ids: Sequence[int]) -> Spread:
        """Returns N(mean, covariance) of `rows[ids]`, the whole covariance, computed in float64.

        The factor is Cholesky's of the covariance and a jitter on its diagonal, which begins at 1e-10 of the mean
        variance (trace / d) and grows tenfold until the factorisation succeeds: fewer rows than columns, or columns
        that are always zero, have no factor without one. transformers' `mean_resizing` draws from 1e-9 of the
        covariance instead, which is the mean for every new row: new tokens begin as one and the same token.

        rows: [vocab, d], finite. ids: the rows that count, one at least.
        """
        places = torch.tensor(list(ids))
        mean = sum(block.sum(0) for block in _blocks(rows, places)) / len(places)
        centred = (block - mean for block in _blocks(rows, places))
        covariance = sum(block.T @ block for block in centred) / max(len(places) - 1, 1)
        assert isinstance(mean, torch.Tensor)
        assert isinstance(covariance, torch.Tensor)
        return cls(mean=mean, factor=_cholesky(covariance))

    def draw(self, tokens: Sequence[str], *, seed: int, name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Returns a row for each token, [tokens, d], computed in float64 and rounded to `dtype`.

        The noise of a row is a function of (seed, name, token) alone: neither the order nor the number of the tokens
        moves a row, but for the last bits of float64 (a matrix product rounds by where a row stands in it).
        name: of the matrix. Two matrices have different rows for a token.
        """
        drawn = []
        for start in range(0, len(tokens), _BLOCK_ROWS):
            block = tokens[start : start + _BLOCK_ROWS]
            noise = np.stack([_noise(token, size=len(self.mean), seed=seed, name=name) for token in block])
            drawn.append((torch.from_numpy(noise) @ self.factor.T + self.mean).to(dtype))
        return torch.cat(drawn)


def _blocks(rows: torch.Tensor, places: torch.Tensor) -> Iterator[torch.Tensor]:
    for part in torch.split(places, _BLOCK_ROWS):
        yield rows[part].to(torch.float64)


def _cholesky(covariance: torch.Tensor) -> torch.Tensor:
    scale = covariance.diagonal().mean()
    if scale == 0:  # all rows are equal, and so are those to be drawn
        return torch.zeros_like(covariance)
    jitter = _FIRST_JITTER
    while jitter <= _LAST_JITTER:
        eye = torch.eye(len(covariance), dtype=torch.float64)
        factorised = torch.linalg.cholesky_ex(covariance + jitter * scale * eye)
        if not factorised.info:
            found: torch.Tensor = factorised.L
            return found
        jitter *= 10
    raise ForebayError(
        f"the covariance of the embeddings has no Cholesky factor, not even with {_LAST_JITTER:g} of its mean variance "
        "on the diagonal; the weights are damaged: load them again from where they came from"
    )


def _noise(token: str, *, size: int, seed: int, name: str) -> np.ndarray[Any, Any]:
    # Surrogates: a tokenizer.json can hold a half of a character, which UTF-8 cannot.
    words = f"{seed}\n{name}\n{token}".encode("utf-8", "surrogatepass")
    key = int.from_bytes(hashlib.sha256(words).digest()[:16], "little")
    return np.random.Generator(np.random.Philox(key=key)).standard_normal(size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moves:
    """Where the rows of a new vocabulary come from. Ids of new tokens are 0 to `size` - 1, without a gap."""

    size: int
    copied: Mapping[int, int]
    """New id to old id."""
    drawn: Mapping[int, str]
    """New id to token, in rising order."""
    named: Sequence[int]
    """Old ids that have a token. Rows behind them fill an embedding up; no text ever used them."""

    def apply(self, old: torch.Tensor, *, seed: int, name: str) -> torch.Tensor:
        """Returns [size, d] in the dtype of `old` [old vocab, d]: copied rows bit for bit, the others drawn."""
        new = old.new_empty(self.size, old.shape[1])
        if self.copied:
            targets, sources = (torch.tensor(list(ids)) for ids in (self.copied.keys(), self.copied.values()))
            new[targets] = old[sources]
        if self.drawn:
            tokens, spread = list(self.drawn.values()), Spread.of(old, self.named)
            new[torch.tensor(list(self.drawn))] = spread.draw(tokens, seed=seed, name=name, dtype=old.dtype)
        return new
