"""Folders of models of which `forebay init` has to say something: what is left out, what is bounded, what cannot be."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.init.found_model import read_model
from tests.commands import run, run_json
from tests.init import layouts, model_folders
from tests.vlm_families import FAMILIES, LLAVA, write_family


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings, photos and conversations."""
    root = tmp_path_factory.mktemp("data")
    layouts.table(root / "prompts")
    model_folders.bare(root / "zoo")
    layouts.photos(root / "talk")
    return root


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(capsys: pytest.CaptureFixture[str], data: Path, model: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the report of `forebay init`, and the config."""
    report = run_json(capsys, "init", data, "--model", model, "--out", "my.toml", "--yes")
    return report, tomllib.loads(Path("my.toml").read_text())


def test_outputs_that_cannot_be_stored_are_left_out_and_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cohere = model_folders.extractor(tmp_path / "cohere", "CohereAsrFeatureExtractor", feature_size=16)
    report, config = written(capsys, data / "prompts", cohere)
    assert config["audio"]["leave_out"] == ["audio_chunk_index"]
    assert "audio.leave_out: audio_chunk_index cannot be stored" in report["decided"]
    fuyu = model_folders.extractor(tmp_path / "fuyu", "FuyuImageProcessorPil", size={"height": 60, "width": 60})
    assert run(capsys, "init", data / "zoo", "--model", fuyu, "--out", "fuyu.toml")[0] == 0
    assert tomllib.loads(Path("fuyu.toml").read_text())["vision"]["leave_out"] == ["image_scale_factors"]


def test_images_that_are_not_padded_are_batches_of_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = {"shortest_edge": 32, "longest_edge": 32}
    eomt = model_folders.extractor(tmp_path / "eomt", "EomtImageProcessorPil", size=size)
    report, config = written(capsys, data / "zoo", eomt)
    assert config["plan"]["batch_size"] == 1
    (note,) = report["notes"]
    assert "alone only: pixel_values is" in note
    assert "docs/vision.md" in note


def test_values_that_depend_on_neighbours_are_said(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_folders.extractor(tmp_path / "w2v", "Wav2Vec2FeatureExtractor", return_attention_mask=False)
    report, config = written(capsys, data / "prompts", model)
    assert config["audio"] == {"features": "extractor", "extractor": "w2v"}
    (note,) = report["notes"]
    assert "alone only: its own batches have other values in input_values" in note


def test_a_step_of_our_own_is_taken_where_it_makes_the_values(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = model_folders.extractor(tmp_path / "ours", "WhisperFeatureExtractor", feature_size=128)
    _, config = written(capsys, data / "prompts", ours)
    assert config["audio"] == {"features": "log_mel", "n_mels": 128}
    assert "# What its WhisperFeatureExtractor gives, by a step of forebay's own" in Path("my.toml").read_text()
    other = model_folders.extractor(tmp_path / "other", "WhisperFeatureExtractor", padding_value=1.0)
    assert read_model(other).audio == {"features": "extractor", "extractor": other}


def test_a_model_that_sees_and_hears_is_taken_for_what_the_data_is(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    omni, parts = tmp_path / "omni", {"feature_extractor": "Gemma3nAudioFeatureExtractor"}
    omni.mkdir()
    for name, kind in {**parts, "image_processor": "SiglipImageProcessorPil"}.items():
        folder = model_folders.extractor(tmp_path / kind, kind)
        parts[name] = json.loads((folder / "preprocessor_config.json").read_text())
    (omni / "processor_config.json").write_text(json.dumps(parts))
    (omni / "config.json").write_text(json.dumps({"architectures": ["Gemma3nForConditionalGeneration"]}))
    _, config = written(capsys, data / "prompts", omni)
    assert config["audio"] == {"features": "extractor", "extractor": "omni"}
    assert "train" not in config
    found, _, err = run(capsys, "init", data / "zoo", "--model", omni)
    assert (found, "--model wants conversations: its config.json names Gemma3nFor" in err) == (2, True)
    assert run(capsys, "init", data / "zoo", "--model", omni, "--prompt", "none")[0] == 0


def talking(folder: Path, template: str | None) -> Path:
    write_family(FAMILIES["smolvlm"], folder)
    (folder / "chat_template.jinja").unlink()
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def code(folder: Path) -> Path:
    return model_folders.changed(model_folders.vit(folder), "preprocessor_config.json", auto_map={"A": "x.Y"})


def test_what_cannot_be_is_said_with_what_to_do_and_nothing_is_asked(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whisper = model_folders.extractor(tmp_path / "dither", "WhisperFeatureExtractor", dither=0.5)
    for name, model, more, said in (
        ("talk", talking(tmp_path / "silent", None), (), ("chat template", "is missing", "give --prompt none")),
        ("talk", talking(tmp_path / "llava", LLAVA), (), ("wanted a control token", "give --prompt none")),
        ("zoo", code(tmp_path / "code"), ("--prompt", "none"), ("auto_map names code", "never run")),
        ("prompts", whisper, (), ("other values when it is asked again", "dither = 0.0")),
    ):
        found, _, err = run(capsys, "init", data / name, "--model", model, *more)
        assert (found, [each for each in (f"--model {model.name}: ", *said) if each not in err]) == (2, []), err
    assert list(tmp_path.glob("*.toml")) == []


def test_a_url_names_the_download(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, _, err = run(capsys, "init", data / "zoo", "--model", "https://huggingface.co/google/vit-base")
    assert found == 2
    assert "forebay fetch google/vit-base" in err


NAMES = st.sampled_from(
    (
        *("image_processor_type", "feature_extractor_type", "processor_class", "image_processor", "feature_extractor"),
        *("audio_processor", "sampling_rate", "size", "architectures", "model_type", "id2label", "text_config"),
        *("num_mel_bins", "max_position_embeddings", "feature_size", "do_resize"),
    )
)
WORDS = st.sampled_from(
    ("ViTImageProcessor", "Qwen2VLImageProcessor", "WhisperFeatureExtractor", "vit", "qwen3_vl", "x")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 40_000) | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=5) | VALUES


@given(st.dictionaries(st.sampled_from(("config", "preprocessor_config", "processor_config")), DOCUMENTS))
def test_any_documents_are_a_model_or_refused(
    tmp_path_factory: pytest.TempPathFactory, documents: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    try:
        model = read_model(folder)
    except ConfigError as err:
        assert folder.name in str(err)  # noqa: PT017  either of two is right
    else:
        assert model.folder == folder
        assert set(model.audio) <= {"features", "n_mels", "extractor", "sample_rate_hz", "dtype"}
