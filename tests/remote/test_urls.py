"""Caches and cache roots by URL, as a user names them: builds, lookups, training, what commands print."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import forebay
from benchmarks.objects.faults import FORBIDDEN, SERVER_ERROR, Rule
from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket, ObjectServer
from forebay.config import Config, RemoteConfig
from forebay.config.remote import parse_url
from forebay.errors import (
    BuildError,
    CacheNotFoundError,
    ConfigError,
    RemoteError,
)
from forebay.preprocess import pipeline
from forebay.preprocess.build_report import BuildReport
from forebay.preprocess.listing import explain
from forebay.preprocess.merge import subset
from forebay.steps.recipe import recipe_of
from forebay.store.cache import open_cache
from forebay.store.files import TEMPORARY_MARK
from forebay.store.lookup import Lookup, find_cache, sealed_caches
from forebay.store.remote.carry.transfer import push
from forebay.store.remote.mirror import Mirror
from forebay.store.remote.small_files import NAME as COLUMNS
from forebay.store.remote.small_files import RemoteRoot, dump_columns, parse_columns
from forebay.store.seal import verify_folder
from forebay.train import CachedVLDataset
from forebay.train.select import make_loader, select
from tests.commands import inspect, inspected, inspected_json, run, run_json
from tests.preprocess.corpus import Corpus, speech_corpus
from tests.preprocess.here_pool import build_here
from tests.store_factory import make_cache
from tests.train.tiny_vl import conversations
from tests.train.vl_cache import make_packs, make_vl_cache

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return speech_corpus(tmp_path_factory.mktemp("raw"))


@pytest.fixture
def corpus(raw: Corpus, tmp_path: Path) -> Corpus:
    """Raw data of its own: tests add to it and take it away."""
    copy = Corpus(tmp_path / "raw", rows=list(raw.rows), audio=dict(raw.audio))
    shutil.copytree(raw.folder, copy.folder)
    return copy


@pytest.fixture
def root(bucket: Bucket) -> str:
    return f"{bucket.url}/caches"


@pytest.fixture
def config(corpus: Corpus, root: str, tmp_path: Path) -> Config:
    return at(corpus, root, tmp_path / "node")


def at(corpus: Corpus, root: str, node: Path, *overrides: str) -> Config:
    """Returns the config of a corpus on a node of its own."""
    stores = (f"run.cache_root={root}", f"remote.shard_dir={node}", "remote.retries=0", "remote.timeout_s=20")
    return corpus.config(*stores, *overrides)


def find(config: Config) -> Lookup:
    return find_cache(config, recipe_of(config))


def shards_here(node: Path) -> list[str]:
    """Names of the shards that a node has of stores."""
    return sorted(path.relative_to(node / "mirrors").as_posix() for path in (node / "mirrors").glob("*/*/*.tdz"))


def stand_in_caches(config: Config) -> list[str]:
    names = [path.parent.name for path in config.cache_root.glob("[!.]*/metadata.json")]
    return [name for name in names if TEMPORARY_MARK not in name]  # a reader has that one open


def gets(proxy: Proxy, ending: str = "") -> list[str]:
    """Keys that were downloaded, each as often as it was."""
    return [
        key for (method, key), n in proxy.requests.items() for _ in range(n) if method == "GET" and key.endswith(ending)
    ]


def test_a_build_ends_in_the_store_and_the_next_one_does_nothing(
    config: Config, bucket: Bucket, proxy: Proxy, corpus: Corpus, root: str, tmp_path: Path
) -> None:
    local = build_here(corpus.config())
    built = build_here(config)
    assert built.cache == f"{root}/{Path(local.cache).name}"
    assert built.key == local.key
    assert built.sealed
    assert built.pushed is not None
    assert (built.pushed.target, built.pushed.key, built.pushed.already_there) == (built.cache, built.key, False)
    assert any(line.startswith(f"pushed: {built.cache} (") for line in built.lines())
    name = Path(local.cache).name
    there = {key.removeprefix(f"caches/{name}/") for key in bucket.names(f"caches/{name}/")}
    files = {path.relative_to(local.cache).as_posix() for path in Path(local.cache).rglob("*") if path.is_file()}
    assert there == files | {COLUMNS}
    assert stand_in_caches(config) == []
    proxy.clear()
    again = build_here(config)
    assert (again.cache, again.already_sealed, again.pushed) == (built.cache, True, None)
    assert not [method for method, _ in proxy.requests if method in ("PUT", "POST", "DELETE")]
    assert not gets(proxy, ".tdz")
    assert again.plan_folder == built.plan_folder
    assert Path(str(again.plan_folder)).is_relative_to(tmp_path / "node")


def test_training_where_it_was_built_downloads_no_shard(config: Config, proxy: Proxy) -> None:
    build_here(config)
    proxy.clear()
    batches = list(make_loader(config))
    assert batches
    assert not gets(proxy, ".tdz")


def test_another_node_trains_without_raw_data(
    config: Config, corpus: Corpus, root: str, tmp_path: Path, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The samples, their order and the loader's state are those of a local cache."""
    build_here(config)
    build_here(corpus.config())
    local = make_loader(corpus.config())
    wanted, state = list(local), local.state_dict()
    shutil.rmtree(corpus.root)
    other = at(corpus, root, tmp_path / "other")
    for tar in corpus.folder.glob("*.tar"):
        tar.unlink()
    (corpus.folder / "train.parquet").unlink()
    proxy.clear()
    loader = make_loader(other)
    assert f"using {root}/" in caplog.text
    assert "unchecked: its raw data is not here to be compared" in caplog.text
    assert not gets(proxy, ".tdz")  # before the first batch: a plan asks no shard
    for found, batch in zip(loader, wanted, strict=True):
        assert all((found[name] == batch[name]).all() for name in batch)
    assert loader.state_dict() == state
    assert sorted(gets(proxy, ".tdz")) == sorted(set(gets(proxy, ".tdz")))
    assert shards_here(tmp_path / "other") == shards_here(tmp_path / "node")


