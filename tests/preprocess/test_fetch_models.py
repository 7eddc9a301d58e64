"""Models of the Hub in the place of folders: `preprocess` and `fetch` bring them, others read the client's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay.config.pretrained_folder import HubModel, is_whole, model_of, model_place, split_id
from forebay.errors import ConfigError
from tests.commands import run, run_json
from tests.hub import COMMIT, Hub, files_of, serving, use
from tests.processes import ROOT

SPEECH = ROOT / "demo" / "speech" / "model"
MODEL = f"demo/tiny@{COMMIT}"
EXTRA = {
    "model.safetensors": b"\0" * 8,
    "model.fp16.safetensors": b"no",
    "pytorch_model.bin": b"pickle",
    "code.py": b"raise SystemExit",
    "README.md": b"# tiny",
    "onnx/config.json": b"{}",
    "additional_chat_templates/tools.jinja": b"{{ messages }}",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in with the demo's model and files beside it that nobody should fetch."""
    with serving({"demo/tiny": files_of(SPEECH) | EXTRA, "demo/bare": files_of(SPEECH)}) as (found, url):
        use(monkeypatch, url, tmp_path / "hub")
        yield found


def config_file(folder: Path, tokenizer: str, *, model: str = "") -> Path:
    text = f"""
name = "clips"
source = {{ kind = "tar", manifest = {str(ROOT / "demo" / "speech" / "train.parquet")!r}, max_samples = 4 }}
audio = {{ features = "log_mel", n_mels = 80 }}
text = {{ prompt = "whisper", tokenizer = "{tokenizer}" }}
run = {{ num_workers = 1 }}
"""
    path = folder / "clips.toml"
    path.write_text(text + (f'train = {{ model = "{model}" }}\n' if model else ""))
    return path


