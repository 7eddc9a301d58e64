"""Whether images are stored as Qwen2-VL's patches or as their processor gives them: what `[vision] images` comes to.

Read from documents alone, without transformers: keys and lookup ask for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.steps.text.chat.packed_chat import VISION_TOKENS
from forebay.store.image.image_settings import is_native, processor_document

ImagesBy = Literal["patches", "processor"]

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "vocab.json",
)


def images_by(config: Config) -> ImagesBy | None:
    """Returns how a config's images are stored; None without `[vision]`, and where no document says it.

    "auto" takes patches where the processor is of the Qwen2-VL family and `prompt = "chat"` finds that family's tokens
    of images in the tokenizer's files, else the processor.
    """
    vision, text = config.vision, config.text
    if vision is None:
        return None
    if vision.images != "auto":
        return vision.images
    if text is None or text.prompt != "chat":
        return "processor"
    try:
        _, document = processor_document(Path(vision.processor))
    except ConfigError:
        return None
    return "patches" if is_native(document) and has_vision_tokens(Path(text.tokenizer)) else "processor"


def has_vision_tokens(folder: Path) -> bool:
    """Whether a tokenizer's files name the tokens of images; True where there is no file, so that it is missed."""
    wanted = {token.encode() for token in VISION_TOKENS}
    paths = [path for name in _VOCABULARIES if (path := folder / name).is_file()]
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            return True
        wanted = {token for token in wanted if token not in data}
        if not wanted:
            return True
    return not paths
