"""What one evaluation of one set found."""

from __future__ import annotations

from dataclasses import dataclass, field

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
