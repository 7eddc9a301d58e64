"""Roots in which strangers have put things: looking and cleaning up leave them alone and never crash."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import cli
from forebay.caches.prune import parse_age, parse_size
from forebay.errors import ConfigError
from forebay.store.metadata import write_metadata
from tests.caches.roots import age, shape

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))
FIELDS = st.sampled_from(["recipe", "key", "recipe_key", "files", "num_samples", "num_shards"]) | st.sampled_from(
    ["fields", "constants", "length_names", "name", "languages", "plan", "plan_key", "arrays", "sums", "failed"]
)
NAMES = st.text(min_size=1, max_size=12).filter(lambda name: "/" not in name and "\0" not in name) | st.sampled_from(
    [
        "plans",
        ".building",
        "tar_index",
        "text_index",
        ".listings",
        ".used",
        "a-train-0123456789abcdef",
        ".listed",
        "hashes.memo",
    ]
)
INSIDE = st.sampled_from(
    [
        *("", "plans/x", ".building/0123456789abcdef", ".listings/0123456789abcdef", "a.tmp-00-1-0"),
        *("inputs/x", f"inputs/{'ab' * 16}", f"inputs/{'ab' * 16}/samples.jsonl"),
    ]
)
RECIPES = st.dictionaries(
    st.sampled_from(["audio", "vision", "text", "source", "merged", "subset"]),
    st.none() | st.dictionaries(st.sampled_from(["of", "features", "n_mels", "sample_rate_hz", "languages"]), VALUES),
)
HONEST: dict[str, Any] = {
    "key": "ab" * 32,
    "recipe_key": "cd" * 32,
    "recipe": {"source": {}, "audio": {"features": "waveform"}},
    "files": {
        name: {"size_bytes": 0, "xxh3_128": "0" * 32}
        for name in ("slots.npy", "lengths.npy", "audio.npy", "text.npy", "../../outside/mine.txt")
    },
    "name": "a",
    "num_samples": 1,
    "num_shards": 1,
    "fields": [],
    "constants": {},
    "length_names": ["num_audio_samples", "num_tokens"],
}


@contextlib.contextmanager
def planted(data: st.DataObject) -> Iterator[Path]:
    """Makes a root with strangers' things in it, and `outside` beside it."""
    with tempfile.TemporaryDirectory() as place:
        outside, root = Path(place) / "outside", Path(place) / "root"
        outside.mkdir()
        root.mkdir()
        (outside / "mine.txt").write_text("mine")
        for number in range(data.draw(st.integers(1, 4))):
            with contextlib.suppress(OSError, ValueError):  # a name that is taken, too long, or no name here
                _plant(root, outside, number, data)
        for path in (root, outside):
            age(path, 60)
        yield root


def _plant(root: Path, outside: Path, number: int, data: st.DataObject) -> None:
    path = root / (data.draw(INSIDE) or data.draw(NAMES))
    path.parent.mkdir(exist_ok=True, parents=True)
    kind = data.draw(st.sampled_from(["link", "file", "folder", "signed", "raw"]))
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "file":
        path.write_bytes(data.draw(st.binary(max_size=20)))
    else:
        path.mkdir()
        (path / f"mine-{number}.txt").write_text("mine")
        if kind == "signed":
            changes = data.draw(st.dictionaries(FIELDS, VALUES, max_size=3))
            if data.draw(st.booleans()):
                changes["recipe"] = data.draw(RECIPES)
            write_metadata(path, {**(HONEST if data.draw(st.booleans()) else {}), **changes})
        elif kind == "raw":
            name = data.draw(st.sampled_from(["metadata.json", "listing.json", "prepared.json"]))
            (path / name).write_text(json.dumps(data.draw(VALUES)))


def run(*arguments: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.main(["cache", *arguments])
    assert "\x1b" not in out.getvalue() + err.getvalue()
    assert "Traceback" not in err.getvalue()
    return code


@given(st.data())
def test_whatever_strangers_put_there_is_listed_and_stays(data: st.DataObject) -> None:
    with planted(data) as root:
        before = shape(root.parent)
        assert run("ls", str(root)) == cli.DONE
        assert run("du", str(root), "--json") == cli.DONE
        rules = [
            "--older-than",
            "0d",
            "--leftovers",
            "--plans",
            "--tar-indexes",
            "--text-indexes",
            "--listings",
            "--inputs",
            "--max-size",
            "0",
        ]
        assert run("prune", str(root), *rules, "--yes", "--force") in (cli.DONE, cli.FAILED)
        after = shape(root.parent)
        # What is called like something that forebay was writing when it was killed goes, as in every build.
        kept = {name for name in before if ".tmp-" not in name}
        mine = {name for name in kept if "mine" in name or name.startswith("outside")}
        assert {name: after.get(name) for name in mine} == {name: before[name] for name in mine}
        links = {name for name in kept if os.path.islink(root.parent / name)}
        assert {name for name in links if name not in after} == set()


@given(st.text(max_size=20))
def test_any_text_is_an_age_and_a_size_or_is_refused(text: str) -> None:
    for parse in (parse_age, parse_size):
        try:
            assert 0 <= parse(text) < 1e37
        except ConfigError:
            with pytest.raises(ConfigError, match="wanted a number"):
                parse(text)


@given(st.lists(st.text(min_size=1, max_size=12).filter(lambda text: not text.startswith("-")), min_size=1, max_size=2))
def test_any_name_to_remove_is_found_or_refused(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "root" / "cache").mkdir(parents=True)
        before = shape(Path(place))
        arguments = ["rm", *names, "--cache-root", str(Path(place) / "root"), "--yes", "--force"]
        assert run(*arguments) in (cli.BAD_CONFIG, cli.FAILED)
        assert shape(Path(place)) == before
