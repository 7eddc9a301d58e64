"""Writes `docs/config.md` from the settings in `forebay/config` and `forebay/steps`, and from their docstrings.

    python docs/make_config.py      (`make config-docs`)

A field without a docstring ends it. `tests/test_documents.py` compares the page with what this script would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from forebay.config.load import OF_NO_FILE
from forebay.config.plan import KINDS
from forebay.config.tree import Config
from forebay.steps.step import TextStep
from forebay.steps.table import STEPS, steps_named
from forebay.steps.text.normal.normal_step import NORMAL, normal_step

PAGE = Path(__file__).with_name("config.md")

TOUCHED = {
    "source.kind": (
        "",
        "`table` (CSV, TSV, parquet, JSONL, arrow), `folder`, `tar`, `filelist`, `webdataset`, "
        "`jsonl`, `hf`, `ljspeech`, `text`, `python` (an iterator of yours)",
    ),
    "source.manifest": (
        "",
        "file, folder or glob, or a list of them",
    ),
    "audio.features": (
        '"log_mel"',
        "`log_mel` (Whisper), `qwen3_asr`, `w2v_bert`, `waveform`, `mel` (speech synthesis), "
        "`given` (features of the source), `none` (text alone), `extractor` (any feature "
        "extractor), a class of yours",
    ),
    "vision.processor": (
        "",
        "images instead of audio: the folder of any image processor",
    ),
    "text.tokenizer": (
        "",
        "folder with the tokenizer's files; without `[text]` there are no tokens",
    ),
    "text.prompt": (
        '"plain"',
        "`whisper`, `qwen3_asr`, `plain`, `tts`; with `[vision]` `chat`, `label`, `plain`, `none`",
    ),
    "text.language": (
        '"manifest"',
        "`detect`, `detect_missing`: the language of each text, from the text",
    ),
    "text.normalize": (
        '"nfkc"',
        "a list of steps: `nfkc`, `lower`, `numbers`, `persian`, `indic`, `whisper_basic`, "
        "`phones`, a function of yours",
    ),
    "plan.batch_seconds": (
        "",
        'padded seconds a batch; for packs of Qwen-VL instead `kind = "pack"` and `seq_len`, the tokens of a pack',
    ),
    "loader.cache": (
        '"auto"',
        "`auto`, `require` (a missing cache is an error), `off`",
    ),
    "train.model": (
        "",
        "folder of a transformers model, for `forebay train`",
    ),
    "run.cache_root": (
        '"caches"',
        "where caches are looked for and built",
    ),
}
"""The fields that people touch: default and meaning of each."""

INTRODUCTION = """\
# The config, field by field

<!-- Written by `make config-docs` from the docstrings in `forebay/config` and `forebay/steps`: change them there. -->

A config is one TOML file, or a dict of the same for `forebay.load_config`. Paths are relative to the file; those of a
dict are relative to the current folder. A setting of the command line wins over the file: `--set loader.seed=3`.

What changes a stored value is in the cache's key, by its content. `[layout]`, `[plan]`, `[filter]`, `[loader]`,
`[mixture]`, `[train]` and `[run]` are not in that key; a plan has a key of its own on top. An unknown field is refused,
with the nearest name.

These fields are the ones that people touch:

@TOUCHED@

