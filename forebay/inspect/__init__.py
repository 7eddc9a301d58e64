"""Read-only reports on what is on disk: a cache, one of its samples, a plan, and what a run has used.

forebay.inspect.show(Path("caches/prompts-train-9f2c1a7b"), forebay.inspect.InspectOptions(sample="0"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.inspect.command import InspectOptions, show
    from forebay.inspect.export import write_table
    from forebay.inspect.facts import cache_facts
    from forebay.inspect.sample import ImageSample, Sample, read_sample
    from forebay.inspect.usage import usage_facts

__all__ = [
    "ImageSample",
    "InspectOptions",
    "Sample",
    "cache_facts",
    "read_sample",
    "show",
    "usage_facts",
    "write_table",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "ImageSample": "forebay.inspect.sample",
        "InspectOptions": "forebay.inspect.command",
        "Sample": "forebay.inspect.sample",
        "cache_facts": "forebay.inspect.facts",
        "read_sample": "forebay.inspect.sample",
        "show": "forebay.inspect.command",
        "usage_facts": "forebay.inspect.usage",
        "write_table": "forebay.inspect.export",
    },
)
