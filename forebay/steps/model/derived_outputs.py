"""Outputs that are made of what a model returns for a sample: a mean, top-k logits, a probability, a similarity.

One number of a sample is a score: it is a column of the row table, and in no batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATES = "last_hidden_state"
_CAUSAL = {"text": "AutoModelForCausalLM"}
_CLASSIFIERS = {
    "text": "AutoModelForSequenceClassification",
    "audio": "AutoModelForAudioClassification",
    "image": "AutoModelForImageClassification",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DerivedOutput:
    """An output of a config's `keep` that no model returns by that name.

    of: the outputs that it is made of. make: (a sample's own rows of each, the setting, the model's config) to a
    tensor; ValueError for a setting that cannot be. setting: its name in `args`. loaders: the classes of transformers
    that return these outputs, by what a model takes; empty: that of the family.
    """

    of: tuple[str, ...]
    make: Callable[..., torch.Tensor]
    setting: str | None = None
    loaders: Mapping[str, str] = field(default_factory=dict)


def _top(name: str) -> Callable[..., torch.Tensor]:
    def make(logits: torch.Tensor, k: Any, config: Any) -> torch.Tensor:  # noqa: ARG001
        if type(k) is not int or not 0 < k <= logits.shape[-1]:
            raise ValueError(f"k is {k!r}, wanted 1 to {logits.shape[-1]}, the size of the vocabulary")
        found: torch.Tensor = getattr(logits.topk(k, dim=-1), name)
        return found

    return make


def _logit(logits: torch.Tensor, label: Any, config: Any) -> torch.Tensor:
    return logits[_place(label, config, len(logits))]


def _probability(logits: torch.Tensor, label: Any, config: Any) -> torch.Tensor:
    place, problem = _place(label, config, len(logits)), getattr(config, "problem_type", None)
    if problem == "regression":
        raise ValueError('the model gives no probabilities (regression); keep output = "logit"')
    is_alone = len(logits) == 1 or problem == "multi_label_classification"
    return (logits.float().sigmoid() if is_alone else logits.float().softmax(dim=0))[place]


def _label(logits: torch.Tensor, setting: Any, config: Any) -> torch.Tensor:  # noqa: ARG001
    return logits.argmax()


def _place(label: Any, config: Any, count: int) -> int:
    """Returns the place of a label that is a name or an index; where there is one label, it need not be named."""
    names = {str(name): int(place) for place, name in (getattr(config, "id2label", None) or {}).items()}
    place = 0 if label is None and count == 1 else names.get(label, label)
    if type(place) is not int or not 0 <= place < count:
        shown = ", ".join(list(names)[:20])
        raise ValueError(f"label is {label!r}, wanted 0 to {count - 1} or one of {shown}")
    return place


def _similarity(image: torch.Tensor, text: torch.Tensor, setting: Any, config: Any) -> torch.Tensor:  # noqa: ARG001
    # Both are of length 1 already, see CLIPModel.forward and SiglipModel.forward of transformers.
    return (image.float() * text.float()).sum()


def _mean(rows: torch.Tensor, setting: Any, config: Any) -> torch.Tensor:  # noqa: ARG001
    return rows.float().mean(dim=0)


DERIVED: Mapping[str, DerivedOutput] = {
    "mean": DerivedOutput(of=(STATES,), make=_mean),
    "top_ids": DerivedOutput(of=("logits",), make=_top("indices"), setting="k", loaders=_CAUSAL),
    "top_logits": DerivedOutput(of=("logits",), make=_top("values"), setting="k", loaders=_CAUSAL),
    "logit": DerivedOutput(of=("logits",), make=_logit, setting="label", loaders=_CLASSIFIERS),
    "probability": DerivedOutput(of=("logits",), make=_probability, setting="label", loaders=_CLASSIFIERS),
    "label": DerivedOutput(of=("logits",), make=_label, loaders=_CLASSIFIERS),
    "similarity": DerivedOutput(of=("image_embeds", "text_embeds"), make=_similarity),
}
"""The names that no model has for an output. A new one is a line here."""
SCORES = frozenset(("logit", "probability", "label", "similarity"))
"""Those of one number a sample."""