`[plan]` has a `kind`, which says what other fields there are. Left out, the kind is `"bucket"`.
"""

OF_SECTION = {"audio": ("audio", "features"), "text": ("text", "prompt"), "vision": ("image", "")}
"""By section: the group whose steps it chooses from, and the field that names one."""

TYPES = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}

HEAD = ("| field | type | default | meaning |", "|---|---|---|---|")


def page() -> str:
    """Returns the text of `docs/config.md`."""
    rows = [f"| `{name}` | {f'`{default}`' if default else ''} | {says} |" for name, (default, says) in TOUCHED.items()]
    touched = "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])
    return "\n".join([INTRODUCTION.replace("@TOUCHED@", touched), *_section(Config, "")])


def _section(owner: Any, name: str) -> Iterator[str]:
    """Yields the lines of a section: what it is, its fields in a table, and the sections inside of it."""
    hints, documented = get_type_hints(owner), _docstrings(owner)
    inner: list[tuple[str, Any]] = []
    yield from HEAD
    for field in dataclasses.fields(owner):
        if (field.name, name in OF_SECTION) == ("settings", True):
            continue
        dotted = f"{name}.{field.name}" if name else field.name
        sections = _dataclasses_in(hints[field.name])
        if sections:
            is_list = tuple in map(get_origin, (hints[field.name], *get_args(hints[field.name])))
            inner += [(f"[[{dotted}]]" if is_list else f"[{dotted}]", section) for section in sections]
        elif field.name not in OF_NO_FILE and (name, field.name) != (
            "plan",
            "kind",
        ):
            yield _row(field, hints[field.name], documented[field.name])
    if name in OF_SECTION:
        yield from _step_settings(*OF_SECTION[name])
    if name == "text":
        yield from _normal_steps()
    for heading, section in inner:
        kind = next((f' with `kind = "{kind}"`' for kind, settings in KINDS.items() if settings is section), "")
        yield from ("", f"## `{heading}`{kind}", "", _joined(section.__doc__), "")
        yield from _section(section, heading.strip("[]"))


def _step_settings(group: str, key: str) -> Iterator[str]:
    """Yields the settings of every step of a section, which stand in the section beside its own fields."""
    for name, step in ((each, step) for each in STEPS[group] for step in steps_named(group, each)):
        of = " beside images of a processor" if issubclass(step, TextStep) and "images" in step.beside else ""
        hints, documented = get_type_hints(step), _docstrings(step)
        yield from ("", f'### `{key} = "{name}"`{of}' if key else f"### `{name}`", "", _joined(step.__doc__ or ""), "")
        settings = [field for field in dataclasses.fields(step) if field.init]
        rows = [
            _row(field, hints[field.name], documented[field.name])
            for field in settings
            if field.name not in {*step.given, "version"}
        ]
        yield from ([*HEAD, *rows] if rows else ["No settings."])


def _normal_steps() -> Iterator[str]:
    """Yields the names that `text.normalize` takes, and what each does."""
    yield from ("", "### Steps of `normalize`", "", "They run in the order in which they are named.", "")
    yield from ("| step | what it does |", "|---|---|")
    for entry in (*NORMAL, "file.py:function"):
        yield f'| `"{entry}"` | {_joined(normal_step(entry).__doc__ or "").replace("|", chr(92) + "|")} |'


def _row(field: dataclasses.Field[Any], hint: Any, meaning: str) -> str:
    cells = (f"`{field.name}`", _type(hint), _default(field), meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _docstrings(owner: Any) -> dict[str, str]:
    """Returns the docstring of every field, inherited ones too."""
    found: dict[str, str] = {}
    for cls in reversed(owner.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
        for statement, behind in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(behind, ast.Expr):
                found[statement.target.id] = _joined(ast.literal_eval(behind.value))  # type: ignore[union-attr]
    return found


def _joined(text: str) -> str:
    return " ".join(text.split())


def _dataclasses_in(hint: Any) -> list[Any]:
    if dataclasses.is_dataclass(hint):
        return [hint]
    return [found for option in get_args(hint) for found in _dataclasses_in(option)]


def _type(hint: Any) -> str:
    options = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{json.dumps(option)}`" for option in options)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type(option) for option in options if option is not NoneType)
    if get_origin(hint) is tuple:
        return f"list of {_type(options[0])}"
    if get_origin(hint) is dict:
        return f"table of {_type(options[1])}"
    if get_origin(hint) is Mapping:
        return "table"
    return TYPES[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        example = field.metadata.get("example")
        return "required" + (f", for example `{example}`" if example else "")
    if field.default in (None, ()):
        return "none"
    return f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
