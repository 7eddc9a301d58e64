from __future__ import annotations

import io
import wave

import numpy as np
import pytest
import soundfile

from forebay.store.by_hand import pcm16_wav


@pytest.mark.parametrize("samples", [[], [0], [-32768, 32767, 5]])
def test_two_readers_give_the_samples_back(samples: list[int]) -> None:
    data = pcm16_wav(np.array(samples, np.int16), 16_000)
    found, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert (found.tolist(), rate) == (samples, 16_000)
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 16_000)
        assert np.frombuffer(file.readframes(9), "<i2").tolist() == samples


def test_what_the_sizes_of_a_wav_cannot_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.store.by_hand._MAX_BYTES", 4)
    assert len(pcm16_wav(np.zeros(2, np.int16), 16_000)) == 48
    with pytest.raises(OverflowError, match="6 bytes of samples do not fit a WAV, which holds 4"):
        pcm16_wav(np.zeros(3, np.int16), 16_000)
