"""A model's texts for the samples of a batch: greedy `generate` from the prompt that each sample was learnt behind.

A seq2seq model of no family was learnt behind nothing but its start token, and its own `generate` writes.

transformers' own `generate` of a Whisper finds out languages, cuts long audio and builds prompts from names. Here every
sample has its prompt already: language, task and earlier text are in the cached ids in front of the labels. So the
general `GenerationMixin.generate` does the writing, with these ids as the decoder's beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from forebay.steps.batch import IGNORED
from forebay.train.models.families import ModelFacts
from forebay.train.models.objective import FAILURES


class MuteError(Exception):
    """The own `generate` of a model of no family failed; the text says how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """The prompts of a batch, padded on the left: what is written then begins at one place."""

    ids: torch.Tensor
    """int64 [batch, longest prompt]."""
    mask: torch.Tensor
    """int64, 1 where a prompt is."""


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """The values that a model with an encoder has computed for a batch already.

    hidden: [batch, frames, width], the encoder's output. cache: the decoder's keys and values, of the audio and of all
    that it has read, the prompts first; None where none were kept.
    """

    hidden: torch.Tensor
    cache: Any = None


def prompts_of(ids: torch.Tensor, labels: torch.Tensor, *, labels_are_shifted: bool, pad_token_id: int) -> Prompts:
    """Returns what stands in front of the first target of each sample.

    ids, labels: int64 [batch, tokens], padded on the right, on the host. labels_are_shifted: `labels[:, t]` is the
    target of position t, so that position is still a part of the prompt.
    """
    lengths = (labels != IGNORED).int().argmax(1) + int(labels_are_shifted)
    width = int(lengths.max())
    places = torch.arange(width)[None] + (lengths - width)[:, None]
    mask = places >= 0
    return Prompts(ids=torch.where(mask, ids.gather(1, places.clamp(min=0)), pad_token_id), mask=mask.long())


@dataclass(frozen=True, kw_only=True)
class Generator:
    """Writes texts with one model, which is in evaluation mode and of which this is the bare module."""

    model: Any
    facts: ModelFacts
    end_ids: Sequence[int]
    """Each of them ends a text; the first fills up what is shorter than the longest text of a batch."""
    max_tokens: int | None
    """Tokens of a text at most; None: as many as the model has positions for, or its generation config says."""

    def write(
        self, inputs: Mapping[str, Any], prompts: Prompts | None, *, encoded: EncodedBatch | None
    ) -> list[tuple[list[int], bool]]:
        """Returns for each sample the ids that the model writes, without the end token, and whether it was cut short.

        inputs: the model's arguments for the batch, on its device. prompts: None for a model of no family. encoded: of
        a family with an encoder, from the pass of the loss, which had the same prompts in front of its targets; it is
        used up. Raises MuteError where the `generate` of a model of no family fails.
        """
        from transformers import GenerationMixin

        if prompts is not None:
            arguments = self._arguments(inputs, prompts, encoded)
            generate = partial(GenerationMixin.generate, self.model)
            return self._read(self._generated(generate, arguments, width=prompts.ids.shape[1]))
        own = {name: value for name, value in inputs.items() if name != "use_cache"}
        try:  # in front of the text stands the start token
            return self._read(self._generated(self.model.generate, own, width=1))
        except torch.OutOfMemoryError:
            raise
        except FAILURES as err:
            raise MuteError(f"{type(err).__name__}: {err}") from err

    def _generated(self, generate: Any, arguments: Mapping[str, Any], *, width: int) -> torch.Tensor:
        """Returns the ids behind the prompts, [batch, longest]."""
        ends: dict[str, Any] = {}
        if self.end_ids:
            ends = {"eos_token_id": list(self.end_ids), "pad_token_id": self.end_ids[0]}
        written: torch.Tensor = generate(
            **arguments,
            synced_gpus=False,  # each rank holds the whole model
            # Over what the model's generation config says, so that its own limits and sampling do not count.
            max_new_tokens=self._limit(width),
            max_length=None,
            min_length=0,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            temperature=1.0,
            top_p=1.0,
            top_k=50,
            return_dict_in_generate=False,
            use_cache=True,
            **ends,
        )
        return written[:, width:]

    def _read(self, ids: torch.Tensor) -> list[tuple[list[int], bool]]:
        return [self._until_end(row) for row in ids.tolist()]

    def _limit(self, width: int) -> int:
        room = self.facts.max_positions - width if self.facts.max_positions is not None else None
        wanted = self.max_tokens
        if wanted is None:
            wanted = self.model.generation_config.max_new_tokens or room
        if wanted is None:
            wanted = self.model.generation_config.max_length or 448
        return max(1, wanted if room is None else min(wanted, room))

    def _arguments(self, inputs: Mapping[str, Any], prompts: Prompts, encoded: EncodedBatch | None) -> dict[str, Any]:
        from transformers.modeling_outputs import BaseModelOutput

        device = next(self.model.parameters()).device
        ids, mask = prompts.ids.to(device), prompts.mask.to(device)
        if encoded is None:
            media = {name: value for name, value in inputs.items() if name.startswith("input_features")}
            return {"input_ids": ids, "attention_mask": mask, **media}
        arguments = {
            "decoder_input_ids": ids,
            "encoder_outputs": BaseModelOutput(last_hidden_state=encoded.hidden),
            # Of the audio, all of which counts; left out, transformers warns that it cannot guess it.
            "attention_mask": torch.ones(encoded.hidden.shape[:2], dtype=torch.long, device=device),
        }
        if not bool(prompts.mask.all()):
            return arguments | {"decoder_attention_mask": mask}
        if encoded.cache is None:
            return arguments
        # Keys and values of audio and prompt; the prompt's last token is read again, since it gives the first logits.
        encoded.cache.crop(ids.shape[1] - 1 - encoded.cache.get_seq_length())  # below 0: so many are taken away
        return arguments | {"decoder_attention_mask": mask, "past_key_values": encoded.cache}

    def _until_end(self, row: list[int]) -> tuple[list[int], bool]:
        ends = [place for place, token in enumerate(row) if token in self.end_ids]
        return (row[: ends[0]], False) if ends else (row, True)