def test_a_root_of_many_caches_costs_one_listing(
    config: Config, corpus: Corpus, bucket: Bucket, root: str, proxy: Proxy, tmp_path: Path
) -> None:
    cache = make_cache(tmp_path / "made", num_samples=2)
    metadata = (cache / "metadata.json").read_bytes()
    key = open_cache(cache).key
    bucket.put_all((f"caches/made-{i}-{key[:16]}/metadata.json", metadata) for i in range(40))
    bucket.put("caches/by_hand/metadata.json", metadata)
    bucket.put("caches/unfinished-0123456789abcdef/slots.npy", b"...")
    build_here(config)
    proxy.clear()
    assert find(config).found is not None
    first = len(gets(proxy, "metadata.json"))
    proxy.clear()
    found = find(config).found
    assert found is not None
    assert found.place.startswith(root)
    asked = gets(proxy, "metadata.json")
    # What carries its key is not asked for again; the one that is used is, by its mirror.
    assert len(asked) == 3 < first
    assert {key.split("/")[1] for key in asked} == {"by_hand", "unfinished-0123456789abcdef", found.name}
    assert sum(n for (method, _), n in proxy.requests.items() if method == "LIST") == 1


def test_a_root_without_a_cache_is_an_empty_folder(config: Config) -> None:
    assert find(config).nearest is None
    with pytest.raises(
        CacheNotFoundError, match=rf"no cache for recipe .* in {config.run.cache_root}; run: forebay pre"
    ):
        select(at_required(config))


def at_required(config: Config) -> Config:
    from dataclasses import replace

    return replace(config, loader=replace(config.loader, cache="require"))


def test_a_miss_names_the_nearest_cache_of_the_store(config: Config, corpus: Corpus, root: str, tmp_path: Path) -> None:
    built = build_here(config)
    other = at(corpus, root, tmp_path / "node", "source.max_duration_s=9")
    found = find(other)
    assert found.found is None
    assert found.nearest is not None
    assert found.nearest.place == built.cache
    assert [difference["field"] for difference in found.differs] == ["source.max_duration_s"]
    document = explain(other, may_hash=True)
    assert document["cache"] is None
    assert document["nearest"]["key"] == built.key
    assert explain(config, may_hash=True)["cache"] == built.cache


