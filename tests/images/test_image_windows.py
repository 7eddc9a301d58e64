"""Windows of images as variants of packs: what the processor makes of the cropped image, at the size of the whole."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torch.utils.data import DataLoader

from forebay import load_config
from forebay.errors import CacheCorruptError, CacheMismatchError, ConfigError
from forebay.steps.image.qwen2_vl import load_processor
from forebay.steps.recipe import recipe_of
from forebay.store.cache import Cache, open_cache
from forebay.store.image.codec import StoredImages
from forebay.store.image.image_settings import grid_thw, image_settings
from forebay.store.image.image_windows import COUNTS, ImageWindows, Undecoded
from forebay.store.layout import variant_name
from forebay.train import make_loader, to_model_inputs
from forebay.train.augment.draws import EpochDraws
from forebay.train.dataset import CachedVLDataset
from forebay.train.integrations.qwen_finetune import CachedSupervisedDataset
from tests.images.test_boxes import ROW
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import DEMO, PhotoCorpus, photo_corpus
from tests.store.image.variants import exif, with_alpha
from tests.store.image.variants import photo as demo_photo

CROPS = ("vision.crops=4", "vision.crop_share=0.7", "plan.seq_len=800")
NAMES = ("", "crop1", "crop2", "crop3", "crop4")
CHAT = (f"text.tokenizer={DEMO / 'model'}", "text.prompt=chat")
SETTINGS = image_settings(DEMO / "model")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    """Photos of many sizes, one turned, one with alpha, one tiny, one long; rows of two images."""
    corpus = photo_corpus(tmp_path_factory.mktemp("windows"))
    demo_photo(1).save(corpus.folder / "turned.jpg", exif=exif(6))
    with_alpha(demo_photo(2)).save(corpus.folder / "alpha.png")
    demo_photo(3).resize((3, 2)).save(corpus.folder / "tiny.png")
    demo_photo(4).resize((700, 33)).save(corpus.folder / "long.webp")
    for name in ("turned.jpg", "alpha.png", "tiny.png", "long.webp"):
        corpus.ask(name, [name, "p1.jpg"] if name == "tiny.png" else name)
    for path in sorted((DEMO / "photos").iterdir())[:3]:
        corpus.add_photo(path.name, path.read_bytes())
        corpus.ask(path.stem, path.name)
    return corpus


def built(corpus: PhotoCorpus, *overrides: str) -> Any:
    config = corpus.config(*CROPS, *overrides)
    build_here(config)
    return config


def shown(corpus: PhotoCorpus, name: str) -> Image.Image:
    image = ImageOps.exif_transpose(Image.open(corpus.folder / name))
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def corner(image: Image.Image, window: str, share: float = 0.7) -> Image.Image:
    """One of four windows: left above, right above, left below, right below."""
    width, height = (max(1, round(side * share)) for side in image.size)
    left = 0 if window in ("crop1", "crop3") else image.width - width
    top = 0 if window in ("crop1", "crop2") else image.height - height
    return image.crop((left, top, left + width, top + height)) if window else image


def values_of(patches: Any, constants: Any) -> Any:
    found = to_model_inputs({"patches": torch.tensor(np.concatenate(patches))}, constants)
    return found["pixel_values"].numpy()


@pytest.mark.parametrize("codec", ["raw", "zstd", "webp", "source"])
@pytest.mark.few("source", "webp")
def test_a_window_is_what_the_processor_makes_of_the_cropped_image(corpus: PhotoCorpus, codec: str) -> None:
    config = built(corpus, f"vision.codec={codec}")
    cache, processor = open_cache(build_here(config).cache), load_processor(DEMO / "model", "pil")
    rows, by_itself = {row["id"]: row["image"] for row in corpus.rows}, 0
    for index in range(len(cache)):
        sample, names = cache.read(index), rows[cache.sample_id(index)]
        for place, name in enumerate([names] if isinstance(names, str) else names):
            image, grid = shown(corpus, name), tuple(sample["image_grid_thw"][place].tolist())
            assert grid == grid_thw(*image.size, SETTINGS)
            for window in NAMES:
                part, size = corner(image, window), (grid[2] * 16, grid[1] * 16)
                found = values_of([sample[variant_name("patches", window)][place]], cache.constants)
                made = processor([part.resize(size, SETTINGS.resample)], do_resize=False, return_tensors="np")
                assert np.array_equal(found, made["pixel_values"]), (name, window)
                if grid_thw(*part.size, SETTINGS) == grid:
                    by_itself += 1
                    assert np.array_equal(found, processor([part], return_tensors="np")["pixel_values"])
    assert by_itself > len(cache)
    assert len(cache) == len(rows)


@given(
    sides=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    count=st.sampled_from(COUNTS),
    share=st.floats(0.01, 0.99),
)
def test_windows_lie_evenly_from_edge_to_edge(sides: tuple[int, int], count: int, share: float) -> None:
    width, height = sides
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    image = Image.merge("RGB", [Image.fromarray(each.astype(np.uint8)) for each in (x % 256, y % 256, x // 256)])
    windows, rows = ImageWindows(count, share), math.isqrt(count)
    parts = [np.asarray(windows.part(image, name)).astype(int) for name in windows.names]
    assert {part.shape for part in parts} == {(max(1, round(height * share)), max(1, round(width * share)), 3)}
    lefts = [int(part[0, 0, 0] + 256 * part[0, 0, 2]) for part in parts[:rows]]
    tops = [int(part[0, 0, 1]) for part in parts[::rows]] if height <= 256 else []
    for begins, side, own in ((lefts, width, parts[0].shape[1]), (tops, height, parts[0].shape[0])):
        if rows > 1 and begins:
            assert (begins[0], begins[-1]) == (0, side - own)
            assert np.ptp(np.diff(begins)) <= 1
        elif begins:
            assert begins == [(side - own) // 2]


def test_a_loader_hands_out_one_by_seed_epoch_and_id(corpus: PhotoCorpus) -> None:
    config, seen = built(corpus), set()
    loader: Any = make_loader(config, with_ids=True)
    cache: Cache = loader.source
    index = {cache.sample_id(n): n for n in range(len(cache))}
    for epoch in range(4):
        for batch, names in loader:
            draws = EpochDraws(0, epoch).of(names, "variants of image").uniform(1)[:, 0]
            chosen = [NAMES[int(number * len(NAMES))] for number in draws]
            samples = [cache.read(index[name]) for name in names]
            patches = [array for s, w in zip(samples, chosen, strict=True) for array in s[variant_name("patches", w)]]
            assert np.array_equal(batch["pixel_values"].numpy(), values_of(patches, cache.constants))
            seen |= {*chosen}
    assert seen == {*NAMES}


def test_codecs_ranks_resumes_and_the_fly_agree_and_an_evaluation_has_the_whole(corpus: PhotoCorpus) -> None:
    flip = 'augment=[{kind="flip", probability=0.5}]'
    config = built(corpus, flip)
    whole: Any = list(make_loader(config))
    loader: Any = make_loader(config)
    next(iter(loader))
    resumed: Any = make_loader(config)
    resumed.load_state_dict(loader.state_dict())
    ranks: Any = [list(make_loader(config, dp_rank=rank, dp_world_size=2)) for rank in range(2)]
    online = make_loader(corpus.config(*CROPS, flip, 'loader.cache="off"'))
    others: list[Any] = [make_loader(built(corpus, flip, f"vision.codec={c}")) for c in ("zstd", "webp", "source")]
    together = [batch for step in zip(*ranks, strict=True) for batch in step][: len(whole)]
    for one in (together, [whole[0], *resumed], online, *others):
        for batch, wanted in zip(one, whole, strict=True):
            assert torch.equal(batch["pixel_values"], wanted["pixel_values"])
    plain = corpus.config("plan.seq_len=800")
    build_here(plain)
    evaluated: Any = make_loader(config, shuffle=False)
    for one, other in zip(evaluated, make_loader(plain, shuffle=False), strict=True):
        assert one.keys() == other.keys()
        assert torch.equal(one["pixel_values"], other["pixel_values"])
        assert torch.equal(one["input_ids"], other["input_ids"])


def test_a_data_set_of_torch_draws_as_the_loader_and_that_of_another_trainer_refuses(corpus: PhotoCorpus) -> None:
    config = built(corpus, "loader.seed=5")
    loader: Any = make_loader(config)
    dataset = CachedVLDataset(loader.source.folder, seed=5, infinite=True, seq_len=800)
    batches = DataLoader(dataset, batch_size=None, num_workers=1)
    for wanted, batch in zip(itertools.chain(loader, loader), batches, strict=False):
        assert torch.equal(batch["pixel_values"], wanted["pixel_values"])
    arguments = SimpleNamespace(dataset_use=config, data_packing=True)
    for own in (config, corpus.config('augment=[{kind="flip"}]')):
        arguments.dataset_use = own
        with pytest.raises(ConfigError, match="drawn by epochs, of which a data set of qwen-vl-finetune is told none"):
            CachedSupervisedDataset(None, arguments)


@pytest.mark.wide
def test_pieces_of_cut_conversations_have_their_images(corpus: PhotoCorpus, tmp_path: Path) -> None:
    own = PhotoCorpus(tmp_path)
    for n in range(4):
        shutil.copy(corpus.folder / f"p{n}.jpg", tmp_path)
    messages: list[dict[str, str]] = []
    for n in range(4):
        messages += [{"role": "user", "content": f"<image>Image {n}?"}, {"role": "assistant", "content": "Yes."}]
    own.rows = [{"id": "long", "image": [f"p{n}.jpg" for n in range(4)], "messages": messages}]
    own.write_manifest()
    found = {}
    for codec in ("raw", "webp"):
        config = own.config("vision.crops=9", 'plan.overlong="split"', "plan.seq_len=100", f"vision.codec={codec}")
        build_here(config)
        loader: Any = make_loader(config)
        assert len(loader.source) > 1
        found[codec] = [batch["pixel_values"] for _ in range(3) for batch in loader]
    assert all(map(torch.equal, *found.values()))


def test_a_codec_decodes_the_chosen_variant_alone(corpus: PhotoCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config, decoded, real = built(corpus, "vision.codec=webp"), [], StoredImages._patches

    def counted(stored: StoredImages, image: Any, window: str) -> Any:
        decoded.append(window)
        return real(stored, image, window)

    monkeypatch.setattr(StoredImages, "_patches", counted)
    images = sum(len(batch["image_grid_thw"]) for batch in make_loader(config))
    assert len(decoded) == images
    assert {*decoded} - {""}


def test_an_undecoded_tuple_is_the_tuple_of_what_it_decodes() -> None:
    found = Undecoded([1, 2, 3], lambda row: np.full(2, row))
    plain = tuple(np.full(2, row) for row in (1, 2, 3))
    for own, wanted in (
        (found, plain),
        (found[1:], plain[1:]),
        (found[:1] + found[2:], plain[:1] + plain[2:]),
        (found + plain, plain + plain),
        (pickle.loads(pickle.dumps(found)), plain),  # noqa: S301
        (tuple(found), plain),
        ((found[2],), plain[2:]),
    ):
        assert isinstance(own, tuple)
        assert len(own) == len(wanted)
        assert np.array_equal(np.concatenate(own), np.concatenate(wanted))


def test_only_windows_move_a_key(corpus: PhotoCorpus) -> None:
    plain = recipe_of(corpus.config()).key
    keys = [recipe_of(corpus.config(*each)).key for each in ((CROPS[0],), CROPS[:2], ("vision.crops=9",))]
    assert len({plain, *keys}) == 4
    assert recipe_of(corpus.config("vision.crops=0")).key == plain
    assert recipe_of(corpus.config(CROPS[0], "vision.crop_share=0.8")).key == keys[0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("vision.crops=5",), "vision.crops is 5, wanted 1, 4, 9, 16, or 0 for none"),
        (("vision.crops=-1",), "vision.crops is -1"),
        (("vision.crops=4", "vision.crop_share=1.0"), "vision.crop_share is 1.0, wanted more than 0 and less than 1"),
        (("vision.crop_share=0.5",), "vision.crop_share is of the windows that vision.crops asks for"),
        (("vision.crops=4", "vision.fps=1"), "vision.crops are of images alone"),
        (("vision.crops=4", "vision.backend=torchvision"), 'vision.crops are cut with backend "pil"'),
        (("vision.crops=4", "text.boxes=list", *CHAT), "vision.crops cuts away what they are of"),
        (("vision.crops=4", "vision.images=processor"), 'vision.crops is for images = "patches"'),
    ],
)
def test_what_windows_are_not_for_is_refused(corpus: PhotoCorpus, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        corpus.config(*overrides)


def test_a_processor_that_resizes_nothing_has_no_windows(corpus: PhotoCorpus, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "model", tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "do_resize": False}))
    with pytest.raises(ConfigError, match="resizes no image: a window would have another size than its image"):
        build_here(corpus.config("vision.crops=4", f"vision.processor={tmp_path / 'model'}"))


def test_rows_with_boxes_are_refused_beside_windows(tmp_path: Path) -> None:
    corpus = photo_corpus(tmp_path)
    corpus.rows.append({**ROW, "id": "boxed", "images": ["p0.jpg", "p1.jpg"]})
    corpus.write_manifest()
    report = build_here(corpus.config("vision.crops=1"))
    assert report.failed == {"has_boxes": 1}
    assert report.num_samples == len(corpus.rows) - 1


def test_foreign_windows_are_refused(corpus: PhotoCorpus) -> None:
    folder = Path(build_here(built(corpus)).cache)
    metadata = json.loads((folder / "metadata.json").read_text())
    for crops in ([1 << 40, 0.5], [4, 7.0], [4, 0.5, 1], "x"):
        metadata["constants"]["image"]["crops"] = crops
        with pytest.raises(CacheCorruptError, match="none that forebay writes"):
            StoredImages.of(metadata, folder=folder)


def mixture(corpus: PhotoCorpus, *visions: str) -> str:
    """A mixture of caches that differ in `[vision]`."""
    files = []
    for number, vision in enumerate(visions):
        corpus.config()
        text = (corpus.folder / "config.toml").read_text().replace('"photos"', f'"part{number}"')
        files.append(corpus.folder / f"part{number}.toml")
        files[-1].write_text(text.replace("[layout]", f"{vision}\n[layout]"))
        build_here(load_config(files[-1]))
    return f"mixture.source=[{', '.join(f'{{config={str(file)!r}}}' for file in files)}]"


@pytest.mark.wide
def test_packs_of_a_mixture_may_be_of_several_codecs(corpus: PhotoCorpus) -> None:
    equal = mixture(corpus, 'codec = "raw"', 'codec = "raw"')
    wanted: list[Any] = list(make_loader(corpus.config(CROPS[2], equal)))
    found: list[Any] = list(make_loader(corpus.config(CROPS[2], mixture(corpus, 'codec = "raw"', 'codec = "webp"'))))
    assert len(wanted) == len(found)
    assert all(torch.equal(one["pixel_values"], two["pixel_values"]) for one, two in zip(wanted, found, strict=True))


@pytest.mark.parametrize("codec", ["raw", "source"])
@pytest.mark.wide
def test_packs_of_a_mixture_have_windows_or_not_by_their_source(corpus: PhotoCorpus, codec: str) -> None:
    both, sizes = mixture(corpus, f'codec = "{codec}"\ncrops = 4', f'codec = "{codec}"'), []
    loader: Any = make_loader(corpus.config(CROPS[2], both, "mixture.batches=per_source"))
    for batch in loader:
        sizes.append(len(batch["pixel_values"]) - int(batch["image_grid_thw"].prod(dim=1).sum()))
    assert sizes == [0] * len(loader)
    with pytest.raises(CacheMismatchError, match=r"cannot mix .*: crops is"):
        make_loader(corpus.config(CROPS[2], both))
