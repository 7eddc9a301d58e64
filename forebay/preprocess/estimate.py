"""How large a cache will be, from durations alone."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from forebay.config.recipe import Recipe
from forebay.config.steps import NoAudio, Waveform
from forebay.preprocess.features import field_specs, num_frames

_TOKENS_PER_BYTE = 0.5
_OVERHEAD_BYTES = 160
"""Of one sample: offsets, hashes, id, lengths."""


def estimate_bytes(recipe: Recipe, rows: pa.Table) -> int:
    """Returns the expected size in bytes: exact for media where the manifest's durations are, about right for text."""
    seconds = np.nan_to_num(rows["duration_s"].to_numpy())
    if recipe.decode.clip_s is not None:
        seconds = np.minimum(seconds, recipe.decode.clip_s)
    samples = np.round(seconds * recipe.decode.sample_rate_hz).astype(np.int64)
    total = 0
    for step in (recipe.features, recipe.waveform):
        if step is not None and not isinstance(step, NoAudio):
            field = field_specs(step)[0]
            width = field.numpy_dtype.itemsize * int(np.prod(field.shape, dtype=np.int64))
            total += width * int(samples.sum() if isinstance(step, Waveform) else np.sum(num_frames(step, samples)))
    text_bytes: int = sum(chunk.nbytes for name in ("text", "prompt", "language") for chunk in rows[name].chunks)
    tokens = int(4 * _TOKENS_PER_BYTE * text_bytes) if recipe.tokens is not None else 0
    return total + text_bytes + tokens + _OVERHEAD_BYTES * len(rows)
