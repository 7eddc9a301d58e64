"""Makes librosa.npz beside this file: what librosa and WORLD give for demo recordings, for the tests of mel and pitch.

python tests/steps/audio/make_librosa.py      (in an environment of its own: librosa 0.11.0, pyworld 0.3.5, numpy 2.4.6)

The two are no part of forebay's environment: they bring numba, scipy and scikit-learn, which transformers imports where
they are there, in every process of every test.
"""

from __future__ import annotations

import importlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

HERE = Path(__file__).parent
DEMO = HERE.parents[2] / "demo" / "speech"
RATE_HZ = 16_000
MEL_CLIP = "es_auth-thankyou"
PITCH_CLIPS = ("en_conf-locked", "it_vm-deleted", "fr_im-sorry", "ru_tt-monkeysintro")

MELS: dict[str, dict[str, Any]] = {
    "tacotron2": {"sr": 22_050, "n_fft": 1024, "hop_length": 256, "n_mels": 80, "fmax": 8000.0, "power": 1.0},
    "htk_db": {
        "sr": 16_000,
        "n_fft": 512,
        "hop_length": 160,
        "win_length": 400,
        "n_mels": 40,
        "htk": True,
        "norm": None,
    },
    "amplitude_db": {
        "sr": 24_000,
        "n_fft": 600,
        "hop_length": 150,
        "n_mels": 64,
        "fmin": 50.0,
        "fmax": 11_000.0,
        "power": 1.0,
    },
    "inside": {"sr": 44_100, "n_fft": 2048, "hop_length": 512, "n_mels": 128, "center": False},
    "zeros": {"sr": 16_000, "n_fft": 1024, "hop_length": 300, "win_length": 800, "n_mels": 23, "pad_mode": "constant"},
}
"""What `librosa.feature.melspectrogram` is called with, beside `pad_mode = "reflect"`."""


def recording(sample_id: str) -> np.ndarray:
    """Returns the first second of a demo recording, float32 at 16 kHz."""
    for path in sorted(DEMO.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            if f"{sample_id}.flac" in tar.getnames():
                member = tar.extractfile(f"{sample_id}.flac")
                assert member is not None
                samples: np.ndarray = soundfile.read(io.BytesIO(member.read()), dtype="float32")[0]
                return samples[:RATE_HZ]
    raise KeyError(sample_id)


def main() -> None:
    librosa, pyworld = (importlib.import_module(name) for name in ("librosa", "pyworld"))
    made: dict[str, Any] = {}
    clip = recording(MEL_CLIP)
    for name, settings in MELS.items():
        mel = librosa.feature.melspectrogram(y=clip, **{"pad_mode": "reflect", **settings})
        if name == "htk_db":
            mel = librosa.power_to_db(mel, amin=1e-10, top_db=None)
        if name == "amplitude_db":
            mel = librosa.amplitude_to_db(mel, amin=1e-5, top_db=None)
        made[f"mel_{name}"] = mel.T.astype(np.float32)
    for sample_id in PITCH_CLIPS:
        clip = recording(sample_id)
        settings = {"fmin": 65, "fmax": 600, "sr": RATE_HZ, "hop_length": 256, "frame_length": 1024}
        f0, voiced, _ = librosa.pyin(clip, **settings)
        made[f"pyin_{sample_id}"] = np.where(voiced, f0, 0).astype(np.float32)
        wide = clip.astype(np.float64)
        f0, times = pyworld.dio(wide, RATE_HZ, f0_floor=65.0, f0_ceil=600.0, frame_period=1000 * 256 / RATE_HZ)
        made[f"world_{sample_id}"] = pyworld.stonemask(wide, f0, times, RATE_HZ).astype(np.float32)
    np.savez_compressed(HERE / "librosa.npz", **made)


if __name__ == "__main__":
    main()
