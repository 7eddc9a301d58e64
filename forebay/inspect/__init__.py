"""What a cache, a plan or a run holds, read only: facts, samples, pictures, tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.inspect.export import write_table
    from forebay.inspect.facts import cache_facts
    from forebay.inspect.sample import read_sample
    from forebay.inspect.usage import usage_facts

__all__ = ["cache_facts", "read_sample", "usage_facts", "write_table"]

__getattr__, __dir__ = face(
    __name__,
    {
        "cache_facts": "forebay.inspect.facts",
        "read_sample": "forebay.inspect.sample",
        "usage_facts": "forebay.inspect.usage",
        "write_table": "forebay.inspect.export",
    },
)
