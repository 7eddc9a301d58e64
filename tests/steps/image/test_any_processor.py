"""Any image processor of transformers: what is stored of images becomes the processor's own batch, bit for bit."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from forebay.errors import ConfigError, SampleError
from forebay.steps.batch import collate, fresh
from forebay.steps.form import BatchForm
from forebay.steps.image.processor.processor_call import as_array, outputs_of
from forebay.steps.image.processor.processor_probe import probe, quiet
from forebay.steps.image.processor.processor_step import OpenProcessor, Processed
from forebay.steps.image.processor.whole import image_processor_of
from forebay.train.collate.forms import BatchItems
from tests.store.image.variants import photo

CLASSES: dict[str, dict[str, Any]] = {
    "BridgeTowerImageProcessorPil": {},
    "CLIPImageProcessorPil": {},
    "DetrImageProcessorPil": {"size": {"shortest_edge": 64, "longest_edge": 128}},
    "Gemma3ImageProcessorPil": {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    "Idefics3ImageProcessorPil": {"size": {"longest_edge": 192}, "max_image_size": {"longest_edge": 64}},
    "LlavaNextImageProcessorPil": {
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128]],
        "size": {"shortest_edge": 64},
        "crop_size": {"height": 64, "width": 64},
    },
    "MiniCPMV4_6ImageProcessorPil": {"scale_resolution": 112},
    "MllamaImageProcessorPil": {"size": {"height": 56, "width": 56}},
    "PixtralImageProcessorPil": {"size": {"longest_edge": 128}},
    "Qwen2VLImageProcessorPil": {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}},
    "SamImageProcessorPil": {"size": {"longest_edge": 128}, "pad_size": {"height": 128, "width": 128}},
    "Siglip2ImageProcessorPil": {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.26, 0.27, 0.28]},
    "ViTImageProcessorPil": {"do_normalize": False},
}
ALONE = {
    "GLPNImageProcessorPil": "is not padded",
    "ZoeDepthImageProcessorPil": "is not padded",
}
WITHOUT_TABLE = {"ZoeDepthImageProcessorPil", "Pix2StructImageProcessorPil"}
SIZES = ((75, 50), (64, 100), (301, 200))


def made(name: str) -> Any:
    import transformers

    with quiet():
        return getattr(transformers, name)(**CLASSES.get(name, {}))


def opened(folder: Path, **settings: Any) -> OpenProcessor:
    return Processed(processor="digest", folder=str(folder), **settings).opened()


def encoded(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def photos() -> list[PIL.Image.Image]:
    return [photo(number).convert("RGB").resize(size) for number, size in enumerate(SIZES)]


def stored_batch(processor: OpenProcessor, samples: Sequence[Sequence[PIL.Image.Image]]) -> dict[str, np.ndarray]:
    """The batch of images that went to disk and back."""
    form = BatchForm.from_json(json.loads(json.dumps(processor.form.to_json())))
    rows = []
    for images in samples:
        arrays = [processor.make(encoded(image), sample_id="a") for image in images]
        kept = [form.arrays({k: v for f in form.stored for k, v in f.stored(one[f.name]).items()}) for one in arrays]
        rows.append({field.name: [one[field.name] for one in kept] for field in form.stored})
    batch = collate(form, rows, dtype=torch.float32, allocate=fresh)
    return {name: value.numpy() for name, value in batch.items()}


def own_batch(name: str, images: Any) -> dict[str, Any]:
    with quiet():
        return {key: as_array(value) for key, value in made(name)(images=images).items()}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_batches_are_the_processors_own(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path)
    processor = opened(tmp_path)
    assert processor.form.promise.kind == "exact"
    assert any(field.table is not None for field in processor.form.fields)
    a, b, c = photos()
    nests = any(field.join == "nest" for field in processor.form.fields)
    wanted = own_batch(name, [[a], [b], [c]] if nests else [a, b, c])
    found = stored_batch(processor, [[a], [b], [c]])
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert found[key].dtype == value.dtype, key
        assert np.array_equal(found[key], value), key
    if nests and not processor.form.promise.why:
        wanted = own_batch(name, [[a, b], [c]])
        found = stored_batch(processor, [[a, b], [c]])
        assert all(np.array_equal(found[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("name", sorted(ALONE))
def test_images_that_the_processor_does_not_pad_do_not_stand_together(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path)
    processor = opened(tmp_path)
    assert processor.form.promise.kind == "alone"
    assert ALONE[name] in processor.form.promise.why
    [pixels] = [field for field in processor.form.fields if field.name == "pixel_values"]
    assert (pixels.table is None) == (name in WITHOUT_TABLE)
    a, b, _ = photos()
    for image in (a, b):
        found, wanted = stored_batch(processor, [[image]]), own_batch(name, [image])
        assert np.array_equal(found["pixel_values"].view(np.uint32), wanted["pixel_values"].view(np.uint32))
    with pytest.raises(ValueError, match=ALONE[name]):
        stored_batch(processor, [[a], [b]])


def test_floats_are_stored_where_the_config_says_so(tmp_path: Path) -> None:
    made("ViTImageProcessorPil").save_pretrained(tmp_path)
    processor = opened(tmp_path, table=False)
    [field] = processor.form.fields
    assert (field.table, field.stored_dtype) == (None, "float32")
    a, *_ = photos()
    assert np.array_equal(
        stored_batch(processor, [[a]])["pixel_values"], own_batch("ViTImageProcessorPil", [a])["pixel_values"]
    )


def test_a_worker_takes_the_form_and_does_not_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("ViTImageProcessorPil").save_pretrained(tmp_path)
    processor = opened(tmp_path)
    monkeypatch.setattr("forebay.steps.image.processor.processor_probe.probe", None)
    back = pickle.loads(pickle.dumps(processor))  # noqa: S301  our own
    assert back is pickle.loads(pickle.dumps(processor))  # noqa: S301
    data = encoded(photos()[0])
    found, wanted = (one.make(data, sample_id="a")["pixel_values"] for one in (back, processor))
    assert np.array_equal(found, wanted)


def test_a_worker_that_knows_the_form_does_not_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("ViTImageProcessorPil").save_pretrained(tmp_path)
    step = Processed(processor="digest", folder=str(tmp_path))
    found = step.opened()
    form = BatchForm.from_json(json.loads(json.dumps(found.form.to_json())))
    monkeypatch.setattr("forebay.steps.image.processor.processor_probe.probe", None)
    data = encoded(photos()[0])
    wanted, known = found.make(data, sample_id="a"), step.opened(form).make(data, sample_id="a")
    assert {name: array.tobytes() for name, array in known.items()} == {
        name: array.tobytes() for name, array in wanted.items()
    }


def test_every_value_is_found_where_outputs_are_small(tmp_path: Path) -> None:
    import transformers

    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    processor = opened(tmp_path)
    [field] = processor.form.fields
    assert field.table is not None
    assert field.table.values.shape == (1, 256)
    for value in (0, 255):
        processor.make(encoded(PIL.Image.new("RGB", (50, 40), (value,) * 3)), sample_id="a")


class Fake:
    """A processor that gives what a function makes of the first image's pixels."""

    def __init__(self, outputs: Any) -> None:
        self.outputs = outputs

    def __call__(self, images: Any) -> dict[str, Any]:
        flat = [image for one in images for image in (one if isinstance(one, list) else [one])]
        answer: dict[str, Any] = self.outputs([np.asarray(image) for image in flat])
        return answer


