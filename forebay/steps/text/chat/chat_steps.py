"""`chat`: conversations to tokens and which of them are targets, beside patches or beside items of a processor.

Beside patches the folder's chat template is rendered, and image tokens are repeated by grid. A processor writes itself:
it is called with blank images and clips, since how many tokens one becomes follows from its size or length, which a
probe proves.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from forebay.config.pretrained_folder import processor_digest
from forebay.errors import ConfigError, TextError
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.whole import named_by
from forebay.steps.image.qwen2_vl import OMNI_SECONDS, VIDEO_VALUES
from forebay.steps.step import CLIPS, HEARS_VIDEOS, REJECTED, RowText, Stored, TextBatch, TextStep
from forebay.steps.text.chat.conversation import (
    ChatTurns,
    Message,
    TrainOn,
    all_but,
    both_of,
    check_conversation,
    find_turn_marks,
    learnt_spans,
    named_tokens,
    parse_conversation,
    probe_turns,
    rendered_text,
    stripped,
)
from forebay.steps.text.chat.processor_form import REFUSALS, TextForm, find_text_form
from forebay.steps.text.chat.processor_ids import VIDEO, Told, Writer, WrittenIds, by_group
from forebay.steps.text.chat.template_check import check_shown
from forebay.steps.text.chat.written_boxes import TOKENS, BoxStyle, BoxWriter, with_boxes
from forebay.steps.text.row_encoder import TURN, OneByOne
from forebay.steps.text.tokenizer_files import TRANSFORMERS
from forebay.steps.text.vocabulary import Vocabulary, render_chat, require_digest, tokens_pattern
from forebay.store.image.codec import VIDEO_GRIDS
from forebay.store.image.stored_items import FEATURES
from forebay.store.layout import Array, FieldSpec, Group

if TYPE_CHECKING:
    from forebay.config.tree import Config

VISION_START, IMAGE_PAD, VISION_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
VIDEO_PAD = "<|video_pad|>"
VISION_TOKENS = (VISION_START, IMAGE_PAD, VISION_END)
"""Without which no image can stand in a conversation."""

# A model counts all of these, whoever wrote them. Some are in no template.
_ALL_VISION_TOKENS = (*VISION_TOKENS, "<|vision_pad|>", VIDEO_PAD)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatStep(TextStep):
    """The settings of every step that writes conversations."""

    name: ClassVar[str] = "chat"
    libraries: ClassVar[tuple[str, ...]] = TRANSFORMERS
    axes: ClassVar[dict[str, str | int]] = {"input_ids": "tokens", "label_mask": "tokens"}
    tokenizer: str
    learn_through: Literal["end_of_turn", "newline"] = "end_of_turn"
    """Where what is learnt of a turn ends: with the token that ends it, or with the newline behind that."""
    train_on: TrainOn = "assistant"
    """What is learnt: what the assistant says, its last turn alone, or every token but those of items."""
    pairs: bool = False
    """Whether rows have an answer to prefer and one to reject: of images as a processor gives them alone."""
    strip_text: bool = False
    """Whether white space around images, and at both ends of what the user says, is left out."""
    boxes: BoxStyle | None = field(default=None, compare=False)  # in the key as `box_writer`
    """How boxes are written: `"tokens"` or `"list"`; left out: `"tokens"` of Qwen2-VL, `"list"` of those after it."""
    videos: bool = False
    box_writer: BoxWriter | None = None
    version: int = 3
    later: ClassVar[frozenset[str]] = frozenset(
        {"train_on", "pairs", "strip_text", "videos", "boxes", "box_writer", "sound"}
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(ChatStep):
    """`input_ids` int32 [tokens] and `label_mask` uint8 [tokens] of a conversation under the tokenizer's chat template.

    Image tokens are expanded; the mask is 1 where a token is a target: in what the assistant says, and in what ends its
    turn. Batches of conversations are packs.
    """

    beside: ClassVar[frozenset[str]] = frozenset({"patches"})
    can_pack: ClassVar[bool] = True
    given: ClassVar[frozenset[str]] = frozenset({"tokenizer", "videos", "box_writer"})

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """See `Step`."""
        has_pairs = config.text is not None and config.text.settings.get("pairs")
        said = 'text.pairs: packs of patches have no pairs; set vision.images = "processor" and plan.kind = "bucket"'
        return [*super(Chat, cls).contradictions(config), *([said] if has_pairs else [])]

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the text group: `input_ids` and `label_mask`, [num_tokens] both."""
        return (
            FieldSpec(name="input_ids", dtype="int32", group="text"),
            FieldSpec(name="label_mask", dtype="uint8", group="text"),
        )

    @classmethod
    def batch(cls, stored: Stored) -> TextBatch:
        """Raises ConfigError: conversations stand in packs."""
        raise ConfigError(
            f'{stored.name}: no batch form for prompt {cls.name!r}; conversations stand in packs: plan.kind = "pack"'
        )

    @classmethod
    def stands_beside(cls, items: Mapping[Group, str]) -> bool:
        """See `TextStep`: this template shows no clips."""
        return CLIPS not in items.values() and super(Chat, cls).stands_beside(items)

    @classmethod
    def row(cls, stored: Stored) -> RowText:  # noqa: ARG003
        from forebay.steps.batch import MarkedText

        return MarkedText()

    def opened(self, folder: Path, *, merge_size: int | None) -> ChatEncoder:
        if merge_size is None:
            raise ValueError("conversations are written for images as patches, which have a merge_size")
        return ChatEncoder(self, folder, merge_size=merge_size)


