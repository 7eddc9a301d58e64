"""Numbers of a `[plan]` that fit what was seen: sizes of batches, numbers of buckets, tokens of a pack."""

from __future__ import annotations

import math
from statistics import mean

from forebay.errors import SampleError
from forebay.init.found import Found
from forebay.store.image.image_settings import ImageSettings, grid_thw

HEARD_S = 30.0
"""Seconds of a clip that Whisper's features hold."""
_FEW = 4_000
_MOST_BUCKETS, _SAMPLES_A_BUCKET = 32, 16
_BATCH_SIZE = 8
_IMAGES = 32
_LEAST_SECONDS, _MOST_SECONDS = 20, 240
_LEAST_TOKENS, _MOST_TOKENS = 1024, 16_384
_CHARS_A_TOKEN = 2.5
_TEMPLATE_TOKENS = 24


def is_few(found: Found) -> bool:
    """Says whether groups of batches of equal shape would leave many incomplete."""
    return found.count < _FEW


def num_buckets(found: Found) -> int:
    """Returns how many edges there may be, so that buckets still hold full batches."""
    return max(2, min(_MOST_BUCKETS, found.count // _SAMPLES_A_BUCKET))


def batch_size(found: Found) -> int:
    """Returns clips a batch, where every clip is padded to one length anyway."""
    return max(1, min(_BATCH_SIZE, found.count // 4 or 1))


def images_a_batch(found: Found) -> int:
    """Returns samples a batch of images, fewer where a sample is a conversation."""
    most = _BATCH_SIZE if found.prompt == "chat" else _IMAGES
    return max(1, min(most, found.count // 4 or 1))


def batch_seconds(found: Found) -> int:
    """Returns padded seconds a batch: some of the longest clips, and several batches of a small set."""
    seconds = found.sounds.seconds if found.sounds is not None else []
    if not seconds:
        return 120
    wanted = min(max(2 * max(seconds), 120.0), found.hours * 3600 / 8)
    return max(_LEAST_SECONDS, min(_MOST_SECONDS, 10 * math.ceil(wanted / 10)))


def image_tokens(size: tuple[int, int], settings: ImageSettings) -> int:
    """Returns the tokens that an image of (width, height) pixels becomes; 0 for one that the processor refuses."""
    try:
        _, rows, columns = grid_thw(*size, settings)
    except SampleError:
        return 0
    return rows * columns // settings.merge_size**2


def conversation_tokens(found: Found, settings: ImageSettings) -> tuple[int, int]:
    """Returns about how many tokens a conversation has: in the mean, and the longest that can be of what was seen."""
    images = [image_tokens(size, settings) + 2 for size in (found.pictures.sizes if found.pictures else [])] or [0]
    words = [len(text) / _CHARS_A_TOKEN + _TEMPLATE_TOKENS for text in found.texts] or [_TEMPLATE_TOKENS]
    rows = found.images_a_row or [1]
    return round(mean(words) + mean(rows) * mean(images)), round(max(words) + max(rows) * max(images))


def seq_len(found: Found, settings: ImageSettings, *, max_positions: int | None) -> int:
    """Returns tokens of a pack: a power of two that holds the longest conversation, and some of the usual ones."""
    usual, longest = conversation_tokens(found, settings)
    wanted = max(_LEAST_TOKENS, longest, min(4 * usual, _MOST_TOKENS))
    limit = max_positions or 4 * _MOST_TOKENS
    return min(1 << math.ceil(math.log2(wanted)), limit)
