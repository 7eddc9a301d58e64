"""Every error has a code with an entry in forebay/errors.md, and every reason too; `forebay explain`."""

from __future__ import annotations

import ast
import copy
import errno
import functools
import json
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import cli, errors
from forebay.cli import program
from forebay.errors import CacheNotFoundError, ConfigError, ForebayError, MissingExtraError, PlanError, SampleError
from forebay.explain import PAGE, entries, explained
from forebay.rows.meanings import chat_fields
from forebay.rows.readers import json_lines
from forebay.steps.text.chat import conversation
from forebay.tar import scan

ROOT = Path(__file__).parents[1]
CLASSES = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}


@functools.cache
def _trees() -> dict[str, ast.Module]:
    """Every module of the product; not at import: reading them all takes 3 s, of each worker that collects tests."""
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in (ROOT / "forebay").rglob("*.py")}


def _classes_elsewhere() -> Iterator[tuple[str, str | None]]:
    """Every class of an error outside of errors.py, with the code of its own."""
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in CLASSES for base in node.bases):
                own = [ast.literal_eval(a.value) for a in node.body if ast.unparse(a).startswith("code = ")]  # type: ignore[attr-defined]
                yield node.name, own[0] if own else None


def _codes_given() -> set[str]:
    """Every code that a place which raises gives, and those of the command line."""
    found = set()
    for tree in _trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"FB\d{3}", node.value):
                found.add(node.value)
    return found


def test_every_class_has_a_code_of_its_own_and_every_code_one_entry() -> None:
    classes = {name: vars(kind).get("code") for name, kind in CLASSES.items()}
    classes |= {name: code for name, code in _classes_elsewhere() if name not in classes}
    assert "WorkerDied" in classes
    assert [name for name, code in classes.items() if code is None] == []
    assert len(set(classes.values())) == len(classes)
    explained_codes = [entry.name for entry in entries() if entry.kind == "code"]
    assert len(set(explained_codes)) == len(explained_codes)
    assert set(explained_codes) == _codes_given()
    assert all(entry.title and entry.text for entry in entries())
    titles = [entry.title for entry in entries() if entry.kind == "code"]
    assert len(set(titles)) == len(titles)


def test_a_code_is_given_as_a_text_or_taken_from_another_error() -> None:
    computed = {
        ast.unparse(keyword.value)
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CLASSES
        for keyword in node.keywords
        if keyword.arg == "code" and not isinstance(keyword.value, ast.Constant)
    }
    assert computed == {"code_of(found)", "asker.code", "CODE.code", "err.code", "self.code"}


_ADDED = {"_refuse": 1, "add": 2, "number": 0, "SampleError": 0, "DecodeError": 0, "TextError": 0, "Problem": 0}
"""Functions that take a reason, and its place among their arguments."""
_HELD = {"reason", "problem", "stop"}
"""Names and attributes that hold a reason."""


def _texts(node: ast.AST | None) -> Iterator[str]:
    """The texts that an expression may be."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=body, orelse=orelse):
            yield from (*_texts(body), *_texts(orelse))
        case ast.BoolOp(values=values):
            yield from (text for value in values for text in _texts(value))
        case ast.Tuple(elts=[first, ast.Constant(value=str()) | ast.JoinedStr()]):
            yield from _texts(first)  # a reason and its message


def _reasons_of(node: ast.AST, path: str) -> Iterator[str]:
    """The reasons that one node gives: as an argument, as a value of a name that holds one, or with its message."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=keywords):
            place = _ADDED.get(name, len(args))
            yield from _texts(args[place] if place < len(args) else None)
            yield from (text for k in keywords if k.arg == "reason" for text in _texts(k.value))
        case ast.Assign(targets=[target], value=value):
            if ast.unparse(target).split(".")[-1] in _HELD or isinstance(value, ast.Tuple):
                yield from _texts(value)
        case ast.AnnAssign(target=target, value=value) if ast.unparse(target) in _HELD:
            yield from _texts(value)
        case ast.Return(value=value) if isinstance(value, ast.Tuple) or path == "forebay/tar/scan.py":
            yield from _texts(value)
        case ast.BoolOp(op=ast.Or(), values=[first, last]) if ast.unparse(first).split(".")[-1] in _HELD:
            yield from _texts(last)


def _reasons() -> set[str]:
    """Every reason that the source gives."""
    found = {
        *chat_fields.WHAT,
        *conversation.COUNTED.values(),
        json_lines.REPEATED,
        *scan._REASONS.values(),
        "unknown_type",
    }
    for path, tree in _trees().items():
        if re.match(r"forebay/(preprocess/|rows/|tar/|steps/|store/(image/|sound_containers)|train/uncached/)", path):
            found.update(text for node in ast.walk(tree) for text in _reasons_of(node, path))
    return {text for text in found if re.fullmatch(r"[a-z]+(_[a-z]+)+|format|sparse|symlink|truncated", text)}


