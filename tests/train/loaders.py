"""A loader of a plan that a test has made, with the settings as keywords."""

from __future__ import annotations

from typing import Any

from forebay.plan.interface import Plan
from forebay.plan.make import Planned
from forebay.store.source import SampleSource
from forebay.train.loader import Loader, LoaderSettings

OF_LOADER = ("dp_rank", "dp_world_size", "collator", "finish")
"""Of `Loader` itself; the others are fields of `LoaderSettings`."""


def loader_of(source: SampleSource, plan: Plan, *, plan_key: str = "0", **changes: Any) -> Loader:
    own = {name: changes.pop(name) for name in OF_LOADER if name in changes}
    return Loader(source, Planned(plan=plan, key=plan_key), LoaderSettings(**changes), **own)
