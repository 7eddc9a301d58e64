"""The loss of a micro-batch: the sum over its targets for the families of the table, else the model's own loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from forebay.errors import CacheMismatchError
from forebay.steps.batch import IGNORED
from forebay.train.models.arguments import OTHER_MODEL, accepted, described, watched
from forebay.train.models.table import ModelFacts, OwnLoss

FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
"""What models raise for arguments that they cannot take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """What came of a forward pass: the loss, summed over the units of the batch, and the model's whole output."""

    loss: torch.Tensor
    output: Any


@dataclass(frozen=True, slots=True)
class Objective:
    """What a model learns: how many units a batch has, and their summed loss. A step's loss is the sum by the units."""

    facts: ModelFacts
    _tried: set[frozenset[str]] = field(default_factory=set)
    """The names of batches that the model has taken."""

    def units(self, batch: Mapping[str, Any]) -> int:
        """Returns how many units a batch of the loader has: target tokens, or samples. A loss is a mean over them."""
        own = self.facts.own_loss
        if own is None:
            return count_targets(batch["labels"], labels_are_shifted=self.facts.labels_are_shifted)
        return count_units(own, batch)

    def __call__(self, model: Any, inputs: Mapping[str, Any], *, units: int | None = None, **options: Any) -> Passed:
        """Returns what came of a pass on the arguments of a batch, `labels` among them where the batch has some.

        units: of the batch, where somebody has counted them on the host. options: further arguments of the model.
        Raises CacheMismatchError, with names and shapes, where the model cannot take the batch or gives no loss.
        """
        own, arguments = self.facts.own_loss, dict(inputs)
        if own is None:
            labels = arguments.pop("labels")
            output = model(**{**arguments, **options})
            loss = summed_loss(output.logits, labels, labels_are_shifted=self.facts.labels_are_shifted)
            return Passed(loss=loss, output=output)
        output = self._called(model, self._arguments(arguments, own, options))
        return Passed(loss=self._own(own, output, units=self.units(inputs) if units is None else units), output=output)

    def _arguments(self, inputs: dict[str, Any], own: OwnLoss, options: Mapping[str, Any]) -> dict[str, Any]:
        names = accepted(self.facts.model_class).names
        more = {"return_loss": True} if own.is_asked else {}
        inputs |= {name: value for name, value in (*options.items(), *more.items()) if name in names}
        if "use_cache" not in names:
            inputs.pop("use_cache", None)
        return inputs

    def _called(self, model: Any, inputs: dict[str, Any]) -> Any:
        names = frozenset(inputs)
        unread, takes = () if names in self._tried else names, accepted(self.facts.model_class)
        try:
            with watched(model, unread, takes=takes, who=self.facts.who, advice=OTHER_MODEL):
                output = model(**inputs)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as err:
            raise CacheMismatchError(
                f"{self.facts.who} does not take the batch ({described(inputs)}): {type(err).__name__}: {err}; "
                f"{OTHER_MODEL}",
                code="FB130",
            ) from err
        self._tried.add(names)
        return output

    def _own(self, own: OwnLoss, output: Any, *, units: int) -> torch.Tensor:
        loss = getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            has = "none" if loss is None else f"a {type(loss).__name__} of shape {list(getattr(loss, 'shape', ()))}"
            raise self._no_loss(f"one number as its loss is wanted, the model gave {has}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._no_loss("its loss has no gradient")
        if not units:  # a mean over nothing is not a number
            nothing: torch.Tensor = output.logits.float().sum() * 0
            return nothing
        return loss.float().reshape(()) * (1 if own.is_sum else units)

    def _no_loss(self, why: str) -> CacheMismatchError:
        return CacheMismatchError(
            f"{self.facts.who}: {why}; name a model of another class (`architectures` "
            "of its config.json) that returns a loss for what the config makes",
            code="FB130",
        )


def count_units(own: OwnLoss, batch: Mapping[str, Any]) -> int:
    """Returns how many units of a model's own loss a batch has."""
    labels = batch.get("labels")
    if own.per == "sample" or labels is None or labels.ndim != 2:  # what is wrong, `check_batch` says
        return num_rows(batch)
    return count_targets(labels, labels_are_shifted=own.per == "token")


def num_rows(batch: Mapping[str, Any]) -> int:
    """Returns the samples of a batch: the rows of its labels or texts, which never lie one behind the other."""
    for name in ("labels", "input_ids"):
        if name in batch:
            return len(batch[name])
    return max(len(value) for value in batch.values() if isinstance(value, torch.Tensor))


def count_targets(labels: torch.Tensor, *, labels_are_shifted: bool) -> int:
    """Returns how many positions of `labels` [batch, tokens] count in the loss."""
    targets = labels if labels_are_shifted else labels[:, 1:]
    return int((targets != IGNORED).sum())


def summed_loss(logits: torch.Tensor, labels: torch.Tensor, *, labels_are_shifted: bool) -> torch.Tensor:
    """Returns the cross-entropy summed over all targets, float32 scalar, in nats; 0 where there are none.

    logits: [batch, tokens, vocab]; labels: int64 [batch, tokens]. The sum over `count_targets` is what
    `model(**batch).loss` gives; the sum itself can be weighted by the targets of all micro-batches and ranks.
    """
    if not labels_are_shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
