"""Hypothesis strategies shared by all tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from forebay.config import PlanConfig


@st.composite
def plan_settings(draw: st.DrawFn) -> PlanConfig:
    """Bucket plans with every kind of batch size and tail; edges between 0.1 s and 12 s, on milliseconds."""
    edges_ms = sorted(draw(st.sets(st.integers(100, 12_000), min_size=1, max_size=6)))
    sizes: dict[str, Any] = draw(
        st.one_of(
            st.fixed_dictionaries({"batch_seconds": st.floats(0.5, 60, allow_nan=False)}),
            st.fixed_dictionaries({"batch_size": st.integers(1, 9)}),
            st.fixed_dictionaries({"batch_size": st.tuples(*[st.integers(1, 9)] * len(edges_ms))}),
        )
    )
    return PlanConfig(
        edges_s=tuple(edge / 1000 for edge in edges_ms),
        lockstep=draw(st.integers(1, 9)),
        tail=draw(st.sampled_from(["short", "drop", "pad"])),
        **sizes,
    )


def durations(*, sample_rate_hz: int = 1000) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    """Lengths in audio samples, 1 to 200 clips of 0 to 15 s."""
    return st.lists(st.integers(0, 15 * sample_rate_hz), min_size=1, max_size=200).map(
        lambda values: np.array(values, dtype=np.int64)
    )


def transcripts() -> st.SearchStrategy[str]:
    """Texts of any script that UTF-8 can hold, without NUL; some hold what looks like a model's control tokens."""
    character = st.characters(codec="utf-8", exclude_characters="\0")
    control = st.sampled_from(
        [
            "<|endoftext|>",
            "<|startoftranscript|>",
            "<|en|>",
            "<|0.00|>",
            "<|im_end|>",
            "<|audio_pad|>",
            "<asr_text>",
            "\n",
        ]
    )
    return st.lists(st.one_of(st.text(character, max_size=12), control), max_size=6).map("".join)
