"""Loaded by Python at the start of a worker whose PYTHONPATH names this folder: its decoder crashes on one clip."""

import os
import signal

CRASH_ON = os.environ.get("FOREBAY_TEST_CRASH_ON")

if CRASH_ON is not None:
    import forebay.preprocess.decode as decode

    real_decode_audio = decode.decode_audio

    def decode_audio(data, step, *, sample_id, want="float32"):  # type: ignore[no-untyped-def]
        if sample_id == "a6":
            os.kill(os.getpid(), signal.SIGSEGV)
        return real_decode_audio(data, step, sample_id=sample_id, want=want)

    decode.decode_audio = decode_audio
