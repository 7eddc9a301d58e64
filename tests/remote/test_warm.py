"""`forebay cache warm`: the shards of the next micro-batches come to this node, and no more than it keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.objects.proxy import Proxy
from benchmarks.objects.server import Bucket
from forebay import load_config
from forebay.config import Config
from forebay.config.remote import RemoteConfig, parse_url
from forebay.errors import ConfigError, ResumeError
from forebay.store.cache import open_cache
from forebay.store.remote.carry.transfer import push
from forebay.store.remote.node.holdings import FOLDER
from forebay.train.select import make_loader
from forebay.train.warm import WarmOptions, WarmReport, ranks_of_node, warm
from tests.commands import run, run_json
from tests.store_factory import make_cache

pytestmark = pytest.mark.usefixtures("environment")
NUM_SHARDS = 12


@pytest.fixture
def config(tmp_path: Path, bucket: Bucket) -> Config:
    """A config that reads a cache of 48 samples in 12 shards from a bucket."""
    cache = make_cache(tmp_path / "made", num_samples=48, features="waveform", max_duration_s=1.0)
    url = parse_url(f"{bucket.url}/caches/{cache.name}")
    push(cache, url, RemoteConfig(shard_dir=str(tmp_path / "pusher")))
    path = tmp_path / "config.toml"
    path.write_text(
        'name = "tones"\n[source]\nkind = "tar"\nmanifest = "none.parquet"\n[audio]\nfeatures = "waveform"\n'
        '[text]\ntokenizer = "none"\nprompt = "plain"\n'
        "[plan]\nbatch_size = 4\nedges_s = [0.4, 0.7]\nlockstep = 1\n"
        f'[[mixture.source]]\ncache = "{url}"\n[remote]\nshard_dir = "node"\nretries = 0\n'
        '[run]\ncache_root = "caches"\n'
    )
    return load_config(path)


def shards_here(config: Config) -> set[int]:
    """The shards of which this node has all files."""
    found = [{int(path.stem) for path in config.remote.folder.rglob(f"{group}/*.tdz")} for group in ("audio", "text")]
    assert found[0] == found[1]
    return found[0]


def needed(config: Config, *, steps: int, ranks: tuple[int, ...] = (0,), world: int = 1, epoch: int = 0) -> set[int]:
    """The shards of the first micro-batches, by the loader itself."""
    found = set()
    for rank in ranks:
        loader = make_loader(config, dp_rank=rank, dp_world_size=world)
        loader.set_epoch(epoch)
        source = loader.source
        assert source.slots is not None
        for step, _ in zip(loader.cursor.walk(), range(steps), strict=False):
            found |= set((np.asarray(source.slots)[step.samples] >> 32).tolist())
    return found


def test_the_next_steps_and_no_more(config: Config, proxy: Proxy) -> None:
    report = warm(config, WarmOptions(steps=2))
    assert shards_here(config) == needed(config, steps=2)
    assert report.num_shards == report.here_shards == len(shards_here(config)) < NUM_SHARDS
    assert 0 < report.downloaded_bytes <= report.here_bytes == report.needed_bytes
    assert not list((config.remote.folder / FOLDER).glob("*.uses")), "nothing waits for these steps any more"
    proxy.clear()
    again = warm(config, WarmOptions(steps=2))
    assert (again.downloaded_bytes, again.here_bytes) == (0, report.here_bytes)
    assert not any(key.endswith(".tdz") for _, key in proxy.requests)


def test_soonest_first(config: Config, proxy: Proxy, tmp_path: Path) -> None:
    alone = load_config(config.path, overrides=["remote.max_concurrent=1"])
    first, soon = needed(config, steps=1), needed(config, steps=3)
    assert first < soon
    proxy.clear()
    warm(alone, WarmOptions(steps=3))
    order = [int(Path(one.key).stem) for one in proxy.traffic().exchanges if "/audio/" in one.key]
    assert set(order[: len(first)]) == first


@pytest.mark.parametrize("place", [{"epoch": 1}, {"position": 4}])
@pytest.mark.few("place0")
def test_from_another_place(config: Config, place: dict[str, Any]) -> None:
    report = warm(config, WarmOptions(steps=1, **place))
    assert {"epoch": report.epoch, "position": report.position} == {"epoch": 0, "position": 0, **place}
    assert len(shards_here(config)) == report.num_shards
    if "epoch" in place:
        assert shards_here(config) == needed(config, steps=1, epoch=1)


def test_a_place_behind_the_end(config: Config) -> None:
    with pytest.raises(ResumeError, match="position is 1000, an epoch of the plan has"):
        warm(config, WarmOptions(steps=1, position=1000))


@pytest.mark.wide
def test_ranks_of_a_node(config: Config) -> None:
    report = warm(config, WarmOptions(steps=1, ranks=(2, 3), world=4))
    assert shards_here(config) == needed(config, steps=1, ranks=(2, 3), world=4)
    assert (report.ranks, report.dp_world_size) == ([2, 3], 4)


def test_everything(config: Config) -> None:
    report = warm(config, WarmOptions())
    assert len(shards_here(config)) == report.here_shards == report.num_shards == NUM_SHARDS
    assert report.fits
    assert next(report.lines()).startswith("all shards: 12 of 12 are on this node (")


def test_what_does_not_fit(config: Config, tmp_path: Path) -> None:
    """The soonest half comes, both numbers are told, and the node keeps to its bound."""
    sizes = [path.stat().st_size for path in (tmp_path / "made").rglob("audio/*.tdz") if ".building" not in path.parts]
    changes = [f"remote.cache_size_gb={sum(sizes) * 0.8 / 1e9}", 'remote.global_shuffle="allow"']
    small = load_config(config.path, overrides=[*changes, "remote.prefetch_shards=1"])
    report = warm(small, WarmOptions())
    assert 3 <= report.here_shards < NUM_SHARDS
    assert report.num_shards == NUM_SHARDS
    assert report.here_bytes <= small.remote.cache_size_bytes < report.needed_bytes
    assert "are needed and remote.cache_size_gb allows" in list(report.lines())[-1]
    held = sum(path.stat().st_blocks * 512 for path in config.remote.folder.rglob("*.tdz"))
    assert held <= small.remote.cache_size_bytes


@pytest.mark.wide
def test_then_training_downloads_nothing(config: Config, proxy: Proxy) -> None:
    warm(config, WarmOptions())
    proxy.clear()
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    assert len(list(loader)) > 5
    assert not any(key.endswith(".tdz") for _, key in proxy.requests)


def test_beside_a_run(config: Config, proxy: Proxy) -> None:
    """A shard is downloaded once, whoever asks for it first."""
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    batches = iter(loader)
    next(batches)
    warm(config, WarmOptions())
    list(batches)
    gets = {key: count for (method, key), count in proxy.requests.items() if method == "GET" and key.endswith(".tdz")}
    assert len(gets) == 2 * NUM_SHARDS
    assert set(gets.values()) == {1}


def test_nothing_in_a_store(config: Config, tmp_path: Path) -> None:
    path = Path(config.path)
    text = path.read_text()
    local = next(path for path in (tmp_path / "made").iterdir() if path.name.startswith("prompts"))
    url = text.partition('cache = "')[2].partition('"')[0]
    path.write_text(text.replace(url, str(local)))
    with pytest.raises(ConfigError, match="no cache that it reads lies in a store"):
        warm(load_config(config.path), WarmOptions(steps=1))


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match="--steps is 0, wanted 1 or more"):
        WarmOptions(steps=0)
    with pytest.raises(ConfigError, match="leave --epoch and --position out"):
        WarmOptions(resume=True, epoch=1)


@pytest.mark.parametrize(
    ("text", "found"), [("0-7/64", (tuple(range(8)), 64)), ("3/8", ((3,), 8)), ("6-7/8", ((6, 7), 8))]
)
def test_ranks_by_option(text: str, found: tuple[tuple[int, ...], int]) -> None:
    assert ranks_of_node(text) == found


@pytest.mark.parametrize("text", ["8/8", "3-1/8", "0-8/8", "eight", "1", "0-/8"])
def test_wrong_ranks(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--dp-ranks is .*, wanted FIRST"):
        ranks_of_node(text)


def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_node(None) == ((0,), 1)
    for name, value in (("RANK", 12), ("WORLD_SIZE", 16), ("LOCAL_RANK", 4), ("LOCAL_WORLD_SIZE", 8)):
        monkeypatch.setenv(name, str(value))
    assert ranks_of_node(None) is None, "the first process of the node does it"
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert ranks_of_node(None) == (tuple(range(8, 16)), 16)
    monkeypatch.setenv("RANK", "many")
    with pytest.raises(ConfigError, match="are to be numbers"):
        ranks_of_node(None)


def test_from_the_last_checkpoint(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make_loader(config, dp_rank=0, dp_world_size=1)
    state = {**loader.state_dict(), "epoch": 2, "position": 3}
    monkeypatch.setattr("forebay.train.warm.find_checkpoint", lambda folder: folder / "checkpoint-00000003")
    monkeypatch.setattr("forebay.train.warm.load_state", lambda path: type("State", (), {"loader": state}))
    report = warm(config, WarmOptions(steps=1, resume=True))
    assert (report.epoch, report.position) == (2, 3)


@pytest.mark.usefixtures("bars")
def test_command(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    document = run_json(capsys, "cache", "warm", config.path, "--steps", 1, "--no-progress")
    assert document.keys() == set(WarmReport.__dataclass_fields__)
    code, out, err = run(capsys, "cache", "warm", config.path, "--all")
    assert code == 0
    assert out.splitlines()[0].startswith("all shards: 12 of 12 are on this node")
    assert re.search(r"warm: ([\d.]+ [kM]?B)/\1, ", err), err
    code, _, err = run(capsys, "cache", "warm", config.path, "--steps", 1, "--dp-ranks", "2/2")
    assert code == 2
    assert err.startswith("forebay: --dp-ranks is 2/2, wanted FIRST <= LAST < ALL, for example 0-7/64\n")


def test_options_may_stand_between_the_places_of_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = make_cache(tmp_path / "caches")
    code, out, err = run(capsys, "cache", "push", cache, "--form", "zarr", tmp_path / "cold", "--no-progress")
    assert code == 0, err
    assert out.startswith(f"pushed: {tmp_path}/cold (")


def test_push_and_pull_commands(
    tmp_path: Path, bucket: Bucket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = make_cache(tmp_path / "made")
    code, out, _ = run(capsys, "cache", "push", cache, f"{bucket.url}/caches/", "--no-progress")
    assert code == 0
    assert out.startswith(f"pushed: {bucket.url}/caches/{cache.name} (9 files")
    assert run_json(capsys, "cache", "push", cache, f"{bucket.url}/caches/{cache.name}", "--verify")["already_there"]
    place = ("--cache-root", tmp_path / "more", "--no-progress")
    code, out, _ = run(capsys, "cache", "pull", f"{bucket.url}/caches/{cache.name}", *place)
    assert code == 0
    assert open_cache(tmp_path / "more" / cache.name).key == open_cache(cache).key
    assert run_json(capsys, "cache", "pull", f"{bucket.url}/caches/{cache.name}", f"{tmp_path}/more/")["already_there"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("push", "CACHE"), 2, "where to? For example: forebay cache push"),
        (("push", "s3://bucket/x", "s3://bucket/y"), 2, "lies in a store; a push takes a folder of this machine"),
        (("push", "CACHE", "caches/x"), 2, "is no URL of a store"),
        (("push", "none.toml", "s3://bucket/y"), 2, "none.toml: no such cache or config; see what there is"),
        (("push", "gone/cache", "s3://bucket/y"), 2, "gone/cache: no such cache or config; see what there is"),
        (("pull", "s3://bucket/x"), 2, "where to?"),
        (("pull", "s3://bucket/x", "a", "--cache-root", "b"), 2, "one of the two"),
        (("pull", "s3://bucket/x", "s3://bucket/y"), 2, "a pull makes a folder of this machine"),
        (("pull", "BUCKET/none", "a", "--no-progress"), 3, "holds no sealed cache"),
        (("pull", "s3://bucket/x", "a", "--set", "loader.seed=3"), 2, "without a config only remote.NAME=VALUE"),
    ],
)
def test_wrong_commands(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    bucket: Bucket,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = str(make_cache(tmp_path / "made"))
    given = [part.replace("CACHE", cache).replace("BUCKET", bucket.url) for part in arguments]
    found, _, err = run(capsys, "cache", *given)
    assert (found, message in err) == (code, True), err
