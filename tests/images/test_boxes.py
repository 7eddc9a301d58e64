"""Boxes, points and names in conversations: the numbers of ms-swift for each Qwen-VL, in packs and by the processor."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from transformers import AutoTokenizer

from forebay import load_config
from forebay.errors import ConfigError
from forebay.inspect.sample import spoken
from forebay.pretrained import from_folder
from forebay.steps.image.qwen2_vl import load_processor
from forebay.steps.image.video_settings import Family
from forebay.steps.recipe import recipe_of
from forebay.steps.text.chat.written_boxes import TOKENS, BoxWriter, with_boxes
from forebay.store.cache import open_cache
from forebay.store.image.image_settings import ImageSettings
from forebay.train.select import select
from tests.preprocess.corpus import json_lines
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, photo
from tests.vlm_families import FAMILIES, FOLDERS, write_family

PROCESSORS = {"qwen2": "Qwen2VLProcessor", "qwen2_5": "Qwen2_5_VLProcessor", "qwen3": "Qwen3VLProcessor"}
ASKED = {"role": "user", "content": "<image><image>Find <ref-object>, then  <ref-object>."}
SAID = {"role": "assistant", "content": '[{"bbox_2d": <bbox>, "label": "<ref-object>"}] <bbox>'}
BOXES = [[10.5, 3, 75.49, 79], [33, 31.7]]
ROW: dict[str, Any] = {
    "images": ["p0.jpg", "turned.jpg"],
    "messages": [ASKED, SAID],
    "objects": {"ref": ["a dog", "two cats", "dog"], "bbox": BOXES, "image_id": [0, 1]},
}


def by_ms_swift(family: Family, style: str, box: list[float], shown: Image.Image, grid: Any, patch: int) -> str:
    """The rule as its documentation and template say it. shown: the image; grid: the processor's own of it."""
    width, height = shown.size
    to = (int(grid[2]) * patch, int(grid[1]) * patch) if family == "qwen2_5" else (1000, 1000)
    numbers = []
    for place, number in enumerate(box):
        numbers.append(round(number / (height if place % 2 else width) * to[place % 2]))
    if style == "list":
        return f"[{', '.join(map(str, numbers))}]"
    points = [f"({numbers[i]},{numbers[i + 1]})" for i in range(0, len(numbers), 2)]
    return f"<|box_start|>{','.join(points)}<|box_end|>"


def folder_of(root: Path, family: Family) -> Path:
    """The demo's model as another Qwen-VL; grounding tokens are special, as in Qwen's tokenizers."""
    shutil.copytree(DEMO / "model", root / "model")
    path = root / "model/preprocessor_config.json"
    document = json.loads(path.read_text()) | {"processor_class": PROCESSORS[family]}
    path.write_text(json.dumps(document if family == "qwen3" else document | {"patch_size": 14}))
    for name in ("processor_config.json", "video_preprocessor_config.json", "config.json"):
        (root / "model" / name).unlink(missing_ok=True)
    return root / "model"


def config_of(root: Path, rows: list[dict[str, Any]], *overrides: str) -> Any:
    (root / "p0.jpg").write_bytes(photo(0))
    turned = Image.open(io.BytesIO(photo(1, width=150, height=64)))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned.save(root / "turned.jpg", exif=exif)
    (root / "rows.jsonl").write_text("".join(json.dumps({"id": f"r{n}", **row}) + "\n" for n, row in enumerate(rows)))
    (root / "c.toml").write_text(
        'name = "boxes"\n[source]\nkind = "jsonl"\nmanifest = "rows.jsonl"\n[vision]\nprocessor = "model"\n'
        '[text]\ntokenizer = "model"\nprompt = "chat"\n[plan]\nkind = "pack"\nseq_len = 1024\n'
        '[run]\ncache_root = "caches"\nnum_workers = 1\nmax_failed_share = 1.0\n'
    )
    return load_config(root / "c.toml", overrides=overrides)


def texts_of(folder: Path, source: Any, *, name: str = "input_ids") -> list[str]:
    """Returns the text of each sample, placeholders of images left out."""
    tokenizer = from_folder(AutoTokenizer, folder)
    found = [tokenizer.decode(source.read(index)[name]) for index in range(len(source))]
    return [text.replace("<|image_pad|>", "") for text in found]


