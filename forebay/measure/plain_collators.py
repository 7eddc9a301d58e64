"""The collators of the arm `hf`: an extractor or processor of transformers, called on a batch; whether it agrees."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperFeatureExtractor

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.pretrained import from_folder
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.batch import IGNORED, fresh
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.whole import image_processor_of, whole_processor
from forebay.steps.step import Batch, Stored, TextBatch
from forebay.steps.table import text_step
from forebay.steps.text.caption import CaptionEncoder
from forebay.steps.text.chat.conversation import with_images
from forebay.steps.text.transcript import Transcript
from forebay.store.source import SampleSource
from forebay.train.collate.collator import Collator
from forebay.train.collate.forms import DeclaredText
from forebay.train.uncached.plain import PlainSamples

_COMPARED = 8
"""Micro-batches of which the cache's and the processor's are compared."""
_NOT_OURS = (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError)
"""What processors raise for images that they do not take together."""


class Collating(Protocol):
    """Samples of a plain data set to a batch."""

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Returns what the model takes."""
        ...

    def room(self, batch: Mapping[str, Any]) -> int:
        """Returns the frames or tokens that a batch has room for."""
        ...


def sound_collator(config: Config, clips: PlainSamples) -> Collating:
    """Returns the collator of recordings: of the extractor that the config names, else of the model's own."""
    audio = clips.groups.recipe.audio
    if audio is not None and isinstance(audio.features, Extractor):
        return ExtractorCollator(audio.features, _text_of(clips))
    return PlainCollator(config, clips)


def _text_of(clips: PlainSamples) -> TextBatch:
    """Returns the form of the config's token ids."""
    step = text_step(str(clips.constants["prompt"]))
    assert issubclass(step, Transcript)  # the model's check of the config saw to it
    return step.batch(Stored("raw data", clips.constants, clips.fields))


class PlainCollator:
    """Clips to a batch as usual: the reference extractor on the list of waveforms, labels padded with -100.

    Token ids are those of the config's prompt, so that losses are of the same targets.
    """

    def __init__(self, config: Config, clips: PlainSamples) -> None:
        folder = Path(str(config.train.model))
        try:
            self._extractor = from_folder(AutoFeatureExtractor, folder)
        except (OSError, ValueError) as err:
            raise ConfigError(
                f"--against hf needs the extractor's preprocessor_config.json in {folder} (train.model): {err}; "
                "copy it there, or leave hf out"
            ) from err
        self._rate = int(clips.constants["sample_rate_hz"])
        self._text = _text_of(clips)

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Returns what the model takes."""
        audio = self._extractor(
            [sample["waveform"] for sample in samples],
            sampling_rate=self._rate,
            return_tensors="pt",
            padding=True if self._has_mask else "max_length",
            return_attention_mask=self._has_mask,
        )
        features: Batch = {"input_features": audio["input_features"]}
        if self._has_mask:
            features["input_features_mask"] = mask = audio["attention_mask"]
            # Prompts with a token for each piece of audio count those of the extractor's own mask.
            lengths = mask.sum(dim=1).tolist()
            samples = [
                {**sample, "input_features": np.empty((length, 0), np.float32)}
                for sample, length in zip(samples, lengths, strict=True)
            ]
        return features | self._text(samples, padding_side="right", allocate=fresh)

    def room(self, batch: Mapping[str, Any]) -> int:
        """Returns the frames that a batch has room for."""
        features = batch["input_features"]
        return int(features.shape[0] * features.shape[-1])

    @property
    def _has_mask(self) -> bool:
        """Whether clips are padded to the longest one and a mask says how long each is; Whisper takes 30 s."""
        return not isinstance(self._extractor, WhisperFeatureExtractor)


class ExtractorCollator:
    """Clips to a batch as the extractor's users make it: all that it gives of them, by its own names."""

    def __init__(self, step: Extractor, text: TextBatch) -> None:
        """Takes the config's step, and the form of its token ids. Raises ConfigError where the probe finds a fault."""
        self._step, self._text, self._main = step, text, step.batch_form().main

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        """Returns what the model takes."""
        made = self._step.own_batch([sample["waveform"] for sample in samples])
        features = {name: torch.from_numpy(array) for name, array in made.items()}
        return features | self._text(samples, padding_side="right", allocate=fresh)

    def room(self, batch: Mapping[str, Any]) -> int:
        """Returns the frames that a batch has room for."""
        shape = batch[self._main.name].shape
        axis = self._main.grows[0] if self._main.grows else 0
        return int(shape[0] * (shape[axis + 1] if len(shape) > 1 else 1))


