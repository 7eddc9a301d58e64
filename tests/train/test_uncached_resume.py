"""A run begun without a cache goes on from the cache, and back, bit for bit; where it cannot, it says why."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay import load_config
from forebay.config import Config
from forebay.errors import ResumeError
from forebay.plan.make import plan_of
from forebay.plan.names import why_differ
from forebay.preprocess.audio_group import UNKNOWN, decoded_length
from forebay.preprocess.decode import decode_audio
from forebay.steps.audio.waveform import Decode
from forebay.store.sound_containers import parsed_header
from forebay.store.source import source_kind
from forebay.train import CachedVLDataset, make_loader
from forebay.train.collate.collator import Collator
from forebay.train.dataset import PlanSampler, SampleDataset
from forebay.train.loader import Loader
from forebay.train.select import select
from tests.preprocess.corpus import tone, write_tar
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import PhotoCorpus, photo_corpus

RATES = (16_000, 22_050, 44_100)
NUM_CLIPS = 24
PLANS = {
    "bucket": "batch_size = 3\nedges_s = [0.2, 0.3]\nlockstep = 1",
    "budget": "batch_seconds = 1.2\nk = 3\nlockstep = 1",
    "window": 'kind = "window"\nbatch_size = 3\nwindow = 3',
}
OFF = 'loader.cache="off"'
Batch = dict[str, Any]


@dataclass
class Listed:
    """Clips of odd lengths and rates in a tar, and a file list that gives their durations with two decimals."""

    folder: Path

    def config(self, *overrides: str, plan: str = "bucket") -> Config:
        path = self.folder / f"{plan}.toml"
        path.write_text(
            'name = "listed"\n[source]\nkind = "filelist"\nmanifest = "train.tsv"\n[audio]\nfeatures = "waveform"\n'
            f"[plan]\n{PLANS[plan]}\n[loader]\nnum_threads = 0\nseed = 3\n"
            '[run]\ncache_root = "caches"\nnum_workers = 1\nmax_failed_share = 1.0\n'
        )
        return load_config(path, overrides=overrides)


def listed(folder: Path, *, form: str = "FLAC", bad: str | None = None) -> Listed:
    """form: of soundfile. bad: id of a clip whose bytes are no audio."""
    members, lines = {}, []
    rng = np.random.default_rng(5)
    for number in range(NUM_CLIPS):
        rate, sample_id = RATES[number % len(RATES)], f"clip-{number:02d}"
        samples = tone(number, duration_s=1.0)[: int(rng.integers(1_600, 9_600))]
        buffer = io.BytesIO()
        kind = "WAV" if form == "FLAC" and number % 2 else form
        soundfile.write(buffer, samples, rate, format=kind)
        members[f"{sample_id}.{kind.lower()}"] = b"no audio" if sample_id == bad else buffer.getvalue()
        lines.append(f"clips.tar\t{sample_id}\t{'en' if number % 3 else 'fr'}\t{len(samples) / rate:.2f}\n")
    folder.mkdir(exist_ok=True)
    write_tar(folder / "clips.tar", members)
    (folder / "train.tsv").write_text("".join(lines))
    return Listed(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Listed:
    """Sealed; no test changes it."""
    found = listed(tmp_path_factory.mktemp("listed"))
    build_here(found.config())
    return found


def assert_goes_on(first: Loader, second: Any, *, steps: int) -> None:
    """Asserts that both go on alike from the state of `first` after `steps`, to the next epoch's end."""
    batches = iter(first)
    for _ in range(steps):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    batches.close()  # type: ignore[attr-defined]
    first.load_state_dict(state)
    second.load_state_dict(state)
    assert second.state_dict() == state
    wanted, found = ([batch for _ in range(2) for batch in loader] for loader in (first, second))
    assert len(wanted) > len(first)
    for left, right in zip(wanted, found, strict=True):
        assert left.keys() == right.keys()
        for name, value in left.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(right[name], value, rtol=0, atol=0)
            else:
                assert right[name] == value


@pytest.mark.parametrize("plan", PLANS)
def test_a_file_list_with_rounded_durations(corpus: Listed, plan: str, caplog: pytest.LogCaptureFixture) -> None:
    """Exact headers make the lengths those of the cache, at every rate, so every kind of plan has the same batches."""
    config, off = corpus.config(plan=plan), corpus.config(OFF, plan=plan)
    cached, online = make_loader(config), make_loader(off)
    assert (source_kind(select(config)), source_kind(select(off))) == ("cache", "uncached")
    for name, lengths in cached.source.lengths.items():
        np.testing.assert_array_equal(lengths, online.source.lengths[name])
    rounded = np.array([float(line.split("\t")[3]) for line in (corpus.folder / "train.tsv").read_text().splitlines()])
    assert np.any(np.rint(rounded * 16_000) != cached.source.lengths["num_audio_samples"])
    assert cached.plan_key == online.plan_key
    assert not [record for record in caplog.records if "lengths" in record.getMessage()]
    assert_goes_on(online, cached, steps=2)
    assert_goes_on(make_loader(config), make_loader(off), steps=3)


def test_begun_before_the_cache_was_built(tmp_path: Path) -> None:
    corpus = listed(tmp_path)
    online = make_loader(corpus.config())
    assert source_kind(select(corpus.config())) == "uncached"
    build_here(corpus.config())
    cached = make_loader(corpus.config('loader.cache="require"'))
    assert_goes_on(online, cached, steps=2)