def test_every_reason_of_the_source_has_an_entry() -> None:
    there = [entry.name for entry in entries() if entry.kind == "reason"]
    assert len(set(there)) == len(there)
    assert set(there) ^ _reasons() == set()
    assert {"corrupt_audio", "has_tools", "bad_checksum", "chained_audio", "repeated_field"} <= set(there)


def _sent(error: ForebayError) -> ForebayError:
    received: ForebayError = pickle.loads(pickle.dumps(error))  # noqa: S301  of this test
    return received


def test_codes_are_no_part_of_a_message_and_survive_a_pickle() -> None:
    for kind in (ConfigError, PlanError, CacheNotFoundError, MissingExtraError, ForebayError):
        plain, fine = kind("what"), kind("what", code="FB999")
        for error, code in ((plain, kind.code), (fine, "FB999")):
            for same in (error, _sent(error), copy.copy(error)):
                assert (type(same), str(same), same.args, same.code) == (kind, "what", ("what",), code)
    assert _sent(SampleError("corrupt_audio", "what")).code == "FB220"
    assert CacheNotFoundError("what", code="FB401").errno is None


@pytest.mark.parametrize(
    "topic", ["FB401", "fb401", "401", "CacheNotFoundError", "forebay.errors.CacheNotFoundError", "FB401:"]
)
def test_a_code_is_found_by_its_name_number_or_class(topic: str) -> None:
    assert [entry.name for entry in explained(topic).entries] == ["FB401"]


def test_the_command_prints_a_code_a_reason_a_symptom_and_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert cli.main(["explain", "FB401"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("FB401: no cache\n\n  Under `loader.cache = ")
    assert "`forebay key CONFIG --explain`" in said.replace("\n  ", " ")
    assert max(map(len, said.splitlines())) <= 60
    assert cli.main(["explain", "corrupt_audio"]) == 0
    assert (
        capsys.readouterr().out
        == "corrupt_audio: The decoder found damaged bytes.\n\n  Do: Copy or encode the file again.\n"
    )
    assert cli.main(["explain", "out", "of", "memory"]) == 0
    assert "Likely cause: A batch of the longest clips" in capsys.readouterr().out.replace("\n  ", " ")
    assert cli.main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"FB401  no cache", "FB701  loss or gradient is not finite"} <= set(lines)
    assert cli.main(["explain", "--json", "FB401"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["entries"]
    assert (found["kind"], found["name"], found["title"]) == ("code", "FB401", "no cache")


@pytest.mark.parametrize(
    ("topic", "near"), [("FB4O1", "FB"), ("corupt_audio", "corrupt_audio"), ("ConfgError", "ConfigError")]
)
def test_an_unknown_topic_is_refused_with_the_nearest(
    topic: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", topic]) == 2
    assert f"{topic}: no code, reason or words of this page; the nearest is {near}" in capsys.readouterr().err


def test_the_command_line_names_the_code_behind_the_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('name = "mine"\nmistake = 1\n[source]\nkind = "text"\nmanifest = "none.txt"\n')
    assert cli.main(["key", str(config)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("forebay: ")
    assert lines[-1] == "  FB101: forebay explain FB101"
    config.write_text('name = 1\n[source]\nkind = "text"\nmanifest = "none.txt"\n')
    assert cli.main(["key", str(config)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "  FB102: forebay explain FB102"


@pytest.mark.parametrize(
    ("raised", "status", "last"),
    [
        (SampleError("corrupt_audio", "what"), 1, "  corrupt_audio: forebay explain corrupt_audio"),
        (CacheNotFoundError("what"), 3, "  FB401: forebay explain FB401"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "  FB307: forebay explain FB307"),
        (OSError(errno.EACCES, "Permission denied", "x"), 1, "  FB306: forebay explain FB306"),
        (OSError(errno.EIO, "Input/output error"), 1, "  FB001: forebay explain FB001"),
        (OSError(errno.EFBIG, "File too large", "x"), 1, "  FB307: forebay explain FB307"),
    ],
)
def test_each_end_of_a_command_has_its_topic(
    raised: BaseException, status: int, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def action() -> int:
        raise raised

    assert program._guarded(action) == status
    assert capsys.readouterr().err.splitlines()[-1] == last


def test_the_wheel_holds_the_page(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "forebay", source / "forebay", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    make = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"forebay/{PAGE}").decode() == (ROOT / "forebay" / PAGE).read_text()
        assets = ROOT / "forebay" / "inspect" / "page" / "assets"
        assert {f"forebay/inspect/page/assets/{path.name}" for path in assets.iterdir()} <= set(archive.namelist())
