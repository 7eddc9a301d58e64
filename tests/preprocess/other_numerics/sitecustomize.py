"""Python loads this in a worker whose PYTHONPATH names this folder: its features come out a little different."""

import os

if os.environ.get("FOREBAY_TEST_OTHER_NUMERICS") is not None:
    from forebay.steps.step import AudioStep

    real_compute = AudioStep.compute

    def compute(step, waveforms):  # type: ignore[no-untyped-def]
        return [{name: values + 1 for name, values in fields.items()} for fields in real_compute(step, waveforms)]

    AudioStep.compute = compute  # type: ignore[method-assign]
