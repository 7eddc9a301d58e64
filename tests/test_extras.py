"""Optional dependencies: each message about a missing one names the extra, by a line for an index and for a clone."""

from __future__ import annotations

import ast
import configparser
import pkgutil
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay import load_config
from forebay.errors import MissingExtraError
from forebay.extras import install_line
from forebay.preprocess.pipeline import build, prepare
from forebay.steps.recipe import recipe_of
from tests.commands import run
from tests.processes import ROOT

MODEL = ROOT / "demo" / "speech" / "model"
NOT_OF_USERS = {"dev", "docs"}

MISSING = {
    "obstore": ("remote", "forebay.store.remote.bucket.bucket:_obstore", ()),
    "zarr": ("zarr", "forebay.store.cold.arrays:zarr", ()),
    "matplotlib.figure": ("report", "forebay.inspect.picture:new_figure", (1.0, 1.0)),
    "matplotlib.backends.backend_agg": ("report", "forebay.inspect.picture:new_figure", (1.0, 1.0)),
    "ray": ("ray", "forebay.preprocess.runner.ray:imported", ()),
    "datasets": ("hf", "forebay.rows.readers.arrow_files:data_files", (None, ())),
    "diffusers": ("diffusers", "forebay.steps.model.model_section:require_diffusers", ("model.latents",)),
    "peft": ("lora", "forebay.train.models.lora:_peft", ()),
    "jiwer": ("train", "forebay.train.evaluation.rates:jiwer_module", ()),
    "accelerate": ("train", "forebay.train.loop.launch:process_state", ()),
    "py3langid": ("text", "forebay.steps.text.language_detector:model_file", ()),
    "webvtt": ("segments", "tests.rows.test_subtitles:read_one", ("a.srt",)),
    "praatio": ("segments", "tests.rows.test_subtitles:read_one", ("a.TextGrid",)),
    "av": ("video", "forebay.steps.image.video_frames:require_av", ("vision.fps",)),
    "shtab": ("completion", "forebay.cli.program:_completion", (SimpleNamespace(), "bash")),
}
"""What asks for a module and raises where it is missing."""

_NAMED_IN = {"install_line": 0, "require_module": 1, "require_major": 2}
"""The argument that is the extra."""


def extras() -> dict[str, str]:
    """The extras of setup.cfg and what they ask for."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return dict(parser["options.extras_require"])


def calls() -> dict[str, list[str]]:
    """The extras that are asked for in the product, and in which files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "forebay").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if path.name != "extras.py" and any(n in text for n in _NAMED_IN) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NAMED_IN:
                name = node.args[_NAMED_IN[node.func.id]]
                assert isinstance(name, ast.Constant), f"{path}: the extra is no literal"
                found.setdefault(str(name.value), []).append(path.relative_to(ROOT).as_posix())
    return found


def test_every_extra_of_users_is_named_by_a_message_and_every_message_names_an_extra() -> None:
    assert sorted(calls()) == sorted(set(extras()) - NOT_OF_USERS)


def test_a_line_is_for_an_index_and_for_a_clone() -> None:
    assert install_line("hf") == "pip install 'forebay[hf]' (from a clone: pip install -e '.[hf]')"


def test_no_other_message_says_how_an_extra_is_installed() -> None:
    for path in sorted((ROOT / "forebay").rglob("*.py")):
        if path.name != "extras.py":
            assert not re.search(r"pip install ['\"]?(forebay|-e|\.\[)", path.read_text(encoding="utf-8")), path


def test_every_place_that_misses_an_extra_ends_with_the_line() -> None:
    for path in sorted((ROOT / "forebay").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "MissingExtraError(" in text else ():
            is_error = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtraError"
            if is_error and path.name != "launch.py":  # a tracker is a package of its own, no extra
                assert "install_line(" in text, path


@pytest.mark.parametrize("module", sorted(MISSING))
def test_without_a_module_its_extra_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    extra, place, arguments = MISSING[module]
    ask: Any = pkgutil.resolve_name(place)
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=re.escape(install_line(extra))):
        ask(*arguments)


def test_every_extra_s_line_is_tried() -> None:
    # `gpu` is a line of the log: tests/train/loop/test_hardware.py
    assert {extra for extra, _, _ in MISSING.values()} == set(extras()) - NOT_OF_USERS - {"gpu", "build"}


def test_a_build_beside_an_old_transformers_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "configs" / "demo_speech.toml")
    monkeypatch.setattr("forebay.extras.version", {"transformers": "4.57.6"}.__getitem__)
    line = re.escape(install_line("build"))
    with pytest.raises(MissingExtraError, match=rf"transformers 5 .* 4\.57\.6 is installed.*{line}"):
        recipe_of(config).check()
    waveform = {"name": "x", "source": {"kind": "folder", "manifest": "."}, "audio": {"features": "waveform"}}
    recipe_of(load_config(waveform)).check()  # nothing of transformers makes these


def test_versions_of_the_tested_set_are_those_that_the_extras_allow() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and line[0] != "#"
    )
    for text in extras().values():
        for line in filter(None, (part.partition("#")[0].strip() for part in text.splitlines())):
            wanted = Requirement(line)
            if wanted.name in pins:
                assert wanted.specifier.contains(pins[wanted.name]), (line, pins[wanted.name])


@pytest.mark.parametrize(
    ("module", "settings", "message"),
    [
        ("num2words", {"text": {"tokenizer": str(MODEL), "normalize": ["numbers"]}}, "numbers"),
        ("py3langid", {"text": {"tokenizer": str(MODEL), "language": "detect"}}, "detect"),
        ("datasets", {"source": {"kind": "hf", "manifest": str(ROOT / "demo")}}, "hf"),
    ],
)
def test_a_build_that_lacks_an_extra_lists_no_source(
    module: str, settings: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = str(ROOT / "demo" / "speech" / "train.parquet")
    document = {"name": "x", "source": {"kind": "tar", "manifest": manifest}, "run": {"cache_root": str(tmp_path)}}
    config = load_config(document | settings)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("forebay.preprocess.pipeline.resolve", _fail)
    for make in (build, prepare):
        with pytest.raises(MissingExtraError, match=rf"{message}.* needs {module}"):
            make(config)


@pytest.mark.parametrize(
    ("module", "setting", "command"),
    [
        ("accelerate", "", "train"),
        ("accelerate", "", "eval"),
        ("jiwer", "", "train"),
        ("jiwer", "", "eval"),
        ("peft", "[train.lora]\nrank = 4\n", "train"),
    ],
)
def test_training_that_lacks_an_extra_reads_no_data_and_names_its_command(
    module: str,
    setting: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (
        f'name = "x"\n[source]\nkind = "tar"\nmanifest = "{ROOT}/demo/speech/train.parquet"\n'
        f'[text]\ntokenizer = "{MODEL}"\nprompt = "whisper"\n[train]\nmodel = "{MODEL}"\ninit = "random"\n'
        f'{setting}[[train.eval]]\nname = "dev"\nconfig = "x.toml"\n'
    )
    (tmp_path / "x.toml").write_text(text)
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("forebay.train.loop.run.make_loader", "forebay.train.evaluation.evaluations.open_sets"):
        monkeypatch.setattr(name, _fail)
    code, _, err = run(capsys, command, tmp_path / "x.toml")
    assert code == 1
    wanted = {"accelerate": f"forebay {command}", "jiwer": "evaluation by WER", "peft": "[train.lora]"}[module]
    assert f"forebay: {wanted} needs {module}; run: pip install 'forebay[" in err


def _fail(*_: object, **__: object) -> None:
    raise AssertionError("data was read")
