"""Promises 2, 3 and 6 on the build: same bytes, sealed or absent, nothing twice."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay import load_config
from forebay.config import Config
from forebay.errors import BuildError, CacheIncompleteError, ManifestError
from forebay.plan.make import plan_of
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.groups import GROUPS
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.files import TEMPORARY_MARK, temporary_name
from forebay.store.lookup import find_cache, sealed_caches
from forebay.store.seal import verify_folder
from tests.preprocess.corpus import Corpus, file_bytes, flac, json_lines, shard_bytes, speech_corpus, tone
from tests.preprocess.here_pool import build_here
from tests.warm.worker import warm_python

QUIET = Options(progress=False)


def make(config: Config, **options: object) -> BuildReport:
    """A build in this process: what is tested of it needs no workers, which would each load transformers."""
    return build_here(config, **options)


def make_by_workers(config: Config, **options: object) -> BuildReport:
    return build(config, Options(progress=False, **options))  # type: ignore[arg-type]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards of `corpus`, of a build that nothing interrupted."""
    return shard_bytes(Path(make(speech_corpus(tmp_path_factory.mktemp("whole")).config()).cache))


def test_a_build_stores_every_clip_as_it_was(corpus: Corpus) -> None:
    report = make(corpus.config())
    cache = open_cache(report.cache)
    assert (report.num_samples, len(cache), report.shards_written) == (17, 17, 10)
    assert cache.samples["sample_id"].to_pylist() == list(corpus.audio)
    for index, audio in enumerate(corpus.audio.values()):
        np.testing.assert_array_equal(cache.read(index)["waveform"], audio)
    assert cache.samples["text"].to_pylist() == [row["transcript"] for row in corpus.rows]
    assert cache.samples["source"].to_pylist() == ["a.tar"] * 10 + ["b.tar"] * 7
    assert verify_folder(Path(report.cache)).problems == []
    assert not list(corpus.root.glob(".building"))


def test_a_second_build_does_nothing_and_says_so(corpus: Corpus) -> None:
    first = make(corpus.config())
    before = file_bytes(Path(first.cache))
    second = make(corpus.config())
    assert (second.already_sealed, second.key, second.cache) == (True, first.key, first.cache)
    assert (second.shards_written, second.shards_linked) == (0, 0)
    assert file_bytes(Path(first.cache)) == before


def test_a_build_makes_the_plan_of_its_config_and_tells_it(corpus: Corpus) -> None:
    config = corpus.config()
    without = make(replace(config, plan=None))
    assert str(without.plan).startswith(f"plan: none, {config.path} has no [plan] section; training needs one")
    assert without.plan_folder is None
    dry = make(config, dry_run=True)
    assert (dry.plan, dry.plan_folder, (corpus.root / "plans").exists()) == (None, None, False)
    report = make(config)
    planned = plan_of(config, open_cache(report.cache))
    assert report.plan == planned.summary()
    assert report.plan_folder == str(planned.folder)
    assert report.to_json()["plan_folder"] == report.plan_folder
    assert make(config).plan_folder == report.plan_folder


def test_a_part_that_is_not_sealed_has_no_plan(corpus: Corpus) -> None:
    report = make(corpus.config(), part=(0, 3))
    assert (report.sealed, report.plan, (corpus.root / "plans").exists()) == (False, None, False)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.few("3")
def test_any_number_of_workers_gives_the_same_bytes(corpus: Corpus, wanted: dict[str, bytes], workers: int) -> None:
    report = make_by_workers(corpus.config(f"run.num_workers={workers}"))
    assert shard_bytes(Path(report.cache)) == wanted


def test_parts_of_a_job_array_seal_together(corpus: Corpus, wanted: dict[str, bytes]) -> None:
    config = corpus.config()
    reports = [make(config, part=(i, 3)) for i in (2, 0, 1)]
    assert [report.sealed for report in reports] == [False, False, True]
    assert shard_bytes(Path(reports[-1].cache)) == wanted


def test_a_moved_corpus_hits(corpus: Corpus, tmp_path: Path) -> None:
    first = make(corpus.config())
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("a.tar", "b.tar", "train.parquet"):
        shutil.move(corpus.folder / name, moved / name)
    report = make(Corpus(moved).config(f'run.cache_root="{corpus.root}"'))
    assert (report.already_sealed, report.key) == (True, first.key)


