"""From raw data to a cache: manifests, decoding, features, text, the pipeline and its cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.preprocess.pipeline import BuildReport as BuildReport
    from forebay.preprocess.pipeline import Options as Options
    from forebay.preprocess.pipeline import build as build

__getattr__, __dir__, __all__ = face(__name__, {"pipeline": "BuildReport Options build"})