def pixels_of(images: list[np.ndarray]) -> list[np.ndarray]:
    return [image[:16, :16].transpose(2, 0, 1).astype(np.float32) / np.float32(255) for image in images]


def test_what_is_no_array_is_named_and_left_out_only_if_the_config_says_so() -> None:
    outputs = Fake(lambda images: {"pixel_values": pixels_of(images), "task": ["a"] * len(images), "none": [None]})
    message = (
        r'Fake gives what cannot be stored: task is no array: str.*none is no array.*leave_out = \["none", "task"\]'
    )
    with pytest.raises(ConfigError, match=message) as caught:
        probe(outputs)
    assert caught.value.code == "FB124"
    form = probe(outputs, leave_out=("task", "none"))
    assert [field.name for field in form.fields] == ["pixel_values"]
    with pytest.raises(ConfigError, match=r"vision.leave_out names pixels, Fake gives pixel_values, task, none"):
        probe(outputs, leave_out=("task", "none", "pixels"))
    with pytest.raises(ConfigError, match="names all that Fake gives"):
        probe(outputs, leave_out=("task", "none", "pixel_values"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda images: [np.zeros(3, np.float64)] * len(images), "odd is no array: ndarray of dtype float64"),
        (lambda images: [0.5] * len(images), "odd is no array: numbers that numpy reads as float64"),
        (lambda images: len(images), "odd is one number for a whole batch of images"),
        (lambda images: [[1, 2], [3]] * len(images), "odd is a list of arrays of different shapes"),
        (lambda images: np.zeros((1,) * (1 + (images[0].shape[0] > 100))), "odd is no array|another dtype or rank"),
    ],
    ids=["float64", "float", "scalar", "ragged", "rank"],
)
def test_odd_outputs_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        probe(Fake(lambda images: {"pixel_values": pixels_of(images), "odd": value(images)}))