def test_one_more_tar_processes_one_tar(corpus: Corpus) -> None:
    first = make(corpus.config())
    corpus.add_tar("c.tar", ["c0", "c1"])
    report = make(corpus.config())
    assert (report.num_samples, report.shards_linked, report.shards_written) == (19, 10, 2)
    assert report.key != first.key
    old, new = open_cache(first.cache), open_cache(report.cache)
    assert os.path.samefile(old.shard("audio", 0).path, new.shard("audio", 0).path)
    np.testing.assert_array_equal(new.read(18)["waveform"], corpus.audio["c1"])


def test_an_edited_transcript_makes_one_text_shard(corpus: Corpus) -> None:
    make(corpus.config())
    corpus.rows[5]["transcript"] = "edited"
    corpus.write_manifest()
    report = make(corpus.config())
    assert (report.shards_linked, report.shards_written) == (9, 1)
    assert open_cache(report.cache).samples["text"][5].as_py() == "edited"


def test_an_edited_tar_makes_its_shards_again(corpus: Corpus) -> None:
    make(corpus.config())
    rows = corpus.rows[10:]
    corpus.rows = corpus.rows[:10]
    corpus.add_tar("b.tar", [str(row["sample_id"]) for row in rows], broken={"b3": flac(tone(99, duration_s=0.2))})
    for row, old in zip(corpus.rows[10:], rows, strict=True):
        row["duration_s"] = old["duration_s"]
    report = make(corpus.config())
    # Three media and three text shards of a.tar, and the text of b.tar: text does not depend on the tar's other bytes.
    assert (report.shards_linked, report.shards_written) == (8, 2)
    np.testing.assert_array_equal(open_cache(report.cache).read(13)["waveform"], tone(99, duration_s=0.2))


def test_a_rebuild_gives_the_same_bytes_in_new_files(corpus: Corpus) -> None:
    first = make(corpus.config())
    before = shard_bytes(Path(first.cache))
    reader = open_cache(first.cache)
    kept = reader.read(0)["waveform"]
    inode = reader.shard("audio", 0).path.stat().st_ino
    report = make(corpus.config(), rebuild=True)
    assert (report.key, report.cache, report.shards_written) == (first.key, first.cache, 10)
    assert shard_bytes(Path(first.cache)) == before
    assert open_cache(first.cache).shard("audio", 0).path.stat().st_ino != inode
    np.testing.assert_array_equal(kept, corpus.audio["a0"])
    np.testing.assert_array_equal(reader.read(16)["waveform"], corpus.audio["b6"])


@pytest.mark.parametrize("rows_per_shard", [1, 3, 17])
@pytest.mark.few("3")
def test_a_rebuild_in_another_layout_leaves_readers_what_they_opened(corpus: Corpus, rows_per_shard: int) -> None:
    first = make(corpus.config())
    reader, untouched = open_cache(first.cache), open_cache(first.cache, max_open_shards=1)
    pickled = pickle.dumps(reader)
    reader.read(0)
    config = corpus.config(f"layout.rows_per_shard={rows_per_shard}")
    assert make(config, rebuild=True).cache == first.cache
    assert open_cache(first.cache).num_shards != reader.num_shards
    for cache in (reader, untouched, pickle.loads(pickled)):  # noqa: S301  our own
        for index, audio in enumerate(corpus.audio.values()):
            np.testing.assert_array_equal(cache.read(index)["waveform"], audio)
        assert cache.samples["sample_id"].to_pylist() == list(corpus.audio)
    left = [path for path in corpus.root.iterdir() if TEMPORARY_MARK in path.name]
    assert len(left) == 1
    del reader, untouched, cache
    os.rename(left[0], str(left[0]).replace(f"-{os.getpid():x}-", f"-{_gone_pid():x}-"))  # its builder has ended
    make(config)
    assert [path for path in corpus.root.iterdir() if TEMPORARY_MARK in path.name] == []


def _gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_dry_run_writes_no_shard_and_says_what_would_be_done(corpus: Corpus) -> None:
    report = make(corpus.config(), dry_run=True)
    assert (report.sealed, report.num_samples, report.shards_written) == (False, 17, 10)
    assert sealed_caches(corpus.root) == []
    made = make(corpus.config())
    payload = sum(audio.nbytes for audio in corpus.audio.values())
    assert payload < (report.estimated_bytes or 0) < payload * 1.1
    assert report.key == made.key


