"""Which samples form which batch, in which order: functions over integer lengths. Only `disk` touches files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.plan.cursor import Cursor as Cursor
    from forebay.plan.interface import EpochOrder as EpochOrder
    from forebay.plan.interface import Plan as Plan
    from forebay.plan.interface import Tail as Tail
    from forebay.plan.make import Planned as Planned
    from forebay.plan.make import Samples as Samples
    from forebay.plan.make import make_plan as make_plan
    from forebay.plan.make import plan_of as plan_of

__getattr__, __dir__, __all__ = face(
    __name__,
    {"cursor": "Cursor", "interface": "EpochOrder Plan Tail", "make": "Planned Samples make_plan plan_of"},
)
