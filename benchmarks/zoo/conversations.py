"""Which whole processors of transformers write conversations for forebay, and why the others do not.

Each class of the library with a tokenizer and a processor of images, or of sound, is built from a folder that is made
here: its parts' defaults, a small tokenizer that has every token the class's module names, and a plain chat template.
What is asked then is what a build asks: `ProcessorChat.opened`, and of clips `ConversationSound.probe`.
"""

from __future__ import annotations

import ast
import functools
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
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from forebay.config.pretrained_folder import processor_digest, tokenizer_digest
from forebay.errors import ConfigError
from forebay.steps.audio.extractor.conversation_sound import ConversationSound
from forebay.steps.audio.extractor.extractor_folder import ExtractorFolder
from forebay.steps.audio.extractor.extractor_probe import Probed
from forebay.steps.image.processor.whole import (
    SOUND,
    image_processor_of,
    processor_class,
    sound_extractor_of,
    whole_processor,
)
from forebay.steps.step import AudioStep
from forebay.steps.text.chat.chat_steps import ProcessorChat, ProcessorChatEncoder, SoundChat
from forebay.steps.text.vocabulary import Vocabulary
from forebay.store.layout import Group

# A turn between control tokens, as Qwen's and InternVL's.
TURNS = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' }}
{%- for p in m.content -%}{%- if p.type == 'image' %}{{ 'IMAGE' }}{%- else %}{{ p.text }}{% endif -%}{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
HEARING = TURNS.replace("{%- else %}", "{%- elif p.type == 'audio' %}{{ 'AUDIO' }}{%- else %}")
"""And a clip."""
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
    sound: tuple[Probed, AudioStep | None] | None = None

    @property
    def sound_line(self) -> str:
        """The row of the table of clips."""
        families = ", ".join(self.families)
        if self.encoder is None or self.sound is None:
            return f"| `{self.name}` | {families} | no | {self.why} | |"
        (sound, native), writer = self.sound, self.encoder.writer
        fields = ", ".join(field.name for field in sound.form.fields)
        notes = ["with images"] if "image" in writer.groups else []
        notes += ["one clip a conversation"] if self.encoder.text_form.most.get("audio") == 1 else []
        if sound.longest is not None:
            windows, seconds = getattr(native, "windows", 1), sound.longest / writer.parts["audio"].sampling_rate
            notes.append(f"clips of up to {windows * seconds:g} s")
            notes += [f"in windows of {seconds:g} s"] if windows > 1 else []
        notes += [] if native is None else ["forebay's own log-mel, within 1e-6"]
        notes += [f"without images: {self.why}"] if self.why else []
        return f"| `{self.name}` | {families} | {fields} | {sound.form.promise} | {', '.join(notes)} |"

    @property
    def line(self) -> str:
        """The row of the table."""
        families = ", ".join(self.families)
        if self.encoder is None:
            return f"| `{self.name}` | {families} | no | {self.why} |"
        fields = ", ".join(field.name for field in self.encoder.form.stored)
        one = "one image a conversation" if self.encoder.text_form.most.get("image") == 1 else ""
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


def sound_section() -> str:
    """Returns the section of docs/models.md of clips in conversations: a table of classes, those that work first."""
    found = sorted(outcomes("audio"), key=lambda outcome: (outcome.encoder is None, outcome.name.lower()))
    working = sum(outcome.encoder is not None for outcome in found)
    return (
        f"## Sound in conversations\n\nOf {len(found)} classes with a tokenizer and a feature extractor {working} "
        'write conversations with clips (`prompt = "chat"` beside `[audio]`): ids, what stands beside them, and the '
        "values of each clip are those of the class itself; the promise is of the clips of a batch. Classes with "
        "images write them beside clips where `[vision]` names the same folder."
        "\n\n| class | families | fields of clips | promise | |\n|---|---|---|---|---|\n"
        + "\n".join(outcome.sound_line for outcome in found)
        + "\n"
    )


def outcomes(group: Group = "image") -> Iterator[Outcome]:
    """Yields what becomes of each class that takes texts and items of a group."""
    for name in dict.fromkeys(PROCESSOR_MAPPING_NAMES.values()):
        families = tuple(kind for kind, cls in PROCESSOR_MAPPING_NAMES.items() if cls == name)
        with tempfile.TemporaryDirectory() as place:
            found = outcome_of(name, families, Path(place), group)
        if found is not None:
            yield found


def outcome_of(name: str, families: tuple[str, ...], folder: Path, group: Group = "image") -> Outcome | None:
    """Returns what becomes of a class, in an empty folder; None for one that takes no texts and items of a group.

    A class that takes images and clips is asked for both where the group is that of clips.
    """
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name}))
    try:
        cls: Any = processor_class(folder)
    except ConfigError as err:
        return Outcome(name, families, None, _words(err)) if _takes(families, group) else None
    parts = set(cls.get_attributes())
    has_sound, has_images = bool(parts & {*SOUND}), "image_processor" in parts
    if "tokenizer" not in parts or not (has_sound if group == "audio" else has_images):
        return None
    wanted: list[tuple[Group, ...]] = [("image",)] if group == "image" else [("audio",)]
    wanted = [("audio", "image"), *wanted] if group == "audio" and has_images else wanted
    why = ""
    for groups in wanted:
        try:
            _write(cls, name, families, folder, groups)
            if group == "audio":
                ConversationSound.facts(ExtractorFolder.read(folder))
            encoder = _encoder(folder, groups)
            return Outcome(name, families, encoder, why, _sound(folder) if group == "audio" else None)
        except (ConfigError, LookupError) as err:
            why = why or _words(err)
    return Outcome(name, families, None, why)