def test_a_dry_run_says_what_its_listing_leaves_out(corpus: Corpus) -> None:
    corpus.rows.append({**corpus.rows[-1], "tar_member_name": "gone.flac", "sample_id": "gone"})
    corpus.write_manifest()
    with pytest.raises(BuildError, match=r"(?s)1 of 18 samples are bad.*gone: missing_member"):
        make(corpus.config(), dry_run=True)
    given = ('source.exclude=["a1"]', "run.max_failed_share=0.2")
    dry, made = make(corpus.config(*given), dry_run=True), make(corpus.config(*given))
    assert (dry.num_samples, dry.excluded, dry.failed) == (made.num_samples, made.excluded, made.failed)
    assert list(dry.lines())[1:] == ["excluded: excluded_by_id 1", "failed: missing_member 1"]


@pytest.mark.parametrize("damage", ["truncate", "remove", "flip"])
@pytest.mark.few("flip", "remove")
def test_a_damaged_shard_alone_is_made_again(corpus: Corpus, damage: str) -> None:
    first = make(corpus.config())
    before = shard_bytes(Path(first.cache))
    shard = Path(first.cache) / "audio" / "00001.tdz"
    data = shard.read_bytes()
    shard.unlink()
    if damage == "truncate":
        shard.write_bytes(data[:-100])
    elif damage == "flip":
        shard.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    report = make(corpus.config(), verify=damage == "flip")
    assert (report.shards_linked, report.shards_written) == (9, 1)
    assert shard_bytes(Path(first.cache)) == before
    assert verify_folder(Path(first.cache)).problems == []


def test_a_bad_sample_costs_that_sample(corpus: Corpus) -> None:
    bad = {"c1": b"not audio at all", "c2": b"", "c3": flac(tone(1, duration_s=0.3))[:200]}
    corpus.add_tar("c.tar", [f"c{i}" for i in range(5)], broken=bad)
    corpus.rows.append({**corpus.rows[-1], "tar_member_name": "gone.flac", "sample_id": "gone"})
    corpus.write_manifest()
    report = make(corpus.config("run.max_failed_share=0.5"))
    assert report.num_samples == 19
    assert sum(report.failed.values()) == 4
    assert report.failed["empty_file"] == report.failed["missing_member"] == 1
    listed = json_lines(Path(report.cache) / "rejected.jsonl")
    assert {(row["sample_id"], row["kind"]) for row in listed} == {(i, "failed") for i in ("c1", "c2", "c3", "gone")}
    cache = open_cache(report.cache)
    assert [i for i in cache.samples["sample_id"].to_pylist() if str(i).startswith("c")] == ["c0", "c4"]
    np.testing.assert_array_equal(cache.read(18)["waveform"], corpus.audio["c4"])


def test_too_many_bad_samples_stop_the_build_and_keep_what_was_finished(corpus: Corpus) -> None:
    corpus.add_tar("c.tar", ["c0", "c1"], broken={"c0": b"no"})
    with pytest.raises(BuildError, match=r"(?s)1 of 19 samples are bad.*c0.*--set run.max_failed_share=0.1"):
        make(corpus.config("run.num_workers=1"))
    assert sealed_caches(corpus.root) == []
    report = make(corpus.config("run.max_failed_share=0.2"))
    assert report.shards_kept > 0
    assert report.num_samples == 18


def test_failures_of_linked_shards_are_counted_too(corpus: Corpus) -> None:
    corpus.add_tar("c.tar", ["c0", "c1"], broken={"c0": b"no"})
    make(corpus.config("run.max_failed_share=0.2"))
    corpus.add_tar("d.tar", ["d0"])
    with pytest.raises(BuildError, match=r"1 of 20 samples are bad"):
        make(corpus.config())
    assert sum(make(corpus.config("run.max_failed_share=0.2")).failed.values()) == 1


def test_an_excluded_sample_is_listed(corpus: Corpus) -> None:
    report = make(corpus.config('source.exclude=["a1"]', 'source.languages=["en"]'))
    languages = [row["language"] for row in corpus.rows]
    assert report.excluded["excluded_by_id"] == 1
    assert report.num_samples + sum(report.excluded.values()) == 17
    assert report.num_samples == sum(
        language == "en" and row["sample_id"] != "a1" for language, row in zip(languages, corpus.rows, strict=True)
    )


def test_max_samples_takes_the_first(corpus: Corpus) -> None:
    report = make(corpus.config("source.max_samples=12"))
    assert open_cache(report.cache).samples["sample_id"].to_pylist() == list(corpus.audio)[:12]


