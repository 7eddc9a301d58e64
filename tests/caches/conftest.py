from __future__ import annotations

import pytest

from forebay.store import memo


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets raw data that a test has just written count as old, so that its hash is known."""
    monkeypatch.setattr(memo, "_RACY_NS", -(10**15))
