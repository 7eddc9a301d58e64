"""One evaluation of one set: a pass over its batches on every rank, and the figures of all ranks together.

What one evaluation of one set found.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from forebay.steps.batch import IGNORED
from forebay.steps.text.transcript import TextEncoder
from forebay.train.collate.patches import fields_of, pixel_dtype, to_model_inputs
from forebay.train.device import Batch
from forebay.train.evaluation.generate import EncodedBatch, Generator, MuteError, prompts_of
from forebay.train.evaluation.rates import (
    ClassCounts,
    Errors,
    Normalisation,
    WrittenTexts,
    by_language,
    class_rates,
    count_errors,
    counted,
    repeats_itself,
    summed,
    worst,
)
from forebay.train.evaluation.sets import EvalSet
from forebay.train.models import ctc
from forebay.train.models.families import ModelFacts
from forebay.train.models.model_folder import check_batch
from forebay.train.models.objective import Objective, Passed
from forebay.visible import printable

HIGHER_IS_BETTER = ("accuracy", "f1")
"""The figures of a result of which the highest is the best; of all others it is the lowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """One evaluation of one set; a line of `<run>/eval.jsonl`."""

    name: str
    """The set, as `[[train.eval]]` calls it."""
    step: int
    """Optimizer steps that the model has had."""
    loss: float
    """Mean over all target tokens of the set, in nats."""
    wer: float | None
    """Word errors by words of the references, 1.0 for 100 %; None where nothing is written (no speech)."""
    cer: float | None
    """The same for characters."""
    num_samples: int
    elapsed_s: float
    text: str
    """The normalisation of the texts: `none`, `basic` or `whisper`."""
    repetition_share: float = 0.0
    """Share of texts that repeat themselves, or are as long as the model may write."""
    languages: dict[str, dict[str, float]] = field(default_factory=dict)
    """By language `wer`, `cer` and `samples`; empty where no language is known."""
    accuracy: float | None = None
    """Share of samples whose likeliest class is theirs; None for a model without classes, and for several a sample."""
    f1: float | None = None
    """Of models of classes: F1, the mean over the classes that the model says or the samples have."""
    f1_micro: float | None = None
    """The same of all classes together; with one class a sample it is the accuracy."""
    trap: str | None = None
    """Why this result cannot be the best, with the remedy; None where it can."""


