"""Gifts of a stranger: terminal escapes for names, links that lead out, pipes for files, endless TOML."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import resource
import shutil
import string
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from forebay import cli
from forebay.config import SourceConfig
from forebay.errors import CacheError, ConfigError, ManifestError
from forebay.plan.disk import load_plan
from forebay.plan.plan_usage import to_line
from forebay.steps.recipe import load_config
from forebay.store.metadata import write_metadata
from tests.faults.children import Children, limit
from tests.faults.row import Row, dice, made
from tests.faults.sandbox import confine
from tests.faults.test_fuzz import _plan_settings, _prepare
from tests.faults.test_inspect import _document
from tests.preprocess.corpus import flac, tone
from tests.rows.helpers import read_rows
from tests.store_factory import make_cache

_PIECES = (
    "\x1b[2J",
    "\x1b]0;t\x07",
    "\x9b31m",
    "\r",
    "\n",
    "\nWARNING forebay: fine",
    "\b",
    "\x7f",
    "\x00",
    "\u202e",
    "\u2028",
)
_CPU_S = 30
_CONFIG = """name = "tones"
[source]
kind = "jsonl"
manifest = {manifest}
{more}
[audio]
features = "waveform"
[layout]
rows_per_shard = 4
[run]
cache_root = {root}
max_failed_share = 1.0
"""


def wicked(chance: random.Random) -> str:
    """A name of terminal escapes, controls of any kind, lost bytes and ordinary letters."""
    controls = [chr(code) for code in (*range(32), *range(127, 160), 0x200E, 0x2066, 0xDC80 + chance.randrange(128))]
    parts = chance.choices([*_PIECES, *controls, *string.ascii_letters[:8], "नमस्ते", "你"], k=chance.randint(1, 6))
    return "".join(parts)


def terminal(_: Path, number: int, folder: Path) -> str:
    """Runs one command over what a stranger named; the bytes that it writes obey nobody."""
    command = _COMMANDS[number % len(_COMMANDS)]
    arguments = command(dice("terminal", number), folder)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", newline="") for _ in range(2)]
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
        patch.setattr(root, "handlers", [])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        with contextlib.suppress(SystemExit):
            cli.main(arguments)
    written = [stream.detach().getvalue().decode("utf-8") for stream in streams]
    assert any(written), "it said nothing"
    for text in written:
        seen = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
        assert not set(seen) - {"\u200c", "\u200d"}, seen
        assert not any(line.startswith("WARNING forebay: fine") for line in text.split("\n"))
    return f"{command.__name__.strip('_')}: escaped"


def _inspect(chance: random.Random, folder: Path) -> list[str]:
    """Inspects a cache in whose signed metadata names are wicked."""
    cache = make_cache(folder, num_samples=3, rows_per_shard=2, max_duration_s=0.1, features="waveform")
    document = _document(cache / "metadata.json")
    name, split = wicked(chance), wicked(chance)
    languages = {wicked(chance): {"samples": 2, "hours": 0.1} for _ in range(2)}
    recipe = {wicked(chance): {wicked(chance): wicked(chance)}, "text": None}
    reasons = {wicked(chance): 2}
    changes = {
        "name": name,
        "split": split,
        "languages": languages,
        "recipe": recipe,
        "excluded": reasons,
        "failed": reasons,
    }
    write_metadata(cache, {**document, **changes, "made_with": {wicked(chance): wicked(chance)}})
    return ["inspect", str(cache), "--no-progress", *chance.choice(([], ["--json"], ["--verify"], ["--sample", "0"]))]


def _inspect_broken(chance: random.Random, folder: Path) -> list[str]:
    """Inspects a cache that is refused, by a message that quotes it."""
    cache = make_cache(folder, num_samples=3, rows_per_shard=2, max_duration_s=0.1, features="waveform")
    document = _document(cache / "metadata.json")
    document[chance.choice(("key", "num_samples", "fields", "files", "languages"))] = {wicked(chance): wicked(chance)}
    write_metadata(cache, document)
    return ["inspect", str(cache), "--no-progress"]


def _inspect_usage(chance: random.Random, folder: Path) -> list[str]:
    path = made(folder / "logs") / "data_usage.jsonl"
    path.write_bytes(to_line({"version": 1, wicked(chance): 1}) + to_line({"step": wicked(chance)}))
    return ["inspect", "--usage", str(path)]


def _key(chance: random.Random, folder: Path) -> list[str]:
    """Computes the key of a config whose fields and values are wicked."""
    path = folder / "config.toml"
    fields = [f"{_quoted(chance)} = {_quoted(chance)}" for _ in range(3)]
    path.write_text("\n".join([f"name = {_quoted(chance)}", f"[source]\nkind = {_quoted(chance)}", *fields]))
    return ["key", str(path), "--set", f"source.{wicked(chance)}={wicked(chance)}"]


def _preprocess(chance: random.Random, folder: Path) -> list[str]:
    """Builds a manifest with wicked ids, texts, languages, columns and files, most of which are left out by name."""
    rows = [
        {
            "audio": name,
            "text": wicked(chance),
            "sample_id": wicked(chance),
            "language": wicked(chance),
            wicked(chance): 1,
        }
        for name in ("a.flac", wicked(chance), "b.flac", f"../{wicked(chance)}")
    ]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "a.flac").write_bytes(flac(tone(1, duration_s=0.1)))
    (folder / "b.flac").write_bytes(b"no audio")
    more = chance.choice(("", "confined = true", f"languages = [{_quoted(chance)}]"))
    text = _CONFIG.format(
        manifest=json.dumps(str(folder / "train.jsonl")), root=json.dumps(str(folder / "caches")), more=more
    )
    (folder / "config.toml").write_text(text)
    return ["preprocess", str(folder / "config.toml"), "--no-progress", *chance.choice(([], ["--json"], ["-v"]))]


def _index(chance: random.Random, folder: Path) -> list[str]:
    """Indexes files that are no tars, in a list that names them wickedly."""
    names = [wicked(chance).replace("\n", "").replace("\t", "") + ".tar" for _ in range(2)]
    (folder / "list.tsv").write_text("".join(f"{name}\ta\ten\t0.5\n" for name in names), errors="surrogateescape")
    return [
        "index",
        str(folder / "list.tsv"),
        "--cache-root",
        str(folder / "caches"),
        "--no-progress",
        "--workers",
        "1",
    ]


def _quoted(chance: random.Random) -> str:
    return json.dumps(wicked(chance).encode("utf-8", "replace").decode()).replace("\x7f", "\\u007f")


_COMMANDS: tuple[Callable[[random.Random, Path], list[str]], ...] = (
    _inspect,
    _inspect_broken,
    _inspect_usage,
    _key,
    _preprocess,
    _index,
)


def led_out(children: Children, number: int, folder: Path) -> str:
    """Builds a folder with one way out of it; a child reads it under `source.confined`."""
    way = _WAYS[number % len(_WAYS)]
    ended = children.run(_read_confined, way, number, folder)
    assert ended.error is None, ended.error
    assert not ended.signal
    return f"{way.__name__.strip('_').replace('_', ' ')}: refused"


def _read_confined(way: Callable[[random.Random, Path, Path], SourceConfig], number: int, folder: Path) -> None:
    chance = dice("confined", number)
    inside, outside = made(folder / "inside"), made(folder / "outside")
    (outside / "a.flac").write_bytes(flac(tone(1, duration_s=0.1)))
    source = way(chance, inside, outside)
    seen = confine(inside, outside)
    try:
        read_rows(source, cache_root=inside / "caches")
    except ManifestError as err:
        assert "source.confined allows no other place" in str(err), err  # noqa: PT017  in a child
        assert not [event for event in seen if str(outside) in event], seen
        return
    raise AssertionError("it was read")


def _a_name(chance: random.Random, inside: Path, outside: Path) -> SourceConfig:
    up = "../" * chance.randint(1, 3)
    name = chance.choice(
        (f"../{outside.name}/a.flac", str(outside / "a.flac"), f"x/../../{outside.name}/a.flac", f"{up}etc/passwd")
    )
    return _naming(inside, name)


def _a_link(chance: random.Random, inside: Path, outside: Path) -> SourceConfig:
    target = outside / "a.flac"
    for step in range(chance.randint(0, 3)):
        (inside / f"step{step}").symlink_to(target)
        target = inside / f"step{step}"
    (inside / "link.flac").symlink_to(target)
    return _naming(inside, "link.flac")


def _a_linked_folder(chance: random.Random, inside: Path, outside: Path) -> SourceConfig:
    (inside / "sub").symlink_to(outside)
    return _naming(inside, chance.choice(("sub/a.flac", "./sub/./a.flac", "sub/../sub/a.flac")))


def _a_linked_manifest(chance: random.Random, inside: Path, outside: Path) -> SourceConfig:
    kind, name = chance.choice(
        (("jsonl", "a.jsonl"), ("text", "a.jsonl"), ("filelist", "a.tsv"), ("webdataset", "a.tar"))
    )
    (outside / name).write_text("{}\n")
    (inside / name).symlink_to(outside / name)
    entry = chance.choice((inside, inside / name, inside / f"*{Path(name).suffix}"))
    return SourceConfig(kind=kind, manifest=str(entry), confined=True)


_WAYS = (_a_name, _a_link, _a_linked_folder, _a_linked_manifest)


def _naming(inside: Path, name: str) -> SourceConfig:
    (inside / "train.jsonl").write_text(json.dumps({"audio": name, "text": "t"}) + "\n")
    return SourceConfig(kind="jsonl", manifest=str(inside / "train.jsonl"), confined=True)


def deep_toml(children: Children, number: int, folder: Path) -> str:
    """Loads a TOML of up to a million characters under a limit of CPU time."""
    ended = children.run(_load_deep, number, folder)
    assert not ended.signal, f"signal {ended.signal}: more than {_CPU_S} s of CPU"
    assert ended.error is None, ended.error
    return str(ended.value)


def _load_deep(number: int, folder: Path) -> str:
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + _CPU_S)
    chance = dice("toml", number)
    count = chance.choice((20, 1000, 100_000))
    piece = chance.choice(
        (".a", '."a"', ".'a'", " . a", "[", "{a=", "[{", ".", '"', "'", "1.", "\\", "#", "x.x=1\n", "[a]\n", "[[a]]\n")
    )
    head, tail = chance.choice(
        (("a", "=1"), ("[a", "]"), ("[[a", "]]"), ("x = ", ""), ("x = {a", "=1}"), ('x = "', '"'), ("", ""))
    )
    path = folder / "config.toml"
    path.write_text(f'name = "x"\n{head}{piece * count}{tail}\n')
    overrides = [f"a{piece * count}=1"] if chance.random() < 0.3 else []
    try:
        load_config(path, overrides=overrides)
    except ConfigError:
        return "typed error"
    return "read"


def plan_file(place: Path, number: int, folder: Path) -> str:
    """Puts a pipe, a link, a folder or a socket's like in the place of one file of a plan."""
    kind = ("pipe", "link", "folder", "link to a device")[number % 4]
    shutil.copytree(place, folder / "plan")
    names = sorted(path.name for path in (folder / "plan").iterdir() if path.is_file())
    path = folder / "plan" / names[number // 4 % len(names)]
    path.rename(folder / "aside")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "link to a device" else folder / "aside")
    is_read = path.name != "packing_stats.json"  # which training never looks at
    if is_read:
        with pytest.raises(CacheError, match=path.name):
            load_plan(folder / "plan", cache_key="ab" * 32, settings=_plan_settings())
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        codes = [cli.main(["inspect", str(folder / "plan"), "--no-progress", *more]) for more in ([], ["--verify"])]
    assert cli.FAILED in codes, (codes, out.getvalue())
    assert path.name in out.getvalue() + err.getvalue() or "metadata" in path.name
    return f"{kind}: refused and named"


