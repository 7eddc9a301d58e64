"""A pack cut for ranks that share its sequence: context parallel training, in which each rank has a part of every row.

Which tokens a rank has: the work of causal attention is the same on all of them, because each has as many early tokens
as late ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from forebay.errors import ConfigError
from forebay.steps.batch import IGNORED
from forebay.store.layout import Array, Ints

Layout = Literal["zigzag", "halves"]
_TOKEN_DIM = {"input_ids": 1, "token_type_ids": 1, "mm_token_type_ids": 1, "inputs_embeds": 1, "position_ids": -1}
"""The fields with a value a token, and where their tokens lie."""


def context_places(
    lengths: Array, *, ranks: int, layout: Layout = "zigzag", pad_to_multiple_of: int | None = None
) -> tuple[Ints, Ints]:
    """Returns the tokens of each rank, int64 [ranks, tokens / ranks], and where padded segments begin and end, int64.

    lengths: of the segments of a row, in their order. A token is its place in the row, -1 one of padding.
    layout: `zigzag`: each segment is padded to a multiple and cut into 2 * ranks chunks of one length, of which rank r
    has chunk r and chunk 2 * ranks - 1 - r; a rank's own segments are then those bounds divided by `ranks`, as
    Transformer Engine and Megatron take them. `halves`: so the whole row, as torch's `context_parallel` cuts it.
    pad_to_multiple_of: of the tokens of a segment, or of the row; a multiple of 2 * ranks, which is the default.
    Raises ConfigError for another one, for no rank, and for an unknown layout.
    """
    unit = 2 * ranks if pad_to_multiple_of is None else pad_to_multiple_of
    if ranks < 1 or unit < 1 or unit % (2 * ranks):
        raise ConfigError(
            f"ranks is {ranks} and pad_to_multiple_of {unit}, wanted 1 or more and a multiple of {2 * max(ranks, 1)}"
        )
    if layout not in ("zigzag", "halves"):
        raise ConfigError(f'layout is {layout!r}, wanted "zigzag" or "halves"')
    own = np.asarray(lengths, np.int64)
    whole = own if layout == "zigzag" else own.sum(keepdims=True)
    padded = -(-whole // unit) * unit
    ends, starts = np.cumsum(padded), np.cumsum(whole) - whole
    row = np.full(int(padded.sum()), -1, np.int64)
    for end, size, start, length in zip(ends, padded, starts, whole, strict=True):
        row[end - size : end - size + length] = np.arange(start, start + length)
    chunks = [part.reshape(2 * ranks, -1) for part in np.split(row, ends[:-1])]
    order = [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    places = np.stack([np.concatenate([part[pair].ravel() for part in chunks]) for pair in order])
    bounds = np.concatenate(([0], np.cumsum(padded if layout == "zigzag" else own)))
    bounds[-1] = len(row)
    return places, bounds


def cut_for_context(
    batch: Mapping[str, Any],
    *,
    ranks: int,
    rank: int,
    pad_token_id: int,
    layout: Layout = "zigzag",
    pad_to_multiple_of: int | None = None,
) -> dict[str, Any]:
    """Returns what one of `ranks` has of the batch of a pack; see `context_places`.

    Fields with a value a token are cut. `labels` become `shift_labels`, those of the next token of the segment, since a
    model cannot move what another rank has; -100 at the ends of segments and in padding. `cu_seq_lens_q`, int32, and
    `max_length_q` are those of the padded row, all ranks together. Everything else is handed on: a tower sees the
    images whole, and what it gives is cut as `inputs_embeds`.
    Raises ConfigError for a rank that is none, and a batch that is no pack.
    """
    if not 0 <= rank < ranks:
        raise ConfigError(f"rank is {rank}, wanted 0 to {ranks - 1}")
    if "position_ids" not in batch:
        raise ConfigError('the batch has no position_ids: only packs are cut; set plan.kind = "pack"')
    positions = batch["position_ids"]
    rows = positions.reshape(-1, positions.shape[-1])[0].numpy()
    starts = np.flatnonzero(rows == 0)
    lengths = np.diff(starts, append=len(rows))
    places, bounds = context_places(lengths, ranks=ranks, layout=layout, pad_to_multiple_of=pad_to_multiple_of)
    own = torch.from_numpy(places[rank])
    found = {name: value for name, value in batch.items() if name not in ("labels", "cu_seq_lens_k", "max_length_k")}
    for name, dim in _TOKEN_DIM.items():
        if name in batch:
            taken = batch[name].index_select(dim, own.clamp(min=0))
            filler = pad_token_id if name == "input_ids" else 0
            found[name] = taken.masked_fill((own < 0).reshape(_shape(taken, dim)), filler)
    if "labels" in batch:
        moved = torch.full_like(batch["labels"], IGNORED)
        moved[:, :-1] = batch["labels"][:, 1:]
        moved[:, (starts[1:] - 1).tolist()] = IGNORED
        found["shift_labels"] = moved.index_select(1, own.clamp(min=0)).masked_fill(own < 0, IGNORED)
    sizes = np.diff(bounds)
    found |= {"cu_seq_lens_q": torch.from_numpy(bounds.astype(np.int32)), "max_length_q": int(sizes.max())}
    return {**found, "cu_seq_lens_k": found["cu_seq_lens_q"], "max_length_k": found["max_length_q"]}


def _shape(values: torch.Tensor, dim: int) -> list[int]:
    shape = [1] * values.ndim
    shape[dim] = -1
    return shape
