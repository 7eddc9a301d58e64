"""Where a loader stands. The whole of it: order is a function of (plan, seed, epoch, position), so nothing is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forebay.errors import ResumeError
from forebay.train.plan.key import why_differ

STATE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderState:
    """The micro-batch that comes next, in the sequence of all ranks together."""

    plan_key: str
    seed: int
    epoch: int
    position: int

    def at(self, position: int) -> LoaderState:
        """Returns the place `position` of the same epoch."""
        return replace(self, position=position)

    def next_epoch(self) -> LoaderState:
        """Returns the head of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON values."""
        return {
            "version": STATE_VERSION,
            "plan_key": self.plan_key,
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
        }

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], *, plan_key: str, num_batches: int, earlier_key: str | None = None
    ) -> LoaderState:
        """Returns the state that `to_json` wrote, checked against the plan that is to go on.

        num_batches: micro-batches of an epoch. earlier_key: that forebay gave this plan in states of before. Raises ResumeError naming the field, its value and the wanted one.
        """
        if not isinstance(state, Mapping):
            raise ResumeError(f"loader state is a {type(state).__name__}, wanted what Loader.state_dict() returned")
        version = _integer(state, "version", low=1)
        if version > STATE_VERSION:
            raise ResumeError(
                f"loader state: version is {version}, this forebay reads up to {STATE_VERSION}; "
                "resume with the forebay that wrote it, or a newer one"
            )
        stored = state.get("plan_key")
        if stored != plan_key and (earlier_key is None or stored != earlier_key):
            raise ResumeError(
                f"loader state: plan_key is {_short(stored)}, the plan here has {_short(plan_key)}; {why_differ(stored, plan_key)}"
            )
        position = _integer(state, "position", low=0)
        if position > num_batches:
            raise ResumeError(
                f"loader state: position is {position}, an epoch of the plan has {num_batches} micro-batches"
            )
        return cls(
            plan_key=plan_key, seed=_integer(state, "seed"), epoch=_integer(state, "epoch", low=0), position=position
        )


def _integer(state: Mapping[str, Any], name: str, *, low: int | None = None) -> int:
    value = state.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or (low is not None and value < low):
        wanted = "an integer" if low is None else f"an integer from {low} on"
        raise ResumeError(f"loader state: {name} is {value!r}, wanted {wanted}")
    return value


def _short(key: Any) -> str:
    return key[:16] if isinstance(key, str) else repr(key)
