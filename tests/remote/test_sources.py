"""Raw data in a bucket gives what it gives on a disk, and crosses the network once."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.objects.faults import FORBIDDEN, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket, ObjectServer
from forebay.config import Config
from forebay.config.remote import RemoteConfig, parse_url
from forebay.errors import BuildError, ManifestError, RemoteError, RemoteReplacedError
from forebay.preprocess.build_report import Options
from forebay.preprocess.groups import Groups
from forebay.preprocess.index_tars import index_manifests
from forebay.preprocess.listing import listed
from forebay.preprocess.pipeline import build
from forebay.steps.recipe import recipe_of
from forebay.store.lookup import Lookup, find_cache
from forebay.store.remote.bucket.bucket import Bucket as AnyBucket
from forebay.store.remote.raw.origin import Objects
from forebay.store.source_files import load_sources
from forebay.tar.index import export_json
from forebay.tar.scan import scan_tar
from forebay.train.uncached.uncached_source import uncached_source
from tests.preprocess.corpus import shard_bytes
from tests.preprocess.here_pool import build_here
from tests.remote.raw_data import SPEECH, VISION, config_of, put_folder
from tests.rows.helpers import audio, write_manifest, write_tar

pytestmark = pytest.mark.usefixtures("environment")


class Data:
    """Raw data of one kind, in a folder and in a bucket."""

    def __init__(self, tmp_path: Path, bucket: Bucket, proxy: Proxy, name: str) -> None:
        self.tmp_path, self.bucket, self.proxy, self.name = tmp_path, bucket, proxy, name
        self.folder = tmp_path / "data"
        self.folder.mkdir()
        self.manifest = (SPEECH | VISION)[name][1](self.folder)
        self.keys = put_folder(self.folder, bucket, "raw/data/")

    def local(self, *, root: str = "local", **source: object) -> Config:
        manifest = str(self.folder / self.manifest)
        return config_of(self.name, manifest, root=self.tmp_path / root, node=self.tmp_path / "node", **source)

    def remote(self, *, root: str = "remote", node: str = "node", prefix: str = "raw/data", **source: object) -> Config:
        url = f"{self.bucket.url}/{prefix}/{self.manifest}"
        return config_of(self.name, url, root=self.tmp_path / root, node=self.tmp_path / node, **source)

    def gets(self) -> dict[str, int]:
        """Downloads so far, by key."""
        counts = self.proxy.requests.items()
        return {key.removeprefix(f"{self.bucket.name}/"): n for (method, key), n in counts if method == "GET"}


@pytest.fixture
def data(tmp_path: Path, bucket: Bucket, proxy: Proxy, request: pytest.FixtureRequest) -> Data:
    return Data(tmp_path, bucket, proxy, getattr(request, "param", "tar"))


@pytest.mark.parametrize("data", [*SPEECH, *VISION], indirect=True)
def test_a_bucket_gives_what_a_disk_gives_and_is_read_once(data: Data) -> None:
    local = build_here(data.local())
    assert not data.proxy.requests
    remote = build_here(data.remote())
    assert remote.key == local.key
    assert remote.num_samples >= 4
    assert (remote.failed, remote.excluded) == (local.failed, local.excluded)
    assert shard_bytes(Path(remote.cache)) == shard_bytes(Path(local.cache))
    assert max(data.gets().values()) == 1, data.gets()


def test_workers_read_the_copies_of_the_node(data: Data) -> None:
    local = build_here(data.local())
    remote = build(data.remote(), Options(progress=False))
    assert remote.key == local.key
    assert shard_bytes(Path(remote.cache)) == shard_bytes(Path(local.cache))
    assert {key: n for key, n in data.gets().items() if n != 1} == {}


def test_a_cache_that_was_built_of_files_is_found_by_url_and_the_other_way_round(data: Data) -> None:
    built = build_here(data.local())
    found = look_up(data.remote(root="local"))
    assert (found.state, str(found.found and found.found.folder)) == ("same", built.cache)
    again = build_here(data.remote(root="remote"))
    assert look_up(data.local(root="remote")).found is not None
    assert again.key == built.key


def look_up(config: Config, *, may_hash: bool = True) -> Lookup:
    return find_cache(config, recipe_of(config), may_hash=may_hash)


@pytest.mark.parametrize("data", ["tar", "webdataset-folder", "jsonl", "vision-jsonl"], indirect=True)
@pytest.mark.few("jsonl", "vision-jsonl")
def test_a_second_node_finds_the_cache_without_a_download(data: Data) -> None:
    built = build_here(data.remote())
    other = data.tmp_path / "other"
    shutil.copytree(built.cache, other / Path(built.cache).name)
    before = data.proxy.requests
    found = look_up(data.remote(root="other", node="node-2"), may_hash=False)
    assert (found.state, found.found and found.found.key) == ("same", built.key)
    asked = data.proxy.requests - before
    assert not [key for method, key in asked if method == "GET"]


def test_a_moved_bucket_hits_by_content_and_by_etags_without_a_download(data: Data, server: ObjectServer) -> None:
    built = build_here(data.remote())
    home, data.bucket = data.bucket, server.make_bucket()
    put_folder(data.folder, data.bucket, "elsewhere/")
    before = data.proxy.requests
    assert look_up(data.remote(prefix="elsewhere"), may_hash=False).state == "unknown"
    trusted = look_up(data.remote(prefix="elsewhere", remote_identity="etag"), may_hash=False)
    assert (trusted.state, trusted.recipe.key) == ("same", look_up(data.remote(prefix="elsewhere")).recipe.key)
    found = look_up(data.remote(prefix="elsewhere"))
    assert (found.state, str(found.found and found.found.folder)) == ("same", built.cache)
    gets = {key: n for (method, key), n in (data.proxy.requests - before).items() if method == "GET"}
    assert len(gets) == len(data.keys)
    assert set(gets.values()) == {1}
    data.bucket = home


def test_etags_of_another_content_do_not_hit(data: Data) -> None:
    build_here(data.remote(remote_identity="etag"))
    data.bucket.put("raw/data/1.tar", (data.folder / "0.tar").read_bytes())
    assert look_up(data.remote(remote_identity="etag")).state == "changed"


def test_a_replaced_object_is_another_key_and_the_same_bytes_anew_are_not(data: Data) -> None:
    built = build_here(data.remote())
    data.bucket.put("raw/data/0.tar", (data.folder / "0.tar").read_bytes())
    assert look_up(data.remote()).state == "same"
    write_tar(data.folder / "0.tar", [("a.flac", audio(900, seed=9)), ("b.flac", audio(800, seed=8))])
    put_folder(data.folder, data.bucket, "raw/data/")
    assert look_up(data.remote()).state == "changed"
    again = build_here(data.remote())
    assert again.key == build_here(data.local()).key != built.key


def test_an_object_replaced_during_the_build_stops_the_seal(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    before(
        monkeypatch,
        "forebay.preprocess.build_run",
        "require_unchanged",
        lambda: data.bucket.put("raw/data/0.tar", (data.folder / "1.tar").read_bytes()),
    )
    hashes = r"\(its xxh3-128 was \w{32} when .* is \w{32}"
    with pytest.raises(BuildError, match=rf"^{data.bucket.url}/raw/data/0.tar changed during the build {hashes}"):
        build_here(data.remote())


def test_an_object_replaced_between_listing_and_download_is_listed_again(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = (data.folder / "1.tar").read_bytes()
    write_tar(data.folder / "0.tar", [("a.flac", audio(900, seed=9)), ("b.flac", audio(800, seed=8))])
    new = (data.folder / "0.tar").read_bytes()
    assert new != other
    calls: list[int] = []

    def replace() -> None:
        calls.append(1)
        if len(calls) == 1:
            data.bucket.put("raw/data/0.tar", new)

    before(monkeypatch, "forebay.rows.list_rows", "locate_tasks", replace)
    remote = build_here(data.remote())
    assert remote.key == build_here(data.local()).key
    assert shard_bytes(Path(remote.cache)) == shard_bytes(Path(build_here(data.local()).cache))


def before(monkeypatch: pytest.MonkeyPatch, module: str, name: str, action: Callable[[], object]) -> None:
    """Does something whenever a function of a module is called, before it is."""
    function = getattr(importlib.import_module(module), name)

    def called(*args: Any, **options: Any) -> Any:
        action()
        return function(*args, **options)

    monkeypatch.setattr(f"{module}.{name}", called)


def test_where_the_node_keeps_less_than_the_data_the_build_says_so_and_is_right(
    data: Data, caplog: pytest.LogCaptureFixture
) -> None:
    config = data.remote()
    sizes = [path.stat().st_size for path in data.folder.iterdir()]
    bound_gb = (max(sizes) + min(sizes) + 9000) / 1e9
    config = replace(config, remote=replace(config.remote, cache_size_gb=bound_gb))
    assert sum(sizes) / 1e9 > bound_gb
    remote = build_here(config)
    assert shard_bytes(Path(remote.cache)) == shard_bytes(Path(build_here(data.local()).cache))
    assert re.search(
        r"the sources have 0\.0\d\d MB, and this node keeps 0\.0\d\d MB of them \(remote\.cache_size_gb\)", caplog.text
    )


def manifest_of(data: Data, *rows: dict[str, Any]) -> None:
    defaults = {"tar_member_name": "a.flac", "duration_s": 0.1}
    write_manifest(data.folder / "train.parquet", [defaults | row for row in rows])
    put_folder(data.folder, data.bucket, "raw/data/")


def test_a_name_may_leave_the_folder_unless_the_source_is_confined(data: Data) -> None:
    (data.tmp_path / "beside").mkdir()
    shutil.copy(data.folder / "1.tar", data.tmp_path / "beside" / "1.tar")
    put_folder(data.tmp_path / "beside", data.bucket, "raw/beside/")
    beside = {"tar_path": "../beside/1.tar", "tar_member_name": "c.flac", "duration_s": 0.2}
    manifest_of(data, {"tar_path": "0.tar"}, beside)
    remote = build_here(data.remote())
    assert (remote.key, remote.num_samples) == (build_here(data.local()).key, 2)
    url = re.escape(f"{data.bucket.url}/raw/data")
    with pytest.raises(ManifestError, match=rf"^{url}/train.parquet names .*beside/1.tar.*not below '{url}'"):
        build_here(data.remote(confined=True))
    manifest_of(data, {"tar_path": "../../../x/1.tar"})
    with pytest.raises(ManifestError, match="leads out of its bucket"):
        build_here(data.remote())


def test_a_url_below_the_manifest_is_the_relative_name(data: Data) -> None:
    manifest_of(data, {"tar_path": "0.tar"})
    wanted = build_here(data.remote(), rebuild=True)
    manifest_of(data, {"tar_path": f"{data.bucket.url}/raw/data/0.tar"})
    found = build_here(data.remote(confined=True))
    assert found.shards_linked + found.shards_written > 0
    names = [source.name for source in load_sources(Path(found.cache) / "sources.parquet")]
    assert names == ["train.parquet", "0.tar"] == [s.name for s in load_sources(Path(wanted.cache) / "sources.parquet")]


def test_a_url_of_another_bucket_needs_an_unconfined_source(data: Data, server: ObjectServer) -> None:
    other = server.make_bucket()
    other.put("x/0.tar", (data.folder / "0.tar").read_bytes())
    manifest_of(data, {"tar_path": f"{other.url}/x/0.tar"})
    assert build_here(data.remote()).num_samples == 1
    with pytest.raises(ManifestError, match=f"which is '{other.url}/x/0.tar' and not below"):
        build_here(data.remote(confined=True))


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("/etc/passwd", "a place of one machine"),
        ("file:///etc/passwd", "a place of one machine"),
        ("https://example.com/x.tar", "of another store than"),
        ("http://169.254.169.254/latest", "link-local"),
        ("gs://bucket/x.tar", "of another store than"),
    ],
)
def test_a_manifest_of_a_bucket_reads_nothing_but_buckets(data: Data, written: str, why: str) -> None:
    manifest_of(data, {"tar_path": written})
    asked = data.proxy.requests
    with pytest.raises(ManifestError, match=rf"^{data.bucket.url}/raw/data/train.parquet names .*{why}"):
        build_here(data.remote())
    assert {key for _, key in data.proxy.requests - asked} <= {"raw/data/train.parquet", "raw/data/train.parquet/"}


def test_a_manifest_of_this_machine_names_no_url(data: Data) -> None:
    manifest_of(data, {"tar_path": f"{data.bucket.url}/raw/data/0.tar"})
    with pytest.raises(ManifestError, match="a manifest of this machine names files of this machine; put the manifest"):
        build_here(data.local())


@pytest.mark.parametrize("manifest", ["absent.parquet", "empty/", "*.nothing"])
def test_what_is_not_there_is_named_by_its_url(data: Data, manifest: str) -> None:
    data.manifest = manifest
    url = re.escape(f"{data.bucket.url}/raw/data/{manifest}".rstrip("/"))
    with pytest.raises(ManifestError, match=rf"^source.manifest {url} does not exist; correct"):
        build_here(data.remote())
    with pytest.raises(ManifestError, match=rf"^source.manifest {url} does not exist; correct"):
        uncached_source(data.remote())


def test_a_bucket_that_is_not_there_is_named(data: Data) -> None:
    data.bucket = replace(data.bucket, name="no-such-bucket-here")
    with pytest.raises((ManifestError, RemoteError), match="s3://no-such-bucket-here"):
        build_here(data.remote())


def test_an_object_that_is_a_folder_too_is_refused(data: Data) -> None:
    data.bucket.put("raw/data/train.parquet/x.parquet", b"x")
    with pytest.raises(ManifestError, match=rf"^{data.bucket.url}/raw/data/train.parquet is an object and a folder"):
        build_here(data.remote())


def test_a_manifest_that_may_not_be_read_says_who_asked(data: Data) -> None:
    data.proxy.add(Rule(fault=FORBIDDEN, key="*train.parquet"))
    with pytest.raises((ManifestError, RemoteError), match=rf"{data.bucket.url}/raw/data/train.parquet.*denied"):
        build_here(data.remote())


@pytest.mark.parametrize("data", ["tar", "jsonl", "vision-jsonl"], indirect=True)
def test_files_of_samples_that_may_not_be_read_fail_these_samples(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    name = {"tar": "1.tar", "jsonl": "c.wav", "vision-jsonl": "c.jpg"}[data.name]
    data.proxy.add(Rule(fault=FORBIDDEN, key=f"*{name}"))
    report = build_here(data.remote())
    reason = {"tar": "unreadable_tar"}.get(data.name, "missing_file")
    assert report.failed[reason] == 2
    told = [line for line in caplog.messages if line.startswith("left out") and name in line]
    assert told
    assert all(data.bucket.url in line and "denied" in line and "/mirrors/" not in line for line in told), told


@pytest.mark.parametrize("data", ["tar", "hf", "jsonl", "vision-jsonl"], indirect=True)
@pytest.mark.few("tar", "vision-jsonl")
def test_samples_on_the_fly_are_those_of_files(data: Data) -> None:
    local, remote = uncached_source(data.local()), uncached_source(data.remote())
    assert len(local) == len(remote) > 0
    for index in range(len(local)):
        ours, theirs = local.read(index), remote.read(index)
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(as_array(ours[name]), as_array(theirs[name])) for name in ours)
    assert max(data.gets().values()) == 1


def as_array(value: Any) -> Any:
    return np.asarray(value) if not isinstance(value, list) else np.concatenate([np.ravel(part) for part in value])


def test_a_source_on_the_fly_that_was_replaced_is_noticed(data: Data) -> None:
    source = uncached_source(data.remote())
    source.read(0)
    write_tar(data.folder / "1.tar", [("c.flac", audio(900, seed=9)), ("d.flac", audio(800, seed=8))])
    put_folder(data.folder, data.bucket, "raw/data/")
    for folder in (data.tmp_path / "node" / "mirrors").glob("*/objects"):
        shutil.rmtree(folder)
    with pytest.raises(ManifestError, match=rf"^{data.bucket.url}/raw/data/1.tar was changed after it was listed"):
        source.read(2)


def test_indexes_of_a_bucket(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = data.remote().remote
    root = data.tmp_path / "roots"
    urls = [f"{data.bucket.url}/raw/data", f"{data.bucket.url}/raw/data/train.parquet"]
    report = index_manifests(urls, remote=settings, cache_root=root, num_workers=1, progress=False)
    assert (report.indexed, report.members, report.failed) == (2, 4, [])
    again = index_manifests(urls, remote=settings, cache_root=root, num_workers=1, progress=False)
    assert (again.indexed, again.current) == (0, 2)
    absent = index_manifests([f"{data.bucket.url}/no"], remote=settings, cache_root=root, num_workers=1, progress=False)
    assert absent.failed[0][0] == f"{data.bucket.url}/no"
    index_manifests(urls, remote=settings, cache_root=root, num_workers=1, progress=False, export_json=True)
    assert "raw/data/0.tar.index.json" in data.bucket.names()
    before = data.proxy.requests
    clean = data.remote(node="node-3", root="clean")
    manifest = listed(clean, Groups.of(clean, recipe_of(clean)))
    gets = {key for method, key in data.proxy.requests - before if method == "GET"}
    assert len(manifest.rows) == 4
    assert "raw/data/0.tar.index.json" in {key.removeprefix(f"{data.bucket.name}/") for key in gets}


def many_tars(data: Data, count: int) -> None:
    rows = []
    for number in range(count):
        write_tar(data.folder / f"{number}.tar", [("a.flac", audio(16_000, seed=number))])
        rows.append({"tar_path": f"{number}.tar", "sample_id": f"clip-{number}", "duration_s": 1.0})
    manifest_of(data, *rows)


def test_shards_begin_with_the_tars_that_are_still_here(data: Data) -> None:
    many_tars(data, 8)
    size = (data.folder / "0.tar").stat().st_size
    config = data.remote()
    config = replace(config, remote=replace(config.remote, cache_size_gb=6.5 * (size + 4096) / 1e9, max_concurrent=1))
    remote = build_here(config)
    assert shard_bytes(Path(remote.cache)) == shard_bytes(Path(build_here(data.local()).cache))
    gets = {key: count for key, count in data.gets().items() if key.endswith(".tar")}
    assert len(gets) == 8
    assert 8 < sum(gets.values()) <= 8 + 4, gets  # least recently used first, in the order of the listing, it is 16


def test_few_large_members_are_read_one_by_one(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    members = [(f"{number}.flac", audio(16_000, seed=number)) for number in range(12)]
    write_tar(data.folder / "0.tar", members)
    export_json(scan_tar(data.folder / "0.tar"), data.folder / "0.tar.index.json")
    manifest_of(data, *({"tar_path": "0.tar", "tar_member_name": f"{n}.flac", "duration_s": 1.0} for n in (3, 8)))
    monkeypatch.setattr("forebay.rows.media_reader.SPARSE_MEMBER_BYTES", len(members[0][1]) // 2)
    source = uncached_source(data.remote())
    wanted = uncached_source(data.local())
    for index in (1, 0, 1):
        assert np.array_equal(source.read(index)["waveform"], wanted.read(index)["waveform"])
    parts = [e for e in data.proxy.traffic().exchanges if e.method == "GET" and e.key.endswith("0.tar")]
    assert parts
    assert all(exchange.range for exchange in parts)
    data.bucket.put("raw/data/0.tar", (data.folder / "1.tar").read_bytes())
    with pytest.raises((ManifestError, RemoteReplacedError), match=rf"{data.bucket.url}/raw/data/0.tar"):
        source.read(0)


def test_a_listing_of_many_files_is_few_requests(data: Data) -> None:
    many_tars(data, 12)
    before = data.proxy.requests
    manifest = listed(config := data.remote(), Groups.of(config, recipe_of(config)))
    asked = data.proxy.requests - before
    assert len(manifest.rows) == 12
    assert sum(count for (method, _), count in asked.items() if method == "LIST") <= 3
    assert not [key for (method, key) in asked if method == "HEAD" and key.endswith("3.tar")]


def test_files_kept_open_make_room_for_others(data: Data) -> None:
    many_tars(data, 6)
    size = (data.folder / "0.tar").stat().st_size
    config = data.remote()
    remote = replace(config.remote, cache_size_gb=2.7 * (size + 4096) / 1e9, max_concurrent=1, timeout_s=20.0)
    source = uncached_source(replace(config, remote=remote))
    wanted = uncached_source(data.local())
    for index in (0, 5, 1, 4, 2, 3, 0):
        assert np.array_equal(source.read(index)["waveform"], wanted.read(index)["waveform"])
    held = sum(path.stat().st_size for path in (data.tmp_path / "node").rglob("*") if path.is_file())
    assert held <= remote.cache_size_bytes


def test_manifests_of_a_disk_and_of_a_bucket_stand_beside_each_other(data: Data) -> None:
    (data.tmp_path / "more").mkdir()
    write_tar(data.tmp_path / "more" / "x.tar", [("x.flac", audio(1600, seed=7))])
    write_manifest(
        data.tmp_path / "more" / "m.parquet", [{"tar_path": "x.tar", "tar_member_name": "x.flac", "duration_s": 0.1}]
    )
    more = str(data.tmp_path / "more" / "m.parquet")
    node = data.tmp_path / "node"
    local = config_of("tar", (str(data.folder / data.manifest), more), root=data.tmp_path / "local", node=node)
    url = f"{data.bucket.url}/raw/data/{data.manifest}"
    remote = config_of("tar", (url, more), root=data.tmp_path / "remote", node=node)
    assert build_here(remote).key == build_here(local).key


def test_a_build_with_indexes_beside_the_tars_reads_each_tar_once(data: Data) -> None:
    for number in range(2):
        tar = data.folder / f"{number}.tar"
        export_json(scan_tar(tar), f"{tar}.index.json")
    put_folder(data.folder, data.bucket, "raw/data/")
    remote = build_here(data.remote())
    assert remote.key == build_here(data.local()).key
    assert {key: n for key, n in data.gets().items() if key.endswith(".tar")} == {
        "raw/data/0.tar": 1,
        "raw/data/1.tar": 1,
    }


def test_who_may_not_read_the_raw_data_trains_from_the_cache(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    built = build_here(data.remote())
    data.proxy.add(Rule(fault=FORBIDDEN))
    found = look_up(data.remote())
    assert (found.state, str(found.found and found.found.folder)) == ("absent", built.cache)
    assert "denied" in caplog.text
    with pytest.raises(RemoteError, match=rf"{data.bucket.url}/raw/data/train.parquet.*denied"):
        build_here(data.remote())


def test_raw_data_whose_bucket_is_gone_is_absent(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    built = build_here(data.remote())
    gone = config_of(
        "tar", f"s3://gone/data/{data.manifest}", root=data.tmp_path / "caches", node=data.tmp_path / "node"
    )
    found = look_up(replace(gone, run=data.remote().run))
    assert (found.state, str(found.found and found.found.folder)) == ("absent", built.cache)
    assert "there is no bucket gone" in caplog.text
    with pytest.raises(RemoteError, match=r"s3://gone/data.*there is no bucket gone"):
        build_here(replace(gone, run=data.remote().run))


def test_a_clip_of_another_bucket_in_a_config_that_only_looks_like_a_mirror(data: Data) -> None:
    """A folder of this machine that calls itself a mirror is none: only those of the node's own folder are."""
    fake = data.tmp_path / "mirrors" / "data"
    shutil.copytree(data.folder, fake)
    (fake / "origin.json").write_text('{"url": "s3://elsewhere/data", "remote": {"shard_dir": "/nowhere"}}')
    local = config_of("tar", str(fake / data.manifest), root=data.tmp_path / "local", node=data.tmp_path / "node")
    assert build_here(local).num_samples == 4
    (fake / "origin.json").write_text("[1, 2")
    assert build_here(local, rebuild=True).num_samples == 4
    assert not data.proxy.requests