def test_a_processor_that_takes_no_image_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes no image by itself: TypeError: .*'boxes'") as caught:
        probe(made("VitPoseImageProcessorPil"))
    assert caught.value.code == "FB124"


@pytest.mark.parametrize("settings", [{}, {"apply_ocr": True, "tesseract_config": "--oem 1"}], ids=["default", "set"])
def test_a_processor_that_would_start_a_program_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    """Its class has it so where the folder says nothing."""
    wanted = r"LayoutLMv3ImageProcessorPil whose apply_ocr starts .*tesseract.*\"apply_ocr\": null"
    document = {"image_processor_type": "LayoutLMv3ImageProcessor", **settings}
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(document))
    for ask in (partial(image_processor_of, tmp_path), partial(made, "LayoutLMv3ImageProcessorPil")):
        with pytest.raises(ConfigError, match=wanted) as caught:
            probe(ask())
        assert caught.value.code == "FB140"
    path.write_text(json.dumps({**document, "apply_ocr": None}))
    assert probe(image_processor_of(tmp_path)).promise.kind == "exact"


@pytest.mark.parametrize("name", ["ViT", "Beit", "Siglip", "DeepseekVL", "Nougat", "Detr", "Qwen2VL"])
@pytest.mark.parametrize("side", [20, 32, 48])
@pytest.mark.few
def test_a_small_output_has_all_values_of_every_channel(name: str, side: int) -> None:
    """Each channel has its own constants, as in many checkpoints: the fullest channel is full before the others."""
    import transformers

    cls = getattr(transformers, f"{name}ImageProcessorPil")
    edges = {"Detr": ("shortest_edge", "longest_edge"), "Qwen2VL": ("shortest_edge", "longest_edge")}
    size = dict.fromkeys(edges.get(name, ("height", "width")), side * side if name == "Qwen2VL" else side)
    form = probe(cls(size=size, image_mean=[0.48, 0.45, 0.4], image_std=[0.26, 0.27, 0.28]))
    table = form.pixels.table
    assert table is not None
    assert [len(np.unique(row)) for row in table.values] == [256] * 3


def test_an_output_that_the_probe_did_not_see_stops_the_build(tmp_path: Path) -> None:
    """Its tiles begin above all sizes of the probe."""
    tiles = {
        "image_processor_type": "DeepseekOcr2ImageProcessor",
        "tile_size": 1450,
        "size": {"height": 64, "width": 64},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tiles))
    opened = Processed(processor="", folder=str(tmp_path)).opened()
    assert [field.name for field in opened.form.fields] == ["pixel_values", "num_local_patches"]
    opened.make(encoded(photo().resize((1400, 20))), sample_id="usual")
    with pytest.raises(ConfigError, match=r"large: DeepseekOcr2.* gives pixel_values_local, .*leave_out") as caught:
        opened.make(encoded(photo().resize((1500, 20))), sample_id="large")
    assert caught.value.code == "FB142"


