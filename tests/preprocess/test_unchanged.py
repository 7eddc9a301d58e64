"""Sources that change during a build, beside what `tests/faults/test_sources.py` does to every kind of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.config import Config
from forebay.errors import BuildError, ConfigError, ManifestError
from forebay.preprocess import build_run as run
from forebay.preprocess import listing, pipeline, shard_task
from forebay.rows import named_files
from forebay.rows.media_reader import MediaReader
from forebay.rows.named_files import require_unchanged, stamped, unchanged_stats
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.files import hash_file
from forebay.store.lookup import find_cache, sealed_caches
from forebay.store.memo import Memo, stat_now
from forebay.store.source_files import SourceFile
from forebay.train.uncached.uncached_source import UncachedSource
from tests.preprocess.corpus import Corpus, flac, shard_bytes, speech_corpus, tone, write_tar
from tests.preprocess.here_pool import build_here
from tests.text_corpus import text_config

TOKENIZER = Path(__file__).parents[2] / "demo" / "speech" / "model"


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return speech_corpus(tmp_path)


def rewrite(corpus: Corpus, name: str = "b.tar") -> None:
    """Other audio under the same names."""
    members = {f"b{n}.flac": flac(tone(500 + n, duration_s=0.1 + 0.05 * (n % 5))) for n in range(7)}
    write_tar(corpus.folder / name, members)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))


def before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Callable[[], None]) -> None:
    """Lets a function do something else first."""
    real = getattr(module, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        act()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, hooked)


def sources(folder: Path, *contents: bytes) -> list[SourceFile]:
    """Files of these contents, as a listing knows them."""
    files = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.bin"
        path.write_bytes(content)
        files.append(SourceFile(path.name, path, 0, listed=False, stat=stat_now(path), xxh3_128=hash_file(path)))
    return files


def test_a_build_that_stopped_for_a_changed_source_goes_on_with_the_shards_of_the_others(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before(patch, run, "require_unchanged", lambda: rewrite(corpus))
        with pytest.raises(BuildError, match=r"b\.tar changed during the build \(its xxh3-128 was .* and is .* now"):
            build_here(corpus.config())
    assert sealed_caches(corpus.root) == []
    report = build_here(corpus.config())
    # Three shards a group of a.tar; two of b.tar, whose texts do not depend on its bytes.
    assert (report.shards_linked, report.shards_written) == (8, 2)
    assert not (corpus.root / ".building").exists()
    np.testing.assert_array_equal(open_cache(report.cache).read(10)["waveform"], tone(500, duration_s=0.1))
    assert find_cache(corpus.config(), recipe_of(corpus.config())).state == "same"


def test_parts_between_which_a_source_changes_make_one_cache_of_its_last_content(corpus: Corpus) -> None:
    config = corpus.config()
    reports = [build_here(config, part=(0, 2))]
    rewrite(corpus)
    reports += [build_here(config, part=(i, 2)) for i in (1, 0)]
    assert [report.sealed for report in reports] == [False, False, True]
    assert reports[0].key != reports[1].key == reports[2].key
    assert sum(report.shards_linked for report in reports) > 0
    fresh = build_here(corpus.config('run.cache_root="fresh"'))
    assert shard_bytes(Path(reports[2].cache)) == shard_bytes(Path(fresh.cache))


def test_a_source_that_never_rests_stops_the_listing(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    real = listing.listed

    def restless(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        touch(corpus.folder / "a.tar")
        return found

    monkeypatch.setattr(listing, "listed", restless)
    with pytest.raises(BuildError, match=r"a\.tar changed each of 3 times that it was listed; wait until nothing"):
        build_here(corpus.config())


def test_a_source_that_never_rests_stops_its_shards(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    before(monkeypatch, shard_task, "_rows", lambda: touch(corpus.folder / "a.tar"))
    with pytest.raises(BuildError, match=r"a\.tar, or another file of its shard, was touched each of 3 times"):
        build_here(corpus.config())


def test_a_reading_that_fails_because_the_source_changed_is_blamed_on_that(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tar that became shorter than its index says would be a TarError."""
    before(monkeypatch, shard_task, "_rows", lambda: os.truncate(corpus.folder / "a.tar", 512))
    with pytest.raises(BuildError, match=r"a\.tar changed during the build"):
        build_here(corpus.config())


def test_a_loose_file_that_vanishes_is_no_failed_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"{number}.flac").write_bytes(flac(tone(number, duration_s=0.1)))
    (tmp_path / "m.jsonl").write_text("".join(f'{{"audio": "{n}.flac", "text": "t"}}\n' for n in range(3)))
    corpus = Corpus(tmp_path)
    config = corpus.config('source.kind="jsonl"', 'source.manifest="m.jsonl"', "run.max_failed_share=1.0")
    before(monkeypatch, shard_task, "_rows", lambda: (tmp_path / "1.flac").unlink(missing_ok=True))
    with pytest.raises(BuildError, match=r"1\.flac changed during the build \(is gone\)"):
        build_here(config)


