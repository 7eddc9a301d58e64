"""forebay: precompute speech and vision-language training data once, into a hash-keyed, memory-mapped tensor cache.

    config = forebay.load_config("configs/demo_speech.toml")
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config)

Importing this loads neither torch nor pyarrow; the rooms load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.errors import ForebayError
from forebay.face import face
from forebay.version import __version__

if TYPE_CHECKING:
    from forebay import config, errors, inspect, plan, preprocess, store, train
    from forebay.config.tree import Config
    from forebay.steps.recipe import load_config
    from forebay.store.cache import Cache, open_cache

__all__ = [
    "Cache",
    "Config",
    "ForebayError",
    "__version__",
    "config",
    "errors",
    "inspect",
    "load_config",
    "open_cache",
    "plan",
    "preprocess",
    "store",
    "train",
]

_ROOMS = ("config", "errors", "inspect", "plan", "preprocess", "store", "train")
__getattr__, __dir__ = face(
    __name__,
    {
        "Cache": "forebay.store.cache",
        "Config": "forebay.config.tree",
        "ForebayError": "forebay.errors",
        "load_config": "forebay.steps.recipe",
        "open_cache": "forebay.store.cache",
        **{room: f"forebay.{room}" for room in _ROOMS},
    },
)
