"""Classes, texts and bare images from raw files to batches: equal to the processor's own, cached or on the fly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

from forebay import load_config
from forebay.config import Config
from forebay.errors import CacheMismatchError
from forebay.inspect.facts import cache_facts, class_facts, class_lines
from forebay.inspect.inspect_lines import report_lines
from forebay.inspect.page.overview import CardChoice, overview_of
from forebay.inspect.page.write_pages import write_report
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import decode_image
from forebay.store.source import SourceUnion
from forebay.train.select import make_loader
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, class_folders
from tests.steps.text.test_caption import clip

SIZE = {"height": 64, "width": 64}
CLASSES = {"dog": ["dogs.jpg"], "cat": ["cat.png", "coffee.webp"], "bird": ["bird.jpg", "nuthatch.jpg"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a class of photos with a text each, and folders of processors."""
    root = tmp_path_factory.mktemp("classes")
    class_folders(root / "set", CLASSES)
    ViTImageProcessorPil(size=SIZE).save_pretrained(root / "vit")
    clip().save_pretrained(root / "clip")
    return root


def config_of(root: Path, prompt: str, *overrides: str, **sections: dict[str, Any]) -> Config:
    folder = root / ("clip" if prompt == "plain" else "vit")
    text = {"tokenizer": str(folder)} if prompt == "plain" else {}
    document: dict[str, dict[str, Any]] = {
        "source": {"kind": "folder", "manifest": str(root / "set")},
        "vision": {"processor": str(folder)},
        "text": {"prompt": prompt, **text},
        "plan": {"batch_size": 3},
        "loader": {"num_threads": 0},
        "run": {"cache_root": str(root / "caches"), "num_workers": 1, "max_failed_share": 1.0},
    }
    merged = {name: {**part, **sections.get(name, {})} for name, part in document.items()}
    return load_config({"name": "x", **merged}, overrides=overrides)


def built(config: Config) -> Cache:
    return open_cache(build_here(config).cache)


