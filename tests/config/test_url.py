"""URLs of configs: what they name, and what forebay never asks."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.remote import Url, check_endpoint, is_refused, is_url, local_path, origin, parse_url, url_or_path
from forebay.errors import ConfigError

METADATA = "169.254.169.254"
BUCKETS = st.from_regex(r"[a-z0-9][a-z0-9.-]{1,60}", fullmatch=True)
NO_SURROGATE = st.characters(exclude_categories=["Cs"])
PARTS = st.text(
    st.characters(min_codepoint=33, exclude_characters="/?#\x7f", exclude_categories=["Cs", "Cc"]), min_size=1
)
KEYS = st.lists(PARTS.filter(lambda part: part not in (".", "..")), max_size=4).map("/".join)


@given(st.sampled_from(("s3", "gs", "az")), BUCKETS, KEYS)
def test_a_url_says_what_it_was_made_of(scheme: str, bucket: str, key: str) -> None:
    url = parse_url(f"{scheme}://{bucket}/{key}")
    assert (url.scheme, url.bucket, url.key) == (scheme, bucket, key)
    assert parse_url(str(url)) == url
    assert is_url(str(url))
    assert url / "name" == parse_url(f"{scheme}://{bucket}/{key}/name" if key else f"{scheme}://{bucket}/name")
    assert (url / "name").parent == url
    assert (url / "name").name == "name"


@given(st.text())
def test_any_text_is_a_url_or_a_config_error(text: str) -> None:
    for one in (text, f"s3://{text}", f"https://{text}", f"http://{text}"):
        try:
            url = parse_url(one)
        except ConfigError:
            continue
        assert not {"..", ".", ""} & set(url.key.split("/")) or not url.key
        assert not set(url.bucket) & set("/@?#%\\ \t\n")


@given(st.text(NO_SURROGATE, min_size=8).filter(lambda text: not set(text) & set("/@?#")))
def test_what_may_be_a_secret_is_in_no_message(secret: str) -> None:
    for text in (f"s3://user:{secret}@bucket/key", f"https://{secret}@host/x", f"https://host/x?sig={secret}"):
        with pytest.raises(ConfigError) as caught:
            parse_url(text)
        assert secret not in str(caught.value)


@given(st.ip_addresses(network="169.254.0.0/16"))
def test_link_local_is_refused_however_it_is_written(address: ipaddress.IPv4Address) -> None:
    number = int(address)
    first, second, third, fourth = address.packed
    for host in (
        str(address),
        f"{address}.",
        str(number),
        hex(number),
        f"0{number:o}",
        f"{first}.{second}.{third * 256 + fourth}",
        f"{first}.{number & 0xFFFFFF}",
        f"{first:#x}.{second:#x}.{third:#x}.{fourth:#x}",
        f"[::ffff:{address}]",
        f"[::{address}]",
        f"[64:ff9b::{address}]",
        f"[{ipaddress.IPv6Address((0x2002 << 112) | (number << 80))}]",
    ):
        for scheme in ("https", "http"):
            with pytest.raises(ConfigError, match="link-local"):
                parse_url(f"{scheme}://{host}/latest/meta-data")
            with pytest.raises(ConfigError, match="link-local"):
                check_endpoint(f"{scheme}://{host}:8080")


@pytest.mark.parametrize(
    "host", ["[fe80::1]", "[fd00:ec2::254]", "100.100.100.200", "192.0.0.192", "metadata.google.internal", "Metadata"]
)
def test_other_places_of_a_machines_credentials_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="link-local address, which no store has"):
        parse_url(f"https://{host}/x")


@pytest.mark.parametrize(
    "host",
    ["①⑥⑨.254.169.254", "%31%36%39.254.169.254", "a\\b", "a b", "[::1", "[fe80::1%25eth0]", ".", "host:99999", "h:x"],
)
def test_hosts_that_are_read_in_two_ways_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"no plain host|is no URL"):
        parse_url(f"https://{host}/x")


def test_plain_http_is_for_this_machine_or_a_user_who_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_ALLOW_HTTP", raising=False)
    for host in ("127.0.0.1:9000", "localhost:9000", "[::1]:9000", "127.1", "[::ffff:127.0.0.1]", "LOCALHOST"):
        assert parse_url(f"http://{host}/x").key == "x"
    for host in ("10.0.0.1", "minio.local:9000", "0.0.0.0", "localhost.example.com", "127.0.0.1.example.com"):
        with pytest.raises(ConfigError, match="FOREBAY_ALLOW_HTTP=1 in the environment"):
            parse_url(f"http://{host}/x")
    monkeypatch.setenv("FOREBAY_ALLOW_HTTP", "1")
    assert parse_url("http://10.0.0.1/x").bucket == "10.0.0.1"
    with pytest.raises(ConfigError, match="link-local"):
        parse_url(f"http://{METADATA}/x")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("ftp://host/x", "no URL of a store; wanted one of s3://"),
        ("s3:///x", "names no bucket; for example s3://bucket/folder"),
        ("s3://user@bucket/x", "holds a user, a query or a fragment"),
        ("s3://bucket/x?versionId=1", "holds a user, a query or a fragment"),
        ("s3://bucket/x?", "holds a user, a query or a fragment"),
        ("s3://evil.com\\/x", "is no name of a bucket"),
        ("s3://bucket:80/x", "is no name of a bucket"),
        ("s3://bucket/a\nb", "holds a control character"),
        ("s3://bucket/../other", "is no name below"),
        ("https://host/a/%2e%2e/b", "is no name below"),
        ("s3://bucket/a//b", "is no name below"),
    ],
)
def test_a_wrong_url_says_what_is_wrong(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        parse_url(text)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", ".", "", "a//b", "a/./b"])
def test_names_stay_below(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name below s3://bucket/folder"):
        Url("s3", "bucket", "folder") / name


def test_what_is_a_url_and_what_a_path() -> None:
    assert all(map(is_url, ("s3://b", "S3://b", "gs://b", "az://b", "https://h/x", "http://h")))
    assert not any(map(is_url, ("file:///x", "/s3://b", "s3:b", "C:/x", "", 3, None)))
    assert local_path("file:///a%20b/c") == "/a b/c"
    assert local_path("file://localhost/x") == "/x"
    assert local_path("caches/x") == "caches/x"
    with pytest.raises(ConfigError, match="names the host 'other'"):
        local_path("file://other/x")


def test_one_origin_is_one_server() -> None:
    assert origin("https://Host.example.com") == origin("https://host.example.com.:443/path")
    assert origin("https://host") != origin("http://host")
    assert origin("http://host:9000") != origin("http://host:9001")
    assert not is_refused("host.example.com")


@pytest.mark.parametrize("text", ["s3s://bucket/x", "S3S://b", "hdfs://host/x", "ftp://host/x"])
def test_a_scheme_of_no_store_is_no_folder(text: str) -> None:
    with pytest.raises(ConfigError, match="is of no store that forebay knows; known are s3://"):
        url_or_path(text)
