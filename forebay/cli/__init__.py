"""The commands of forebay: they parse, call the rooms and print what these report."""

from forebay.face import uncollected

with uncollected():
    from forebay.cli.options import BAD_CONFIG, CLOSED, DONE, FAILED, INTERRUPTED, NO_CACHE
    from forebay.cli.program import inspect_cache, main

__all__ = ["BAD_CONFIG", "CLOSED", "DONE", "FAILED", "INTERRUPTED", "NO_CACHE", "inspect_cache", "main"]
