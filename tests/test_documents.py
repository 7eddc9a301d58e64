"""Documents that stay true: paths that are named exist, settings are explained, commands and code are of today."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import operator
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import forebay
from benchmarks import picture
from forebay import cli, load_config
from forebay.cli.program import make_parser
from forebay.config import tree
from forebay.plan.cursor import LoaderState
from forebay.steps import table
from forebay.train.loader import Loader

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "ARCHITECTURE.md",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "CONTRIBUTING.md",
    "forebay/errors.md",
    "demo/README.md",
    *(str(p.relative_to(ROOT)) for p in sorted((ROOT / "docs").rglob("*.md"))),
]
GUIDES = ["README.md", "forebay/errors.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
"""What a user reads, with commands, settings and code to copy."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_that_a_document_names_exists(name: str) -> None:
    text = _text(name)
    named = re.findall(r"`((?:forebay|tests|docs|configs|benchmarks|demo|examples)/[\w./-]*\w/?)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name.startswith(("ARCHI", "CONTRI", "docs/decisions"))])
def test_every_file_that_a_page_for_developers_names_exists(name: str) -> None:
    there = {
        path.name for folder in ("forebay", "tests", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    }
    assert [file for file in re.findall(r"`([\w/]+\.py)`", _text(name)) if file.split("/")[-1] not in there] == []


def test_architecture_names_every_room_on_two_pages() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = {path.name for path in (ROOT / "forebay").iterdir() if (path / "__init__.py").exists()}
    begin = dict(re.findall(r"^\| `forebay/(\w+)/` \| .* \| `(\w+\.py)` \|$", text, re.MULTILINE))
    assert begin.keys() == rooms
    assert [room for room, file in begin.items() if not (ROOT / "forebay" / room / file).exists()] == []
    assert len(text.split()) <= 1700


NO_SUBJECT = re.compile(
    r"(?:What|Of|About|After|As|At|Before|Behind|Below|Beside|Between|Beyond|By|For|From|In|Into|Like|On|Over|Past|Per|"
    r"Since|Through|To|Towards?|Under|Until|Upon|Via|With|Within|Without)\b"
)
MAY_LACK_ONE = re.compile(rf'(?:\A|:(?:  #.*)?\n *)"""\s*{NO_SUBJECT.pattern}')


def test_docstrings_begin_with_their_subject() -> None:
    """House rule: subject first. A sentence that begins with its object or a preposition is read twice."""
    found = []
    folders = ("forebay", "tests", "benchmarks", "examples", "docs", "demo")
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        code = path.read_text(encoding="utf-8")
        if MAY_LACK_ONE.search(code):  # parsing all of them takes seconds
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = ast.get_docstring(node) or ""
                    if NO_SUBJECT.match(text):
                        found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert found == []


def test_base_names_and_class_names_stand_once() -> None:
    """House rule: a name is looked for once. Faces and programs have fixed names; `_Name` is private to its file."""
    files = [path.name for path in (ROOT / "forebay").rglob("*.py") if not path.name.startswith("__")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "forebay").rglob("*.py"))
    public = re.findall(r"^ *class ([A-Z]\w*)\b.*[:(](?:  #.*)?$", code.replace("class Dialogues:", ""), re.MULTILINE)
    assert len(files) > 100 < len(public)
    assert [name for name, times in Counter(files + public).items() if times > 1] == []


def _script(name: str) -> Any:
    """A script of the folder of documents, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_of_the_config_is_what_its_docstrings_say() -> None:
    script = _script("make_config")
    assert script.PAGE.read_text() == script.page(), "run: make config-docs"


def test_the_picture_of_the_rooms_is_what_stands_on_disk() -> None:
    script = _script("make_rooms")
    assert script.PICTURE.read_text() == script.picture(), "run: make images"
    assert "](docs/images/rooms.svg)" in _text("ARCHITECTURE.md")


def test_the_page_of_the_config_begins_with_twelve_fields_that_there_are() -> None:
    page = (ROOT / "docs/config.md").read_text()
    shown = re.findall(r"^\| `(\w+)\.(\w+)` \|", page.partition("\n## ")[0], re.MULTILINE)
    assert len(shown) == 12
    sections = re.findall(r"^## `\[(\w+)\]`(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    known = {(section, name) for section, text in sections for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE)}
    assert set(shown) <= known


def test_every_command_and_option_of_the_page_of_commands_parses() -> None:
    rows = [line for line in (ROOT / "docs/commands.md").read_text().splitlines() if line.startswith("| `forebay ")]
    commands, shown = dict(_commands(make_parser())), []
    for row in rows:
        words = shlex.split(re.findall(r"`(.*?)`", row)[0])[1:]
        names = next(names for names in commands if list(names) == words[: len(names)])
        shown.append(names)
        parser = commands[names]
        with pytest.raises(SystemExit, match="0"):
            cli.main([*names, "--help"])
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"(--[a-z-]+)", row)) - {"--cache-dir"} <= known
    assert sorted(shown) == sorted(commands)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Every command with its words; `cache push` is a command of a command."""
    if parser._subparsers is None:
        yield (), parser
        return
    choices: dict[str, argparse.ArgumentParser] = parser._subparsers._group_actions[0].choices  # type: ignore[assignment]
    for name, inner in choices.items():
        yield from (((name, *names), found) for names, found in _commands(inner))


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _blocks(name: str, language: str) -> list[str]:
    """The bodies of the code blocks of one language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", _text(name), re.DOTALL | re.MULTILINE)
    return [body for found, body in fenced if found == language]


def test_every_page_is_named_by_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    pages = [p.name for p in (ROOT / "docs").glob("*.md")] + ["benchmarks/README.md", "decisions/"]
    assert [page for page in pages if f"`docs/{page}`" not in text] == []
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(links) > len(pages)
    assert [link for link in links if not (ROOT / link).exists()] == []
    figures = (ROOT / "docs/benchmarks/README.md").read_text()
    dated = [p.name for p in (ROOT / "docs/benchmarks").glob("*_*.md")]
    assert [page for page in dated if f"`docs/benchmarks/{page}`" not in figures] == []


def test_every_command_of_a_guide_parses_and_names_a_config_that_is_there() -> None:
    lines = [line for name in GUIDES for block in _blocks(name, "") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if re.match(r"forebay [a-z]|inspect_cache ", line)]
    commands += [
        shlex.split(text) for name in GUIDES for text in re.findall(r"`(forebay [a-z]+ configs[^`]*)`", _text(name))
    ]
    assert len(commands) > 10
    for command in commands:
        given = command[1:] if command[0] == "forebay" else ["inspect", *(p for p in command[1:] if p != "--cache-dir")]
        make_parser().parse_args(given)
        assert [part for part in given if part.startswith("configs/") and not (ROOT / part).exists()] == []


@pytest.mark.parametrize("name", GUIDES)
def test_settings_of_a_guide_are_settings(name: str) -> None:
    """A block of TOML is taken on top of a demo config; a field in code (`train.seed`) is one of its section."""
    for block in _blocks(name, "toml"):
        settings = tomllib.loads(block)
        demo = tomllib.loads((ROOT / f"configs/demo_{'any' if 'vision' in settings else 'speech'}.toml").read_text())
        for section, fields in settings.items():
            if isinstance(fields, list):  # tables of one name
                demo[section] = fields
                continue
            if "features" in fields or (section == "plan" and "kind" in fields):
                demo[section] = {}  # other features, and other kinds of plans, have other settings
            demo[section] = {**demo.get(section, {}), **fields} if isinstance(fields, dict) else fields
        load_config(demo)
    sections = {f.name: get_type_hints(tree.Config)[f.name] for f in dataclasses.fields(tree.Config)}
    known = {name: _fields_of(kind) for name, kind in sections.items()}
    for group, section in (("audio", "audio"), ("text", "text"), ("image", "vision")):
        known[section] |= {setting for step in table.STEPS[group] for setting in table.settings_of(group, step)}
    named = re.findall(r"`([a-z]+)\.(?!toml)([a-z_]+)(?: = [^`]*)?`", _text(name))
    known["loader"] |= set(vars(Loader))  # the object `loader` has the section's name: `loader.weight`
    assert all(known[section] for section in ("source", "plan", "loader", "train", "run"))
    wrong = [f"{section}.{field}" for section, field in named if known.get(section) and field not in known[section]]
    assert wrong == []


def _fields_of(kind: Any) -> set[str]:
    """The fields of a section, of every part of a union of sections."""
    parts = [kind, *get_args(kind)]
    return {field.name for part in parts if dataclasses.is_dataclass(part) for field in dataclasses.fields(part)}


@pytest.mark.parametrize("name", GUIDES)
def test_code_of_a_guide_compiles_and_names_what_is_there(name: str) -> None:
    for block in _blocks(name, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("forebay"):
                missing = [a.name for a in node.names if not hasattr(importlib.import_module(node.module), a.name)]
                assert missing == []
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("forebay."):
                operator.attrgetter(ast.unparse(node).removeprefix("forebay."))(forebay)


def test_the_picture_is_what_the_result_pages_say() -> None:
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.picture()  # else run `make images`
    assert "](docs/images/gains.svg)" in (ROOT / "README.md").read_text()
    for panel in picture.PANELS:
        others = [label for label in panel.rows.values() if not label.startswith("forebay")]
        assert 0 < len(others) < len(panel.rows)


def test_the_page_on_order_shows_the_state_as_it_is() -> None:
    text = (ROOT / "docs/order.md").read_text()
    shown = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    real = LoaderState(plan_key="55d0ce2c", seed=17, epoch=0, position=4096).to_json()
    assert {**shown, "plan_key": shown["plan_key"][:8]} == real
    assert re.findall(r"^\| `(version|plan_key|seed|epoch|position)` \|", text, re.MULTILINE) == list(real)


def test_the_page_on_frameworks_names_every_example() -> None:
    text = (ROOT / "docs/frameworks.md").read_text()
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in examples if f"`examples/{name}`" not in text} == set()


# The public API: what documents and examples teach is what the faces of the packages offer.

FACES = {
    name: importlib.import_module(name)
    for name in (
        "forebay",
        *(f"forebay.{room}" for room in ("config", "errors", "inspect", "plan", "preprocess", "store", "train")),
        "forebay.train.integrations.hf",
        "forebay.train.integrations.qwen_finetune",
    )
}


def _taught() -> Iterator[tuple[str, str]]:
    """Yields the file, and each dotted name below `forebay` that an example or a document uses."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield from ((path.name, name) for name in _names(path.read_text()))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text()
        for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            yield from ((path.name, name) for name in _names(block))
        yield from ((path.name, name) for name in re.findall(r"`(forebay(?:\.\w+)+)", text))


def _names(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "forebay")
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "forebay":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"forebay(\.\w+)+", ast.unparse(node)):
            yield ast.unparse(node)