@pytest.mark.parametrize(
    ("module", "moment", "error"),
    [(pipeline, "_measure", "changed in between"), (run, "require_unchanged", "changed during the build")],
)
def test_a_tokenizer_that_changes_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, moment: str, error: str
) -> None:
    """Where it is loaded, and where it was loaded already, before the seal."""
    folder = Path(shutil.copytree(TOKENIZER, tmp_path / "tokenizer"))
    config = text_config(tmp_path, f'text.tokenizer="{folder}"')

    def add_a_space() -> None:
        with open(folder / "tokenizer.json", "a") as file:
            file.write(" ")

    before(monkeypatch, module, moment, add_a_space)
    with pytest.raises((BuildError, ConfigError), match=rf"text\.tokenizer.*digest.*{error}|text\.tokenizer.*{error}"):
        build_here(config)
    assert sealed_caches(config.cache_root) == []


def test_files_that_rest_cost_a_stat_and_no_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = sources(tmp_path, b"a", b"b", b"c")
    looked: list[Path] = []

    def noted(path: str) -> Any:
        looked.append(Path(path))
        return stat_now(path)

    def refuse(path: Path) -> None:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("forebay.store.memo.stat_now", noted)
    monkeypatch.setattr(named_files, "hash_now", refuse)
    require_unchanged(files, memo=Memo(tmp_path / "root"), map_=map)
    assert unchanged_stats(files) == [file.stat for file in files]
    assert looked == 2 * [file.path for file in files]


def test_a_file_that_was_touched_is_hashed_once_for_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = sources(tmp_path, b"a" * 1000)
    touch(file.path)
    read: list[Path] = []
    before(monkeypatch, named_files, "hash_now", lambda: read.append(file.path))
    assert unchanged_stats([file]) == unchanged_stats([file]) == [stat_now(file.path)]
    assert len(read) == 1
    require_unchanged([file], memo=Memo(tmp_path / "root"), map_=map)


@pytest.mark.parametrize("change", ["content", "same stat", "gone"])
def test_a_file_that_changed_is_named(tmp_path: Path, change: str) -> None:
    file, other = sources(tmp_path, b"one", b"two")
    if change == "gone":
        file.path.unlink()
    else:
        file.path.write_bytes(b"other" if change == "content" else b"eno")
        os.utime(file.path, ns=(0, file.path.stat().st_mtime_ns if file.stat is None else file.stat[-2]))
    for check in (
        lambda: unchanged_stats([other, file]),
        lambda: require_unchanged([other, file], memo=Memo(tmp_path / "root"), map_=map),
    ):
        with pytest.raises(BuildError, match=r"0\.bin changed during the build \((is gone|its xxh3-128 was)"):
            check()


def test_young_files_are_waited_for_together_and_old_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [SourceFile(file.name, file.path) for file in sources(tmp_path, b"a", b"b")]
    waits: list[float] = []
    monkeypatch.setattr("forebay.rows.named_files.time.sleep", waits.append)
    found = stamped([*files, SourceFile("gone", tmp_path / "gone")])
    assert [file.stat for file in found] == [stat_now(file.path) for file in files] + [None]
    assert len(waits) == 1
    assert stamped(found[:2]) == found[:2]
    monkeypatch.setattr("forebay.rows.named_files.time.time_ns", lambda: 2**62)
    stamped(files)
    assert len(waits) == 1


def test_a_file_that_changes_in_the_tick_of_its_stamp_gets_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = sources(tmp_path, b"a")
    waits: list[float] = []

    def change_once(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            file.path.write_bytes(b"longer")

    monkeypatch.setattr("forebay.rows.named_files.time.sleep", change_once)
    (found,) = stamped([SourceFile(file.name, file.path)])
    assert found.stat == stat_now(file.path)
    assert len(waits) == 2


def uncached(corpus: Corpus) -> tuple[Config, UncachedSource]:
    config = corpus.config("run.max_open_tars=1")
    return config, UncachedSource(config)


@pytest.mark.parametrize("change", ["replace", "in place"])
def test_uncached_samples_of_a_file_that_changed_are_refused(corpus: Corpus, change: str) -> None:
    _, source = uncached(corpus)
    source.read(10)
    if change == "replace":
        source.read(0)  # another tar, so that this one is closed
        rewrite(corpus, "new.tar")
        (corpus.folder / "new.tar").replace(corpus.folder / "b.tar")
    else:
        rewrite(corpus)
    with pytest.raises(ManifestError, match=r"b\.tar was changed after it was listed.*start the run again"):
        source.read(11)
    source.read(1)


def test_uncached_samples_of_a_file_that_got_another_name_or_rights_are_read(corpus: Corpus) -> None:
    _, source = uncached(corpus)
    os.link(corpus.folder / "a.tar", corpus.folder / "more.tar")
    (corpus.folder / "a.tar").chmod(0o600)
    np.testing.assert_array_equal(source.read(0)["waveform"], corpus.audio["a0"])


def test_rows_of_a_table_that_changed_are_refused(tmp_path: Path) -> None:
    (file,) = sources(tmp_path, b"no parquet")
    listed = SourceFile(file.name, file.path, 0, listed=True, stat=file.stat)
    file.path.write_bytes(b"another one")
    with (
        MediaReader([listed], max_open=1, as_listed=True) as read,
        pytest.raises(ManifestError, match=r"0\.bin was changed after it was listed: it had 10 bytes"),
    ):
        read(0, 0, -1)
