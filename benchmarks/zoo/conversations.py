"""Which whole processors of transformers write conversations for forebay, and why the others do not.

Each class of the library with a tokenizer and an image processor is built from a folder that is made here: its image
processor's defaults, a small tokenizer that has every token the class's module names, and a plain chat template. What
is asked then is what a build asks: `ProcessorChat.encoder`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from forebay.config.pretrained_folder import processor_digest, tokenizer_digest
from forebay.errors import ConfigError
from forebay.steps.image.processor.whole import processor_class
from forebay.steps.text.chat.chat_steps import ProcessorChat, ProcessorChatEncoder

# A turn between control tokens, as Qwen's and InternVL's.
TURNS = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- for p in m.content -%}{%- if p.type == 'image' %}{{ 'IMAGE' }}{%- else %}{{ p.text }}{% endif -%}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
_MARKS = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
_TOKEN = re.compile(r"(<[^<>\s{}]{1,40}>|\[[A-Z_]{2,20}\])+")
_ATTRIBUTE = re.compile(r"""tokenizer(?:\.|, ")([a-z_]+_token)(?:_id)?\b""")
_USUAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_SETTINGS = {
    "patch_size": 14,
    "image_seq_length": 4,
    "image_seq_len": 4,
    "num_image_tokens": 4,
    "num_query_tokens": 4,
    "vision_feature_select_strategy": "full",
}
"""What a class is given of those of its settings that have no default."""


@dataclass(frozen=True)
class Outcome:
    """One class. encoder: None where it cannot be used, `why` says why then."""

    name: str
    families: tuple[str, ...]
    encoder: ProcessorChatEncoder | None
    why: str

    @property
    def line(self) -> str:
        """The row of the table."""
        families = ", ".join(self.families)
        if self.encoder is None:
            return f"| `{self.name}` | {families} | no | {self.why} |"
        fields = ", ".join(field.name for field in self.encoder.form.stored)
        one = "one image a conversation" if self.encoder.text_form.max_images == 1 else ""
        return f"| `{self.name}` | {families} | {fields} | {one} |"


def chat_section() -> str:
    """Returns the section of docs/models.md: a table of all classes, those that work first."""
    found = sorted(outcomes(), key=lambda outcome: (outcome.encoder is None, outcome.name.lower()))
    working = sum(outcome.encoder is not None for outcome in found)
    return (
        f"## Conversations\n\nOf {len(found)} classes with a tokenizer and an image processor {working} write "
        'conversations (`prompt = "chat"`): ids and what stands beside them are those of the class itself, in batches '
        "too. The others are no chat models, exist for torchvision alone, or have the reason that stands in their row."
        "\n\n| class | families | fields | |\n|---|---|---|---|\n" + "\n".join(outcome.line for outcome in found) + "\n"
    )


def outcomes() -> Iterator[Outcome]:
    """Yields what becomes of each class."""
    for name in dict.fromkeys(PROCESSOR_MAPPING_NAMES.values()):
        families = tuple(kind for kind, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name)
        with tempfile.TemporaryDirectory() as place:
            found = outcome_of(name, families, Path(place))
        if found is not None:
            yield found


def outcome_of(name: str, families: tuple[str, ...], folder: Path) -> Outcome | None:
    """Returns what becomes of a class, in an empty folder; None for one that does not take texts and images."""
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}))
    try:
        cls: Any = processor_class(folder)
    except ConfigError as err:
        return Outcome(name, families, None, _words(err)) if _sees_and_reads(families) else None
    if not {"image_processor", "tokenizer"} <= set(cls.get_attributes()):
        return None
    try:
        _write(cls, name, families, folder)
        encoder = _encoder(folder)
    except (ConfigError, LookupError) as err:
        return Outcome(name, families, None, _words(err))
    return Outcome(name, families, encoder, "")


def _sees_and_reads(families: tuple[str, ...]) -> bool:
    return any(family in IMAGE_PROCESSOR_MAPPING_NAMES for family in families)


def _write(cls: Any, name: str, families: tuple[str, ...], folder: Path) -> None:
    """Writes the folder. Raises LookupError where no image processor by Pillow is known."""
    source = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    attributes = {found: f"<{found}>" for found in _ATTRIBUTE.findall(source) if found not in _USUAL}
    texts = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    tokens = {text for text in texts if _TOKEN.fullmatch(text)}
    _tokenizer([*_MARKS, *sorted(tokens | set(attributes.values()))], attributes).save_pretrained(folder)
    _image_processor(families).save_pretrained(folder)
    document = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_seq_length": 4, **document}))
    parameters = inspect.signature(cls.__init__).parameters
    settings = {
        k: v for k, v in _SETTINGS.items() if k in parameters and parameters[k].default in (None, inspect._empty)
    }
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **settings}))
    placeholder = _placeholder(folder)
    (folder / "chat_template.jinja").write_text(TURNS.replace("IMAGE", placeholder), encoding="utf-8")


def _image_processor(families: tuple[str, ...]) -> Any:
    import transformers

    for family in families:
        names = IMAGE_PROCESSOR_MAPPING_NAMES.get(family, {})
        if "pil" in names:
            return getattr(transformers, names["pil"])()
    raise LookupError("its image processor exists for torchvision alone")


def _placeholder(folder: Path) -> str:
    """Returns the `image_token` of the class, as a first building of it says."""
    from forebay.steps.image.processor.whole import image_processor_of, whole_processor
    from forebay.steps.text.vocabulary import Vocabulary

    (folder / "chat_template.jinja").write_text(TURNS, encoding="utf-8")
    vocabulary = Vocabulary(folder, digest=tokenizer_digest(folder))
    made = whole_processor(
        folder,
        tokenizer=vocabulary.tokenizer,
        tokenizer_folder=folder,
        image_processor=image_processor_of(folder),
    )
    return str(getattr(made, "image_token", None) or "<image>")


def _encoder(folder: Path) -> ProcessorChatEncoder:
    return ProcessorChat(
        tokenizer=tokenizer_digest(folder),
        processor=processor_digest(folder),
        tokenizer_folder=str(folder),
        processor_folder=str(folder),
    ).opened(folder, merge_size=None)


def _tokenizer(special: list[str], attributes: dict[str, str]) -> Any:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, padding_side="right", extra_special_tokens=attributes, **_USUAL
    )


def _words(err: Exception) -> str:
    """Returns the reason in a message, without paths and advice, as a cell of a table."""
    text = re.sub(r" of /tmp/\S+|, which /tmp/\S+ names,|/tmp/\S+", "", str(err).removeprefix("vision.processor: "))
    return text.split("; ")[0].replace("|", "\\\\|").replace("\n", " ")[:200]