class ChatEncoder(OneByOne):
    """Writes conversations as the chat template of a local folder does, with `<|image_pad|>` repeated by grid.

    The ids are those of the tokenizer for the rendered and expanded string. A target is what the assistant says and the
    control token that closes its turn; with `step.learn_through = "newline"` also the token of line ends behind that,
    where one stands. A token that reaches out of the turn (the header's line end together with line ends that an answer
    begins with) is none. Turns whose message has `"loss": false` have no target.
    """

    def __init__(self, step: Chat, folder: Path, *, merge_size: int) -> None:
        """Loads the tokenizer (and with it transformers).

        merge_size: of the image processor; `merge_size`^2 patches become one token. Raises ConfigError where the
        folder's files are not those of `step.tokenizer`, lack what images need, or where the template's turns cannot be
        found or have no newline behind them that `step.learn_through` could mean.
        """
        self._vocabulary = Vocabulary(folder, digest=step.tokenizer)
        self._vocabulary.renders(self._vocabulary.tokenizer)
        self._pads = {"image": IMAGE_PAD, **({"video": VIDEO_PAD} if step.videos else {})}
        tokens = dict.fromkeys((*VISION_TOKENS, *self._pads.values()))
        self._ids = {token: self._vocabulary.require(token, prompt="chat") for token in tokens}
        self._render = functools.partial(render_chat, self._vocabulary.tokenizer)
        shown = {kind: (f"{VISION_START}{pad}{VISION_END}", pad) for kind, pad in self._pads.items()}
        self._marks = find_turn_marks(self._vocabulary, self._render, shown=shown, learn_through=step.learn_through)
        # Messages may write other control tokens, such as `<think>`.
        self._reserved = tokens_pattern({*named_tokens(self._vocabulary, self._marks), *_ALL_VISION_TOKENS})
        self._step, self._merge_size = step, merge_size
        self._backend = self._vocabulary.open.backend
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def constants(self) -> dict[str, Any]:
        """Facts that a collator must know: `prompt`, ids of the image's tokens, `pad_token_id`."""
        pad = self._vocabulary.pad_token_id
        if pad is None:
            raise ConfigError(
                f"text.tokenizer: the tokenizer in {self._vocabulary.folder} names no pad_token and no eos_token; "
                "use the model's own tokenizer",
                code="FB106",
            )
        return {
            "prompt": "chat",
            "image_token_id": self._ids[IMAGE_PAD],
            "vision_start_token_id": self._ids[VISION_START],
            "vision_end_token_id": self._ids[VISION_END],
            "pad_token_id": pad,
            **({"video_token_id": self._ids[VIDEO_PAD]} if "video" in self._pads else {}),
        }

    def encode(self, text: str, told: Sequence[tuple[Any, ...]], *, sample_id: str) -> dict[str, np.ndarray]:
        """Returns `input_ids` int32 [tokens] and `label_mask` uint8 [tokens], 1 where a token is a target.

        text: a conversation in canonical form, JSON. told: (t, h, w) in patches of its images, in order, and width and
        height as displayed; of a video a list of what stands before each of its t frames, if its model is shown them
        one by one.
        Raises TextError: `bad_conversation`, `no_assistant_turn`, `nothing_to_learn`, `empty_text`,
        `special_token_in_text`, `image_count_mismatch`, `bad_text`, `has_tools`, `has_reasoning`.
        """
        conversation, folder = parse_conversation(text, sample_id=sample_id), self._vocabulary.folder
        videos = [each for each in told if isinstance(each[-1], list)]
        sizes = [(*each[3:], *each[1:3]) for each in told if not isinstance(each[-1], list)]
        conversation = with_boxes(conversation, self._step.box_writer, sizes, sample_id=sample_id)
        conversation = stripped(conversation) if self._step.strip_text else conversation
        counts = {"image": len(told) - len(videos), **({"video": len(videos)} if "video" in self._pads else {})}
        turns = check_conversation(
            conversation, self._reserved, counts=counts, sample_id=sample_id, train_on=self._step.train_on
        )
        rendered = rendered_text(self._render, conversation, folder, sample_id=sample_id)
        check_shown(conversation, self._render, self._marks, folder=folder, sample_id=sample_id)
        found = {kind: rendered.count(pad) for kind, pad in self._pads.items()}
        learnt_spans(self._marks.spans(rendered), turns, shown=found, sample_id=sample_id)
        rendered = _with_seconds(rendered, [texts for *_, texts in videos])
        learnt = learnt_spans(self._marks.spans(rendered), turns, shown=counts, sample_id=sample_id)
        return self._tokenize(rendered, learnt, turns, told)

    def decode(self, input_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text in the ids of a sample, roles with it; control and image tokens are left out."""
        return self._vocabulary.decode([int(i) for i in input_ids])

    def _tokenize(
        self, rendered: str, spans: list[tuple[int, int]], turns: ChatTurns, told: Sequence[tuple[Any, ...]]
    ) -> dict[str, np.ndarray]:
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int32)
        mask = self._marks.targets(rendered, spans, encoding.offsets)
        if turns.learns_all:
            mask = all_but(mask, rendered, ids, self._vocabulary, [*self._pads.values()])
        # Ids are repeated, not the string: the tokenizer would take 4 times as long and give the same.
        repeats = np.ones(len(ids), dtype=np.int64)
        # Of frames with texts before them each has a pad of its own.
        copies = [(isinstance(each[-1], list) and len(each[-1])) or 1 for each in told]
        pads = [(t // n, n, h, w) for (t, h, w, *_), n in zip(told, copies, strict=True)]
        of_items = [t * h * w // self._merge_size**2 for t, n, h, w in pads for _ in range(n)]
        repeats[np.isin(ids, [self._ids[pad] for pad in self._pads.values()])] = of_items
        return {"input_ids": np.repeat(ids, repeats), "label_mask": np.repeat(mask, repeats)}


def _with_seconds(rendered: str, texts: Sequence[Sequence[str]]) -> str:
    """Returns a rendered text in which the place of a video holds its frames, if texts stand before them.

    Each frame is shown as a video, inside of what shows the whole: so `Qwen3VLProcessor` of transformers 5 writes it.
    texts: of every video in order; none of one that is shown as a whole.
    """
    first, *rest = rendered.split(VIDEO_PAD)
    shown = f"{VISION_START}{VIDEO_PAD}{VISION_END}"
    made = ["".join(f"{text}{shown}" for text in of_one) or VIDEO_PAD for of_one in texts]
    return first + "".join(f"{frames}{behind}" for frames, behind in zip(made, rest, strict=True))


MASK = "label_mask"
_OF_VIDEOS = (VIDEO_VALUES, VIDEO_GRIDS, OMNI_SECONDS)
"""What models of the omni family are given of videos."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorChat(ChatStep):
    """`input_ids`, what the processor gives beside them for each token, and `label_mask` of a conversation.

    Ids are those of the processor's own `apply_chat_template`, image tokens included. The mask is 1 where a token is a
    target: in what the assistant says, and in what ends its turn.
    """

    given: ClassVar[frozenset[str]] = frozenset(
        {"tokenizer", "processor", "tokenizer_folder", "processor_folder", "box_writer", "videos"}
    )
    setting: ClassVar[str] = "vision.processor"

    processor: str
    tokenizer_folder: str = field(default="", compare=False)
    processor_folder: str = field(default="", compare=False)

    @classmethod
    def contradictions(cls, config: Config) -> list[str]:
        """See `Step`."""
        settings = {} if config.text is None else config.text.settings
        is_wrong = settings.get("pairs") and settings.get("train_on") == "all"
        said = 'text.pairs is true and text.train_on is "all", and of pairs only answers are learnt; leave one out'
        return [*super(ProcessorChat, cls).contradictions(config), *([said] if is_wrong else [])]

    def fields(self) -> tuple[FieldSpec, ...]:
        """Returns the fields of the text group, [num_tokens] each."""
        return self.fields_of(_opened(self, self.tokenizer_folder, self.processor_folder).form)

    def fields_of(self, form: BatchForm | None) -> tuple[FieldSpec, ...]:
        specs = (*(() if form is None else form.specs("text")), FieldSpec(name=MASK, dtype="uint8", group="text"))
        return (*specs, *(replace(spec, name=REJECTED + spec.name) for spec in specs if self.pairs))

    @property
    def shows(self) -> tuple[Group, ...]:
        """The groups whose items stand in conversations."""
        return ("image",)

    @classmethod
    def stands_beside(cls, items: Mapping[Group, str]) -> bool:
        """See `TextStep`: clips that conversations list are of `SoundChat`."""
        return CLIPS not in items.values() and super(ProcessorChat, cls).stands_beside(items)

    def opened(self, folder: Path, *, merge_size: int | None) -> ProcessorChatEncoder:  # noqa: ARG002
        """Returns what writes conversations; a process keeps the last ones."""
        return _opened(self, self.tokenizer_folder, self.processor_folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundChat(ProcessorChat):
    """`ProcessorChat` of conversations with clips. kinds: the groups whose items they have."""

    beside: ClassVar[frozenset[str]] = frozenset({CLIPS})
    given: ClassVar[frozenset[str]] = ProcessorChat.given | {"kinds", "sound"}
    setting: ClassVar[str] = "audio.extractor"
    can_pack: ClassVar[bool] = True
    kinds: tuple[Group, ...]
    sound: bool = False
    """Whether the sound of videos is among the clips."""

    @property
    def shows(self) -> tuple[Group, ...]:
        """See `ProcessorChat`."""
        return self.kinds

    @classmethod
    def stands_beside(cls, items: Mapping[Group, str]) -> bool:
        """See `TextStep`: patches are cut for a family's own template, which has no clips."""
        return items.get("audio") == CLIPS and items.get("image", FEATURES) == FEATURES

    @classmethod
    def row(cls, stored: Stored) -> RowText:
        """Raises ConfigError for a processor whose tokens have more beside them, which packs do not have."""
        from forebay.steps.batch import MarkedText

        if stored.constants.get("pairs"):
            raise ConfigError(f'{stored.name}: packs have no pairs; set plan.kind = "bucket" with batch_size')
        form = BatchForm.from_json(stored.constant("text_form"))
        if others := [field.name for field in form.stored if field.name != "input_ids"]:
            raise ConfigError(
                f"{stored.name}: {form.made_by} gives {', '.join(others)} beside each token, which packs do not have; "
                'set plan.kind = "bucket" with batch_size'
            )
        return MarkedText()


class ProcessorChatEncoder(OneByOne):
    """Writes conversations as the processor of a folder does.

    A target is what the assistant says and the control token that closes its turn; with `learn_through = "newline"`
    also the token of line ends behind that, where one stands. A token that reaches out of the turn is none. Turns whose
    message has `"loss": false` have no target.
    """

    name, turn = ProcessorChat.name, TURN

    def __init__(self, step: ProcessorChat) -> None:
        """Loads tokenizer and processor, and probes what they write.

        Raises ConfigError where a folder's files are not those of the key, where the processor cannot be built, where
        what it writes depends on more than the sizes of images, or where turns cannot be found.
        """
        self.step = step
        self._folder = Path(step.processor_folder)
        require_digest(step.setting, self._folder, processor_digest(self._folder), step.processor)
        self._vocabulary = Vocabulary(Path(step.tokenizer_folder), digest=step.tokenizer)
        self._has_sound: bool = getattr(step, "sound", False)
        self.writer = Writer(self._vocabulary, self._folder, step.shows, videos=step.videos, sound=self._has_sound)
        shown = {group: (token, token) for group, token in self.writer.placeholders.items()}
        self.marks = find_turn_marks(
            self._vocabulary, self.writer.render, shown=shown, learn_through=step.learn_through
        )
        self.text_form: TextForm = find_text_form(self.writer)
        control = self.writer.control_tokens | named_tokens(self._vocabulary, self.marks)
        self._reserved = tokens_pattern(control - {*(TOKENS if step.box_writer else ())})
        self._check_turns()

    @property
    def form(self) -> BatchForm:
        """How the fields become those of a batch."""
        return self.text_form.batch

    @property
    def constants(self) -> dict[str, Any]:
        """Facts that a cache states of all samples.

        The prompt, the form of its fields, and which outputs of images a batch has: an image processor gives more than
        a model takes (numbers of tiles, for example). Packs need the token of images by grids, and how many patches a
        side of it has; to be cut also that of clips.
        """
        found: dict[str, Any] = {"prompt": ProcessorChat.name, "text_form": self.form.to_json()}
        if self.step.pairs:
            found["pairs"] = True
        if self.step.can_pack and "audio" in self.writer.groups:
            found["clip_token"] = self._vocabulary.find(self.writer.placeholders["audio"])
        if self._has_sound:
            found[HEARS_VIDEOS] = True
        if "image" not in self.writer.groups:
            return found
        merge_size = getattr(self.writer.parts["image"], "merge_size", None)
        if self.step.can_pack and merge_size is not None:
            token = self._vocabulary.find(self.writer.placeholders["image"])
            found["mrope"] = {"token": token, "merge_size": int(merge_size)}
        return {**found, "image_outputs": [*self.text_form.images, *(_OF_VIDEOS if self.step.videos else ())]}

    def encode(self, text: str, told: Sequence[Told], *, sample_id: str) -> dict[str, Array]:
        """Returns the fields of a conversation, see `ProcessorChat`.

        text: the conversation in canonical form, JSON. told: (width, height) of its images, and the samples of its
        clips, those of a group in order.
        Raises TextError: `bad_conversation`, `no_assistant_turn`, `nothing_to_learn`, `empty_text`,
        `special_token_in_text`, `image_count_mismatch`, `audio_count_mismatch`, `bad_text`, `images_together`,
        `clips_together`, `has_tools`, `has_reasoning`, `preference_data`, `bad_pair`.
        """
        conversation, sizes = parse_conversation(text, sample_id=sample_id), by_group(told)["image"]
        conversation = with_boxes(conversation, self.step.box_writer, sizes, sample_id=sample_id)
        conversation = stripped(conversation) if self.step.strip_text else conversation
        if not self.step.pairs:
            return self._encoded(conversation, told, sample_id=sample_id)
        pair = both_of(conversation, sample_id=sample_id)
        chosen, rejected = (self._encoded(each, told, sample_id=sample_id) for each in pair)
        return {**chosen, **{REJECTED + name: value for name, value in rejected.items()}}

    def _encoded(self, conversation: list[Message], told: Sequence[Told], *, sample_id: str) -> dict[str, Array]:
        found = by_group(told)
        counts = {kind: len(found[kind]) for kind in self.writer.kinds}
        if self._has_sound:  # which no part of its own shows
            counts["audio"] -= counts[VIDEO]
        turns = check_conversation(
            conversation, self._reserved, counts=counts, sample_id=sample_id, train_on=self.step.train_on
        )
        self.text_form.check_counts(counts, sample_id=sample_id)
        render, folder = self.writer.render, self._vocabulary.folder
        rendered = rendered_text(render, conversation, folder, sample_id=sample_id)
        check_shown(conversation, render, self.marks, folder=folder, sample_id=sample_id)
        written = self._written(conversation, told, sample_id=sample_id)
        spans = self.marks.spans(written.text)
        shown = {group: rendered.count(token) for group, token in self.writer.placeholders.items()}
        learnt = learnt_spans(spans, turns, shown=shown, sample_id=sample_id)
        mask = self.marks.targets(written.text, learnt, written.offsets)
        if turns.learns_all:
            ids, tokens = written.fields["input_ids"], self.writer.placeholders.values()
            mask = all_but(mask, rendered, ids, self._vocabulary, tokens)
        return {**self.text_form.stored(written, sample_id=sample_id), MASK: mask}

    def decode(self, input_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text in the ids of a sample, roles with it; control and image tokens are left out."""
        return self._vocabulary.decode([int(i) for i in input_ids])

    def _written(self, conversation: list[Message], told: Sequence[Told], *, sample_id: str) -> WrittenIds:
        try:
            return self.writer.write(conversation, told)
        except REFUSALS as err:
            raise TextError(
                "bad_conversation",
                f"{sample_id}: {self.writer.name} refuses the conversation: {err!r:.300}; correct the manifest",
            ) from err

    def _check_turns(self) -> None:
        """Raises ConfigError where turns hide in an item's own tokens."""
        talk = [*probe_turns(dict.fromkeys(self.writer.groups, 1))]
        told: dict[Group, Told] = {"audio": 8_000, "image": (64, 48)}
        if len(self.marks.spans(self.writer.write(talk, [told[group] for group in self.writer.groups]).text)) != 1:
            what = " and ".join(self.writer.groups)
            raise ConfigError(
                f"vision.processor: {self.writer.name} writes the marks of an assistant's turn into its {what} tokens, "
                "so turns cannot be found; use the model's own chat template",
                code="FB126",
            )


@functools.lru_cache(maxsize=2)
def _opened(step: ProcessorChat, tokenizer_folder: str, processor_folder: str) -> ProcessorChatEncoder:  # noqa: ARG001
    # Folders are no part of a step's equality, but of what is opened.
    with named_by(step.setting):
        return ProcessorChatEncoder(step)
