"""Who gets credentials, and who is asked at all. Every request is counted where it arrives, header by header."""

from __future__ import annotations

import base64
import functools
import logging
import os
import pickle
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from forebay.config.remote import RemoteConfig, parse_url
from forebay.errors import ConfigError, RemoteDeniedError, RemoteError
from forebay.store.held import ORIGIN
from forebay.store.remote.bucket.access import Access, Keys, decide, read_profile, store_options
from forebay.store.remote.bucket.bucket import Bucket
from forebay.store.remote.mirror import Mirror
from tests.remote.fake_store import Answer, Asked, FakeStore, error, fake_store

KEY, SECRET, TOKEN = "AKIAEXAMPLEOFAKEY", "wJalrXUtnFEMI-the-secret", "FwoGZXIvYXdz-the-token"
SECRETS = (KEY, SECRET, TOKEN)
QUICK = {"timeout_s": 1.0, "retries": 0}


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without any name of a provider, and a home without profiles."""
    for name in os.environ:
        if name.upper().startswith(("AWS_", "GOOGLE", "AZURE", "FOREBAY_ALLOW_HTTP")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def with_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


def hello(asked: Asked) -> Answer:
    return Answer(body=b"hello")


@pytest.fixture
def store() -> Iterator[FakeStore]:
    """A store that says hello."""
    with fake_store(hello) as store:
        yield store


def bucket(url: str = "s3://bucket/folder", **settings: Any) -> Bucket:
    return Bucket(parse_url(url), RemoteConfig(**(QUICK | settings)))


def profiles(home: Path, *, config: str = "", credentials: str = "") -> None:
    (home / ".aws").mkdir(exist_ok=True)
    (home / ".aws/config").write_text(config)
    (home / ".aws/credentials").write_text(credentials)


def keys_of(store: FakeStore) -> list[str]:
    """Returns the access keys that a store was shown."""
    return [asked.headers["authorization"].partition("Credential=")[2].partition("/")[0] for asked in store.asked]


def is_unsigned(asked: Asked) -> bool:
    shown = str(asked.headers) + str(asked.query)
    return "authorization" not in asked.headers and not any(secret in shown for secret in SECRETS)


@pytest.mark.usefixtures("with_keys")
def test_the_endpoint_of_the_environment_gets_its_keys(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(variable, store.endpoint)
        assert bucket().read("name") == b"hello"
        # A config that names the same address, in other words, is no stranger's.
        assert bucket(endpoint=store.endpoint + "/").read("name") == b"hello"
        monkeypatch.delenv(variable)
    assert keys_of(store) == [KEY] * 6
    assert {asked.headers["x-amz-security-token"] for asked in store.asked} == {TOKEN}
    assert {asked.path for asked in store.asked} == {"/bucket/folder/name"}


@pytest.mark.usefixtures("with_keys")
def test_an_endpoint_that_only_a_config_names_is_refused(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"s3://bucket/folder: .*set AWS_ENDPOINT_URL_S3=http://127.*anonymous = true"
    ):
        bucket(endpoint=store.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://other.example.com")
    with pytest.raises(ConfigError, match=r"they name https://other\.example\.com"):
        bucket(endpoint=store.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="neither the environment nor the profile names"):
        bucket(endpoint=store.endpoint)
    assert store.asked == []


@pytest.mark.usefixtures("with_keys")
def test_a_stranger_who_is_asked_anonymously_sees_no_key(
    store: FakeStore, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles(bare, credentials=f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    with fake_store(hello, host="127.0.0.2") as own:
        # obstore takes this variable before any endpoint that it is told.
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", own.endpoint)
        # obstore sends this key with every request, signed or not.
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "sse-c")
        monkeypatch.setenv(
            "AWS_SSE_CUSTOMER_KEY_BASE64", base64.b64encode(b"a customer's key, of 32 bytes 32").decode()
        )
        stranger = bucket(endpoint=store.endpoint, anonymous=True)
        assert stranger.read("name") == b"hello"
        stranger.info("name")
        stranger.put("name", b"hello")
        assert own.asked == []
    assert len(store.asked) >= 3
    assert all(map(is_unsigned, store.asked))
    assert not any("customer" in name for asked in store.asked for name in asked.headers)


def test_anonymous_looks_for_no_credential(store: FakeStore, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles(bare, credentials="this is no ini file")
    monkeypatch.setenv("AWS_PROFILE", "missing")
    assert bucket(endpoint=store.endpoint, anonymous=True).read("name") == b"hello"
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert bucket(endpoint=store.endpoint).read("name") == b"hello"
    assert all(map(is_unsigned, store.asked))


@pytest.mark.usefixtures("with_keys")
def test_https_urls_carry_no_credentials(store: FakeStore) -> None:
    place = bucket(f"{store.endpoint}/folder")
    assert place.read("name") == b"hello"
    assert [asked.path for asked in store.asked] == ["/folder/name"]
    assert all(map(is_unsigned, store.asked))


@pytest.mark.usefixtures("with_keys")
@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_another_host_sees_no_authorization_after_a_redirect(
    store: FakeStore, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(asked: Asked) -> Answer:
        return Answer(status=status, headers={"Location": store.endpoint + asked.path})

    monkeypatch.delenv("AWS_SESSION_TOKEN")
    with fake_store(elsewhere, host="127.0.0.2") as first:
        monkeypatch.setenv("AWS_ENDPOINT_URL", first.endpoint)
        bucket().read("name")
        assert keys_of(first) == [KEY]
        bucket(f"{first.endpoint}/folder").read("name")
    assert len(store.asked) == 2
    assert all(map(is_unsigned, store.asked))


@pytest.fixture
def self_signed(tmp_path: Path) -> ssl.SSLContext:
    """A certificate for 127.0.0.1 that nobody has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, *form) + certificate.public_bytes(serialization.Encoding.PEM)
    (tmp_path / "both.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "both.pem")
    return context


def test_https_leads_to_no_plain_http(
    self_signed: ssl.SSLContext, store: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(asked: Asked) -> Answer:
        return Answer(status=307, headers={"Location": store.endpoint + asked.path})

    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "both.pem"))
    with fake_store(elsewhere, tls=self_signed) as first:
        monkeypatch.setenv("AWS_ENDPOINT_URL", first.endpoint)
        for place in (bucket(f"{first.endpoint}/folder"), bucket(anonymous=True)):
            with pytest.raises(RemoteError, match="folder/name: "):
                place.read("name")
        assert len(first.asked) == 2
    assert store.asked == []


