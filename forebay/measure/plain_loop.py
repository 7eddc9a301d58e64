"""The arm `hf`: transformers' Trainer, a DataLoader with workers, the extractor or processor in the collator.

Its collators: an extractor or processor of transformers, called on a batch; whether that agrees with the cache.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoFeatureExtractor,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    WhisperFeatureExtractor,
)

from forebay.config.tree import Config
from forebay.errors import ConfigError
from forebay.measure.compared_ways import ArmTask, Setup, places_in
from forebay.measure.machine import ArmTurn, BlockClock, Shapes, device_name, finish, release_memory, timed
from forebay.pretrained import from_folder
from forebay.steps.audio.extractor.extractor_step import Extractor
from forebay.steps.batch import IGNORED, fresh
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.whole import image_processor_of, whole_processor
from forebay.steps.step import Batch, Stored, TextBatch
from forebay.steps.table import text_step_of
from forebay.steps.text.caption import CaptionEncoder
from forebay.steps.text.chat.conversation import with_items
from forebay.store.source import SampleSource
from forebay.train.collate.collator import Collator
from forebay.train.collate.forms import DeclaredText
from forebay.train.loop.schedule import Schedule
from forebay.train.loop.trainable import adamw, new_model, set_learning_rate, set_passes, set_trainable
from forebay.train.models.model_folder import model_facts
from forebay.train.select import make_loader
from forebay.train.uncached.uncached_source import PlainSamples

logger = logging.getLogger(__name__)
_COMPARED = 8
"""Micro-batches of which the cache's and the processor's are compared."""
_NOT_OURS = (ValueError, TypeError, IndexError, KeyError, AttributeError, RuntimeError)
"""What processors raise for images that they do not take together."""


def sound_collator(config: Config, clips: PlainSamples) -> Collating:
    """Returns the collator of recordings: of the extractor that the config names, else of the model's own."""
    audio = clips.groups.recipe.audio
    if audio is not None and isinstance(audio.features, Extractor):
        return ExtractorCollator(audio.features, _text_of(clips))
    return PlainCollator(config, clips)


def _text_of(clips: PlainSamples) -> TextBatch:
    """Returns the form of the config's token ids."""
    step = text_step_of(clips.constants)
    assert step is not None
    made = step.batch(Stored("raw data", clips.constants, clips.fields))
    assert made is not None  # the model's check of the config saw to it
    return made


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
        # Clips are padded to the longest one and a mask says how long each is; Whisper takes 30 s.
        self._has_mask = not isinstance(self._extractor, WhisperFeatureExtractor)

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
            self._whole = _whole(self._folder, Path(recipe.text.folder or self._folder), self._image_processor)

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
        talks = [with_items(json.loads(sample["text"]), {"image": sample[self._decoded]}) for sample in samples]
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


Collating = PlainCollator | ExtractorCollator | ProcessorCollator


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
        folder, tokenizer=tokenizer, tokenizer_folder=tokenizer_folder, parts={"image": image_processor}
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
    form, ours = BatchForm.from_json(source.constants.of("image")["form"]), Collator(source)
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


Batches = list[list[list[int]]]
"""A block: by step, by micro-batch, the places of its samples in the data set."""


def work(task: ArmTask, parent: Connection) -> None:
    """Does the turns that the parent asks for, by their number; None ends them."""
    config = task.arm_config
    samples, data_s = timed(lambda: PlainSamples(config, list(task.ids.values())))
    collator, agrees, made_s = _collator(config, samples, task)
    data_s += made_s
    blocks, ids, frames = plain_blocks(task), list(task.ids.values()), [task.frames[index] for index in task.ids]
    acc = max(len(step) for block in blocks for step in block)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, grad_acc=acc))
    tried = _tried_workers(config, samples, collator, blocks[0])
    best = max(tried, key=lambda number: tried[number])
    logger.info("samples/s by DataLoader workers: %s; taken: %d", tried, best)
    plain = PlainTrainer(config, samples, collator, workers=best, num_steps=sum(map(len, blocks)))
    parent.send(Setup(data_s=data_s, model_s=plain.model_s, device=device_name(), workers=tried, agreement=agrees))

    def send(turn: ArmTurn) -> None:
        used = [place for batch in plain.batches for place in batch]
        turn.frames, turn.ids = sum(frames[place] for place in used), sorted(ids[place] for place in used)
        parent.send(turn)

    plain.run(lambda: blocks[parent.recv()], send)
    parent.recv()
    parent.send(finish(plain.seen, plain.ready))


