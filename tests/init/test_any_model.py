"""`forebay init` for models that forebay has no code for: what it writes builds, and batches are the model's."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import cli, load_config, open_cache
from forebay.train import make_loader
from tests.commands import run, run_json
from tests.init import layouts, model_folders
from tests.init.layouts import clips
from tests.init.model_folders import CLASSES, GEMMA3
from tests.preprocess.here_pool import build_here

Layout = Callable[[Path], Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of tiny models."""
    root = tmp_path_factory.mktemp("models")
    model_folders.ctc(root / "ctc")
    model_folders.vit(root / "vit", *CLASSES)
    model_folders.body(root / "body")
    model_folders.siglip(root / "siglip")
    model_folders.siglip(root / "no_tokenizer", tokenizer=False)
    model_folders.extractor(root / "clap", "ClapFeatureExtractor")
    return root


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the config that `forebay init` writes, and the first batch of the cache that is built of it."""
    report = run_json(capsys, "init", *arguments, "--out", "my.toml")
    assert report["next"][0] == "forebay preprocess my.toml"
    config = load_config("my.toml", overrides=["run.num_workers=1"])
    done = build_here(config)
    assert done.failed == done.excluded == {}
    assert len(open_cache(done.cache)) == report["found"][0]["count"]
    batch = next(iter(make_loader(config, dp_rank=0, dp_world_size=1)))
    return tomllib.loads(Path("my.toml").read_text()), batch


def test_an_extractor_and_its_ctc_model(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.table(tmp_path / "prompts")
    document, batch = written(capsys, data, "--model", models / "ctc", "--weights", "random")
    assert Path(document["audio"].pop("extractor")).resolve() == models / "ctc"
    assert document["audio"] == {"features": "extractor"}
    assert {**document["text"], "tokenizer": ""} == {"tokenizer": "", "prompt": "plain", "end_token": False}
    assert set(batch) == {"input_features", "attention_mask", "labels"}
    text = Path("my.toml").read_text()
    assert "# What its ParakeetFeatureExtractor gives of each recording" in text
    assert "CTC: its config.json names ParakeetForCTC" in text


@pytest.mark.wide
def test_an_extractor_that_draws_for_long_clips_has_a_limit(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clap cuts clips above 10 s at random places."""
    (tmp_path / "calls").mkdir()
    long = next(clip for clip in layouts.all_clips() if clip.duration_s > 10)
    for name, clip in (("short", clips()[0]), ("long", long)):
        (tmp_path / "calls" / f"{name}.flac").write_bytes(clip.data)
    run_json(capsys, "init", "calls", "--model", models / "clap")
    document = tomllib.loads(Path("calls.toml").read_text())
    assert (document["source"]["max_duration_s"], document["source"]["overlong"]) == (10.0, "drop")
    assert document["audio"]["sample_rate_hz"] == 48_000
    done = build_here(load_config("calls.toml", overrides=["run.num_workers=1"]))
    assert (done.failed, sum(done.excluded.values())) == ({}, 1)


LABELS: list[Layout] = [
    model_folders.class_folders,
    model_folders.label_table,
    model_folders.label_parquet,
    model_folders.label_tars,
]
PLAIN: list[Layout] = [
    model_folders.texts_beside,
    model_folders.caption_lines,
    model_folders.caption_parquet,
    model_folders.caption_tars,
]