def _takes(families: tuple[str, ...], group: Group) -> bool:
    known: Any = IMAGE_PROCESSOR_MAPPING_NAMES if group == "image" else FEATURE_EXTRACTOR_MAPPING_NAMES
    return any(family in known for family in families)


def _write(cls: Any, name: str, families: tuple[str, ...], folder: Path, groups: tuple[Group, ...]) -> None:
    """Writes the folder. Raises LookupError where a part is not known."""
    source = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    attributes = {found: f"<{found}>" for found in _ATTRIBUTE.findall(source) if found not in _USUAL}
    texts = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    tokens = {text for text in texts if _TOKEN.fullmatch(text)}
    _tokenizer([*_MARKS, *sorted(tokens | set(attributes.values()))], attributes).save_pretrained(folder)
    nested: dict[str, Any] = {}
    for group in groups:
        part, where = _PARTS[group]
        part(families).save_pretrained(folder)
        document = json.loads((folder / "preprocessor_config.json").read_text())
        nested[where] = {"image_seq_length": 4, **document} if group == "image" else document
    if len(groups) > 1:
        (folder / "preprocessor_config.json").unlink()
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(nested.popitem()[1]))
    parameters = inspect.signature(cls.__init__).parameters
    settings = {
        k: v for k, v in _SETTINGS.items() if k in parameters and parameters[k].default in (None, inspect._empty)
    }
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": name, **nested, **settings}))
    made = _whole(folder, groups)
    template = HEARING if "audio" in groups else TURNS
    for group in groups:
        shown = str(getattr(made, f"{group}_token", None) or f"<{group}>")
        template = template.replace(group.upper(), shown)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _image_processor(families: tuple[str, ...]) -> Any:
    import transformers

    for family in families:
        names = IMAGE_PROCESSOR_MAPPING_NAMES.get(family, {})
        if "pil" in names:
            return getattr(transformers, names["pil"])()
    raise LookupError("its image processor exists for torchvision alone")


_EXTRACTORS = {"musicflamingo": "WhisperFeatureExtractor"}
"""Of families that transformers' table lacks."""


def _feature_extractor(families: tuple[str, ...]) -> Any:
    import transformers

    for family in families:
        if name := _EXTRACTORS.get(family, FEATURE_EXTRACTOR_MAPPING_NAMES.get(family)):
            try:
                return getattr(transformers, name)()
            except ImportError as err:
                raise LookupError(f"its feature extractor needs a package: {' '.join(str(err).split()):.90}") from err
    raise LookupError("transformers knows no feature extractor of it")


_PARTS: dict[Group, tuple[Any, str]] = {
    "audio": (_feature_extractor, "feature_extractor"),
    "image": (_image_processor, "image_processor"),
}


def _whole(folder: Path, groups: tuple[Group, ...]) -> Any:
    """Returns the whole processor as a first building of it gives it."""
    (folder / "chat_template.jinja").write_text(TURNS, encoding="utf-8")
    vocabulary = Vocabulary(folder, digest=tokenizer_digest(folder))
    makers = {"audio": sound_extractor_of, "image": image_processor_of}
    parts = {group: makers[group](folder) for group in groups}
    return whole_processor(folder, tokenizer=vocabulary.tokenizer, tokenizer_folder=folder, parts=parts)


def _encoder(folder: Path, groups: tuple[Group, ...]) -> ProcessorChatEncoder:
    step = ProcessorChat if groups == ("image",) else functools.partial(SoundChat, kinds=groups)
    return step(
        tokenizer=tokenizer_digest(folder),
        processor=processor_digest(folder),
        tokenizer_folder=str(folder),
        processor_folder=str(folder),
    ).opened(folder, merge_size=None)


def _sound(folder: Path) -> tuple[Probed, AudioStep | None]:
    """Returns what a probe finds of clips, and the step by which forebay makes their values itself."""
    found = ExtractorFolder.read(folder)
    rate_hz = int(found.document.get("sampling_rate", 16_000))
    step = ConversationSound(extractor=str(folder), rate_hz=rate_hz, **ConversationSound.facts(found))
    return step.probe(), ConversationSound.native(found, dtype="float32")


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
    text = re.sub(
        r" of /tmp/\S+|, which /tmp/\S+ names,|/tmp/\S+",
        "",
        re.sub("^(vision.processor|audio.extractor): ", "", str(err)),
    )
    return text.split("; ")[0].replace("|", "\\\\|").replace("\n", " ").strip()[:200]
