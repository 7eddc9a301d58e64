"""Which line a config is of."""

from __future__ import annotations

from forebay.config import Config
from forebay.preprocess.modality import Line
from forebay.preprocess.speech.modality import SpeechLine
from forebay.steps.recipe import AnyRecipe, VisionRecipe


def line_of(config: Config, recipe: AnyRecipe) -> Line:
    """Returns the line of a config whose recipe is known."""
    if isinstance(recipe, VisionRecipe):
        from forebay.preprocess.vision.modality import VisionLine

        return VisionLine.of(config, recipe)
    return SpeechLine.of(config, recipe)