class ProcessorCollator:
    """Images and texts to a batch as usual: the model's processor on the list of them, labels padded with -100.

    What of a conversation is learnt, and the numbers of classes, are those of the config, so that losses are of the
    same targets.
    """

    def __init__(self, pictures: PlainSamples, source: SampleSource) -> None:
        """source: the cache's samples, whose constants say which fields a batch has."""
        (group,), recipe = pictures.groups.items, pictures.groups.recipe
        assert recipe.image is not None
        self._folder, self._decoded = Path(recipe.image.folder), group.decoded_name
        self._encoder = pictures.encoder
        self._image_processor = image_processor_of(self._folder)
        stored = Stored("the cache", source.constants, source.fields)
        self._text = DeclaredText.of(stored) if "text_form" in stored.constants else None
        self._kept = _names(source.constants)
        self._whole: Any = None
        if source.constants.get("prompt") == "chat":
            tokenizer = Path(recipe.text.folder or self._folder)
            self._whole = _whole(self._folder, tokenizer, self._image_processor)

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """Returns what the model takes. Raises ConfigError where the processor does not take the samples together."""
        try:
            if self._whole is not None:
                return self._talks(samples)
            images = [image for sample in samples for image in sample[self._decoded]]
            made = self._taken(self._image_processor(images, return_tensors="pt"))
        except _NOT_OURS as err:
            raise ConfigError(
                f"--against hf: {type(self._image_processor).__name__} of {self._folder} does not take "
                f"{len(samples)} samples together: {err!r:.300}; set plan.batch_size = 1, or leave hf out"
            ) from err
        return made | self._beside(samples)

    def room(self, batch: Mapping[str, Any]) -> int:
        """Returns the tokens that a batch has room for; 0 of images without texts."""
        return int(batch["input_ids"].numel()) if "input_ids" in batch else 0

    def _taken(self, made: Mapping[str, Any]) -> Batch:
        return {name: torch.as_tensor(value) for name, value in made.items() if name in self._kept}

    def _talks(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        talks = [with_images(json.loads(sample["text"]), sample[self._decoded]) for sample in samples]
        made = self._whole.apply_chat_template(
            talks, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs={"padding": True}
        )
        batch = self._taken(made)
        ids = batch["input_ids"]
        labels = torch.full_like(ids, IGNORED)
        is_left = self._whole.tokenizer.padding_side == "left"
        for row, sample in enumerate(samples):
            mask = torch.from_numpy(sample["label_mask"].astype(bool))
            place = slice(ids.shape[1] - len(mask), None) if is_left else slice(len(mask))
            labels[row, place] = torch.where(mask, ids[row, place], IGNORED)
        return batch | {"labels": labels}

    def _beside(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        if isinstance(self._encoder, CaptionEncoder):
            made = self._encoder.together([sample["text"] for sample in samples])
            return {name: torch.tensor(rows) for name, rows in made.items()}
        return {} if self._text is None else self._text(samples, padding_side="right", allocate=fresh)


def _names(constants: Mapping[str, Any]) -> frozenset[str]:
    """Returns the fields of batches: of what a processor gives, a cache leaves out what no model takes."""
    names = {field["name"] for field in constants["form"]["fields"]}
    outputs = constants.get("image_outputs")
    if isinstance(outputs, list):
        names &= {*outputs}
    return frozenset(names | {field["name"] for field in constants.get("text_form", {"fields": []})["fields"]})


def _whole(folder: Path, tokenizer_folder: Path, image_processor: Any) -> Any:
    tokenizer = from_folder(AutoTokenizer, tokenizer_folder)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return whole_processor(
        folder, tokenizer=tokenizer, tokenizer_folder=tokenizer_folder, image_processor=image_processor
    )


def agreement(
    source: SampleSource,
    pictures: PlainSamples,
    collator: ProcessorCollator,
    *,
    places: Sequence[int],
    batches: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Returns how the first batches of a cache compare with the processor's own.

    places: of the samples of `pictures` in the source. batches: places in `pictures`. The document has `batches`,
    `samples`, `promise`, `differences` (by field the largest; null where shapes or names differ) and `is_kept`.
    """
    form, ours = BatchForm.from_json(source.constants["form"]), Collator(source)
    if form.promise.kind == "alone":
        batches = [[place] for batch in batches for place in batch]
    chosen = list(batches[:_COMPARED])
    differences: dict[str, float | None] = {}
    for batch in chosen:
        own = ours([source.read(places[place]) for place in batch])
        theirs = collator([pictures[place] for place in batch])
        for name in sorted(own.keys() | theirs.keys()):
            found = _difference(own.get(name), theirs.get(name))
            known = differences.get(name, 0.0)
            differences[name] = None if found is None or known is None else max(found, known)
    limit = form.promise.limit if form.promise.kind == "within" else 0.0
    return {
        "batches": len(chosen),
        "samples": sum(map(len, chosen)),
        "promise": str(form.promise),
        "differences": differences,
        "is_kept": all(value is not None and value <= limit for value in differences.values()),
    }


def _difference(ours: Any, theirs: Any) -> float | None:
    """Returns the largest difference between two tensors; None where one is missing, or of another shape or dtype."""
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return None
    if torch.equal(ours, theirs):
        return 0.0
    return float((ours.double() - theirs.double()).abs().max())
