"""The commands of forebay: they parse, call the rooms and print what these report."""

import gc

_is_collecting = gc.isenabled()
gc.disable()  # nothing that is imported is garbage, and looking for it takes a fifth of the CPU of a small command

from forebay.cli.options import BAD_CONFIG, CLOSED, DONE, FAILED, INTERRUPTED, NO_CACHE  # noqa: E402
from forebay.cli.program import inspect_cache, main  # noqa: E402

if _is_collecting:
    gc.enable()

__all__ = ["BAD_CONFIG", "CLOSED", "DONE", "FAILED", "INTERRUPTED", "NO_CACHE", "inspect_cache", "main"]
