"""From raw data to a cache: manifests, decoding, features, text, the pipeline and its cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.face import face

if TYPE_CHECKING:
    from forebay.preprocess.pipeline import build
    from forebay.preprocess.report import BuildReport, Options

__all__ = ["BuildReport", "Options", "build"]

_REPORT = dict.fromkeys(("BuildReport", "Options"), "forebay.preprocess.report")
__getattr__, __dir__ = face(__name__, {**_REPORT, "build": "forebay.preprocess.pipeline"})
