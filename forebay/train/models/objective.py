"""The loss of a micro-batch: the sum over its targets for the families of the table, else the model's own loss.

What the `forward` of a class of transformers takes, and whether what only `**kwargs` took was read anywhere.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn import functional

from forebay.errors import CacheMismatchError
from forebay.steps.batch import IGNORED
from forebay.train.models.families import ModelFacts, OwnLoss

OTHER_MODEL = "change the config so that it makes what the model takes, or name another train.model"
"""The next step where `forebay train` has a model that does not take a batch."""
_MODES = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@dataclass(frozen=True, slots=True)
class Accepted:
    """The arguments of a `forward`: those that it names, those without a default, and whether it takes any others."""

    names: frozenset[str]
    required: frozenset[str]
    takes_others: bool
    is_open: bool = False
    """Whether all others count as read."""

    def hidden(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the names that `forward` does not name itself."""
        return () if self.is_open else tuple(sorted(set(names) - self.names))


@lru_cache(maxsize=64)
def accepted(model_class: str) -> Accepted:
    """Returns what the `forward` of a class of transformers takes."""
    import transformers

    return _accepted(getattr(transformers, model_class).forward)


def _accepted(forward: Any) -> Accepted:
    own = [each for each in inspect.signature(forward).parameters.values() if each.name != "self"]
    named = [each for each in own if each.kind in _MODES]
    return Accepted(
        names=frozenset(each.name for each in named),
        required=frozenset(each.name for each in named if each.default is each.empty),
        takes_others=any(each.kind is each.VAR_KEYWORD for each in own),
    )


def taken_by(model: Any) -> Accepted:
    """Returns what a model itself takes, of a class of any making; of the user's own code, whatever it may be.

    Who writes `**kwargs` into a forward of his own reads them: such a forward has all names.
    """
    takes = _accepted(model.forward)
    is_open = takes.takes_others and not _is_of_transformers(model.forward)
    return replace(takes, is_open=True) if is_open else takes


def _is_of_transformers(forward: Any) -> bool:
    return str(getattr(inspect.unwrap(forward), "__module__", "")).partition(".")[0] == "transformers"


def loses_no_labels(model: Any) -> bool:
    """Returns whether a model gives a loss without labels: for `return_loss` (CLIP), or always (ViTMAE)."""
    forward = type(model).forward
    # Annotations of other code need not be there when they are asked for.
    return "labels" not in _accepted(forward).names and has_loss(forward, always=_is_of_transformers(forward))


def has_loss(forward: Any, *, always: bool = True) -> bool:
    """Returns whether a `forward` takes what a loss is made of, `labels` or `return_loss`.

    always: one counts, too, whose output has a loss without either.
    """
    if not _accepted(forward).names.isdisjoint({"labels", "return_loss"}):
        return True
    hints = typing.get_type_hints(forward) if always else {}
    outputs = typing.get_args(hints.get("return")) or (hints.get("return"),)
    return any("loss" in getattr(output, "__dataclass_fields__", ()) for output in outputs)


def asked(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a model, and with them `return_loss` where it gives a loss without labels for that."""
    if "labels" in inputs or "return_loss" not in _accepted(model.forward).names:
        return dict(inputs)
    return {**inputs, "return_loss": True}


def described(inputs: Mapping[str, Any]) -> str:
    """Returns the names, dtypes and shapes of a batch, for a message."""
    return ", ".join(
        f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    )


@contextmanager
def watched(model: Any, names: Collection[str], *, takes: Accepted, who: str, advice: str) -> Iterator[None]:
    """Watches one pass of a model, and makes sure that each of some fields of a batch is read by some module.

    Models of transformers take any keyword, and pass over those that nobody reads: a batch would be trained on without
    what the name stands for. So what the model's own forward does not name must arrive at a module inside it.

    names: of the batch; those that the model is not called with (somebody has used them up before) do not count.
    takes: what the transformers model takes, whatever wraps it. who, advice: for the message, `unknown_names`.
    Raises CacheMismatchError where a field is not read: before the pass, if the model takes no other keywords.
    """
    hidden = set(takes.hidden(names))
    if takes.takes_others:
        hidden -= _handed_on()
    given: set[str] = set()
    arrived: set[str] = set()

    def called(_module: Any, _arguments: Any, named: Mapping[str, Any]) -> None:
        given.update(name for name in hidden if named.get(name) is not None)
        if given and not takes.takes_others:
            raise unknown_names(given, takes=takes, who=who, advice=advice)

    def arrives(wanted: Collection[str], _module: Any, _arguments: Any, named: Mapping[str, Any]) -> None:
        arrived.update(name for name in wanted if named.get(name) is not None)

    hooks = [model.register_forward_pre_hook(called, with_kwargs=True)] if hidden else []
    for module in model.modules() if hidden and takes.takes_others else ():
        if wanted := hidden & (_accepted(module.forward).names | _named_inside(module.forward)):
            hooks.append(module.register_forward_pre_hook(partial(arrives, wanted), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if lost := given - arrived:
        raise unknown_names(lost, takes=takes, who=who, advice=advice)


def _handed_on() -> frozenset[str]:
    """Returns the keywords that transformers hands on to functions, in which no hook sees them (packs have some)."""
    from transformers.utils.generic import TransformersKwargs

    return frozenset(TransformersKwargs.__annotations__) - {"position_ids"}


def _named_inside(forward: Any) -> frozenset[str]:
    """Returns the names that a `forward` may look up in its `**kwargs`: the strings in its code."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or not code.co_flags & inspect.CO_VARKEYWORDS:
        return frozenset()
    return frozenset(each for each in code.co_consts if isinstance(each, str))


def unknown_names(names: Collection[str], *, takes: Accepted, who: str, advice: str) -> CacheMismatchError:
    """Returns the error for fields of a batch that a model does not read. who: the model; advice: the next step."""
    return CacheMismatchError(
        f"{who} does not read {', '.join(sorted(names))} of the batch and would be trained without; its forward takes "
        f"{', '.join(sorted(takes.names))}; {advice}",
        code="FB130",
    )


FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)
"""What models raise for arguments that they cannot take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """The result of a forward pass: the loss, summed over the units of the batch, and the model's whole output."""

    loss: torch.Tensor
    output: Any


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a model: a batch's number of units, and their summed loss. A step's loss is sum by units."""

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
