"""Documents that stay true: paths that are named exist, configs are explained, commands of the README run."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from forebay import cli
from forebay.plan.cursor import LoaderState

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "ARCHITECTURE.md",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/config.md",
    "docs/how-order-works.md",
    "docs/vision.md",
    *(f"docs/decisions/{p.name}" for p in (ROOT / "docs/decisions").glob("*.md")),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_that_a_document_names_exists(name: str) -> None:
    text = (ROOT / name).read_text()
    named = re.findall(r"`((?:forebay|tests|docs|configs|benchmarks|demo|examples)/[\w./-]*\w/?)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_architecture_names_every_room() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rooms = [path.name for path in (ROOT / "forebay").iterdir() if (path / "__init__.py").exists()]
    assert [room for room in rooms if f"`forebay/{room}/`" not in text] == []


def test_the_page_of_the_config_is_what_its_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("make_config", ROOT / "docs" / "make_config.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run: make config-docs"


def test_the_readme_shows_fields_that_there_are_and_where_the_others_are() -> None:
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/config.md"))
    shown = re.findall(r"^\| `(\w+)\.(\w+)` \|", readme, re.MULTILINE)
    assert len(shown) == 10
    sections = re.findall(r"^## `\[(\w+)\]`(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    known = {(section, name) for section, text in sections for name in re.findall(r"^\| `(\w+)`", text, re.MULTILINE)}
    assert set(shown) <= known
    assert "(docs/config.md)" in readme


def test_every_command_and_option_of_the_readme_parses() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `forebay ")]
    assert len(rows) == 5
    for row in rows:
        name = shlex.split(re.findall(r"`(.*?)`", row)[0])[1]
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, "--help"])
        parser = cli._parser()._subparsers._group_actions[0].choices[name]  # type: ignore[union-attr,index]
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(re.findall(r"(--[a-z-]+)", row)) - {"--cache-dir"} <= known


def test_the_page_on_order_shows_the_state_as_it_is() -> None:
    text = (ROOT / "docs/how-order-works.md").read_text()
    shown = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    real = LoaderState(plan_key="55d0ce2c", seed=17, epoch=0, position=4096).to_json()
    assert {**shown, "plan_key": shown["plan_key"][:8]} == real
    assert re.findall(r"^\| `(version|plan_key|seed|epoch|position)` \|", text, re.MULTILINE) == list(real)
    examples = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in examples if f"`examples/{name}`" not in text} == set()


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
