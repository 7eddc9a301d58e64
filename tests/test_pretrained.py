"""A stranger's model folder runs no code, not even after a `y`."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import ConfigError
from forebay.steps.image.qwen2_vl import load_processor
from forebay.train.models.model_folder import load_model, model_facts

ROOT = Path(__file__).parents[1]
HELPER = ROOT / "forebay" / "pretrained.py"
_LOADING = ("from_pretrained", "from_config", "get_class_from_dynamic_module", "get_cached_module_file")
_LOADS = re.compile("|".join((*_LOADING, r"pipeline\(", "trust_remote_code")))


OF_A_USER = [ROOT / "examples" / name for name in ("hf_sft_trainer.py", "qwen_vl_finetune.py", "trl_dpo.py")]
"""They hand on a tokenizer as a user's own script does: examples use public names alone, and the helper is none."""


def _python_files() -> Iterator[Path]:
    for room in ("forebay", "examples", "demo", "benchmarks"):
        yield from (ROOT / room).rglob("*.py")


def _bare_loads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and name of all that loads by transformers, whether called, handed on or asked for by its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _LOADING:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and node.id in _LOADING:
            yield node.lineno, node.id
        elif isinstance(node, ast.Constant) and node.value in _LOADING:
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pipeline":
            yield node.lineno, "pipeline"
        elif isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
            yield node.value.lineno, "trust_remote_code"


def test_transformers_loads_through_one_helper_alone() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in _python_files()
        if path not in (HELPER, *OF_A_USER) and _LOADS.search(text := path.read_text(encoding="utf-8"))
        for line, name in _bare_loads(ast.parse(text))
    ]
    assert found == [], "use forebay.pretrained.from_folder"
    assert [name for _, name in _bare_loads(ast.parse(HELPER.read_text()))] == ["from_pretrained", "trust_remote_code"]


@pytest.mark.parametrize(
    "line",
    [
        "AutoModel.from_pretrained(x)",
        "f = A.from_config",
        "getattr(A, 'from_pretrained')(x)",
        "load(trust_remote_code=True)",
    ],
)
def test_the_lint_sees_every_way_to_write_it(line: str) -> None:
    assert len(list(_bare_loads(ast.parse(line)))) == 1


_CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
class Evil: pass
"""
_AUTO: dict[str, str | list[str]] = {
    f"Auto{name}": "evil.Evil" for name in ("Config", "Model", "Processor", "ImageProcessor", "FeatureExtractor")
}
_AUTO |= {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoModelForImageTextToText": "evil.Evil"}
_LOAD = """
import sys
from pathlib import Path
from forebay.config.pretrained_folder import tokenizer_digest
from forebay.errors import ForebayError
from forebay.inspect.sample import load_tokenizer
from forebay.steps.text.chat.chat_steps import Chat
from forebay.steps.image.qwen2_vl import load_processor
from forebay.train.models.model_folder import load_model, model_facts
from forebay.train.warm_start import check_loaded, read_tokenizer
for given in sys.argv[1:]:
    folder = Path(given)
    for load in (
        lambda: load_processor(folder, "pil"),
        lambda: Chat(tokenizer=tokenizer_digest(folder)).opened(folder, merge_size=2),
        lambda: load_tokenizer(folder),
        lambda: model_facts(folder),
        lambda: load_model(folder, seed=0, init="random"),
        lambda: check_loaded(read_tokenizer(folder), folder),
    ):
        try:
            print("loaded", type(load()).__name__)
        except ForebayError as err:
            print("refused", str(err).replace("\\n", " "))
"""


def _evil(folder: Path, marker: Path, **config: Any) -> Path:
    """The demo's model folder: every JSON names code, that code, and a chat template that climbs out of its sandbox."""
    shutil.copytree(ROOT / "demo" / "vision" / "model", folder)
    for path in folder.glob("*.json"):
        document = json.loads(path.read_bytes())
        if path.name != "tokenizer.json":
            document |= {"auto_map": _AUTO, "custom_generate": "evil", **(config if path.name == "config.json" else {})}
        path.write_text(json.dumps(document), encoding="utf-8")
    for name in ("evil.py", "configuration_evil.py", "custom_generate/generate.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(_CODE.format(marker=str(marker)), encoding="utf-8")
    return folder


def _timm(folder: Path) -> Path:
    """A folder as timm writes its config.json, which makes transformers forget the preprocessor_config.json."""
    path = folder / "config.json"
    timm = {"architecture": "resnet18", "pretrained_cfg": {}, "auto_map": _AUTO, "image_processor_type": "Evil"}
    path.write_text(json.dumps(timm), encoding="utf-8")
    return folder


def _climbing(folder: Path, marker: Path) -> Path:
    climb = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    opens = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    (folder / "chat_template.jinja").write_text(climb + opens, encoding="utf-8")
    return folder


def test_no_code_of_a_folder_runs_even_after_a_yes(tmp_path: Path) -> None:
    """Takes 10 s of CPU: transformers itself is asked, in a process whose standard input says yes to everything."""
    marker = tmp_path / "code-was-run"
    folders = [
        _evil(tmp_path / "own", marker),
        _timm(_evil(tmp_path / "timm", marker)),
        _evil(tmp_path / "unknown", marker, model_type="evil"),
        _climbing(_evil(tmp_path / "template", marker), marker),
    ]
    environment = {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    ended = subprocess.run(
        [sys.executable, "-c", _LOAD, *map(str, folders)],
        input="y\n" * 100,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    assert not marker.exists(), ended.stdout
    lines = ended.stdout.splitlines()
    outcomes = [line.split()[0] for line in lines]
    own, timm, unknown, template = (outcomes[start : start + 6] for start in range(0, 24, 6))
    assert (own, timm[0], unknown[0]) == (["loaded"] * 6, "loaded", "loaded")
    assert timm[3:5] == unknown[3:5] == ["refused"] * 2
    assert template[1] == "refused"
    assert lines[0] == "loaded Qwen2VLImageProcessorPil"


def test_the_processor_is_made_of_the_file_that_was_checked(tmp_path: Path) -> None:
    folder = _timm(_evil(tmp_path / "model", tmp_path / "marker"))
    wanted = load_processor(ROOT / "demo" / "vision" / "model", "pil")
    found = load_processor(folder, "pil")
    assert (type(found), found.size, found.patch_size) == (type(wanted), wanted.size, wanted.patch_size)
    assert not hasattr(found, "auto_map")


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_kernel_that_would_be_fetched_is_refused(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "demo" / "vision" / "model", folder)
    document = json.loads((folder / "config.json").read_bytes())
    document["text_config"][key] = "stranger/kernel"
    (folder / "config.json").write_text(json.dumps(document))
    for load in (lambda: model_facts(folder), lambda: load_model(folder, seed=0, init="random")):
        with pytest.raises(ConfigError, match=r"config.json asks for .*stranger/kernel.*remove that entry"):
            load()


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_a_generation_config_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "demo" / "vision" / "model", folder)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config.json is not a transformers generation_config.json"):
        load_model(folder, seed=0, init="random")
