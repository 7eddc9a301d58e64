"""One evaluation of one set: a pass over its batches on every rank, and the figures of all ranks together."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forebay.steps.batch import IGNORED
from forebay.steps.text.transcript import TextEncoder
from forebay.train.collate.patches import fields_of, pixel_dtype, to_model_inputs
from forebay.train.device import Batch
from forebay.train.evaluation.generate import Generator, prompts_of
from forebay.train.evaluation.rates import Errors, Written, by_language, count_errors, summed, worst
from forebay.train.evaluation.repetition import repeats_itself
from forebay.train.evaluation.result import EvalResult
from forebay.train.evaluation.sets import EvalSet
from forebay.train.evaluation.texts import Normalisation
from forebay.train.loop.learner import count_targets, summed_loss
from forebay.train.models.folder import check_batch
from forebay.train.models.table import ModelFacts

_logger = logging.getLogger(__name__)

Gather = Callable[[Any], list[Any]]
"""Returns what every rank gave, in the order of ranks, on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """What one rank has seen of a set."""

    losses: list[tuple[int, float, int]] = field(default_factory=list)
    """Of each batch its first sample, the sum of its losses, and its targets."""
    written: list[Written] = field(default_factory=list)
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of an evaluation, and its worst samples."""

    result: EvalResult
    worst: list[tuple[Written, Errors]]


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates sets with one model. model: the bare module; autocast: the precision of its forward passes."""

    model: Any
    facts: ModelFacts
    device: torch.device
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    encoder: TextEncoder | None
    """Reads and writes the texts; None where no set is speech."""
    normalizers: Mapping[Normalisation, Callable[[str], str]]
    repetition_limit: float
    pixels: str
    """`loader.pixels` of the run, whose dtype the patches of images get."""
    gather: Gather
    is_sharded: bool = False

    def evaluate(self, each: EvalSet, *, step: int) -> Outcome:
        """Returns the outcome of one set, the same on every rank but for its seconds; the model's modes come back.

        The loss is the sum over all target tokens by their number, batch by batch in the set's order, so it does not
        depend on the number of ranks. Texts are those of whole planned batches, for the same reason.
        """
        started_s = time.perf_counter()
        with evaluating(self.model), torch.no_grad(), self.autocast():
            own = self._pass(each)
        passes: list[Pass] = self.gather(own)
        return self._outcome(each, passes, step=step, started_s=started_s)

    def _pass(self, each: EvalSet) -> Pass:
        found: Pass = Pass()
        loader, seen, losses = each.loader, 0, []
        generator = self._generator(each) if each.writes else None
        with contextlib.closing(iter(loader)) as batches:  # type: ignore[type-var]
            for batch in batches:
                indices, weight = loader.indices, loader.weight
                loss, encoded, inputs = self._loss(batch, loader)
                fields = fields_of(batch)
                if weight:
                    count = count_targets(fields["labels"], labels_are_shifted=self.facts.labels_are_shifted)
                    losses.append((min(indices), loss, count))
                    seen += len(indices)
                if generator is None:
                    continue
                written = generator.write(inputs, self._prompts(fields), encoded=encoded)
                if weight:
                    found.written.extend(self._written(each, indices, fields["labels"], written))
        found.losses.extend((first, float(loss), count) for first, loss, count in losses)
        return Pass(losses=found.losses, written=found.written, num_samples=seen)

    def _loss(self, batch: Batch, loader: Any) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any]]:
        """Returns the summed loss, the encoder's output where the model has an encoder, and the model's arguments."""
        check_batch(self.facts, fields_of(batch))
        dtype = pixel_dtype(self.pixels)
        inputs = to_model_inputs(batch, loader.source.constants, device=self.device, dtype=dtype)
        labels = inputs.pop("labels")
        output = self.model(**inputs)
        loss = summed_loss(output.logits, labels, labels_are_shifted=self.facts.labels_are_shifted)
        return loss, getattr(output, "encoder_last_hidden_state", None), inputs

    def _prompts(self, fields: Any) -> Any:
        return prompts_of(
            fields[self.facts.ids_field],
            fields["labels"],
            labels_are_shifted=self.facts.labels_are_shifted,
            pad_token_id=self._end_ids()[0],
        )

    def _generator(self, each: EvalSet) -> Generator:
        return Generator(
            model=self.model,
            facts=self.facts,
            end_ids=self._end_ids(),
            max_tokens=each.settings.generate_max_tokens,
            synced=self.is_sharded,
        )

    def _end_ids(self) -> list[int]:
        """Returns what ends a text: the token that ends the labels, and the model's own."""
        known = self.model.generation_config.eos_token_id
        own = known if isinstance(known, list) else [] if known is None else [known]
        learnt = self.encoder.end_id if self.encoder is not None else None
        return list(dict.fromkeys([*([] if learnt is None else [learnt]), *own]))

    def _written(
        self, each: EvalSet, indices: Sequence[int], labels: torch.Tensor, texts: list[tuple[list[int], bool]]
    ) -> Iterator[Written]:
        assert self.encoder is not None
        normal = self.normalizers[each.settings.text]
        for index, row, (ids, is_cut) in zip(indices, labels.tolist(), texts, strict=True):
            sample_id, text = each.loader.source.sample_id(index), each.texts[index]
            learnt = [token for token in row if token != IGNORED]
            reference = (
                self.encoder.decode(learnt) if text is None else self.encoder.transcript(text, sample_id=sample_id)
            )
            hypothesis = self.encoder.decode(ids)
            yield Written(
                index=index,
                sample_id=sample_id,
                language=each.languages[index],
                reference=normal(reference),
                hypothesis=normal(hypothesis),
                is_astray=is_cut or repeats_itself(hypothesis),
            )

    def _outcome(self, each: EvalSet, passes: list[Pass], *, step: int, started_s: float) -> Outcome:
        written = sorted((one for own in passes for one in own.written), key=lambda one: one.index)
        losses = sorted(loss for own in passes for loss in own.losses)
        errors = count_errors(written)
        total = summed(errors)
        astray = sum(one.is_astray for one in written) / len(written) if written else 0.0
        _tell_unreferenced(each, errors)
        result = EvalResult(
            name=each.settings.name,
            step=step,
            loss=math.fsum(loss for _, loss, _ in losses) / max(sum(count for _, _, count in losses), 1),
            wer=total.wer,
            cer=total.cer,
            num_samples=sum(own.num_samples for own in passes),
            elapsed_s=round(time.perf_counter() - started_s, 3),
            text=each.settings.text,
            repetition_share=astray,
            languages=by_language(written, errors),
            trap=trap(total.wer, astray, limit=self.repetition_limit),
        )
        return Outcome(result=result, worst=worst(written, errors))