def batches(config: Config) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the batches of a config and the columns of their samples."""
    loader: Any = make_loader(config, with_columns=("sample_id", "text", "images"))
    return [(dict(batch), columns) for batch, columns in loader]


def photos_of(root: Path, columns: dict[str, Any]) -> list[Image.Image]:
    found = [(root / "set" / json.loads(names)[0]).read_bytes() for names in columns["images"]]
    return [decode_image(data, max_pixels=1 << 24, alpha="white", sample_id="x") for data in found]


@pytest.mark.parametrize("prompt", ["label", "plain", "none"])
def test_batches_are_those_of_the_processor_and_of_samples_made_on_the_fly(prompt: str, root: Path) -> None:
    config = config_of(root, prompt)
    cache = built(config)
    assert len(cache) == sum(map(len, CLASSES.values()))
    seen = 0
    cached, on_the_fly = batches(config), batches(config_of(root, prompt, "loader.cache=off"))
    assert len(cached) == len(on_the_fly) == 2
    for (batch, columns), (other, other_columns) in zip(cached, on_the_fly, strict=True):
        images = photos_of(root, columns)
        if prompt == "plain":
            expected = dict(clip()(text=columns["text"], images=images, padding=True, return_tensors="pt"))
        else:
            expected = dict(ViTImageProcessorPil(size=SIZE)(images, return_tensors="pt"))
        if prompt == "label":
            expected["labels"] = torch.tensor([sorted(CLASSES).index(name) for name in columns["text"]])
        assert batch.keys() == expected.keys() == other.keys()
        for name, values in expected.items():
            assert batch[name].dtype == values.dtype
            assert torch.equal(batch[name], values), name
            assert torch.equal(other[name], values), name
        assert columns == other_columns
        seen += len(images)
    assert seen == len(cache)


def test_another_class_moves_the_keys_and_no_number_of_what_is_stored(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "set", tmp_path / "set")
    for name in ("vit", "clip"):
        shutil.copytree(root / name, tmp_path / name)
    before = built(config_of(tmp_path, "label"))
    assert (before.constants["classes"], before.constants["num_classes"]) == (["bird", "cat", "dog"], 3)
    (tmp_path / "set" / "ant").mkdir()
    shutil.copy(DEMO / "photos" / "fig.jpg", tmp_path / "set" / "ant")
    # Samples made on the fly see the new file too, although no file that they know has changed.
    batches(config_of(tmp_path, "none", "loader.cache=off"))
    after = built(config_of(tmp_path, "label"))
    assert after.key != before.key
    assert after.constants["classes"] == ["ant", "bird", "cat", "dog"]
    for cache in (before, after):
        names = cache.constants["classes"]
        assert [names[cache[place]["labels"].item()] for place in range(len(cache))] == cache.samples[
            "text"
        ].to_pylist()
    with pytest.raises(CacheMismatchError, match=r"classes is .*give both configs the same text.classes"):
        SourceUnion([before, after], ["before", "after"])
    # With the classes in the config numbers stay, and rows of another class are counted.
    fixed = {"classes": ["dog", "cat", "bird"]}
    report = build_here(config_of(tmp_path, "label", text=fixed))
    assert report.failed == {"unknown_label": 1}
    assert open_cache(report.cache).constants["classes"] == fixed["classes"]
    facts = class_facts(open_cache(report.cache))["classes"]
    assert facts["counts"] == [
        {"class": "bird", "number": 2, "samples": 2},
        {"class": "cat", "number": 1, "samples": 2},
        {"class": "dog", "number": 0, "samples": 1},
    ]
    lines = [line.split() for line in class_lines({"classes": {**facts, "absent": 4}, "num_samples": 5})]
    assert lines[0] == ["3", "classes", "number", "samples", "share"]
    assert lines[1] == ["bird", "2", "2", "40.0", "%"]
    assert lines[-1] == ["4", "classes", "have", "no", "sample"]
    first = next(each for each in batches(config_of(tmp_path, "label", text=fixed)))
    assert first[0]["labels"].tolist() == [fixed["classes"].index(name) for name in first[1]["text"]]


def test_several_classes_of_an_image_are_a_row_of_zeros_and_ones(root: Path, tmp_path: Path) -> None:
    photos = [(DEMO / "photos" / name).read_bytes() for name in ("bird.jpg", "cat.png", "fig.jpg")]
    table = pa.table({"image": photos, "tags": [["cat", "pet"], [], ["bird"]], "id": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "rows.parquet")
    source = {"kind": "table", "manifest": str(tmp_path / "rows.parquet"), "columns": {"label": "tags"}}
    config = config_of(root, "label", source=source, run={"cache_root": str(tmp_path / "caches")})
    cache = built(config)
    assert cache.constants["classes"] == ["bird", "cat", "pet"]
    counted = [(each["class"], each["samples"]) for each in class_facts(cache)["classes"]["counts"]]
    assert counted == [("bird", 1), ("cat", 1), ("pet", 1)]
    assert class_facts(built(config_of(root, "none"))) == {}
    [(batch, columns)] = batches(config)
    wanted = {"a": [0.0, 1.0, 1.0], "b": [0.0] * 3, "c": [1.0, 0.0, 0.0]}
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [wanted[name] for name in columns["sample_id"]]


def test_settings_of_texts_beside_images_are_in_the_key(root: Path) -> None:
    variants = [
        *(config_of(root, "label", text=more) for more in ({}, {"classes": ["a"]}, {"classes": ["a", "b"]})),
        config_of(root, "none"),
        *(
            config_of(root, "plain", text=more)
            for more in ({}, {"padding": "max_length"}, {"max_length": 9}, {"truncation": True})
        ),
    ]
    assert len({recipe_of(config).key for config in variants}) == len(variants)


def test_pages_of_classes_and_captions_show_what_there_is(root: Path, tmp_path: Path) -> None:
    pages = {}
    for prompt in ("label", "plain", "none"):
        overview = overview_of(built(config_of(root, prompt)), None, choice=CardChoice(), roots=[])
        write_report(overview, tmp_path / "page.html")
        pages[prompt] = (tmp_path / "page.html").read_text()
        assert pages[prompt].count("<img") == 5
        assert " learnt<" not in pages[prompt]
        assert ("Near duplicates" in pages[prompt]) == (prompt != "label")
    assert "a class each" in pages["label"]
    assert "2 (40 %)" in pages["label"]
    assert "tokens</summary>" not in pages["label"]
    assert " tokens</summary>" in pages["plain"]
    assert "Classes" not in pages["none"]


def test_plans_without_lengths_say_nothing_of_padding_and_seconds(root: Path) -> None:
    config = config_of(root, "label")
    cache = built(config)
    text = "\n".join(report_lines(cache_facts(cache, plan_roots=[config.cache_root])))
    plan = text.partition("\nplans\n")[2].partition("\n\n")[0]
    assert "no lengths" in plan
    for word in ("edges_s", "hours", "padding", "tokens"):
        assert word not in plan
    assert "images a sample  samples\n              1        5" in text
    assert "64 x 64 pixels, all of them" in text
