"""A build whose nodes share no folder: shards are staged in the bucket, and the store copies them into the cache."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.here_pool import HerePool
from benchmarks.objects.faults import FORBIDDEN, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay.config import Config
from forebay.errors import BuildError, ConfigError, RemoteDeniedError, RemoteError
from forebay.preprocess.build_report import BuildReport, Options
from forebay.preprocess.pipeline import build, prepare
from forebay.preprocess.stage import Stage
from forebay.store import memo
from forebay.store.cache import open_cache
from forebay.store.remote.carry import transfer
from forebay.store.remote.raw import arriving
from forebay.store.remote.raw.origin import forget
from forebay.store.remote.small_files import fetch_skeleton
from forebay.train.select import make_loader
from tests.commands import run, run_json
from tests.preprocess.corpus import Corpus, shard_bytes, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.preprocess.vision.corpus import photo_corpus
from tests.remote.raw_data import config_of, put_folder, tar

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return speech_corpus(tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def wanted(raw: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that one process makes in a folder."""
    return Path(build_here(raw.config(f"run.cache_root={tmp_path_factory.mktemp('local')}")).cache)


@pytest.fixture
def corpus(raw: Corpus, tmp_path: Path) -> Corpus:
    """Raw data of its own: tests change it."""
    copy = Corpus(tmp_path / "raw", rows=list(raw.rows), audio=dict(raw.audio))
    shutil.copytree(raw.folder, copy.folder)
    return copy


def node(corpus: Any, bucket: Bucket, folder: Path, *overrides: str) -> Config:
    """Returns the config of a corpus on a node of its own."""
    stores = (f"run.cache_root={bucket.url}/caches", f"remote.shard_dir={folder}", "remote.retries=0")
    return corpus.config(*stores, *overrides)  # type: ignore[no-any-return]


def staged(config: Config, bucket: Bucket, **options: Any) -> BuildReport:
    return build_here(config, stage=f"{bucket.url}/stage", **options)


def sealed(bucket: Bucket) -> dict[str, bytes]:
    """The shards of the one cache of the bucket, by their names in it."""
    return {name.split("/", 2)[2]: bucket.get(name) for name in bucket.names("caches") if name.endswith(".tdz")}


