"""Embeddings of a new vocabulary: rows that are copied, and rows that are drawn like the old ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forebay.errors import ForebayError

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
