"""Samples to batches: dicts of tensors under the model's own argument names, so that `model(**batch)` works."""

from forebay.train.collate.collator import Batch, BatchMaker, Collator
from forebay.train.collate.convert import Allocate
from forebay.train.collate.text import PaddingSide

__all__ = ["Allocate", "Batch", "BatchMaker", "Collator", "PaddingSide"]