@contextlib.contextmanager
def _plan(folder: Path) -> Iterator[Path]:
    _prepare(folder)
    yield folder / "plan"


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[Children]:
    with Children("tests.faults.test_strangers") as children:
        yield children


ROWS: list[Row[Any]] = [
    Row(
        name="terminal",
        fault="terminal escapes, controls, turned direction in whatever a stranger names; six commands",
        outcome="no control character but line ends on either stream, no forged line",
        prepared=lambda folder: contextlib.nullcontext(folder),
        trial=terminal,
        short=2 * len(_COMMANDS),
        long=3000,
    ),
    Row(
        name="confined",
        fault="names, links, linked folders and linked manifests that lead out under `source.confined`",
        outcome="refused by name; nothing outside was opened",
        prepared=_serving,
        trial=led_out,
        short=2 * len(_WAYS),
        long=400,
    ),
    Row(
        name="toml",
        fault="TOML and overrides of up to 100,000 dots, brackets, quotes, tables",
        outcome=f"typed error or a config within {_CPU_S} s of CPU",
        prepared=_serving,
        trial=deep_toml,
        short=12,
        long=600,
    ),
    Row(
        name="plan_file",
        fault="a pipe, a link, a folder or a device in the place of a plan's file",
        outcome="refused by name, at once",
        prepared=_plan,
        trial=plan_file,
        short=20,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_a_stranger_hands_over_is_refused_or_shown(row: Row[Any], tmp_path: Path) -> None:
    assert sum(row.check(tmp_path).values()) == row.short