def test_few_of_many_objects_are_asked_for_by_one_listing(data: Data) -> None:
    data.bucket.put_all((f"f/{name}", b"x") for name in "abcdefghij")
    objects = Objects(AnyBucket(parse_url(data.bucket.url), RemoteConfig(retries=0)))
    objects.look_up([f"f/{name}" for name in "acdehz"])
    assert data.proxy.requests.total() == 1
    assert [name for name in "abcdefghijz" if objects.info(f"f/{name}") is not None] == [*"abcdefghij"]
    assert objects.info("f/d") == objects.bucket.info("f/d")
    objects.look_up(["f/nothing", "nothing", "surrogate\udce9", "line\nend"])
    assert [objects.info(key) for key in ("nothing", "surrogate\udce9", "line\nend", "")] == [None] * 4


def test_a_mirror_that_went_in_between_is_made_anew(data: Data) -> None:
    source = uncached_source(data.remote())
    wanted = source.read(3)["waveform"].copy()
    fresh = uncached_source(data.remote())
    for folder in (data.tmp_path / "node" / "mirrors").iterdir():
        shutil.rmtree(folder)
    assert np.array_equal(fresh.read(3)["waveform"], wanted)
    assert list((data.tmp_path / "node" / "mirrors").glob("*/origin.json"))


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ("tar", {"0.tar"}),
        ("filelist", {"0.tar"}),
        ("webdataset-folder", {"train-0.tar"}),
        ("jsonl", {"clips/a.wav", "clips/b.wav"}),
        ("vision-jsonl", {"photos/a.jpg", "photos/b.jpg"}),
        ("vision-webdataset", {"a.tar", "b.tar"}),
    ],
    indirect=["data"],
)
@pytest.mark.few("tar-wanted0", "webdataset-folder-wanted2", "vision-jsonl-wanted4")
def test_the_first_samples_of_a_bucket_cost_no_other_download(data: Data, wanted: set[str]) -> None:
    local = build_here(data.local(max_samples=2))
    remote = build_here(data.remote(max_samples=2))
    assert (remote.key, remote.num_samples) == (local.key, 2)
    read = {key.removeprefix("raw/data/") for key in data.gets() if not key.endswith((".parquet", ".tsv", ".jsonl"))}
    assert {key for key in read if not key.endswith("/")} == wanted
    assert look_up(data.remote(max_samples=2), may_hash=False).found is not None