def test_what_a_store_cannot_answer_names_the_root(
    config: Config, proxy: Proxy, corpus: Corpus, tmp_path: Path
) -> None:
    for fault in (FORBIDDEN, SERVER_ERROR):
        proxy.clear()
        proxy.add(Rule(fault=fault))
        message = (
            rf"cache root {config.run.cache_root} cannot be listed: .*; check its name, the credentials .*--cache-ro"
        )
        with pytest.raises(RemoteError, match=message):
            find(config)
    proxy.clear()
    with pytest.raises(RemoteError, match=r"cache root s3://no-such-bucket/caches cannot be listed"):
        find(at(corpus, "s3://no-such-bucket/caches", tmp_path / "node"))


def test_a_node_goes_on_with_what_it_has_while_the_store_is_away(
    config: Config, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    built = build_here(config)
    assert find(config).found is not None
    proxy.add(Rule(fault=SERVER_ERROR))
    found = find(config).found
    assert found is not None
    assert found.place == built.cache
    assert "going on with what this node knows of" in caplog.text
    assert list(make_loader(config))


def test_what_was_built_and_not_pushed_is_found_first_and_pushed_by_the_next_run(
    config: Config, proxy: Proxy, corpus: Corpus, root: str, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.add(Rule(fault=SERVER_ERROR, method="PUT", key="*.tdz", after=2))
    with pytest.raises(RemoteError, match=r"InternalError|500") as caught:
        build_here(config)
    name = stand_in_caches(config)[0]
    note = getattr(caught.value, "__notes__", [""])[0]
    assert note.startswith("the cache is sealed in ")
    assert name in note
    assert note.endswith(f"to push what is missing: forebay preprocess {config.named}")
    assert not bucket.names(f"caches/{name}/metadata.json")
    proxy.clear()
    found = find(config).found
    assert found is not None
    assert found.place == str(config.cache_root / name)
    assert not proxy.requests  # the store is not asked
    assert list(make_loader(config))
    assert f"is only on this node; to push it to {root}: forebay preprocess" in caplog.text
    again = build_here(config)
    assert again.already_sealed
    assert again.cache == f"{root}/{name}"
    assert again.pushed
    assert stand_in_caches(config) == []
    assert find(config).found is not None


def test_a_build_that_is_interrupted_before_its_push_ends_builds_nothing_again(
    config: Config, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build is interrupted after the push, before its folder is settled: both places hold the cache."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_here(config)
    assert len(stand_in_caches(config)) == 1
    again = build_here(config)
    assert again.already_sealed
    assert again.pushed is not None
    assert again.pushed.already_there
    assert stand_in_caches(config) == []


def test_two_nodes_that_build_at_once_have_one_cache(
    corpus: Corpus, root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look and find nothing; the second one to push loses, and takes what is there."""
    first, second = (at(corpus, root, tmp_path / name) for name in ("first", "second"))
    reports: list[BuildReport] = []

    def late(*arguments: object, **options: object) -> object:
        if not reports:
            reports.append(build_here(first))
        return push(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "push", _once(late, push))
        report = build_here(second)
    assert report.cache == reports[0].cache
    assert report.pushed is None or report.pushed.already_there
    assert stand_in_caches(second) == []
    assert list(make_loader(second))


def _once(first: object, then: object) -> object:
    calls: Iterator[object] = iter([first])
    return lambda *arguments, **options: next(calls, then)(*arguments, **options)  # type: ignore[operator]


def test_shards_of_caches_in_the_store_are_linked_into_a_larger_one(
    config: Config, corpus: Corpus, root: str, tmp_path: Path
) -> None:
    build_here(config)
    corpus.add_tar("c.tar", [f"c{i}" for i in range(5)])
    grown = build_here(at(corpus, root, tmp_path / "other"))
    assert grown.shards_linked > 0
    assert grown.shards_written > 0
    assert len(sealed_caches(config.cache_root)) == 2


def test_options_of_a_build_do_the_right_thing_or_say_what_does(
    config: Config, corpus: Corpus, root: str, bucket: Bucket, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--shards: the cache root is s3://.*forebay cache push DIR/NAME s3://"):
        build_here(config, part=(0, 2))
    planned = build_here(config, dry_run=True)
    assert planned.cache.startswith(f"{root}/tones-train-")
    assert not planned.sealed
    assert planned.shards_written
    assert bucket.names("caches/") == []
    build_here(config, rebuild=True)
    assert build_here(config, verify=True).already_sealed
    built = build_here(config, dry_run=True)
    assert built.already_sealed
    with pytest.raises(
        BuildError, match=rf"--rebuild: {built.cache} is sealed, and no node can tell .*remove all below"
    ):
        build_here(config, rebuild=True)
    name = built.cache.rpartition("/")[2]
    shard = bucket.get(f"caches/{name}/audio/00000.tdz")
    bucket.put(f"caches/{name}/audio/00000.tdz", shard[:-1] + bytes([shard[-1] ^ 1]))
    assert build_here(config).already_sealed
    with pytest.raises(
        BuildError, match=r"audio/00000.tdz: stored xxh3-128 \w+, computed \w+; .*then run: forebay prep"
    ):
        build_here(config, verify=True)
    bucket.put(f"caches/{name}/audio/00000.tdz", shard[:-1])
    with pytest.raises(BuildError, match=r"is damaged: .*audio/00000.tdz has \d+ bytes, its metadata says \d+"):
        build_here(at(corpus, root, tmp_path / "other"))


def test_caches_by_url(config: Config, corpus: Corpus, root: str, tmp_path: Path) -> None:
    built = build_here(config)
    settings = RemoteConfig(shard_dir=str(tmp_path / "other"), retries=0)
    cache = forebay.open_cache(built.cache, remote=settings)
    assert cache.place == built.cache
    assert f"Cache('{built.cache}', key={built.key[:16]}" in repr(cache)
    assert shards_here(tmp_path / "other") == []
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301
    assert (again.place, again.key) == (built.cache, built.key)
    assert (again.read(0)["waveform"] == cache.read(0)["waveform"]).all()
    with pytest.raises(
        CacheNotFoundError, match=rf"{root}/none holds no sealed cache: it has no metadata.json; name ano"
    ):
        forebay.open_cache(f"{root}/none", remote=settings)
    named = at(corpus, str(tmp_path / "nothing"), tmp_path / "other", f"loader.cache_dir={built.cache}")
    assert select(named).key == built.key
    with pytest.raises(CacheNotFoundError, match="holds no sealed cache"):
        select(at(corpus, root, tmp_path / "other", f"loader.cache_dir={root}/none"))
    mixed = at(corpus, root, tmp_path / "other", f'mixture.source=[{{cache="{built.cache}", weight=1.0}}]')
    assert len(select(mixed)) == len(cache)


def test_a_subset_in_a_store_is_used_where_it_is_named(corpus: Corpus, root: str, tmp_path: Path) -> None:
    built = build_here(at(corpus, str(tmp_path / "caches"), tmp_path / "node"))
    made = subset(built.cache, "some", where="duration_s > 0.2")
    settings = RemoteConfig(shard_dir=str(tmp_path / "node"), retries=0)
    push(Path(made.cache), parse_url(f"{root}/some"), settings)
    plain = at(corpus, root, tmp_path / "other")
    assert find_cache(plain, recipe_of(plain)).found is None
    named = at(corpus, root, tmp_path / "other", f"loader.cache_dir={root}/some")
    selected = select(named)
    assert (selected.key, len(selected)) == (made.key, made.num_samples)
    assert selected.ids_digest() == open_cache(made.cache).ids_digest()
    with pytest.raises(ConfigError, match=rf"{root}/some lies in a store.*forebay cache pull {root}/some DIR"):
        subset(f"{root}/some", "few", where="True")


def test_the_store_tells_of_all_samples_at_once(config: Config, bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    built = build_here(config)
    name = built.cache.rpartition("/")[2]

    def asked(node: str) -> tuple[object, list[str]]:
        proxy.clear()
        cache = open_cache(built.cache, remote=RemoteConfig(shard_dir=str(tmp_path / node), retries=0))
        names, codes = cache.categories("language") or ([], np.empty(0))
        return (cache.ids_digest(), names, codes.tolist()), gets(proxy, ".tdz")

    told, shards = asked("a")
    assert shards == []
    data = bucket.get(f"caches/{name}/{COLUMNS}")
    bucket.put(f"caches/{name}/{COLUMNS}", data[:-1] + b"?")
    damaged, shards = asked("b")
    assert damaged == told
    assert shards
    cache = open_cache(built.cache, remote=config.remote)
    assert parse_columns(data, key=cache.key, num_samples=len(cache)).categories("text") is None
    with pytest.raises(ValueError, match="its checksum is another one"):
        parse_columns(data[:-1], key=cache.key, num_samples=len(cache))
    with pytest.raises(ValueError, match=rf"it is of {len(cache)} samples of the cache {cache.key}, wanted 3 of x"):
        parse_columns(data, key="x", num_samples=3)


def test_columns_of_many_values_are_not_told() -> None:
    values = [f"{i:06}" for i in range(70_000)]
    data = dump_columns("k", "d", {"many": (values, np.arange(70_000)), "few": (["a"], np.zeros(70_000, np.int32))})
    told = parse_columns(data, key="k", num_samples=70_000)
    assert told.categories("many") is None
    assert told.categories("few") is not None
    assert told.ids_digest == "d"


def test_commands_take_a_cache_root_by_url(
    corpus: Corpus, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    corpus.config()
    path = corpus.folder / "config.toml"
    report = run_json(capsys, "preprocess", path, "--cache-root", f"{root}/", "--workers", 1, "--no-progress")
    assert report["cache"].startswith(f"{root}/tones-train-")
    assert report["pushed"]
    code, out, _ = run(capsys, "preprocess", path, "--cache-root", root, "--set", "remote.retries=0")
    assert code == 0
    assert out.startswith(f"already sealed: {report['cache']} (17 samples")
    code, out, _ = run(capsys, "key", path, "--cache-root", root)
    assert f"cache:      {report['cache']} (sealed)" in out
    assert run_json(capsys, "train", path, "--cache-root", root, "--dry-run", "--steps", 2)["source"] == "cache"
    facts = inspected_json(capsys, path, "--cache-root", root)
    assert facts["folder"] == report["cache"]
    assert len(facts["plans"]) == 1
    # From the folder of a plan to its cache in the store.
    assert inspected_json(capsys, report["plan_folder"])["cache"] == report["cache"]
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "key", path, "--cache-root", "s3://user:secret@b/x")
    err = capsys.readouterr().err
    assert "argument --cache-root: " in err
    assert "holds a user, a query or a fragment" in err
    assert "secret" not in err


def test_inspect_by_url(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], bucket: Bucket) -> None:
    built = build_here(config)
    node = tmp_path / "other"
    here = ("--set", f"remote.shard_dir={node}", "--set", "remote.retries=0")
    facts = inspected_json(capsys, built.cache, *here)
    assert (facts["folder"], facts["num_samples"], facts["key"]) == (built.cache, 17, built.key)
    assert facts["languages"]
    assert Path(facts["rejected"]).is_file()
    assert shards_here(node) == []
    out = inspected(capsys, built.cache, "--verify", "--no-progress", *here)
    assert f"in {built.cache} are the bytes that were sealed" in out
    assert shards_here(node) == []
    out = inspected(capsys, built.cache, "--sample", 0, *here)
    assert "a0" in out
    assert len(shards_here(node)) == 2
    inspected(capsys, built.cache, "--export", tmp_path / "rows.parquet", *here)
    assert (tmp_path / "rows.parquet").is_file()
    bucket.put(built.cache.split("/", 3)[3] + "/text/00000.tdz", b"damage")
    code, out, _ = inspect(capsys, built.cache, "--verify", "--no-progress", *here)
    assert code == 1
    assert f"{built.cache}/text/00000.tdz has 6 bytes, its metadata says" in out
    code, _, err = inspect(capsys, built.cache + "x", *here)
    assert code == 3
    assert f"{built.cache}x holds no sealed cache" in err


def test_inspect_of_files_by_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = make_cache(tmp_path, num_samples=3)
    assert inspected_json(capsys, f"file://{cache}")["folder"] == str(cache)
    with pytest.raises(SystemExit, match="2"):
        inspect(capsys, cache, "--export", "s3://b/rows.parquet")
    assert "--export: s3://b/rows.parquet is a URL, and this is of this machine: name a" in capsys.readouterr().err


def test_a_log_of_a_run_names_the_url(config: Config, tmp_path: Path) -> None:
    """Names that a run writes down open on any node."""
    built = build_here(config)
    cache = select(config)
    assert getattr(cache, "place", None) == built.cache
    assert Mirror.of(cache.folder) is not None  # type: ignore[attr-defined]


def test_a_web_server_gives_a_cache_without_credentials(
    server: ObjectServer, proxy: Proxy, config: Config, tmp_path: Path
) -> None:
    bucket = server.make_bucket(public=True)
    push(make_cache(tmp_path / "made", num_samples=3), parse_url(f"{bucket.url}/x"), config.remote)
    url = f"{proxy.endpoint}/{bucket.name}/x"
    cache = open_cache(url, remote=config.remote)
    assert (len(cache), cache.place) == (3, url)
    assert cache.read(2)
    assert verify_folder(cache.folder).ok


def test_documents_of_the_node_hold_no_secret(config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        build_here(config)
        list(make_loader(config))
    for path in (tmp_path / "node").rglob("*.json"):
        assert "testing" not in json.dumps(json.loads(path.read_bytes()).get("remote", {}))
    assert "secret" not in caplog.text.lower()


def test_what_was_built_stays_on_the_node_as_far_as_its_bound_goes(corpus: Corpus, root: str, tmp_path: Path) -> None:
    whole = build_here(at(corpus, root, tmp_path / "whole"))
    sizes = [path.stat().st_size for path in (tmp_path / "whole" / "mirrors").glob("*/*/*.tdz")]
    bound = sum(sizes) / 2 + 40_000
    shutil.rmtree(corpus.folder / "caches", ignore_errors=True)
    other = f"{root}/other"
    built = build_here(at(corpus, other, tmp_path / "small", f"remote.cache_size_gb={bound / 1e9}"))
    assert built.key == whole.key
    assert 0 < len(shards_here(tmp_path / "small")) < len(sizes)


def test_packs_of_a_cache_by_url(bucket: Bucket, tmp_path: Path) -> None:
    """The plan lies on the node; a plan's folder finds the cache in the store."""
    samples, settings = conversations(3, 20), RemoteConfig(shard_dir=str(tmp_path / "node"), retries=0)
    local = make_vl_cache(tmp_path / "caches", samples)
    url = parse_url(f"{bucket.url}/caches/{local.name}")
    push(local, url, settings)
    with pytest.raises(CacheNotFoundError, match=rf"no plan of packs for {url} in {tmp_path}/node/roots/\w+/plans"):
        CachedVLDataset(str(url), 0, 1, remote=settings)
    root = RemoteRoot.at(url.parent, settings)
    root.prepare()
    key = open_cache(local).key
    plan = make_packs(root.folder, key, samples, seq_len=70)
    make_packs(tmp_path / "caches", key, samples, seq_len=70)
    wanted = [batch["input_ids"].tolist() for batch in CachedVLDataset(local, 0, 1, seed=5)]
    for named in (str(url), plan):
        found = CachedVLDataset(named, 0, 1, seed=5, remote=settings)
        assert (found.plan_folder, found.source.place) == (plan, str(url))
        assert [batch["input_ids"].tolist() for batch in found] == wanted
