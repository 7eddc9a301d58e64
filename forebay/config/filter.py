"""`[filter]`: which samples of a cache are used, chosen when it is opened."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.config.data import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Which samples of what is read are used. In no key of a cache: nothing is built again. In the key of a plan, the
    files by the ids that they hold. The settings apply in this order, each to what the one before has left."""

    __pydantic_config__ = STRICT

    where: str | None = None
    """Condition over the columns of the row table, for example `language in ('hi', 'ta') and duration_s < 12`: `and`,
    `or`, `not`, comparisons, `in` a list, `is None`. Where a column is null, no comparison with it holds, and `not` of
    one neither."""
    ids: str | None = field(default=None, metadata={"path": True})
    """File with an id a line, UTF-8. Only these samples are used."""
    drop_ids: str | None = field(default=None, metadata={"path": True})
    """File with an id a line, UTF-8. These samples are not used."""
    quota: dict[str, int] | None = None
    """Samples at most of each value of a column, by column: `{language = 50_000}`. A hash of a sample's id decides
    which ones. With a larger number the same samples stay and others come. Of several columns each must take the
    sample."""

    def __post_init__(self) -> None:
        for column, most in (self.quota or {}).items():
            if most < 1:
                raise ValueError(f"quota.{column} is {most}, wanted 1 or more; leave samples out by where")

    @property
    def is_given(self) -> bool:
        """Whether any sample may be left out."""
        return self != FilterConfig()