def _is_public(name: str) -> bool:
    """Whether a dotted name is a face, or is in the `__all__` of its face."""
    face = max((face for face in FACES if f"{name}.".startswith(f"{face}.")), key=len)
    rest = name[len(face) + 1 :].split(".")[0]
    public = getattr(FACES[face], "__all__", [*vars(FACES[face])])
    return not rest or rest in public or any(other.startswith(f"{name}.") for other in FACES)


def test_documents_and_examples_use_public_names_alone() -> None:
    taught = list(_taught())
    assert {"README.md", "vision.md", "plain_loop.py", "torch_dataloader.py"} <= {file for file, _ in taught}
    assert [(file, name) for file, name in taught if not _is_public(name)] == []
    below = (
        "forebay.train.models.model_folder.load_model",
        "forebay.train.select",
        "forebay.nothing",
        "forebay.plan.make",
    )
    assert [name for name in below if _is_public(name)] == []


@pytest.mark.parametrize("face", sorted(set(FACES) - {"forebay.errors"}))
def test_every_public_name_is_there_and_has_a_docstring(face: str) -> None:
    module = FACES[face]
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
            assert value.__doc__, f"{face}.{name}"
            assert not value.__doc__.startswith(f"{name}("), f"{face}.{name} has the docstring that dataclass makes"


def test_no_committed_text_names_a_machine() -> None:
    banned = re.compile("|".join(("/" + "work" + "/", "/" + "root" + "/", "pypi" + "-more")))
    suffixes = {".py", ".md", ".toml", ".cfg", ".txt", ".json", ".sh"}
    files = [
        p
        for folder in ("forebay", "tests", "docs", "configs", "benchmarks", "demo")
        for p in (ROOT / folder).rglob("*")
    ]
    found = [
        str(p)
        for p in [*files, *ROOT.glob("*")]
        if p.is_file() and p.suffix in suffixes and banned.search(p.read_text())
    ]
    assert found == []
