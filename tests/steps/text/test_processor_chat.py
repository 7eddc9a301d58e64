"""Conversations by whole processors against these processors' own batches, and the losses of tiny models on both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given

from forebay.config.pretrained_folder import processor_digest, tokenizer_digest
from forebay.errors import ConfigError, TextError
from forebay.steps.batch import collate
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.whole import image_options
from forebay.steps.text.chat.chat_steps import ProcessorChat, ProcessorChatEncoder
from tests.strategies import conversations
from tests.vlm_families import ANSWERS, FAMILIES, LLAVA, NAMES, model_folder, picture, random_model, talk

SIZES = [(64, 48), (48, 90), (100, 60)]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("families")
    return lambda name: model_folder(name, root)


def encoder_of(folder: Path, **settings: Any) -> ProcessorChatEncoder:
    made = ProcessorChat(
        tokenizer=tokenizer_digest(folder),
        processor=processor_digest(folder),
        tokenizer_folder=str(folder),
        processor_folder=str(folder),
        **settings,
    )
    return made.opened(folder, merge_size=None)


def sizes_of(conversation: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [part["image"].size for m in conversation for part in m["content"] if part["type"] == "image"]


def canonical(conversation: list[dict[str, Any]]) -> str:
    parts = [[{k: v for k, v in part.items() if k != "image"} for part in m["content"]] for m in conversation]
    return json.dumps([{**m, "content": part} for m, part in zip(conversation, parts, strict=True)])


def conversations_for(name: str) -> list[list[dict[str, Any]]]:
    """Several answers, sizes and numbers of images, of which one conversation has none."""
    together = name not in FAMILIES or FAMILIES[name].together
    pictures = [picture(seed, width=width, height=height) for seed, (width, height) in enumerate(SIZES)]
    return [
        talk("A cat.", images=pictures[:1]),
        talk("Still a cat.", "A dog.", "two dogs", images=pictures[1:] if together else pictures[1:2]),
        talk("what?", question="Who? \n What do they do?"),
        talk("A dog.", "A cat.", images=pictures[2:]),
    ]


def collated(coder: ProcessorChatEncoder, conversations: Sequence[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """The batch of what is stored, with labels, as a collator makes it."""
    rows = [coder.encode(canonical(one), sizes_of(one), sample_id="row-7") for one in conversations]
    batch = collate(
        coder.form,
        [{f.name: [f.array(row)] for f in coder.form.stored} for row in rows],
        dtype=torch.float32,
        allocate=lambda _, shape, *, dtype: torch.empty(shape, dtype=dtype),
    )
    labels = torch.full_like(batch["input_ids"], -100)
    for line, held, row in zip(labels, batch["attention_mask"].bool(), rows, strict=True):
        line[held] = torch.from_numpy(np.where(row["label_mask"], row["input_ids"], -100).astype(np.int64))
    return {**batch, "labels": labels}


def own_batch(coder: ProcessorChatEncoder, conversations: Sequence[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """The processor's own, for all conversations at once."""
    made = coder.writer.processor.apply_chat_template(
        list(conversations), tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
    )
    return dict(made)