@pytest.mark.parametrize("overlong", ["keep", "clip", "drop"])
def test_overlong_clips(corpus: Corpus, overlong: str) -> None:
    report = make(corpus.config("source.max_duration_s=0.22", f'source.overlong="{overlong}"'))
    cache = open_cache(report.cache)
    longer = sum(len(audio) > 0.22 * 16_000 for audio in corpus.audio.values())
    longest = max(len(audio) for audio in corpus.audio.values())
    assert longer > 0
    if overlong == "drop":
        assert report.excluded == {"too_long": longer}
    else:
        assert len(cache) == 17
        assert cache.lengths["num_audio_samples"].max() == (longest if overlong == "keep" else 3520)
        assert cache.metadata["clipped"] == (longer if overlong == "clip" else 0)


def test_a_duration_that_the_manifest_got_wrong_is_filtered_by_what_was_decoded(corpus: Corpus) -> None:
    corpus.add_tar("c.tar", ["long"], broken={"long": flac(tone(5, duration_s=2.0))})
    report = make(corpus.config("source.max_duration_s=1.0", 'source.overlong="drop"'))
    assert report.excluded == {"too_long": 1}
    assert "long" not in open_cache(report.cache).samples["sample_id"].to_pylist()


def test_a_missing_manifest_stops_before_anything_is_made(corpus: Corpus) -> None:
    with pytest.raises(ManifestError, match=r"absent.parquet does not exist"):
        make(corpus.config('source.manifest="absent.parquet"'))
    assert sealed_caches(corpus.root) == []


def test_a_mistyped_manifest_does_not_pass_for_absent_raw_data(corpus: Corpus) -> None:
    make(corpus.config())
    with pytest.raises(ManifestError, match=r"absent.parquet does not exist"):
        make(corpus.config('source.manifest="absent.parquet"'))


def test_a_cache_stays_sealed_when_its_tars_are_taken_away(corpus: Corpus, caplog: pytest.LogCaptureFixture) -> None:
    first = make(corpus.config())
    (corpus.folder / "a.tar").unlink()
    report = make(corpus.config())
    assert (report.already_sealed, report.cache) == (True, first.cache)
    assert "some of its raw data is not here" in caplog.text


