"""`[remote]`: what a config may say of stores, and what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay import load_config
from forebay.config.remote import RemoteConfig
from forebay.errors import ConfigError

DEMO = "configs/demo_speech.toml"


def test_the_defaults_ask_the_providers_own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = load_config(DEMO).remote
    assert (remote.endpoint, remote.region, remote.anonymous) == (None, None, False)
    assert remote.cache_size_bytes == 500_000_000_000
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remote.folder == tmp_path / "forebay"
    assert RemoteConfig(shard_dir="/nvme").folder == Path("/nvme")


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("max_concurrent", 0, "max_concurrent is 0, wanted 1 or more"),
        ("prefetch_shards", 0, "prefetch_shards is 0, wanted 1 or more"),
        ("cache_size_gb", 0, "cache_size_gb is 0, wanted more than 0"),
        ("timeout_s", -1, "timeout_s is -1, wanted more than 0"),
        ("retries", -1, "retries is -1, wanted 0 or more"),
        ("endpoint", "minio:9000", "is no address of a store; wanted https://host"),
        ("endpoint", "https://169.254.169.254", "link-local address, which no store has"),
        ("endpoint", "http://minio:9000", "FOREBAY_ALLOW_HTTP=1 in the environment"),
        ("endpoint", "https://", "names no host"),
        ("region", "@evil.example.com/#", "region is '@evil.example.com/#', wanted small letters, digits and hyphens"),
        ("region", "eu.evil.example.com/", "wanted small letters, digits and hyphens"),
        ("region", "", "wanted small letters, digits and hyphens"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_ALLOW_HTTP", raising=False)
    with pytest.raises(ValueError, match=what):
        RemoteConfig(**{name: value})


@pytest.mark.parametrize("place", ["https://user:{}@host", "https://host/?X-Amz-Signature={}", "{}"])
def test_a_secret_in_an_endpoint_is_refused_and_not_repeated(place: str) -> None:
    secret = "s3cr3t-of-somebody"
    with pytest.raises(ConfigError, match=r"remote.*endpoint") as caught:
        load_config(DEMO, overrides=[f'remote.endpoint="{place.format(secret)}"'])
    assert secret not in str(caught.value) or place == "{}"


@pytest.mark.parametrize("name", ["access_key_id", "secret_access_key", "token", "allow_http"])
def test_credentials_and_http_have_no_place_in_a_config(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(DEMO, overrides=[f'remote.{name}="x"'])
