"""Promise 1: what a cache gives is, bit for bit, what the same steps give on the fly; for every recipe in configs/."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from forebay import load_config
from forebay.config import Config
from forebay.errors import BuildError, ManifestError, SampleError
from forebay.preprocess import Options, build
from forebay.store.cache import Cache
from forebay.store.source import SampleSource, source_kind
from forebay.train.select import make_loader, select
from forebay.train.uncached.uncached_source import UncachedSource
from tests.preprocess.corpus import flac, speech_corpus, tone
from tests.preprocess.here_pool import kept_workers
from tests.sound_families import listed
from tests.sound_talks import Talks, bad_rows, built

CONFIGS = sorted(
    path
    for path in (Path(__file__).parents[2] / "configs").glob("*.toml")
    if path.stem != "demo_remote"  # the recipe of demo_speech, over a bucket: tests/remote/test_demo.py runs it
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with kept_workers():
        yield


ANY_SHARE, OFF = "run.max_failed_share=1.0", 'loader.cache="off"'


def load(path: Path, root: Path, *overrides: str) -> Config:
    return load_config(path, overrides=[f'run.cache_root="{root}"', "loader.num_threads=1", *overrides])


def arrays(value: Any) -> tuple[np.ndarray, ...]:
    """A field's array, or those of all images."""
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.few("demo_speech", "demo_qwen3_asr", "demo_film", "demo_segments")
def test_cached_equals_uncached(path: Path, root: Path) -> None:
    config = load(path, root)
    build(config, Options(progress=False))
    cached, online = select(config), select(load(path, root, 'loader.cache="off"'))
    assert (source_kind(cached), source_kind(online)) == ("cache", "uncached")
    assert isinstance(cached, Cache)
    assert len(cached) == len(online) > (2 if path.stem == "demo_film" else 30)
    assert_same(cached, online, range(len(cached)))
    for name, lengths in cached.lengths.items():
        np.testing.assert_array_equal(lengths, online.lengths[name])
    assert_same_batches(config, load(path, root, 'loader.cache="off"'))


PHOTO = str(CONFIGS[0].parent.parent / "demo/vision/photos/fig.jpg")
BY_PROCESSOR = f'vision={{processor="{CONFIGS[0].parent.parent / "demo/vision/model"}",images="processor"}}'
PAIRS = [
    {"id": name, "image": PHOTO, "question": asked, "chosen": "A fig.", "rejected": "A grey cat."}
    for name, asked in (("a", "What is it?"), ("b", "What is shown in this photo?"))
]
MORE = [{"id": name, "image": name, "question": "What is it?", "answer": "Waves."} for name in ("deep.png", "two.gif")]
VARIANTS: dict[str, tuple[str, list[dict[str, Any]] | None, tuple[str, ...]]] = {
    "all tokens learnt": ("demo_film", None, ('text.train_on="all"', 'text.learn_through="newline"')),
    "last turn, tokens of boxes": ("demo_film", None, ('text.train_on="last"', 'text.boxes="tokens"')),
    "fixed shapes": ("demo_vision", None, ('plan.shapes="fixed"', "text.strip_text=true")),
    "crops": ("demo_vision", None, ("vision.crops=4",)),
    "split": ("demo_vision", None, ('plan.overlong="split"', "plan.seq_len=256", "plan.repeat_system=true")),
    "truncated": ("demo_vision", None, ('plan.overlong="truncate"', "plan.seq_len=160")),
    "pairs": ("demo_any", PAIRS, ("text.pairs=true", "plan.batch_size=2")),
    "pairs, patches": (
        "demo_vision",
        PAIRS,
        ("text.pairs=true", BY_PROCESSOR, 'plan={kind="bucket",batch_size=2}'),
    ),
    "more images": ("demo_vision", MORE, ('source.more_images=["16-bit","first_frame"]',)),
}
"""By name: a config, rows in place of its own, and settings."""


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.few("last turn, tokens of boxes", "split", "pairs", "more images")
def test_every_recipe_of_conversations_is_the_same_on_the_fly(name: str, root: Path, tmp_path: Path) -> None:
    stem, rows, overrides = VARIANTS[name]
    if rows is not None:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        overrides = (*overrides, f'source.manifest="{tmp_path / "rows.jsonl"}"')
        grey = Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
        grey.save(tmp_path / "deep.png")
        grey.convert("L").save(tmp_path / "two.gif", save_all=True, append_images=[Image.new("L", (64, 64))])
    path = CONFIGS[0].with_name(f"{stem}.toml")
    config, off = load(path, root, *overrides), load(path, root, OFF, *overrides)
    report = build(config, Options(progress=False))
    assert report.failed == {}
    cached = select(config)
    if isinstance(cached, Cache):  # else samples cut by the plan
        assert_same(cached, select(off), range(len(cached)))
    assert_same_batches(config, off)


