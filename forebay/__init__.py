"""forebay: precompute speech and vision-language training data once, into a hash-keyed, memory-mapped tensor cache.

    config = forebay.load_config("configs/demo_speech.toml")
    forebay.preprocess.build(config)
    loader = forebay.train.make_loader(config)

Importing this loads neither torch nor pyarrow; the rooms load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay import config as config
    from forebay import errors as errors
    from forebay import inspect as inspect
    from forebay import plan as plan
    from forebay import preprocess as preprocess
    from forebay import store as store
    from forebay import train as train
    from forebay.config.tree import Config as Config
    from forebay.errors import ForebayError as ForebayError
    from forebay.steps.recipe import load_config as load_config
    from forebay.store.cache import Cache as Cache
    from forebay.store.cache import open_cache as open_cache
    from forebay.version import __version__ as __version__

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "": "config errors inspect plan preprocess store train",
        "config.tree": "Config",
        "errors": "ForebayError",
        "steps.recipe": "load_config",
        "store.cache": "Cache open_cache",
        "version": "__version__",
    },
)
