"""What buckets are called: in calibration files, and as the tables that `inspect --bucket-manifests` writes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from forebay.config.data import STRICT


def bucket_name(low_s: float, high_s: float) -> str:
    """Returns the name of the bucket [low_s, high_s): `b_0_3`, `b_3_8.5`."""
    return f"b_{round(low_s, 4):.9g}_{round(high_s, 4):.9g}"


def bucket_names(edges_s: Sequence[float], *, num_buckets: int) -> list[str]:
    """Returns the name of every bucket by its upper edge; of those behind them, which have no seconds, the index."""
    timed = [bucket_name(low, high) for low, high in zip((0.0, *edges_s), edges_s, strict=False)]
    return [*timed, *(str(bucket) for bucket in range(len(timed), num_buckets))]


CLASSIC_EDGES_S = (3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0)


PACK_FIELDS = ("seq_len", "max_patches", "buffer_size", "algorithm", "pack_seed", "overlong")
"""Of `[plan]`: for kind "pack" alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Which samples form which batch. Has its own key on top of the cache's."""

    __pydantic_config__ = STRICT

    kind: Literal["bucket", "window", "pack"] = "bucket"
    """`bucket`: by ranges of length. `window`: a shuffle, cut into windows of `window` batches, each sorted by length.

    `pack`: several samples in one row of `seq_len` tokens; of `[vision]`.
    """
    edges_s: tuple[float, ...] = CLASSIC_EDGES_S
    """Upper edges in seconds; buckets are [0, e0), [e0, e1), ...; the last one is closed and takes all that is longer."""
    edges: tuple[int, ...] | None = None
    """Upper edges, in tokens, of the buckets of samples without audio; they come behind those of `edges_s`."""
    k: int | None = None
    """This many edges instead of `edges_s`, and of `edges` where they are left out, where the lengths are padded least."""
    window: int = 32
    """Batches of a window, under kind "window"."""
    batch_seconds: float | None = None
    """Budget of padded seconds a batch."""
    batch_tokens: int | None = None
    """Budget of padded tokens a batch, instead of the seconds or beside them."""
    batch_size: int | tuple[int, ...] | None = None
    """Samples a batch, one number or one a bucket."""
    calibration: str | None = field(default=None, metadata={"path": True})
    """JSON file `{bucket: {"batch_size", "grad_acc"}}`, buckets by name (`b_0_3`) or index; in the plan's key by its content."""
    lockstep: int = 8
    """Micro-batches come in groups of this many from one bucket."""
    tail: Literal["short", "drop", "pad"] = "short"
    """What the last, incomplete batch of a bucket, and the last step of an epoch on several ranks, become."""
    locality: str = "global"
    """`shards:N`: shuffled within a moving window of N shards, for cold or remote disks."""
    seq_len: int | None = None
    """Tokens of a pack."""
    max_patches: int | None = None
    """Image patches of a pack at most, beside its tokens."""
    buffer_size: int = 0
    """Samples that the packer sees at once, along the cache: a pack's samples lie near each other. 0: all."""
    algorithm: Literal["best_fit", "best_fit_decreasing"] = "best_fit"
    """`best_fit`: with exact completion; over all samples never more packs than `best_fit_decreasing`, the usual one."""
    pack_seed: int = 0
    """The seed of two draws: which samples of a length share a pack, and in which order they stand in the pack."""
    overlong: Literal["drop", "error"] = "drop"
    """What a sample above `seq_len` or `max_patches` becomes: left out, counted and listed, or the end of the plan."""

    def __post_init__(self) -> None:
        if self.kind == "pack":
            self._check_pack()
            return
        self._refuse(PACK_FIELDS, 'kind = "pack"')
        if not self.edges_s or any(b <= a for a, b in zip((0.0, *self.edges_s), self.edges_s, strict=False)):
            raise ValueError(f"edges_s must rise from above 0, got {list(self.edges_s)}")
        edges = (0, *(self.edges or (1,)))
        if self.edges == () or any(b <= a for a, b in itertools.pairwise(edges)):
            raise ValueError(f"edges must rise from above 0, got {list(self.edges or ())}")
        budgets = self.batch_seconds is not None or self.batch_tokens is not None
        if budgets + (self.batch_size is not None) + (self.calibration is not None) != 1:
            raise ValueError("give exactly one of batch_seconds and batch_size (or batch_tokens, or calibration)")
        sizes = self.batch_size if isinstance(self.batch_size, tuple) else (self.batch_size,)
        if any(size is not None and size < 1 for size in sizes):
            raise ValueError(f"batch_size is {self.batch_size}, wanted 1 or more")
        if self.batch_seconds is not None and self.batch_seconds <= 0:
            raise ValueError(f"batch_seconds is {self.batch_seconds}, wanted more than 0")
        for name in ("k", "window", "batch_tokens", "lockstep"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        if self.k is not None and self.edges_s != CLASSIC_EDGES_S:
            raise ValueError(f"give one of edges_s and k, not {list(self.edges_s)} and {self.k}")
        if self.kind == "window":
            self._check_window()
        buckets = len(self.edges_s) if self.k is None else self.k
        # With `edges` the plan says it: how many buckets there are is then known from the samples alone.
        if isinstance(self.batch_size, tuple) and self.edges is None and len(self.batch_size) != buckets:
            raise ValueError(f"batch_size has {len(self.batch_size)} entries for {buckets} buckets")
        count = self.locality.removeprefix("shards:")
        if self.locality != "global" and not (self.locality == f"shards:{count}" and count.isdecimal() and int(count)):
            raise ValueError(f'locality is {self.locality!r}, wanted "global" or "shards:N", for example "shards:16"')

    def _check_pack(self) -> None:
        of_lengths = {item.name for item in fields(self)} - {"kind", "tail", *PACK_FIELDS}
        self._refuse(sorted(of_lengths), 'kind = "bucket" and "window"')
        if self.seq_len is None:
            raise ValueError('kind = "pack" needs seq_len, the tokens of a pack, for example 8192')
        for name, least in (("seq_len", 1), ("max_patches", 1), ("buffer_size", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**31:
                raise ValueError(f"{name} is {value}, wanted {least} to {2**31 - 1}")
        if self.algorithm == "best_fit_decreasing" and (self.buffer_size or self.max_patches is not None):
            raise ValueError(
                'algorithm = "best_fit_decreasing" packs all samples by tokens: no buffer_size, no max_patches'
            )

    def _refuse(self, names: Sequence[str], kinds: str) -> None:
        defaults = {item.name: item.default for item in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f'{name} is only for {kinds}, not "{self.kind}"')

    def _check_window(self) -> None:
        if isinstance(self.batch_size, tuple):
            raise ValueError(f'batch_size is {list(self.batch_size)}, kind "window" has no buckets: wanted one number')
        defaults = {"edges_s": CLASSIC_EDGES_S, "edges": None, "k": None, "batch_tokens": None, "calibration": None}
        for name, default in {**defaults, "locality": "global"}.items():
            if getattr(self, name) != default:
                raise ValueError(f'{name} is only for kind = "bucket", not "window"')

    @property
    def locality_shards(self) -> int | None:
        """Shards of the moving window; None where the shuffle is global."""
        return None if self.locality == "global" else int(self.locality.removeprefix("shards:"))
