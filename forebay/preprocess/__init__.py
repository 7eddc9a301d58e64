"""Raw data to samples to a cache: manifests, decode, features, text, the pipeline and its cut, build."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.preprocess.pipeline import BuildReport, Options, build

__all__ = ["BuildReport", "Options", "build"]


def __getattr__(name: str) -> Any:
    # Not at import: workers import single modules of this room and should load no more than they use.
    if name in __all__:
        from forebay.preprocess import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'forebay.preprocess' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What is not loaded yet is listed too: completion and `dir` know nothing of `__getattr__`.
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