def left_on(folder: Path) -> list[str]:
    """Shards, whole or not, that stand on a node outside of its mirrors."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return [name for name in names if ".tdz" in name and not name.startswith("mirrors/")]


def test_a_staged_build_is_the_cache_of_one_process(raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path) -> None:
    config = node(raw, bucket, tmp_path / "node")
    report = build(config, Options(progress=False, stage=f"{bucket.url}/stage"))
    assert report.cache == f"{bucket.url}/caches/{wanted.name}"
    assert (report.sealed, report.shards_written, report.shards_kept) == (True, 10, 0)
    assert report.pushed is not None
    assert (report.pushed.linked_files, report.pushed.moved_files, report.pushed.read_back_bytes) == (10, 7, 0)
    assert sealed(bucket) == shard_bytes(wanted)
    assert open_cache(report.cache, remote=config.remote).metadata["key"] == open_cache(wanted).metadata["key"]
    assert bucket.names("stage") == []
    assert left_on(tmp_path / "node") == []
    local = list(make_loader(raw.config(f"run.cache_root={wanted.parent}")))
    for found, batch in zip(make_loader(node(raw, bucket, tmp_path / "other")), local, strict=True):
        assert all((found[name] == batch[name]).all() for name in batch)


@pytest.mark.wide
def test_a_vision_build_reads_what_it_needs_of_tensor_fields(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    corpus = photo_corpus(tmp_path / "photos")
    corpus.add_photo("bad.jpg", b"no photo")
    corpus.ask("bad", "bad.jpg")
    local = build_here(corpus.config())
    report = staged(node(corpus, bucket, tmp_path / "node"), bucket)
    assert (report.key, report.num_samples, report.failed) == (local.key, local.num_samples, local.failed)
    assert sealed(bucket) == shard_bytes(Path(local.cache))


def test_parts_of_nodes_that_share_nothing_seal_together(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 0, 2):
        monkeypatch.setenv("HOME", str(tmp_path / f"home{number}"))
        report = staged(node(raw, bucket, tmp_path / f"node{number}"), bucket, part=(number, 3))
        assert report.cache == f"{bucket.url}/caches/{wanted.name}"
        assert report.sealed == (number == 2)
    assert sealed(bucket) == shard_bytes(wanted)
    assert bucket.names("stage") == []


def test_a_seal_names_the_shards_that_no_node_has_staged(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path
) -> None:
    staged(node(raw, bucket, tmp_path / "one"), bucket, part=(0, 2))
    with pytest.raises(
        BuildError,
        match=r"--seal: 2 of 5 shards .* not finished \(1, 3\).*forebay preprocess .* --stage s3://.*/stage$",
    ):
        staged(node(raw, bucket, tmp_path / "seal"), bucket, seal_only=True)
    dry = staged(node(raw, bucket, tmp_path / "two"), bucket, dry_run=True)
    assert (dry.shards_kept, dry.shards_written, dry.cache) == (6, 4, f"{bucket.url}/caches/{wanted.name}")
    assert staged(node(raw, bucket, tmp_path / "two"), bucket, part=(1, 2)).sealed
    assert staged(node(raw, bucket, tmp_path / "seal"), bucket, seal_only=True).already_sealed


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are hashed."""
    seen: list[str] = []
    real = memo.hash_now

    def counting(path: str) -> Any:
        seen.append(Path(path).name)
        return real(path)

    for module in ("forebay.store.memo", "forebay.rows.named_files"):
        monkeypatch.setattr(f"{module}.hash_now", counting)
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
    return seen