def assert_same(cached: Cache, online: SampleSource, places: Sequence[int]) -> None:
    """places: in the online source of the cache's samples."""
    assert cached.constants == online.constants
    assert cached.fields == online.fields
    for index, place in enumerate(places):
        wanted, made = cached.read(index), online.read(place)
        assert wanted.keys() == made.keys()
        for name in wanted:
            pairs = zip(arrays(wanted[name]), arrays(made[name]), strict=True)
            for values, others in pairs:
                assert (values.dtype, values.shape) == (others.dtype, others.shape)
                assert values.tobytes() == others.tobytes(), (index, name)


def assert_same_batches(config: Config, off: Config) -> None:
    loaders = make_loader(config), make_loader(off)
    assert len(loaders[0]) == len(loaders[1])
    for wanted_batch, made_batch in zip(*loaders, strict=True):
        assert wanted_batch.keys() == made_batch.keys()
        torch.testing.assert_close(dict(wanted_batch), dict(made_batch), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["qwen2_audio", "qwen2_5_omni"])
@pytest.mark.few("qwen2_5_omni")
def test_clips_in_talks_are_the_same_on_the_fly(family: str, tmp_path: Path) -> None:
    talks = Talks.made(tmp_path, family)
    cached, _ = built(talks.config())
    online = select(talks.config('loader.cache="off"'))
    assert_same(cached, online, range(len(talks.names)))
    for name, lengths in online.lengths.items():
        np.testing.assert_array_equal(lengths, cached.lengths[name])
    assert_same_batches(talks.config(), talks.config('loader.cache="off"'))


def test_bad_clips_have_the_reasons_of_a_build_on_the_fly(tmp_path: Path) -> None:
    talks = Talks.made(tmp_path, "qwen2_audio")
    listed(tmp_path / "data", bad_rows(tmp_path / "data"))
    cached, report = built(talks.config())
    online = select(talks.config('loader.cache="off"'))
    assert isinstance(online, UncachedSource)
    ids = [online.sample_id(place) for place in range(len(online))]
    assert_same(cached, online, [ids.index(name) for name in cached.samples["sample_id"].to_pylist()])
    for place in range(len(online)):
        online.read(place)
    assert dict(online.failed) == report.failed


def test_a_bad_sample_is_replaced_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.add_tar("c.tar", ["c0", "c1"], broken={"c0": b"no"})
    source = UncachedSource(corpus.config(ANY_SHARE))
    for _ in range(2):
        np.testing.assert_array_equal(source.read(17)["waveform"], corpus.audio["c1"])
    assert source.read_one(17)[1] == 18
    assert source.failed == {"unknown_format": 1}
    assert caplog.text.count("reading another sample instead of c0, unknown_format: ") == 1


def test_bad_rows_beyond_the_allowed_share_end_the_reading(tmp_path: Path) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.add_tar("c.tar", ["c0", "c1", "c2"], broken={"c0": b"no", "c1": b"no"})
    source = UncachedSource(corpus.config("run.max_failed_share=0.06"))  # 1.2 of 20 rows
    assert source.read_one(19)[1] == 19
    assert source.read_one(18)[1] == 19
    with pytest.raises(
        BuildError, match=r"2 of 20 rows.* allows 1 .*bad: unknown_format 2\).*forebay preprocess.*0\.2"
    ):
        source.read(17)


def test_rows_that_the_listing_rejects_are_told_and_count_before_the_first_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.rows[3] |= {"tar_member_name": "nowhere.flac"}
    corpus.write_manifest()
    with pytest.raises(
        BuildError, match=r"1 of 17 rows are bad, run.max_failed_share = 0.01 allows 0 .*missing_member 1"
    ):
        make_loader(corpus.config(OFF))
    caplog.clear()
    select(corpus.config(OFF, ANY_SHARE, "source.languages=['en']"))
    told = [record.getMessage() for record in caplog.records if "left out: " in record.getMessage()]
    assert len(told) == 1
    french = sum(row["language"] == "fr" for row in corpus.rows)
    assert told[0].endswith(f"left out: bad: missing_member 1; not wanted: language {french}")


def test_where_all_samples_are_bad_the_error_comes_through(tmp_path: Path) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.rows.clear()
    corpus.add_tar("c.tar", ["c0", "c1"], broken={"c0": b"no", "c1": b"no"})
    with pytest.raises(SampleError, match="sample c"):
        UncachedSource(corpus.config(ANY_SHARE)).read(0)


def test_nothing_that_can_be_read_is_an_error_at_once(tmp_path: Path) -> None:
    corpus = speech_corpus(tmp_path)
    with pytest.raises(ManifestError, match=r"no sample of .*train.parquet can be used"):
        UncachedSource(corpus.config('source.languages=["xx"]'))


def test_other_numerics_than_the_caches_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = speech_corpus(tmp_path)
    UncachedSource(corpus.config(), stored_probe={"audio": "0" * 32, "text": "0" * 32})
    assert "the audio steps give other values here than where the cache was built" in caplog.text


def test_samples_are_read_only(tmp_path: Path) -> None:
    corpus = speech_corpus(tmp_path)
    corpus.add_tar("c.tar", ["c0"], broken={"c0": flac(tone(3, duration_s=0.2))})
    values = UncachedSource(corpus.config()).read(17)["waveform"]
    assert not values.flags.writeable
    np.testing.assert_array_equal(values, tone(3, duration_s=0.2))
