"""Plans: which samples form which batch, in which order. Functions over integer lengths; only `disk` touches files."""

from forebay.train.plan.bucket import BucketPlan, bucket_plan
from forebay.train.plan.disk import AnyPlan, load_plan, plan_content, plan_folder, save_plan, sealed_content
from forebay.train.plan.interface import EpochOrder, Plan, Tail
from forebay.train.plan.key import plan_document, plan_key, state_key, with_mixture
from forebay.train.plan.make import Samples, make_plan
from forebay.train.plan.order import Order
from forebay.train.plan.pack import PackPlan, pack_plan
from forebay.train.plan.pack_order import PackOrder
from forebay.train.plan.pack_stats import pack_statistics
from forebay.train.plan.packing_stats import statistics
from forebay.train.plan.ranks import Turn, check_ranks, mixed_steps, next_position, num_steps, turn
from forebay.train.plan.resolve import resolve_packs, resolve_plan
from forebay.train.plan.window import WindowPlan, window_plan

__all__ = [
    "AnyPlan",
    "BucketPlan",
    "EpochOrder",
    "Order",
    "PackOrder",
    "PackPlan",
    "Plan",
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