def test_a_batch_lacks_what_the_processor_gives_of_larger_images_alone(tmp_path: Path) -> None:
    tiles = {"image_processor_type": "DeepseekOcr2ImageProcessor", "tile_size": 80, "size": {"height": 64, "width": 64}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tiles))
    opened = Processed(processor="", folder=str(tmp_path)).opened()
    collate_ = BatchItems(form=opened.form, counted="items").collate
    processor = opened._processor
    for widths, has_tiles in (((40, 60), False), ((40, 300), True)):
        photos = [photo().resize((width, 40)) for width in widths]
        rows = [opened.make(encoded(each), sample_id="x") for each in photos]
        stored = [{f.name: (f.array(f.stored(row[f.name])),) for f in opened.form.stored} for row in rows]
        batch = collate_(stored, dtype=torch.float32, allocate=fresh)
        own = processor(photos, return_tensors="pt")
        assert ("pixel_values_local" in batch) == ("pixel_values_local" in own) == has_tiles
        for name in own:
            torch.testing.assert_close(batch[name], own[name], rtol=0, atol=0, check_dtype=False)


def test_a_folder_of_oneformer_is_read_without_its_names_of_classes(tmp_path: Path) -> None:
    """The Hub's folder names a data set's file of another repository."""
    named = {"class_info_file": "ade20k_panoptic.json", "repo_path": "shi-labs/oneformer_demo", "size": 64}
    document = {"image_processor_type": "OneFormerImageProcessor", **named}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
    assert probe(image_processor_of(tmp_path), leave_out=("task_inputs",)).promise.kind == "exact"


def test_batches_that_depend_on_their_neighbours_are_only_promised_alone() -> None:
    def centred(images: list[np.ndarray]) -> dict[str, Any]:
        pixels = np.stack(pixels_of(images))
        return {"pixel_values": pixels - pixels.mean(dtype=np.float64).astype(np.float32)}

    promise = probe(Fake(centred)).promise
    assert promise.kind == "alone"
    assert "values of a batch differ by up to" in promise.why


def test_an_image_outside_of_what_the_probe_saw_is_named(tmp_path: Path) -> None:
    made("ViTImageProcessorPil").save_pretrained(tmp_path)
    processor = opened(tmp_path)
    data = encoded(photos()[0])

    def making(change: Any) -> OpenProcessor:
        changed = Fake(lambda images: change({"pixel_values": np.zeros((len(images), 3, 224, 224), np.float32)}))
        return OpenProcessor(Processed(processor="digest"), changed, form=processor.form)

    def between(answer: dict[str, Any]) -> dict[str, Any]:
        answer["pixel_values"][0, 1, 5, 5] = 0.123
        return answer

    assert making(lambda answer: answer).make(data, sample_id="a")["pixel_values"].dtype == np.uint8
    with pytest.raises(ConfigError, match=r"a: .*pixel_values of 0\.12.* in channel 0.* 256 values .*table = false"):
        making(between).make(data, sample_id="a")
    for change, message in (
        (
            lambda _: {"pixel_values": np.zeros((1, 3, 224, 225), np.float32)},
            r"float32 \[3, 224, 225\], the probe found",
        ),
        (lambda _: {"pixel_values": np.zeros((2, 3, 224, 224), np.float32)}, r"\[2, 3, 224, 224\] for one image"),
        (lambda _: {"pixel_values": np.zeros((1, 3, 224, 224), np.int64)}, r"int64 \[3, 224, 224\], the probe found"),
        (lambda _: {"pixel_values": ["a"]}, "no array for one image"),
        (lambda _: {}, "no array for one image"),
    ):
        with pytest.raises(ConfigError, match=message):
            making(change).make(data, sample_id="a")
    with pytest.raises(SampleError, match=r"ViT.* does not take 75x50 pixels: KeyError: 'x'") as caught:
        making(lambda answer: answer["x"]).make(data, sample_id="a")
    assert caught.value.reason == "refused_image"
    with pytest.raises(SampleError, match="no image"):
        processor.make(b"no image", sample_id="a")


def test_outputs_are_arrays_as_tensors_would_have_them() -> None:
    found = outputs_of({"a": [1, 2], "c": (True, False), "d": [], "e": torch.zeros(2), "f": 3})
    assert {name: (value.dtype.name, value.shape) for name, value in found.items()} == {  # type: ignore[union-attr]
        "a": ("int64", (2,)),
        "c": ("bool", (2,)),
        "e": ("float32", (2,)),
        "f": ("int64", ()),
    }