def test_a_full_disk_stops_the_build_and_it_goes_on_later(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_TEST_NO_SPACE_AFTER", "3")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "full_disk"))
    with pytest.raises(OSError, match="No space left on device"):
        make_by_workers(corpus.config())
    monkeypatch.delenv("FOREBAY_TEST_NO_SPACE_AFTER")
    assert sealed_caches(corpus.root) == []
    report = make(corpus.config())
    assert report.num_samples == 17
    assert verify_folder(Path(report.cache)).problems == []


def run_build(folder: Path) -> subprocess.Popen[str]:
    code = (
        "from forebay import load_config; from forebay.preprocess import build, Options\n"
        f"print(build(load_config({str(folder / 'config.toml')!r}), Options(progress=False)).shards_kept)"
    )
    return subprocess.Popen([warm_python(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_shards(root: Path, count: int) -> None:
    deadline_s = time.monotonic() + 60
    while (
        sum(len(list(root.glob(f".building/*/{group}/*.json"))) for group in GROUPS) < count
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("count", "end"), [(1, signal.SIGKILL), (4, signal.SIGKILL), (2, signal.SIGTERM), (3, signal.SIGINT)]
)
@pytest.mark.few("1-9", "3-2")
def test_a_killed_build_goes_on_where_it_was(
    corpus: Corpus, wanted: dict[str, bytes], count: int, end: signal.Signals
) -> None:
    config = corpus.config()
    with run_build(corpus.folder) as process:
        wait_for_shards(corpus.root, count)
        process.send_signal(end)
        process.communicate()
    sealed = sealed_caches(corpus.root)
    for folder in corpus.root.glob(".building/*"):
        with pytest.raises(CacheIncompleteError, match="not sealed"):
            open_cache(folder)
    report = make(config)
    assert sealed or report.shards_kept >= count
    assert shard_bytes(Path(report.cache)) == wanted
    assert not list(corpus.root.glob(".building"))


def test_two_builders_at_once_give_one_cache_and_no_error(corpus: Corpus, wanted: dict[str, bytes]) -> None:
    config = corpus.config()
    builders = [run_build(corpus.folder) for _ in range(2)]
    results = [(builder.communicate()[1], builder.returncode) for builder in builders]
    assert [code for _, code in results] == [0, 0], results
    assert [shard_bytes(cache.folder) for cache in sealed_caches(corpus.root)] == [wanted]
    assert verify_folder(sealed_caches(corpus.root)[0].folder).problems == []
    assert find_cache(config, recipe_of(config)).state == "same"


def test_a_sample_that_kills_its_worker_is_named_with_the_line_that_excludes_it(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_TEST_CRASH_ON", "3")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "crashing_decoder"))
    with pytest.raises(BuildError, match=r'signal SIGSEGV.*sample .a6. .*exclude = \["a6"\]') as caught:
        make_by_workers(corpus.config("run.num_workers=1"))
    assert "finished shards are kept" in str(caught.value)
    report = make_by_workers(corpus.config('source.exclude=["a6"]', "run.num_workers=1"))
    assert report.num_samples == 16


def test_another_tokenisation_decodes_nothing(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "configs" / "demo_speech.toml"
    root = f'run.cache_root="{tmp_path}"'
    first = make(load_config(path, overrides=[root]))
    report = make(load_config(path, overrides=[root, "text.max_label_tokens=40"]))
    assert (report.shards_linked, report.shards_written) == (3, 3)
    assert report.excluded == {"label_too_long": 52 - report.num_samples}
    assert 0 < report.num_samples < 52
    old, new = open_cache(first.cache), open_cache(report.cache)
    assert os.path.samefile(old.shard("audio", 0).path, new.shard("audio", 0).path)
    kept = [i for i, n in enumerate(old.lengths["num_tokens"]) if n - 1 <= 40]
    assert new.samples["sample_id"].to_pylist() == old.samples["sample_id"].take(kept).to_pylist()
    for index, before in enumerate(kept):
        np.testing.assert_array_equal(new.read(index)["input_features"], old.read(before)["input_features"])


def test_a_named_cache_is_for_training_and_does_not_steer_a_build(corpus: Corpus) -> None:
    first = make(corpus.config())
    report = make(corpus.config(f'loader.cache_dir="{first.cache}"', "audio.sample_rate_hz=8000"))
    assert report.cache != first.cache


def test_other_numerics_than_a_caches_are_reported_and_its_shards_not_kept(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(corpus.config())
    shard = Path(first.cache) / "audio" / "00000.tdz"
    shard.unlink()
    monkeypatch.setenv("FOREBAY_TEST_OTHER_NUMERICS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "other_numerics"))
    report = make_by_workers(corpus.config())
    assert "the audio steps give other values here" in caplog.text
    assert (report.shards_written, report.shards_linked) == (5, 5)


def test_a_damaged_shard_names_the_linked_copies_and_takes_none_of_them(
    corpus: Corpus, caplog: pytest.LogCaptureFixture
) -> None:
    first = make(corpus.config())
    corpus.add_tar("c.tar", ["c0"])
    grown = make(corpus.config())
    shard = Path(first.cache) / "audio" / "00001.tdz"
    linked = Path(grown.cache) / "audio" / "00001.tdz"
    assert os.path.samefile(shard, linked)
    before = shard.read_bytes()
    with open(linked, "r+b") as file:  # in place: one damage in both
        file.seek(500)
        file.write(bytes([before[500] ^ 1]))
    report = make(corpus.config(), verify=True)
    assert (report.cache, report.shards_written) == (grown.cache, 1)
    assert f"{shard} is damaged; to mend it: forebay preprocess --verify" in caplog.text
    assert linked.read_bytes() == before
    assert not os.path.samefile(shard, linked)
    assert verify_folder(Path(grown.cache)).problems == []


def test_what_a_killed_run_left_beside_the_caches_is_swept_by_the_next(corpus: Corpus) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    left = []
    for folder in ("", "plans", "tar_index", ".building"):
        path = corpus.root / folder / "hashes.memo"
        path.parent.mkdir(parents=True, exist_ok=True)
        left.append(Path(re.sub(r"-[0-9a-f]+-(?=[0-9a-f]{8}$)", f"-{process.pid:x}-", str(temporary_name(path)))))
        left[-1].write_bytes(b"half")
    make(corpus.config(), dry_run=True)
    assert all(path.exists() for path in left)
    make(corpus.config())
    assert [path for path in left if path.exists()] == []


def test_a_folder_that_a_builder_left_after_it_had_sealed_is_removed(corpus: Corpus) -> None:
    report = make(corpus.config())
    (corpus.root / ".building" / report.key[:16] / "audio").mkdir(parents=True)
    assert make(corpus.config()).already_sealed
    assert not (corpus.root / ".building").exists()