def test_a_mixture_and_a_sampler_go_on_too(corpus: Listed) -> None:
    mixture = ('mixture.column="language"', "mixture.weights={en=0.5, fr=0.5}", "plan.edges_s=[9.0]")
    assert_goes_on(make_loader(corpus.config(OFF, *mixture)), make_loader(corpus.config(*mixture)), steps=2)
    online = make_loader(corpus.config(OFF))
    iterator = iter(online)
    next(iterator)
    source = select(corpus.config())
    planned = plan_of(corpus.config(), source)
    sampler = PlanSampler(planned, seed=0)
    sampler.load_state_dict(online.state_dict())
    dataset, collator = SampleDataset(source), Collator(source)
    for indices, batch in itertools.zip_longest(sampler, iterator):
        found = collator(dataset.__getitems__(indices))
        assert all(torch.equal(found[name], batch[name]) for name in batch)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> PhotoCorpus:
    found = photo_corpus(tmp_path_factory.mktemp("photos"))
    build_here(found.config())
    return found


def test_the_vision_line(photos: PhotoCorpus) -> None:
    overrides = ("plan.seq_len=120", "loader.num_threads=0")

    def cached() -> Loader:
        return make_loader(photos.config(*overrides))

    def online() -> Loader:
        return make_loader(photos.config(*overrides, OFF))

    assert cached().plan_key == online().plan_key
    assert_goes_on(online(), cached(), steps=1)
    assert_goes_on(cached(), online(), steps=2)
    folder = plan_of(photos.config(*overrides), cached().source).folder
    assert folder is not None
    dataset = CachedVLDataset(folder)
    assert dataset.cursor.key == online().plan_key


def test_lengths_that_no_header_says_are_named_and_refused_where_they_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ogg: two decimals are all that is known. Windows are sorted by length, and show it; one bucket does not."""
    corpus = listed(tmp_path, form="OGG")
    build_here(corpus.config())
    online = make_loader(corpus.config(OFF, plan="window"))
    assert f"the lengths of {NUM_CLIPS} of {NUM_CLIPS} samples are the manifest's" in caplog.text
    cached = make_loader(corpus.config(plan="window"))
    for one, other in ((online, cached), (cached, online)):
        with pytest.raises(
            ResumeError, match=r"the lengths of the samples give other batches: .* where no header says"
        ):
            one.load_state_dict(other.state_dict())
    wide = "plan.edges_s=[9.0]"
    assert_goes_on(make_loader(corpus.config(OFF, wide)), make_loader(corpus.config(wide)), steps=2)


def test_a_sample_that_the_build_leaves_out_is_said_and_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = listed(tmp_path, bad="clip-07")
    online = make_loader(corpus.config())
    list(online)
    assert caplog.text.count("the cache will leave such samples out") == 1
    build_here(corpus.config())
    cached = make_loader(corpus.config('loader.cache="require"'))
    assert len(cached.source) == NUM_CLIPS - 1
    with pytest.raises(ResumeError, match=r'the samples are others: .* left out as bad; .* loader\.cache = "off"'):
        cached.load_state_dict(online.state_dict())
    make_loader(corpus.config(OFF)).load_state_dict(online.state_dict())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("plan.batch_size=4", r"the settings of \[plan\] or a mixture changed since"),
        ("audio.sample_rate_hz=8000", r"the recipe \(\[source\], \[audio\], \[text\], \[vision\]\) changed since"),
    ],
)
def test_other_settings_are_refused_by_name(corpus: Listed, override: str, message: str) -> None:
    state = make_loader(corpus.config()).state_dict()
    with pytest.raises(
        ResumeError, match=rf"plan_key is ([0-9a-f]{{16}}), the plan here has (?!\1)[0-9a-f]{{16}}; {message}"
    ):
        make_loader(corpus.config(OFF, override)).load_state_dict(state)


def test_other_data_of_the_same_lengths_is_refused(corpus: Listed, tmp_path: Path) -> None:
    other = listed(tmp_path)
    lines = (tmp_path / "train.tsv").read_text().splitlines(keepends=True)
    (tmp_path / "train.tsv").write_text("".join([*lines[1:], lines[0]]))
    with pytest.raises(ResumeError, match="the samples are others"):
        make_loader(other.config(OFF)).load_state_dict(make_loader(corpus.config(OFF)).state_dict())


def test_other_samples_of_a_mixture_are_not_taken_for_another_setting() -> None:
    """Shares of tokens follow from the samples, so the first part of a state key differs too."""
    assert why_differ("a" * 64, "b" * 16 + "a" * 16 + "b" * 16 + "a" * 16).startswith("the data, the [plan] section or")
    assert why_differ("a" * 64, "b" * 16 + "a" * 48).startswith("the settings of [plan] or a mixture changed since")


def test_keys_with_nothing_in_common_say_nothing_more() -> None:
    for stored in (None, 3, "f" * 64, "f" * 20):
        assert why_differ(stored, "0" * 64).startswith("the data, the [plan] section or a mixture changed since")


@given(
    count=st.integers(2, 30_000),
    rate=st.sampled_from([8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000]),
    kind=st.sampled_from(["FLAC", "WAV"]),
    clip_s=st.none() | st.floats(0.01, 1.5),
)
def test_a_header_says_what_decoding_gives(count: int, rate: int, kind: str, clip_s: float | None) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.ones(count, np.int16), rate, format=kind)
    data, step = buffer.getvalue(), Decode(clip_s=clip_s)
    info = parsed_header(lambda offset, size: data[offset : offset + size], len(data))
    assert info is not None
    assert decoded_length(info, step) == max(1, len(decode_audio(data, step, sample_id="it")))
    assert decoded_length(info._replace(num_samples=0), step) == UNKNOWN
