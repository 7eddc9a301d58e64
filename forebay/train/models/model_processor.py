"""The files that a model needs beside its weights, to turn audio or images into inputs and tokens into text."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from forebay.config.tree import Config
from forebay.train.models.families import ModelFacts
from forebay.train.models.objective import accepted

_logger = logging.getLogger(__name__)
_SUFFIXES = {".json", ".txt", ".jinja", ".model"}
# What says something about other weights, or is written with the model itself.
_NOT_COPIED = {"config.json", "generation_config.json", "adapter_config.json", "state.json", "trainer_state.json"}
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
_TOKENIZER = {*_VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"}
_TOKENIZER |= {"normalizer.json"}
_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def processor_files(config: Config, facts: ModelFacts) -> dict[str, Path]:
    """Returns by name the files of processor, tokenizer and prompt that go into every checkpoint of a run.

    They come from `train.model`'s folder. What that folder lacks comes from `text.tokenizer` and `vision.processor`.
    """
    found = _files(facts.folder)
    if config.text is not None and config.text.tokenizer:
        tokenizer = _files(Path(config.text.tokenizer))
        if not _has_any(found, _VOCABULARIES):
            found |= {name: path for name, path in tokenizer.items() if name in _TOKENIZER}
        if not _has_template(found):
            found |= {name: path for name, path in tokenizer.items() if name in _TEMPLATES}
    if config.vision and not _has_any(found, _PREPROCESSORS):
        processor = _files(Path(config.vision.processor))
        found |= {name: path for name, path in processor.items() if "processor" in name}
    return found


def warn_of_missing(files: Mapping[str, Path], facts: ModelFacts) -> None:
    """Logs one warning that names what checkpoints with these files lack for inference, none if they lack nothing."""
    missing = []
    if facts.vocab_size is not None and not _has_any(files, _VOCABULARIES):
        missing.append("tokenizer (tokenizer.json)")
    if _takes_media(facts) and not _has_any(files, _PREPROCESSORS):
        missing.append("processor (preprocessor_config.json)")
    if facts.constants.get("prompt") in ("qwen3_asr", "chat") and not _has_template(files):
        missing.append("prompt (chat_template.jinja)")
    if missing:
        _logger.warning(
            "checkpoints will lack what inference needs: %s; put the files into %s", *(", ".join(missing), facts.folder)
        )


def _takes_media(facts: ModelFacts) -> bool:
    if facts.own_loss is None:
        return bool(facts.value_fields)
    return not accepted(facts.model_class).names.isdisjoint({"pixel_values", "input_values", "input_features"})


def processor_class(files: Mapping[str, Path], model_type: str) -> str | None:
    """Returns the class that AutoProcessor cannot find in these files without a config.json; None where it can."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    if any("processor_class" in _document(path) for name, path in files.items() if name.endswith("_config.json")):
        return None
    name: str | None = PROCESSOR_MAPPING_NAMES.get(model_type)
    return name if "processor_config.json" not in files else None


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix in _SUFFIXES
        and path.name not in _NOT_COPIED
        and ".safetensors" not in path.name
        and ".bin" not in path.name
    }


def _has_any(files: Mapping[str, Path], names: tuple[str, ...]) -> bool:
    return any(name in files for name in names)


def _has_template(files: Mapping[str, Path]) -> bool:
    if _has_any(files, _TEMPLATES):
        return True
    return "tokenizer_config.json" in files and "chat_template" in _document(files["tokenizer_config.json"])


def _document(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
