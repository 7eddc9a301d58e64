"""forebay: precompute speech and vision-language training data once, into a hash-keyed, memory-mapped tensor cache.

    config = forebay.load_config("configs/demo_speech.toml")
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config)

Importing this loads neither torch nor pyarrow; the rooms load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError
from forebay.version import __version__

if TYPE_CHECKING:
    from forebay import inspect, preprocess, store, train
    from forebay.steps.recipe import load_config
    from forebay.store.cache import Cache, open_cache

__all__ = [
    "Cache",
    "ForebayError",
    "__version__",
    "inspect",
    "load_config",
    "open_cache",
    "preprocess",
    "store",
    "train",
]

_LAZY = {"load_config": "forebay.steps.recipe", "open_cache": "forebay.store.cache", "Cache": "forebay.store.cache"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in {"preprocess", "store", "train", "inspect", "config"}:
        return importlib.import_module(f"forebay.{name}")
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What a user may want, loaded or not: completion and `dir` know nothing of `__getattr__`.
    return sorted({*__all__, "config", "errors", *(name for name in globals() if name.startswith("__"))})
