"""demo/vision is what its README says: photos, licences, questions and model folder agree with each other."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from forebay import load_config
from forebay.pretrained import from_folder
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here

ROOT = Path(__file__).resolve().parent.parent
VISION = ROOT / "demo" / "vision"
MODEL = VISION / "model"
PHOTOS = sorted((VISION / "photos").iterdir())
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (VISION / "train.jsonl").read_text(encoding="utf-8").splitlines()
]
ORIENTATION = 0x0112


def images_of(row: dict[str, Any]) -> Iterator[str]:
    """The paths of a row's images, in the order of the conversation."""
    named = iter(row.get("images", []))
    if "image" in row:
        yield row["image"]
    for message in row.get("messages", []):
        yield from (part.get("image") or next(named) for part in message["content"] if part["type"] == "image")
    assert not list(named)


def turns_of(row: dict[str, Any]) -> int:
    return sum(message["role"] == "assistant" for message in row.get("messages", []))


def test_photos_are_as_many_kinds_as_promised() -> None:
    sizes, formats, turned = [], [], []
    for path in PHOTOS:
        with Image.open(path) as image:
            image.load()
            sizes.append(ImageOps.exif_transpose(image).size)
            formats.append(str(image.format))
            turned += [path.name] if image.getexif().get(ORIENTATION, 1) != 1 else []
    assert sorted(formats) == ["JPEG"] * 17 + ["PNG", "WEBP"]
    assert turned == ["dogs.jpg"]
    assert {max(size) for size in sizes} >= {320, 900}
    assert all(320 <= max(size) <= 900 for size in sizes)
    ratios = sorted(width / height for width, height in sizes)
    assert (round(ratios[0], 2), round(ratios[-1], 2)) == (0.67, 2.5)
    assert len({round(ratio, 1) for ratio in ratios}) >= 6
    assert sum(path.stat().st_size for path in PHOTOS) < 1_500_000


def test_every_photo_has_its_licence_and_nothing_else_has() -> None:
    lines = (VISION / "LICENSES.md").read_text(encoding="utf-8").splitlines()
    table = [line.split("|") for line in lines if line.startswith("| `")]
    assert [cells[1].strip(" `") for cells in table] == [path.name for path in PHOTOS]
    licences = {cells[3].strip() for cells in table}
    assert licences == {"CC-BY-2.0", "CC-BY-4.0", "CC-BY-SA-3.0", "CC-BY-SA-4.0", "CC0-1.0", "public domain"}
    assert all(cells[2].strip() and cells[4].strip().startswith("`") for cells in table)


def test_rows_are_of_every_form() -> None:
    assert 40 <= len(ROWS) <= 48
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    plain = [row for row in ROWS if set(row) == {"id", "image", "question", "answer"}]
    told = [row for row in ROWS if "messages" in row]
    assert (len(plain), len(told)) == (36, 8)
    assert len(plain) + len(told) == len(ROWS)
    assert sum(len(set(images_of(row))) > 1 for row in told) >= 2
    assert sum(len(list(images_of(row))) > len(set(images_of(row))) for row in told) == 1
    assert sum(turns_of(row) > 1 for row in told) == 2
    assert [row["id"] for row in told if not list(images_of(row))] == ["text-only"]
    assert all(row["question"].strip() and row["answer"].strip() for row in plain)


def test_questions_are_about_the_photos_that_are_there() -> None:
    asked = [image for row in ROWS for image in images_of(row)]
    assert set(asked) == {f"photos/{path.name}" for path in PHOTOS}
    firsts = [row["image"] for row in ROWS if "image" in row]
    assert any(firsts[i] == firsts[j] for i in range(len(firsts)) for j in range(i + 2, len(firsts)))


def test_the_model_folder_holds_configuration_and_no_weights() -> None:
    assert {path.name for path in MODEL.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 100_000


def test_configuration_tokenizer_and_processor_agree() -> None:
    tokenizer = from_folder(AutoTokenizer, MODEL)
    config = from_folder(AutoConfig, MODEL)
    processor = json.loads((MODEL / "preprocessor_config.json").read_text(encoding="utf-8"))
    tokens = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    for name, token in tokens.items():
        assert tokenizer.encode(f"<|{token}|>") == [getattr(config, f"{name}_token_id")]
    text, vision = config.text_config, config.vision_config
    assert len(tokenizer) == text.vocab_size
    assert (text.pad_token_id, text.eos_token_id[0]) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert sum(text.rope_parameters["mrope_section"]) == text.head_dim // 2
    assert vision.out_hidden_size == text.hidden_size
    assert (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size) == (
        processor["patch_size"],
        processor["merge_size"],
        processor["temporal_patch_size"],
    )


def test_the_model_runs_on_a_packed_image() -> None:
    torch.manual_seed(0)
    config = from_folder(AutoConfig, MODEL)
    model = AutoModelForImageTextToText.from_config(config)
    ids = torch.tensor(
        [[1, config.vision_start_token_id, *[config.image_token_id] * 6, config.vision_end_token_id, 2, 3]]
    )
    with torch.no_grad():
        loss = model(
            input_ids=ids,
            pixel_values=torch.rand(24, 3 * 2 * 16 * 16),
            image_grid_thw=torch.tensor([[1, 4, 6]]),
            mm_token_type_ids=(ids == config.image_token_id).int(),
            labels=ids,
            use_cache=False,
        ).loss
    assert 5 < loss < 9  # the logarithm of 1008 tokens is 6.9


def test_making_the_model_folder_again_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "demo")
    make_vision_model = importlib.import_module("make_vision_model")

    make_vision_model.make_qwen3_vl(tmp_path, make_vision_model.read_texts())
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in MODEL.iterdir()}


def test_the_film_is_made_of_its_photo_and_its_conversations_can_be_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "demo")
    importlib.import_module("make_film").make_film(tmp_path / "film.mp4")
    assert (tmp_path / "film.mp4").read_bytes() == (VISION / "sunset.mp4").read_bytes()
    report = build_here(load_config(ROOT / "configs/demo_film.toml", overrides=[f'run.cache_root="{tmp_path}"']))
    assert (report.num_samples, report.failed, report.excluded) == (3, {}, {})
    loader = make_loader(load_config(ROOT / "configs/demo_film.toml", overrides=[f'run.cache_root="{tmp_path}"']))
    (batch,) = loader
    assert batch["video_grid_thw"].tolist()[0][0] * 2 == 4  # frames: two a second
    assert len(batch["image_grid_thw"]) == 2


def test_the_script_makes_these_photos_and_a_turned_one_stands_upright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "demo")
    make_vision = importlib.import_module("make_vision")

    assert list(make_vision.PHOTOS) == [path.name for path in PHOTOS]
    source = VISION / "photos" / "cat.png"
    make_vision.make(make_vision.Photo(source="chelsea.png"), source, tmp_path / "same.png")
    assert (tmp_path / "same.png").read_bytes() == source.read_bytes()
    photo = make_vision.Photo(source="chelsea.png", long_side=40, crop=(0.0, 0.0, 0.5, 0.5), turned=True)
    make_vision.make(photo, source, tmp_path / "turned.png")
    with Image.open(tmp_path / "turned.png") as stored, Image.open(source) as original:
        cropped = original.crop((0, 0, round(original.width / 2), round(original.height / 2)))
        wanted = cropped.resize((40, round(cropped.height * 40 / cropped.width)), Image.Resampling.LANCZOS)
        assert stored.size == wanted.size[::-1]
        assert ImageOps.exif_transpose(stored).tobytes() == wanted.tobytes()
