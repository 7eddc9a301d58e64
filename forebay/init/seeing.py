"""The sections of a config with images: packs of patches, or what an image processor gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.init import plan
from forebay.init.learning import classes_setting
from forebay.init.model import Model
from forebay.init.reads import NOUNS, WHAT
from forebay.init.toml import Section

if TYPE_CHECKING:
    from forebay.init.draft import Draft


def vision(made: Draft) -> list[Section]:
    """Returns `[vision]`, `[text]` and `[plan]`."""
    assert made.model is not None
    if made.found.prompt == "chat" and made.model.images is not None:
        return _packs(made, made.model)
    return _processed(made, made.model)


def _packs(made: Draft, model: Model) -> list[Section]:
    found, folder = made.found, made.relative(model.folder)
    assert model.images is not None
    images, text, packs = Section("vision"), Section("text"), Section("plan")
    images.add("processor", folder)
    text.add("tokenizer", folder)
    text.add("prompt", "chat", "the folder's chat template; what the assistant says is learnt")
    usual, longest = plan.conversation_tokens(found, model.images)
    packs.add("kind", "pack")
    length = plan.seq_len(found, model.images, max_positions=model.max_positions)
    packs.add("seq_len", length, f"tokens of a pack; a conversation has about {usual}, the longest about {longest}")
    if longest > length:
        made.said.append(f"conversations of more than {length} tokens are left out of packs, counted and listed")
    return [images, text, packs]


def _processed(made: Draft, model: Model) -> list[Section]:
    found, folder = made.found, made.relative(model.folder)
    images, text, batches = Section("vision"), Section("text"), Section("plan")
    images.add("processor", folder, "images are stored as the folder's image processor gives them")
    if found.prompt in ("chat", "plain"):
        text.add("tokenizer", folder)
    text.add("prompt", found.prompt, _why(made, model))
    if (classes := classes_setting(found, model)) is not None:
        text.add("classes", [*classes], "the model's, in the order of their numbers (id2label of its config.json)")
    if found.prompt == "chat":
        batches.add("k", plan.num_buckets(found), "buckets of like length, in tokens")
    batches.add("batch_size", plan.images_a_batch(found), f"{NOUNS[found.prompt]} a batch")
    if plan.is_few(found):
        batches.add("lockstep", 1, "a small set: no groups of batches of equal shape")
    return [images, text, batches]


def _why(made: Draft, model: Model) -> str:
    what = WHAT[made.found.prompt]
    if model.task is not None and model.task.name == made.found.prompt:
        return f"{what}: {model.task.why}"
    return what
