"""What `plan.locality = "auto"` is: how far a shuffle may reach, where a node keeps only a part of the shards."""

from __future__ import annotations

import dataclasses
import logging

from forebay.config.plan import BucketConfig, PlanConfig
from forebay.plan.bucket.locality import locality_window
from forebay.store.remote.ahead.shards import RemoteShards
from forebay.store.remote.node.room import gb
from forebay.store.source import SampleSource

logger = logging.getLogger(__name__)


def with_locality(settings: PlanConfig, source: SampleSource, *, is_mixed: bool = False) -> PlanConfig:
    """Returns the settings of a plan with a locality that depends on nothing any more.

    "auto" is "global" where the node keeps all that is read, as it does of local caches; else the widest window of
    shards within which each shard is downloaded about once an epoch (`locality_window`). The bound of the node decides,
    not what its disk holds now and not how many ranks it has: one of its processes downloads ahead for all.
    is_mixed: a mixture draws from all shards at any time, so its locality is "global".
    Raises ConfigError for a bound that does not hold three shards.
    """
    if not isinstance(settings, BucketConfig) or settings.locality != "auto":
        return settings
    locality, shards = "global", RemoteShards(source)
    if len(shards) and not shards.fit and not is_mixed:
        window = locality_window(
            shards.bound_bytes - shards.kept_bytes,
            shard_bytes=int(shards.sizes.max()),
            ranks=1,
            ahead_shards=shards.mirrors[0].settings.prefetch_shards,
        )
        locality = f"shards:{window}"
        logger.info(
            'plan.locality = "auto" is "%s": %d shards of %s in all do not fit remote.cache_size_gb, %s',
            *(locality, len(shards), gb(shards.total_bytes), gb(shards.bound_bytes)),
        )
    return dataclasses.replace(settings, locality=locality)
