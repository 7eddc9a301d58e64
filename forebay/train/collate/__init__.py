"""Samples to batches: dicts of tensors under the model's own argument names, so that `model(**batch)` works."""

from forebay.steps.step import Allocate, Batch, PaddingSide
from forebay.train.collate.collator import BatchMaker, Collator

__all__ = ["Allocate", "Batch", "BatchMaker", "Collator", "PaddingSide"]
