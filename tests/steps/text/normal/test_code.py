"""Code of a config: run where texts are made, from the bytes of its key, and only if the config's file says so."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.preprocess.build_report import Options
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import Recipe, load_config, recipe_of
from forebay.steps.text.normal.normal_step import Code, Problem, Where
from forebay.store.cache import open_cache
from tests.commands import run
from tests.preprocess.here_pool import build_here
from tests.text_corpus import text_config

TOUCH = """\
import os
from dataclasses import dataclass
from pathlib import Path

with open(os.path.join(os.path.dirname(__file__), "imported.txt"), "a") as file:
    file.write(f"{os.getpid()}\\n")

@dataclass
class Rule:
    word: "str"

def shout(text: str, language: str) -> str:
    if "bad" in text:
        raise KeyError("no such word")
    if "none" in text:
        return None
    if "exit" in text:
        raise SystemExit(3)
    return text.upper() + Rule("!").word + language
"""


def step(folder: Path, source: str | bytes, spec: str = "my.py:shout", *, allow_code: bool = True) -> Code:
    path = folder / spec.partition(":")[0]
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return Code.of(spec, Where(folder=folder, tokenizer=folder, allow_code=allow_code))


def function(body: str) -> str:
    return f"import os, random, sys, time\nseen = []\ndef shout(text, language):\n    {body}\n"


def code_config(folder: Path, *, allow_code: str = "allow_code = true\n", source: str = TOUCH) -> Path:
    """Writes my.py, texts and a config that names it; returns the config."""
    rows = [
        {"id": str(i), "text": text, "language": "en"} for i, text in enumerate(["one", "bad", "none", "exit", "two"])
    ]
    (folder / "my.py").write_text(source)
    text_config(folder, rows=rows)
    config = (folder / "texts.toml").read_text().replace("[layout]", 'normalize = ["nfkc", "my.py:shout"]\n[layout]')
    (folder / "texts.toml").write_text(f"{config}max_failed_share = 1.0\n{allow_code}")
    return folder / "texts.toml"


def test_a_build_runs_the_function_and_a_bad_text_costs_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = code_config(tmp_path)
    report = build_here(load_config(path))
    assert (report.num_samples, report.failed | report.excluded) == (2, {"step_failed": 3})
    cache = open_cache(report.cache)
    assert cache.samples["sample_id"].to_pylist() == ["0", "4"]
    assert "1, step_failed: 1: text.normalize: my.py:shout raised KeyError: 'no such word' (line 14)" in caplog.text
    assert "2, step_failed: 2: text.normalize: my.py:shout returned NoneType, wanted a str" in caplog.text
    assert "3, step_failed: 3: text.normalize: my.py:shout raised SystemExit: 3 (line 18)" in caplog.text
    assert (tmp_path / "imported.txt").exists()
    again = build_here(load_config(path))
    assert again.already_sealed


def test_nothing_but_a_build_runs_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, root, ran = code_config(tmp_path), tmp_path / "caches", tmp_path / "imported.txt"
    assert run(capsys, "key", path)[0] == 0
    assert "my.py:shout was not run: lint runs no code" in run(capsys, "lint", path, "--workers", 1)[1]
    assert run(capsys, "inspect", path)[0] != 0  # there is no cache
    recipe = recipe_of(load_config(path))
    assert pickle.loads(pickle.dumps(recipe)).key == recipe.key  # noqa: S301 - as a task travels
    assert not ran.exists()
    report = build_here(load_config(path))
    runs = ran.read_text()
    commands = [["key", path, "--explain"], ["inspect", path], ["inspect", path, "--sample", "0"]]
    commands += [["cache", name, "--cache-root", root] for name in ("ls", "du")]
    assert [run(capsys, *command)[0] for command in commands] == [0] * len(commands)
    assert build_here(load_config(path)).already_sealed
    open_cache(report.cache).read(0)
    run(capsys, "cache", "rm", "--cache-root", root, Path(report.cache).name)
    assert ran.read_text() == runs


@pytest.mark.wide
def test_workers_run_it_and_other_worker_counts_give_the_same_texts(tmp_path: Path) -> None:
    path = code_config(tmp_path)
    here = build_here(load_config(path))
    other = load_config(path, overrides=[f'run.cache_root="{tmp_path / "other"}"', "run.num_workers=2"])
    workers = build(other, Options(progress=False))
    mine, theirs = open_cache(here.cache), open_cache(workers.cache)
    assert here.key == workers.key
    assert [mine.read(i)["input_ids"].tolist() for i in range(2)] == [
        theirs.read(i)["input_ids"].tolist() for i in range(2)
    ]
    pids = {int(line) for line in (tmp_path / "imported.txt").read_text().split()}
    assert len(pids) >= 4  # this process, two of the probe, and a worker


def test_the_content_of_the_file_is_in_the_key_and_its_place_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (
        recipe_of(load_config(code_config(tmp_path / "a"))),
        recipe_of(load_config(code_config(tmp_path / "b"))),
    )
    assert first.key == second.key
    changed = recipe_of(load_config(code_config(tmp_path / "b", source=TOUCH + "# more\n")))
    assert changed.key != first.key
    assert isinstance(first, Recipe)
    made = step(tmp_path, TOUCH)
    assert made.identity() == {"step": "Code", "version": 1, "function": "shout", "digest": made.digest}
    assert step(tmp_path, TOUCH, "below/it.py:shout").identity() == made.identity()
    assert made.label == "my.py:shout"


@pytest.mark.parametrize("line", ["", "allow_code = false\n"])
def test_without_leave_in_the_file_nothing_is_done(tmp_path: Path, line: str) -> None:
    path = code_config(tmp_path, allow_code=line)
    with pytest.raises(ConfigError, match=r'has "my\.py:shout", which is code.*write allow_code = true under \[run\]'):
        load_config(path)
    with pytest.raises(ConfigError, match="which is code"):
        step(tmp_path, TOUCH, allow_code=False)
    for override in ("run.allow_code=true", 'run={allow_code=true, cache_root="c"}', "run.allow_code=1"):
        with pytest.raises(ConfigError, match=r"run\.allow_code is what the config's own file says"):
            load_config(path, overrides=[override])
    assert not (tmp_path / "imported.txt").exists()


def test_a_config_of_the_program_itself_may_allow_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    document = tomllib.loads(code_config(tmp_path).read_text())
    monkeypatch.chdir(tmp_path)
    assert recipe_of(load_config(document)).key == recipe_of(load_config(tmp_path / "texts.toml")).key
    document["run"]["allow_code"] = False
    with pytest.raises(ConfigError, match="allow_code is what"):
        load_config(document, overrides=["run.allow_code=true"])
    with pytest.raises(ConfigError, match=r"run\.allow_code"):
        load_config({**document, "run": {"allow_code": 1}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my.py:no function", r'is no "file\.py:function"'),
        ("my.txt:shout", r'is no "file\.py:function"'),
        (":shout", r'is no "file\.py:function"'),
        ("os:getcwd", r'is no "file\.py:function"'),
        ("/tmp/my.py:shout", r"leads out of the config's folder"),
        ("../my.py:shout", r"leads out of the config's folder"),
        ("a/../../my.py:shout", r"leads out of the config's folder"),
        ("https://host/my.py:shout", r"names no file beside the config"),
        ("c:\\my.py:shout", r"names no file beside the config"),
        ("my\x1b[2J.py:shout", r"names no file beside the config"),
    ],
)
def test_what_names_no_file_beside_the_config_is_refused(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Code.of(spec, Where(folder=tmp_path, tokenizer=tmp_path, allow_code=True))
    path = code_config(tmp_path)
    path.write_text(path.read_text().replace('"my.py:shout"', f"{spec!r}"))
    if "\x1b" not in spec:
        with pytest.raises(ConfigError, match=message):
            load_config(path)


def test_links_pipes_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    step(tmp_path, TOUCH)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.py").symlink_to(tmp_path / "my.py")
    (tmp_path / "linked").symlink_to(tmp_path / "sub")
    (tmp_path / "sub" / "deep.py").write_text(TOUCH)
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "large.py").write_bytes(b"#" * ((1 << 20) + 1))
    where = Where(folder=tmp_path, tokenizer=tmp_path, allow_code=True)
    for name, message in (
        ("link", r"link\.py is a link"),
        ("linked/deep", r"linked is a link"),
        ("pipe", r"pipe\.py is no regular file"),
        ("folder", r"folder\.py is no regular file"),
        ("large", r"large\.py has more than 1048576 bytes"),
        ("missing", r"cannot read .*missing\.py: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            Code.of(f"{name}.py:shout", where)
    assert Code.of("sub/deep.py:shout", where).digest


def test_a_file_that_changes_behind_its_key_is_not_run(tmp_path: Path) -> None:
    made = step(tmp_path, TOUCH)
    (tmp_path / "my.py").write_text(TOUCH + "#\n")
    for use in (made.open, made.check):
        with pytest.raises(ConfigError, match=r"my\.py has changed: its sha256 was \w{16} and is \w{16}"):
            use()
    assert not (tmp_path / "imported.txt").exists()


NEVER_TWICE = {
    "chance": "return text + str(random.random())",
    "clock": "return text + str(time.perf_counter_ns())",
    "memory": "seen.append(text); return text + str(len(seen))",
    "set": "return ' '.join({*text, *'abcdefghijklmnop'})",
    "process": "return text + str(os.getpid())",
    "sometimes": "return text if random.random() < 0.5 else 1 / 0",
}


@pytest.mark.parametrize("body", NEVER_TWICE.values(), ids=NEVER_TWICE)
def test_what_gives_other_texts_for_the_same_is_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(ConfigError, match=r"my\.py:shout is not deterministic: for .*no clock") as caught:
        step(tmp_path, function(body)).check()
    assert caught.value.code == "FB120"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def shout(:", r"importing it raised SyntaxError"),
        ("import no_such_module_at_all", r"importing it raised ModuleNotFoundError.*line 1"),
        ("import sys; sys.exit(1)", r"importing it raised SystemExit: 1"),
        ("def other(text, language): return text", r"it has no function shout; its functions: other"),
        ("shout = 3", r"it has no function shout; its functions: none"),
        (b"\xff\xfe\x00", r"importing it raised"),
        (function("return None"), r"returned NoneType for .Hello, .*return a str"),
        (function("return 1 / 0"), r"raised for each of 12 probe texts, for the first ZeroDivisionError"),
        ("def shout(text): return text", r"raised for each of 12 probe texts.*is called with a text and its language"),
        (function("print('last words', file=sys.stderr); os._exit(9)"), r"exit status 9: last words"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_built(
    tmp_path: Path, source: str | bytes, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        step(tmp_path, source).check()


def test_a_build_of_a_function_that_is_not_deterministic_makes_nothing(tmp_path: Path) -> None:
    path = code_config(tmp_path, source=function(NEVER_TWICE["set"]))
    with pytest.raises(ConfigError, match="is not deterministic"):
        build_here(load_config(path))
    assert not list((tmp_path / "caches").glob("texts-*"))


def test_output_of_the_function_is_no_answer_and_one_file_imports_no_other(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("x = 1")
    made = step(tmp_path, function("print('noise', flush=True); os.write(1, b'[1]'); return text"))
    made.check()
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        step(tmp_path, "import beside\n" + function("return text")).check()
    made = step(tmp_path, function("return text"))
    before = (list(sys.path), set(sys.modules))
    assert made.open()(["a", "b"], ["", "en"]) == ["a", "b"]
    assert sys.path == before[0]
    assert {name for name in set(sys.modules) - before[1] if "forebay_code" not in name} == set()


def _as_text(make: Callable[[str], object]) -> str:
    return "class Text(str):\n    def __str__(self): return 'other'\n" + function(f"return {make('text')}")


def test_texts_are_plain_and_whole(tmp_path: Path) -> None:
    run_it = step(tmp_path, _as_text(lambda text: f"Text({text})")).open()
    (found,) = run_it(["a"], [""])
    assert (found, type(found)) == ("a", str)
    deep = step(tmp_path, function("return shout(text, language)")).open()
    (problem,) = deep(["a"], [""])
    assert isinstance(problem, Problem)
    assert problem.reason == "step_failed"
    assert "RecursionError" in problem.message
