"""Read-only reports on what is on disk: a cache, one of its samples, a plan, and what a run has used.

forebay.inspect.show(Path("caches/prompts-train-9f2c1a7b"), forebay.inspect.InspectOptions(sample="0"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.inspect.bucket_manifests import write_table as write_table
    from forebay.inspect.command import InspectOptions as InspectOptions
    from forebay.inspect.command import show as show
    from forebay.inspect.command import usage_facts as usage_facts
    from forebay.inspect.facts import cache_facts as cache_facts
    from forebay.inspect.sample import Sample as Sample
    from forebay.inspect.sample import read_sample as read_sample

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "command": "InspectOptions show usage_facts",
        "bucket_manifests": "write_table",
        "facts": "cache_facts",
        "sample": "Sample read_sample",
    },
)
