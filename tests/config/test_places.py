"""Which settings take URLs, what becomes of them, and that none of it is in a key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import load_config
from forebay.config import RemoteConfig
from forebay.config.load import read_remote
from forebay.config.remote import url_or_path
from forebay.config.tree import stand_in
from forebay.errors import ConfigError
from forebay.steps.recipe import recipe_of
from tests.store.sealed import DEMO_MODEL


def document(**sections: dict[str, Any]) -> dict[str, Any]:
    """Returns a config as a mapping, with sections merged in."""
    base: dict[str, Any] = {"name": "a", "source": {"kind": "webdataset", "manifest": "data"}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return base


def test_a_cache_root_in_a_store_has_a_folder_of_the_node(tmp_path: Path) -> None:
    given = {"run": {"cache_root": "s3://bucket/caches/"}, "remote": {"shard_dir": str(tmp_path)}}
    config = load_config(document(**given))
    assert config.remote_root == config.run.cache_root == "s3://bucket/caches"
    assert config.cache_root == stand_in("s3://bucket/caches", config.remote)
    assert config.cache_root.parent == tmp_path / "roots"
    other = RemoteConfig(shard_dir=str(tmp_path), endpoint="https://store.example.com")
    assert stand_in("s3://bucket/caches", other) != config.cache_root
    assert load_config(document(run={"cache_root": "caches"})).cache_root == Path.cwd() / "caches"


def test_urls_of_files_are_local_paths(tmp_path: Path) -> None:
    given = document(
        run={"cache_root": f"file://{tmp_path}/a%20b"}, loader={"cache_dir": f"file://localhost{tmp_path}"}
    )
    config = load_config(given)
    assert (config.cache_root, config.remote_root) == (tmp_path / "a b", None)
    assert config.loader.cache_dir == str(tmp_path)
    path = tmp_path / "config.toml"
    path.write_text('name = "a"\n[source]\nkind = "webdataset"\nmanifest = "data"\n')
    assert load_config(f"file://{path}") == load_config(path)


def test_caches_are_named_by_urls() -> None:
    url = "s3://bucket/caches/a"
    config = load_config(
        document(
            mixture={"source": [{"cache": url, "weight": 1.0}]},
            train={"eval": [{"name": "e", "cache": url}]},
        )
    )
    assert (config.mixture.source[0].cache, config.train.eval[0].cache) == (url, url)
    assert load_config(document(), overrides=[f"loader.cache_dir={url}"]).loader.cache_dir == url


def test_what_is_read_from_this_machine_takes_no_url() -> None:
    given = document(
        text={"tokenizer": "s3://b/tokenizer"},
        train={
            "model": "gs://b/model",
            "output_dir": "s3://b/runs",
            "eval": [{"name": "e", "config": "s3://b/e.toml"}],
        },
        remote={"shard_dir": "s3://b/node"},
        plan={"calibration": "az://b/bs.json"},
        mixture={"source": [{"config": "https://h/c.toml", "weight": 1.0}]},
    )
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    names = ("text.tokenizer", "train.model", "train.output_dir", "train.eval.0.config", "remote.shard_dir")
    for name in (*names, "plan.calibration", "mixture.source.0.config"):
        assert f"  {name}: " in str(caught.value), name
    assert str(caught.value).count("is read from this machine: name a local path") == 7
    with pytest.raises(ConfigError, match=r"a config is read from this machine, and s3://b/c.toml is a URL"):
        load_config("s3://b/c.toml")


def test_a_path_that_was_made_of_a_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.cache_root: 's3:/b/caches' is what a Path makes of a URL.*'s3://b/cac"):
        load_config(document(run={"cache_root": Path("s3://b/caches")}))
    with pytest.raises(ConfigError, match=r"source.manifest.1: 's3:/b/x' is what a Path makes of a URL"):
        load_config(document(source={"manifest": ["data", Path("s3://b/x")]}))
    with pytest.raises(ConfigError, match=r"'s3:/b/x' is what a Path makes of a URL.*'s3://b/x'"):
        forebay.open_cache(Path("s3://b/x"))
    assert url_or_path(Path("a/b:/c")) == "a/b:/c"


def test_a_web_server_is_no_cache_root() -> None:
    with pytest.raises(ConfigError, match=r"run.cache_root is 'https://h/caches', and a web server lists no folders"):
        load_config(document(run={"cache_root": "https://h/caches"}))
    assert load_config(document(loader={"cache_dir": "https://h/caches/a"})).loader.cache_dir == "https://h/caches/a"


def test_urls_with_secrets_and_strange_hosts_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"run.cache_root: .*holds a user, a query or a fragment"):
        load_config(document(run={"cache_root": "s3://user:secret@b/x"}))
    with pytest.raises(ConfigError, match=r"loader.cache_dir: .*link-local") as caught:
        load_config(document(loader={"cache_dir": "https://169.254.169.254/x"}))
    assert "secret" not in str(caught.value)


def test_nothing_of_a_store_is_in_a_key(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    source = {"manifest": str(tmp_path / "data")}
    text = {"tokenizer": str(DEMO_MODEL), "prompt": "whisper"}
    local = load_config(document(source=source, text=text))
    stores: dict[str, Any] = {
        "endpoint": "https://store.example.com",
        "region": "eu-central-1",
        "anonymous": True,
        "shard_dir": str(tmp_path / "node"),
        "cache_size_gb": 3.0,
        "max_concurrent": 2,
        "prefetch_shards": 1,
        "timeout_s": 5.0,
        "retries": 0,
        "global_shuffle": "allow",
    }
    assert stores.keys() == {field.name for field in fields(RemoteConfig)}
    away = {"source": {**source, "remote_identity": "etag"}, "text": text, "remote": stores}
    remote = load_config(document(**away, run={"cache_root": "s3://bucket/caches"}))
    assert recipe_of(remote).key == recipe_of(local).key


def test_settings_of_a_store_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_remote() == RemoteConfig()
    found = read_remote(["remote.shard_dir=node", "remote.retries=0"])
    assert (found.shard_dir, found.retries) == (str(tmp_path / "node"), 0)
    with pytest.raises(ConfigError, match=r"--set plan: without a config only remote.NAME=VALUE"):
        read_remote(["plan.k=3"])
    with pytest.raises(ConfigError, match=r"remote.retires: unknown field; did you mean remote.retries\?"):
        read_remote(["remote.retires=0"])
    with pytest.raises(ConfigError, match=r"remote.shard_dir: s3://b/x is a URL, and this is read from this machine"):
        read_remote(["remote.shard_dir=s3://b/x"])
