"""`[remote]`: how stores of the network are asked, and the cache that a node keeps of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forebay.config.data import STRICT
from forebay.config.url import check_endpoint
from forebay.errors import ConfigError

GB = 1_000_000_000
LONGEST_PAUSE_S = 15.0
"""Before a request is made again."""

_REGION = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
"""Regions become part of a host that gets credentials, so nothing that ends a host is in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteConfig:
    """How stores are asked, and what a node keeps of them. Run-time: in no key. Credentials stand in no config."""

    __pydantic_config__ = STRICT

    endpoint: str | None = None
    """Address of a store that is not the provider's own: R2, MinIO and others. Credentials are sent there only if the
    environment or the profile names it too."""
    region: str | None = None
    """Region of the bucket. Left out: that of the environment."""
    anonymous: bool = False
    """Requests are not signed: for public buckets."""
    shard_dir: str | None = field(default=None, metadata={"path": True})
    """Folder, on a local disk, of what this node keeps of stores. All runs of the node share it. Left out: `forebay`
    in `$XDG_CACHE_HOME` or `~/.cache`."""
    cache_size_gb: float = 500.0
    """Bound of that folder, in GB of 10^9 bytes. What is being downloaded counts."""
    max_concurrent: int = 8
    """Downloads of a process at once."""
    prefetch_shards: int = 4
    """Shards that are downloaded ahead of the batches that need them."""
    timeout_s: float = 60.0
    """Seconds without a byte after which a request is given up and tried again."""
    retries: int = 5
    """Times that a request is tried again, with growing pauses."""
    global_shuffle: Literal["refuse", "allow"] = "refuse"
    """What becomes of a plan that shuffles over more data than the node can keep, so that shards are downloaded many
    times. `refuse`: the run ends with the figures. `allow`: it goes on, with a warning."""

    def __post_init__(self) -> None:
        for name in ("max_concurrent", "prefetch_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted 1 or more")
        for name in ("cache_size_gb", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted more than 0")
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}, wanted 0 or more")
        if self.region is not None and not _REGION.fullmatch(self.region):
            raise ValueError(f"region is {self.region!r}, wanted small letters, digits and hyphens: eu-central-1")
        if self.endpoint is not None:
            try:
                check_endpoint(self.endpoint)
            except ConfigError as err:
                raise ValueError(f"endpoint: {err}") from err

    @property
    def folder(self) -> Path:
        """The node's folder, whether it is there or not."""
        if self.shard_dir is not None:
            return Path(self.shard_dir)
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay"

    @property
    def patience_s(self) -> float:
        """Seconds for which a request may be made again and again."""
        return (self.retries + 1) * self.timeout_s + self.retries * LONGEST_PAUSE_S

    @property
    def cache_size_bytes(self) -> int:
        """The bound in bytes."""
        return int(self.cache_size_gb * GB)