@pytest.mark.wide
def test_copies_of_raw_files_are_hashed_once_where_they_are_read(
    corpus: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, hashed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Another node has other inodes and times: the listing holds, and who reads a tar compares its content."""
    stage = f"{bucket.url}/stage"
    report = prepare(node(corpus, bucket, tmp_path / "first"), Options(progress=False, stage=stage))
    assert sorted(hashed) == ["a.tar", "b.tar", "train.parquet"]
    for number in (0, 1):
        hashed.clear()
        for path in corpus.folder.iterdir():  # what another machine has in this place
            if path.is_file():
                shutil.copyfile(path, path.with_suffix(".copy"))
                os.replace(path.with_suffix(".copy"), path)
        config = node(corpus, bucket, tmp_path / f"node{number}")
        last = staged(config, bucket, part=(number, 2), key=report.key[:8])
        # Once by the worker, and the part that seals compares all sources.
        assert hashed.count("a.tar") <= 1 + number
    assert last.sealed
    assert "listed again" not in caplog.text
    assert sealed(bucket) == shard_bytes(wanted)


def test_a_copy_of_another_content_is_noticed_by_who_reads_it(corpus: Corpus, bucket: Bucket, tmp_path: Path) -> None:
    prepare(node(corpus, bucket, tmp_path / "first"), Options(progress=False, stage=f"{bucket.url}/stage"))
    data = bytearray((corpus.folder / "a.tar").read_bytes())
    data[3000] ^= 1
    (corpus.folder / "a.tar").write_bytes(data)
    with pytest.raises(BuildError, match=r"a\.tar changed during the build \(its xxh3-128 was"):
        staged(node(corpus, bucket, tmp_path / "other"), bucket, part=(0, 2))


class ElsewherePool(HerePool):
    """Runs the tasks as they arrive on another node, whose folder is another one."""

    folder = ""

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for task in tasks:
            sent = pickle.dumps((function, task))
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setenv("XDG_CACHE_HOME", self.folder)
                self.forget()
                called, moved = pickle.loads(sent)  # noqa: S301  our own
                yield task, called(moved)
            self.forget()

    @staticmethod
    def forget() -> None:
        forget()
        arriving._mirror.cache_clear()


@pytest.mark.wide
def test_a_task_finds_raw_data_of_a_bucket_on_any_node(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    manifest = tar(tmp_path / "data")
    put_folder(tmp_path / "data", bucket, "raw/")
    local = build_here(
        config_of("tar", str(tmp_path / "data" / manifest), root=tmp_path / "local", node=tmp_path / "n")
    )
    monkeypatch.setattr("forebay.preprocess.pipeline.Pool", ElsewherePool)
    monkeypatch.setattr(ElsewherePool, "folder", str(tmp_path / "worker"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "driver"))
    document = config_of("tar", f"{bucket.url}/raw/{manifest}", root=tmp_path, node=tmp_path / "n")
    config = dataclasses.replace(
        document,
        run=dataclasses.replace(document.run, cache_root=f"{bucket.url}/caches"),
        remote=dataclasses.replace(document.remote, shard_dir=None),
    )
    stage = f"{bucket.url}/stage"
    prepare(config, Options(progress=False, stage=stage))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    ElsewherePool.forget()
    report = build(config, Options(progress=False, stage=stage))
    assert report.key == local.key
    assert sealed(bucket) == shard_bytes(Path(local.cache))
    for name in ("driver", "worker"):
        assert list((tmp_path / name).glob("forebay/mirrors/raw-*/objects/*/*"))
    assert not list((tmp_path / "worker").glob("forebay/stage/*"))


def long_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Two shards of recordings that are as large as a hole is worth."""
    from tests.preprocess import corpus as module

    real = module.tone
    monkeypatch.setattr(module, "tone", lambda seed, duration_s: real(seed, duration_s=5.0 + duration_s))
    folder.mkdir()
    corpus = Corpus(folder)
    corpus.add_tar("long.tar", [f"l{i}" for i in range(8)])
    return corpus


def test_a_driver_downloads_what_a_seal_reads_and_no_recording(
    bucket: Bucket, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = long_corpus(tmp_path / "long", monkeypatch)
    local = build_here(corpus.config())
    for number in (0, 1):
        if number == 1:
            proxy.clear()
        with caplog.at_level(logging.INFO):
            report = staged(node(corpus, bucket, tmp_path / f"node{number}"), bucket, part=(number, 2))
    assert report.sealed
    assert sealed(bucket) == shard_bytes(Path(local.cache))
    media = sum(len(data) for name, data in sealed(bucket).items() if name.startswith("audio/"))
    gets = {key: n for (method, key), n in proxy.requests.items() if method == "GET" and key.endswith(".tdz")}
    read = {key: proxy.bytes_of(key) for key in gets}
    assert len(read) == 4
    assert media > 1_000_000
    assert sum(read.values()) < media / 20
    assert max(gets.values()) == 2
    assert "of 4 shards of 1.34 MB for the seal" in caplog.text


def test_what_was_staged_is_kept(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, puts = Stage.put, []

    def failing(self: Stage, *args: Any) -> Any:
        puts.append(args)
        if len(puts) > 4:
            raise KeyboardInterrupt("Ctrl-C")
        return real(self, *args)

    monkeypatch.setattr(Stage, "put", failing)
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        staged(node(raw, bucket, tmp_path / "one"), bucket)
    monkeypatch.setattr(Stage, "put", real)
    assert left_on(tmp_path / "one") == []
    # A shard whose receipt was never put is not there.
    receipt = next(name for name in bucket.names("stage") if "/text/" in name and name.endswith(".json"))
    remove(bucket, receipt)
    report = staged(node(raw, bucket, tmp_path / "two"), bucket)
    assert (report.shards_kept, report.shards_written) == (3, 7)
    assert sealed(bucket) == shard_bytes(wanted)


def remove(bucket: Bucket, name: str) -> None:
    import obstore

    obstore.delete(bucket.store(), name)


def test_a_staged_shard_of_other_bytes_is_made_again(raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path) -> None:
    staged(node(raw, bucket, tmp_path / "one"), bucket, part=(0, 2))
    shard = next(name for name in bucket.names("stage") if name.endswith(".tdz"))
    data = bytearray(bucket.get(shard))
    data[-200] ^= 1
    bucket.put(shard, bytes(data))
    report = staged(node(raw, bucket, tmp_path / "two"), bucket)
    assert (report.shards_kept, report.shards_written) == (5, 5)
    assert sealed(bucket) == shard_bytes(wanted)


@pytest.mark.parametrize("stopped", ["audio/00003.tdz", "lengths.npy", "metadata.json"])
@pytest.mark.few("metadata.json", "audio/00003.tdz")
def test_an_interrupted_seal_goes_on_from_any_node(
    corpus: Corpus, wanted: Path, bucket: Bucket, proxy: Proxy, tmp_path: Path, stopped: str
) -> None:
    proxy.add(Rule(fault=FORBIDDEN, method="PUT", key=f"caches/*/{stopped}"))
    with pytest.raises(RemoteDeniedError, match=f"{stopped}: denied"):
        staged(node(corpus, bucket, tmp_path / "one"), bucket)
    proxy.clear()
    for path in corpus.folder.glob("*.tar"):  # its stats stand in what is sealed
        os.utime(path)
    report = staged(node(corpus, bucket, tmp_path / "two"), bucket)
    assert (report.shards_kept, report.shards_written) == (10, 0)
    assert sealed(bucket) == shard_bytes(wanted)
    assert bucket.names("stage") == []


def test_of_two_drivers_one_seals_and_the_other_says_so(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Any] = []

    def overtaken(*args: Any, **options: Any) -> int:
        if not others:
            others.append(None)
            others[0] = staged(node(raw, bucket, tmp_path / "other"), bucket)
        return fetch_skeleton(*args, **options)

    monkeypatch.setattr("forebay.preprocess.stage_workspace.fetch_skeleton", overtaken)
    report = staged(node(raw, bucket, tmp_path / "one", "remote.max_concurrent=1"), bucket)
    assert (others[0].sealed, others[0].already_sealed, others[0].shards_kept) == (True, False, 10)
    assert report.already_sealed
    assert sealed(bucket) == shard_bytes(wanted)
    assert bucket.names("stage") == []


@pytest.mark.wide
def test_two_drivers_that_seal_at_once_seal_the_same_bytes(
    corpus: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Any] = []

    def overtaken(*args: Any, **options: Any) -> Any:
        if not others:
            others.append(None)
            for path in corpus.folder.glob("*.tar"):
                os.utime(path)
            others[0] = staged(node(corpus, bucket, tmp_path / "other"), bucket)
        return transfer.push(*args, **options)

    monkeypatch.setattr("forebay.preprocess.stage_workspace.push", overtaken)
    report = staged(node(corpus, bucket, tmp_path / "one"), bucket)
    assert others[0].sealed
    assert report.pushed is not None
    assert report.pushed.already_there
    assert sealed(bucket) == shard_bytes(wanted)


def test_shards_of_another_cache_of_the_bucket_are_copied_by_the_store(
    corpus: Corpus, bucket: Bucket, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    staged(node(corpus, bucket, tmp_path / "one"), bucket)
    corpus.rows[0]["transcript"] = "another text"
    corpus.write_manifest()
    proxy.clear()
    report = staged(node(corpus, bucket, tmp_path / "two"), bucket)
    assert (report.shards_linked, report.shards_written) == (9, 1)
    cache = report.cache.removeprefix(f"{bucket.url}/")
    local = build_here(corpus.config())
    found = {name.removeprefix(f"{cache}/"): bucket.get(name) for name in bucket.names(cache) if ".tdz" in name}
    assert found == shard_bytes(Path(local.cache))
    asked = [key for method, key in proxy.requests if method == "GET" and key.endswith(".tdz")]
    assert asked
    assert all(key.startswith("stage/") for key in asked)


@pytest.mark.wide
def test_shards_of_a_build_without_a_stage_are_staged(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = node(raw, bucket, tmp_path / "node")
    with monkeypatch.context() as patch:
        patch.setattr("forebay.preprocess.build_run.Run._seal", interrupt)
        with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
            build_here(config)
    assert left_on(tmp_path / "node")
    report = staged(config, bucket)
    assert (report.shards_linked, report.shards_written) == (10, 0)
    assert sealed(bucket) == shard_bytes(wanted)


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt("Ctrl-C")


@pytest.mark.wide
def test_a_shard_that_no_store_copies_at_once_goes_through_the_driver(
    raw: Corpus,
    wanted: Path,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    largest = max(map(len, shard_bytes(wanted).values()))
    monkeypatch.setattr(transfer, "MAX_COPY", largest - 1)
    report = staged(node(raw, bucket, tmp_path / "node"), bucket)
    assert report.pushed is not None
    assert report.pushed.linked_files == 9
    assert "it goes through this machine; a smaller layout.rows_per_shard" in caplog.text
    assert sealed(bucket) == shard_bytes(wanted)


@pytest.mark.parametrize(
    ("stage", "root", "message"),
    [
        ("DIR/stage", "URL/caches", r"--stage \S+/stage is a folder of this machine; .* --cache-root \S+/stage"),
        ("https://host/stage", "URL/caches", r"--stage https://host/stage: nothing is put to a web server"),
        ("URL/stage", "DIR/caches", r"the cache root is \S+/caches, a folder .* --cache-root s3://\S+/caches, then"),
        (
            "s3://other-bucket/stage",
            "URL/caches",
            r"s3://other-bucket/stage is in another bucket .*--stage s3://\S+/stage",
        ),
        ("URL/caches/stage", "URL/caches", r"/caches/stage and the cache root \S+/caches lie one in the other.*/stage"),
        ("URL", "URL/caches", r"lie one in the other"),
        ("URL/stage", "URL", r"lie one in the other"),
        ("URL/stage", "URL/stage", r"lie one in the other.*--stage \S+/staged"),
    ],
)
@pytest.mark.parametrize("command", [build, prepare])
@pytest.mark.few
def test_a_stage_that_is_none_is_refused(
    raw: Corpus, bucket: Bucket, tmp_path: Path, stage: str, root: str, message: str, command: Callable[..., Any]
) -> None:
    stage, root = (text.replace("URL", bucket.url).replace("DIR", str(tmp_path)) for text in (stage, root))
    config = node(raw, bucket, tmp_path / "node", f"run.cache_root={root}")
    with pytest.raises(ConfigError, match=message):
        command(config, Options(progress=False, stage=stage))
    assert bucket.names() == []


def test_parts_without_a_stage_are_told_of_it(raw: Corpus, bucket: Bucket, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--shards: the cache root is .*: --stage URL, or build below a folder"):
        build_here(node(raw, bucket, tmp_path / "node"), part=(0, 2))


def test_a_stage_that_cannot_be_written_is_named_before_the_work(
    raw: Corpus, bucket: Bucket, proxy: Proxy, tmp_path: Path, hashed: list[str]
) -> None:
    proxy.add(Rule(fault=FORBIDDEN, method="PUT", key="stage/*"))
    with pytest.raises(RemoteDeniedError, match=rf"{bucket.url}/stage/.*: denied, .* as the environment; ask"):
        staged(node(raw, bucket, tmp_path / "node"), bucket)
    assert hashed == []


def test_a_worker_that_may_not_put_names_itself_and_the_bucket(
    raw: Corpus, bucket: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.add(Rule(fault=FORBIDDEN, method="PUT", key="stage/*/audio/*.tdz"))
    with pytest.raises(RemoteError, match=rf"{os.uname().nodename} cannot use the stage: {bucket.url}/stage/.*denied"):
        staged(node(raw, bucket, tmp_path / "node"), bucket)
    assert left_on(tmp_path / "node") == []


def test_what_is_not_of_a_build_is_named_and_left(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = open_cache(wanted).key[:16]
    theirs = [f"stage/{key}/audio/notes.tdz", f"stage/{key}/notes.txt", "stage/theirs/origin", "stage/x.tdz"]
    for name in theirs:
        bucket.put(name, b"theirs")
    staged(node(raw, bucket, tmp_path / "node"), bucket)
    assert bucket.names("stage") == theirs
    assert f"stage/{key} holds objects that are not of a build and are left alone: audio/notes.tdz, notes.txt" in (
        caplog.text
    )


@pytest.mark.wide
def test_the_stage_of_sources_that_changed_goes_with_the_next_seal(
    corpus: Corpus, bucket: Bucket, tmp_path: Path
) -> None:
    staged(node(corpus, bucket, tmp_path / "one"), bucket, part=(0, 2))
    assert bucket.names("stage")
    corpus.add_tar("c.tar", ["c0"])
    report = staged(node(corpus, bucket, tmp_path / "two"), bucket)
    assert (report.num_samples, report.shards_linked, report.shards_written) == (18, 0, 12)
    assert bucket.names("stage") == []


@pytest.mark.wide
def test_what_a_driver_left_that_died_after_the_seal_goes(
    raw: Corpus, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "remove", interrupt)
        with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
            staged(node(raw, bucket, tmp_path / "one"), bucket)
    assert bucket.names("stage")
    assert staged(node(raw, bucket, tmp_path / "two"), bucket).already_sealed
    assert bucket.names("stage") == []


def test_the_command_prepares_makes_parts_and_seals(
    raw: Corpus, wanted: Path, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node(raw, bucket, tmp_path / "unused")
    root, stage = f"--cache-root={bucket.url}/caches", f"--stage={bucket.url}/stage"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.preprocess.pipeline.Pool", HerePool)
        command = ("preprocess", raw.folder / "config.toml", root, stage, "--no-progress")
        assert run_json(capsys, *command, "--prepare", f"--set=remote.shard_dir={tmp_path / 'a'}")["num_shards"] == 5
        code, out, _ = run(capsys, *command, "--shards=0::2", f"--set=remote.shard_dir={tmp_path / 'a'}")
        assert (code, out) == (0, "not sealed yet: 6 shards made, 0 were there; run the other parts\n")
        report = run_json(capsys, *command, f"--set=remote.shard_dir={tmp_path / 'b'}")
        assert (report["cache"], report["shards_kept"]) == (f"{bucket.url}/caches/{wanted.name}", 6)
        code, _, err = run(capsys, *command[:2], f"--cache-root={tmp_path}", stage)
    assert code == 2
    assert "the cache is sealed in the bucket of its stage" in err


@pytest.mark.wide
def test_a_node_keeps_no_copy_of_what_was_prepared_and_is_sealed(raw: Corpus, bucket: Bucket, tmp_path: Path) -> None:
    def copies() -> list[Path]:
        return list((tmp_path / "one").glob("roots/*/.building/prepared-*.lock"))

    prepare(node(raw, bucket, tmp_path / "first"), Options(progress=False, stage=f"{bucket.url}/stage"))
    staged(node(raw, bucket, tmp_path / "one"), bucket, part=(0, 2))
    folder = copies()[0].with_suffix("")
    assert folder.is_dir()
    staged(node(raw, bucket, tmp_path / "two"), bucket)
    assert folder.is_dir()
    staged(node(raw, bucket, tmp_path / "one", "source.max_samples=8"), bucket, part=(0, 2))
    assert not folder.exists()