_logger = logging.getLogger(__name__)
Gather = Callable[[Any], list[Any]]
"""Returns what every rank gave, in the order of ranks, on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """The part of a set that one rank has seen."""

    losses: list[tuple[int, float, int]] = field(default_factory=list)
    """Of each batch its first sample, the sum of its losses, and its targets."""
    written: list[WrittenTexts] = field(default_factory=list)
    classes: list[ClassCounts] = field(default_factory=list)
    num_samples: int = 0
    mute: str | None = None
    """Why the model writes nothing, where its own `generate` failed."""
    unread: list[str] = field(default_factory=list)
    """Why references could not be made: these samples count in no rate."""


class EvaluationError(Exception):
    """A set that could not be evaluated, on every rank; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationOutcome:
    """The result of an evaluation, and its worst samples."""

    result: EvalResult
    worst: list[tuple[WrittenTexts, Errors]]


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates sets with one model. model: the bare module; autocast: the precision of its forward passes.

    Every rank holds the whole model meanwhile, see `held_whole`: no pass waits for another rank, so one may fail alone.
    """

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
    objective: Objective
    mute: list[str] = field(default_factory=list)
    """Why the model writes nothing: of an earlier evaluation, too; filled here."""

    def evaluate(self, each: EvalSet, *, step: int) -> EvaluationOutcome:
        """Returns the outcome of one set, the same on every rank but for its seconds; the model's modes come back.

        The loss is the sum over all target tokens by their number, batch by batch in the set's order, so it does not
        depend on the number of ranks. Texts are those of whole planned batches, for the same reason.
        Raises EvaluationError on all ranks where one fails, whatever it is that failed.
        """
        started_s = time.perf_counter()
        try:
            with evaluating(self.model), torch.no_grad(), self.autocast():
                own: Pass | str = self._pass(each)
        except Exception as err:  # noqa: BLE001  a model may raise anything
            own = _why(err)
        passes: list[Pass | str] = self.gather(own)
        for found in passes:
            if isinstance(found, str):
                raise EvaluationError(found)
        try:
            return self._outcome(each, cast(list[Pass], passes), step=step, started_s=started_s)
        except Exception as err:  # alike on all ranks
            raise EvaluationError(_why(err)) from err

    def _pass(self, each: EvalSet) -> Pass:
        written: list[WrittenTexts] = []
        classes: list[ClassCounts] = []
        unread: list[str] = []
        loader, seen, losses, mute = each.loader, 0, [], self.mute[0] if self.mute else None
        with contextlib.closing(iter(loader)) as batches:  # type: ignore[type-var]
            for pair in batches:
                batch, ids = cast(tuple[Batch, list[str]], pair)
                indices, weight = loader.indices, loader.weight
                inputs, passed = self._passed(batch, loader, keeps=each.writes)
                fields = fields_of(batch)
                if weight:
                    losses.append((min(indices), passed.loss, self.objective.units(fields)))
                    seen += len(indices)
                    if self.facts.num_labels is not None and "labels" in fields:
                        classes.append(counted(passed.output.logits, fields["labels"]))
                if not each.writes or mute is not None:
                    continue
                try:
                    texts = self._texts(each, inputs, fields, passed.output)
                except MuteError as err:
                    mute = str(err)
                    continue
                if weight:
                    samples = zip(indices, ids, fields["labels"].tolist(), texts, strict=True)
                    written.extend(self._written(each, samples, unread))
        sums = [(first, float(loss), count) for first, loss, count in losses]
        return Pass(losses=sums, written=written, classes=classes, num_samples=seen, mute=mute, unread=unread)

    def _texts(
        self, each: EvalSet, inputs: dict[str, Any], fields: Mapping[str, Any], output: Any
    ) -> list[tuple[list[int], bool]]:
        """Returns the ids that the model writes for each sample, and whether a text was cut short."""
        if self.facts.blank_id is not None:
            frames = ctc.num_frames(self.facts, self.model, inputs).clamp(max=output.logits.shape[1])
            return [(ids, False) for ids in ctc.greedy(output.logits, frames, blank_id=self.facts.blank_id)]
        if self.facts.generates:
            return self._generator(each).write(inputs, None, encoded=None)
        return self._generator(each).write(inputs, self._prompts(fields), encoded=self._encoded(output))

    def _passed(self, batch: Batch, loader: Any, *, keeps: bool) -> tuple[dict[str, Any], Passed]:
        """Returns the model's arguments without the labels, and what came of them: the summed loss, and the output.

        keeps: whether texts are written next, so that what an encoder computed is kept for them.
        """
        check_batch(self.facts, fields_of(batch))
        inputs = to_model_inputs(batch, loader.source.constants, device=self.device, dtype=pixel_dtype(self.pixels))
        options = {"use_cache": True} if keeps and self.facts.labels_are_shifted else {}
        passed = self.objective(self.model, inputs, units=self.objective.units(fields_of(batch)), **options)
        return {name: value for name, value in inputs.items() if name != "labels"}, passed

    def _encoded(self, output: Any) -> EncodedBatch | None:
        """Returns what the model's encoder made of the audio, if it has one."""
        has_encoder = self.facts.labels_are_shifted
        return EncodedBatch(output.encoder_last_hidden_state, output.past_key_values) if has_encoder else None

    def _prompts(self, fields: Any) -> Any:
        return prompts_of(
            fields[self.facts.ids_field],
            fields["labels"],
            labels_are_shifted=self.facts.labels_are_shifted,
            pad_token_id=self._end_ids()[0],
        )

    def _generator(self, each: EvalSet) -> Generator:
        return Generator(
            model=self.model, facts=self.facts, end_ids=self._end_ids(), max_tokens=each.settings.generate_max_tokens
        )

    def _end_ids(self) -> list[int]:
        """Returns what ends a text: the token that ends the labels, and the model's own."""
        known = self.model.generation_config.eos_token_id
        own = known if isinstance(known, list) else [] if known is None else [known]
        learnt = self.encoder.vocabulary.eos_token_id if self.encoder is not None else None
        return list(dict.fromkeys([*([] if learnt is None else [learnt]), *own]))

    def _written(
        self, each: EvalSet, samples: Iterable[tuple[int, str, list[int], tuple[list[int], bool]]], unread: list[str]
    ) -> Iterator[WrittenTexts]:
        """Yields what is compared of samples: index, id, labels, and the ids that the model writes.

        The labels alone say what a sample's text became on the way to the model, whatever its language.
        """
        assert self.encoder is not None
        normal = self.normalizers[each.settings.text]
        for index, sample_id, labels, (ids, is_cut) in samples:
            hypothesis = self.encoder.decode(ids)
            try:
                reference = normal(self.encoder.decode([token for token in labels if token != IGNORED]))
            except Exception as err:  # noqa: BLE001  a normaliser may raise anything
                unread.append(f"{sample_id}: {_why(err)}")
                continue
            yield WrittenTexts(
                index=index,
                sample_id=sample_id,
                language=each.languages[index],
                reference=reference,
                hypothesis=_tried(normal, hypothesis),
                is_astray=is_cut or repeats_itself(hypothesis),
            )

    def _outcome(self, each: EvalSet, passes: list[Pass], *, step: int, started_s: float) -> EvaluationOutcome:
        written = self._all_written(each, passes)
        losses = sorted(loss for own in passes for loss in own.losses)
        errors = count_errors(written)
        total = summed(errors)
        astray = sum(one.is_astray for one in written) / len(written) if written else 0.0
        _tell_unreferenced(each, errors, [why for own in passes for why in own.unread])
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
            **asdict(class_rates(counts for own in passes for counts in own.classes)),
            trap=trap(total.wer, astray, limit=self.repetition_limit),
        )
        return EvaluationOutcome(result=result, worst=worst(written, errors))

    def _all_written(self, each: EvalSet, passes: list[Pass]) -> list[WrittenTexts]:
        """Returns the texts of all ranks in the order of the samples; none where a rank could not write."""
        reasons = [own.mute for own in passes if own.mute is not None]
        if not reasons:
            return sorted((one for own in passes for one in own.written), key=lambda one: one.index)
        if not self.mute:
            self.mute.append(reasons[0])
            _logger.warning(
                "%s: no WER, since `generate` of %s failed (%s); the sets are evaluated by their loss alone. Mend "
                "generation_config.json or config.json there (decoder_start_token_id, eos_token_id)",
                *(printable(each.settings.name), self.facts.who, printable(reasons[0])),
            )
        return []


def _why(err: Exception) -> str:
    _logger.debug("an evaluation failed", exc_info=err)
    return f"{type(err).__name__}: {err}"


def _tried(normal: Callable[[str], str], text: str) -> str:
    """Returns a text normalised, or as it is where that fails: whatever a model writes, it counts."""
    try:
        return normal(text)
    except Exception:  # noqa: BLE001  a normaliser may raise anything
        return text.strip()


def _tell_unreferenced(each: EvalSet, errors: Sequence[Errors], unread: Sequence[str]) -> None:
    if unread:
        _logger.warning(
            "%s: %d samples have no reference and count in no rate; the first: %s",
            *(printable(each.settings.name), len(unread), printable(unread[0])),
        )
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
    compiled = [(module, module._compiled_call_impl) for module in model.modules()]
    model.eval()
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for module, is_training in modes:
            module.training = is_training
