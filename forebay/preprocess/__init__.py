"""From raw data to a cache: manifests, decoding, features, text, the pipeline and its cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.preprocess.pipeline import BuildReport, Options, build

__all__ = ["BuildReport", "Options", "build"]

__getattr__, __dir__ = face(__name__, dict.fromkeys(__all__, "forebay.preprocess.pipeline"))
