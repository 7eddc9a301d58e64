"""Settings of all tests: the machines are shared and noisy, so hypothesis sets no deadline of its own."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("forebay", deadline=None, derandomize=False)
settings.load_profile("forebay")
