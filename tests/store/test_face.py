"""What `forebay.store` and `forebay.inspect` hand out by name."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("room", ["forebay.store", "forebay.inspect"])
def test_every_name_of_a_room_is_there_and_says_what_it_is(room: str) -> None:
    module = importlib.import_module(room)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'no_such'"):
        module.no_such  # noqa: B018


def test_importing_the_rooms_loads_no_library() -> None:
    code = "import sys, forebay.store, forebay.inspect; print({'numpy', 'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