@pytest.mark.usefixtures("with_keys")
def test_certificates_are_checked_whatever_the_environment_says(
    self_signed: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ALLOW_INVALID_CERTIFICATES", "true")
    with fake_store(hello, tls=self_signed) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        for place in (bucket(), bucket(f"{store.endpoint}/folder")):
            with pytest.raises(
                RemoteError, match=r"folder/name: its certificate is refused \(UnknownIssuer\); .*SSL_CERT"
            ):
                place.read("name")
        assert store.asked == []


OWN = (
    "https://s3.amazonaws.com",
    "https://s3.eu-central-1.amazonaws.com",
    "https://s3-eu-west-1.amazonaws.com",
    "https://bucket.s3.us-west-2.amazonaws.com",
    "https://s3.dualstack.us-east-1.amazonaws.com",
    "https://s3-fips.us-gov-west-1.amazonaws.com",
    "https://s3.cn-north-1.amazonaws.com.cn",
)
NOT_OWN = (
    "https://amazonaws.com",
    "https://s3.amazonaws.com:8443",
    "https://s3.amazonaws.com.evil.example.com",
    "https://evils3.amazonaws.com",
    "https://ec2-1-2-3-4.compute-1.amazonaws.com",
    "https://abc123.execute-api.us-east-1.amazonaws.com",
    "https://s3-123456.us-east-1.elb.amazonaws.com",
    "https://s3.us-east-1.elb.amazonaws.com",
    "https://bucket.s3-website-us-east-1.amazonaws.com",
    "https://storage.googleapis.com",
)


@pytest.mark.usefixtures("with_keys")
def test_hosts_of_the_provider_are_its_stores_and_not_what_others_rent_there() -> None:
    for endpoint in OWN:
        assert decide(parse_url("s3://bucket"), RemoteConfig(endpoint=endpoint)).identity == "the environment"
    for endpoint in NOT_OWN:
        with pytest.raises(ConfigError, match="neither the environment nor the profile names"):
            decide(parse_url("s3://bucket"), RemoteConfig(endpoint=endpoint))


def test_google_and_azure_have_the_same_rule(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=1&sig={TOKEN}")
    for url, variable, own in (
        ("gs://bucket/x", "GOOGLE_BASE_URL", "https://storage.googleapis.com"),
        ("az://container/x", "AZURE_STORAGE_ENDPOINT", "https://account.blob.core.windows.net"),
    ):
        with pytest.raises(ConfigError, match=f"set {variable}={store.endpoint} in the environment"):
            bucket(url, endpoint=store.endpoint)
        decide(parse_url(url), RemoteConfig(endpoint=own))
        assert bucket(url, endpoint=store.endpoint, anonymous=True).read("name") == b"hello"
        assert is_unsigned(store.asked[-1])
        monkeypatch.setenv(variable, store.endpoint)
        assert bucket(url).read("name") == b"hello"
        assert not is_unsigned(store.asked[-1])
    for endpoint in ("https://other.blob.core.windows.net", "https://account.evil.core.windows.net"):
        with pytest.raises(ConfigError, match="neither the environment nor the profile names"):
            bucket("az://container/x", endpoint=endpoint)


def test_a_profile_gives_keys_region_and_endpoint(
    store: FakeStore, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = f"[default]\nregion = eu-north-1\n[profile lab]\nregion = eu-west-3\nendpoint_url = {store.endpoint}\n"
    credentials = (
        "[default]\naws_access_key_id = AKIADEFAULT\naws_secret_access_key = x\n"
        f"[lab]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
    )
    profiles(bare, config=config, credentials=credentials)
    assert decide(parse_url("s3://b"), RemoteConfig()).identity == "the profile 'default'"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    lab = bucket()
    assert lab.read("name") == b"hello"
    assert keys_of(store) == [KEY]
    assert "/eu-west-3/" in store.asked[0].headers["authorization"]
    assert store.asked[0].headers["x-amz-security-token"] == TOKEN
    assert bucket(endpoint=store.endpoint, region="eu-west-1").read("name") == b"hello"
    assert "/eu-west-1/" in store.asked[1].headers["authorization"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
    monkeypatch.setenv("AWS_REGION", "sa-east-1")
    assert bucket().read("name") == b"hello"
    assert keys_of(store)[2] == "AKIAENVIRONMENT"
    assert "/sa-east-1/" in store.asked[2].headers["authorization"]


def test_the_files_of_profiles_may_lie_elsewhere(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare / "c").write_text("[profile x]\nregion = eu-west-3\naws_access_key_id = old\naws_secret_access_key = old\n")
    (bare / "k").write_text(f"[x]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(bare / "c"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(bare / "k"))
    monkeypatch.setenv("AWS_PROFILE", "x")
    found = read_profile()
    assert (found.region, found.endpoint) == ("eu-west-3", None)
    assert found.required_keys().access_key_id == KEY


def test_keys_that_a_login_writes_anew_are_read_anew(bare: Path) -> None:
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = {}\n"
    profiles(bare, credentials=text.format("AKIAOLD", "old"))
    url = parse_url("s3://bucket")
    ask = store_options(url, decide(url, RemoteConfig()))["credential_provider"]
    assert ask()["access_key_id"] == "AKIAOLD"
    profiles(bare, credentials=text.format("AKIANEW", "new"))
    found = ask()
    assert (found["access_key_id"], found["secret_access_key"], found["token"]) == ("AKIANEW", "new", None)
    assert timedelta(minutes=10) < found["expires_at"] - datetime.now(UTC) < timedelta(minutes=20)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ("", r"AWS_PROFILE names the profile 'lab', which is not in .*run: aws configure --profile lab"),
        ("[profile lab]\nsso_session = x\n", r"it has sso_session, .*aws configure export-credentials --profile lab"),
        ("[profile lab]\nregion = x\n", r"no aws_access_key_id and aws_secret_access_key in .*: it has region"),
        (f"[profile lab\n{SECRET}\n", r"config is no ini file \(MissingSectionHeaderError\); run: aws configure"),
    ],
)
def test_a_profile_without_keys_says_what_to_run(
    config: str, what: str, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles(bare, config=config)
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(ConfigError, match=what) as caught:
        bucket()
    assert SECRET not in str(caught.value)


def test_a_role_of_the_machine_comes_before_a_profile_that_nobody_named(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles(bare, credentials=f"[default]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    assert decide(parse_url("s3://b"), RemoteConfig()).identity == "the role of this machine"
    monkeypatch.setenv("AWS_PROFILE", "default")
    assert decide(parse_url("s3://b"), RemoteConfig()).identity == "the profile 'default'"


def test_a_name_that_leads_to_a_link_local_address_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(*args: object, **options: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ("10.0.0.1", "169.254.169.254")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    for place in (
        bucket(endpoint="https://harmless.example.com", anonymous=True),
        bucket("https://harmless.example.com/folder"),
    ):
        with pytest.raises(ConfigError, match=r"harmless\.example\.com leads to 169\.254\.169\.254, a link-local"):
            place.read("name")


@pytest.mark.parametrize(
    "endpoint", ["http://169.254.169.254", "http://store.example.com", "https://u:p@host", "host:80"]
)
def test_the_environments_endpoint_has_the_same_rules(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ConfigError, match=r"link-local|plain http|holds a user|no address of a store"):
        bucket()


def _echoing(asked: Asked) -> Answer:
    """A store that says everything back, as AWS does for a wrong signature."""
    shown = f"<Token-0>{asked.headers}</Token-0><AWSAccessKeyId>{KEY}</AWSAccessKeyId>"
    message = f"you sent {asked.headers.get('x-amz-security-token')} {asked.query} {SECRET}"
    body = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{message}</Message>{shown}</Error>"
    return Answer(status=int(asked.path.rpartition("-")[2]), body=body.encode())


@pytest.mark.usefixtures("with_keys")
@pytest.mark.parametrize("status", [400, 403, 404, 412, 416, 500, 503])
def test_no_message_log_repr_or_origin_holds_a_secret(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", f"sv=2020&sig={TOKEN}")
    said: list[str] = []
    with fake_store(_echoing) as store:
        for url in ("s3://bucket/folder", "az://container/folder"):
            monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
            monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", store.endpoint)
            settings = RemoteConfig(timeout_s=0.5, retries=1, shard_dir=str(tmp_path / "node"))
            place = Bucket(parse_url(url), settings)
            asks: list[Callable[[str], object]] = [
                place.read,
                place.info,
                functools.partial(place.put, data=b"x"),
                functools.partial(place.put, data=b"x", create=True),
            ]
            for ask in asks:
                with pytest.raises(RemoteError, match=f"{url}/name-{status}") as caught:
                    ask(f"name-{status}")
                # Not even where a traceback is shown with its context.
                assert caught.value.__cause__ is caught.value.__context__ is None
                said += [str(caught.value), repr(caught.value)]
            said += [repr(place), str(vars(place)), repr(place._store()), str(pickle.dumps(place))]
            said += [path.read_text() for path in [Mirror.at(parse_url(url), settings).folder / ORIGIN]]
    assert len(store.asked) >= 8
    for text in (*said, caplog.text):
        assert not any(secret in text for secret in SECRETS), text


@given(st.text(), st.sampled_from([(KEY, SECRET, TOKEN)]))
def test_an_access_shows_no_keys(text: str, secrets: tuple[str, str, str]) -> None:
    keys = Keys(access_key_id=secrets[0], secret_access_key=secrets[1], session_token=secrets[2])
    shown = repr(Access(endpoint=None, region=text, identity="x", is_anonymous=False, keys=keys)) + repr(keys)
    assert not any(secret in shown for secret in secrets)


@pytest.mark.usefixtures("with_keys")
@pytest.mark.parametrize(
    ("anonymous", "identity"),
    [
        (False, "as the environment; ask the bucket's owner"),
        (True, "as anonymous; set credentials and remote.anonymous"),
    ],
)
def test_who_was_denied_is_named(anonymous: bool, identity: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001
    with fake_store(lambda _: error(403, "AccessDenied")) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        with pytest.raises(
            RemoteDeniedError, match=f"s3://bucket/folder/name: denied, 403 Forbidden.*AccessDenied.*{identity}"
        ):
            bucket(anonymous=anonymous).info("name")
