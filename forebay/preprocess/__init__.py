"""Raw data becomes a cache: manifests, decoding, features, text, the pipeline and its cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.preprocess.build_report import BuildReport as BuildReport
    from forebay.preprocess.build_report import Options as Options
    from forebay.preprocess.pipeline import build as build

__getattr__, __dir__, __all__ = face(__name__, {"pipeline": "build", "build_report": "BuildReport Options"})
