"""The faces of packages, and what they hand out by name."""

from __future__ import annotations

import ast
import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.face import uncollected


@pytest.mark.parametrize("room", ["forebay.store", "forebay.inspect"])
def test_every_name_of_a_room_is_there_and_says_what_it_is(room: str) -> None:
    module = importlib.import_module(room)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name
    with pytest.raises(AttributeError, match=f"module '{room}' has no attribute 'no_such'"):
        module.no_such  # noqa: B018


@pytest.mark.parametrize("room", ["forebay", "forebay.inspect", "forebay.preprocess", "forebay.store", "forebay.train"])
def test_a_type_checker_sees_each_public_name_from_where_it_is_loaded(room: str) -> None:
    module = importlib.import_module(room)
    tree = ast.parse(Path(str(module.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(str(name) for name in seen) == module.__all__
    for public, (home, name) in seen.items():
        assert public == name
        assert getattr(module, name) is getattr(importlib.import_module(str(home)), name)


def test_importing_the_rooms_loads_no_library() -> None:
    code = "import sys, forebay.store, forebay.inspect; print({'numpy', 'pyarrow', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("before", [True, False])
def test_looking_for_garbage_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    said: list[str] = []
    monkeypatch.setattr(gc, "isenabled", lambda: before)
    monkeypatch.setattr(gc, "disable", lambda: said.append("off"))
    monkeypatch.setattr(gc, "enable", lambda: said.append("on"))
    with uncollected():
        assert said == ["off"]
    assert said == ["off", "on"][: 1 + before]
