from __future__ import annotations

import numpy as np
import pytest
from transformers import SeamlessM4TFeatureExtractor, WhisperFeatureExtractor

from forebay.steps.audio.spectrum import FilterBank, kaldi_filters, slaney_filters


@pytest.mark.parametrize("n_mels", [80, 128])
def test_slaney_filters_are_whispers(n_mels: int) -> None:
    want = WhisperFeatureExtractor(feature_size=n_mels).mel_filters.astype(np.float32)
    np.testing.assert_array_equal(slaney_filters(n_mels).matrix, want)


def test_kaldi_filters_are_seamless_m4ts() -> None:
    np.testing.assert_array_equal(kaldi_filters().matrix, SeamlessM4TFeatureExtractor().mel_filters.astype(np.float32))


@pytest.mark.parametrize("bank", [slaney_filters(80), slaney_filters(128), kaldi_filters()], ids=["80", "128", "kaldi"])
def test_bands_are_the_whole_product(bank: FilterBank) -> None:
    bins, mels = bank.matrix.shape
    power = np.random.default_rng(0).lognormal(0, 5, (96, bins)).astype(np.float32)
    out = np.full((96, mels), np.nan, np.float32)
    bank.multiply(power, out)
    np.testing.assert_allclose(out, power.astype(np.float64) @ bank.matrix.astype(np.float64), rtol=1e-6)


def test_filters_are_shared_and_read_only() -> None:
    assert slaney_filters(80) is slaney_filters(80)
    with pytest.raises(ValueError, match="read-only"):
        slaney_filters(80).matrix[0, 0] = 1.0