CASES = [("qwen2", None), ("qwen2_5", None), ("qwen3", None), ("qwen2_5", "tokens"), ("qwen2", "list")]


@pytest.mark.parametrize(("family", "style"), CASES)
@pytest.mark.few
def test_numbers_are_ms_swift_s_in_packs_and_without_a_cache(tmp_path: Path, family: Any, style: str | None) -> None:
    folder = folder_of(tmp_path, family)
    config = config_of(tmp_path, [ROW], *([f'text.boxes="{style}"'] if style else []))
    processor, style = load_processor(folder, "pil"), style or ("tokens" if family == "qwen2" else "list")
    shown = [ImageOps.exif_transpose(Image.open(tmp_path / name)) for name in ROW["images"]]
    made = [
        by_ms_swift(family, style, box, image, processor([image])["image_grid_thw"][0], processor.patch_size)
        for box, image in zip(BOXES, shown, strict=True)
    ]
    ref = "<|object_ref_start|>{}<|object_ref_end|>" if style == "tokens" else "{}"
    asked = f"Find {ref.format('a dog')}, then  {ref.format('two cats')}."
    said = f'[{{"bbox_2d": {made[0]}, "label": "{ref.format("dog")}"}}] {made[1]}<|im_end|>'
    report = build_here(config)
    assert report.failed == {}
    cache = open_cache(report.cache)
    for source in (cache, select(load_config(tmp_path / "c.toml", overrides=['loader.cache="off"', *_style(config)]))):
        (text,) = texts_of(folder, source)
        assert f"<|vision_end|>{asked}<|im_end|>\n<|im_start|>assistant\n{said}" in text
    sample = cache.read(0)
    learnt = sample["input_ids"][sample["label_mask"] == 1]
    assert from_folder(AutoTokenizer, folder).decode(learnt) == said
    # Looked at, a box is as the row has it.
    shown_to_people = spoken(json.loads(cache.samples["text"][0].as_py()))
    assert shown_to_people[1] == ("assistant", f'[{{"bbox_2d": {BOXES[0]}, "label": "dog"}}] {BOXES[1]}')


def _style(config: Any) -> list[str]:
    return [f'text.boxes="{chosen}"'] if (chosen := config.text.settings.get("boxes")) else []


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.few("qwen2_5_vl")
def test_the_processor_writes_them_as_packs_do(tmp_path: Path, family: str) -> None:
    """Pairs too: both answers of a row are over the same objects."""
    own = FAMILIES[family]
    write_family(replace(own, special=(*own.special, *TOKENS)), tmp_path / "model")
    pair = {**ROW, "messages": [ASKED], "chosen": [SAID], "rejected": SAID["content"].replace("label", "name")}
    found = []
    for row, *overrides in (
        (ROW, 'vision.images="patches"'),
        (ROW, 'vision.images="processor"', 'plan={kind="bucket",batch_size=2}'),
        (pair, 'vision.images="processor"', 'plan={kind="bucket",batch_size=2}', "text.pairs=true"),
    ):
        report = build_here(config_of(tmp_path, [row], *overrides))
        assert report.failed == {}
        cache = open_cache(report.cache)
        found += texts_of(tmp_path / "model", cache)
        if "rejected_input_ids" in cache.fields:
            (other,) = texts_of(tmp_path / "model", cache, name="rejected_input_ids")
            assert other == found[0].replace("label", "name")
    assert len({*found}) == 1
    assert ("<|box_start|>(" in found[0]) is (family == "qwen2_vl")


