"""Mixtures of images as their processor gives them: every sample once, resumed exactly; what is refused."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import forebay
from forebay.config import Config
from forebay.errors import CacheMismatchError, ConfigError
from forebay.train.loop.run import run
from forebay.train.select import make_loader, select
from tests.flat_constants import flat
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import PhotoCorpus, photo
from tests.train.fake_source import FakeSource
from tests.train.models import foreign
from tests.vlm_families import model_folder

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
PHOTOS = sorted((Path(__file__).parents[2] / "demo" / "vision" / "photos").glob("*.jpg"))
SIZES = {"one": 8, "two": 4}

_SET = """
name = "{name}"
[source]
kind = "folder"
manifest = "{name}"
[vision]
processor = "processor"
[text]
prompt = "label"
classes = ["a", "b"]
[plan]
kind = "bucket"
batch_size = 2
lockstep = 1
[run]
cache_root = "caches"
num_workers = 1
"""
_MIX = """
[train]
model = "vit"
init = "random"
max_steps = 4
[mixture]
batches = "{batches}"
source = [{{config = "one.toml"}}, {{config = "two.toml"}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sealed sets of photos of the same two classes, and a config that mixes them in each way."""
    folder = tmp_path_factory.mktemp("mixture")
    left = iter(PHOTOS)
    for name, size in SIZES.items():
        for number in range(size):
            target = folder / name / "ab"[number % 2] / f"{name}{number}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(next(left), target)
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder / "processor")
    foreign.vit(folder / "vit", id2label={0: "a", 1: "b"})
    for name in SIZES:
        (folder / f"{name}.toml").write_text(_SET.format(name=name))
        build_here(forebay.load_config(folder / f"{name}.toml"))
    for batches in ("mixed", "per_source"):
        (folder / f"{batches}.toml").write_text(_SET.format(name="one") + _MIX.format(batches=batches))
    return folder


def load(folder: Path, name: str, *overrides: str) -> Config:
    return forebay.load_config(folder / f"{name}.toml", overrides=overrides)


def batches_of(config: Config, *, state: Any = None, **place: int) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Returns the ids and tensors of a rank's batches of an epoch."""
    ranks: Any = {"dp_rank": 0, "dp_world_size": 1, **place}
    loader: Any = make_loader(config, with_ids=True, **ranks)
    if state is not None:
        loader.load_state_dict(state)
    return [(tuple(ids), {name: value.clone() for name, value in batch.items()}) for batch, ids in loader]


def rows_of(config: Config) -> dict[str, dict[str, torch.Tensor]]:
    """Returns by id what the batches of one set alone have of each sample."""
    return {
        sample_id: {name: value[row] for name, value in batch.items()}
        for ids, batch in batches_of(config)
        for row, sample_id in enumerate(ids)
    }


@pytest.mark.parametrize("batches", ["mixed", "per_source"])
def test_every_sample_comes_once_with_the_values_of_its_own_cache(folder: Path, batches: str) -> None:
    own = {**rows_of(load(folder, "one")), **rows_of(load(folder, "two"))}
    config = load(folder, batches)
    assert len(own) == 12
    ranks = [batches_of(config, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    assert [len(each) for each in ranks] == [3, 3]
    seen: Counter[str] = Counter()
    for ids, batch in (pair for each in ranks for pair in each):
        seen.update(ids)
        for row, sample_id in enumerate(ids):
            assert all(torch.equal(value[row], own[sample_id][name]) for name, value in batch.items())
        if batches == "per_source":
            assert len({sample_id.split("/")[-1][:3] for sample_id in ids}) == 1
    assert seen == Counter(list(own))


def test_a_state_goes_on_within_an_epoch_on_any_number_of_ranks(folder: Path) -> None:
    config = load(folder, "mixed", "loader.seed=3")
    whole = [ids for ids, _ in batches_of(config)]
    loader: Any = make_loader(config, with_ids=True, dp_rank=0, dp_world_size=1)
    given = iter(loader)
    first = [tuple(next(given)[1]) for _ in range(2)]
    state = loader.state_dict()
    given.close()
    assert first + [ids for ids, _ in batches_of(config, state=state)] == whole
    parts = [batches_of(config, state=state, dp_rank=rank, dp_world_size=2) for rank in range(2)]
    assert [ids for pair in zip(*parts, strict=True) for ids, _ in pair] == whole[2:]


def test_batches_without_caches_are_the_same(folder: Path) -> None:
    cached, made = (batches_of(load(folder, "mixed", f'loader.cache="{which}"')) for which in ("require", "off"))
    assert [ids for ids, _ in cached] == [ids for ids, _ in made]
    for (_, one), (_, other) in zip(cached, made, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_weights_that_are_left_out_are_samples(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="forebay"):
        make_loader(load(folder, "per_source"), dp_rank=0, dp_world_size=1)
    assert "one.toml 0.666672" in caplog.text
    with caplog.at_level("INFO", logger="forebay"):
        make_loader(load(folder, "per_source", "mixture.temperature=0"), dp_rank=0, dp_world_size=1)
    assert "one.toml 0.500000" in caplog.text


def test_a_mixture_is_trained(folder: Path, tmp_path: Path) -> None:
    report = run(load(folder, "per_source", f'train.output_dir="{tmp_path}"'))
    assert report is not None
    assert report.steps == 4


@pytest.mark.parametrize("batches", ["mixed", "per_source"])
@pytest.mark.few("mixed")
def test_other_classes_and_other_processors_are_refused_with_both_values(
    folder: Path, batches: str, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "sets", ignore=shutil.ignore_patterns("*-train-*"))
    text = _SET.format(name="two")
    transformers.ViTImageProcessorPil(
        size={"height": 16, "width": 16}, image_mean=[0.1, 0.1, 0.1]
    ).save_pretrained(tmp_path / "sets" / "darker")  # fmt: skip
    changes = {
        r"cannot mix .*one\.toml and .*two\.toml: classes\[0\] is 'a' .* 'b' .* same text\.classes": text.replace(
            '["a", "b"]', '["b", "a"]'
        ),
        r"vision\.processor is '?\w{16}'? .* '?\w{16}'? .* same \[vision\] and \[text\]": text.replace(
            '"processor"', '"darker"'
        ),
    }
    build_here(forebay.load_config(tmp_path / "sets" / "one.toml"))
    for match, changed in changes.items():
        (tmp_path / "sets" / "two.toml").write_text(changed)
        build_here(forebay.load_config(tmp_path / "sets" / "two.toml"))
        with pytest.raises(CacheMismatchError, match=match):
            make_loader(load(tmp_path / "sets", batches))


class Other(FakeSource):
    """Samples of other constants."""

    def __init__(self, **constants: Any) -> None:
        super().__init__([10])
        self.constants = flat(**constants)
        if "image" in self.constants.groups:
            self.lengths = dict.fromkeys(("num_tokens", "num_images"), self.lengths["num_tokens"])


def test_patches_and_other_modalities_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(folder, "per_source")
    for features, match in (
        ("patches", r"two\.toml holds patches for packs, and this plan is of batches"),
        ("log_mel", r"two\.toml has features 'log_mel' and stands beside images"),
    ):
        parts = iter([(Other(features="images"), "one.toml"), (Other(features=features), "two.toml")])
        monkeypatch.setattr("forebay.train.select._select_entry", lambda *_, left=parts: next(left))
        with pytest.raises(ConfigError, match=match):
            select(config)


def test_conversations_are_mixed_by_their_tokens(tmp_path: Path) -> None:
    model = model_folder("smolvlm", tmp_path)
    document: dict[str, Any] = {}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        corpus = PhotoCorpus(tmp_path / name)
        for number in range(2):
            corpus.add_photo(f"p{number}.jpg", photo(number, width=64))
            corpus.ask(f"{name}{number}", f"p{number}.jpg", answer="A cat." * (1 + 3 * number))
        document = {
            "name": name,
            "source": {"kind": "jsonl", "manifest": str(tmp_path / name / "train.jsonl")},
            "vision": {"processor": str(model), "images": "processor"},
            "text": {"prompt": "chat", "tokenizer": str(model)},
            "plan": {"kind": "bucket", "batch_size": 2, "lockstep": 1},
            "run": {"cache_root": str(tmp_path / "caches"), "num_workers": 1},
        }
        build_here(forebay.load_config(document))
    entries = [{"cache": str(path)} for path in sorted((tmp_path / "caches").glob("*-train-*"))]
    config = forebay.load_config({**document, "mixture": {"source": entries}})
    seen = batches_of(config)
    assert sorted(sample_id for ids, _ in seen for sample_id in ids) == ["first0", "first1", "second0", "second1"]
    assert {"pixel_values", "input_ids", "attention_mask", "labels"} <= set(seen[0][1])