def own_labels(coder: ProcessorChatEncoder, ids: torch.Tensor, *, answer: str) -> torch.Tensor:
    """Labels by the ids alone: from behind each header to the end of the turn; text and header share no token."""
    tokenizer = coder.writer.processor.tokenizer
    header = tokenizer(coder.marks.header, add_special_tokens=False)["input_ids"]
    closing = tokenizer.convert_tokens_to_ids(answer.removeprefix(" {}").removeprefix("{}"))
    labels = torch.full_like(ids, -100)
    for row, line in zip(ids.tolist(), labels, strict=True):
        for place in range(len(row)):
            if row[place : place + len(header)] == header:
                start = place + len(header)
                stop = row.index(closing, start) + 1
                line[start:stop] = torch.tensor(row[start:stop])
    return labels


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_and_its_loss_are_the_processor_s_own(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    coder, conversations = encoder_of(folder), conversations_for(name)
    own, ours = own_batch(coder, conversations), collated(coder, conversations)
    for field in [form.name for form in coder.form.fields]:
        assert torch.equal(ours[field], own[field]), field
    answer = FAMILIES[name].answer if name in FAMILIES else ANSWERS[name]
    labels = own_labels(coder, own["input_ids"], answer=answer)
    assert torch.equal(ours["labels"], labels)
    said = [m["content"][0]["text"] for one in conversations for m in one if m["role"] == "assistant"]
    assert coder.decode(labels[labels >= 0].tolist()) == "".join(answer.split("<")[0].format(text) for text in said)
    model = random_model(folder)
    with torch.no_grad():
        wanted = model(**own, labels=labels).loss
        found = model(**(own | ours)).loss
    assert torch.isfinite(found)
    assert torch.equal(found, wanted)


def test_what_a_cache_says_of_its_text_is_enough_for_its_batches(folder_of: Callable[[str], Path]) -> None:
    coder = encoder_of(folder_of("gemma3"))
    constants = json.loads(json.dumps(coder.constants))
    assert BatchForm.from_json(constants["text_form"]) == coder.form
    assert (constants["prompt"], constants["image_outputs"]) == ("chat", ["pixel_values"])
    assert [(f.name, f.dtype) for f in ProcessorChat.fields(coder.step)] == [
        ("input_ids", "int32"),
        ("token_type_ids", "uint8"),
        ("label_mask", "uint8"),
    ]


def test_folders_are_no_part_of_what_a_step_is(folder_of: Callable[[str], Path]) -> None:
    step = encoder_of(folder_of("gemma3")).step
    assert not [value for value in step.identity().values() if "/" in str(value)]


@given(conversations())
def test_any_conversation_is_as_the_processor_tokenises_it(
    conversation: tuple[list[dict[str, Any]], list[tuple[int, int, int]]],
) -> None:
    """Whatever is written, ids are the processor's own, and only answers and what closes them are targets."""
    messages, grids = conversation
    coder = encoder_of(model_folder("gemma3", Path()))
    sizes = [(8 * h, 8 * w) for _, h, w in grids]
    try:
        found = coder.encode(json.dumps(messages), sizes, sample_id="row-7")
    except TextError as err:
        event(err.reason)
        return
    pictures = iter([picture(seed, width=w, height=h) for seed, (w, h) in enumerate(sizes)])
    shown = [
        {**m, "content": [{**p, "image": next(pictures)} if p["type"] == "image" else p for p in m["content"]]}
        for m in messages
    ]
    assert found["input_ids"].tolist() == own_batch(coder, [shown])["input_ids"][0].tolist()
    answers = [m["content"][0]["text"].strip() for m in messages if m["role"] == "assistant"]
    learnt = coder.writer.processor.tokenizer.decode(found["input_ids"][found["label_mask"] == 1])
    assert learnt == "".join(f"{answer}<end_of_turn>" for answer in answers)


def without(name: str, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(canonical(talk(name, images=[None] * number)))
    return found


@pytest.mark.parametrize(
    ("messages", "sizes", "reason", "match"),
    [
        (without("A cat.", 1), [], "image_count_mismatch", "row-7: the conversation shows 1 images, the sample has 0"),
        (without("A cat.", 1)[:1], SIZES[:1], "no_assistant_turn", "none of 1 messages is the assistant's"),
        (without("<image>", 0), [], "special_token_in_text", "message 1 has <image> in its text"),
        (without("</img>", 0), [], "special_token_in_text", "message 1 has </img> in its text"),
        (without("<video>", 0), [], "special_token_in_text", "message 1 has <video> in its text"),
        (without("<|im_end|>", 0), [], "special_token_in_text", "message 1 has <.im_end.> in its text"),
        (without(" ", 0), [], "empty_text", "message 1, the assistant's, has no text"),
        (without("\ud800", 0), [], "bad_text", "row-7: text has a lone surrogate U.D800"),
        (
            without("A cat.", 2),
            SIZES[:2],
            "images_together",
            "2 images, and LlavaOnevisionProcessor makes other pixels",
        ),
    ],
)
def test_what_cannot_be_used_says_why(
    messages: Any, sizes: list[tuple[int, int]], reason: str, match: str, folder_of: Callable[[str], Path]
) -> None:
    name = "internvl" if "img" in match else "llava_onevision"
    with pytest.raises(TextError, match=match) as caught:
        encoder_of(folder_of(name)).encode(json.dumps(messages), sizes, sample_id="row-7")
    assert caught.value.reason == reason


def test_a_processor_may_ask_for_an_image_in_every_conversation(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    own = Idefics3Processor.__call__

    def asking(self: Any, images: Any = None, **options: Any) -> Any:
        if images is None:
            raise ValueError("no images")
        return own(self, images=images, **options)

    monkeypatch.setattr(Idefics3Processor, "__call__", asking)
    coder = ProcessorChatEncoder(encoder_of(folder_of("smolvlm")).step)
    assert coder.encode(json.dumps(without("A cat.", 0)), [], sample_id="row-7")["label_mask"].sum()
    coder = ProcessorChatEncoder(encoder_of(folder_of("idefics3")).step)
    coder.encode(json.dumps(without("A cat.", 1)), SIZES[:1], sample_id="row-7")
    with pytest.raises(TextError, match="has 0 images, and Idefics3Processor takes 1 or more") as caught:
        coder.encode(json.dumps(without("A cat.", 0)), [], sample_id="row-7")
    assert caught.value.reason == "image_count_mismatch"


def test_tokens_that_depend_on_the_picture_are_refused(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    own = Idefics3Processor.replace_image_token

    def brightness(self: Any, image_inputs: dict[str, Any], image_idx: int, **options: Any) -> str:
        bright = int(np.asarray(image_inputs["pixel_values"]).mean() > -0.5)
        return f"{own(self, image_inputs, image_idx, **options)}{self.image_token * bright}"

    step = encoder_of(folder_of("idefics3")).step
    monkeypatch.setattr(Idefics3Processor, "replace_image_token", brightness)
    with pytest.raises(ConfigError, match="writes other tokens for another picture of the same size"):
        ProcessorChatEncoder(step)


def test_an_image_is_processed_once_a_size(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    coder = ProcessorChatEncoder(encoder_of(folder_of("internvl")).step)
    seen: list[Any] = []
    cls = type(coder.writer.processor.image_processor._processor)
    own = cls.__call__

    def called(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        seen.append(images)
        return own(self, images, *args, **options)

    monkeypatch.setattr(cls, "__call__", called)
    for size in [SIZES[0], SIZES[1], SIZES[0], (31, 32), SIZES[1]]:
        coder.encode(json.dumps(without("A cat.", 1)), [size], sample_id="row-7")
    assert len(seen) == 2  # the probes had the first size


@pytest.mark.parametrize("name", ["idefics3", "internvl", "pixtral"])
def test_images_of_a_conversation_put_together_give_the_same_ids(name: str, folder_of: Callable[[str], Path]) -> None:
    """Pixtral's are padded to the largest, so its processor is asked for each conversation."""
    coder = encoder_of(folder_of(name))
    generator = np.random.default_rng(0)
    sizes = [(int(width), int(height)) for width, height in generator.integers(20, 200, (6, 2))]
    for _ in range(10):
        some = [sizes[place] for place in generator.integers(0, 6, generator.integers(2, 5))]
        messages = json.dumps(without("A cat.", len(some)))
        found = coder.encode(messages, some, sample_id="row-7")
        own = own_batch(coder, [talk("A cat.", images=[picture(0, width=w, height=h) for w, h in some])])
        assert found["input_ids"].tolist() == own["input_ids"][0].tolist()


def changed(folder: Path, into: Path, file: str, **settings: Any) -> Path:
    """A copy of a folder with other settings in one JSON file; None takes one out."""
    shutil.copytree(folder, into)
    document = json.loads((into / file).read_text()) | settings
    (into / file).write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    return into


@pytest.mark.parametrize(
    ("file", "given_settings", "match"),
    [
        ("processor_config.json", {"auto_map": {"AutoProcessor": "x.Y"}}, "has auto_map, code of the folder"),
        ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "x.Y"}}, "auto_map names code of the folder"),
        ("tokenizer_config.json", {"auto_map": {"AutoProcessor": "x.Y"}}, "has auto_map, code of the folder"),
        ("processor_config.json", {"processor_class": "NoSuchProcessor"}, "the installed transformers does not have"),
        ("processor_config.json", {"image_seq_len": "many"}, "Idefics3Processor cannot write a conversation with 1"),
    ],
)
def test_folders_that_cannot_be_used_say_why(
    file: str, given_settings: dict[str, Any], match: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(folder_of("idefics3"), tmp_path / "model", file, **given_settings)
    with pytest.raises(ConfigError, match=match) as caught:
        encoder_of(folder)
    assert caught.value.code == ("FB123" if file.startswith("pre") else "FB126")


def test_a_folder_that_names_no_processor_is_asked_by_its_model(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = changed(folder_of("idefics3"), tmp_path / "model", "processor_config.json", processor_class=None)
    assert type(encoder_of(folder).writer.processor).__name__ == "Idefics3Processor"
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="names no processor_class"):
        encoder_of(changed(folder, tmp_path / "other", "processor_config.json", image_seq_len=2))


def test_a_template_that_closes_no_turn_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("llava_onevision"), tmp_path / "model")
    (folder / "chat_template.jinja").write_text(LLAVA)
    with pytest.raises(ConfigError, match="begins an assistant's turn with 'ASSISTANT: '"):
        encoder_of(folder)


def test_a_template_that_writes_the_date_is_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("idefics3"), tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    with pytest.raises(ConfigError, match="asks for the date of the day"):
        encoder_of(folder)


def test_learning_through_the_newline_takes_the_token_behind_a_turn(folder_of: Callable[[str], Path]) -> None:
    coder = encoder_of(folder_of("smolvlm"), learn_through="newline")
    found = coder.encode(json.dumps(without("A cat.", 1)), SIZES[:1], sample_id="row-7")
    learnt = coder.writer.processor.tokenizer.decode(found["input_ids"][found["label_mask"] == 1])
    assert learnt == " A cat.<end_of_utterance>\n"


def test_an_image_processor_is_told_what_its_whole_processor_tells_it(folder_of: Callable[[str], Path]) -> None:
    assert image_options(folder_of("internvl"))["crop_to_patches"] is True
    assert image_options(folder_of("gemma3"))["do_pan_and_scan"] is False
    assert image_options(folder_of("pixtral"))["patch_size"] == 14
    assert image_options(folder_of("qwen2_vl")) == {}


@pytest.mark.parametrize(
    "failure", [ZeroDivisionError("float division by zero"), AttributeError("x"), RuntimeError("y")]
)
def test_an_image_for_which_the_processor_breaks_costs_its_row(
    folder_of: Callable[[str], Path], failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several classes divide by a side that a thin image has not after their resize."""
    coder = encoder_of(folder_of("gemma3"))
    resize = type(coder.writer.processor.image_processor._processor).resize

    def thin_breaks(self: Any, image: Any, *args: Any, **options: Any) -> Any:
        if 1 in image.shape[-2:]:
            raise failure
        return resize(self, image, *args, **options)

    monkeypatch.setattr(type(coder.writer.processor.image_processor._processor), "resize", thin_breaks)
    thin = canonical(talk("A cat.", images=[picture(0, width=2000, height=1)]))
    with pytest.raises(TextError, match=rf"row-7: .* refuses the conversation: {type(failure).__name__}") as caught:
        coder.encode(thin, [(2000, 1)], sample_id="row-7")
    assert caught.value.reason == "bad_conversation"
