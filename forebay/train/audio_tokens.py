"""How many audio tokens a clip becomes in Qwen3-ASR."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

FRAMES_PER_CHUNK = 100
TOKENS_PER_CHUNK = 13

Count = TypeVar("Count", int, np.ndarray)


def num_audio_tokens(num_frames: Count) -> Count:
    """Returns the number of audio tokens of clips with so many valid mel frames, as an int or elementwise.

    The encoder works on chunks of 100 frames (`n_window` 50) and halves each three times, rounding up: a whole chunk
    gives 13 tokens. Equal to `Qwen3ASRProcessor._get_audio_token_length` and to the lengths that the encoder gives.
    """
    tokens = num_frames % FRAMES_PER_CHUNK
    for _ in range(3):
        tokens = (tokens + 1) // 2
    total: Count = num_frames // FRAMES_PER_CHUNK * TOKENS_PER_CHUNK + tokens
    return total