@pytest.mark.parametrize("layout", LABELS, ids=lambda layout: layout.__name__)
def test_images_with_classes(layout: Layout, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layout(tmp_path / "pets")
    document, batch = written(capsys, data, "--model", models / "vit", "--weights", "random")
    assert document["text"] == {"prompt": "label"}
    assert set(batch) == {"pixel_values", "labels"}
    assert document["train"]["init"] == "random"


@pytest.mark.parametrize("layout", PLAIN, ids=lambda layout: layout.__name__)
def test_images_with_texts(layout: Layout, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layout(tmp_path / "pets")
    document, batch = written(capsys, data, "--model", models / "siglip", "--weights", "random")
    assert document["text"]["prompt"] == "plain"
    assert set(batch) == {"pixel_values", "input_ids", "attention_mask"}
    assert document["train"]["init"] == "random"


@pytest.mark.parametrize("layout", [model_folders.texts_beside, model_folders.caption_lines])
def test_texts_without_a_tokenizer_are_not_read(
    layout: Layout, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = layout(tmp_path / "pets")
    document, batch = written(capsys, data, "--model", models / "no_tokenizer")
    assert (document["text"], set(batch)) == ({"prompt": "none"}, {"pixel_values"})
    comments = " ".join(Path("my.toml").read_text().replace("# ", "").split())
    assert "holds no tokenizer; put tokenizer.json there and run init again" in comments


def test_what_no_config_json_decides_the_data_decides(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folders.class_folders(tmp_path / "pets")
    model_folders.bare(tmp_path / "photos")
    for data, prompt in (("pets", "label"), ("photos", "none")):
        document, _ = written(capsys, data, "--model", models / "body", "--force")
        assert document["text"] == {"prompt": prompt}


def test_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = layouts.photos(tmp_path / "zoo")
    document, batch = written(capsys, data, "--model", GEMMA3, "--weights", "random")
    assert document["text"]["prompt"] == "chat"
    assert set(batch) == {"pixel_values", "input_ids", "attention_mask", "token_type_ids", "labels"}
    assert "Gemma3ImageProcessorPil gives pixel_values" in Path("my.toml").read_text()


@pytest.mark.usefixtures("fresh_accelerate")
def test_classes_are_trained_by_the_commands_that_are_printed(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folders.class_folders(tmp_path / "pets")
    commands = run_json(capsys, "init", "pets", "--model", models / "vit", "--weights", "random")["next"]
    build_here(load_config("pets.toml"))
    assert commands[-1] == "forebay train pets.toml --steps 30"
    assert cli.main(["train", "pets.toml", "--steps", "1"]) == 0, capsys.readouterr().err


def test_classes_in_another_order_have_the_model_s_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_folders.class_folders(tmp_path / "pets")
    model = model_folders.vit(tmp_path / "model", "dog", "cat", "bird", "fish")
    document, batch = written(capsys, "pets", "--model", model, "--weights", "random")
    assert document["text"]["classes"] == ["dog", "cat", "bird", "fish"]
    assert document["source"]["manifest"] == "pets/train"
    assert set(batch["labels"].tolist()) <= {0, 1, 2}


def test_other_classes_than_the_model_s_are_not_trained_and_the_line_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_folders.class_folders(tmp_path / "pets")
    model_folders.vit(tmp_path / "model", "x", "y")
    code, out, _ = run(capsys, "init", "pets", "--model", "model")
    assert code == 0
    assert "the data has 3 classes (bird, cat, dog), and the model 2 classes (x, y)" in out
    assert 'write into model/config.json: "id2label": {"0": "bird", "1": "cat", "2": "dog"}' in out
    assert "train" not in tomllib.loads(Path("pets.toml").read_text())


@pytest.mark.parametrize(
    ("layout", "model", "more", "message"),
    [
        (
            model_folders.bare,
            "vit",
            (),
            "data has nothing beside the images, and --model wants a class of each image: its config.json names "
            r"ViTForImageClassification; name the column \(--column label=NAME\), or put the images into folders .*: "
            "--prompt none",
        ),
        (model_folders.class_folders, "siglip", (), "has a class of each image, and --model wants a text of each"),
        (layouts.photos, "siglip", (), "has conversations, and --model wants .* --prompt chat or --prompt none"),
        (layouts.photos, "siglip", ("--prompt", "chat"), "to store the images without their texts, give --prompt none"),
        (
            model_folders.bare,
            "body",
            ("--prompt", "label"),
            "--prompt label: .* has no such answer; wanted one of none",
        ),
        (layouts.table, "siglip", (), "hears no sound; name a Whisper or Qwen3-ASR folder, or any other"),
    ],
)
def test_what_does_not_fit_says_what_to_give(
    layout: Layout,
    model: str,
    more: tuple[str, ...],
    message: str,
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layout(tmp_path / "data")
    code, _, err = run(capsys, "init", "data", "--model", models / model, *more)
    assert code == 2
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(err)
    assert list(tmp_path.glob("*.toml")) == []


def test_a_class_that_cannot_be_loaded_is_named_before_a_config_is_written(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layouts.table(tmp_path / "prompts")
    model_folders.bare(tmp_path / "photos")
    for data, setting, kind, message in (
        ("prompts", "feature_extractor_type", "Pop2PianoFeatureExtractor", "needs the package "),
        ("photos", "image_processor_type", "Llama4ImageProcessor", "exists for torchvision alone"),
        ("photos", "image_processor_type", "NowhereImageProcessor", "is no class of the installed transformers"),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "preprocessor_config.json").write_text(f'{{"{setting}": "{kind}"}}')
        code, _, err = run(capsys, "init", data, "--model", folder)
        assert (code, f"forebay: --model {kind}: " in err, message in err) == (2, True, True), err
    assert list(tmp_path.glob("*.toml")) == []
