"""Which samples form which batch, in which order: functions over integer lengths. Only `disk` touches files."""

from __future__ import annotations

from forebay.plan.cursor import Cursor
from forebay.plan.interface import EpochOrder, Plan, Tail
from forebay.plan.make import Planned, Samples, make_plan, plan_of

__all__ = ["Cursor", "EpochOrder", "Plan", "Planned", "Samples", "Tail", "make_plan", "plan_of"]
