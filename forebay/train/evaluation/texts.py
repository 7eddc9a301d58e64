"""References and hypotheses of an evaluation: where they come from, and how they are normalised before they meet."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from forebay.steps.text.transcript import TextEncoder, Transcript
from forebay.store.source import SampleSource

_logger = logging.getLogger(__name__)

_SPELLINGS = "normalizer.json"


Normalisation = Literal["none", "basic", "whisper"]


def normalizer(kind: Normalisation, *, tokenizer: Path) -> Callable[[str], str]:
    """Returns what `text` of an evaluation does to a text; ends are always stripped, as jiwer does.

    `basic` and `whisper` are transformers' `BasicTextNormalizer` and `EnglishTextNormalizer`. The latter's spellings
    are those of the tokenizer's normalizer.json. Where that file is missing no spelling changes, and a warning says so.
    """
    if kind == "none":
        return str.strip
    from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

    made = BasicTextNormalizer() if kind == "basic" else EnglishTextNormalizer(_spellings(tokenizer / _SPELLINGS))
    return lambda text: str(made(text)).strip()


def _spellings(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        _logger.warning(
            'text = "whisper": there is no %s, so British and American spellings stay different words; copy the file '
            "from a published Whisper to make them one",
            path,
        )
        return {}
    except (OSError, ValueError) as err:
        raise ConfigError(f'text = "whisper": cannot read {path}: {err}; restore it, or set text = "basic"') from err
    if not isinstance(found, dict):
        raise ConfigError(f'text = "whisper": {path} holds a {type(found).__name__}, wanted words by words')
    return {str(word): str(other) for word, other in found.items()}


def text_encoder(config: Config) -> TextEncoder:
    """Returns what writes and reads the texts of a speech config. Raises ConfigError without a `[text]` section."""
    text = recipe_of(config).text
    if not isinstance(text.step, Transcript):
        raise ConfigError(f"{config.path}: no [text] section, so no evaluation can compare texts; add one")
    return text.step.encoder(Path(text.folder))


def languages_of(source: SampleSource) -> list[str]:
    """Returns the language of every sample, "" where none is known."""
    found = source.categories("language")
    if found is None:
        return [""] * len(source)
    names, codes = found
    return [names[code] for code in codes.tolist()]
