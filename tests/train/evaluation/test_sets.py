"""A fault of a set ends the run before its first step, with both values."""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import BAD_CONFIG, FAILED
from forebay.config.train import EvalConfig
from forebay.errors import CacheMismatchError, ConfigError, MissingExtraError
from forebay.train.evaluation import evaluations
from forebay.train.evaluation.evaluate import EvalResult, EvaluationOutcome
from forebay.train.evaluation.evaluations import EvalLog, line_of
from forebay.train.evaluation.rates import normalizer
from forebay.train.evaluation.sets import open_sets
from forebay.train.models.model_folder import model_facts
from tests.commands import run as command
from tests.train.evaluation.demo import ROOT, demo_config, make_demo
from tests.train.evaluation.test_demo import folder_of

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
SET = '[[train.eval]]\nname = "dev"\nconfig = "THIS"\n'


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Caches and models of both families; what is asked of sets here is the same of models that have learnt nothing."""
    folder = tmp_path_factory.mktemp("sets")
    for family in ("whisper", "qwen3_asr"):
        make_demo(folder, family, is_taught=False)
    return folder


def opened(training: Any, /, **changes: Any) -> Any:
    """The sets of a config, with other settings of its one set."""
    facts = model_facts(Path(training.train.model))
    sets = tuple(dataclasses.replace(each, **changes) for each in training.train.eval)
    changed = dataclasses.replace(training, train=dataclasses.replace(training.train, eval=sets))
    return open_sets(changed, facts=facts, rank=0, num_ranks=1)


def test_a_set_of_other_features_or_another_prompt_is_refused(demo: Path) -> None:
    whisper = folder_of(demo_config(demo, "whisper"))
    config = demo_config(demo, "qwen3_asr", sets=SET)
    with pytest.raises(CacheMismatchError, match=r"features: .* wants 'qwen3_asr', the cache has 'log_mel'"):
        opened(config, config=None, cache=str(whisper))
    with pytest.raises(ConfigError, match=r'audio.features is "log_mel", but .* takes "qwen3_asr"'):
        opened(config, config=str(demo / "whisper.toml"))


def test_a_set_of_another_tokenizer_is_refused(demo: Path, tmp_path: Path) -> None:
    config = demo_config(demo, "qwen3_asr", sets=SET)
    other = tmp_path / "tokenizer"
    shutil.copytree(ROOT / "demo" / "speech" / "qwen3_asr_model", other)
    document = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(document | {"model_max_length": 77}))
    assert config.text is not None
    changed = dataclasses.replace(config, text=dataclasses.replace(config.text, tokenizer=str(other)))
    with pytest.raises(CacheMismatchError, match=r'"dev": text.tokenizer is [0-9a-f]{16} in .* and [0-9a-f]{16} in '):
        opened(changed)


def test_an_empty_set_and_a_limit_above_the_models_end_with_2(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.toml"
    text = demo_config(demo, "qwen3_asr").path
    lines = Path(text).read_text().replace("max_samples = 12", 'languages = ["hi"]')
    empty.write_text(lines.replace('"caches"', f'"{tmp_path}"'))
    config = demo_config(demo, "qwen3_asr", sets=SET.replace("THIS", str(empty)))
    code, _, err = command(capsys, "train", config.path, "--set", f"train.output_dir={json.dumps(str(tmp_path))}")
    assert code == BAD_CONFIG
    assert 'forebay: [[train.eval]] "dev": no sample of ' in err
    assert not (tmp_path / "qwen3_asr").exists()  # no step was done
    config = demo_config(demo, "qwen3_asr", sets=f"{SET}generate_max_tokens = 100000\n")
    room = model_facts(Path(config.train.model or "")).max_positions
    with pytest.raises(ConfigError, match=rf"generate_max_tokens is 100000, the model in .* has {room} positions"):
        opened(config)
    code, _, err = command(capsys, "eval", demo_config(demo, "qwen3_asr").path)
    assert code == BAD_CONFIG
    assert "there is no set to evaluate; add one: [[train.eval]]" in err


def test_jiwer_that_is_missing_ends_the_run_before_its_first_step(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without_jiwer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jiwer":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    config = demo_config(demo, "qwen3_asr", sets=SET)
    monkeypatch.setattr(builtins, "__import__", without_jiwer)
    find = importlib.util.find_spec
    monkeypatch.setattr("forebay.extras.find_spec", lambda name: None if name == "jiwer" else find(name))
    with pytest.raises(MissingExtraError, match=r"pip install 'forebay\[train\]'"):
        opened(config)
    code, _, err = command(capsys, "eval", config.path)
    assert code == FAILED
    assert "forebay[train]" in err


def test_the_first_samples_are_taken_in_the_order_of_the_cache(demo: Path, caplog: pytest.LogCaptureFixture) -> None:
    [found] = opened(demo_config(demo, "qwen3_asr", sets=SET), max_samples=5)
    loader = found.loader
    indices = []
    for _ in loader:
        indices += loader.indices
    assert sorted(indices) == list(range(5))
    assert loader.plan.tail == "short"
    assert "generate_max_tokens" in caplog.text  # 5 samples of as many tokens as the model has positions
    assert len(found.languages) == 5


def test_normalisations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = " Don't [noise] colour, it's 20% "
    assert normalizer("none", tokenizer=tmp_path)(text) == text.strip()
    assert normalizer("basic", tokenizer=tmp_path)(text) == "don t colour it s 20"
    assert normalizer("whisper", tokenizer=tmp_path)(text) == "do not colour it is 20%"
    assert f"there is no {tmp_path / 'normalizer.json'}" in caplog.text
    (tmp_path / "normalizer.json").write_text('{"colour": "color"}')
    assert normalizer("whisper", tokenizer=tmp_path)(text) == "do not color it is 20%"
    for broken, message in (("{", "cannot read"), ("[]", "holds a list")):
        (tmp_path / "normalizer.json").write_text(broken)
        with pytest.raises(ConfigError, match=message):
            normalizer("whisper", tokenizer=tmp_path)


def result(step: int, **changes: Any) -> EvalResult:
    values = {"name": "dev", "loss": 1.2341, "wer": 0.29594, "cer": 0.112, "num_samples": 500, "elapsed_s": 41.2}
    return EvalResult(step=step, **{**values, "text": "none", **changes})


def test_the_line() -> None:
    assert line_of(result(100)) == "Step 100: dev WER 29.59 %, CER 11.20 %, loss 1.234 (500 samples, 41 s)"
    assert line_of(result(1, wer=None, cer=None, elapsed_s=0.31)) == "Step 1: dev loss 1.234 (500 samples, 0.3 s)"
    assert line_of(result(1, text="basic")).endswith("(500 samples, text basic, 41 s)")


def test_lines_behind_a_checkpoint_and_what_is_no_line_are_cut_away(tmp_path: Path) -> None:
    log = EvalLog(tmp_path, step=0)
    for step in (1, 2, 3):
        log.add(EvaluationOutcome(result=result(step, name="a/b"), worst=[]))
    path = tmp_path / evaluations.FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"step": 1')  # a line that was being written
    again = EvalLog(tmp_path, step=2)
    assert path.read_bytes().startswith(whole)  # nothing is touched before the first line
    again.add(EvaluationOutcome(result=result(3, name="a/b"), worst=[]))
    assert path.read_bytes() == whole
    assert sorted(found.name for found in (tmp_path / "eval").iterdir()) == [f"a_b-0000000{n}.txt" for n in (1, 2, 3)]
    EvalLog(tmp_path, step=0).add(EvaluationOutcome(result=result(7), worst=[]))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [7]
    assert json.loads(path.read_text())["wer"] == 0.29594


def test_a_set_has_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="exactly one of config and cache"):
        EvalConfig(name="dev")