def names_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_build_fetches_what_it_reads_and_has_the_key_of_the_folder(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = run_json(capsys, "key", config_file(tmp_path, str(SPEECH)))
    file = config_file(tmp_path, MODEL)
    code, _, err = run(capsys, "key", file)
    assert code == 2
    assert f"bring it: forebay fetch {MODEL}" in err
    assert hub.asked == []

    built = run_json(capsys, "preprocess", file, "--no-progress")
    assert built["num_samples"] == 4
    folder = HubModel("demo/tiny", COMMIT).folder
    documents = {name for name in files_of(SPEECH) if name.endswith((".json", ".txt", ".jinja"))}
    assert names_in(folder) == documents | {"additional_chat_templates/tools.jinja"}
    asked = len(hub.asked)
    assert run_json(capsys, "key", file)["key"] == built["key"]
    assert run_json(capsys, "preprocess", file)["num_samples"] == 4
    assert len(hub.asked) == asked
    # The chat template beside the demo's files is content, so it is in the key.
    assert built["key"] != local["key"]
    (folder / "additional_chat_templates" / "tools.jinja").unlink()
    HubModel("demo/tiny", COMMIT).list_path.unlink()
    assert run_json(capsys, "key", file)["key"] == local["key"]


def test_weights_come_once_and_only_as_safetensors(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, MODEL, model=MODEL)
    report = run_json(capsys, "fetch", file)
    assert [each["model"] for each in report["models"]] == [MODEL, MODEL]  # documents, then weights too
    names = names_in(HubModel("demo/tiny", COMMIT).folder)
    assert "model.safetensors" in names
    assert not names & {"model.fp16.safetensors", "pytorch_model.bin", "code.py", "README.md", "onnx/config.json"}
    assert run_json(capsys, "fetch", file)["models"] == []


def test_a_model_without_safetensors_is_built_from_and_asked_for_once(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = config_file(tmp_path, MODEL, model=f"demo/bare@{COMMIT}")
    assert run_json(capsys, "preprocess", file, "--no-progress")["num_samples"] == 4
    assert [record.message for record in caplog.records if "train.model: demo/bare@" in record.message]
    asked = len(hub.asked)
    assert run_json(capsys, "preprocess", file)["num_samples"] == 4
    assert len(hub.asked) == asked
    code, _, err = run(capsys, "train", file)
    assert code == 2, err


def test_init_takes_a_model_that_was_fetched_and_writes_its_id(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("init", ROOT / "demo" / "ljspeech", "--model", MODEL, "--out", tmp_path / "new.toml", "--yes")
    code, _, err = run(capsys, *command)
    assert (code, f"bring it: forebay fetch {MODEL}" in err) == (2, True), err
    run_json(capsys, "fetch", MODEL)
    asked = len(hub.asked)
    code, _, err = run(capsys, *command)
    assert (code, len(hub.asked)) == (0, asked), err
    text = (tmp_path / "new.toml").read_text()
    assert f'tokenizer = "{MODEL}"' in text
    assert run_json(capsys, "preprocess", tmp_path / "new.toml", "--no-progress")["num_samples"] > 0


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0"])
def test_what_can_move_is_refused_with_the_commit(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], revision: str
) -> None:
    code, _, err = run(capsys, "preprocess", config_file(tmp_path, f"demo/tiny{revision}"))
    assert (code, f"forebay fetch demo/tiny{revision}" in err) == (2, True), err
    code, _, err = run(capsys, "fetch", f"demo/tiny{revision}")
    assert code == 2
    assert (MODEL in err) == (revision != "@v1.0"), err
    assert not (tmp_path / "hub").exists()


def test_a_fetch_that_broke_off_is_not_read_and_goes_on(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, MODEL)
    hub.missing.add("tokenizer_config.json")  # without it there would be another key
    code, _, err = run(capsys, "preprocess", file)
    assert (code, "text.tokenizer: demo/tiny@" in err) == (2, True), err
    folder = HubModel("demo/tiny", COMMIT).folder
    assert folder.is_dir()
    assert not is_whole(folder)
    code, _, err = run(capsys, "key", file)
    assert (code, "not whole" in err) == (2, True), err
    hub.missing.clear()
    assert run_json(capsys, "preprocess", file)["num_samples"] == 4
    assert is_whole(folder)


def test_other_ranks_and_offline_ask_nothing(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = forebay.load_config(config_file(tmp_path, MODEL))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=f"rank 0 alone fetches {MODEL}"):
        forebay.preprocess.build(config)
    monkeypatch.delenv("RANK")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"text\.tokenizer: demo/tiny@.* does not come from the Hub"):
        forebay.preprocess.build(config)
    assert hub.asked == []


def test_a_folder_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "demo" / f"tiny@{COMMIT}"
    assert Path(model_place(MODEL, tmp_path)) == HubModel("demo/tiny", COMMIT).folder
    folder.mkdir(parents=True)
    assert Path(model_place(MODEL, tmp_path)) == folder
    assert model_of(folder) is None


def test_an_unknown_model_and_options_of_urls_are_refused(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "fetch", f"demo/gone@{COMMIT}")
    assert (code, f"demo/gone@{COMMIT} does not come from the Hub" in err) == (2, True), err
    for option in (["--output", "here"], ["--prefix", "a"], ["--dry-run"], ["--overwrite"], ["--ignore-etags"]):
        asked = len(hub.asked)
        code, _, err = run(capsys, "fetch", MODEL, *option)
        assert (code, f"{option[0]} is of a URL" in err, len(hub.asked)) == (2, True, asked), err
    assert split_id(f"a--b/c@{COMMIT}") is None
    code, _, err = run(capsys, "fetch", "s3://bucket/folder")
    assert (code, "--output: missing" in err) == (2, True), err


def test_what_is_fetched_is_listed_before_it_comes(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    run_json(capsys, "fetch", MODEL)
    names, _ = HubModel("demo/tiny", COMMIT).listed()
    assert set(names) == names_in(HubModel("demo/tiny", COMMIT).folder)


def test_a_processor_and_a_model_of_the_hub_are_those_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, demo = f"demo/gemma@{COMMIT}", ROOT / "configs" / "demo_any.toml"
    named = [f"--set={name}={model}" for name in ("vision.processor", "text.tokenizer", "train.model")]
    root = ("--cache-root", tmp_path / "caches")
    with serving({"demo/gemma": files_of(ROOT / "demo" / "vision" / "gemma3_model")}) as (hub, url):
        use(monkeypatch, url, tmp_path / "hub")
        built = run_json(capsys, "preprocess", demo, *named, *root, "--no-progress")
        asked = len(hub.asked)
        losses = run_json(capsys, "train", demo, *named, *root, "--steps", 2, f"--set=train.output_dir={tmp_path}/run")
        assert len(hub.asked) == asked
    assert built["key"] == run_json(capsys, "key", demo, *root)["key"]
    assert losses["steps"] == 2


def test_a_feature_extractor_of_the_hub_is_that_of_the_folder(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, MODEL)
    settings = ("--set=audio={features = 'extractor', extractor = %r}",)
    fetched = run_json(capsys, "preprocess", file, settings[0] % MODEL, "--no-progress")
    local = run_json(capsys, "key", file, settings[0] % str(SPEECH))
    assert (fetched["num_samples"], fetched["key"]) == (4, local["key"])