def _tell_unreferenced(each: EvalSet, errors: Sequence[Errors]) -> None:
    empty = [own for own in errors if not own.words]
    if empty:
        _logger.info(
            "%s: %d samples have no reference words; the %d words that the model writes for them count as insertions",
            each.settings.name,
            len(empty),
            sum(own.word_errors for own in empty),
        )


def trap(wer: float | None, astray: float, *, limit: float) -> str | None:
    """Returns why an evaluation cannot be the best, with what to do; None where it can."""
    reasons = []
    if astray > limit:
        reasons.append(
            f"{100 * astray:.1f} % of the texts repeat themselves or are as long as the model may write, more than "
            f"train.repetition_limit = {limit:g}"
        )
    if wer is not None and wer > 1:
        reasons.append(f"WER is {100 * wer:.2f} %, above 100 %")
    if not reasons:
        return None
    return (
        f"{' and '.join(reasons)}: the model has not learnt to stop, or has unlearnt it; train on if it is young, else "
        "lower train.learning_rate, train fewer epochs (take an earlier checkpoint), and see whether text.prompt and "
        "text.tokenizer are the model's"
    )


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Makes every module evaluate, and then be in the mode that it was in, also where only some of them trained.

    A compiled model is not compiled meanwhile: each length of a text would be a shape of its own.
    """
    modes = [(module, module.training) for module in model.modules()]
    compiled = model._compiled_call_impl
    model.eval()
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled
        for module, is_training in modes:
            module.training = is_training