def test_boxes_that_cannot_be_written_cost_their_row(tmp_path: Path) -> None:
    folder_of(tmp_path, "qwen3")
    objects = ROW["objects"]
    bad: dict[str, list[Any]] = {
        "box_outside_image": [
            {**objects, "bbox": [[0, 0, 96.5, 80], BOXES[1]]},
            {**objects, "bbox": [BOXES[0], [65, 10]]},  # as displayed the image is 64 pixels wide
            {**objects, "bbox": [[-0.1, 0, 5, 5], BOXES[1]]},
            {**objects, "bbox_type": "norm1"},
        ],
        "box_image": [{**objects, "image_id": [0, 2]}],
        "box_reversed": [{**objects, "bbox": [[9, 0, 5, 5], BOXES[1]]}],
        "bad_box": [{**objects, "bbox": [[1, 2, 3], BOXES[1]]}],
        "box_count_mismatch": [{**objects, "bbox": BOXES[:1], "image_id": None}, None],
    }
    good = [objects, {**objects, "bbox": [[0, 0, 96, 80], [64, 150]]}]
    good += [{**objects, "bbox": [[0, 0, 0, 0.001], [1, 1]], "bbox_type": "norm1"}]
    rows = [{**ROW, "objects": each} for each in (*good, *(each for group in bad.values() for each in group))]
    report = build_here(config_of(tmp_path, rows))
    assert report.failed == {reason: len(group) for reason, group in bad.items()}
    assert report.num_samples == len(good)
    texts = texts_of(tmp_path / "model", open_cache(report.cache))
    assert [text.count("[1000, 1000]") for text in texts] == [0, 1, 1]
    assert "[0, 0, 1000, 1000]" in texts[1]


def test_in_a_table_boxes_are_structs_or_json(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "qwen3")
    plain = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]
    rows = [ROW, {"images": ["p0.jpg"], "messages": plain}]
    table = ['source={kind="hf",manifest="rows.parquet",columns={image="images"}}', 'loader.cache="off"']
    objects = [{**ROW["objects"], "bbox_type": None}, {"ref": [], "bbox": None, "image_id": None, "bbox_type": ""}]
    made = [texts_of(folder, select(config_of(tmp_path, rows, 'loader.cache="off"')))]
    for column in (pa.array(objects), pa.array([json.dumps(each) for each in objects])):
        names = {name: [row[name] for row in rows] for name in ("images", "messages")}
        pq.write_table(pa.table({**names, "objects": column}), tmp_path / "rows.parquet")
        made.append(texts_of(folder, select(load_config(tmp_path / "c.toml", overrides=table))))
    assert made[0] == made[1] == made[2]


def test_another_family_refuses_them_and_their_setting(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS["gemma3"], tmp_path / "model")
    bucket = 'plan={kind="bucket",batch_size=2}'
    report = build_here(config_of(tmp_path, [ROW, {"images": ["p0.jpg"], "question": "q", "answer": "a"}], bucket))
    assert report.failed == {"has_boxes": 1}
    assert "which are shown to Qwen-VL alone" in json_lines(Path(report.cache) / "rejected.jsonl")[0]["message"]
    with pytest.raises(ConfigError, match=r'text.boxes is "list", and .*model is of no Qwen-VL'):
        build_here(config_of(tmp_path, [ROW], bucket, 'text.boxes="list"'))


def test_what_changes_numbers_is_in_the_key(tmp_path: Path) -> None:
    """The family stands in a file of the key, or in config.json, which is in none."""
    keys = []
    for number, family in enumerate(get_args(Family)):
        root = tmp_path / str(number)
        root.mkdir()
        path = folder_of(root, "qwen2") / "preprocessor_config.json"
        document = json.loads(path.read_text())
        del document["processor_class"]
        path.write_text(json.dumps(document))
        kind = {"qwen2": "qwen2_vl", "qwen2_5": "qwen2_5_vl", "qwen3": "qwen3_vl"}[family]
        (root / "model/config.json").write_text(json.dumps({"model_type": kind}))
        keys += [recipe_of(config_of(root, [], *more)).key for more in ([], ['text.boxes="tokens"'])]
    assert len({*keys}) == 5
    assert keys[0] == keys[1]  # Qwen2-VL's own


@given(
    st.sampled_from(get_args(Family)),
    st.integers(28, 4000),
    st.integers(28, 4000),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=2),
)
def test_a_box_inside_an_image_stays_inside(family: Family, width: int, height: int, shares: list[Any]) -> None:
    images = ImageSettings(max_pixels=512 * 28 * 28) if family == "qwen2_5" else None
    writer = BoxWriter(family=family, style="list", images=images)
    box = [x * side for share in shares for x, side in zip(share, (width, height), strict=True)]
    part = {"type": "box", "box": box, "image": 0}
    (message,) = with_boxes([{"role": "user", "content": [part]}], writer, [(width, height)], sample_id="a")
    numbers = json.loads(message["content"][0]["text"])
    side = 1000 if writer.images is None else writer.images.max_pixels
    assert len(numbers) == len(box)
    assert all(isinstance(x, int) and 0 <= x <= side for x in numbers)
