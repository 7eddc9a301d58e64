"""Plans: which samples form which batch, in which order. Functions over integer lengths; only `disk` touches files."""

from __future__ import annotations

from forebay.plan.bucket.make import bucket_plan
from forebay.plan.bucket.plan import BucketPlan, Order
from forebay.plan.cursor import Turn, check_ranks, mixed_steps, next_position, num_steps, turn
from forebay.plan.disk import (
    AnyPlan,
    load_plan,
    plan_content,
    plan_document,
    plan_folder,
    plan_key,
    save_plan,
    sealed_content,
    state_key,
    with_mixture,
)
from forebay.plan.interface import EpochOrder, Plan, Tail
from forebay.plan.make import Planned, Samples, make_plan, plan_of, resolve_packs, resolve_plan
from forebay.plan.pack.plan import PackOrder, PackPlan, pack_plan
from forebay.plan.pack.statistics import pack_statistics
from forebay.plan.statistics import statistics
from forebay.plan.window import WindowPlan, window_plan

__all__ = [
    "AnyPlan",
    "BucketPlan",
    "EpochOrder",
    "Order",
    "PackOrder",
    "PackPlan",
    "Plan",
    "Planned",
    "Samples",
    "Tail",
    "Turn",
    "WindowPlan",
    "bucket_plan",
    "check_ranks",
    "load_plan",
    "make_plan",
    "mixed_steps",
    "next_position",
    "num_steps",
    "pack_plan",
    "pack_statistics",
    "plan_content",
    "plan_document",
    "plan_folder",
    "plan_key",
    "plan_of",
    "resolve_packs",
    "resolve_plan",
    "save_plan",
    "sealed_content",
    "state_key",
    "statistics",
    "turn",
    "window_plan",
    "with_mixture",
]
