"""Each bucket's samples in one shuffle of all of them: for tables that other trainers read."""

from __future__ import annotations

import numpy as np

from forebay.train.plan.bucket import BucketPlan
from forebay.train.plan.interface import Array
from forebay.train.plan.permutation import Permutations, derive_key


def shuffled_buckets(plan: BucketPlan, *, seed: int) -> list[Array]:
    """Returns the sample indices of every bucket, int64, in the order in which a shuffle of all samples has them."""
    count = len(plan.members)
    owners = np.empty(count, dtype=np.int64)
    owners[plan.members_at(np.arange(count))] = np.repeat(np.arange(len(plan.batch_sizes)), plan.bucket_sizes)
    line = Permutations([count], derive_key("forebay bucket manifests", seed))(np.arange(count))
    order = np.argsort(owners[line], kind="stable")
    return np.split(line[order], plan.offsets[1:-1])
