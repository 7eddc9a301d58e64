"""Samples to batches: dicts of tensors under the model's own argument names, so that `model(**batch)` works."""