def _collator(config: Config, samples: PlainSamples, task: ArmTask) -> tuple[Collating, dict[str, Any] | None, float]:
    """Returns the collator, how batches of the cache compare with what it makes where it says so, and its seconds."""
    if samples.groups.recipe.audio is not None:
        sound, made_s = timed(lambda: sound_collator(config, samples))
        return sound, None, made_s
    samples.write_texts()
    source = make_loader(config, dp_rank=0, dp_world_size=1).source
    collator, made_s = timed(lambda: ProcessorCollator(samples, source))
    numbers = {index: number for number, index in enumerate(task.ids)}
    batches = [[numbers[i] for i in batch] for block in task.blocks for step in block.steps for batch in step.batches]
    agrees = agreement(source, samples, collator, places=list(places_in(source, task.ids).values()), batches=batches)
    if not agrees["is_kept"]:
        logger.warning("batches of the cache are not those of the processor: %s", agrees["differences"])
    return collator, agrees, made_s


def plain_blocks(task: ArmTask) -> list[Batches]:
    """Returns the random batches of each block; the Trainer has as many micro-batches in every step."""
    places = {index: place for place, index in enumerate(task.ids)}
    steps = [step for block in task.blocks for step in block.steps]
    acc = round(sum(len(step.batches) for step in steps) / len(steps))
    # No micro-batch without a sample: the Trainer would go on into the next block.
    acc = max(1, min([acc, *(len(block.samples) // len(block.steps) for block in task.blocks)]))
    return [
        [[[places[i] for i in batch] for batch in step.batches] for step in block.steps]
        for block in task.random_blocks(grad_acc=acc)
    ]


class _Blocks:
    """The batches of all blocks, one after the other, as the Trainer's train_dataloader.

    A block is asked for when the Trainer wants its first batch. No worker prefetches beyond a block.
    """

    batch_size = None
    drop_last = False

    def __init__(self, plain: PlainTrainer, next_block: Callable[[], Batches], num_batches: int) -> None:
        self._plain, self._next_block, self._num_batches = plain, next_block, num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self._plain.begin(self._next_block())
            batches = iter(self._plain.loader)
            for _ in range(len(self._plain.batches)):
                batch, seconds = timed(partial(next, batches))
                self._plain.wait_s += seconds
                yield batch


class _Marks(TrainerCallback):  # type: ignore[misc]
    """Tells the clock of every step that ended."""

    def __init__(self, plain: PlainTrainer) -> None:
        self._plain = plain

    def on_step_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Called by the Trainer after the optimizer's step."""
        self._plain.step_done()


class PlainTrainer(Trainer):  # type: ignore[misc]
    """A Trainer over blocks, its DataLoader, and a clock at its data and its losses, of the block at hand."""

    def __init__(
        self, config: Config, samples: PlainSamples, collator: Collating, *, workers: int, num_steps: int
    ) -> None:
        """Loads the model. num_steps: of all blocks that it is to train on."""
        began, settings = time.perf_counter(), config.train
        self._settings, self._samples, self._collator, self._num_steps = settings, samples, collator, num_steps
        facts = model_facts(Path(str(settings.model)), config)
        self._is_asked = facts.own_loss is not None and facts.own_loss.is_asked
        model = new_model(config, facts)
        set_trainable(model, settings)
        set_passes(model, settings)
        self.batches: list[list[int]] = []
        """Those of the block at hand: the batch sampler, which is set before each epoch of the DataLoader."""
        self.loader: Any = DataLoader(
            samples,  # type: ignore[arg-type]  # has what a DataLoader asks of a data set
            batch_sampler=self.batches,
            collate_fn=collator,
            num_workers=workers,
            persistent_workers=workers > 0,
            multiprocessing_context="fork" if workers else None,
            pin_memory=torch.cuda.is_available(),
        )
        self.seen: dict[Shapes, list[int]] = {}
        """A micro-batch of each shape."""
        self._losses: list[torch.Tensor] = []
        self.wait_s = 0.0
        self.model_s = time.perf_counter() - began
        optimizer = adamw(model, settings)
        set_learning_rate(optimizer, settings.learning_rate)
        factor = Schedule.of(settings, num_steps=int(settings.max_steps or num_steps)).factor
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda before: factor(before + 1))
        super().__init__(model=model, args=_arguments(config, num_steps), optimizers=(optimizer, schedule))
        self.add_callback(_Marks(self))

    def run(self, next_block: Callable[[], Batches], done: Callable[[ArmTurn], None]) -> None:
        """Trains on the blocks that `next_block` gives. done: called after each block, whose batches are `batches`."""
        self._done, self._blocks = done, _Blocks(self, next_block, self._num_steps * self._settings.grad_acc)
        self.train()

    def get_train_dataloader(self) -> Any:
        """Returns the blocks; batches are on the host, and `_prepare_inputs` copies them."""
        return self._blocks

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """Returns the micro-batches of the next step, and counts them and the wait for them."""
        found = super().get_batch_samples(*arguments, **options)
        self.clock.got_batches(found[0], wait_s=self.wait_s, bucket=-1)
        self.wait_s = 0.0
        self.clock.turn.room += sum(map(self._collator.room, found[0]))
        return found

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Returns the arguments of the model; some give a loss only where they are asked for one."""
        return {**super()._prepare_inputs(inputs), **({"return_loss": True} if self._is_asked else {})}

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Returns the loss of a micro-batch, which is kept."""
        loss = super().training_step(*arguments, **options)
        self._losses.append(loss)
        return loss

    def begin(self, block: Batches) -> None:
        """Starts the clock of a block whose data has not been asked for."""
        self._steps_left = len(block)
        self.batches[:] = [batch for step in block for batch in step]
        self.clock = BlockClock().__enter__()

    def step_done(self) -> None:
        """Counts a step by the losses of its micro-batches, which the Trainer has scaled to add up."""
        loss = torch.stack([loss.float() for loss in self._losses]).sum()
        self._losses = []
        self.clock.step_done(loss, bucket=-1, is_skipped=bool(self.accelerator.optimizer_step_was_skipped))
        self._steps_left -= 1
        if not self._steps_left:
            self.clock.__exit__()
            release_memory()
            self.seen |= zip(self.clock.turn.shapes, self.batches, strict=True)
            self._done(self.clock.turn)

    def ready(self, batch: list[int]) -> Callable[[], Any]:
        """Returns the passes of one micro-batch, which is collated."""
        return partial(self.training_step, self.model, self._collator([self._samples[place] for place in batch]))


def _arguments(config: Config, num_steps: int) -> Any:
    settings = config.train
    return TrainingArguments(
        output_dir=settings.output_dir,
        max_steps=num_steps,
        gradient_accumulation_steps=settings.grad_acc,
        max_grad_norm=settings.max_grad_norm,
        bf16=settings.mixed_precision == "bf16",
        fp16=settings.mixed_precision == "fp16",
        use_cpu=not torch.cuda.is_available(),
        seed=config.loader.seed % 2**32,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,  # would wait for the device in every step
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def _tried_workers(config: Config, samples: PlainSamples, collator: Collating, block: Batches) -> dict[int, float]:
    """Returns samples/s of the first block by numbers of workers: none, two, as many as there are cores.

    Each number trains a model of its own, which is then dropped.
    """
    tried: dict[int, float] = {}
    for number in sorted({0, 2, min(len(os.sched_getaffinity(0)), 32)}):
        plain = PlainTrainer(config, samples, collator, workers=number, num_steps=len(block))
        plain.run(lambda: block, lambda _: None)
        tried[number] = sum(len(batch) for step in block for batch in step) / plain.clock.turn.seconds
        del plain
        gc.collect()  # a Trainer and its callbacks name each other
        release_memory()
    return tried
