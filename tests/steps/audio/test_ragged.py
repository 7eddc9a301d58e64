from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forebay.steps.audio.framing import BLOCK_ROWS, FRAME_SAMPLES, HOP_SAMPLES, Ragged, frames


@given(st.lists(st.integers(1, 150), min_size=1, max_size=8))
def test_clips_start_blocks_and_share_no_frame(num_frames: list[int]) -> None:
    ragged = Ragged.zeros(num_frames)
    assert ragged.num_rows % BLOCK_ROWS == 0
    for index, count in enumerate(num_frames):
        assert ragged.rows[index].start % BLOCK_ROWS == 0
        samples = ragged.samples(index)
        assert samples.size == HOP_SAMPLES * (count - 1) + FRAME_SAMPLES
        assert not samples.any(), "an earlier clip wrote here"
        samples[:] = index + 1
    every = frames(ragged.signal)
    assert every.shape == (ragged.num_rows, FRAME_SAMPLES)
    for index, rows in enumerate(ragged.rows):
        assert (every[rows] == index + 1).all()


@given(st.integers(0, 2000), st.integers(0, 3))
def test_frames_overlap_by_the_hop(extra: int, chunk_start: int) -> None:
    signal = np.arange(FRAME_SAMPLES + extra, dtype=np.float32)
    found = frames(signal)
    assert found.base is not None
    np.testing.assert_array_equal(found, np.lib.stride_tricks.sliding_window_view(signal, FRAME_SAMPLES)[::HOP_SAMPLES])
    ragged = Ragged.zeros([100])
    ragged.signal[:] = np.arange(ragged.signal.size)
    piece = frames(ragged.chunk(BLOCK_ROWS * chunk_start, BLOCK_ROWS * (chunk_start + 1)))
    np.testing.assert_array_equal(piece, frames(ragged.signal)[BLOCK_ROWS * chunk_start :][:BLOCK_ROWS])
